//! Conversions (type 4).

use super::field::*;
use super::table::{Guarding, Row, group, named, rows, union, values};
use crate::ir::*;

const DST: Reg = Reg(14);
const FLOAT_B: Float<Src> = Float { source: Src(Immediate::Upper), negate: 8, absolute: 6 };
const INT_B: Float<Src> = Float { source: Src(Immediate::Signed), negate: 8, absolute: 6 };
const CC: Flag = Flag(48);
const TO: Int = Int { size: 20, sign: 7 };
const FROM: Int = Int { size: 23, sign: 9 };

rows! { ROWS, Guard, true, 0x8;
    F2F 0x1000_0000_0000_0004 / 0xfc00_0000_0000_0007 {
        dst: DST, write_cc: CC, b: FLOAT_B, to: coded(20), from: coded(23), rounding: coded(49), integer: Flag(7),
        ftz: Flag(55), saturate: Flag(5), upper_half: Flag(56),
    }
    F2I 0x1400_0000_0000_0004 / 0xfc00_0000_0000_0007 {
        dst: DST, write_cc: CC, b: FLOAT_B, to: TO, from: coded(23), rounding: coded(49), ftz: Flag(55),
        upper_half: Flag(56),
    }
    I2F 0x1800_0000_0000_0004 / 0xfc00_0000_0000_0007 {
        dst: DST, write_cc: CC, b: INT_B, to: coded(20), from: FROM, rounding: coded(49), part: coded(55),
    }
    I2I 0x1c00_0000_0000_0004 / 0xfc00_0000_0000_0007 {
        dst: DST, write_cc: CC, b: INT_B, to: TO, from: FROM, saturate: Flag(5), part: coded(55),
    }
}

/// Rejects combinations that the fields can express but the instructions do not support.
pub(super) fn check(op: &Op) -> Result<(), FieldReason> {
    match *op {
        Op::F2F { to, from, rounding, integer, upper_half, .. } => {
            if upper_half && from != FloatType::F16 {
                return Err(("upper_half", "only an F16 is read from an upper half"));
            }
            let (wider, narrower) = (to.bits() > from.bits(), to.bits() < from.bits());
            if (wider && from == FloatType::F16 && to == FloatType::F64)
                || (narrower && from == FloatType::F64 && to == FloatType::F16)
            {
                return Err(("to", "there is no conversion between F16 and F64"));
            }
            if integer && to != from {
                return Err(("integer", "rounding to an integral value keeps the type"));
            }
            if !integer && !narrower && rounding != Rounding::Nearest {
                return Err(("rounding", "only a narrowing conversion rounds"));
            }
            Ok(())
        }
        Op::F2I { to, from, upper_half, .. } => {
            if upper_half && from != FloatType::F16 {
                return Err(("upper_half", "only an F16 is read from an upper half"));
            }
            if to.bits() == 8 {
                return Err(("to", "there is no conversion of a float to 8 bits"));
            }
            Ok(())
        }
        Op::I2F { from, part, ref b, .. } => {
            part_of(from, part)?;
            if from.bits() == 64 && matches!(b.source, Source::Constant(_)) {
                return Err(("b", "a 64-bit integer cannot come from a constant bank"));
            }
            Ok(())
        }
        Op::I2I { from, part, .. } => {
            part_of(from, part)?;
            if from.bits() == 64 {
                return Err(("from", "there is no conversion of a 64-bit integer to an integer"));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

type FieldReason = (&'static str, Reason);

fn part_of(from: IntType, part: Byte) -> Result<(), FieldReason> {
    match (from.bits(), part) {
        (_, Byte::B0) | (8, _) | (16, Byte::B2) => Ok(()),
        _ => Err(("part", "the operand has no such part")),
    }
}
