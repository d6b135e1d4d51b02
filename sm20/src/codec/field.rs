//! Fields of encodings. A field stores its bit positions, and reads or writes an operand at these bits.

use std::marker::PhantomData;

use super::bits::{low8, low16, low32, mask, place, place_signed, take, take_signed};
use crate::ir::*;

/// Reason why a field has no value, or why a value does not fit in a field.
pub(crate) type Reason = &'static str;

const NOT_A_REGISTER: Reason = "only a register can be encoded here";
const TOO_WIDE: Reason = "the value does not fit its field";
const NO_CODE: Reason = "the field has no meaning for this value";
const SUCH_SOURCE: Reason = "this kind of operand cannot be encoded here";
const RESERVED: Reason = "bits that the operand's kind leaves unused are set";

/// A field of an encoding.
pub(super) trait Field {
    /// Type of the field's value.
    type Value;

    /// Returns the mask of the field's bits.
    fn mask(&self) -> u64;

    /// Returns the field's value in `word`.
    fn get(&self, word: u64) -> Result<Self::Value, Reason>;

    /// Returns a word with `value` in this field and zeros elsewhere.
    fn put(&self, value: Self::Value) -> Result<u64, Reason>;
}

/// A register at a bit position.
pub(super) struct Reg(pub u32);

impl Field for Reg {
    type Value = Register;

    fn mask(&self) -> u64 {
        mask(self.0, 6)
    }

    fn get(&self, word: u64) -> Result<Register, Reason> {
        Register::new(low8(take(word, self.0, 6))).ok_or(NO_CODE)
    }

    fn put(&self, value: Register) -> Result<u64, Reason> {
        place(value.index().into(), self.0, 6).ok_or(TOO_WIDE)
    }
}

/// A predicate at a bit position.
pub(super) struct Pred(pub u32);

impl Field for Pred {
    type Value = Predicate;

    fn mask(&self) -> u64 {
        mask(self.0, 3)
    }

    fn get(&self, word: u64) -> Result<Predicate, Reason> {
        Predicate::new(low8(take(word, self.0, 3))).ok_or(NO_CODE)
    }

    fn put(&self, value: Predicate) -> Result<u64, Reason> {
        place(value.index().into(), self.0, 3).ok_or(TOO_WIDE)
    }
}

/// A predicate in two parts: two low bits and one high bit.
pub(super) struct SplitPred {
    pub low: u32,
    pub high: u32,
}

impl Field for SplitPred {
    type Value = Predicate;

    fn mask(&self) -> u64 {
        mask(self.low, 2) | mask(self.high, 1)
    }

    fn get(&self, word: u64) -> Result<Predicate, Reason> {
        let index = take(word, self.low, 2) | take(word, self.high, 1).wrapping_shl(2);
        Predicate::new(low8(index)).ok_or(NO_CODE)
    }

    fn put(&self, value: Predicate) -> Result<u64, Reason> {
        let index = u64::from(value.index());
        let low = place(index & 3, self.low, 2).ok_or(TOO_WIDE)?;
        Ok(low | place(take(index, 2, 1), self.high, 1).ok_or(TOO_WIDE)?)
    }
}

/// A predicate and its negation bit.
pub(super) struct PredOp {
    pub at: u32,
    pub not: u32,
}

impl Field for PredOp {
    type Value = PredicateOperand;

    fn mask(&self) -> u64 {
        mask(self.at, 3) | mask(self.not, 1)
    }

    fn get(&self, word: u64) -> Result<PredicateOperand, Reason> {
        Ok(PredicateOperand { predicate: Pred(self.at).get(word)?, negate: Flag(self.not).get(word)? })
    }

    fn put(&self, value: PredicateOperand) -> Result<u64, Reason> {
        Ok(Pred(self.at).put(value.predicate)? | Flag(self.not).put(value.negate)?)
    }
}

/// One bit.
pub(super) struct Flag(pub u32);

impl Field for Flag {
    type Value = bool;

    fn mask(&self) -> u64 {
        mask(self.0, 1)
    }

    fn get(&self, word: u64) -> Result<bool, Reason> {
        Ok(take(word, self.0, 1) != 0)
    }

    fn put(&self, value: bool) -> Result<u64, Reason> {
        place(value.into(), self.0, 1).ok_or(TOO_WIDE)
    }
}

/// An unsigned number of up to 8 bits.
pub(super) struct Num8 {
    pub at: u32,
    pub width: u32,
}

impl Field for Num8 {
    type Value = u8;

    fn mask(&self) -> u64 {
        mask(self.at, self.width)
    }

    fn get(&self, word: u64) -> Result<u8, Reason> {
        Ok(low8(take(word, self.at, self.width)))
    }

    fn put(&self, value: u8) -> Result<u64, Reason> {
        place(value.into(), self.at, self.width).ok_or(TOO_WIDE)
    }
}

