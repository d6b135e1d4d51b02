//! Single-precision arithmetic.
//!
//! Round-to-nearest results use host arithmetic. [`soft`] computes the results in other rounding modes, those of scaled
//! products, and those of warps in which a double-precision sum would be rounded twice.

use super::super::launch::{Failure, ILLEGAL};
use super::super::soft::{self, F32};
use super::super::warp::{ALL, LANES, Lanes, Warp, mask_of};
use super::{Machine, combine, fetch, fetch_float, float_flags, map, set_predicates, set_result};
use sm20::{Compare, Op, Register, Rounding, Scale};

const SIGN: u32 = 1 << 31;
const INFINITY: u32 = 0x7f80_0000;
const NAN: u32 = F32.nan as u32;

/// Executes FADD, FMUL, and FFMA.
pub(super) fn arithmetic(warp: &mut Warp, op: &Op, mask: u32, machine: &mut Machine<'_, '_>) -> Result<(), Failure> {
    let (mut first, mut second) = ([0; LANES], [0; LANES]);
    let outcome = match *op {
        Op::FFma { dst, write_cc, a, b, c, negate_product, negate_c, rounding, ftz, fmz, saturate } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let c = fetch(warp, c, &mut second, machine)?;
            let a = warp.register(a);
            let flush = ftz || fmz;
            let plain = !negate_product && !negate_c && !flush;
            let values = if plain && rounding == Rounding::Nearest {
                fused(a, b, c)
            } else {
                let (mut a, mut b, mut c) = (*a, *b, *c);
                if negate_product {
                    flip_signs(&mut a);
                }
                if negate_c {
                    flip_signs(&mut c);
                }
                if flush {
                    [&mut a, &mut b, &mut c].into_iter().for_each(flush_denormals);
                }
                if fmz {
                    zero_products(&mut a, &mut b);
                }
                match rounding {
                    Rounding::Nearest => fused(&a, &b, &c),
                    _ => each(|lane| soft::fma(a[lane].into(), b[lane].into(), c[lane].into(), F32, rounding)),
                }
            };
            Outcome { dst, write_cc, ftz: flush, saturate, values }
        }
        Op::FMul { dst, write_cc, a, b, negate, scale, rounding, ftz, fmz, saturate } => {
            let mut b = *fetch(warp, b, &mut first, machine)?;
            let mut a = *warp.register(a);
            let flush = ftz || fmz;
            if negate {
                flip_signs(&mut a);
            }
            if flush {
                flush_denormals(&mut a);
                flush_denormals(&mut b);
            }
            if fmz {
                zero_products(&mut a, &mut b);
            }
            let values = match (rounding, scale) {
                (Rounding::Nearest, Scale::One) => {
                    map(|lane| canonical(f32::from_bits(a[lane]) * f32::from_bits(b[lane])))
                }
                _ => each(|lane| soft::mul(a[lane].into(), b[lane].into(), power(scale), F32, rounding)),
            };
            Outcome { dst, write_cc, ftz: flush, saturate, values }
        }
        Op::FAdd { dst, write_cc, a, b, rounding, ftz, saturate } => {
            let mut a = fetch_float(warp, a, machine)?;
            let mut b = fetch_float(warp, b, machine)?;
            if ftz {
                flush_denormals(&mut a);
                flush_denormals(&mut b);
            }
            let values = match rounding {
                Rounding::Nearest => map(|lane| canonical(f32::from_bits(a[lane]) + f32::from_bits(b[lane]))),
                _ => each(|lane| soft::add(a[lane].into(), b[lane].into(), F32, rounding)),
            };
            Outcome { dst, write_cc, ftz, saturate, values }
        }
        _ => return Err(ILLEGAL),
    };
    outcome.store(warp, mask);
    Ok(())
}

/// A result before the common modifiers are applied.
struct Outcome {
    dst: Register,
    write_cc: bool,
    ftz: bool,
    saturate: bool,
    values: Lanes,
}

impl Outcome {
    fn store(mut self, warp: &mut Warp, mask: u32) {
        if self.ftz {
            flush_denormals(&mut self.values);
        }
        if self.saturate {
            self.values.iter_mut().for_each(|value| *value = F32.saturated(u64::from(*value)) as u32);
        }
        finish(warp, self.dst, &self.values, mask, self.write_cc);
    }
}

/// Executes FMNMX, FSET, FSETP, and FCMP.
pub(super) fn compare(warp: &mut Warp, op: &Op, mask: u32, machine: &mut Machine<'_, '_>) -> Result<(), Failure> {
    match *op {
        Op::FMnMx { dst, write_cc, a, b, select, ftz } => {
            let (a, b) = pair(warp, a, b, ftz, machine)?;
            let least = warp.predicate(select);
            let values = map(|lane| least_or_greatest(a[lane], b[lane], least >> lane & 1 != 0));
            finish(warp, dst, &values, mask, write_cc);
        }
        Op::FSet { dst, write_cc, a, b, compare, float_result, ftz, logic, accumulate } => {
            let (a, b) = pair(warp, a, b, ftz, machine)?;
            let holds = combine(logic, compared(&a, &b, compare), warp.predicate(accumulate));
            super::finish(warp, dst, &set_result(holds, float_result), mask, write_cc);
        }
        Op::FSetP { p, q, a, b, compare, ftz, logic, accumulate } => {
            let (a, b) = pair(warp, a, b, ftz, machine)?;
            let with = (logic, warp.predicate(accumulate));
            set_predicates(warp, p, q, compared(&a, &b, compare), with, mask);
        }
        Op::FCmp { dst, a, b, c, compare, ftz } => {
            let (mut first, mut second) = ([0; LANES], [0; LANES]);
            let b = fetch(warp, b, &mut first, machine)?;
            let mut c = *fetch(warp, c, &mut second, machine)?;
            if ftz {
                flush_denormals(&mut c);
            }
            let holds = compared(&c, &[0; LANES], compare);
            let a = warp.register(a);
            let values = map(|lane| if holds >> lane & 1 != 0 { a[lane] } else { b[lane] });
            warp.set(dst, &values, mask);
        }
        _ => return Err(ILLEGAL),
    }
    Ok(())
}

