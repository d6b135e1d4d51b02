//! Syntax of integer, logic, float and conversion operations. Each function visits only its own operations, and returns
//! false for others.

use super::{Kind, Sign, Visitor, small, unless};
use crate::ir::*;

/// Visits the operands of an addition. A subtracted operand has a minus sign. `.PO` adds 1 to the sum.
fn sum<V: Visitor>(
    v: &mut V,
    mode: &mut AddMode,
    a: &mut bool,
    b: &mut bool,
    operands: impl FnOnce(&mut V, &mut bool, &mut bool) -> Result<(), V::Error>,
) -> Result<(), V::Error> {
    let mut plus_one = *mode == AddMode::PlusOne;
    (*a, *b) = (*mode == AddMode::SubtractA, *mode == AddMode::SubtractB);
    v.flag("PO", &mut plus_one)?;
    operands(v, a, b)?;
    *mode = match (*a, *b, plus_one) {
        (false, false, false) => AddMode::Add,
        (false, false, true) => AddMode::PlusOne,
        (true, false, false) => AddMode::SubtractA,
        (false, true, false) => AddMode::SubtractB,
        (true, true, _) => return Err(v.reject("only one summand can be subtracted")),
        (_, _, true) => return Err(v.reject(".PO does not support subtraction")),
    };
    Ok(())
}

/// Visits a register with an optional sign prefix.
fn signed_reg<V: Visitor>(
    v: &mut V,
    register: &mut Register,
    set: &mut bool,
    sign: Sign,
    kind: Kind,
) -> Result<(), V::Error> {
    let mut source = Source::Register(*register);
    v.signed(&mut source, set, sign, kind)?;
    match source {
        Source::Register(found) => *register = found,
        _ => return Err(v.reject("a register is needed here")),
    }
    Ok(())
}

