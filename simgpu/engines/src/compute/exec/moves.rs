//! Moves, selections, and predicates.

use super::super::launch::{Failure, ILLEGAL};
use super::super::warp::{LANES, Warp};
use super::{Machine, combine, fetch, finish, map, set_predicates, set_result};
use sm20::{Op, PermuteMode, Predicate, PredicateOperand};

pub(super) fn execute(warp: &mut Warp, op: &Op, mask: u32, machine: &mut Machine<'_, '_>) -> Result<(), Failure> {
    let (mut first, mut second) = ([0; LANES], [0; LANES]);
    match *op {
        Op::Mov { dst, b, lanes } => {
            let values = *fetch(warp, b, &mut first, machine)?;
            // Each of the four bits enables one lane in every group of four.
            warp.set(dst, &values, mask & (u32::from(lanes & 0xf) * 0x1111_1111));
        }
        Op::Sel { dst, a, b, select } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let (a, holds) = (warp.register(a), warp.predicate(select));
            let values = map(|lane| if holds >> lane & 1 != 0 { a[lane] } else { b[lane] });
            warp.set(dst, &values, mask);
        }
        Op::Prmt { dst, a, b, c, mode } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let c = fetch(warp, c, &mut second, machine)?;
            let a = warp.register(a);
            let values = map(|lane| permute(u64::from(c[lane]) << 32 | u64::from(a[lane]), b[lane], mode));
            warp.set(dst, &values, mask);
        }
        Op::P2R { dst, a, b } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let a = warp.register(a);
            let predicates: [u32; 7] = std::array::from_fn(|index| warp.predicate(numbered(index)));
            let values = map(|lane| {
                let all = (0..7).fold(0, |bits, index| bits | (predicates[index] >> lane & 1) << index);
                all & b[lane] | a[lane] & !b[lane]
            });
            warp.set(dst, &values, mask);
        }
        Op::R2P { a, b } => {
            let b = *fetch(warp, b, &mut first, machine)?;
            let a = *warp.register(a);
            for index in 0..7 {
                let lanes = super::mask_of(|lane| a[lane] >> index & 1 != 0);
                let named = super::mask_of(|lane| b[lane] >> index & 1 != 0);
                warp.set_predicate(numbered(index).predicate, lanes, mask & named);
            }
        }
        Op::PSet { dst, write_cc, a, b, combine: inner, float_result, logic, accumulate } => {
            let holds = combine(inner, warp.predicate(a), warp.predicate(b));
            let holds = combine(logic, holds, warp.predicate(accumulate));
            finish(warp, dst, &set_result(holds, float_result), mask, write_cc);
        }
        Op::PSetP { p, q, a, b, combine: inner, logic, accumulate } => {
            let holds = combine(inner, warp.predicate(a), warp.predicate(b));
            let with = (logic, warp.predicate(accumulate));
            set_predicates(warp, p, q, holds, with, mask);
        }
        Op::CSet { dst, write_cc, test, float_result, logic, accumulate } => {
            let holds = combine(logic, warp.flags.test(test), warp.predicate(accumulate));
            finish(warp, dst, &set_result(holds, float_result), mask, write_cc);
        }
        Op::CSetP { p, q, test, logic, accumulate } => {
            let with = (logic, warp.predicate(accumulate));
            let holds = warp.flags.test(test);
            set_predicates(warp, p, q, holds, with, mask);
        }
        _ => return Err(ILLEGAL),
    }
    Ok(())
}

/// Returns predicate `index`, which must be less than 7.
fn numbered(index: usize) -> PredicateOperand {
    PredicateOperand { predicate: Predicate::new(index as u8).unwrap_or(Predicate::TRUE), negate: false }
}

/// Selects four of eight bytes, as PRMT does.
fn permute(bytes: u64, select: u32, mode: PermuteMode) -> u32 {
    let bytes = bytes.to_le_bytes();
    let base = select as usize;
    let byte = |index: usize| bytes[index & 7];
    u32::from_le_bytes(std::array::from_fn(|index| match mode {
        PermuteMode::Index => {
            let nibble = select as usize >> (4 * index);
            if nibble & 8 != 0 { if byte(nibble) & 0x80 != 0 { 0xff } else { 0 } } else { byte(nibble) }
        }
        PermuteMode::Forward4 => byte((base & 3) + index),
        PermuteMode::Backward4 => byte((base & 3).wrapping_sub(index)),
        PermuteMode::Replicate8 => byte(base & 3),
        PermuteMode::EdgeLeft => byte((base & 3).max(index)),
        PermuteMode::EdgeRight => byte((base & 3).min(index)),
        PermuteMode::Replicate16 => byte((base & 1) * 2 + (index & 1)),
    }))
}