fn pair(
    warp: &Warp,
    a: sm20::FloatOperand,
    b: sm20::FloatOperand,
    ftz: bool,
    machine: &mut Machine<'_, '_>,
) -> Result<(Lanes, Lanes), Failure> {
    let mut a = fetch_float(warp, a, machine)?;
    let mut b = fetch_float(warp, b, machine)?;
    if ftz {
        flush_denormals(&mut a);
        flush_denormals(&mut b);
    }
    Ok((a, b))
}

/// Stores a result and, if requested, sets the condition code from it.
fn finish(warp: &mut Warp, dst: Register, values: &Lanes, mask: u32, write_cc: bool) {
    warp.set(dst, values, mask);
    if write_cc {
        warp.set_flags(float_flags(F32, |lane| u64::from(values[lane])), mask);
    }
}

/// Returns the bits of a number. NaNs are replaced with the hardware's canonical NaN.
#[inline]
fn canonical(value: f32) -> u32 {
    if value.is_nan() { NAN } else { value.to_bits() }
}

fn each(f: impl Fn(usize) -> u64) -> Lanes {
    map(|lane| f(lane) as u32)
}

fn flip_signs(values: &mut Lanes) {
    values.iter_mut().for_each(|value| *value ^= SIGN);
}

fn flush_denormals(values: &mut Lanes) {
    values.iter_mut().for_each(|value| {
        if *value & INFINITY == 0 {
            *value &= SIGN;
        }
    });
}

/// Clears both factors in lanes where either of them is zero.
fn zero_products(a: &mut Lanes, b: &mut Lanes) {
    for (a, b) in a.iter_mut().zip(b) {
        if *a & !SIGN == 0 || *b & !SIGN == 0 {
            (*a, *b) = (0, 0);
        }
    }
}

const fn power(scale: Scale) -> i32 {
    match scale {
        Scale::One => 0,
        Scale::Half => -1,
        Scale::Quarter => -2,
        Scale::Eighth => -3,
        Scale::Two => 1,
        Scale::Four => 2,
        Scale::Eight => 3,
    }
}

/// Computes a * b + c with a single rounding to nearest.
///
/// The product is exact in double precision. The sum is rounded twice, to double and then to single precision. This is
/// wrong only if the first rounding results in a midpoint between two singles, or if the result is a denormal, which
/// has fewer bits.
#[inline]
fn fused(a: &Lanes, b: &Lanes, c: &Lanes) -> Lanes {
    /// Bits of a double below the last bit of a single.
    const ROUNDED_BITS: u64 = (1 << 29) - 1;
    /// Bit with half the weight of the last bit of a single.
    const MIDDLE: u64 = 1 << 28;
    const MIN_NORMAL_BITS: u64 = (1023 - 126) << 52;
    let mut values = [0; LANES];
    let mut doubtful = 0;
    for lane in 0..LANES {
        let wide = |bits: u32| f64::from(f32::from_bits(bits));
        let sum = wide(a[lane]) * wide(b[lane]) + wide(c[lane]);
        let bits = sum.to_bits();
        let magnitude = bits & (u64::MAX >> 1);
        doubtful |= u64::from(bits & ROUNDED_BITS == MIDDLE) | u64::from(magnitude.wrapping_sub(1) < MIN_NORMAL_BITS);
        values[lane] = canonical(sum as f32);
    }
    if doubtful != 0 {
        return fused_slowly(a, b, c);
    }
    values
}

#[cold]
fn fused_slowly(a: &Lanes, b: &Lanes, c: &Lanes) -> Lanes {
    each(|lane| soft::fma(a[lane].into(), b[lane].into(), c[lane].into(), F32, Rounding::Nearest))
}

/// Returns the minimum or maximum of two numbers. If one is a NaN, returns the other. Negative zero is less than
/// positive zero.
fn least_or_greatest(a: u32, b: u32, least: bool) -> u32 {
    let is_nan = |value: u32| value & !SIGN > INFINITY;
    match (is_nan(a), is_nan(b)) {
        (true, true) => NAN,
        (true, false) => b,
        (false, true) => a,
        (false, false) => {
            // In this encoding, integer comparison orders floats.
            let ordered = |value: u32| if value & SIGN != 0 { !value } else { value | SIGN };
            if (ordered(a) < ordered(b)) == least { a } else { b }
        }
    }
}

/// Returns the lanes in which the comparison is true.
fn compared(a: &Lanes, b: &Lanes, compare: Compare) -> u32 {
    let number = |bits: u32| f32::from_bits(bits);
    let less = mask_of(|lane| number(a[lane]) < number(b[lane]));
    let equal = mask_of(|lane| number(a[lane]) == number(b[lane]));
    let greater = mask_of(|lane| number(a[lane]) > number(b[lane]));
    relation(compare, less, equal, greater)
}

/// Returns the lanes in which a comparison of possibly unordered numbers is true.
pub(super) fn relation(compare: Compare, less: u32, equal: u32, greater: u32) -> u32 {
    let pick = |condition: Compare, lanes: u32| if compare.bits() & condition.bits() != 0 { lanes } else { 0 };
    pick(Compare::LT, less)
        | pick(Compare::EQ, equal)
        | pick(Compare::GT, greater)
        | pick(Compare::NAN, ALL & !(less | equal | greater))
}
