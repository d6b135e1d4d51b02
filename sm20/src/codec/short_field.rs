//! Fields that occur only in 32-bit encodings.

use super::bits::{low16, low32, mask, place, place_signed, take, take_signed};
use super::field::{Field, Flag, Reason, Reg, coded};
use crate::ir::*;

const SUCH_SOURCE: Reason = "this kind of operand cannot be encoded in 32 bits";
const TOO_WIDE: Reason = "the value does not fit the 32-bit encoding's field";

/// Constant banks that a short encoding can address. Selector 0 selects a register, and selector `n` selects bank
/// `BANKS[n - 1]`.
const BANKS: [u8; 3] = [0, 1, 16];

/// A register, or one of the first 64 words of a bank in [`BANKS`], at `at`. The selector is at `select`.
pub(super) struct Small {
    pub at: u32,
    pub select: u32,
}

impl Field for Small {
    type Value = Source;

    fn mask(&self) -> u64 {
        mask(self.at, 6) | mask(self.select, 2)
    }

    fn get(&self, word: u64) -> Result<Source, Reason> {
        let bank = match take(word, self.select, 2) {
            0 => return Ok(Source::Register(Reg(self.at).get(word)?)),
            1 => BANKS[0],
            2 => BANKS[1],
            _ => BANKS[2],
        };
        Ok(Source::Constant(ConstAddress { bank, offset: low16(take(word, self.at, 6).wrapping_shl(2)) }))
    }

    fn put(&self, value: Source) -> Result<u64, Reason> {
        match value {
            Source::Register(register) => Reg(self.at).put(register),
            Source::Constant(ConstAddress { bank, offset }) => {
                let select = match bank {
                    bank if bank == BANKS[0] => 1,
                    bank if bank == BANKS[1] => 2,
                    bank if bank == BANKS[2] => 3,
                    _ => return Err("a 32-bit encoding addresses only constant banks 0, 1 and 16"),
                };
                if offset & 3 != 0 {
                    return Err("the constant's offset is not a multiple of 4");
                }
                let offset = place(u64::from(offset).wrapping_shr(2), self.at, 6).ok_or(TOO_WIDE)?;
                Ok(offset | place(select, self.select, 2).ok_or(TOO_WIDE)?)
            }
            Source::Immediate(_) | Source::LongImmediate(_) => Err(SUCH_SOURCE),
        }
    }
}

/// Like [`Small`], but without registers.
pub(super) struct SmallConstant(pub Small);

impl Field for SmallConstant {
    type Value = Source;

    fn mask(&self) -> u64 {
        self.0.mask()
    }

    fn get(&self, word: u64) -> Result<Source, Reason> {
        match self.0.get(word)? {
            Source::Constant(address) => Ok(Source::Constant(address)),
            _ => Err("the selector selects no constant bank"),
        }
    }

    fn put(&self, value: Source) -> Result<u64, Reason> {
        match value {
            Source::Constant(_) => self.0.put(value),
            _ => Err("only a constant can be encoded here"),
        }
    }
}

/// A signed immediate in two parts. `low` and `high` are the position and width of each part.
pub(super) struct SplitImmediate {
    pub low: (u32, u32),
    pub high: (u32, u32),
}

/// An 8-bit immediate.
pub(super) const IMMEDIATE: SplitImmediate = SplitImmediate { low: (26, 6), high: (8, 2) };
/// A 12-bit immediate.
pub(super) const MOVED: SplitImmediate = SplitImmediate { low: (20, 12), high: (0, 0) };

impl Field for SplitImmediate {
    type Value = Source;

    fn mask(&self) -> u64 {
        mask(self.low.0, self.low.1) | mask(self.high.0, self.high.1)
    }

    fn get(&self, word: u64) -> Result<Source, Reason> {
        let raw = take(word, self.low.0, self.low.1) | take(word, self.high.0, self.high.1).wrapping_shl(self.low.1);
        let width = self.low.1.wrapping_add(self.high.1);
        Ok(Source::Immediate(low32(take_signed(raw, 0, width).cast_unsigned())))
    }

    fn put(&self, value: Source) -> Result<u64, Reason> {
        let Source::Immediate(value) = value else { return Err(SUCH_SOURCE) };
        let width = self.low.1.wrapping_add(self.high.1);
        let raw = place_signed(value.cast_signed().into(), 0, width).ok_or(TOO_WIDE)?;
        let low = place(take(raw, 0, self.low.1), self.low.0, self.low.1).ok_or(TOO_WIDE)?;
        Ok(low | place(take(raw, self.low.1, self.high.1), self.high.0, self.high.1).ok_or(TOO_WIDE)?)
    }
}

