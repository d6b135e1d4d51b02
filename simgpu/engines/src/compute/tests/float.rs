//! Floating-point instructions. The reference for round-to-nearest is host arithmetic. For other rounding modes, it is
//! the exact result as a sum of two doubles.

use super::rig::{Input, Output, Random, check, inputs};
use crate::compute::soft::{self, F16, F32, F64};
use sm20::Rounding;

const NAN: u32 = 0x7fff_ffff;

/// Edge values: zeros, denormals, the limits of the range, ones and their neighbours, infinities, and NaNs.
const EDGES: [u64; 16] = [
    0x0000_0000,
    0x8000_0000,
    0x0000_0001,
    0x8000_0001,
    0x007f_ffff,
    0x0080_0000,
    0x3f7f_ffff,
    0x3f80_0000,
    0xbf80_0001,
    0x4b7f_ffff,
    0x7f7f_ffff,
    0xff7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_0000,
    0xffff_ffff,
];

fn single(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn bits(value: f32) -> u32 {
    if value.is_nan() { NAN } else { value.to_bits() }
}

/// Returns a number of arbitrary magnitude. Half of the numbers have similar magnitudes.
fn number(random: &mut Random) -> u64 {
    let bits = random.next();
    if bits & 1 << 40 != 0 { bits & 0x80ff_ffff | 0x3f00_0000 } else { bits & 0xffff_ffff }
}

fn numbers() -> Vec<Input> {
    inputs(&EDGES, true, 6000, number)
}

fn low(output: Output) -> u32 {
    output.low
}

#[track_caller]
fn agrees(code: &str, expected: impl Fn(f32, f32, f32) -> f32) {
    check(code, &numbers(), low, |[a, b, c]| bits(expected(single(a), single(b), single(c))));
}

fn flush(value: f32) -> f32 {
    if value.is_subnormal() { 0.0f32.copysign(value) } else { value }
}

#[test]
fn sums_products_and_fused_to_the_nearest() {
    agrees("FADD R12, R4, R6", |a, b, _| a + b);
    agrees("FADD R12, |R4|, -R6", |a, b, _| a.abs() - b);
    agrees("FADD.FTZ R12, R4, R6", |a, b, _| flush(flush(a) + flush(b)));
    agrees("FMUL R12, R4, R6", |a, b, _| a * b);
    agrees("FMUL R12, -R4, R6", |a, b, _| -(a * b));
    agrees("FMUL.SAT R12, R4, R6", |a, b, _| if (a * b).is_nan() { 0.0 } else { (a * b).clamp(0.0, 1.0).abs() });
    agrees("FMUL.D4 R12, R4, R6", |a, b, _| (f64::from(a) * f64::from(b) * 0.25) as f32);
    agrees("FMUL.M8 R12, R4, R6", |a, b, _| (f64::from(a) * f64::from(b) * 8.0) as f32);
    agrees("FMUL.FMZ R12, R4, R6", |a, b, _| {
        let (a, b) = (flush(a), flush(b));
        if a == 0.0 || b == 0.0 { 0.0 } else { flush(a * b) }
    });
    agrees("FADD32I R12, |R4|, 0.1", |a, _, _| a.abs() + 0.1);
    agrees("FMUL32I.SAT R12, R4, 0.1", |a, _, _| if a.is_nan() { 0.0 } else { (a * 0.1).clamp(0.0, 1.0).abs() });
    agrees("MOV R12, R8\nFFMA32I R12, R4, 1.1, R12", |a, _, c| a.mul_add(1.1, c));
    agrees("FFMA R12, R4, -0.5, R8", |a, _, c| a.mul_add(-0.5, c));
    agrees("FFMA R12, R4, R6, R8", f32::mul_add);
    agrees("FFMA R12, -R4, R6, -R8", |a, b, c| (-a).mul_add(b, -c));
    agrees("FFMA.FTZ R12, R4, R6, R8", |a, b, c| flush(flush(a).mul_add(flush(b), flush(c))));
}

#[test]
fn fused_rounds_once_where_doubles_would_round_twice() {
    // 1 + 2^-24 + 2^-47 is just above the midpoint of two singles.
    let cases = [[0x3f80_0001, 0x3380_0000, 0x3f80_0000], [0x3f80_0000, 0x3380_0000, 0x3f80_0000]];
    let tiny = [[0x2d80_0000, 0x2180_0000, 0x0000_0001], [0x1f80_0001, 0x1f80_0001, 0x0080_0000]];
    check("FFMA R12, R4, R6, R8", &[cases, tiny].concat(), low, |[a, b, c]| {
        bits(single(a).mul_add(single(b), single(c)))
    });
}

/// Rounds the exact value `sum + error`, which is close to `sum`, to a single in the direction of `rounding`.
fn directed(sum: f64, error: f64, rounding: Rounding, zero: f32) -> f32 {
    if sum.is_nan() || sum.is_infinite() {
        return sum as f32;
    }
    if sum == 0.0 && error == 0.0 {
        return zero;
    }
    let exact_above = |value: f32| {
        let value = f64::from(value);
        value < sum || (value == sum && error > 0.0)
    };
    let exact_below = |value: f32| {
        let value = f64::from(value);
        value > sum || (value == sum && error < 0.0)
    };
    let nearest = sum as f32;
    let down = if exact_below(nearest) { nearest.next_down() } else { nearest };
    let up = if exact_above(nearest) { nearest.next_up() } else { nearest };
    match rounding {
        Rounding::Down => down,
        Rounding::Up => up,
        Rounding::Zero => {
            if sum < 0.0 {
                up
            } else {
                down
            }
        }
        Rounding::Nearest => nearest,
    }
}

/// Computes a + b exactly, as the rounded sum and its error.
fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let other = sum - a;
    (sum, (a - (sum - other)) + (b - other))
}

