//! Engines: what executes the methods that a channel sends to its objects.
//!
//! An engine holds the method state of one channel at a time; the caller saves and loads it when channels switch. A
//! method that starts work only notes it; [`Engine::step`] does the work in pieces, so that nothing is locked for long
//! and the caller can charge time, switch and stop in between.
//!
//! Parts: [`copy`], M2MF and the copy engines; [`semaphore`], the forms that semaphores have in memory. Compute stands
//! in the crate's `compute`.
//!
//! Not modelled: 2D (0x902d), 3D (0x9097), video decoding. Their classes are not taken here.

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
    /// Work of the engine, for the time model; added to.
    pub work: &'a mut Work,
}

impl<'a> EngineCx<'a> {
    /// Begins memory accesses of the channel.
    #[must_use]
    pub fn session(&self) -> Session<'a> {
        self.mmu.session(self.memory, self.space, Access::USER)
    }
}

/// Work that an engine did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes written by copies.
    pub bytes: u64,
    /// Copies begun.
    pub launches: u32,
    /// Instructions that warps have executed.
    pub instructions: u64,
    /// Those, once for each thread that took part.
    pub thread_instructions: u64,
    /// Memory transactions of shaders.
    pub transactions: u64,
    /// Bytes of copies and transactions that came from system memory or went there.
    pub bus_bytes: u64,
    /// Semaphores released.
    pub releases: u32,
    /// A non-stall interrupt is to be raised.
    pub non_stall: bool,
    /// Time of the host's that went into moving these bytes, in ns.
    pub host_ns: u64,
    /// First byte that the last copied run was written to.
    pub written: Option<GpuVa>,
}

/// Why an engine stopped. The channel's method, subchannel, class and data are known to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The MMU refused an access; the work under way is abandoned.
    #[error(transparent)]
    Fault(#[from] MmuFault),
    /// The MMU refused an access of a shader; the work under way is abandoned.
    #[error("of a shader: {0}")]
    ShaderFault(MmuFault),
    /// The class has no such method, or it is not modelled.
    #[error("illegal method")]
    IllegalMethod,
    /// The engine has no such class.
    #[error("illegal class")]
    IllegalClass,
    /// The data is not good: for PGRAPH a number of [`nvspec::class::data_error`], for a copy engine one of
    /// [`nvspec::class::ce90b5::error`].
    #[error("bad method data, code {0:#x}")]
    Data(u32),
    /// A warp did what it must not: a number of [`nvspec::class::compute90c0::warp_error`].
    #[error("warp error {0:#x}")]
    Warp(u32),
}

/// Progress of a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// There is more to do.
    More,
    /// There is more to do, which goes on without the caller: it is woken when there is reason to call again.
    Elsewhere,
    /// Nothing is pending.
    Done,
}

/// The method state of one channel, as [`Engine::save`] returned it. The default is the state of a new channel.
#[derive(Clone, Debug, Default)]
pub struct ContextState(pub(crate) State);

/// Says whose state the words of a context image are.
mod image {
    pub(super) const M2MF: u32 = 0x9039;
    pub(super) const CE: u32 = 0x90b5;
    pub(super) const GRAPH: u32 = 0x90c0;
}

impl ContextState {
    /// The state as a context image holds it. Work under way is not part of it.
    #[must_use]
    pub fn to_words(&self) -> Vec<u32> {
        let (whose, words) = match &self.0 {
            State::New => return Vec::new(),
            State::M2mf(registers) => (image::M2MF, registers.to_words()),
            State::Ce(registers) => (image::CE, registers.to_words()),
            State::Graph(m2mf, compute) => {
                // Compute's have a length of their own and come first.
                let words = compute.to_words().into_iter().chain(m2mf.to_words()).collect();
                (image::GRAPH, words)
            }
        };
        std::iter::once(whose).chain(words).collect()
    }

    /// The state that a context image holds. Anything may stand there: what is no state is a new channel's.
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

/// State of an engine, by kind of engine.
#[derive(Clone, Debug, Default)]
pub(crate) enum State {
    /// A new channel's, of any engine.
    #[default]
    New,
    /// M2MF's.
    M2mf(Box<copy::m2mf::Registers>),
    /// A copy engine's.
    Ce(Box<copy::ce::Registers>),
    /// PGRAPH's: M2MF's and compute's.
    Graph(Box<copy::m2mf::Registers>, Box<compute::Registers>),
}

/// An engine.
pub trait Engine: Send {
    /// Returns whether objects of the class may be bound.
    fn class_supported(&self, class: u32) -> bool;

    /// Executes one method (byte address in the class). Work that it starts is pending then; call [`Engine::step`]
    /// until it is done, before the next method.
    ///
    /// # Errors
    /// [`EngineError`]; the method had no effect then, except for the bytes before an [`EngineError::Fault`].
    fn method(
        &mut self,
        subchannel: u8,
        class: u32,
        method: u32,
        data: u32,
        cx: &mut EngineCx<'_>,
    ) -> Result<(), EngineError>;

    /// Returns whether work is pending.
    fn pending(&self) -> bool;

    /// Does pending work, about `budget_bytes` of it (at least a little, at most 1 MiB).
    ///
    /// # Errors
    /// [`EngineError::Fault`]; the work is abandoned and nothing is pending then.
    fn step(&mut self, cx: &mut EngineCx<'_>, budget_bytes: u64) -> Result<Progress, EngineError>;

    /// Takes the channel's state out, pending work included. The engine is as after [`Engine::reset`] then.
    fn save(&mut self) -> ContextState;

    /// Takes a channel's state in. The state of another kind of engine counts as a new channel's.
    fn load(&mut self, state: ContextState);

    /// Forgets state and pending work.
    fn reset(&mut self);
}
