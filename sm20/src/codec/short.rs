//! The 32-bit encodings. A word contains a zero-extended encoding with bit 3 set.

use super::field::*;
use super::short_field::*;
use super::table::{Guarding, Row, group, named, rows, union, values};
use crate::ir::*;

const DST: Reg = Reg(14);
const A: Reg = Reg(20);
const P: Pred = Pred(17);
const SRC: Small = Small { at: 26, select: 8 };
/// Source operand of instructions whose third operand occupies the guard bits.
const SRC_OF_3: Small = Small { at: 26, select: 6 };
const THIRD: RegSrc = RegSrc(8);
const CC: Flag = Flag(23);
const MODIFIED: Float<RegSrc> = Float { source: RegSrc(26), negate: 22, absolute: 25 };

const NO: Fixed<bool> = Fixed(false);
const NEAREST: Fixed<Rounding> = Fixed(Rounding::Nearest);
const TRUE: Fixed<PredicateOperand> = Fixed(PredicateOperand::TRUE);
const PT: Fixed<Predicate> = Fixed(Predicate::TRUE);
const AND: Fixed<PredicateLogic> = Fixed(PredicateLogic::And);
const F32: Fixed<FloatType> = Fixed(FloatType::F32);
const WORD: Near = Near { shift: 2, wide: false };
const DOUBLE: Near = Near { shift: 3, wide: false };
const WIDE_WORD: Near = Near { shift: 2, wide: true };
const WIDE_DOUBLE: Near = Near { shift: 3, wide: true };
const B32: Fixed<Width> = Fixed(Width::B32);
const B64: Fixed<Width> = Fixed(Width::B64);
const LOAD: Fixed<LoadCache> = Fixed(LoadCache::All);
const STORE: Fixed<StoreCache> = Fixed(StoreCache::WriteBack);
const ALL_LANES: Fixed<u8> = Fixed(15);
const ADD: Fixed<AddMode> = Fixed(AddMode::Add);
const REVERSED: Fixed<AddMode> = Fixed(AddMode::SubtractA);
const BARRIER: BarrierField = BarrierField { at: 20, width: 4, select: 26 };
const ALL_THREADS: Fixed<BarrierOperand> = Fixed(BarrierOperand::Register(Register::ZERO));