#[test]
fn directed_roundings() {
    for (name, rounding) in [("RM", Rounding::Down), ("RP", Rounding::Up), ("RZ", Rounding::Zero)] {
        let zero_of = |a: f64, b: f64| match (a.is_sign_negative(), b.is_sign_negative()) {
            (false, false) => 0.0,
            (true, true) => -0.0,
            _ => {
                if rounding == Rounding::Down {
                    -0.0
                } else {
                    0.0
                }
            }
        };
        let sum = |a: f64, b: f64| {
            let (sum, error) = two_sum(a, b);
            directed(sum, error, rounding, zero_of(a, b))
        };
        agrees(&format!("FADD.{name} R12, R4, R6"), |a, b, _| sum(a.into(), b.into()));
        agrees(&format!("FMUL.{name} R12, R4, R6"), |a, b, _| {
            let product = f64::from(a) * f64::from(b);
            directed(product, 0.0, rounding, product as f32)
        });
        agrees(&format!("FFMA.{name} R12, R4, R6, R8"), |a, b, c| sum(f64::from(a) * f64::from(b), c.into()));
    }
}

#[test]
fn comparisons_with_every_set_of_relations() {
    let pairs = inputs(&EDGES, false, 400, number);
    for (name, set) in [
        ("LT", 1),
        ("EQ", 2),
        ("LE", 3),
        ("GT", 4),
        ("NE", 5),
        ("GE", 6),
        ("NUM", 7),
        ("NAN", 8),
        ("LTU", 9),
        ("EQU", 10),
        ("LEU", 11),
        ("GTU", 12),
        ("NEU", 13),
        ("GEU", 14),
    ] {
        let holds = |a: f32, b: f32| {
            set & match a.partial_cmp(&b) {
                Some(std::cmp::Ordering::Less) => 1,
                Some(std::cmp::Ordering::Equal) => 2,
                Some(std::cmp::Ordering::Greater) => 4,
                None => 8,
            } != 0
        };
        check(
            &format!("FSETP.{name}.AND P0, P1, R4, R6"),
            &pairs,
            |o| o.bits & 3,
            |[a, b, _]| {
                if holds(single(a), single(b)) { 1 } else { 2 }
            },
        );
        check(&format!("FSET.BF.{name}.AND R12, R4, |R6|"), &pairs, low, |[a, b, _]| {
            if holds(single(a), single(b).abs()) { 0x3f80_0000 } else { 0 }
        });
    }
    check("FCMP.GE R12, R4, R6, R8", &numbers(), low, |[a, b, c]| (if single(c) >= 0.0 { a } else { b }) as u32);
    for (least, name) in [(true, "PT"), (false, "!PT")] {
        check(&format!("FMNMX R12, R4, R6, {name}"), &pairs, low, |[a, b, _]| {
            let (a, b) = (single(a), single(b));
            let first_is_less = a < b || (a == b && a.is_sign_negative());
            match (a.is_nan(), b.is_nan()) {
                (true, true) => NAN,
                (true, false) => b.to_bits(),
                (false, true) => a.to_bits(),
                _ => if first_is_less == least { a } else { b }.to_bits(),
            }
        });
    }
}

