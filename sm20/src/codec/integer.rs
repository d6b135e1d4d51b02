//! Integer arithmetic: type 3 encodings, and type 2 for 32-bit immediates.

use super::field::*;
use super::table::{Guarding, Row, group, named, rows, union, values};
use crate::ir::*;

const DST: Reg = Reg(14);
const A: Reg = Reg(20);
const B: Src = Src(Immediate::Signed);
const BC: SrcPair = SrcPair(Immediate::Signed);
const CC: Flag = Flag(48);
const LONG_CC: Flag = Flag(58);
const LAST: PredOp = PredOp { at: 49, not: 52 };

rows! { ROWS, Guard, true, 0x8;
    IMnMx 0x0800_0000_0000_0003 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: A, b: B, select: LAST, signed: Flag(5), extended: coded(6),
    }
    ISet 0x1000_0000_0000_0003 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: A, b: B, compare: coded(55), signed: Flag(5), carry_in: Flag(6),
        float_result: Flag(7), logic: coded(53), accumulate: LAST,
    }
    ISetP 0x1800_0000_0000_0003 / 0xf800_0000_0000_0007 {
        p: Pred(17), q: Pred(14), a: A, b: B, compare: coded(55), signed: Flag(5), carry_in: Flag(6),
        logic: coded(53), accumulate: LAST,
    }
    IMad 0x2000_0000_0000_0003 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: A, b c: BC, mode: coded(8), a_signed: Flag(7), b_signed: Flag(5),
        high: Flag(6), saturate: Flag(56), carry_in: Flag(55),
    }
    ICmp 0x3000_0000_0000_0003 / 0xf800_0000_0000_0007 {
        dst: DST, a: A, b c: BC, compare: coded(55), signed: Flag(5),
    }
    ISad 0x3800_0000_0000_0003 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: A, b c: BC, signed: Flag(5),
    }
    IScAdd 0x4000_0000_0000_0003 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: A, b: B, shift: Num8 { at: 5, width: 5 }, mode: coded(55),
    }
    IAdd 0x4800_0000_0000_0003 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: A, b: B, mode: coded(8), saturate: Flag(5), carry_in: Flag(6),
    }
    IMul 0x5000_0000_0000_0003 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: A, b: B, a_signed: Flag(7), b_signed: Flag(5), high: Flag(6),
    }
    IMad 0x0000_0000_0000_0002 / 0xf800_0000_0000_0007 {
        dst c: DstAndThird, write_cc: LONG_CC, a: A, b: Long, mode: coded(8), a_signed: Flag(7), b_signed: Flag(5),
        high: Flag(6), saturate: Fixed(false), carry_in: Fixed(false),
    }
    IAdd 0x0800_0000_0000_0002 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: LONG_CC, a: A, b: Long, mode: coded(8), saturate: Flag(5), carry_in: Flag(6),
    }
    IMul 0x1000_0000_0000_0002 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: LONG_CC, a: A, b: Long, a_signed: Flag(7), b_signed: Flag(5), high: Flag(6),
    }
    IScAdd 0x4000_0000_0000_0002 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: LONG_CC, a: A, b: Long, shift: Num8 { at: 5, width: 5 }, mode: Fixed(AddMode::Add),
    }
}
