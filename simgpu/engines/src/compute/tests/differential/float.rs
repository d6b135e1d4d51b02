//! Floating-point instructions of one thread, computed with the definitions in `exact`.

use super::exact::{self, DOUBLE, Format, HALF, SINGLE};
use super::integer::{integer, join, range, set_integer};
use super::{Cc, Env, Thread};
use sm20::{Compare, FloatOperand, FloatType, MultiFunction, Op, Rounding, Scale, Source};

fn modified(bits: u64, absolute: bool, negate: bool, format: Format) -> u64 {
    let bits = if absolute { bits & !format.sign() } else { bits };
    if negate { bits ^ format.sign() } else { bits }
}

/// Returns a single or double operand, with modifiers applied.
fn operand(thread: &Thread, operand: FloatOperand, ftz: bool, format: Format, env: &Env<'_>) -> Result<u64, u32> {
    let bits =
        if format == DOUBLE { thread.pair(operand.source, env)? } else { thread.word(operand.source, env)?.into() };
    let bits = modified(bits, operand.absolute, operand.negate, format);
    Ok(if ftz { format.flushed(bits) } else { bits })
}

fn cc(bits: u64, format: Format) -> Cc {
    let nan = format.is_nan(bits);
    let zero = bits & !format.sign() == 0;
    Cc { zero: nan || zero, sign: nan || bits & format.sign() != 0, carry: false, overflow: false }
}

fn saturated(bits: u64, format: Format) -> u64 {
    let value = format.value(bits);
    let one = (format.infinity() >> 1) & format.infinity();
    if value >= 1.0 {
        one
    } else if value > 0.0 {
        bits
    } else {
        0
    }
}

/// Applies the modifiers to a result and stores it.
fn finish(thread: &mut Thread, dst: sm20::Register, bits: u64, format: Format, modes: (bool, bool, bool)) {
    let (write_cc, ftz, saturate) = modes;
    let bits = if ftz { format.flushed(bits) } else { bits };
    let bits = if saturate { saturated(bits, format) } else { bits };
    let cc = write_cc.then_some(cc(bits, format));
    if format == DOUBLE { thread.set_pair(dst, bits, cc) } else { thread.set(dst, bits as u32, cc) }
}

fn compared(a: u64, b: u64, compare: Compare, format: Format) -> bool {
    compare.holds(format.value(a).partial_cmp(&format.value(b)))
}

fn least_or_greatest(a: u64, b: u64, least: bool, format: Format) -> u64 {
    let (x, y) = (format.value(a), format.value(b));
    match (x.is_nan(), y.is_nan()) {
        (true, true) => format.nan,
        (true, false) => b,
        (false, true) => a,
        (false, false) => {
            let a_is_least = x.total_cmp(&y).is_lt();
            if a_is_least == least { a } else { b }
        }
    }
}

fn set(thread: &mut Thread, dst: sm20::Register, holds: bool, float_result: bool, write_cc: bool) {
    let value = match (holds, float_result) {
        (false, _) => 0,
        (true, false) => u32::MAX,
        (true, true) => 1f32.to_bits(),
    };
    let cc = Cc { zero: value == 0, sign: value >> 31 != 0, carry: false, overflow: false };
    thread.set(dst, value, write_cc.then_some(cc));
}

const fn format(kind: FloatType) -> Format {
    match kind {
        FloatType::F16 => HALF,
        FloatType::F32 => SINGLE,
        FloatType::F64 => DOUBLE,
    }
}

/// Rounds a number to an integer.
fn integral(value: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => value.round_ties_even(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
        Rounding::Zero => value.trunc(),
    }
}

/// Returns the operand of a conversion instruction.
fn converted(
    old: &Thread,
    b: FloatOperand,
    from: FloatType,
    ftz: bool,
    upper_half: bool,
    env: &Env<'_>,
) -> Result<u64, u32> {
    if from != FloatType::F16 {
        return operand(old, b, ftz && from == FloatType::F32, format(from), env);
    }
    let word = old.word(b.source, env)?;
    let bits = if upper_half { word >> 16 } else { word & 0xffff };
    Ok(modified(bits.into(), b.absolute, b.negate, HALF))
}