pub(super) fn integer<V: Visitor>(op: &mut Op, v: &mut V) -> Result<bool, V::Error> {
    let int = Kind::Int;
    let (mut minus_a, mut minus_b) = (false, false);
    match op {
        Op::IAdd { dst, write_cc, a, b, mode, saturate, carry_in } => {
            v.flag("SAT", saturate)?;
            v.flag("X", carry_in)?;
            v.dst(dst, 1, Some(write_cc))?;
            sum(v, mode, &mut minus_a, &mut minus_b, |v, minus_a, minus_b| {
                signed_reg(v, a, minus_a, Sign::Minus, int)?;
                v.signed(b, minus_b, Sign::Minus, int)
            })?;
        }
        Op::IMul { dst, write_cc, a, b, a_signed, b_signed, high } => {
            v.signs(a_signed, b_signed)?;
            v.flag("HI", high)?;
            v.dst(dst, 1, Some(write_cc))?;
            v.reg(a, 1)?;
            v.source(b, int)?;
        }
        Op::IMad { dst, write_cc, a, b, c, mode, a_signed, b_signed, high, saturate, carry_in } => {
            v.signs(a_signed, b_signed)?;
            v.flag("HI", high)?;
            v.flag("SAT", saturate)?;
            v.flag("X", carry_in)?;
            v.dst(dst, 1, Some(write_cc))?;
            sum(v, mode, &mut minus_a, &mut minus_b, |v, minus_product, minus_c| {
                signed_reg(v, a, minus_product, Sign::Minus, int)?;
                v.source(b, int)?;
                v.signed(c, minus_c, Sign::Minus, int)
            })?;
        }
        Op::IScAdd { dst, write_cc, a, b, shift, mode } => {
            v.dst(dst, 1, Some(write_cc))?;
            sum(v, mode, &mut minus_a, &mut minus_b, |v, minus_a, minus_b| {
                signed_reg(v, a, minus_a, Sign::Minus, int)?;
                v.signed(b, minus_b, Sign::Minus, int)
            })?;
            small(v, shift, None)?;
        }
        Op::ISad { dst, write_cc, a, b, c, signed } => {
            unless(v, "U32", signed)?;
            v.dst(dst, 1, Some(write_cc))?;
            v.reg(a, 1)?;
            v.source(b, int)?;
            v.source(c, int)?;
        }
        Op::IMnMx { dst, write_cc, a, b, select, signed, extended } => {
            unless(v, "U32", signed)?;
            v.code(extended, false)?;
            v.dst(dst, 1, Some(write_cc))?;
            v.reg(a, 1)?;
            v.source(b, int)?;
            v.pred_op(select, false)?;
        }
        Op::ISet { dst, write_cc, a, b, compare, signed, carry_in, float_result, logic, accumulate } => {
            v.flag("BF", float_result)?;
            v.required(compare)?;
            unless(v, "U32", signed)?;
            v.flag("X", carry_in)?;
            v.code(logic, true)?;
            v.dst(dst, 1, Some(write_cc))?;
            v.reg(a, 1)?;
            v.source(b, int)?;
            v.pred_op(accumulate, true)?;
        }
        Op::ISetP { p, q, a, b, compare, signed, carry_in, logic, accumulate } => {
            v.required(compare)?;
            unless(v, "U32", signed)?;
            v.flag("X", carry_in)?;
            v.code(logic, true)?;
            v.pred(p)?;
            v.pred(q)?;
            v.reg(a, 1)?;
            v.source(b, int)?;
            v.pred_op(accumulate, true)?;
        }
        Op::ICmp { dst, a, b, c, compare, signed } => {
            v.required(compare)?;
            unless(v, "U32", signed)?;
            v.dst(dst, 1, None)?;
            v.reg(a, 1)?;
            v.source(b, int)?;
            v.source(c, int)?;
        }
        Op::Lop { dst, write_cc, a, b, logic, invert_a, invert_b, carry_in } => {
            v.required(logic)?;
            v.flag("X", carry_in)?;
            v.dst(dst, 1, Some(write_cc))?;
            signed_reg(v, a, invert_a, Sign::Invert, int)?;
            v.signed(b, invert_b, Sign::Invert, int)?;
        }
        Op::Shl { dst, write_cc, a, b, wrap, carry_in } => {
            v.flag("W", wrap)?;
            v.flag("X", carry_in)?;
            v.dst(dst, 1, Some(write_cc))?;
            v.reg(a, 1)?;
            v.source(b, int)?;
        }
        Op::Shr { dst, write_cc, a, b, signed, wrap, reverse, carry_in } => {
            unless(v, "U32", signed)?;
            v.flag("BREV", reverse)?;
            v.flag("W", wrap)?;
            v.flag("X", carry_in)?;
            v.dst(dst, 1, Some(write_cc))?;
            v.reg(a, 1)?;
            v.source(b, int)?;
        }
        Op::Bfe { dst, write_cc, a, b, signed, reverse } => {
            unless(v, "U32", signed)?;
            v.flag("BREV", reverse)?;
            v.dst(dst, 1, Some(write_cc))?;
            v.reg(a, 1)?;
            v.source(b, int)?;
        }
        Op::Bfi { dst, write_cc, a, b, c } => {
            v.dst(dst, 1, Some(write_cc))?;
            v.reg(a, 1)?;
            v.source(b, int)?;
            v.source(c, int)?;
        }
        Op::Flo { dst, write_cc, b, signed, invert, shift_amount } => {
            unless(v, "U32", signed)?;
            v.flag("SH", shift_amount)?;
            v.dst(dst, 1, Some(write_cc))?;
            v.signed(b, invert, Sign::Invert, int)?;
        }
        Op::Popc { dst, a, b, invert_a, invert_b } => {
            v.dst(dst, 1, None)?;
            signed_reg(v, a, invert_a, Sign::Invert, int)?;
            v.signed(b, invert_b, Sign::Invert, int)?;
        }
        _ => return Ok(false),
    }
    Ok(true)
}

