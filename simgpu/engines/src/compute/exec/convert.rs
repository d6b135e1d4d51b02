//! Conversions between number formats.

use super::super::launch::{Failure, ILLEGAL};
use super::super::soft::{self, F16, F32, F64, Format};
use super::super::warp::{LANES, Lanes, Pairs, Warp};
use super::{Machine, Widen, double, fetch, fetch_pair, float_flags, map};
use sm20::{Byte, FloatOperand, FloatType, IntType, Op, Register, Rounding};

pub(super) fn execute(warp: &mut Warp, op: &Op, mask: u32, machine: &mut Machine<'_, '_>) -> Result<(), Failure> {
    match *op {
        Op::F2F { dst, write_cc, b, to, from, rounding, integer, ftz, saturate, upper_half } => {
            let source = float(warp, b, from, ftz, upper_half, machine)?;
            let (from, to) = (format(from), format(to));
            let values = source.map(|value| {
                let value = if integer { soft::integral(value, from, rounding) } else { value };
                let value = soft::convert(value, from, to, rounding);
                let value = if ftz && to == F32 { F32.flush(value) } else { value };
                if saturate { to.saturated(value) } else { value }
            });
            finish_float(warp, dst, &values, to, mask, write_cc);
        }
        Op::F2I { dst, write_cc, b, to, from, rounding, ftz, upper_half } => {
            let source = float(warp, b, from, ftz, upper_half, machine)?;
            let (from, width, signed) = (format(from), to.bits(), to.signed());
            let values = if from == F32 && to == IntType::S32 && rounding == Rounding::Zero {
                source.map(|value| i64::from(f32::from_bits(value as u32) as i32).cast_unsigned())
            } else {
                source.map(|value| soft::to_integer(value, from, rounding, width, signed))
            };
            finish_integer(warp, dst, &values, to, mask, write_cc);
        }
        Op::I2F { dst, write_cc, b, to, from, rounding, part } => {
            let source = integer(warp, b, from, part, machine)?;
            let to = format(to);
            let values: Pairs = if to == F32 && rounding == Rounding::Nearest && from.bits() <= 32 {
                source.map(|value| u64::from((value as i64 as f32).to_bits()))
            } else {
                source.map(|value| soft::from_integer(value, to, rounding))
            };
            finish_float(warp, dst, &values, to, mask, write_cc);
        }
        Op::I2I { dst, write_cc, b, to, from, saturate, part } => {
            let source = integer(warp, b, from, part, machine)?;
            let (least, most) = soft::range(to.bits(), to.signed());
            let values = source.map(|value| if saturate { value.clamp(least, most) } else { cut(value, to) } as u64);
            finish_integer(warp, dst, &values, to, mask, write_cc);
        }
        _ => return Err(ILLEGAL),
    }
    Ok(())
}

const fn format(kind: FloatType) -> Format {
    match kind {
        FloatType::F16 => F16,
        FloatType::F32 => F32,
        FloatType::F64 => F64,
    }
}

/// Fetches a float operand and applies its modifiers. A half-precision operand is in the low bits, even of immediates
/// and constants.
fn float(
    warp: &Warp,
    b: FloatOperand,
    kind: FloatType,
    ftz: bool,
    upper_half: bool,
    machine: &mut Machine<'_, '_>,
) -> Result<Pairs, Failure> {
    if kind == FloatType::F64 {
        return double::fetch_double(warp, b, machine);
    }
    let mut scratch = [0; LANES];
    let words = fetch(warp, b.source, &mut scratch, machine)?;
    let format = format(kind);
    Ok(words.map(|word| {
        let bits = match (kind, upper_half) {
            (FloatType::F16, false) => word & 0xffff,
            (FloatType::F16, true) => word >> 16,
            _ => word,
        };
        let value = format.modified(u64::from(bits), b.absolute, b.negate);
        if ftz && kind == FloatType::F32 { F32.flush(value) } else { value }
    }))
}

/// Fetches an integer operand, with modifiers applied.
fn integer(
    warp: &Warp,
    b: FloatOperand,
    kind: IntType,
    part: Byte,
    machine: &mut Machine<'_, '_>,
) -> Result<[i128; LANES], Failure> {
    let values: Pairs = if kind.bits() == 64 {
        fetch_pair(warp, b.source, Widen::Signed, machine)?
    } else {
        let mut scratch = [0; LANES];
        let shift = match part {
            Byte::B0 => 0,
            Byte::B1 => 8,
            Byte::B2 => 16,
            Byte::B3 => 24,
        };
        fetch(warp, b.source, &mut scratch, machine)?.map(|word| u64::from(word >> shift))
    };
    Ok(values.map(|value| {
        let value = cut(i128::from(value), kind);
        let value = if b.absolute { value.abs() } else { value };
        if b.negate { -value } else { value }
    }))
}

/// Truncates a number to its low bits and interprets them as an integer of type `kind`.
const fn cut(value: i128, kind: IntType) -> i128 {
    let drop = 128 - kind.bits();
    if kind.signed() { value << drop >> drop } else { ((value.cast_unsigned() << drop) >> drop).cast_signed() }
}

fn low(values: &Pairs) -> Lanes {
    map(|lane| values[lane] as u32)
}

fn finish_float(warp: &mut Warp, dst: Register, values: &Pairs, format: Format, mask: u32, write_cc: bool) {
    if format == F64 {
        double::finish(warp, dst, values, mask, write_cc);
    } else {
        warp.set(dst, &low(values), mask);
        if write_cc {
            warp.set_flags(float_flags(format, |lane| values[lane]), mask);
        }
    }
}

/// Stores integer results. Narrow results are zero- or sign-extended to register width, depending on their type.
fn finish_integer(warp: &mut Warp, dst: Register, values: &Pairs, kind: IntType, mask: u32, write_cc: bool) {
    if kind.bits() == 64 {
        warp.set_pair(dst, values, mask);
        if write_cc {
            let zero = super::mask_of(|lane| values[lane] == 0);
            let sign = super::mask_of(|lane| values[lane] >> 63 != 0);
            warp.set_flags(super::Flags { zero, sign, carry: 0, overflow: 0 }, mask);
        }
    } else {
        super::finish(warp, dst, &low(values), mask, write_cc);
    }
}