#[test]
fn condition_code_reports_zero_sign_and_nan() {
    check(
        "FADD R12.CC, R4, R6",
        &numbers(),
        |o| o.bits & 0x30,
        |[a, b, _]| {
            let sum = single(a) + single(b);
            if sum.is_nan() { 0x30 } else { u32::from(sum == 0.0) << 4 | u32::from(sum.is_sign_negative()) << 5 }
        },
    );
}

const DOUBLES: [u64; 12] = [
    0,
    1 << 63,
    1,
    0x000f_ffff_ffff_ffff,
    0x0010_0000_0000_0000,
    0x3ff0_0000_0000_0000,
    0xbff0_0000_0000_0001,
    0x4340_0000_0000_0000,
    0x7fef_ffff_ffff_ffff,
    0x7ff0_0000_0000_0000,
    0xfff0_0000_0000_0000,
    0x7ff8_0000_0000_0001,
];

fn double_number(random: &mut Random) -> u64 {
    let bits = random.next();
    if random.next() & 1 != 0 { bits & 0x803f_ffff_ffff_ffff | 0x3fc0_0000_0000_0000 } else { bits }
}

#[test]
fn doubles() {
    let cases = inputs(&DOUBLES, true, 3000, double_number);
    let canonical = |value: f64| if value.is_nan() { 0xfff8_0000_0000_0000 } else { value.to_bits() };
    let number = f64::from_bits;
    check("DADD R12, R4, -R6", &cases, Output::wide, |[a, b, _]| canonical(number(a) - number(b)));
    check("DMUL R12, R4, R6", &cases, Output::wide, |[a, b, _]| canonical(number(a) * number(b)));
    check("DFMA R12, R4, R6, R8", &cases, Output::wide, |[a, b, c]| canonical(number(a).mul_add(number(b), number(c))));
    check(
        "DSETP.LTU.AND P0, P1, R4, R6",
        &cases,
        |o| o.bits & 3,
        |[a, b, _]| {
            if number(a) >= number(b) { 2 } else { 1 }
        },
    );
    check("DMNMX R12, R4, R6, PT", &cases, Output::wide, |[a, b, _]| {
        let (x, y) = (number(a), number(b));
        let first = if x == y { x.is_sign_negative() } else { x < y };
        match (x.is_nan(), y.is_nan()) {
            (true, true) => 0xfff8_0000_0000_0000,
            (true, false) => b,
            (false, true) => a,
            _ => {
                if first {
                    a
                } else {
                    b
                }
            }
        }
    });
    let set = "DSETP.GT.AND P2, PT, R6, R8\nDSET.NE.OR R12, R4, -|R6|, P2";
    check(set, &cases, low, |[a, b, c]| {
        let unequal = number(a) < -number(b).abs() || number(a) > -number(b).abs();
        if unequal || number(b) > number(c) { u32::MAX } else { 0 }
    });
    // The inputs are integers, so the exact result fits a 128-bit integer.
    let integers = inputs(&[0], false, 2000, |random| (random.next() >> 11) as f64 as u64);
    let cases: Vec<Input> = integers.iter().map(|numbers| numbers.map(|n| ((n as f64) - 1e15).to_bits())).collect();
    for (name, rounding) in [("RM", Rounding::Down), ("RP", Rounding::Up), ("RZ", Rounding::Zero)] {
        check(&format!("DFMA.{name} R12, R4, R6, R8"), &cases, Output::wide, |[a, b, c]| {
            let exact = number(a) as i128 * number(b) as i128 + number(c) as i128;
            let nearest = exact as f64;
            let (above, below) = (exact > nearest as i128, exact < nearest as i128);
            let (up, down) =
                (if above { nearest.next_up() } else { nearest }, if below { nearest.next_down() } else { nearest });
            match rounding {
                Rounding::Up => up,
                Rounding::Down => down,
                _ => {
                    if exact < 0 {
                        up
                    } else {
                        down
                    }
                }
            }
            .to_bits()
        });
    }
}

