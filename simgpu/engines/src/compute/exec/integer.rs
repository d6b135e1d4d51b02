//! Integer arithmetic.
//!
//! The minimum or maximum of multi-word numbers is computed from the highest word down, with IMNMX.XHI, then XMED and
//! XLO, all but the last with `.CC`. GUESS: between these instructions, the condition code contains the result of
//! comparing the upper words, as after a subtraction: zero means equal, and sign means less. No known compiler uses
//! these instructions.

use super::super::launch::{Failure, ILLEGAL};
use super::super::warp::{Flags, LANES, Lanes, Warp, mask_of};
use super::{Machine, combine, fetch, finish, integer_flags, map, set_predicates, set_result};
use sm20::{AddMode, Compare, Extended, Op};

pub(super) fn execute(warp: &mut Warp, op: &Op, mask: u32, machine: &mut Machine<'_, '_>) -> Result<(), Failure> {
    let (mut first, mut second) = ([0; LANES], [0; LANES]);
    match *op {
        Op::IAdd { dst, write_cc, a, b, mode, saturate, carry_in } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let carry = carry_in.then_some(warp.flags.carry);
            let result = if !write_cc && !saturate && carry.is_none() {
                plain_sum(warp.register(a), b, mode)
            } else {
                let sum = add(warp.register(a), b, mode, carry, saturate);
                if write_cc {
                    set_flags(warp, sum.flags, carry_in, mask);
                }
                sum.values
            };
            warp.set(dst, &result, mask);
        }
        Op::IMul { dst, write_cc, a, b, a_signed, b_signed, high } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let values = product(warp.register(a), b, a_signed, b_signed, high);
            finish(warp, dst, &values, mask, write_cc);
        }
        Op::IMad { dst, write_cc, a, b, c, mode, a_signed, b_signed, high, saturate, carry_in } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let c = fetch(warp, c, &mut second, machine)?;
            let product = product(warp.register(a), b, a_signed, b_signed, high);
            let carry = carry_in.then_some(warp.flags.carry);
            let sum = if write_cc || saturate || carry.is_some() {
                let sum = add(&product, c, mode, carry, saturate);
                if write_cc {
                    set_flags(warp, sum.flags, carry_in, mask);
                }
                sum.values
            } else {
                plain_sum(&product, c, mode)
            };
            warp.set(dst, &sum, mask);
        }
        Op::IScAdd { dst, write_cc, a, b, shift, mode } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let a = warp.register(a);
            let shifted = map(|lane| a[lane] << (shift & 31));
            let sum = add(&shifted, b, mode, None, false);
            warp.set(dst, &sum.values, mask);
            if write_cc {
                set_flags(warp, sum.flags, false, mask);
            }
        }
        Op::ISad { dst, write_cc, a, b, c, signed } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let c = fetch(warp, c, &mut second, machine)?;
            let a = warp.register(a);
            let values = map(|lane| {
                let difference = if signed {
                    a[lane].cast_signed().abs_diff(b[lane].cast_signed())
                } else {
                    a[lane].abs_diff(b[lane])
                };
                difference.wrapping_add(c[lane])
            });
            finish(warp, dst, &values, mask, write_cc);
        }
        Op::IMnMx { dst, write_cc, a, b, select, signed, extended } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let (a, least) = (warp.register(a), warp.predicate(select));
            let flip = if signed { 1 << 31 } else { 0 };
            let own_less = mask_of(|lane| (a[lane] ^ flip) < (b[lane] ^ flip));
            let own_equal = mask_of(|lane| a[lane] == b[lane]);
            // A lower word matters only in lanes where all upper words were equal.
            let Flags { zero, sign, .. } = warp.flags;
            let (less, equal) = match extended {
                Extended::Whole | Extended::High => (own_less, own_equal),
                Extended::Middle | Extended::Low => ((zero & own_less) | (!zero & sign), zero & own_equal),
            };
            let first = !(less ^ least);
            let values = map(|lane| if first >> lane & 1 != 0 { a[lane] } else { b[lane] });
            match extended {
                Extended::Whole => finish(warp, dst, &values, mask, write_cc),
                Extended::High | Extended::Middle | Extended::Low => {
                    warp.set(dst, &values, mask);
                    if write_cc {
                        warp.set_flags(Flags { zero: equal, sign: less, carry: 0, overflow: 0 }, mask);
                    }
                }
            }
        }
        Op::ISet { dst, write_cc, a, b, compare, signed, carry_in, float_result, logic, accumulate } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let flags = carry_in.then_some(warp.flags);
            let holds = compared(warp.register(a), b, compare, signed, flags);
            let holds = combine(logic, holds, warp.predicate(accumulate));
            finish(warp, dst, &set_result(holds, float_result), mask, write_cc);
        }
        Op::ISetP { p, q, a, b, compare, signed, carry_in, logic, accumulate } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let flags = carry_in.then_some(warp.flags);
            let holds = compared(warp.register(a), b, compare, signed, flags);
            let with = (logic, warp.predicate(accumulate));
            set_predicates(warp, p, q, holds, with, mask);
        }
        Op::ICmp { dst, a, b, c, compare, signed } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let c = fetch(warp, c, &mut second, machine)?;
            let holds = compared(c, &[0; LANES], compare, signed, None);
            let a = warp.register(a);
            let values = map(|lane| if holds >> lane & 1 != 0 { a[lane] } else { b[lane] });
            warp.set(dst, &values, mask);
        }
        _ => return Err(ILLEGAL),
    }
    Ok(())
}

