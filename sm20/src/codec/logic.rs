//! Logic, shifts and bit fields: type 3 encodings, type 4 for POPC, and type 2 for 32-bit immediates.

use super::field::*;
use super::table::{Guarding, Row, group, named, rows, union, values};
use crate::ir::*;

const DST: Reg = Reg(14);
const A: Reg = Reg(20);
const B: Src = Src(Immediate::Signed);
const CC: Flag = Flag(48);

rows! { ROWS, Guard, true, 0x8;
    Bfi 0x2800_0000_0000_0003 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: A, b c: SrcPair(Immediate::Signed),
    }
    Shr 0x5800_0000_0000_0003 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: A, b: B, signed: Flag(5), wrap: Flag(9), reverse: Flag(8), carry_in: Flag(7),
    }
    Shl 0x6000_0000_0000_0003 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: A, b: B, wrap: Flag(9), carry_in: Flag(6),
    }
    Lop 0x6800_0000_0000_0003 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: A, b: B, logic: coded(6), invert_a: Flag(9), invert_b: Flag(8), carry_in: Flag(5),
    }
    Bfe 0x7000_0000_0000_0003 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: A, b: B, signed: Flag(5), reverse: Flag(8),
    }
    Flo 0x7800_0000_0000_0003 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, b: B, signed: Flag(5), invert: Flag(8), shift_amount: Flag(6),
    }
    Popc 0x5400_0000_0000_0004 / 0xfc00_0000_0000_0007 {
        dst: DST, a: A, b: B, invert_a: Flag(9), invert_b: Flag(8),
    }
    Lop 0x3800_0000_0000_0002 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: Flag(58), a: A, b: Long, logic: coded(6), invert_a: Flag(9), invert_b: Flag(8),
        carry_in: Flag(5),
    }
}
