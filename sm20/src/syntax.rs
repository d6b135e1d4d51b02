//! Syntax of instructions, with one description of each operation's suffixes and operands that is shared by the
//! disassembler, the assembler and the register count.

mod arithmetic;
mod flow;
mod print;
mod registers;

use crate::ir::*;

/// Kind of an operand's value. It determines the text of an immediate and the number of registers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// 32-bit integer or bits.
    Int,
    /// 64-bit integer in a register pair.
    Long,
    /// Single precision.
    Float,
    /// Double precision in a register pair.
    Double,
}

impl Kind {
    /// Returns the number of registers of a value.
    pub(crate) const fn registers(self) -> u8 {
        match self {
            Self::Int | Self::Float => 1,
            Self::Long | Self::Double => 2,
        }
    }
}

/// A prefix of an operand.
#[derive(Clone, Copy)]
pub(crate) enum Sign {
    /// `-`
    Minus,
    /// `~`
    Invert,
}

/// A visitor of an instruction's suffixes and operands, in written order. The visitor reads or sets them.
pub(crate) trait Visitor {
    /// Error that ends a visit.
    type Error;

    /// Visits a suffix that is present if the value is true.
    fn flag(&mut self, name: &'static str, value: &mut bool) -> Result<(), Self::Error>;

    /// Visits a suffix that is one of a modifier's names. The default may be omitted, but is written if `shown` is
    /// true.
    fn code<T: Code>(&mut self, value: &mut T, shown: bool) -> Result<(), Self::Error>;

    /// Visits a mandatory suffix that is one of a modifier's names.
    fn required<T: Code>(&mut self, value: &mut T) -> Result<(), Self::Error>;

    /// Visits the two signedness suffixes of a multiplication's operands, unless both are signed.
    fn signs(&mut self, a: &mut bool, b: &mut bool) -> Result<(), Self::Error>;

    /// Visits a destination of `count` registers, with `.CC` if present.
    fn dst(&mut self, dst: &mut Register, count: u8, cc: Option<&mut bool>) -> Result<(), Self::Error>;

    /// Visits a register that starts a group of `count` registers.
    fn reg(&mut self, register: &mut Register, count: u8) -> Result<(), Self::Error>;

    /// Visits a destination predicate.
    fn pred(&mut self, predicate: &mut Predicate) -> Result<(), Self::Error>;

    /// Visits a source predicate. A `last` operand may be omitted if it is PT.
    fn pred_op(&mut self, predicate: &mut PredicateOperand, last: bool) -> Result<(), Self::Error>;

    /// Visits a register, constant or immediate.
    fn source(&mut self, source: &mut Source, kind: Kind) -> Result<(), Self::Error>;

    /// Visits a register, constant or immediate with an optional sign prefix.
    fn signed(&mut self, source: &mut Source, set: &mut bool, sign: Sign, kind: Kind) -> Result<(), Self::Error>;

    /// Visits a floating-point operand.
    fn float(&mut self, operand: &mut FloatOperand, kind: Kind) -> Result<(), Self::Error>;

    /// Visits an address such as `[R0+0x10]`, where `wide` is a suffix.
    fn address(&mut self, address: &mut Address) -> Result<(), Self::Error>;

    /// Visits `c[bank][R0+0x10]`.
    fn constant(&mut self, bank: &mut u8, base: &mut Register, offset: &mut i16) -> Result<(), Self::Error>;

    /// Visits a number. A trailing number with a default may be omitted.
    fn number(&mut self, value: &mut u32, default: Option<u32>) -> Result<(), Self::Error>;

    /// Visits a fixed keyword.
    fn word(&mut self, word: &'static str) -> Result<(), Self::Error>;

    /// Visits a special register.
    fn special(&mut self, special: &mut SpecialRegister) -> Result<(), Self::Error>;

    /// Visits a branch target.
    fn target(&mut self, target: &mut Target, absolute: bool) -> Result<(), Self::Error>;

    /// Visits a test such as `CC.LT`, which may be omitted if it is CC.T.
    fn test(&mut self, test: &mut CcTest) -> Result<(), Self::Error>;

    /// Visits a barrier number or count. A count may be omitted if it is RZ.
    fn barrier(&mut self, operand: &mut BarrierOperand, last: bool) -> Result<(), Self::Error>;

    /// Returns an error that rejects a value for the reason `why`.
    fn reject(&mut self, why: &'static str) -> Self::Error;
}

/// Visits an operation.
pub(crate) fn walk<V: Visitor>(op: &mut Op, v: &mut V) -> Result<(), V::Error> {
    if arithmetic::integer(op, v)? || arithmetic::float(op, v)? || flow::moves(op, v)? || flow::memory(op, v)? {
        return Ok(());
    }
    flow::control(op, v)
}

/// Visits a suffix that is present if the value is false.
fn unless<V: Visitor>(v: &mut V, name: &'static str, value: &mut bool) -> Result<(), V::Error> {
    let mut not = !*value;
    v.flag(name, &mut not)?;
    *value = !not;
    Ok(())
}

/// Visits a one-byte number.
fn small<V: Visitor>(v: &mut V, value: &mut u8, default: Option<u32>) -> Result<(), V::Error> {
    let mut wide = u32::from(*value);
    v.number(&mut wide, default)?;
    *value = u8::try_from(wide).map_err(|_| v.reject("the number does not fit its field"))?;
    Ok(())
}

pub(crate) use registers::registers;
