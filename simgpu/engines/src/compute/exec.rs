//! Semantics of instructions. Each instruction family has its own module. This module fetches operands, and implements
//! guards and joins.
//!
//! Each operation computes all lanes, in vectorizable loops, and stores only the results of the participating lanes.
//!
//! # Not modelled
//! Texture, surface, video and graphics instructions; dual loads (LD_LDU, LDS_LDU); SHL.X and SHR.X; RTT and BPT,
//! because there is no trap handler. These instructions terminate the warp with an illegal-encoding error. MUFU is more
//! precise than on hardware: it returns the double-precision result, rounded to single precision.

mod control;
mod convert;
mod double;
mod integer;
mod logic;
mod memory;
mod moves;
mod single;
mod special;

use super::constants::Constants;
use super::launch::{Failure, ILLEGAL, Launch};
use super::locks::Locks;
use super::memory::{Counts, SharedMemory};
use super::soft::Format;
use super::warp::{ALL, Flags, LANES, Lanes, Pairs, Warp, mask_of};
use nvspec::class::compute90c0::warp_error;
use simgpu_memory::mmu::Session;
use sm20::{BarrierOp, ConstAddress, FloatOperand, Instruction, Op, Predicate, PredicateLogic, Register, Source};

/// Execution context of a warp: its block and the card.
pub(crate) struct Machine<'m, 's> {
    pub(crate) launch: &'m Launch,
    pub(crate) locks: &'m Locks,
    pub(crate) session: &'m mut Session<'s>,
    pub(crate) constants: &'m mut Constants,
    pub(crate) counts: &'m mut Counts,
    pub(crate) shared: &'m mut SharedMemory,
    /// The block's number in the grid.
    pub(crate) block: u64,
    pub(crate) position: [u32; 3],
    /// The block's index among the running blocks, which selects its part of local memory.
    pub(crate) slot: u32,
    /// Number of instructions that the block has executed, which serves as the block's clock.
    pub(crate) clock: u64,
}

impl Machine<'_, '_> {
    fn constant(&mut self, address: ConstAddress) -> Result<u32, Failure> {
        let ConstAddress { bank, offset } = address;
        self.constants.word(bank, u32::from(offset), warp_error::CONSTANT_ADDRESS, self.session)
    }

    /// Returns the warp's index in local memory.
    fn local_warp(&self, warp: &Warp) -> u32 {
        self.slot * self.launch.threads().div_ceil(LANES as u32) + warp.index
    }
}

/// Effect of an instruction on the warp's control flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// Continue with the instruction at the program counter.
    Next,
    /// The warp has reached a barrier.
    Barrier(Arrival),
}

/// A warp at a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    pub(crate) barrier: u8,
    pub(crate) operation: BarrierOp,
    /// Number of warps that the barrier waits for, or `None` for all warps of the block.
    pub(crate) warps: Option<u32>,
    /// Lanes that arrived at the barrier.
    pub(crate) lanes: u32,
    /// Lanes that arrived with a true predicate.
    pub(crate) holds: u32,
    pub(crate) p: Predicate,
    pub(crate) dst: Register,
}

/// Executes one instruction of a warp. The program counter already points past it.
pub(crate) fn execute(
    warp: &mut Warp,
    instruction: &Instruction,
    machine: &mut Machine<'_, '_>,
) -> Result<Flow, Failure> {
    let guarded = warp.active & warp.predicate(instruction.guard);
    let op = &instruction.op;
    let mut flow = Flow::Next;
    if guarded != 0 {
        machine.counts.thread_instructions += u64::from(guarded.count_ones());
        flow = operate(warp, op, guarded, machine)?;
        if instruction.join {
            // The operation itself may have deactivated lanes. Such lanes do not join.
            let joining = guarded & warp.active;
            if joining != 0 {
                control::join(warp, joining);
            }
        }
    }
    Ok(flow)
}

