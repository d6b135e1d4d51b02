//! Bitwise logic, shifts, and bit fields.

use super::super::launch::{Failure, ILLEGAL};
use super::super::warp::{LANES, Warp};
use super::integer::set_flags;
use super::{Machine, fetch, finish, integer_flags, map};
use sm20::{LogicOp, Op};

pub(super) fn execute(warp: &mut Warp, op: &Op, mask: u32, machine: &mut Machine<'_, '_>) -> Result<(), Failure> {
    let (mut first, mut second) = ([0; LANES], [0; LANES]);
    match *op {
        Op::Lop { dst, write_cc, a, b, logic, invert_a, invert_b, carry_in } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let (a, flip_a, flip_b) = (warp.register(a), all_if(invert_a), all_if(invert_b));
            let values = match logic {
                LogicOp::And => map(|lane| (a[lane] ^ flip_a) & (b[lane] ^ flip_b)),
                LogicOp::Or => map(|lane| (a[lane] ^ flip_a) | (b[lane] ^ flip_b)),
                LogicOp::Xor => map(|lane| (a[lane] ^ flip_a) ^ (b[lane] ^ flip_b)),
                LogicOp::PassB => map(|lane| b[lane] ^ flip_b),
            };
            warp.set(dst, &values, mask);
            if write_cc {
                set_flags(warp, integer_flags(&values), carry_in, mask);
            }
        }
        Op::Shl { carry_in: true, .. } | Op::Shr { carry_in: true, .. } => return Err(ILLEGAL),
        Op::Shl { dst, write_cc, a, b, wrap, carry_in: _ } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let a = warp.register(a);
            let values =
                map(|lane| if wrap { a[lane] << (b[lane] & 31) } else { a[lane].checked_shl(b[lane]).unwrap_or(0) });
            finish(warp, dst, &values, mask, write_cc);
        }
        Op::Shr { dst, write_cc, a, b, signed, wrap, reverse, carry_in: _ } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let a = warp.register(a);
            let values = map(|lane| {
                let value = if reverse { a[lane].reverse_bits() } else { a[lane] };
                let count = if wrap { b[lane] & 31 } else { b[lane] };
                if signed {
                    (value.cast_signed() >> count.min(31)).cast_unsigned()
                } else {
                    value.checked_shr(count).unwrap_or(0)
                }
            });
            finish(warp, dst, &values, mask, write_cc);
        }
        Op::Bfe { dst, write_cc, a, b, signed, reverse } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let a = warp.register(a);
            let values = map(|lane| {
                let value = if reverse { a[lane].reverse_bits() } else { a[lane] };
                extract(value, b[lane] & 0xff, b[lane] >> 8 & 0xff, signed)
            });
            finish(warp, dst, &values, mask, write_cc);
        }
        Op::Bfi { dst, write_cc, a, b, c } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let c = fetch(warp, c, &mut second, machine)?;
            let a = warp.register(a);
            let values = map(|lane| {
                let (position, length) = (b[lane] & 0xff, b[lane] >> 8 & 0xff);
                let field = ones(length).checked_shl(position).unwrap_or(0);
                c[lane] & !field | a[lane].checked_shl(position).unwrap_or(0) & field
            });
            finish(warp, dst, &values, mask, write_cc);
        }
        Op::Flo { dst, write_cc, b, signed, invert, shift_amount } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let flip = all_if(invert);
            let values = map(|lane| {
                let value = b[lane] ^ flip;
                let value = if signed && value >> 31 != 0 { !value } else { value };
                match (value.checked_ilog2(), shift_amount) {
                    (None, _) => u32::MAX,
                    (Some(bit), true) => 31 - bit,
                    (Some(bit), false) => bit,
                }
            });
            finish(warp, dst, &values, mask, write_cc);
        }
        Op::Popc { dst, a, b, invert_a, invert_b } => {
            let b = fetch(warp, b, &mut first, machine)?;
            let (a, flip_a, flip_b) = (warp.register(a), all_if(invert_a), all_if(invert_b));
            let values = map(|lane| ((a[lane] ^ flip_a) & (b[lane] ^ flip_b)).count_ones());
            warp.set(dst, &values, mask);
        }
        _ => return Err(ILLEGAL),
    }
    Ok(())
}

const fn all_if(condition: bool) -> u32 {
    if condition { u32::MAX } else { 0 }
}

/// Returns a word with the low `count` bits set.
fn ones(count: u32) -> u32 {
    1u32.checked_shl(count).map_or(u32::MAX, |bit| bit - 1)
}

/// Extracts a bit field. Field bits above bit 31 read as zero or, if the field is signed, as the sign.
fn extract(value: u32, position: u32, length: u32, signed: bool) -> u32 {
    if length == 0 {
        return 0;
    }
    if signed {
        let wide = i64::from(value.cast_signed()) >> position.min(32);
        let drop = 64 - length.min(32);
        ((wide << drop) >> drop) as u32
    } else {
        value.checked_shr(position).unwrap_or(0) & ones(length)
    }
}
