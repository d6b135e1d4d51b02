//! Double precision (type 1).

use super::field::*;
use super::table::{Guarding, Row, group, named, rows, union, values};
use crate::ir::*;

const DST: Reg = Reg(14);
const A: Reg = Reg(20);
const BC: SrcPair = SrcPair(Immediate::Upper);
const FLOAT_A: Float<RegSrc> = Float { source: RegSrc(20), negate: 9, absolute: 7 };
const FLOAT_B: Float<Src> = Float { source: Src(Immediate::Upper), negate: 8, absolute: 6 };
const CC: Flag = Flag(48);
const LAST: PredOp = PredOp { at: 49, not: 52 };

rows! { ROWS, Guard, true, 0x8;
    DMnMx 0x0800_0000_0000_0001 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: FLOAT_A, b: FLOAT_B, select: LAST,
    }
    DSet 0x1000_0000_0000_0001 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: FLOAT_A, b: FLOAT_B, compare: coded(55), float_result: Flag(5), logic: coded(53),
        accumulate: LAST,
    }
    DSetP 0x1800_0000_0000_0001 / 0xf800_0000_0000_0007 {
        p: Pred(17), q: Pred(14), a: FLOAT_A, b: FLOAT_B, compare: coded(55), logic: coded(53), accumulate: LAST,
    }
    DFma 0x2000_0000_0000_0001 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: A, b c: BC, negate_product: Flag(9), negate_c: Flag(8), rounding: coded(55),
    }
    DAdd 0x4800_0000_0000_0001 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: FLOAT_A, b: FLOAT_B, rounding: coded(55),
    }
    DMul 0x5000_0000_0000_0001 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: A, b: Src(Immediate::Upper), negate: Flag(9), rounding: coded(55),
    }
}