/// An unsigned number of up to 16 bits.
pub(super) struct Num16 {
    pub at: u32,
    pub width: u32,
}

impl Field for Num16 {
    type Value = u16;

    fn mask(&self) -> u64 {
        mask(self.at, self.width)
    }

    fn get(&self, word: u64) -> Result<u16, Reason> {
        Ok(low16(take(word, self.at, self.width)))
    }

    fn put(&self, value: u16) -> Result<u64, Reason> {
        place(value.into(), self.at, self.width).ok_or(TOO_WIDE)
    }
}

/// A signed 16-bit number.
pub(super) struct Signed16 {
    pub at: u32,
}

impl Field for Signed16 {
    type Value = i16;

    fn mask(&self) -> u64 {
        mask(self.at, 16)
    }

    fn get(&self, word: u64) -> Result<i16, Reason> {
        Ok(low16(take(word, self.at, 16)).cast_signed())
    }

    fn put(&self, value: i16) -> Result<u64, Reason> {
        place(value.cast_unsigned().into(), self.at, 16).ok_or(TOO_WIDE)
    }
}

/// An unsigned number of up to 32 bits.
pub(super) struct Num32 {
    pub at: u32,
    pub width: u32,
}

impl Field for Num32 {
    type Value = u32;

    fn mask(&self) -> u64 {
        mask(self.at, self.width)
    }

    fn get(&self, word: u64) -> Result<u32, Reason> {
        Ok(low32(take(word, self.at, self.width)))
    }

    fn put(&self, value: u32) -> Result<u64, Reason> {
        place(value.into(), self.at, self.width).ok_or(TOO_WIDE)
    }
}

/// A special register number.
pub(super) struct Special(pub u32);

impl Field for Special {
    type Value = SpecialRegister;

    fn mask(&self) -> u64 {
        mask(self.0, 8)
    }

    fn get(&self, word: u64) -> Result<SpecialRegister, Reason> {
        Ok(SpecialRegister(low8(take(word, self.0, 8))))
    }

    fn put(&self, value: SpecialRegister) -> Result<u64, Reason> {
        place(value.0.into(), self.0, 8).ok_or(TOO_WIDE)
    }
}

/// A modifier field.
pub(super) struct Coded<T> {
    at: u32,
    width: u32,
    of: PhantomData<T>,
}

/// Creates a modifier field of full width.
pub(super) const fn coded<T: Code>(at: u32) -> Coded<T> {
    narrow(at, T::WIDTH)
}

/// Creates a modifier field that supports only the values whose codes fit in `width` bits.
pub(super) const fn narrow<T: Code>(at: u32, width: u32) -> Coded<T> {
    Coded { at, width, of: PhantomData }
}

impl<T: Code> Field for Coded<T> {
    type Value = T;

    fn mask(&self) -> u64 {
        mask(self.at, self.width)
    }

    fn get(&self, word: u64) -> Result<T, Reason> {
        let code = take(word, self.at, self.width);
        let entry = T::TABLE.iter().find(|(_, c, _)| u64::from(*c) == code);
        entry.map(|(value, ..)| *value).ok_or(NO_CODE)
    }

    fn put(&self, value: T) -> Result<u64, Reason> {
        let (_, code, _) = T::TABLE.iter().find(|(v, ..)| *v == value).ok_or(NO_CODE)?;
        place((*code).into(), self.at, self.width).ok_or(NO_CODE)
    }
}

/// A field without bits, because the encoding supports only this value.
pub(super) struct Fixed<T>(pub T);

impl<T: Copy + PartialEq> Field for Fixed<T> {
    type Value = T;

    fn mask(&self) -> u64 {
        0
    }

    fn get(&self, _: u64) -> Result<T, Reason> {
        Ok(self.0)
    }

    fn put(&self, value: T) -> Result<u64, Reason> {
        if value == self.0 { Ok(0) } else { Err("the encoding does not have this modifier or operand") }
    }
}

/// An integer type of a conversion, with a two-bit size at one position and the sign at another.
pub(super) struct Int {
    pub size: u32,
    pub sign: u32,
}

impl Field for Int {
    type Value = IntType;

    fn mask(&self) -> u64 {
        mask(self.size, 2) | mask(self.sign, 1)
    }

    fn get(&self, word: u64) -> Result<IntType, Reason> {
        let code = take(word, self.size, 2).wrapping_shl(1) | take(word, self.sign, 1);
        coded::<IntType>(0).get(code)
    }

    fn put(&self, value: IntType) -> Result<u64, Reason> {
        let code = coded::<IntType>(0).put(value)?;
        let size = place(take(code, 1, 2), self.size, 2).ok_or(TOO_WIDE)?;
        Ok(size | place(code & 1, self.sign, 1).ok_or(TOO_WIDE)?)
    }
}

