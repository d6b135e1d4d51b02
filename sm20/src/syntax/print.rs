//! The disassembler.

use std::fmt::{self, Display, Formatter, Write};

use super::{Kind, Sign, Visitor, registers, walk};
use crate::ir::*;

impl Display for Register {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.is_zero() { f.write_str("RZ") } else { write!(f, "R{}", self.index()) }
    }
}

impl Display for Predicate {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.is_true() { f.write_str("PT") } else { write!(f, "P{}", self.index()) }
    }
}

impl Display for PredicateOperand {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.negate { "!" } else { "" }, self.predicate)
    }
}

impl Display for ConstAddress {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "c[{:#x}][{:#x}]", self.bank, self.offset)
    }
}

impl Display for Address {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match (self.base.is_zero(), self.offset) {
            (_, 0) => write!(f, "[{}]", self.base),
            // Always print a 64-bit base, even if it is RZ, because `.E` needs a register.
            (true, offset) if !self.wide && offset > 0 => write!(f, "[{offset:#x}]"),
            (_, offset) => write!(f, "[{}{}]", self.base, Displacement(offset)),
        }
    }
}

impl Display for SpecialRegister {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match Self::NAMES.iter().find(|(register, _)| register == self) {
            Some((_, name)) => f.write_str(name),
            None => write!(f, "SR_{:#x}", self.0),
        }
    }
}

/// A signed number that is always printed with its sign.
struct Displacement(i32);

impl Display for Displacement {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:#x}", if self.0 < 0 { '-' } else { '+' }, self.0.unsigned_abs())
    }
}

/// An instruction in assembler syntax, without a semicolon. Relative targets are written as `pc+0x10`, where the number
/// is a distance in bytes from the end of the instruction.
impl Display for Instruction {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if let Op::Unsupported { name, word } = self.op {
            return match self.form {
                Form::Long => write!(f, ".quad {word:#018x} // {name}"),
                Form::Short => write!(f, ".word {word:#010x} // {name}"),
            };
        }
        if self.guard != PredicateOperand::TRUE {
            write!(f, "@{} ", self.guard)?;
        }
        let mut printer = Printer::default();
        let mut op = self.op;
        walk(&mut op, &mut printer)?;
        f.write_str(op.mnemonic())?;
        f.write_str(if printer.long { "32I" } else { "" })?;
        f.write_str(if self.join { ".S" } else { "" })?;
        f.write_str(&printer.suffixes)?;
        f.write_str(if self.form == Form::Short { ".E32" } else { "" })?;
        f.write_str(&printer.operands)
    }
}

impl Op {
    /// Calls `found` with each register that the operation reads or writes, including RZ, and with the number of
    /// registers in the group that starts there (1, 2 or 4).
    pub fn registers(&self, mut found: impl FnMut(Register, u8)) {
        registers(self, &mut found);
    }
}

/// Collects suffixes and operands, which a visit may report in any order.
#[derive(Default)]
struct Printer {
    suffixes: String,
    operands: String,
    /// True if any operand is a 32-bit immediate.
    long: bool,
}

impl Printer {
    fn suffix(&mut self, name: &str) -> fmt::Result {
        write!(self.suffixes, ".{name}")
    }

    fn operand(&mut self, text: impl Display) -> fmt::Result {
        let separator = if self.operands.is_empty() { " " } else { ", " };
        write!(self.operands, "{separator}{text}")
    }

    fn source_text(&mut self, source: Source, kind: Kind) -> String {
        match source {
            Source::Register(register) => register.to_string(),
            Source::Constant(address) => address.to_string(),
            Source::Immediate(value) => immediate(value, kind),
            Source::LongImmediate(value) => {
                self.long = true;
                if kind == Kind::Float { immediate(value, kind) } else { format!("{value:#x}") }
            }
        }
    }
}

/// Formats an immediate. Finite floats are decimal. Doubles are derived from their upper word.
fn immediate(value: u32, kind: Kind) -> String {
    match kind {
        Kind::Int | Kind::Long => {
            let signed = value.cast_signed();
            format!("{}{:#x}", if signed < 0 { "-" } else { "" }, signed.unsigned_abs())
        }
        Kind::Float if f32::from_bits(value).is_finite() => format!("{:?}", f32::from_bits(value)),
        Kind::Double if double(value).is_finite() => format!("{:?}", double(value)),
        Kind::Float | Kind::Double => format!("{value:#x}"),
    }
}

/// Returns the double with this upper word.
fn double(upper: u32) -> f64 {
    f64::from_bits(u64::from(upper).wrapping_shl(32))
}

