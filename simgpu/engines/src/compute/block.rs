//! Executes one block of a grid. Its warps take turns until all of them have ended.
//!
//! The order is deterministic: a warp executes until it waits, ends, or has executed [`INSTRUCTIONS_PER_TURN`]
//! instructions.

use super::code::Code;
use super::constants::Constants;
use super::exec::{Arrival, Flow, Machine, execute};
use super::launch::{Failure, Launch};
use super::locks::Locks;
use super::memory::{Counts, SharedMemory};
use super::residue::{ROWS, Residue, first_row};
use super::warp::{ALL, Condition, LANES, Warp};
use nvspec::class::compute90c0::{limit, warp_error};
use simgpu_memory::mmu::Session;
use sm20::BarrierOp;

/// Maximum number of instructions that a warp executes per turn.
const INSTRUCTIONS_PER_TURN: u32 = 256;

/// Reason why a time slice of a block ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slice {
    /// The block can continue.
    More,
    /// All warps have ended.
    Ended,
    /// All remaining warps wait at barriers that will never be released.
    Stuck,
}

#[derive(Clone, Copy, Debug, Default)]
struct Barrier {
    arrived: u32,
    /// Number of warps that the barrier waits for, or `None` for all warps of the block.
    warps: Option<u32>,
    /// Number of threads that arrived with a true predicate.
    holds: u32,
    /// Number of threads that arrived with a false predicate.
    fails: u32,
}

/// A worker's instruction and constant caches.
#[derive(Debug)]
pub(crate) struct Caches {
    pub(crate) code: Code,
    pub(crate) constants: Constants,
}

/// A block that is being executed.
#[derive(Debug)]
pub(crate) struct Block {
    warps: Vec<Warp>,
    /// Arrival of each warp at the barrier where it waits.
    arrivals: Vec<Option<Arrival>>,
    shared: SharedMemory,
    barriers: [Barrier; limit::BARRIERS as usize],
    number: u64,
    position: [u32; 3],
    slot: u32,
    /// Number of warps in this block. `warps` may have more elements, because it is reused.
    count: usize,
    /// Index of the current warp.
    turn: usize,
    /// Number of instructions remaining in the current warp's turn.
    left: u32,
    clock: u64,
}

impl Block {
    pub(crate) fn new() -> Self {
        Self {
            warps: Vec::new(),
            arrivals: Vec::new(),
            shared: SharedMemory::default(),
            barriers: [Barrier::default(); limit::BARRIERS as usize],
            number: 0,
            position: [0; 3],
            slot: 0,
            count: 0,
            turn: 0,
            left: 0,
            clock: 0,
        }
    }

    /// Starts block `number` of a grid in this object, reusing its memory. `slot` is the block's index among the
    /// running blocks. `residue` provides the initial contents of registers and shared memory.
    pub(crate) fn start(&mut self, launch: &Launch, number: u64, slot: u32, residue: &Residue) {
        let threads = launch.threads() as usize;
        self.count = threads.div_ceil(LANES);
        while self.warps.len() < self.count {
            self.warps.push(Warp::new());
        }
        let left = residue.lock_for_block(number);
        for (index, warp) in self.warps[..self.count].iter_mut().enumerate() {
            let rows = left.rows.get(first_row(index, launch.registers)..).unwrap_or_default();
            let lanes = if threads >= (index + 1) * LANES { ALL } else { (1 << (threads % LANES)) - 1 };
            warp.start(index as u32, lanes, launch.entry, launch.registers, rows);
        }
        self.arrivals.clear();
        self.arrivals.resize(self.count, None);
        self.shared.start(launch.shared_bytes, &left.shared);
        drop(left);
        self.barriers = [Barrier::default(); limit::BARRIERS as usize];
        (self.number, self.position, self.slot) = (number, launch.position(number), slot);
        (self.turn, self.left, self.clock) = (0, INSTRUCTIONS_PER_TURN, 0);
    }

    /// Leaves the contents of the block's registers and shared memory for the next block. The block must not be resumed
    /// afterwards.
    pub(crate) fn leave(&self, launch: &Launch, residue: &Residue) {
        let mut left = residue.lock_for_block(self.number);
        for (index, warp) in self.warps[..self.count].iter().enumerate() {
            let first = first_row(index, launch.registers);
            let end = (first + launch.registers as usize).min(ROWS);
            if left.rows.len() < end {
                left.rows.resize(end, [0; LANES]);
            }
            if let Some(rows) = left.rows.get_mut(first..end) {
                warp.leave_in(rows, launch.registers);
            }
        }
        let own = self.shared.bytes();
        if left.shared.len() < own.len() {
            left.shared.resize(own.len(), 0);
        }
        left.shared[..own.len()].copy_from_slice(own);
    }

