//! Compute, class 0x90c0: grids of sm_20 code.
//!
//! Methods set a grid's parameters; LAUNCH fixes them and starts the grid, on separate threads if the card has any. The
//! engine is busy until the grid has ended, and executes no method until then: every method waits, as if WAIT_FOR_IDLE
//! preceded it.
//!
//! Parts: `registers`, the methods' state; `launch`, a grid and its parameters; `pool` and `grid`, threads and the
//! blocks that they execute; `block`, warps and barriers; `warp` and `stack`, registers and divergence; `code` and
//! `constants`, caches; `residue`, data left by kernels; `memory`, memory accesses; `locks`, of global memory; `exec`,
//! instructions; `soft`, arithmetic with any rounding.
//!
//! Memory accesses go through the channel's address space, in sessions of a few thousand instructions: a TLB flush
//! waits for the current sessions, and dropped translations are not used after the flush.
//!
//! # Time
//! A grid is charged at its end: its launch, and the maximum of its instructions at the rate of all multiprocessors,
//! its memory transactions at the memory's bandwidth ([`crate::ComputeTiming`]), and its transactions with system
//! memory at the bus's bandwidth ([`crate::TimeModel::bus_bytes_per_second`]). Instructions are counted once for each
//! warp that executes them, for any number of active lanes, so divergence costs the repeated instructions. Transactions
//! are pieces of 128 bytes of global and local memory: one for contiguous words, one for each lane if every lane has a
//! separate line, and one for each address of an atomic operation that is in a different line than the previous one; a
//! transaction that spans two pages counts for the last page's memory. Neither the counts nor the time between two
//! semaphores around the grid depend on the number of threads that execute it.
//!
//! The model ignores bank conflicts of shared memory, misses of caches for instructions and constants, latencies that
//! too few warps cannot hide, idle multiprocessors, slower units (double precision, MUFU).
//!
//! # Not modelled
//! - Instructions listed at the top of `exec`; macros, notifiers (0x104-0x10c), the global condition (0x130-0x138),
//!   conditions on memory, reductions by semaphores: illegal methods or bad data.
//! - Textures, surfaces, performance counters: their methods are stored.
//! - Concurrent blocks in a worker: it executes a block to its end before it starts the next. A grid whose blocks wait
//!   for blocks with a higher number may not end; programs must not rely on that anyway.
//! - Preemption in a grid; a grid is abandoned if its channel is taken off the engine.
//! - The cluster and unit of an access: faults are reported as those of the first cluster's texture unit and L1 (GUESS
//!   for instructions and constants), and errors of warps as those of the first multiprocessor. Errors do not name the
//!   program counter.
//! - Data caches. Constants and instructions are cached for a grid: the next grid sees stores to either.
//! - Real scheduling: warps of a block execute in turns that do not depend on the time of instructions.

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
    /// A launched grid that has not started.
    launched: Option<Box<Launch>>,
    pool: Pool,
    sms: u32,
}

impl Compute {
    /// Makes an engine of `sms` multiprocessors with `workers` threads; without threads, [`Self::step`] executes grids.
    /// `wake` is called, on any thread, when the caller must step again.
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

    /// Executes a method. If the method launches a grid, the grid is then pending.
    ///
    /// # Errors
    /// [`EngineError`]; the method then had no effect.
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

    /// Returns true if a grid is pending.
    #[must_use]
    pub fn pending(&self) -> bool {
        self.launched.is_some() || self.pool.is_busy()
    }

    /// Starts the grid, checks for its end, or executes part of it.
    ///
    /// # Errors
    /// [`EngineError::ShaderFault`] and [`EngineError::Warp`]; the grid has then ended.
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

    /// Removes and returns the channel's state. Abandons a running grid: when this returns, no part of it is executing.
    pub(crate) fn save(&mut self) -> Registers {
        self.stop();
        std::mem::take(&mut self.registers)
    }

    /// Loads a channel's state.
    pub(crate) fn load(&mut self, registers: Registers) {
        self.stop();
        self.registers = registers;
    }

    /// Drops state and grids.
    pub(crate) fn reset(&mut self) {
        self.load(Registers::default());
    }

    fn stop(&mut self) {
        self.launched = None;
        self.pool.stop();
    }
}