/// Adds a prefix to a name, or to a number, which is then parenthesized.
fn prefixed(prefix: &str, text: &str) -> String {
    if prefix.is_empty() || text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '|') {
        format!("{prefix}{text}")
    } else {
        format!("{prefix}({text})")
    }
}

impl Visitor for Printer {
    type Error = fmt::Error;

    fn flag(&mut self, name: &'static str, value: &mut bool) -> fmt::Result {
        if *value { self.suffix(name) } else { Ok(()) }
    }

    fn code<T: Code>(&mut self, value: &mut T, shown: bool) -> fmt::Result {
        if shown || *value != T::default() { self.required(value) } else { Ok(()) }
    }

    fn required<T: Code>(&mut self, value: &mut T) -> fmt::Result {
        let (.., name) = T::TABLE.iter().find(|(known, ..)| known == value).ok_or(fmt::Error)?;
        self.suffix(name)
    }

    fn signs(&mut self, a: &mut bool, b: &mut bool) -> fmt::Result {
        if *a && *b {
            return Ok(());
        }
        self.suffix(if *a { "S32" } else { "U32" })?;
        self.suffix(if *b { "S32" } else { "U32" })
    }

    fn dst(&mut self, dst: &mut Register, _: u8, cc: Option<&mut bool>) -> fmt::Result {
        let suffix = if cc.is_some_and(|cc| *cc) { ".CC" } else { "" };
        self.operand(format_args!("{dst}{suffix}"))
    }

    fn reg(&mut self, register: &mut Register, _: u8) -> fmt::Result {
        self.operand(register)
    }

    fn pred(&mut self, predicate: &mut Predicate) -> fmt::Result {
        self.operand(predicate)
    }

    fn pred_op(&mut self, predicate: &mut PredicateOperand, _: bool) -> fmt::Result {
        self.operand(predicate)
    }

    fn source(&mut self, source: &mut Source, kind: Kind) -> fmt::Result {
        let text = self.source_text(*source, kind);
        self.operand(text)
    }

    fn signed(&mut self, source: &mut Source, set: &mut bool, sign: Sign, kind: Kind) -> fmt::Result {
        let text = self.source_text(*source, kind);
        let prefix = match (*set, sign) {
            (false, _) => "",
            (true, Sign::Minus) => "-",
            (true, Sign::Invert) => "~",
        };
        self.operand(prefixed(prefix, &text))
    }

    fn float(&mut self, operand: &mut FloatOperand, kind: Kind) -> fmt::Result {
        let mut text = self.source_text(operand.source, kind);
        if operand.absolute {
            text = format!("|{text}|");
        }
        self.operand(prefixed(if operand.negate { "-" } else { "" }, &text))
    }

    fn address(&mut self, address: &mut Address) -> fmt::Result {
        self.operand(address)
    }

    fn constant(&mut self, bank: &mut u8, base: &mut Register, offset: &mut i16) -> fmt::Result {
        let address = Address { base: *base, offset: (*offset).into(), wide: false };
        self.operand(format_args!("c[{bank:#x}]{address}"))
    }

    fn number(&mut self, value: &mut u32, default: Option<u32>) -> fmt::Result {
        if default == Some(*value) { Ok(()) } else { self.operand(format_args!("{value:#x}")) }
    }

    fn word(&mut self, word: &'static str) -> fmt::Result {
        self.operand(word)
    }

    fn special(&mut self, special: &mut SpecialRegister) -> fmt::Result {
        self.operand(special)
    }

    fn target(&mut self, target: &mut Target, _: bool) -> fmt::Result {
        match target {
            Target::Relative(offset) => self.operand(format_args!("pc{}", Displacement(*offset))),
            Target::Absolute(address) => self.operand(format_args!("{address:#x}")),
            Target::Constant(address) => self.operand(address),
        }
    }

    fn test(&mut self, test: &mut CcTest) -> fmt::Result {
        let (.., name) = CcTest::TABLE.iter().find(|(known, ..)| known == test).ok_or(fmt::Error)?;
        if *test == CcTest::default() { Ok(()) } else { self.operand(format_args!("CC.{name}")) }
    }

    fn barrier(&mut self, operand: &mut BarrierOperand, last: bool) -> fmt::Result {
        match operand {
            BarrierOperand::Register(register) if last && register.is_zero() => Ok(()),
            BarrierOperand::Register(register) => self.operand(register),
            BarrierOperand::Immediate(value) => self.operand(format_args!("{value:#x}")),
        }
    }

    fn reject(&mut self, _: &'static str) -> fmt::Error {
        fmt::Error
    }
}