fn power(scale: Scale) -> i32 {
    [Scale::Eighth, Scale::Quarter, Scale::Half, Scale::One, Scale::Two, Scale::Four, Scale::Eight]
        .iter()
        .position(|known| *known == scale)
        .expect("one of them") as i32
        - 3
}

pub(super) fn execute(op: &Op, thread: &mut Thread, env: &Env<'_>) -> Result<(), u32> {
    let old = thread.clone();
    let reg = |register| FloatOperand { source: Source::Register(register), negate: false, absolute: false };
    let src = |source| FloatOperand { source, negate: false, absolute: false };
    let negated = |operand: FloatOperand, negate| FloatOperand { negate, ..operand };
    let single = |given: FloatOperand, ftz: bool| operand(&old, given, ftz, SINGLE, env);
    let double = |given: FloatOperand| operand(&old, given, false, DOUBLE, env);
    let zero = |bits: u64, format: Format| bits & !format.sign() == 0;
    match *op {
        Op::FAdd { dst, write_cc, a, b, rounding, ftz, saturate } => {
            let bits = exact::add(single(a, ftz)?, single(b, ftz)?, SINGLE, rounding);
            finish(thread, dst, bits, SINGLE, (write_cc, ftz, saturate));
        }
        Op::FMul { dst, write_cc, a, b, negate, scale, rounding, ftz, fmz, saturate } => {
            let flush = ftz || fmz;
            let (a, b) = (single(negated(reg(a), negate), flush)?, single(src(b), flush)?);
            let nothing = fmz && (zero(a, SINGLE) || zero(b, SINGLE));
            let bits = if nothing { 0 } else { exact::mul(a, b, power(scale), SINGLE, rounding) };
            finish(thread, dst, bits, SINGLE, (write_cc, flush, saturate));
        }
        Op::FFma { dst, write_cc, a, b, c, negate_product, negate_c, rounding, ftz, fmz, saturate } => {
            let flush = ftz || fmz;
            let (a, b) = (single(negated(reg(a), negate_product), flush)?, single(src(b), flush)?);
            let c = single(negated(src(c), negate_c), flush)?;
            let (a, b) = if fmz && (zero(a, SINGLE) || zero(b, SINGLE)) { (0, 0) } else { (a, b) };
            let bits = exact::fma(a, b, 0, c, SINGLE, rounding);
            finish(thread, dst, bits, SINGLE, (write_cc, flush, saturate));
        }
        Op::FMnMx { dst, write_cc, a, b, select, ftz } => {
            let bits = least_or_greatest(single(a, ftz)?, single(b, ftz)?, old.predicate(select), SINGLE);
            finish(thread, dst, bits, SINGLE, (write_cc, false, false));
        }
        Op::FSet { dst, write_cc, a, b, compare, float_result, ftz, logic, accumulate } => {
            let own = compared(single(a, ftz)?, single(b, ftz)?, compare, SINGLE);
            set(thread, dst, join(logic, own, old.predicate(accumulate)), float_result, write_cc);
        }
        Op::FSetP { p, q, a, b, compare, ftz, logic, accumulate } => {
            let own = compared(single(a, ftz)?, single(b, ftz)?, compare, SINGLE);
            thread.set_predicates(p, q, own, logic, old.predicate(accumulate));
        }
        Op::FCmp { dst, a, b, c, compare, ftz } => {
            let (a, b) = (single(reg(a), false)?, single(src(b), false)?);
            let value = if compared(single(src(c), ftz)?, 0, compare, SINGLE) { a } else { b };
            thread.set(dst, value as u32, None);
        }
        Op::Rro { dst, b, function: _ } => {
            let bits = single(b, false)?;
            thread.set(dst, bits as u32, None);
        }
        Op::DAdd { dst, write_cc, a, b, rounding } => {
            let bits = exact::add(double(a)?, double(b)?, DOUBLE, rounding);
            finish(thread, dst, bits, DOUBLE, (write_cc, false, false));
        }
        Op::DMul { dst, write_cc, a, b, negate, rounding } => {
            let bits = exact::mul(double(negated(reg(a), negate))?, double(src(b))?, 0, DOUBLE, rounding);
            finish(thread, dst, bits, DOUBLE, (write_cc, false, false));
        }
        Op::DFma { dst, write_cc, a, b, c, negate_product, negate_c, rounding } => {
            let (a, b) = (double(negated(reg(a), negate_product))?, double(src(b))?);
            let bits = exact::fma(a, b, 0, double(negated(src(c), negate_c))?, DOUBLE, rounding);
            finish(thread, dst, bits, DOUBLE, (write_cc, false, false));
        }
        Op::DMnMx { dst, write_cc, a, b, select } => {
            let bits = least_or_greatest(double(a)?, double(b)?, old.predicate(select), DOUBLE);
            finish(thread, dst, bits, DOUBLE, (write_cc, false, false));
        }
        Op::DSet { dst, write_cc, a, b, compare, float_result, logic, accumulate } => {
            let own = compared(double(a)?, double(b)?, compare, DOUBLE);
            set(thread, dst, join(logic, own, old.predicate(accumulate)), float_result, write_cc);
        }
        Op::DSetP { p, q, a, b, compare, logic, accumulate } => {
            let own = compared(double(a)?, double(b)?, compare, DOUBLE);
            thread.set_predicates(p, q, own, logic, old.predicate(accumulate));
        }
        Op::F2F { dst, write_cc, b, to, from, rounding, integer, ftz, saturate, upper_half } => {
            let bits = converted(&old, b, from, ftz, upper_half, env)?;
            let (from, to) = (format(from), format(to));
            let bits = match from.value(bits) {
                value if integer && value.is_finite() => {
                    // Round to an integer of the same type: the integers next to a float are exact in its type.
                    exact::convert(integral(value, rounding).to_bits(), DOUBLE, to, Rounding::Nearest)
                }
                _ => exact::convert(bits, from, to, rounding),
            };
            finish(thread, dst, bits, to, (write_cc, ftz && to == SINGLE, saturate));
        }
        Op::F2I { dst, write_cc, b, to, from, rounding, ftz, upper_half } => {
            let bits = converted(&old, b, from, ftz, upper_half, env)?;
            let (least, most) = range(to);
            let value = integral(format(from).value(bits), rounding);
            // A NaN becomes 0, and a number outside the type's range becomes the nearest limit.
            let value = (value as i128).clamp(least, most);
            set_integer(thread, dst, value, to, write_cc);
        }
        Op::I2F { dst, write_cc, b, to, from, rounding, part } => {
            let bits = exact::from_integer(integer(&old, b, from, part, env)?, format(to), rounding);
            finish(thread, dst, bits, format(to), (write_cc, false, false));
        }
        _ => panic!("{op:?} has no reference"),
    }
    Ok(())
}