    /// Executes about `budget` instructions, or fewer if they access memory frequently.
    ///
    /// # Errors
    /// Returns [`Failure`] if a warp fails. The block must not be resumed after a failure.
    pub(crate) fn run(
        &mut self,
        launch: &Launch,
        locks: &Locks,
        session: &mut Session<'_>,
        caches: &mut Caches,
        counts: &mut Counts,
        budget: u32,
    ) -> Result<Slice, Failure> {
        let mut budget = budget;
        loop {
            let Some(turn) = self.next_ready() else {
                let ended = self.warps[..self.count].iter().all(|warp| warp.condition == Condition::Ended);
                return Ok(if ended { Slice::Ended } else { Slice::Stuck });
            };
            if turn != self.turn || self.left == 0 {
                (self.turn, self.left) = (turn, INSTRUCTIONS_PER_TURN);
            }
            if budget == 0 {
                return Ok(Slice::More);
            }
            let steps = self.left.min(budget);
            let transactions = counts.transactions;
            let warp = &mut self.warps[turn];
            let mut machine = Machine {
                launch,
                locks,
                session: &mut *session,
                constants: &mut caches.constants,
                counts: &mut *counts,
                shared: &mut self.shared,
                block: self.number,
                position: self.position,
                slot: self.slot,
                clock: self.clock,
            };
            let (done, arrival) = run_warp(warp, &mut machine, &mut caches.code, steps)?;
            self.clock += u64::from(done);
            self.left -= done;
            // A scattered access takes as long as many instructions, and delays TLB flushes.
            let accesses = (counts.transactions - transactions).min(u64::from(u32::MAX)) as u32;
            budget = budget.saturating_sub(done).saturating_sub(accesses / 2);
            let condition = warp.condition;
            if let Some(arrival) = arrival {
                self.arrive(turn, arrival, launch)?;
            } else if condition == Condition::Ended {
                (0..limit::BARRIERS as u8).for_each(|barrier| self.release(barrier));
            }
        }
    }

    /// Returns the next ready warp, starting with the current warp unless its turn has ended.
    fn next_ready(&self) -> Option<usize> {
        let first = if self.left == 0 { self.turn + 1 } else { self.turn };
        (first..self.count)
            .chain(0..first.min(self.count))
            .find(|index| self.warps[*index].condition == Condition::Ready)
    }

    fn arrive(&mut self, warp: usize, arrival: Arrival, launch: &Launch) -> Result<(), Failure> {
        if u32::from(arrival.barrier) >= launch.barriers {
            return Err(Failure::Warp(warp_error::ILLEGAL_PARAMETER));
        }
        let barrier = &mut self.barriers[usize::from(arrival.barrier)];
        barrier.arrived += 1;
        barrier.warps = arrival.warps;
        barrier.holds += arrival.holds.count_ones();
        barrier.fails += (arrival.lanes & !arrival.holds).count_ones();
        if arrival.operation != BarrierOp::Arrive {
            self.warps[warp].condition = Condition::Barrier(arrival.barrier);
            self.arrivals[warp] = Some(arrival);
        }
        self.release(arrival.barrier);
        Ok(())
    }

    /// Releases the warps at a barrier once all expected warps have arrived.
    fn release(&mut self, number: u8) {
        let barrier = self.barriers[usize::from(number)];
        let running = self.warps[..self.count].iter().filter(|warp| warp.condition != Condition::Ended).count();
        // If no number of warps is given, the barrier does not wait for warps that have exited.
        let expected = barrier.warps.map_or(running, |warps| warps as usize);
        if barrier.arrived == 0 || (barrier.arrived as usize) < expected {
            return;
        }
        self.barriers[usize::from(number)] = Barrier::default();
        for (warp, arrival) in self.warps.iter_mut().zip(&mut self.arrivals) {
            if warp.condition != Condition::Barrier(number) {
                continue;
            }
            warp.condition = Condition::Ready;
            let Some(arrival) = arrival.take() else { continue };
            let result = match arrival.operation {
                BarrierOp::Popc => barrier.holds,
                BarrierOp::And => {
                    if barrier.fails == 0 {
                        ALL
                    } else {
                        0
                    }
                }
                BarrierOp::Or => {
                    if barrier.holds != 0 {
                        ALL
                    } else {
                        0
                    }
                }
                BarrierOp::Arrive => continue,
            };
            warp.set(arrival.dst, &[result; LANES], arrival.lanes);
            warp.set_predicate(arrival.p, if result != 0 { ALL } else { 0 }, arrival.lanes);
        }
    }
}

/// Executes up to `steps` instructions of a warp. Returns the number of executed instructions, and the barrier if the
/// warp reached one.
fn run_warp(
    warp: &mut Warp,
    machine: &mut Machine<'_, '_>,
    code: &mut Code,
    steps: u32,
) -> Result<(u32, Option<Arrival>), Failure> {
    let mut done = 0;
    while done < steps && warp.condition == Condition::Ready {
        let instruction = code.fetch(warp.pc, machine.launch.registers, machine.session)?;
        warp.pc = warp.pc.wrapping_add(instruction.size());
        done += 1;
        machine.clock += 1;
        machine.counts.instructions += 1;
        if let Flow::Barrier(arrival) = execute(warp, &instruction, machine)? {
            return Ok((done, Some(arrival)));
        }
    }
    Ok((done, None))
}
