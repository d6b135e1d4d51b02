//! The compute engine, class 0x90c0: executes grids of sm_20 code.
//!
//! Methods set a grid's parameters. LAUNCH freezes them and starts the grid, on worker threads if the card has any. The
//! engine is busy and executes no further methods until the grid ends, as if WAIT_FOR_IDLE preceded every method.
//!
//! Modules:
//! - `registers`: the state that methods set
//! - `launch`: a grid and its launch parameters
//! - `pool` and `grid`: worker threads, and the blocks that they execute
//! - `block`: warps and barriers
//! - `warp` and `stack`: registers and divergence
//! - `code` and `constants`: caches
//! - `residue`: data that kernels leave behind
//! - `memory`: memory accesses; `locks`: locks in global memory
//! - `exec`: instructions
//! - `soft`: arithmetic in all rounding modes
//!
//! Memory is accessed through the channel's address space, in sessions of a few thousand instructions. A TLB flush
//! waits for the current sessions to end. Later sessions do not use the dropped translations.
//!
//! # Time
//! A grid's time is charged when the grid ends. The charge is the launch time plus the longest of three times: its
//! instructions at the rate of all multiprocessors, its memory transactions at the memory bandwidth
//! (`ComputeTiming`), and its system memory transactions at the bus bandwidth
//! (`TimeModel::bus_bytes_per_second`).
//!
//! - An instruction counts once per warp that executes it, regardless of the number of active lanes. The cost of
//!   divergence is therefore that of the repeated instructions.
//! - A transaction transfers a 128-byte line of global or local memory: contiguous words in a line need one
//!   transaction, and lanes that access different lines need one transaction each. In an atomic operation or an access
//!   to bytes or halfwords, each address whose line differs from that of the previous address needs a transaction. A
//!   transaction that spans two pages is charged to the memory of the last page.
//! - The number of worker threads affects neither the counts nor the time between two semaphores around the grid.
//!
//! The model ignores shared memory bank conflicts, instruction and constant cache misses, latency that is exposed
//! because there are too few warps, idle multiprocessors, and slower units (double precision, MUFU).
//!
//! # Not modelled
//! - The instructions listed at the top of `exec`. Macros, notifiers (0x104-0x10c), the global condition (0x130-0x138),
//!   memory conditions, and semaphore reductions: they fail as illegal methods or bad data.
//! - Textures, surfaces and performance counters: their methods only store values.
//! - Concurrent blocks in a worker: a worker runs each block to completion. A grid whose blocks wait for
//!   higher-numbered blocks may never end. Programs must not rely on such waits on hardware either.
//! - Preemption within a grid: a grid is abandoned if its channel is switched off the engine.
//! - The GPC and unit of an access: faults are attributed to the texture unit and L1 of the first GPC (GUESS for
//!   instructions and constants), and warp errors to the first multiprocessor. Errors do not include the program
//!   counter.
//! - Data caches. Constants and instructions are cached for the duration of a grid. The next grid sees stores to both.
//! - Real scheduling: the warps of a block take turns, regardless of instruction latency.

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
use launch::{Failure, Launch};
use nvspec::class::{compute90c0 as methods, data_error};
use pool::{Advance, Pool, Wake};
use simgpu_memory::memory::Memory;
use simgpu_memory::mmu::Mmu;
use std::sync::Arc;

pub use memory::TRANSACTION_BYTES;
pub(crate) use registers::Registers;

/// The compute engine.
#[derive(Debug)]
pub struct Compute {
    registers: Registers,
    /// A launched grid that has not started yet.
    launched: Option<Box<Launch>>,
    pool: Pool,
    sms: u32,
}

impl Compute {
    /// Creates an engine with `sms` multiprocessors and `workers` threads. Without threads, [`Self::step`] executes
    /// grids. The engine calls `wake` from any thread when the caller must call [`Self::step`] again.
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

    /// Executes a method. If the method launches a grid, the grid is pending afterwards.
    ///
    /// # Errors
    /// Returns [`EngineError`] if the method fails. It then has no effect.
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

    /// Starts the pending grid, polls it, or executes part of it.
    ///
    /// # Errors
    /// Returns [`EngineError::ShaderFault`] or [`EngineError::Warp`] if the grid has failed. The grid has then ended.
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

    /// Removes and returns the channel's state. Abandons a running grid, which executes no further instructions.
    pub(crate) fn save(&mut self) -> Registers {
        self.stop();
        std::mem::take(&mut self.registers)
    }

    /// Loads a channel's state.
    pub(crate) fn load(&mut self, registers: Registers) {
        self.stop();
        self.registers = registers;
    }

    /// Drops the state and all grids.
    pub(crate) fn reset(&mut self) {
        self.load(Registers::default());
    }

    fn stop(&mut self) {
        self.launched = None;
        self.pool.stop();
    }
}
