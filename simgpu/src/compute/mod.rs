//! Compute, class 0x90c0: grids of sm_20 code.
//!
//! Methods set what a grid needs; LAUNCH fixes it and the grid runs, on threads of its own if the card has some. The
//! engine is busy until the grid has ended, and executes no method meanwhile: every method waits, as if WAIT_FOR_IDLE
//! came before it.
//!
//! Parts: `registers`, the methods' state; `launch`, a grid and its surroundings; `pool` and `grid`, threads and the
//! blocks that they take; `block`, warps and barriers; `warp` and `stack`, registers and divergence; `code` and
//! `constants`, caches; `residue`, what kernels leave behind; `memory`, what is accessed; `locks`, of global memory; `exec`, instructions; `soft`, arithmetic in any rounding.
//!
//! Memory accesses go through the channel's address space, in sessions of a few thousand instructions: a TLB flush waits
//! for these, and what it dropped is not used after it.
//!
//! # Time
//! A grid is charged when it has ended: its launch, and the greatest of its instructions at the rate of all
//! multiprocessors, its memory transactions at the memory's bandwidth ([`crate::ComputeTiming`]), and those of system
//! memory at the bus's ([`crate::TimeModel::bus_bytes_per_second`]). Instructions are counted once for each warp that
//! executes them, whatever lanes take part, so that divergence costs what it repeats. Transactions are pieces of 128
//! bytes of global and local memory: one for words in a row, one for each lane where every lane has a line of its own,
//! and one for each address of an atomic operation that is in another line than the one before; those that span two
//! pages count for the last one's memory. No count depends on the number of threads that execute the grid, nor does the
//! time between two semaphores around it.
//!
//! Not counted: bank conflicts of shared memory, misses of caches for instructions and constants, latencies that too few
//! warps cannot hide, multiprocessors that have nothing to do, slower units (double precision, MUFU).
//!
//! # What it does not model
//! - Instructions that the head of `exec` lists; macros, notifiers (0x104-0x10c), the global condition
//!   (0x130-0x138), conditions that look at memory, reductions by semaphores: illegal methods or bad data.
//! - Textures, surfaces, performance counters: their methods are stored.
//! - Blocks side by side: a worker executes one to its end before it takes the next. A grid whose blocks wait for blocks
//!   with a higher number may not end, which no program may rely on anyway.
//! - Preemption in a grid; a grid whose channel is taken off the engine all the same is abandoned.
//! - Which cluster and unit of it made an access: faults are reported as those of the first cluster's texture unit and
//!   L1 (GUESS for instructions and constants), and errors of warps as those of the first multiprocessor. Errors do not
//!   name the program counter.
//! - Data caches. Constants are cached for a grid, instructions too: stores to either are seen by the next grid.
//! - Warps of a block execute in turns that do not depend on the time that instructions take.

mod block;
mod code;
mod constants;
mod exec;
mod grid;
mod launch;
mod locks;
mod memory;
mod pool;
mod registers;
mod residue;
mod soft;
mod stack;
mod warp;

#[cfg(test)]
mod tests;

use crate::engines::semaphore::{self, Form};
use crate::engines::{EngineCx, EngineError, Progress};
use crate::memory::Memory;
use crate::mmu::Mmu;
use launch::{Failure, Launch};
use nvspec::class::{compute90c0 as methods, data_error};
use pool::{Advance, Pool, Wake};
use std::sync::Arc;

pub(crate) use memory::TRANSACTION_BYTES;
pub(crate) use registers::Registers;

/// The compute engine.
#[derive(Debug)]
pub struct Compute {
    registers: Registers,
    /// A grid that was launched and has not begun.
    launched: Option<Box<Launch>>,
    pool: Pool,
    sms: u32,
}

impl Compute {
    /// On a card of `sms` multiprocessors, with that many threads; without threads, [`Self::step`] executes. `wake` is
    /// called, on any thread, when there is reason to step again.
    #[must_use]
    pub fn new(
        memory: Arc<Memory>,
        mmu: Arc<Mmu>,
        wake: Arc<dyn Fn() + Send + Sync>,
        workers: usize,
        sms: u32,
    ) -> Self {
        let pool = Pool::new(memory, mmu, Wake(wake), workers, sms);
        Self { registers: Registers::default(), launched: None, pool, sms }
    }

    /// Executes a method. A grid that it launches is pending then.
    ///
    /// # Errors
    /// [`EngineError`]; the method had no effect then.
    pub fn method(&mut self, method: u32, data: u32, cx: &mut EngineCx<'_>) -> Result<(), EngineError> {
        match method {
            methods::LAUNCH => self.launch(data, cx),
            methods::CONSTANT_BIND => self.registers.bind(data),
            methods::GLOBAL_MAP_ENTRY => self.registers.map_global(data),
            methods::CONSTANT_DATA..=methods::CONSTANT_DATA_LAST => self.load_constant(data, cx),
            methods::SEMAPHORE_EXECUTE => self.release(data, cx),
            _ if methods::is_without_effect(method) => Ok(()),
            _ => {
                let (_, mask) = methods::state_word(method).ok_or(EngineError::IllegalMethod)?;
                if data & !mask != 0 {
                    return Err(EngineError::Data(data_error::INVALID_BITFIELD));
                }
                self.registers.set(method, data);
                Ok(())
            }
        }
    }