pub(super) fn float<V: Visitor>(op: &mut Op, v: &mut V) -> Result<bool, V::Error> {
    let (single, double) = (Kind::Float, Kind::Double);
    match op {
        Op::FAdd { dst, write_cc, a, b, rounding, ftz, saturate } => {
            v.flag("FTZ", ftz)?;
            v.code(rounding, false)?;
            v.flag("SAT", saturate)?;
            v.dst(dst, 1, Some(write_cc))?;
            v.float(a, single)?;
            v.float(b, single)?;
        }
        Op::FMul { dst, write_cc, a, b, negate, scale, rounding, ftz, fmz, saturate } => {
            v.code(scale, false)?;
            v.flag("FTZ", ftz)?;
            v.flag("FMZ", fmz)?;
            v.code(rounding, false)?;
            v.flag("SAT", saturate)?;
            v.dst(dst, 1, Some(write_cc))?;
            signed_reg(v, a, negate, Sign::Minus, single)?;
            v.source(b, single)?;
        }
        Op::FFma { dst, write_cc, a, b, c, negate_product, negate_c, rounding, ftz, fmz, saturate } => {
            v.flag("FTZ", ftz)?;
            v.flag("FMZ", fmz)?;
            v.code(rounding, false)?;
            v.flag("SAT", saturate)?;
            v.dst(dst, 1, Some(write_cc))?;
            signed_reg(v, a, negate_product, Sign::Minus, single)?;
            v.source(b, single)?;
            v.signed(c, negate_c, Sign::Minus, single)?;
        }
        Op::FMnMx { dst, write_cc, a, b, select, ftz } => {
            v.flag("FTZ", ftz)?;
            v.dst(dst, 1, Some(write_cc))?;
            v.float(a, single)?;
            v.float(b, single)?;
            v.pred_op(select, false)?;
        }
        Op::FSet { dst, write_cc, a, b, compare, float_result, ftz, logic, accumulate } => {
            v.flag("BF", float_result)?;
            v.required(compare)?;
            v.flag("FTZ", ftz)?;
            v.code(logic, true)?;
            v.dst(dst, 1, Some(write_cc))?;
            v.float(a, single)?;
            v.float(b, single)?;
            v.pred_op(accumulate, true)?;
        }
        Op::FSetP { p, q, a, b, compare, ftz, logic, accumulate } => {
            v.required(compare)?;
            v.flag("FTZ", ftz)?;
            v.code(logic, true)?;
            v.pred(p)?;
            v.pred(q)?;
            v.float(a, single)?;
            v.float(b, single)?;
            v.pred_op(accumulate, true)?;
        }
        Op::FCmp { dst, a, b, c, compare, ftz } => {
            v.required(compare)?;
            v.flag("FTZ", ftz)?;
            v.dst(dst, 1, None)?;
            v.reg(a, 1)?;
            v.source(b, single)?;
            v.source(c, single)?;
        }
        Op::Mufu { dst, a, function, saturate } => {
            v.required(function)?;
            v.flag("SAT", saturate)?;
            v.dst(dst, 1, None)?;
            v.float(a, single)?;
        }
        Op::Rro { dst, b, function } => {
            v.required(function)?;
            v.dst(dst, 1, None)?;
            v.float(b, single)?;
        }
        Op::DAdd { dst, write_cc, a, b, rounding } => {
            v.code(rounding, false)?;
            v.dst(dst, 2, Some(write_cc))?;
            v.float(a, double)?;
            v.float(b, double)?;
        }
        Op::DMul { dst, write_cc, a, b, negate, rounding } => {
            v.code(rounding, false)?;
            v.dst(dst, 2, Some(write_cc))?;
            signed_reg(v, a, negate, Sign::Minus, double)?;
            v.source(b, double)?;
        }
        Op::DFma { dst, write_cc, a, b, c, negate_product, negate_c, rounding } => {
            v.code(rounding, false)?;
            v.dst(dst, 2, Some(write_cc))?;
            signed_reg(v, a, negate_product, Sign::Minus, double)?;
            v.source(b, double)?;
            v.signed(c, negate_c, Sign::Minus, double)?;
        }
        Op::DMnMx { dst, write_cc, a, b, select } => {
            v.dst(dst, 2, Some(write_cc))?;
            v.float(a, double)?;
            v.float(b, double)?;
            v.pred_op(select, false)?;
        }
        Op::DSet { dst, write_cc, a, b, compare, float_result, logic, accumulate } => {
            v.flag("BF", float_result)?;
            v.required(compare)?;
            v.code(logic, true)?;
            v.dst(dst, 1, Some(write_cc))?;
            v.float(a, double)?;
            v.float(b, double)?;
            v.pred_op(accumulate, true)?;
        }
        Op::DSetP { p, q, a, b, compare, logic, accumulate } => {
            v.required(compare)?;
            v.code(logic, true)?;
            v.pred(p)?;
            v.pred(q)?;
            v.float(a, double)?;
            v.float(b, double)?;
            v.pred_op(accumulate, true)?;
        }
        _ => return convert(op, v),
    }
    Ok(true)
}