/// Maximum MUFU error in ULPs: half a ULP, plus the error of the reference.
const UNITS: f64 = 0.501;

/// Returns true if `result` is within MUFU's permitted error for the argument. The reference uses double-precision host
/// arithmetic and series.
pub(super) fn mufu_agrees(function: MultiFunction, argument: u64, saturate: bool, result: u32) -> bool {
    let x = SINGLE.value(SINGLE.flushed(argument));
    let double = |bits: u32| f64::from_bits(u64::from(bits) << 32);
    let wide = matches!(function, MultiFunction::Rcp64H | MultiFunction::Rsq64H);
    if wide {
        let x = double(argument as u32);
        let x = if x.is_subnormal() { 0.0f64.copysign(x) } else { x };
        let exact = if function == MultiFunction::Rcp64H { 1.0 / x } else { 1.0 / x.sqrt() };
        let bits = (exact.to_bits() >> 32) as u32;
        let bits = if exact.is_subnormal() { bits & 1 << 31 } else { bits };
        let same_nan = exact.is_nan() && double(result).is_nan();
        return saturate || same_nan || bits == result;
    }
    let exact = match function {
        MultiFunction::Rcp => 1.0 / x,
        MultiFunction::Rsq => 1.0 / x.sqrt(),
        MultiFunction::Lg2 => logarithm(x),
        MultiFunction::Ex2 => power_of_two(x),
        MultiFunction::Sin => sine(x),
        MultiFunction::Cos => sine(x + std::f64::consts::FRAC_PI_2),
        MultiFunction::Rcp64H | MultiFunction::Rsq64H => unreachable!("above"),
    };
    let value = f64::from(f32::from_bits(result));
    let least = f64::from(f32::MIN_POSITIVE);
    if exact.is_nan() {
        return if saturate { result == 0 } else { u64::from(result) == SINGLE.nan };
    }
    let exact = if saturate { exact.clamp(0.0, 1.0) } else { exact };
    if exact.abs() > f64::from(f32::MAX) {
        return value.is_infinite() && value.signum() == exact.signum();
    }
    if exact.abs() < least {
        return value == 0.0 || value.abs() <= least;
    }
    let unit = 2f64.powi((exact.abs().to_bits() >> 52) as i32 - 1023 - 23);
    (value - exact).abs() <= UNITS * unit + 1e-15
}