    fn launch(&mut self, cta_param: u32, cx: &mut EngineCx<'_>) -> Result<(), EngineError> {
        let launch = self.registers.launch(cta_param, self.sms)?;
        if self.registers.enabled()? {
            self.launched = Some(Box::new(launch));
        }
        cx.work.launches += 1;
        Ok(())
    }

    /// Stores a word in the selected constant buffer.
    fn load_constant(&mut self, data: u32, cx: &mut EngineCx<'_>) -> Result<(), EngineError> {
        let (selected, offset) = (self.registers.selected(), self.registers.word(methods::CONSTANT_OFFSET));
        if !offset.is_multiple_of(4) || offset >= selected.bytes {
            return Err(EngineError::Data(data_error::INVALID_VALUE));
        }
        let mut session = cx.session();
        session.write32(nvspec::addr::GpuVa(selected.base).offset(u64::from(offset)), data)?;
        session.count(true, 4);
        cx.work.bus_bytes += session.take_bus_bytes();
        self.registers.set(methods::CONSTANT_OFFSET, offset + 4);
        cx.work.bytes += 4;
        Ok(())
    }

    fn release(&mut self, data: u32, cx: &mut EngineCx<'_>) -> Result<(), EngineError> {
        use methods::semaphore::{AWAKEN, MASK, ONE_WORD, OPERATION, RELEASE};
        if data & !MASK != 0 {
            return Err(EngineError::Data(data_error::INVALID_BITFIELD));
        }
        if OPERATION.get(data) != RELEASE {
            return Err(EngineError::Data(data_error::INVALID_ENUM));
        }
        let va = self.registers.address(methods::SEMAPHORE_ADDRESS_HIGH, methods::SEMAPHORE_ADDRESS_LOW);
        if !va.0.is_multiple_of(4) {
            return Err(EngineError::Data(data_error::INVALID_ADDRESS_ALIGNMENT));
        }
        let form = if ONE_WORD.is_set(data) { Form::OneWord } else { Form::FourWords };
        let payload = self.registers.word(methods::SEMAPHORE_PAYLOAD);
        let mut session = cx.session();
        session.push_posted();
        semaphore::release(&mut session, va, payload, form, cx.now_ns)?;
        drop(session);
        cx.work.releases += 1;
        cx.work.non_stall |= AWAKEN.is_set(data);
        Ok(())
    }

    /// Returns whether a grid is pending.
    #[must_use]
    pub fn pending(&self) -> bool {
        self.launched.is_some() || self.pool.is_busy()
    }

    /// Begins the grid, sees whether it has ended, or does a little of it.
    ///
    /// # Errors
    /// [`EngineError::ShaderFault`] and [`EngineError::Warp`]; the grid has ended then.
    pub fn step(&mut self, cx: &mut EngineCx<'_>) -> Result<Progress, EngineError> {
        if let Some(launch) = self.launched.take() {
            self.pool.start(*launch, *cx.space);
        }
        match self.pool.advance() {
            None => Ok(Progress::Done),
            Some(Advance::More) => Ok(Progress::More),
            Some(Advance::Elsewhere) => Ok(Progress::Elsewhere),
            Some(Advance::Ended(outcome)) => {
                cx.work.instructions += outcome.counts.instructions;
                cx.work.thread_instructions += outcome.counts.thread_instructions;
                cx.work.transactions += outcome.counts.transactions;
                cx.work.bus_bytes += outcome.counts.bus_bytes;
                cx.work.written = outcome.counts.written.or(cx.work.written);
                match outcome.failure {
                    None => Ok(Progress::Done),
                    Some(Failure::Fault(fault)) => Err(EngineError::ShaderFault(fault)),
                    Some(Failure::Warp(error)) => Err(EngineError::Warp(error)),
                }
            }
        }
    }

    /// Takes the channel's state out. A grid under way is abandoned: when this returns, nothing of it is executed.
    pub(crate) fn save(&mut self) -> Registers {
        self.stop();
        std::mem::take(&mut self.registers)
    }

    /// Takes a channel's state in.
    pub(crate) fn load(&mut self, registers: Registers) {
        self.stop();
        self.registers = registers;
    }

    /// Forgets state and grids.
    pub(crate) fn reset(&mut self) {
        self.load(Registers::default());
    }

    fn stop(&mut self) {
        self.launched = None;
        self.pool.stop();
    }
}
