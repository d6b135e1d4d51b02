//! Fields for memory addresses and branch targets.

use super::bits::{low16, low32, mask, place, place_signed, take, take_signed};
use super::field::{Field, Flag, Reason, Reg};
use crate::ir::*;

const NOT_WIDE: Reason = "a 64-bit address cannot be encoded here";
const TOO_FAR: Reason = "the displacement does not fit its field";

/// A base register at bit 20 and a displacement. The `low` lower bits of the displacement are at bit 26, and its
/// `high.1` upper bits are at bit `high.0`. The displacement is shifted left by `shift`. If `wide` is true, bit 58
/// marks 64-bit addresses.
pub(super) struct Memory {
    low: u32,
    high: (u32, u32),
    shift: u32,
    wide: bool,
}

/// A 32-bit displacement, for 32-bit and 64-bit addresses.
pub(super) const GLOBAL: Memory = Memory { low: 32, high: (0, 0), shift: 0, wide: true };
/// A 32-bit displacement.
pub(super) const GLOBAL_LOCK: Memory = Memory { low: 32, high: (0, 0), shift: 0, wide: false };
/// A 20-bit displacement in two parts.
pub(super) const ATOMIC: Memory = Memory { low: 17, high: (55, 3), shift: 0, wide: true };
/// A 24-bit displacement, for shared and local memory.
pub(super) const WINDOW: Memory = Memory { low: 24, high: (0, 0), shift: 0, wide: false };

/// A 30-bit displacement in words, at bit 28.
pub(super) struct CacheLine;

impl Field for Memory {
    type Value = Address;

    fn mask(&self) -> u64 {
        Reg(20).mask()
            | mask(26, self.low)
            | mask(self.high.0, self.high.1)
            | if self.wide { Flag(58).mask() } else { 0 }
    }

    fn get(&self, word: u64) -> Result<Address, Reason> {
        let width = self.low.wrapping_add(self.high.1);
        let raw = take(word, 26, self.low) | take(word, self.high.0, self.high.1).wrapping_shl(self.low);
        let offset = take_signed(raw, 0, width).wrapping_shl(self.shift);
        let offset = i32::try_from(offset).map_err(|_| TOO_FAR)?;
        Ok(Address { base: Reg(20).get(word)?, offset, wide: self.wide && Flag(58).get(word)? })
    }

    fn put(&self, value: Address) -> Result<u64, Reason> {
        if value.wide && !self.wide {
            return Err(NOT_WIDE);
        }
        let width = self.low.wrapping_add(self.high.1);
        let raw = place_signed(value.offset.into(), 0, width).ok_or(TOO_FAR)?;
        let low = place(take(raw, 0, self.low), 26, self.low).ok_or(TOO_FAR)?;
        let high = place(take(raw, self.low, self.high.1), self.high.0, self.high.1).ok_or(TOO_FAR)?;
        Ok(low | high | Reg(20).put(value.base)? | if value.wide { Flag(58).put(true)? } else { 0 })
    }
}

impl Field for CacheLine {
    type Value = Address;

    fn mask(&self) -> u64 {
        Reg(20).mask() | mask(28, 30) | Flag(58).mask()
    }

    fn get(&self, word: u64) -> Result<Address, Reason> {
        let offset = i32::try_from(take_signed(word, 28, 30).wrapping_shl(2)).map_err(|_| TOO_FAR)?;
        Ok(Address { base: Reg(20).get(word)?, offset, wide: Flag(58).get(word)? })
    }

    fn put(&self, value: Address) -> Result<u64, Reason> {
        if value.offset & 3 != 0 {
            return Err("the displacement is not a multiple of 4");
        }
        let offset = place_signed(i64::from(value.offset).wrapping_shr(2), 28, 30).ok_or(TOO_FAR)?;
        Ok(offset | Reg(20).put(value.base)? | Flag(58).put(value.wide)?)
    }
}

/// Target of a control instruction. If bit 14 is set, the target is a constant bank word (bank at bit 42, byte offset
/// at bit 26).
pub(super) enum Goto {
    /// 24-bit target at bit 26, relative to the end of the instruction.
    Relative,
    /// 32-bit target at bit 26, relative to the start of the code.
    Absolute,
}

impl Field for Goto {
    type Value = Target;

    fn mask(&self) -> u64 {
        match self {
            Self::Relative => Flag(14).mask() | mask(26, 24),
            Self::Absolute => Flag(14).mask() | mask(26, 32),
        }
    }

    fn get(&self, word: u64) -> Result<Target, Reason> {
        if Flag(14).get(word)? {
            if take(word, 47, 11) & self.mask().wrapping_shr(47) != 0 {
                return Err("bits that a target in a constant bank leaves unused are set");
            }
            let (bank, offset) = (take(word, 42, 5).to_le_bytes()[0], low16(take(word, 26, 16)));
            return Ok(Target::Constant(ConstAddress { bank, offset }));
        }
        Ok(match self {
            Self::Relative => Target::Relative(low32(take_signed(word, 26, 24).cast_unsigned()).cast_signed()),
            Self::Absolute => Target::Absolute(low32(take(word, 26, 32))),
        })
    }

    fn put(&self, value: Target) -> Result<u64, Reason> {
        match (self, value) {
            (_, Target::Constant(ConstAddress { bank, offset })) => {
                let bank = place(bank.into(), 42, 5).ok_or("constant banks are numbered 0 to 31")?;
                Ok(Flag(14).put(true)? | bank | place(offset.into(), 26, 16).ok_or(TOO_FAR)?)
            }
            (Self::Relative, Target::Relative(offset)) => {
                place_signed(offset.into(), 26, 24).ok_or("the target is too far away: a branch reaches 8 MiB")
            }
            (Self::Absolute, Target::Absolute(address)) => place(address.into(), 26, 32).ok_or(TOO_FAR),
            (Self::Relative, Target::Absolute(_)) => Err("a relative target or a constant is needed here"),
            (Self::Absolute, Target::Relative(_)) => Err("an absolute target or a constant is needed here"),
        }
    }
}