/// Result of an addition.
struct Sum {
    values: Lanes,
    flags: Flags,
}

/// Sets the condition code. With `carry_in`, the result is the upper word of a multi-word number, and the zero flag
/// requires the lower words to be zero as well.
pub(super) fn set_flags(warp: &mut Warp, mut flags: Flags, carry_in: bool, mask: u32) {
    if carry_in {
        flags.zero &= warp.flags.zero;
    }
    warp.set_flags(flags, mask);
}

fn plain_sum(a: &Lanes, b: &Lanes, mode: AddMode) -> Lanes {
    match mode {
        AddMode::Add => map(|lane| a[lane].wrapping_add(b[lane])),
        AddMode::SubtractB => map(|lane| a[lane].wrapping_sub(b[lane])),
        AddMode::SubtractA => map(|lane| b[lane].wrapping_sub(a[lane])),
        AddMode::PlusOne => map(|lane| a[lane].wrapping_add(b[lane]).wrapping_add(1)),
    }
}

/// Adds, and computes the flags. A subtraction adds the one's complement plus one, so its carry is an inverted borrow.
fn add(a: &Lanes, b: &Lanes, mode: AddMode, carry: Option<u32>, saturate: bool) -> Sum {
    let (mut values, mut flags) = ([0; LANES], Flags::default());
    for lane in 0..LANES {
        let (x, y, own) = match mode {
            AddMode::Add => (a[lane], b[lane], 0),
            AddMode::SubtractB => (a[lane], !b[lane], 1),
            AddMode::SubtractA => (!a[lane], b[lane], 1),
            AddMode::PlusOne => (a[lane], b[lane], 1),
        };
        let more = carry.map_or(own, |carry| carry >> lane & 1);
        let wide = u64::from(x) + u64::from(y) + u64::from(more);
        let exact = i64::from(x.cast_signed()) + i64::from(y.cast_signed()) + i64::from(more);
        let plain = wide as u32;
        let value =
            if saturate { exact.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32 } else { plain.cast_signed() };
        values[lane] = value.cast_unsigned();
        flags.carry |= ((wide >> 32) as u32) << lane;
        flags.overflow |= u32::from(i64::from(plain.cast_signed()) != exact) << lane;
    }
    let Flags { zero, sign, .. } = integer_flags(&values);
    Sum { values, flags: Flags { zero, sign, ..flags } }
}

fn product(a: &Lanes, b: &Lanes, a_signed: bool, b_signed: bool, high: bool) -> Lanes {
    if !high {
        return map(|lane| a[lane].wrapping_mul(b[lane]));
    }
    let wide = |value: u32, signed: bool| if signed { i64::from(value.cast_signed()) } else { i64::from(value) };
    // The upper word is correct even if the 64-bit product of two unsigned words wraps.
    map(|lane| (wide(a[lane], a_signed).wrapping_mul(wide(b[lane], b_signed)).cast_unsigned() >> 32) as u32)
}

/// Returns the lanes in which the comparison is true. With `flags`, continues the comparison of the lower words.
fn compared(a: &Lanes, b: &Lanes, compare: Compare, signed: bool, flags: Option<Flags>) -> u32 {
    let wide = |value: u32| if signed { i64::from(value.cast_signed()) } else { i64::from(value) };
    match flags {
        None => {
            let flip = if signed { 1 << 31 } else { 0 };
            let less = mask_of(|lane| (a[lane] ^ flip) < (b[lane] ^ flip));
            let equal = mask_of(|lane| a[lane] == b[lane]);
            relation(compare, less, equal)
        }
        Some(Flags { zero, carry, .. }) => {
            // The subtraction of the lower words borrowed if the carry is clear.
            let difference = |lane: usize| wide(a[lane]) - wide(b[lane]) - i64::from(!carry >> lane & 1);
            let less = mask_of(|lane| difference(lane) < 0);
            relation(compare, less, mask_of(|lane| difference(lane) == 0) & zero)
        }
    }
}

/// Returns the lanes in which a comparison of ordered numbers is true.
fn relation(compare: Compare, less: u32, equal: u32) -> u32 {
    let pick = |condition: Compare, lanes: u32| if compare.bits() & condition.bits() != 0 { lanes } else { 0 };
    pick(Compare::LT, less) | pick(Compare::EQ, equal) | pick(Compare::GT, !less & !equal)
}