/// Rule for widening a 20-bit immediate.
#[derive(Clone, Copy)]
pub(super) enum Immediate {
    /// Sign-extended.
    Signed,
    /// The immediate is the upper 20 bits of the word.
    Upper,
}

impl Immediate {
    fn get(self, word: u64) -> Source {
        Source::Immediate(match self {
            Self::Signed => low32(take_signed(word, 26, 20).cast_unsigned()),
            Self::Upper => low32(take(word, 26, 20).wrapping_shl(12)),
        })
    }

    fn put(self, value: u32) -> Result<u64, Reason> {
        match self {
            Self::Signed => {
                place_signed(value.cast_signed().into(), 26, 20).ok_or("the immediate does not fit 20 bits")
            }
            Self::Upper if value & 0xfff == 0 => place(value.wrapping_shr(12).into(), 26, 20).ok_or(TOO_WIDE),
            Self::Upper => Err("the immediate has bits below its upper 20"),
        }
    }
}

/// Reads a constant bank operand. Bits 28 to 41 are the offset in words, bits 42 to 45 are the low bits of the bank
/// number, and bit 26 is the highest bit of the bank number.
fn get_constant(word: u64) -> Result<Source, Reason> {
    if take(word, 27, 1) != 0 {
        return Err(RESERVED);
    }
    let bank = low8(take(word, 42, 4) | take(word, 26, 1).wrapping_shl(4));
    Ok(Source::Constant(ConstAddress { bank, offset: low16(take(word, 28, 14).wrapping_shl(2)) }))
}

fn put_constant(address: ConstAddress) -> Result<u64, Reason> {
    let bank = u64::from(address.bank);
    if bank > 31 {
        return Err("constant banks are numbered 0 to 31");
    }
    if address.offset & 3 != 0 {
        return Err("the constant's offset is not a multiple of 4");
    }
    let offset = u64::from(address.offset).wrapping_shl(26);
    Ok(offset | (bank & 15).wrapping_shl(42) | take(bank, 4, 1).wrapping_shl(26))
}

/// Selectors at bit 46, which determine the operand kind in bits 26 to 45.
mod kind {
    pub(super) const SHIFT: u32 = 46;
    pub(super) const REGISTER: u64 = 0;
    pub(super) const CONSTANT: u64 = 1;
    /// Selector for three-operand instructions: b is the register at bit 49, and c is the constant.
    pub(super) const THIRD_CONSTANT: u64 = 2;
    pub(super) const IMMEDIATE: u64 = 3;
}

const fn selector(value: u64) -> u64 {
    value.wrapping_shl(kind::SHIFT)
}

/// The second operand, which is a register, a constant or a 20-bit immediate.
pub(super) struct Src(pub Immediate);

impl Field for Src {
    type Value = Source;

    fn mask(&self) -> u64 {
        mask(26, 22)
    }

    fn get(&self, word: u64) -> Result<Source, Reason> {
        match take(word, kind::SHIFT, 2) {
            kind::REGISTER if take(word, 32, 14) != 0 => Err(RESERVED),
            kind::REGISTER => Ok(Source::Register(Reg(26).get(word)?)),
            kind::CONSTANT => get_constant(word),
            kind::IMMEDIATE => Ok(self.0.get(word)),
            _ => Err(NO_CODE),
        }
    }

    fn put(&self, value: Source) -> Result<u64, Reason> {
        match value {
            Source::Register(register) => Reg(26).put(register),
            Source::Constant(address) => Ok(put_constant(address)? | selector(kind::CONSTANT)),
            Source::Immediate(value) => Ok(self.0.put(value)? | selector(kind::IMMEDIATE)),
            Source::LongImmediate(_) => Err(SUCH_SOURCE),
        }
    }
}

/// The second and third operands. One of them can be a constant, and the second one can be an immediate.
pub(super) struct SrcPair(pub Immediate);

impl Field for SrcPair {
    type Value = (Source, Source);

    fn mask(&self) -> u64 {
        mask(26, 22) | mask(49, 6)
    }

    fn get(&self, word: u64) -> Result<(Source, Source), Reason> {
        let third = Source::Register(Reg(49).get(word)?);
        if take(word, kind::SHIFT, 2) == kind::THIRD_CONSTANT {
            return Ok((third, get_constant(word)?));
        }
        Ok((Src(self.0).get(word)?, third))
    }

    fn put(&self, (b, c): (Source, Source)) -> Result<u64, Reason> {
        match (b, c) {
            (_, Source::Register(third)) => Ok(Src(self.0).put(b)? | Reg(49).put(third)?),
            (Source::Register(second), Source::Constant(address)) => {
                Ok(put_constant(address)? | selector(kind::THIRD_CONSTANT) | Reg(49).put(second)?)
            }
            _ => Err("the second or the third operand must be a register, and the third is not an immediate"),
        }
    }
}