rows! { ROWS, Guard, false, 0;
    Nop 0x0000_0008 / 0xf800_03ff { test: Fixed(CcTest::True) }
    CSetP 0x1000_0008 / 0xf800_03ff { p: P, q: PT, test: coded(20), logic: AND, accumulate: TRUE }
    PSetP 0x1800_0008 / 0xf800_03ff {
        p: P, q: PT, a: PredOp { at: 20, not: 23 }, b: PredOp { at: 14, not: 24 }, combine: coded(25), logic: AND,
        accumulate: TRUE,
    }
    S2R 0x4000_0008 / 0xf000_03ff { dst: DST, special: Special(20) }
    Bar 0x5000_0008 / 0xf800_03ff {
        operation: Fixed(BarrierOp::Popc), p: PT, dst: Fixed(Register::ZERO), barrier: BARRIER, count: ALL_THREADS, a: TRUE,
    }
    Bar 0x5800_0008 / 0xf800_03ff {
        operation: Fixed(BarrierOp::Arrive), p: PT, dst: Fixed(Register::ZERO), barrier: BARRIER, count: ALL_THREADS,
        a: TRUE,
    }
    Rro 0x7000_0008 / 0xf800_03ff { dst: DST, b: Plain(RegSrc(20)), function: coded(26) }
    Mufu 0x8000_0008 / 0xa000_03ff {
        dst: DST, a: Absolute { source: RegSrc(20), at: 30 }, function: coded(26), saturate: NO,
    }
    Shl 0x0000_0208 / 0x8000_03ff { dst: DST, write_cc: NO, a: A, b: Count, wrap: NO, carry_in: NO }
    Shr 0x8000_0208 / 0x8000_03ff {
        dst: DST, write_cc: NO, a: A, b: Count, signed: Fixed(true), wrap: NO, reverse: NO, carry_in: NO,
    }
    I2I 0x0000_0018 / 0x0000_01ff {
        dst: DST, write_cc: CC, b: MODIFIED, to: SmallInt { size: 21, sign: 20 }, from: SmallInt { size: 24, sign: 9 },
        saturate: NO, part: Fixed(Byte::B0),
    }
    Mov 0x0000_0118 / 0x0000_03ff { dst: DST, b: MOVED, lanes: ALL_LANES }
    Mov 0x0000_0318 / 0x0000_03ff { dst: DST, b: UpperImmediate, lanes: ALL_LANES }
    Mov 0x0000_0028 / 0x0000_00ff { dst: DST, b: Small { at: 20, select: 8 }, lanes: ALL_LANES }
    I2F 0x0000_0088 / 0x0000_03ff {
        dst: DST, write_cc: CC, b: MODIFIED, to: F32, from: WordSign(24), rounding: coded(20), part: Fixed(Byte::B0),
    }
    F2I 0x0000_0288 / 0x0000_03ff {
        dst: DST, write_cc: CC, b: MODIFIED, to: WordSign(24), from: F32, rounding: coded(20), ftz: NO, upper_half: NO,
    }
    F2F 0x0000_0098 / 0x0000_03ff {
        dst: DST, write_cc: CC, b: MODIFIED, to: F32, from: F32, rounding: NEAREST, integer: NO, ftz: NO,
        saturate: Flag(24), upper_half: NO,
    }
    F2F 0x0000_0298 / 0x0000_03ff {
        dst: DST, write_cc: CC, b: MODIFIED, to: F32, from: F32, rounding: coded(20), integer: Fixed(true), ftz: NO,
        saturate: Flag(24), upper_half: NO,
    }
    FMul 0x0000_00a8 / 0x0000_00ff {
        dst: DST, write_cc: NO, a: A, b: SRC, negate: NO, scale: Fixed(Scale::One), rounding: NEAREST, ftz: NO, fmz: NO,
        saturate: NO,
    }
    ISetP 0x0000_0048 / 0x0000_00ff {
        p: P, q: PT, a: A, b: SRC, compare: narrow(14, 3), signed: Fixed(true), carry_in: NO, logic: AND, accumulate: TRUE,
    }
    ISetP 0x0000_00c8 / 0x0000_00ff {
        p: P, q: PT, a: A, b: IMMEDIATE, compare: narrow(14, 3), signed: Fixed(true), carry_in: NO, logic: AND,
        accumulate: TRUE,
    }
    FAdd 0x0000_0049 / 0x0000_007f {
        dst: DST, write_cc: NO, a: Negated { source: RegSrc(20), at: 7 }, b: Plain(SRC), rounding: NEAREST, ftz: NO,
        saturate: NO,
    }
    FSetP 0x0000_0059 / 0x0000_007f {
        p: P, q: PT, a: Plain(RegSrc(20)), b: Plain(SRC), compare: SplitCompare, ftz: NO, logic: AND, accumulate: TRUE,
    }
    Ldl 0x0000_000a / 0x0000_00ff { dst: DST, address: WORD, width: B32, cache: LOAD }
    Lds 0x0000_004a / 0x0000_00ff { dst: DST, address: WORD, width: B32 }
    Ldl 0x0000_008a / 0x0000_00ff { dst: DST, address: DOUBLE, width: B64, cache: LOAD }
    Lds 0x0000_00ca / 0x0000_00ff { dst: DST, address: DOUBLE, width: B64 }
    Stl 0x0000_001a / 0x0000_00ff { address: WORD, value: DST, width: B32, cache: STORE }
    Sts 0x0000_005a / 0x0000_00ff { address: WORD, value: DST, width: B32 }
    Stl 0x0000_009a / 0x0000_00ff { address: DOUBLE, value: DST, width: B64, cache: STORE }
    Sts 0x0000_00da / 0x0000_00ff { address: DOUBLE, value: DST, width: B64 }
    IMul 0x0000_002a / 0x0000_00bf { dst: DST, write_cc: NO, a: A, b: SRC, a_signed b_signed: BothSigned(6), high: NO }
    IMul 0x0000_00aa / 0x0000_00bf {
        dst: DST, write_cc: NO, a: A, b: IMMEDIATE, a_signed b_signed: BothSigned(6), high: NO,
    }
    Ld 0x0000_000b / 0x0000_00ff { dst: DST, address: WORD, width: B32, cache: LOAD }
    Ld 0x0000_004b / 0x0000_00ff { dst: DST, address: WIDE_WORD, width: B32, cache: LOAD }
    Ld 0x0000_008b / 0x0000_00ff { dst: DST, address: DOUBLE, width: B64, cache: LOAD }
    Ld 0x0000_00cb / 0x0000_00ff { dst: DST, address: WIDE_DOUBLE, width: B64, cache: LOAD }
    St 0x0000_001b / 0x0000_00ff { address: WORD, value: DST, width: B32, cache: STORE }
    St 0x0000_005b / 0x0000_00ff { address: WIDE_WORD, value: DST, width: B32, cache: STORE }
    St 0x0000_009b / 0x0000_00ff { address: DOUBLE, value: DST, width: B64, cache: STORE }
    St 0x0000_00db / 0x0000_00ff { address: WIDE_DOUBLE, value: DST, width: B64, cache: STORE }
    IAdd 0x0000_002c / 0x0000_00ff { dst: DST, write_cc: NO, a: A, b: SRC, mode: ADD, saturate: NO, carry_in: NO }
    IAdd 0x0000_006c / 0x0000_00ff { dst: DST, write_cc: NO, a: A, b: SRC, mode: REVERSED, saturate: NO, carry_in: NO }
    IAdd 0x0000_00ac / 0x0000_00ff { dst: DST, write_cc: NO, a: A, b: IMMEDIATE, mode: ADD, saturate: NO, carry_in: NO }
    IAdd 0x0000_00ec / 0x0000_00ff {
        dst: DST, write_cc: NO, a: A, b: IMMEDIATE, mode: REVERSED, saturate: NO, carry_in: NO,
    }
    Ldc 0x0000_001c / 0x0000_001f { dst: DST, bank: Num8 { at: 5, width: 3 }, base offset: NearConstant, width: B32 }
    Lop 0x0000_001d / 0x0000_009f {
        dst: DST, write_cc: NO, a: A, b: SRC, logic: coded(5), invert_a: NO, invert_b: NO, carry_in: NO,
    }
    Lop 0x0000_009d / 0x0000_009f {
        dst: DST, write_cc: NO, a: A, b: IMMEDIATE, logic: coded(5), invert_a: NO, invert_b: NO, carry_in: NO,
    }
    Bra 0x0000_001f / 0xc000_001f {
        target: NearTarget { at: 14, width: 14 }, test: coded(5), uniform: Flag(28), limit: Flag(29),
    }
    Exit 0x8800_001f / 0xf800_001f { test: coded(5) }
    Ret 0x9000_001f / 0xf800_001f { test: coded(5) }
}

