//! Single precision: type 0 encodings, and type 2 for 32-bit immediates.

use super::field::*;
use super::table::{Guarding, Row, group, named, rows, union, values};
use crate::ir::*;

const DST: Reg = Reg(14);
const A: Reg = Reg(20);
const B: Src = Src(Immediate::Upper);
const BC: SrcPair = SrcPair(Immediate::Upper);
const FLOAT_A: Float<RegSrc> = Float { source: RegSrc(20), negate: 9, absolute: 7 };
const FLOAT_B: Float<Src> = Float { source: B, negate: 8, absolute: 6 };
const CC: Flag = Flag(48);
const LONG_CC: Flag = Flag(58);
const LAST: PredOp = PredOp { at: 49, not: 52 };

rows! { ROWS, Guard, true, 0x8;
    FMnMx 0x0800_0000_0000_0000 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: FLOAT_A, b: FLOAT_B, select: LAST, ftz: Flag(5),
    }
    FSet 0x1000_0000_0000_0000 / 0xf000_0000_0000_0007 {
        dst: DST, write_cc: CC, a: FLOAT_A, b: FLOAT_B, compare: coded(55), float_result: Flag(5), ftz: Flag(59),
        logic: coded(53), accumulate: LAST,
    }
    FSetP 0x2000_0000_0000_0000 / 0xf000_0000_0000_0007 {
        p: Pred(17), q: Pred(14), a: FLOAT_A, b: FLOAT_B, compare: coded(55), ftz: Flag(59), logic: coded(53),
        accumulate: LAST,
    }
    FFma 0x3000_0000_0000_0000 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: A, b c: BC, negate_product: Flag(9), negate_c: Flag(8), rounding: coded(55),
        ftz: Flag(6), fmz: Flag(7), saturate: Flag(5),
    }
    FCmp 0x3800_0000_0000_0000 / 0xf800_0000_0000_0007 {
        dst: DST, a: A, b c: BC, compare: coded(55), ftz: Flag(5),
    }
    FAdd 0x5000_0000_0000_0000 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: FLOAT_A, b: FLOAT_B, rounding: coded(55), ftz: Flag(5), saturate: Flag(49),
    }
    FMul 0x5800_0000_0000_0000 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: CC, a: A, b: B, negate: Flag(57), scale: coded(49), rounding: coded(55), ftz: Flag(6),
        fmz: Flag(7), saturate: Flag(5),
    }
    Rro 0x6000_0000_0000_0000 / 0xf800_0000_0000_0007 { dst: DST, b: FLOAT_B, function: coded(5) }
    Mufu 0xc800_0000_0000_0000 / 0xf800_0000_0000_0007 {
        dst: DST, a: FLOAT_A, function: coded(26), saturate: Flag(5),
    }
    FFma 0x2000_0000_0000_0002 / 0xf800_0000_0000_0007 {
        dst c: DstAndThird, write_cc: LONG_CC, a: A, b: Long, negate_product: Flag(9), negate_c: Flag(8),
        rounding: Fixed(Rounding::Nearest), ftz: Flag(6), fmz: Flag(7), saturate: Flag(5),
    }
    FAdd 0x2800_0000_0000_0002 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: LONG_CC, a: FLOAT_A, b: Plain(Long), rounding: Fixed(Rounding::Nearest), ftz: Flag(5),
        saturate: Fixed(false),
    }
    FMul 0x3000_0000_0000_0002 / 0xf800_0000_0000_0007 {
        dst: DST, write_cc: LONG_CC, a: A, b: Long, negate: Fixed(false), scale: Fixed(Scale::One),
        rounding: Fixed(Rounding::Nearest), ftz: Flag(6), fmz: Flag(7), saturate: Flag(5),
    }
}