fn convert<V: Visitor>(op: &mut Op, v: &mut V) -> Result<bool, V::Error> {
    match op {
        Op::F2F { dst, write_cc, b, to, from, rounding, integer, ftz, saturate, upper_half } => {
            v.flag("FTZ", ftz)?;
            v.code(to, true)?;
            v.code(from, true)?;
            let mut how = FloatRounding(*rounding, *integer);
            v.code(&mut how, false)?;
            FloatRounding(*rounding, *integer) = how;
            v.flag("SAT", saturate)?;
            v.flag("H1", upper_half)?;
            v.dst(dst, float_kind(*to).registers(), Some(write_cc))?;
            v.float(b, float_kind(*from))?;
        }
        Op::F2I { dst, write_cc, b, to, from, rounding, ftz, upper_half } => {
            v.flag("FTZ", ftz)?;
            v.code(to, true)?;
            v.code(from, true)?;
            let mut how = IntRounding(*rounding);
            v.code(&mut how, false)?;
            IntRounding(*rounding) = how;
            v.flag("H1", upper_half)?;
            v.dst(dst, int_kind(*to).registers(), Some(write_cc))?;
            v.float(b, float_kind(*from))?;
        }
        Op::I2F { dst, write_cc, b, to, from, rounding, part } => {
            v.code(to, true)?;
            v.code(from, true)?;
            v.code(rounding, false)?;
            v.code(part, false)?;
            v.dst(dst, float_kind(*to).registers(), Some(write_cc))?;
            v.float(b, int_kind(*from))?;
        }
        Op::I2I { dst, write_cc, b, to, from, saturate, part } => {
            v.code(to, true)?;
            v.code(from, true)?;
            v.flag("SAT", saturate)?;
            v.code(part, false)?;
            v.dst(dst, int_kind(*to).registers(), Some(write_cc))?;
            v.float(b, int_kind(*from))?;
        }
        _ => return Ok(false),
    }
    Ok(true)
}

const fn float_kind(of: FloatType) -> Kind {
    match of {
        FloatType::F64 => Kind::Double,
        FloatType::F16 | FloatType::F32 => Kind::Float,
    }
}

const fn int_kind(of: IntType) -> Kind {
    if of.bits() == 64 { Kind::Long } else { Kind::Int }
}

/// The rounding of F2F, and a flag that is true if the result is rounded to an integral value.
#[derive(Clone, Copy, Default, PartialEq)]
struct FloatRounding(Rounding, bool);

impl Code for FloatRounding {
    const WIDTH: u32 = 3;
    const TABLE: &'static [(Self, u8, &'static str)] = &[
        (Self(Rounding::Nearest, false), 0, "RN"),
        (Self(Rounding::Down, false), 1, "RM"),
        (Self(Rounding::Up, false), 2, "RP"),
        (Self(Rounding::Zero, false), 3, "RZ"),
        (Self(Rounding::Nearest, true), 4, "ROUND"),
        (Self(Rounding::Down, true), 5, "FLOOR"),
        (Self(Rounding::Up, true), 6, "CEIL"),
        (Self(Rounding::Zero, true), 7, "TRUNC"),
    ];
}

/// The rounding of F2I.
#[derive(Clone, Copy, Default, PartialEq)]
struct IntRounding(Rounding);

impl Code for IntRounding {
    const WIDTH: u32 = 2;
    const TABLE: &'static [(Self, u8, &'static str)] = &[
        (Self(Rounding::Nearest), 0, "ROUND"),
        (Self(Rounding::Down), 1, "FLOOR"),
        (Self(Rounding::Up), 2, "CEIL"),
        (Self(Rounding::Zero), 3, "TRUNC"),
    ];
}