#[test]
fn conversions() {
    let singles = inputs(&EDGES, false, 2000, number);
    check("F2I.S32.F32.TRUNC R12, R4", &singles, low, |[a, ..]| (single(a) as i32).cast_unsigned());
    check("F2I.U32.F32.TRUNC R12, R4", &singles, low, |[a, ..]| single(a) as u32);
    check("F2I.S32.F32.FLOOR R12, R4", &singles, low, |[a, ..]| (single(a).floor() as i32).cast_unsigned());
    check("F2I.S32.F32.CEIL R12, -R4", &singles, low, |[a, ..]| ((-single(a)).ceil() as i32).cast_unsigned());
    check("F2I.S32.F32 R12, R4", &singles, low, |[a, ..]| (single(a).round_ties_even() as i32).cast_unsigned());
    check("F2I.S64.F32.TRUNC R12, R4", &singles, Output::wide, |[a, ..]| (single(a) as i64).cast_unsigned());
    check("F2I.S16.F32.TRUNC R12, R4", &singles, low, |[a, ..]| i32::from(single(a) as i16).cast_unsigned());
    check("F2F.F32.F32.FLOOR R12, R4", &singles, low, |[a, ..]| bits(single(a).floor()));
    check("F2F.F32.F32.ROUND R12, R4", &singles, low, |[a, ..]| bits(single(a).round_ties_even()));
    check("F2F.F64.F32 R12, R4", &singles, Output::wide, |[a, ..]| {
        let value = f64::from(single(a));
        if value.is_nan() { 0xfff8_0000_0000_0000 } else { value.to_bits() }
    });
    let wide = inputs(&DOUBLES, false, 2000, double_number);
    check("F2F.F32.F64 R12, R4", &wide, low, |[a, ..]| bits(f64::from_bits(a) as f32));
    check("F2I.U64.F64.TRUNC R12, R4", &wide, Output::wide, |[a, ..]| f64::from_bits(a) as u64);
    let integers = inputs(&[0, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 1 << 63, u64::MAX], false, 2000, |random| {
        random.next() >> (random.next() % 64)
    });
    check("I2F.F32.S32 R12, R4", &integers, low, |[a, ..]| bits((a as u32).cast_signed() as f32));
    check("I2F.F32.U32 R12, R4", &integers, low, |[a, ..]| bits(a as u32 as f32));
    check("I2F.F32.U64 R12, R4", &integers, low, |[a, ..]| bits(a as f32));
    check("I2F.F64.S64 R12, R4", &integers, Output::wide, |[a, ..]| (a.cast_signed() as f64).to_bits());
    check("I2F.F32.S32.RZ R12, R4", &integers, low, |[a, ..]| {
        let exact = (a as u32).cast_signed();
        let nearest = exact as f32;
        let too_far = (nearest as i64).abs() > i64::from(exact).abs();
        bits(if too_far { f32::from_bits(nearest.to_bits() - 1) } else { nearest })
    });
}

/// Returns the value of a half-precision float by definition.
fn half(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
    let magnitude = match exponent {
        0 => fraction * 2f64.powi(-24),
        31 => {
            if fraction == 0.0 {
                f64::INFINITY
            } else {
                f64::NAN
            }
        }
        _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
    };
    if bits >> 15 != 0 { -magnitude } else { magnitude }
}