fn operate(warp: &mut Warp, op: &Op, mask: u32, machine: &mut Machine<'_, '_>) -> Result<Flow, Failure> {
    match op {
        Op::FFma { .. } | Op::FMul { .. } | Op::FAdd { .. } => single::arithmetic(warp, op, mask, machine),
        Op::IAdd { .. }
        | Op::IMul { .. }
        | Op::IMad { .. }
        | Op::IScAdd { .. }
        | Op::ISad { .. }
        | Op::IMnMx { .. }
        | Op::ISet { .. }
        | Op::ISetP { .. }
        | Op::ICmp { .. } => integer::execute(warp, op, mask, machine),
        Op::Lop { .. }
        | Op::Shl { .. }
        | Op::Shr { .. }
        | Op::Bfe { .. }
        | Op::Bfi { .. }
        | Op::Flo { .. }
        | Op::Popc { .. } => logic::execute(warp, op, mask, machine),
        Op::FMnMx { .. } | Op::FSet { .. } | Op::FSetP { .. } | Op::FCmp { .. } => {
            single::compare(warp, op, mask, machine)
        }
        Op::Mufu { .. } | Op::Rro { .. } | Op::S2R { .. } | Op::B2R { .. } | Op::Lepc { .. } | Op::Vote { .. } => {
            special::execute(warp, op, mask, machine)
        }
        Op::DAdd { .. } | Op::DMul { .. } | Op::DFma { .. } | Op::DMnMx { .. } | Op::DSet { .. } | Op::DSetP { .. } => {
            double::execute(warp, op, mask, machine)
        }
        Op::F2F { .. } | Op::F2I { .. } | Op::I2F { .. } | Op::I2I { .. } => convert::execute(warp, op, mask, machine),
        Op::Mov { .. }
        | Op::Sel { .. }
        | Op::Prmt { .. }
        | Op::P2R { .. }
        | Op::R2P { .. }
        | Op::PSet { .. }
        | Op::PSetP { .. }
        | Op::CSet { .. }
        | Op::CSetP { .. } => moves::execute(warp, op, mask, machine),
        Op::Ld { .. }
        | Op::Ldu { .. }
        | Op::St { .. }
        | Op::Ldl { .. }
        | Op::Stl { .. }
        | Op::Lds { .. }
        | Op::Sts { .. }
        | Op::Ldlk { .. }
        | Op::Stul { .. }
        | Op::Ldslk { .. }
        | Op::Stsul { .. }
        | Op::Ldc { .. }
        | Op::Atom { .. }
        | Op::Red { .. }
        | Op::Membar { .. }
        | Op::Cctl { .. }
        | Op::Cctll { .. } => memory::execute(warp, op, mask, machine),
        Op::Bar { .. } => return control::barrier(warp, op, mask),
        Op::Nop { .. } | Op::Pmtrig { .. } => Ok(()),
        Op::Bra { .. }
        | Op::Brx { .. }
        | Op::Jmp { .. }
        | Op::Jmx { .. }
        | Op::Cal { .. }
        | Op::Jcal { .. }
        | Op::Ssy { .. }
        | Op::Pbk { .. }
        | Op::Pcnt { .. }
        | Op::Pret { .. }
        | Op::Plongjmp { .. }
        | Op::Exit { .. }
        | Op::Ret { .. }
        | Op::Kil { .. }
        | Op::Brk { .. }
        | Op::Cont { .. }
        | Op::Longjmp { .. } => control::execute(warp, op, mask, machine),
        Op::Rtt { .. } | Op::Bpt { .. } | Op::Unsupported { .. } => Err(ILLEGAL),
    }
    .map(|()| Flow::Next)
}

/// Returns a 32-bit operand for all lanes.
#[inline]
fn fetch<'a>(
    warp: &'a Warp,
    source: Source,
    scratch: &'a mut Lanes,
    machine: &mut Machine<'_, '_>,
) -> Result<&'a Lanes, Failure> {
    *scratch = match source {
        Source::Register(register) => return Ok(warp.register(register)),
        Source::Constant(address) => [machine.constant(address)?; LANES],
        Source::Immediate(value) | Source::LongImmediate(value) => [value; LANES],
    };
    Ok(scratch)
}

