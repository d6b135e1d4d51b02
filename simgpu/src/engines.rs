//! Engines: they execute the methods that a channel sends to its objects.
//!
//! An engine holds the method state of one channel at a time; the caller saves and loads it when channels switch. A
//! method that starts work only records it; [`Engine::step`] does the work in pieces, so that locks are held briefly
//! and the caller can charge time, switch and stop in between.
//!
//! Parts: [`copy`], M2MF and the copy engines; [`semaphore`], the formats of semaphores in memory. Compute is in the
//! crate's `compute`.
//!
//! Not modelled: 2D (0x902d), 3D (0x9097), video decoding. Their classes are not supported here.

pub mod copy;
pub mod semaphore;

use crate::compute;
use crate::memory::Memory;
use crate::mmu::{Access, AddressSpace, Mmu, MmuFault, Session};
use nvspec::addr::GpuVa;

/// Context of an engine during one call.
#[derive(Debug)]
pub struct EngineCx<'a> {
    /// The card's memory bus.
    pub memory: &'a Memory,
    /// The card's MMU.
    pub mmu: &'a Mmu,
    /// The address space of the channel.
    pub space: &'a AddressSpace,
    /// The card's clock, in ns.
    pub now_ns: u64,
    /// The engine's work, for the time model; the engine adds to this value.
    pub work: &'a mut Work,
}

impl<'a> EngineCx<'a> {
    /// Starts a session of memory accesses for the channel.
    #[must_use]
    pub fn session(&self) -> Session<'a> {
        self.mmu.session(self.memory, self.space, Access::USER)
    }
}

/// Work done by an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Number of bytes written by copies.
    pub bytes: u64,
    /// Number of started copies.
    pub launches: u32,
    /// Number of instructions executed by warps.
    pub instructions: u64,
    /// Number of instructions, counted once for each participating thread.
    pub thread_instructions: u64,
    /// Number of memory transactions of shaders.
    pub transactions: u64,
    /// Number of bytes that copies and transactions moved from or to system memory.
    pub bus_bytes: u64,
    /// Number of released semaphores.
    pub releases: u32,
    /// Set if a non-stall interrupt must be raised.
    pub non_stall: bool,
    /// Host time spent on moving these bytes, in ns.
    pub host_ns: u64,
    /// Start address of the last copied run.
    pub written: Option<GpuVa>,
}

/// Reason that an engine stopped. The caller knows the channel's method, subchannel, class and data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The MMU refused an access; the current work is abandoned.
    #[error(transparent)]
    Fault(#[from] MmuFault),
    /// The MMU refused a shader's access; the current work is abandoned.
    #[error("of a shader: {0}")]
    ShaderFault(MmuFault),
    /// The class does not have the method, or the method is not modelled.
    #[error("illegal method")]
    IllegalMethod,
    /// The engine does not have the class.
    #[error("illegal class")]
    IllegalClass,
    /// Invalid data: for PGRAPH a number of [`nvspec::class::data_error`], for a copy engine one of
    /// [`nvspec::class::ce90b5::error`].
    #[error("bad method data, code {0:#x}")]
    Data(u32),
    /// Error of a warp: a value from [`nvspec::class::compute90c0::warp_error`].
    #[error("warp error {0:#x}")]
    Warp(u32),
}

/// Progress of a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More work is left.
    More,
    /// More work runs without the caller, which is woken when it must call again.
    Elsewhere,
    /// No work is pending.
    Done,
}

/// The method state of one channel, returned by [`Engine::save`]. The default is the state of a new channel.
#[derive(Clone, Debug, Default)]
pub struct ContextState(pub(crate) State);

/// Markers of the engine whose state is in a context image.
mod image {
    pub(super) const M2MF: u32 = 0x9039;
    pub(super) const CE: u32 = 0x90b5;
    pub(super) const GRAPH: u32 = 0x90c0;
}

impl ContextState {
    /// Returns the state in the format of a context image. Work in flight is not included.
    #[must_use]
    pub fn to_words(&self) -> Vec<u32> {
        let (whose, words) = match &self.0 {
            State::New => return Vec::new(),
            State::M2mf(registers) => (image::M2MF, registers.to_words()),
            State::Ce(registers) => (image::CE, registers.to_words()),
            State::Graph(m2mf, compute) => {
                // Compute's state has a fixed length and comes first.
                let words = compute.to_words().into_iter().chain(m2mf.to_words()).collect();
                (image::GRAPH, words)
            }
        };
        std::iter::once(whose).chain(words).collect()
    }

    /// Parses the state in an untrusted context image; an invalid state becomes a new channel's.
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

/// State of an engine, by its kind.
#[derive(Clone, Debug, Default)]
pub(crate) enum State {
    /// State of a new channel, for any engine.
    #[default]
    New,
    /// State of M2MF.
    M2mf(Box<copy::m2mf::Registers>),
    /// State of a copy engine.
    Ce(Box<copy::ce::Registers>),
    /// State of PGRAPH: of M2MF and of compute.
    Graph(Box<copy::m2mf::Registers>, Box<compute::Registers>),
}

/// An engine.
pub trait Engine: Send {
    /// Returns true if objects of the class may be bound.
    fn class_supported(&self, class: u32) -> bool;

    /// Executes one method (byte address in the class). It may start pending work; call [`Engine::step`] until that is
    /// done, before the next method.
    ///
    /// # Errors
    /// [`EngineError`]; the method then had no effect, except for the bytes before an [`EngineError::Fault`].
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

    /// Does about `budget_bytes` of pending work (more than 0 bytes, at most 1 MiB).
    ///
    /// # Errors
    /// [`EngineError::Fault`]; the work is abandoned, and no work is then pending.
    fn step(&mut self, cx: &mut EngineCx<'_>, budget_bytes: u64) -> Result<Progress, EngineError>;

    /// Removes and returns the channel's state, including pending work, which resets the engine like [`Engine::reset`].
    fn save(&mut self) -> ContextState;

    /// Loads a channel's state. The state of another kind of engine counts as new.
    fn load(&mut self, state: ContextState);

    /// Drops state and pending work.
    fn reset(&mut self);
}