/// Returns the binary logarithm: the exponent plus the logarithm of the fraction, which a series computes.
fn logarithm(x: f64) -> f64 {
    if x.is_nan() || x < 0.0 {
        return f64::NAN;
    }
    if x == 0.0 || x.is_infinite() {
        return if x == 0.0 { f64::NEG_INFINITY } else { x };
    }
    let exponent = (x.to_bits() >> 52) as i32 - 1023;
    let fraction = x / 2f64.powi(exponent);
    // ln(f) = 2 artanh((f - 1) / (f + 1)). Centre the fraction on 1. Otherwise, adding the exponent would lose
    // precision for arguments just below 1.
    let (fraction, exponent) = if fraction > 1.5 { (fraction / 2.0, exponent + 1) } else { (fraction, exponent) };
    let t = (fraction - 1.0) / (fraction + 1.0);
    let series: f64 = (0..40).rev().fold(0.0, |sum, n| sum * t * t + 1.0 / f64::from(2 * n + 1));
    f64::from(exponent) + 2.0 * t * series / std::f64::consts::LN_2
}

/// Returns 2^`x`: the nearest integer determines the exponent, and a series computes the rest.
fn power_of_two(x: f64) -> f64 {
    if !(-200.0..=200.0).contains(&x) {
        return if x.is_nan() {
            x
        } else if x > 0.0 {
            f64::INFINITY
        } else {
            0.0
        };
    }
    let whole = x.round();
    let rest = (x - whole) * std::f64::consts::LN_2;
    (1..30).rev().fold(1.0, |sum, n| 1.0 + sum * rest / f64::from(n)) * 2f64.powi(whole as i32)
}

/// Returns the sine, which is accurate only for small arguments.
fn sine(x: f64) -> f64 {
    if !x.is_finite() {
        return f64::NAN;
    }
    let turns = (x / std::f64::consts::PI).round();
    let rest = x - turns * std::f64::consts::PI;
    let series = (1..14).rev().fold(1.0, |sum, n| 1.0 - sum * rest * rest / f64::from((2 * n) * (2 * n + 1)));
    if turns % 2.0 == 0.0 { rest * series } else { -rest * series }
}

/// Returns true if the reference for MUFU is accurate at this argument.
pub(super) fn mufu_is_checked(function: MultiFunction, argument: u64) -> bool {
    let x = SINGLE.value(argument);
    !matches!(function, MultiFunction::Sin | MultiFunction::Cos) || !x.is_finite() || x.abs() < 100.0
}