/// Returns a 32-bit float operand for all lanes, with modifiers applied.
fn fetch_float(warp: &Warp, operand: FloatOperand, machine: &mut Machine<'_, '_>) -> Result<Lanes, Failure> {
    const SIGN: u32 = 1 << 31;
    let mut scratch = [0; LANES];
    let mut values = *fetch(warp, operand.source, &mut scratch, machine)?;
    if operand.absolute {
        values.iter_mut().for_each(|value| *value &= !SIGN);
    }
    if operand.negate {
        values.iter_mut().for_each(|value| *value ^= SIGN);
    }
    Ok(values)
}

/// Rule for widening an immediate operand to 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Widen {
    /// The immediate is the upper 32-bit word.
    Double,
    /// The immediate is a signed number.
    Signed,
}

/// Returns a 64-bit operand for all lanes.
fn fetch_pair(warp: &Warp, source: Source, widen: Widen, machine: &mut Machine<'_, '_>) -> Result<Pairs, Failure> {
    Ok(match source {
        Source::Register(register) => warp.pair(register),
        Source::Constant(address) => {
            let low = machine.constant(address)?;
            let high = u32::from(address.offset) + 4;
            let high = machine.constants.word(address.bank, high, warp_error::CONSTANT_ADDRESS, machine.session)?;
            [u64::from(high) << 32 | u64::from(low); LANES]
        }
        Source::Immediate(value) | Source::LongImmediate(value) => match widen {
            Widen::Double => [u64::from(value) << 32; LANES],
            Widen::Signed => [i64::from(value.cast_signed()).cast_unsigned(); LANES],
        },
    })
}

/// Calls `f` for each lane, and returns the results.
#[inline]
fn map(f: impl Fn(usize) -> u32) -> Lanes {
    let mut values = [0; LANES];
    for (lane, value) in values.iter_mut().enumerate() {
        *value = f(lane);
    }
    values
}

/// Stores a result and, if requested, sets the zero and sign flags.
fn finish(warp: &mut Warp, dst: Register, values: &Lanes, mask: u32, write_cc: bool) {
    warp.set(dst, values, mask);
    if write_cc {
        warp.set_flags(integer_flags(values), mask);
    }
}

fn integer_flags(values: &Lanes) -> Flags {
    Flags {
        zero: mask_of(|lane| values[lane] == 0),
        sign: mask_of(|lane| values[lane] >> 31 != 0),
        carry: 0,
        overflow: 0,
    }
}

/// Returns the condition code of a float result: the zero and sign flags, both of which are set for a NaN.
fn float_flags(format: Format, value: impl Fn(usize) -> u64) -> Flags {
    let nan = mask_of(|lane| format.is_nan(value(lane)));
    let zero = mask_of(|lane| format.modified(value(lane), true, false) == 0) | nan;
    let sign = mask_of(|lane| format.is_negative(value(lane))) | nan;
    Flags { zero, sign, carry: 0, overflow: 0 }
}

/// Combines the result of a comparison with a predicate.
fn combine(logic: PredicateLogic, a: u32, b: u32) -> u32 {
    match logic {
        PredicateLogic::And => a & b,
        PredicateLogic::Or => a | b,
        PredicateLogic::Xor => a ^ b,
    }
}

/// Returns the result of a SET instruction: all ones or 1.0 in the lanes where the condition is true.
fn set_result(holds: u32, float_result: bool) -> Lanes {
    let yes = if float_result { 1.0f32.to_bits() } else { ALL };
    map(|lane| if holds >> lane & 1 != 0 { yes } else { 0 })
}

/// Sets the two predicates of a comparison.
fn set_predicates(
    warp: &mut Warp,
    p: Predicate,
    q: Predicate,
    holds: u32,
    accumulate: (PredicateLogic, u32),
    mask: u32,
) {
    let (logic, with) = accumulate;
    warp.set_predicate(q, combine(logic, !holds, with), mask);
    warp.set_predicate(p, combine(logic, holds, with), mask);
}
