//! Moves, selection and predicates: type 4 encodings, and type 2 for 32-bit immediates.

use super::field::*;
use super::table::{Guarding, Row, group, named, rows, union, values};
use crate::ir::*;

const DST: Reg = Reg(14);
const A: Reg = Reg(20);
const B: Src = Src(Immediate::Signed);
const PRED_A: PredOp = PredOp { at: 20, not: 23 };
const PRED_B: PredOp = PredOp { at: 26, not: 29 };
const LANES: Num8 = Num8 { at: 5, width: 4 };
const CC: Flag = Flag(48);
const LAST: PredOp = PredOp { at: 49, not: 52 };

rows! { ROWS, Guard, true, 0x8;
    CSet 0x0000_0000_0000_0004 / 0xfc00_0000_0000_0007 {
        dst: DST, write_cc: CC, test: coded(20), float_result: Flag(5), logic: coded(53), accumulate: LAST,
    }
    CSetP 0x0400_0000_0000_0004 / 0xfc00_0000_0000_0007 {
        p: Pred(17), q: Pred(14), test: coded(20), logic: coded(53), accumulate: LAST,
    }
    PSet 0x0800_0000_0000_0004 / 0xfc00_0000_0000_0007 {
        dst: DST, write_cc: CC, a: PRED_A, b: PRED_B, combine: coded(30), float_result: Flag(5), logic: coded(53),
        accumulate: LAST,
    }
    // GUESS: envytools prints only the first predicate if all of b's bits are zero. As a field, these bits mean P0.
    PSetP 0x0c00_0000_0000_0004 / 0xfc00_0000_0000_0007 {
        p: Pred(17), q: Pred(14), a: PRED_A, b: PRED_B, combine: coded(30), logic: coded(53), accumulate: LAST,
    }
    Sel 0x2000_0000_0000_0004 / 0xfc00_0000_0000_0007 { dst: DST, a: A, b: B, select: LAST }
    Prmt 0x2400_0000_0000_0004 / 0xfc00_0000_0000_0007 {
        dst: DST, a: A, b c: SrcPair(Immediate::Signed), mode: coded(5),
    }
    Mov 0x2800_0000_0000_0004 / 0xfc00_0000_0000_0007 { dst: DST, b: B, lanes: LANES }
    S2R 0x2c00_0000_0000_0004 / 0xfc00_0000_0000_0007 { dst: DST, special: Special(26) }
    P2R 0x3000_0000_0000_0004 / 0xfc00_0000_0000_0007 { dst: DST, a: A, b: B }
    R2P 0x3400_0000_0000_0004 / 0xfc00_0000_0000_0007 { a: A, b: B }
    B2R 0x3800_0000_0000_0004 / 0xfc00_0000_0000_0007 { dst: DST, barrier: Num8 { at: 20, width: 4 } }
    Lepc 0x4400_0000_0000_0004 / 0xfc00_0000_0000_0007 { dst: DST }
    Mov 0x1800_0000_0000_0002 / 0xf800_0000_0000_0007 { dst: DST, b: Long, lanes: LANES }
}
