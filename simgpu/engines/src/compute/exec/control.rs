//! Branches, calls, exits, and barriers.

use super::super::launch::{Failure, ILLEGAL};
use super::super::stack::Kind;
use super::super::warp::Warp;
use super::{Arrival, Flow, Machine};
use nvspec::class::compute90c0::{limit, warp_error};
use sm20::{BarrierOperand, CcTest, Op, Register, Target};

const STACK: Failure = Failure::Warp(warp_error::STACK);
const EMPTY: Failure = Failure::Warp(warp_error::EMPTY_STACK);

pub(super) fn execute(warp: &mut Warp, op: &Op, mask: u32, machine: &mut Machine<'_, '_>) -> Result<(), Failure> {
    let tested = |warp: &Warp, test: CcTest| mask & warp.flags.test(test);
    match *op {
        Op::Bra { target, test, uniform, limit: _ } => {
            let lanes = tested(warp, test);
            let pc = relative(warp, target, machine)?;
            branch(warp, lanes, pc, uniform, machine)?;
        }
        Op::Jmp { target, test, uniform, limit: _ } => {
            let lanes = tested(warp, test);
            let pc = absolute(target, machine)?;
            branch(warp, lanes, pc, uniform, machine)?;
        }
        Op::Brx { target, index, test, limit: _ } => {
            let lanes = tested(warp, test);
            let next = warp.pc;
            indexed(warp, lanes, index, machine, |machine, value| {
                let displacement = match target {
                    Target::Relative(bytes) => value.wrapping_add_signed(bytes),
                    Target::Constant(at) => indirect(at, value, machine)?,
                    Target::Absolute(_) => return Err(ILLEGAL),
                };
                Ok(next.wrapping_add(displacement))
            })?;
        }
        Op::Jmx { target, index, test, limit: _ } => {
            let lanes = tested(warp, test);
            indexed(warp, lanes, index, machine, |machine, value| match target {
                Target::Absolute(at) => Ok(at.wrapping_add(value)),
                Target::Constant(at) => indirect(at, value, machine),
                Target::Relative(_) => Err(ILLEGAL),
            })?;
        }
        Op::Cal { target, limit: _ } => {
            let pc = relative(warp, target, machine)?;
            call(warp, mask, pc, machine)?;
        }
        Op::Jcal { target, limit: _ } => {
            let pc = absolute(target, machine)?;
            call(warp, mask, pc, machine)?;
        }
        Op::Ssy { target } => push(warp, Kind::Join, target, machine)?,
        Op::Pbk { target } => push(warp, Kind::Break, target, machine)?,
        Op::Pcnt { target } => push(warp, Kind::Continue, target, machine)?,
        Op::Pret { target, limit: _ } => push(warp, Kind::Return, target, machine)?,
        Op::Plongjmp { target } => push(warp, Kind::LongJump, target, machine)?,
        Op::Exit { test } | Op::Kil { test } => {
            let lanes = tested(warp, test);
            if lanes != 0 {
                warp.stack.end(lanes);
                warp.alive &= !lanes;
                warp.leave(lanes);
            }
        }
        Op::Ret { test } => unwind(warp, Kind::Return, tested(warp, test))?,
        Op::Brk { test } => unwind(warp, Kind::Break, tested(warp, test))?,
        Op::Cont { test } => unwind(warp, Kind::Continue, tested(warp, test))?,
        Op::Longjmp { test } => unwind(warp, Kind::LongJump, tested(warp, test))?,
        _ => return Err(ILLEGAL),
    }
    Ok(())
}

/// Deactivates lanes that have reached the join point of an SSY entry. Without such an entry, the lanes continue.
pub(super) fn join(warp: &mut Warp, lanes: u32) {
    if warp.stack.unwind(Kind::Join, lanes) {
        warp.leave(lanes);
    }
}

fn unwind(warp: &mut Warp, kind: Kind, lanes: u32) -> Result<(), Failure> {
    if lanes == 0 {
        return Ok(());
    }
    if !warp.stack.unwind(kind, lanes) {
        return Err(EMPTY);
    }
    warp.leave(lanes);
    Ok(())
}