/// The upper 12 bits of a word, in a field at bit 20. They are treated as a 32-bit immediate. Otherwise, zero would
/// have two encodings.
pub(super) struct UpperImmediate;

impl Field for UpperImmediate {
    type Value = Source;

    fn mask(&self) -> u64 {
        mask(20, 12)
    }

    fn get(&self, word: u64) -> Result<Source, Reason> {
        Ok(Source::LongImmediate(low32(word & mask(20, 12))))
    }

    fn put(&self, value: Source) -> Result<u64, Reason> {
        match value {
            Source::LongImmediate(value) if value & 0xf_ffff == 0 => Ok(value.into()),
            Source::LongImmediate(_) => Err(TOO_WIDE),
            _ => Err(SUCH_SOURCE),
        }
    }
}

/// A 5-bit shift count at bit 26.
pub(super) struct Count;

impl Field for Count {
    type Value = Source;

    fn mask(&self) -> u64 {
        mask(26, 5)
    }

    fn get(&self, word: u64) -> Result<Source, Reason> {
        Ok(Source::Immediate(low32(take(word, 26, 5))))
    }

    fn put(&self, value: Source) -> Result<u64, Reason> {
        match value {
            Source::Immediate(value) => place(value.into(), 26, 5).ok_or(TOO_WIDE),
            _ => Err(SUCH_SOURCE),
        }
    }
}

/// An address that consists of an 8-bit displacement in units of the access size (two bits at bit 8, six at bit 26) and
/// a base at bit 20.
pub(super) struct Near {
    /// Left shift of the displacement, which is 2 or 3.
    pub shift: u32,
    /// True if the base is a register pair.
    pub wide: bool,
}

impl Field for Near {
    type Value = Address;

    fn mask(&self) -> u64 {
        Reg(20).mask() | mask(8, 2) | mask(26, 6)
    }

    fn get(&self, word: u64) -> Result<Address, Reason> {
        let raw = take(word, 8, 2) | take(word, 26, 6).wrapping_shl(2);
        let offset = low32(take_signed(raw, 0, 8).wrapping_shl(self.shift).cast_unsigned()).cast_signed();
        Ok(Address { base: Reg(20).get(word)?, offset, wide: self.wide })
    }

    fn put(&self, value: Address) -> Result<u64, Reason> {
        if value.wide != self.wide {
            return Err("the encoding has the other width of address");
        }
        let offset = i64::from(value.offset);
        let units = offset.wrapping_shr(self.shift);
        if units.wrapping_shl(self.shift) != offset {
            return Err("the displacement is not a multiple of the access size");
        }
        let raw = place_signed(units, 0, 8).ok_or(TOO_WIDE)?;
        let low = place(take(raw, 0, 2), 8, 2).ok_or(TOO_WIDE)?;
        Ok(low | place(take(raw, 2, 6), 26, 6).ok_or(TOO_WIDE)? | Reg(20).put(value.base)?)
    }
}

/// LDC's base and displacement. Like [`Near`], but in units of words.
pub(super) struct NearConstant;

impl Field for NearConstant {
    type Value = (Register, i16);

    fn mask(&self) -> u64 {
        Near { shift: 2, wide: false }.mask()
    }

    fn get(&self, word: u64) -> Result<(Register, i16), Reason> {
        let address = Near { shift: 2, wide: false }.get(word)?;
        Ok((address.base, i16::try_from(address.offset).map_err(|_| TOO_WIDE)?))
    }

    fn put(&self, (base, offset): (Register, i16)) -> Result<u64, Reason> {
        Near { shift: 2, wide: false }.put(Address { base, offset: offset.into(), wide: false })
    }
}

/// A relative target in words.
pub(super) struct NearTarget {
    pub at: u32,
    pub width: u32,
}

impl Field for NearTarget {
    type Value = Target;

    fn mask(&self) -> u64 {
        mask(self.at, self.width)
    }

    fn get(&self, word: u64) -> Result<Target, Reason> {
        let offset = take_signed(word, self.at, self.width).wrapping_shl(2);
        Ok(Target::Relative(low32(offset.cast_unsigned()).cast_signed()))
    }

    fn put(&self, value: Target) -> Result<u64, Reason> {
        match value {
            Target::Relative(offset) if offset & 3 == 0 => {
                place_signed(i64::from(offset).wrapping_shr(2), self.at, self.width).ok_or(TOO_WIDE)
            }
            _ => Err("only a relative target, a multiple of 4, can be encoded in 32 bits"),
        }
    }
}

