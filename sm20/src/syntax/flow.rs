//! Syntax of moves, memory accesses and control instructions. Each function visits only its own operations. `moves` and
//! `memory` return false for others.

use super::{Kind, Visitor, small, unless};
use crate::ir::*;

/// Lane mask of MOV that selects all lanes.
const ALL_LANES: u32 = 15;

pub(super) fn moves<V: Visitor>(op: &mut Op, v: &mut V) -> Result<bool, V::Error> {
    let int = Kind::Int;
    match op {
        Op::Mov { dst, b, lanes } => {
            v.dst(dst, 1, None)?;
            v.source(b, int)?;
            small(v, lanes, Some(ALL_LANES))?;
        }
        Op::Sel { dst, a, b, select } => {
            v.dst(dst, 1, None)?;
            v.reg(a, 1)?;
            v.source(b, int)?;
            v.pred_op(select, false)?;
        }
        Op::Prmt { dst, a, b, c, mode } => {
            v.code(mode, false)?;
            v.dst(dst, 1, None)?;
            v.reg(a, 1)?;
            v.source(b, int)?;
            v.source(c, int)?;
        }
        Op::S2R { dst, special } => {
            v.dst(dst, 1, None)?;
            v.special(special)?;
        }
        Op::P2R { dst, a, b } => {
            v.dst(dst, 1, None)?;
            v.word("PR")?;
            v.reg(a, 1)?;
            v.source(b, int)?;
        }
        Op::R2P { a, b } => {
            v.word("PR")?;
            v.reg(a, 1)?;
            v.source(b, int)?;
        }
        Op::B2R { dst, barrier } => {
            v.dst(dst, 1, None)?;
            small(v, barrier, None)?;
        }
        Op::Lepc { dst } => v.dst(dst, 1, None)?,
        Op::PSet { dst, write_cc, a, b, combine, float_result, logic, accumulate } => {
            v.flag("BF", float_result)?;
            v.code(combine, true)?;
            v.code(logic, true)?;
            v.dst(dst, 1, Some(write_cc))?;
            v.pred_op(a, false)?;
            v.pred_op(b, false)?;
            v.pred_op(accumulate, true)?;
        }
        Op::PSetP { p, q, a, b, combine, logic, accumulate } => {
            v.code(combine, true)?;
            v.code(logic, true)?;
            v.pred(p)?;
            v.pred(q)?;
            v.pred_op(a, false)?;
            v.pred_op(b, false)?;
            v.pred_op(accumulate, true)?;
        }
        Op::CSet { dst, write_cc, test, float_result, logic, accumulate } => {
            v.flag("BF", float_result)?;
            v.required(test)?;
            v.code(logic, true)?;
            v.dst(dst, 1, Some(write_cc))?;
            v.word("CC")?;
            v.pred_op(accumulate, true)?;
        }
        Op::CSetP { p, q, test, logic, accumulate } => {
            v.required(test)?;
            v.code(logic, true)?;
            v.pred(p)?;
            v.pred(q)?;
            v.word("CC")?;
            v.pred_op(accumulate, true)?;
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// Returns the number of registers that contain a value of this width.
const fn registers(width: Width) -> u8 {
    match width {
        Width::U8 | Width::S8 | Width::U16 | Width::S16 | Width::B32 => 1,
        Width::B64 => 2,
        Width::B128 => 4,
    }
}

pub(super) fn memory<V: Visitor>(op: &mut Op, v: &mut V) -> Result<bool, V::Error> {
    match op {
        Op::Ld { dst, address, width, cache } | Op::Ldl { dst, address, width, cache } => {
            v.flag("E", &mut address.wide)?;
            v.code(cache, false)?;
            v.code(width, false)?;
            v.dst(dst, registers(*width), None)?;
            v.address(address)?;
        }
        Op::Ldu { dst, address, width } | Op::Lds { dst, address, width } => {
            v.flag("E", &mut address.wide)?;
            v.code(width, false)?;
            v.dst(dst, registers(*width), None)?;
            v.address(address)?;
        }
        Op::St { address, value, width, cache } | Op::Stl { address, value, width, cache } => {
            v.flag("E", &mut address.wide)?;
            v.code(cache, false)?;
            v.code(width, false)?;
            v.address(address)?;
            v.reg(value, registers(*width))?;
        }
        Op::Sts { address, value, width }
        | Op::Stsul { address, value, width }
        | Op::Stul { address, value, width } => {
            v.flag("E", &mut address.wide)?;
            v.code(width, false)?;
            v.address(address)?;
            v.reg(value, registers(*width))?;
        }
        Op::Ldlk { p, dst, address, width } | Op::Ldslk { p, dst, address, width } => {
            v.flag("E", &mut address.wide)?;
            v.code(width, false)?;
            v.pred(p)?;
            v.dst(dst, registers(*width), None)?;
            v.address(address)?;
        }
        Op::Ldc { dst, bank, base, offset, width } => {
            v.code(width, false)?;
            v.dst(dst, registers(*width), None)?;
            v.constant(bank, base, offset)?;
        }
        Op::Atom { dst, address, a, c, operation, kind } => {
            v.flag("E", &mut address.wide)?;
            v.required(operation)?;
            v.code(kind, false)?;
            let count = if *kind == AtomicType::U64 { 2 } else { 1 };
            v.dst(dst, count, None)?;
            v.address(address)?;
            v.reg(a, count)?;
            if *operation == AtomicOp::Cas {
                v.reg(c, count)?;
            }
        }
        Op::Red { address, a, operation, kind } => {
            v.flag("E", &mut address.wide)?;
            v.required(operation)?;
            v.code(kind, false)?;
            v.address(address)?;
            v.reg(a, if *kind == AtomicType::U64 { 2 } else { 1 })?;
        }
        Op::Membar { scope } => v.required(scope)?,
        Op::Cctl { dst, address, operation, level } => {
            v.flag("E", &mut address.wide)?;
            v.code(level, false)?;
            v.required(operation)?;
            v.dst(dst, 1, None)?;
            v.address(address)?;
        }
        Op::Cctll { dst, address, operation } => {
            v.flag("E", &mut address.wide)?;
            v.required(operation)?;
            v.dst(dst, 1, None)?;
            v.address(address)?;
        }
        _ => return Ok(false),
    }
    Ok(true)
}

pub(super) fn control<V: Visitor>(op: &mut Op, v: &mut V) -> Result<(), V::Error> {
    match op {
        Op::Bar { operation, p, dst, barrier, count, a } => {
            bar(v, operation, p, dst, a, barrier, count)?;
        }
        Op::Vote { dst, p, a, mode } => {
            v.required(mode)?;
            v.dst(dst, 1, None)?;
            v.pred(p)?;
            v.pred_op(a, false)?;
        }
        Op::Nop { test }
        | Op::Exit { test }
        | Op::Ret { test }
        | Op::Kil { test }
        | Op::Brk { test }
        | Op::Cont { test }
        | Op::Longjmp { test } => v.test(test)?,
        Op::Pmtrig { test, mask } => {
            v.test(test)?;
            let mut wide = u32::from(*mask);
            v.number(&mut wide, None)?;
            *mask = u16::try_from(wide).map_err(|_| v.reject("the mask has 16 bits"))?;
        }
        Op::Bra { target, test, uniform, limit } => jump(v, target, false, test, Some(uniform), limit)?,
        Op::Jmp { target, test, uniform, limit } => jump(v, target, true, test, Some(uniform), limit)?,
        Op::Brx { target, index, test, limit } => {
            v.flag("LMT", limit)?;
            v.test(test)?;
            v.reg(index, 1)?;
            v.target(target, false)?;
        }
        Op::Jmx { target, index, test, limit } => {
            v.flag("LMT", limit)?;
            v.test(test)?;
            v.reg(index, 1)?;
            v.target(target, true)?;
        }
        Op::Cal { target, limit } | Op::Pret { target, limit } => {
            unless(v, "NOINC", limit)?;
            v.target(target, false)?;
        }
        Op::Jcal { target, limit } => {
            unless(v, "NOINC", limit)?;
            v.target(target, true)?;
        }
        Op::Ssy { target } | Op::Pbk { target } | Op::Pcnt { target } | Op::Plongjmp { target } => {
            v.target(target, false)?;
        }
        Op::Rtt { terminate } => v.flag("TERMINATE", terminate)?,
        Op::Bpt { kind, number } => {
            v.required(kind)?;
            v.number(number, None)?;
        }
        // Unsupported instructions are written as data. The other functions handle the remaining operations.
        _ => {}
    }
    Ok(())
}

fn jump<V: Visitor>(
    v: &mut V,
    target: &mut Target,
    absolute: bool,
    test: &mut CcTest,
    uniform: Option<&mut bool>,
    limit: &mut bool,
) -> Result<(), V::Error> {
    if let Some(uniform) = uniform {
        v.flag("U", uniform)?;
    }
    v.flag("LMT", limit)?;
    v.test(test)?;
    v.target(target, absolute)
}

/// Visits a barrier: BAR.SYNC or BAR.ARV if there is no reduction, or BAR.RED otherwise.
fn bar<V: Visitor>(
    v: &mut V,
    operation: &mut BarrierOp,
    p: &mut Predicate,
    dst: &mut Register,
    a: &mut PredicateOperand,
    barrier: &mut BarrierOperand,
    count: &mut BarrierOperand,
) -> Result<(), V::Error> {
    let plain = p.is_true() && dst.is_zero() && *a == PredicateOperand::TRUE;
    let mut reduce = !(plain && matches!(operation, BarrierOp::Popc | BarrierOp::Arrive));
    v.flag("RED", &mut reduce)?;
    if reduce {
        v.required(operation)?;
        v.pred(p)?;
        v.dst(dst, 1, None)?;
        v.barrier(barrier, false)?;
        v.barrier(count, false)?;
        return v.pred_op(a, true);
    }
    let mut wait = *operation == BarrierOp::Popc;
    v.flag("SYNC", &mut wait)?;
    let mut arrive = !wait;
    v.flag("ARV", &mut arrive)?;
    if wait == arrive {
        return Err(v.reject("BAR is BAR.SYNC, BAR.ARV or BAR.RED"));
    }
    *operation = if wait { BarrierOp::Popc } else { BarrierOp::Arrive };
    v.barrier(barrier, false)?;
    v.barrier(count, true)
}