rows! { UNGUARDED, Ignored, false, 0;
    Ssy 0x4000_001f / 0xf000_001f { target: NearTarget { at: 14, width: 14 } }
}

rows! { GUARDLESS, Absent, false, 0;
    IMad 0x0000_000d / 0x0000_001f {
        dst: DST, write_cc: NO, a: A, b: SRC_OF_3, c: THIRD, mode: ADD, a_signed b_signed: BothSigned(5), high: NO,
        saturate: NO, carry_in: NO,
    }
    FFma 0x0000_000e / 0x0000_002f {
        dst: DST, write_cc: NO, a: A, b: SRC_OF_3, c: THIRD, negate_product: Flag(4), negate_c: NO, rounding: NEAREST,
        ftz: NO, fmz: NO, saturate: NO,
    }
    FFma 0x0000_002e / 0x0000_002f {
        dst: DST, write_cc: NO, a: A, b: RegSrc(26), c: SmallConstant(Small { at: 8, select: 6 }),
        negate_product: Flag(4), negate_c: NO, rounding: NEAREST, ftz: NO, fmz: NO, saturate: NO,
    }
    Cal 0x5000_001f / 0xf000_001f { target: NearTarget { at: 6, width: 22 }, limit: Flag(5) }
    Bpt 0x8000_001f / 0xf800_001f { kind: coded(5), number: Num32 { at: 7, width: 20 } }
}

/// Instructions that exist but are not modelled, as in the table of 64-bit encodings.
pub(super) static UNSUPPORTED: &[(&str, u64, u64)] = &[
    ("VABSDIFF2", 0x0000_0108, 0x0000_07ff),
    ("VADD2", 0x0000_0308, 0x0000_0fff),
    ("VSUB2", 0x0000_0b08, 0x0000_0fff),
    ("VABSDIFF4", 0x0000_0508, 0x0000_07ff),
    ("VADD4", 0x0000_0708, 0x0000_0fff),
    ("VSUB4", 0x0000_0f08, 0x0000_0fff),
    ("VMAD", 0x0000_0058, 0x0000_007f),
    ("IPA", 0x0000_0009, 0x0000_007f),
    ("ALD", 0x0000_0029, 0x0000_003f),
    ("AST", 0x0000_0039, 0x0000_003f),
];
