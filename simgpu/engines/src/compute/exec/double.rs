//! Double-precision arithmetic on register pairs.

use super::super::launch::{Failure, ILLEGAL};
use super::super::soft::{self, F64};
use super::super::warp::{Pairs, Warp, mask_of};
use super::single::relation;
use super::{Machine, Widen, combine, fetch_pair, float_flags, set_predicates, set_result};
use sm20::{Compare, FloatOperand, Op, Register, Rounding};

pub(super) fn execute(warp: &mut Warp, op: &Op, mask: u32, machine: &mut Machine<'_, '_>) -> Result<(), Failure> {
    match *op {
        Op::DAdd { dst, write_cc, a, b, rounding } => {
            let (a, b) = (fetch_double(warp, a, machine)?, fetch_double(warp, b, machine)?);
            let values = each(|lane| match rounding {
                Rounding::Nearest => canonical(f64::from_bits(a[lane]) + f64::from_bits(b[lane])),
                _ => soft::add(a[lane], b[lane], F64, rounding),
            });
            finish(warp, dst, &values, mask, write_cc);
        }
        Op::DMul { dst, write_cc, a, b, negate, rounding } => {
            let a = warp.pair(a).map(|value| F64.modified(value, false, negate));
            let b = fetch_pair(warp, b, Widen::Double, machine)?;
            let values = each(|lane| match rounding {
                Rounding::Nearest => canonical(f64::from_bits(a[lane]) * f64::from_bits(b[lane])),
                _ => soft::mul(a[lane], b[lane], 0, F64, rounding),
            });
            finish(warp, dst, &values, mask, write_cc);
        }
        Op::DFma { dst, write_cc, a, b, c, negate_product, negate_c, rounding } => {
            let a = warp.pair(a).map(|value| F64.modified(value, false, negate_product));
            let b = fetch_pair(warp, b, Widen::Double, machine)?;
            let c = fetch_pair(warp, c, Widen::Double, machine)?.map(|value| F64.modified(value, false, negate_c));
            let values = each(|lane| soft::fma(a[lane], b[lane], c[lane], F64, rounding));
            finish(warp, dst, &values, mask, write_cc);
        }
        Op::DMnMx { dst, write_cc, a, b, select } => {
            let (a, b) = (fetch_double(warp, a, machine)?, fetch_double(warp, b, machine)?);
            let least = warp.predicate(select);
            let values = each(|lane| least_or_greatest(a[lane], b[lane], least >> lane & 1 != 0));
            finish(warp, dst, &values, mask, write_cc);
        }
        Op::DSet { dst, write_cc, a, b, compare, float_result, logic, accumulate } => {
            let holds = compared(warp, a, b, compare, machine)?;
            let holds = combine(logic, holds, warp.predicate(accumulate));
            super::finish(warp, dst, &set_result(holds, float_result), mask, write_cc);
        }
        Op::DSetP { p, q, a, b, compare, logic, accumulate } => {
            let holds = compared(warp, a, b, compare, machine)?;
            let with = (logic, warp.predicate(accumulate));
            set_predicates(warp, p, q, holds, with, mask);
        }
        _ => return Err(ILLEGAL),
    }
    Ok(())
}

/// Fetches a double operand and applies its modifiers.
pub(super) fn fetch_double(
    warp: &Warp,
    operand: FloatOperand,
    machine: &mut Machine<'_, '_>,
) -> Result<Pairs, Failure> {
    let values = fetch_pair(warp, operand.source, Widen::Double, machine)?;
    Ok(values.map(|value| F64.modified(value, operand.absolute, operand.negate)))
}

fn each(f: impl Fn(usize) -> u64) -> Pairs {
    std::array::from_fn(f)
}

fn canonical(value: f64) -> u64 {
    if value.is_nan() { F64.nan } else { value.to_bits() }
}

/// Stores a result and, if requested, sets the condition code from it.
pub(super) fn finish(warp: &mut Warp, dst: Register, values: &Pairs, mask: u32, write_cc: bool) {
    warp.set_pair(dst, values, mask);
    if write_cc {
        warp.set_flags(float_flags(F64, |lane| values[lane]), mask);
    }
}

fn least_or_greatest(a: u64, b: u64, least: bool) -> u64 {
    match (F64.is_nan(a), F64.is_nan(b)) {
        (true, true) => F64.nan,
        (true, false) => b,
        (false, true) => a,
        (false, false) => {
            let ordered = |value: u64| if value >> 63 != 0 { !value } else { value | 1 << 63 };
            if (ordered(a) < ordered(b)) == least { a } else { b }
        }
    }
}

fn compared(
    warp: &Warp,
    a: FloatOperand,
    b: FloatOperand,
    compare: Compare,
    machine: &mut Machine<'_, '_>,
) -> Result<u32, Failure> {
    let a = fetch_double(warp, a, machine)?.map(f64::from_bits);
    let b = fetch_double(warp, b, machine)?.map(f64::from_bits);
    let less = mask_of(|lane| a[lane] < b[lane]);
    let equal = mask_of(|lane| a[lane] == b[lane]);
    Ok(relation(compare, less, equal, mask_of(|lane| a[lane] > b[lane])))
}