/// A 32-bit immediate.
pub(super) struct Long;

impl Field for Long {
    type Value = Source;

    fn mask(&self) -> u64 {
        mask(26, 32)
    }

    fn get(&self, word: u64) -> Result<Source, Reason> {
        Ok(Source::LongImmediate(low32(take(word, 26, 32))))
    }

    fn put(&self, value: Source) -> Result<u64, Reason> {
        match value {
            Source::LongImmediate(value) => place(value.into(), 26, 32).ok_or(TOO_WIDE),
            _ => Err(SUCH_SOURCE),
        }
    }
}

/// A destination that is also the third operand.
pub(super) struct DstAndThird;

impl Field for DstAndThird {
    type Value = (Register, Source);

    fn mask(&self) -> u64 {
        mask(14, 6)
    }

    fn get(&self, word: u64) -> Result<(Register, Source), Reason> {
        let dst = Reg(14).get(word)?;
        Ok((dst, Source::Register(dst)))
    }

    fn put(&self, (dst, third): (Register, Source)) -> Result<u64, Reason> {
        if third != Source::Register(dst) {
            return Err("the third operand must be the destination");
        }
        Reg(14).put(dst)
    }
}

/// A floating-point operand, which consists of a source and its modifier bits.
pub(super) struct Float<S> {
    pub source: S,
    pub negate: u32,
    pub absolute: u32,
}

impl<S: Field<Value = Source>> Field for Float<S> {
    type Value = FloatOperand;

    fn mask(&self) -> u64 {
        self.source.mask() | mask(self.negate, 1) | mask(self.absolute, 1)
    }

    fn get(&self, word: u64) -> Result<FloatOperand, Reason> {
        let (negate, absolute) = (Flag(self.negate).get(word)?, Flag(self.absolute).get(word)?);
        Ok(FloatOperand { source: self.source.get(word)?, negate, absolute })
    }

    fn put(&self, value: FloatOperand) -> Result<u64, Reason> {
        let modifiers = Flag(self.negate).put(value.negate)? | Flag(self.absolute).put(value.absolute)?;
        Ok(self.source.put(value.source)? | modifiers)
    }
}

/// A floating-point operand without modifiers.
pub(super) struct Plain<S>(pub S);

impl<S: Field<Value = Source>> Field for Plain<S> {
    type Value = FloatOperand;

    fn mask(&self) -> u64 {
        self.0.mask()
    }

    fn get(&self, word: u64) -> Result<FloatOperand, Reason> {
        Ok(FloatOperand { source: self.0.get(word)?, negate: false, absolute: false })
    }

    fn put(&self, value: FloatOperand) -> Result<u64, Reason> {
        if value.negate || value.absolute {
            return Err("the encoding does not have this modifier");
        }
        self.0.put(value.source)
    }
}

/// A source that is a register.
pub(super) struct RegSrc(pub u32);

impl Field for RegSrc {
    type Value = Source;

    fn mask(&self) -> u64 {
        Reg(self.0).mask()
    }

    fn get(&self, word: u64) -> Result<Source, Reason> {
        Ok(Source::Register(Reg(self.0).get(word)?))
    }

    fn put(&self, value: Source) -> Result<u64, Reason> {
        match value {
            Source::Register(register) => Reg(self.0).put(register),
            _ => Err(NOT_A_REGISTER),
        }
    }
}

/// A barrier number or count. It is a register at `at` or, if bit `select` is set, an immediate of `width` bits at the
/// same position.
pub(super) struct BarrierField {
    pub at: u32,
    pub width: u32,
    pub select: u32,
}

impl Field for BarrierField {
    type Value = BarrierOperand;

    fn mask(&self) -> u64 {
        mask(self.at, self.width.max(6)) | mask(self.select, 1)
    }

    fn get(&self, word: u64) -> Result<BarrierOperand, Reason> {
        let width = if Flag(self.select).get(word)? { self.width } else { 6 };
        if word & mask(self.at, self.width.max(6)) & !mask(self.at, width) != 0 {
            return Err(RESERVED);
        }
        if Flag(self.select).get(word)? {
            return Ok(BarrierOperand::Immediate(low16(take(word, self.at, self.width))));
        }
        Ok(BarrierOperand::Register(Reg(self.at).get(word)?))
    }

    fn put(&self, value: BarrierOperand) -> Result<u64, Reason> {
        match value {
            BarrierOperand::Register(register) => Reg(self.at).put(register),
            BarrierOperand::Immediate(value) => {
                Ok(place(value.into(), self.at, self.width).ok_or(TOO_WIDE)? | Flag(self.select).put(true)?)
            }
        }
    }
}