#[test]
fn halves_both_ways() {
    let all: Vec<Input> = (0..0x1_0000).map(|bits| [bits | bits << 16, 0, 0]).collect();
    check("F2F.F32.F16 R12, R4", &all, low, |[a, ..]| bits(half(a as u16) as f32));
    check("F2F.F32.F16.H1 R12, R4\nF2F.F16.F32 R12, R12", &all, low, |[a, ..]| {
        if half(a as u16).is_nan() { 0x7fff } else { a as u32 & 0xffff }
    });
    // A number halfway between two halves rounds to the one with an even mantissa.
    for (bits, expected) in
        [(0x3f80_1000u32, 0x3c00), (0x3f80_3000, 0x3c02), (0x3f80_1001, 0x3c01), (0x477f_f000, 0x7c00)]
    {
        assert_eq!(soft::convert(bits.into(), F32, F16, Rounding::Nearest), expected);
    }
}

/// Tests the multi-function unit. Its results are correctly rounded, so they may differ by one ULP from the host's
/// single-precision functions.
#[test]
fn multi_function_unit() {
    let cases: Vec<Input> = inputs(&[0x3f80_0000], false, 3000, number);
    for (name, function) in [
        ("RCP", f64::recip as fn(f64) -> f64),
        ("RSQ", |value| 1.0 / value.sqrt()),
        ("LG2", f64::log2),
        ("EX2", f64::exp2),
    ] {
        check(&format!("MUFU.{name} R12, R4"), &cases, low, |[a, ..]| {
            let value = function(f64::from(flush(single(a)))) as f32;
            bits(flush(value))
        });
    }
    let angles: Vec<Input> = (0..2000).map(|step| [(step as f32 * 0.01 - 10.0).to_bits().into(), 0, 0]).collect();
    check("RRO.SINCOS R12, R4\nMUFU.SIN R12, R12", &angles, low, |[a, ..]| bits(f64::from(single(a)).sin() as f32));
    check("RRO.SINCOS R12, R4\nMUFU.COS R12, R12", &angles, low, |[a, ..]| bits(f64::from(single(a)).cos() as f32));
    // Improve the approximate reciprocal by two Newton steps.
    let doubles: Vec<Input> = (1..500).map(|step| [(f64::from(step) * 0.37).to_bits(), 0, 0]).collect();
    let newton = "MUFU.RCP64H R13, R5\nMOV R12, RZ\nMOV R8, RZ\nMOV32I R9, 0x3ff00000\n\
                  DFMA R16, -R4, R12, R8\nDFMA R12, R12, R16, R12\nDFMA R16, -R4, R12, R8\nDFMA R12, R12, R16, R12";
    check(
        newton,
        &doubles,
        |o| o.wide(),
        |[a, ..]| {
            let (x, y) = (f64::from_bits(a), f64::from_bits(a & !0xffff_ffff).recip());
            // Repeat the same steps with the same initial value.
            let start = f64::from_bits(y.to_bits() & !0xffff_ffff);
            let once = start.mul_add((-x).mul_add(start, 1.0), start);
            once.mul_add((-x).mul_add(once, 1.0), once).to_bits()
        },
    );
}

#[test]
fn soft_arithmetic_to_the_nearest_is_the_hosts() {
    let mut random = Random(77);
    for _ in 0..20_000 {
        let [a, b, c]: [u64; 3] = std::array::from_fn(|_| double_number(&mut random));
        let number = f64::from_bits;
        let canonical = |value: f64| if value.is_nan() { F64.nan } else { value.to_bits() };
        assert_eq!(soft::add(a, b, F64, Rounding::Nearest), canonical(number(a) + number(b)));
        assert_eq!(soft::mul(a, b, 0, F64, Rounding::Nearest), canonical(number(a) * number(b)));
        assert_eq!(soft::fma(a, b, c, F64, Rounding::Nearest), canonical(number(a).mul_add(number(b), number(c))));
    }
}
