//! Engines that execute the methods that a channel sends to its objects.
//!
//! An engine holds the method state of one channel at a time. The caller saves and loads the state on a channel switch.
//! A method that starts work only records the work. [`Engine::step`] then performs it in small steps, so that locks are
//! held briefly and the caller can charge time, switch channels, and stop between steps.
//!
//! Modules: [`copy`] contains M2MF and the copy engines, and [`semaphore`] contains the semaphore formats. Compute is
//! in the crate's `compute` module.
//!
//! Not modelled: 2D (0x902d), 3D (0x9097) and video decoding. Their classes are not supported.

pub mod copy;
pub mod graph;
pub mod semaphore;

use crate::compute;
use nvspec::addr::GpuVa;
use simgpu_memory::memory::Memory;
use simgpu_memory::mmu::{Access, AddressSpace, Mmu, MmuFault, Session};

/// Context for one call of an engine.
#[derive(Debug)]
pub struct EngineCx<'a> {
    /// The card's memory bus.
    pub memory: &'a Memory,
    /// The card's MMU.
    pub mmu: &'a Mmu,
    /// The channel's address space.
    pub space: &'a AddressSpace,
    /// The card's clock in ns.
    pub now_ns: u64,
    /// Accumulated work of the engine, for the time model.
    pub work: &'a mut Work,
}

impl<'a> EngineCx<'a> {
    /// Starts a memory access session for the channel.
    #[must_use]
    pub fn session(&self) -> Session<'a> {
        self.mmu.session(self.memory, self.space, Access::USER)
    }
}

/// Work done by an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Number of bytes written by copies, inline uploads, and constant updates.
    pub bytes: u64,
    /// Number of copies and grids launched.
    pub launches: u32,
    /// Number of warp instructions executed.
    pub instructions: u64,
    /// Number of thread instructions executed.
    pub thread_instructions: u64,
    /// Number of shader memory transactions.
    pub transactions: u64,
    /// Number of bytes that copies and transactions transferred to or from system memory.
    pub bus_bytes: u64,
    /// Number of semaphores released.
    pub releases: u32,
    /// Set if a non-stall interrupt must be raised.
    pub non_stall: bool,
    /// Host time spent on the copies, in ns.
    pub host_ns: u64,
    /// Start address of a recent write by a copy or shader.
    pub written: Option<GpuVa>,
}

/// Reason why an engine stopped. The caller knows the method's channel, subchannel, class and data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The MMU rejected an access, so the current work is abandoned.
    #[error(transparent)]
    Fault(#[from] MmuFault),
    /// The MMU rejected a shader's access, so the current work is abandoned.
    #[error("of a shader: {0}")]
    ShaderFault(MmuFault),
    /// The class does not define the method, or the model does not support it.
    #[error("illegal method")]
    IllegalMethod,
    /// The engine does not support the class.
    #[error("illegal class")]
    IllegalClass,
    /// The data is invalid: an error code in [`nvspec::class::data_error`] for PGRAPH, or
    /// [`nvspec::class::ce90b5::error`] for a copy engine.
    #[error("invalid method data, code {0:#x}")]
    Data(u32),
    /// A warp raised an error with this code ([`nvspec::class::compute90c0::warp_error`]).
    #[error("warp error {0:#x}")]
    Warp(u32),
}

/// State of an engine's work after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More work is pending.
    More,
    /// Work is in progress on other threads. The engine wakes the caller when it must be stepped again.
    Elsewhere,
    /// No work is pending.
    Done,
}

/// The method state of one channel, returned by [`Engine::save`]. The default is the state of a new channel.
#[derive(Clone, Debug, Default)]
pub struct ContextState(pub(crate) State);

/// Tags in a context image that identify the engine kind of the state.
mod image {
    pub(super) const M2MF: u32 = 0x9039;
    pub(super) const CE: u32 = 0x90b5;
    pub(super) const GRAPH: u32 = 0x90c0;
}

impl ContextState {
    /// Serializes the state to a context image, excluding work in progress.
    #[must_use]
    pub fn to_words(&self) -> Vec<u32> {
        let (whose, words) = match &self.0 {
            State::New => return Vec::new(),
            State::M2mf(registers) => (image::M2MF, registers.to_words()),
            State::Ce(registers) => (image::CE, registers.to_words()),
            State::Graph(m2mf, compute) => {
                // Put compute's state first, because its length is fixed.
                let words = compute.to_words().into_iter().chain(m2mf.to_words()).collect();
                (image::GRAPH, words)
            }
        };
        std::iter::once(whose).chain(words).collect()
    }

    /// Parses the state from an untrusted context image. Replaces an invalid state with that of a new channel.
    #[must_use]
    pub fn from_words(words: &[u32]) -> Self {
        Self(match words {
            [image::M2MF, words @ ..] => State::M2mf(Box::new(copy::m2mf::Registers::from_words(words))),
            [image::GRAPH, words @ ..] if words.len() >= compute::Registers::IMAGE_WORDS => {
                let (compute, m2mf) = words.split_at(compute::Registers::IMAGE_WORDS);
                let m2mf = copy::m2mf::Registers::from_words(m2mf);
                State::Graph(Box::new(m2mf), Box::new(compute::Registers::from_words(compute)))
            }
            [image::CE, words @ ..] => State::Ce(Box::new(copy::ce::Registers::from_words(words))),
            _ => State::New,
        })
    }
}

/// Engine state by engine kind.
#[derive(Clone, Debug, Default)]
pub(crate) enum State {
    /// State of a new channel, valid for any engine.
    #[default]
    New,
    /// State of M2MF.
    M2mf(Box<copy::m2mf::Registers>),
    /// State of a copy engine.
    Ce(Box<copy::ce::Registers>),
    /// State of PGRAPH: M2MF and compute.
    Graph(Box<copy::m2mf::Registers>, Box<compute::Registers>),
}

/// An engine that executes methods.
pub trait Engine: Send {
    /// Returns true if objects of the class may be bound.
    fn class_supported(&self, class: u32) -> bool;

    /// Executes one method, identified by its byte address in the class. If the method starts work, call
    /// [`Engine::step`] until that work is done before executing the next method.
    ///
    /// # Errors
    /// Returns [`EngineError`] if the method fails. A failed method has no effect, except that bytes before an
    /// [`EngineError::Fault`] have been written.
    fn method(
        &mut self,
        subchannel: u8,
        class: u32,
        method: u32,
        data: u32,
        cx: &mut EngineCx<'_>,
    ) -> Result<(), EngineError>;

    /// Returns true if work is pending.
    fn pending(&self) -> bool;

    /// Performs about `budget_bytes` of the pending work (at least one byte and at most 1 MiB).
    ///
    /// # Errors
    /// Returns [`EngineError::Fault`] if a memory access fails. The engine has then abandoned the pending work.
    fn step(&mut self, cx: &mut EngineCx<'_>, budget_bytes: u64) -> Result<Progress, EngineError>;

    /// Removes and returns the channel's state, including pending copies, and resets the engine as [`Engine::reset`]
    /// does. A running grid is abandoned.
    fn save(&mut self) -> ContextState;

    /// Loads a channel's state. The state of a different engine kind is treated as that of a new channel.
    fn load(&mut self, state: ContextState);

    /// Drops the channel's state and pending work.
    fn reset(&mut self);
}