/// A 16-bit or 32-bit integer type: a size and a sign bit.
pub(super) struct SmallInt {
    pub size: u32,
    pub sign: u32,
}

impl Field for SmallInt {
    type Value = IntType;

    fn mask(&self) -> u64 {
        mask(self.size, 1) | mask(self.sign, 1)
    }

    fn get(&self, word: u64) -> Result<IntType, Reason> {
        Ok(match (Flag(self.size).get(word)?, Flag(self.sign).get(word)?) {
            (false, false) => IntType::U16,
            (false, true) => IntType::S16,
            (true, false) => IntType::U32,
            (true, true) => IntType::S32,
        })
    }

    fn put(&self, value: IntType) -> Result<u64, Reason> {
        match value.bits() {
            16 | 32 => Ok(Flag(self.size).put(value.bits() == 32)? | Flag(self.sign).put(value.signed())?),
            _ => Err("a 32-bit encoding converts 16 and 32 bits only"),
        }
    }
}

/// U32 or S32, selected by one bit.
pub(super) struct WordSign(pub u32);

impl Field for WordSign {
    type Value = IntType;

    fn mask(&self) -> u64 {
        mask(self.0, 1)
    }

    fn get(&self, word: u64) -> Result<IntType, Reason> {
        Ok(if Flag(self.0).get(word)? { IntType::S32 } else { IntType::U32 })
    }

    fn put(&self, value: IntType) -> Result<u64, Reason> {
        match value.bits() {
            32 => Flag(self.0).put(value.signed()),
            _ => Err("this 32-bit encoding converts 32 bits only"),
        }
    }
}

/// The comparison of FSETP, with its lowest bit at bit 7 and the other bits at bit 14.
pub(super) struct SplitCompare;

impl Field for SplitCompare {
    type Value = Compare;

    fn mask(&self) -> u64 {
        mask(7, 1) | mask(14, 3)
    }

    fn get(&self, word: u64) -> Result<Compare, Reason> {
        coded::<Compare>(0).get(take(word, 7, 1) | take(word, 14, 3).wrapping_shl(1))
    }

    fn put(&self, value: Compare) -> Result<u64, Reason> {
        let code = u64::from(value.bits());
        Ok(place(code & 1, 7, 1).ok_or(TOO_WIDE)? | place(code.wrapping_shr(1), 14, 3).ok_or(TOO_WIDE)?)
    }
}

/// One sign bit for both operands.
pub(super) struct BothSigned(pub u32);

impl Field for BothSigned {
    type Value = (bool, bool);

    fn mask(&self) -> u64 {
        mask(self.0, 1)
    }

    fn get(&self, word: u64) -> Result<(bool, bool), Reason> {
        let signed = Flag(self.0).get(word)?;
        Ok((signed, signed))
    }

    fn put(&self, (a, b): (bool, bool)) -> Result<u64, Reason> {
        if a != b {
            return Err("a 32-bit encoding has both operands signed or neither");
        }
        Flag(self.0).put(a)
    }
}

/// A floating-point operand that supports only negation.
pub(super) struct Negated<S> {
    pub source: S,
    pub at: u32,
}

/// A floating-point operand that supports only an absolute value.
pub(super) struct Absolute<S> {
    pub source: S,
    pub at: u32,
}

impl<S: Field<Value = Source>> Field for Negated<S> {
    type Value = FloatOperand;

    fn mask(&self) -> u64 {
        self.source.mask() | mask(self.at, 1)
    }

    fn get(&self, word: u64) -> Result<FloatOperand, Reason> {
        let negate = Flag(self.at).get(word)?;
        Ok(FloatOperand { source: self.source.get(word)?, negate, absolute: false })
    }

    fn put(&self, value: FloatOperand) -> Result<u64, Reason> {
        if value.absolute {
            return Err("the 32-bit encoding does not support an absolute value");
        }
        Ok(self.source.put(value.source)? | Flag(self.at).put(value.negate)?)
    }
}

impl<S: Field<Value = Source>> Field for Absolute<S> {
    type Value = FloatOperand;

    fn mask(&self) -> u64 {
        self.source.mask() | mask(self.at, 1)
    }

    fn get(&self, word: u64) -> Result<FloatOperand, Reason> {
        let absolute = Flag(self.at).get(word)?;
        Ok(FloatOperand { source: self.source.get(word)?, negate: false, absolute })
    }

    fn put(&self, value: FloatOperand) -> Result<u64, Reason> {
        if value.negate {
            return Err("the 32-bit encoding does not support negation");
        }
        Ok(self.source.put(value.source)? | Flag(self.at).put(value.absolute)?)
    }
}