/// Makes `lanes` branch to `pc`. Other active lanes run first, so that a loop that waits for them makes progress. A
/// uniform branch is taken only if `lanes` contains all active lanes.
fn branch(warp: &mut Warp, lanes: u32, pc: u32, uniform: bool, machine: &Machine<'_, '_>) -> Result<(), Failure> {
    if lanes == 0 || (uniform && lanes != warp.active) {
        return Ok(());
    }
    if lanes == warp.active {
        warp.pc = pc;
        return Ok(());
    }
    if !warp.stack.push(Kind::Divergence, lanes, pc, machine.launch.stack_limit) {
        return Err(STACK);
    }
    warp.active &= !lanes;
    Ok(())
}

/// Executes a branch with per-lane targets, as one path per distinct target.
fn indexed<'m, 's>(
    warp: &mut Warp,
    lanes: u32,
    index: Register,
    machine: &mut Machine<'m, 's>,
    target: impl Fn(&mut Machine<'m, 's>, u32) -> Result<u32, Failure>,
) -> Result<(), Failure> {
    let values = *warp.register(index);
    let mut rest = lanes;
    while rest != 0 {
        let value = values[rest.trailing_zeros() as usize];
        let same = rest & super::mask_of(|lane| values[lane] == value);
        rest &= !same;
        let pc = target(machine, value)?;
        branch(warp, same, pc, false, machine)?;
    }
    Ok(())
}

fn call(warp: &mut Warp, lanes: u32, pc: u32, machine: &Machine<'_, '_>) -> Result<(), Failure> {
    if !warp.stack.push(Kind::Return, lanes, warp.pc, machine.launch.stack_limit) {
        return Err(STACK);
    }
    warp.pc = pc;
    Ok(())
}

fn push(warp: &mut Warp, kind: Kind, target: Target, machine: &mut Machine<'_, '_>) -> Result<(), Failure> {
    let pc = relative(warp, target, machine)?;
    if !warp.stack.push(kind, warp.active, pc, machine.launch.stack_limit) {
        return Err(STACK);
    }
    Ok(())
}

/// Returns the constant `more` bytes after `at`.
fn indirect(at: sm20::ConstAddress, more: u32, machine: &mut Machine<'_, '_>) -> Result<u32, Failure> {
    let offset = u32::from(at.offset).wrapping_add(more);
    machine.constants.word(at.bank, offset, warp_error::CONSTANT_ADDRESS, machine.session)
}

fn relative(warp: &Warp, target: Target, machine: &mut Machine<'_, '_>) -> Result<u32, Failure> {
    Ok(match target {
        Target::Relative(bytes) => warp.pc.wrapping_add_signed(bytes),
        Target::Absolute(at) => at,
        Target::Constant(at) => warp.pc.wrapping_add(machine.constant(at)?),
    })
}

fn absolute(target: Target, machine: &mut Machine<'_, '_>) -> Result<u32, Failure> {
    match target {
        Target::Absolute(at) => Ok(at),
        Target::Constant(at) => machine.constant(at),
        Target::Relative(_) => Err(ILLEGAL),
    }
}

/// Executes BAR.
pub(super) fn barrier(warp: &Warp, op: &Op, mask: u32) -> Result<Flow, Failure> {
    let Op::Bar { operation, p, dst, barrier, count, a } = *op else { return Err(ILLEGAL) };
    let first = mask.trailing_zeros() as usize & 31;
    let parameter = Failure::Warp(warp_error::ILLEGAL_PARAMETER);
    let number = match barrier {
        BarrierOperand::Immediate(number) => u32::from(number),
        BarrierOperand::Register(register) => warp.register(register)[first],
    };
    if number >= limit::BARRIERS {
        return Err(parameter);
    }
    let threads = match count {
        BarrierOperand::Immediate(threads) => u32::from(threads),
        BarrierOperand::Register(register) if register.is_zero() => 0,
        BarrierOperand::Register(register) => warp.register(register)[first],
    };
    if threads % 32 != 0 || threads > limit::BLOCK_THREADS {
        return Err(parameter);
    }
    Ok(Flow::Barrier(Arrival {
        barrier: number as u8,
        operation,
        // GUESS: a count of zero also means all warps.
        warps: (threads != 0).then_some(threads / 32),
        lanes: mask,
        holds: warp.predicate(a) & mask,
        p,
        dst,
    }))
}
