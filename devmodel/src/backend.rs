//! The seam to whoever owns the card: one trait, implemented by the mediator (and by a mock in the tests).
//!
//! Everything here is in the guest's own terms: guest VRAM addresses, guest bus addresses, virtual channel and engine
//! numbers. Translation, bounds and isolation are the implementer's; the vGPU only decodes and refuses what cannot be
//! decoded.

use nvspec::addr::GuestVramAddr;
use nvspec::falcon::Falcon;
use nvspec::fifo::VirtualChannelId;

/// The two memory BARs of a vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Aperture {
    /// BAR1: general access to VRAM, and the doorbells (USERD).
    Bar1,
    /// BAR3 (BAR2 in NVIDIA's count): instance memory.
    Bar3,
}

impl std::fmt::Display for Aperture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Bar1 => "BAR1",
            Self::Bar3 => "BAR3",
        })
    }
}

pub use nvspec::addr::Place;

/// The access is outside of what the guest may reach; the implementer has left `data` alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the access is outside of what the guest may reach")]
pub struct Denied;

/// Why a write to VRAM or through an aperture was not done. What it wrote before that may be written again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unwritten {
    /// It is outside of what the guest may reach, and lost.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// There is no memory for it now.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
}

/// There is no memory for what the guest writes. The same write may succeed later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no memory for what the guest writes")]
pub struct NoMemory;

/// State of a channel, as its register shows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelState {
    /// The guest has made it runnable.
    pub enabled: bool,
    /// It waits for a semaphore.
    pub acquire_pending: bool,
    /// A PBDMA or engine holds its context.
    pub loaded: bool,
    /// It has work that is not fetched yet.
    pub pending: bool,
}

/// State of an engine, as its register shows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStatus {
    /// Channel on the engine, if it is this guest's.
    pub channel: Option<VirtualChannelId>,
    /// It works for this guest.
    pub busy: bool,
}

/// Ways in which a vGPU signals its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterruptLine {
    /// One MSI message. Only called while the guest has MSI enabled and re-armed.
    Msi,
    /// The INTx level: asserted or not. Only called when it changes.
    Intx(bool),
}

/// Requests of a vGPU to the mediator. Calls are made with the vGPU borrowed, so an implementation must not call back
/// into it; what it has to report comes later through the vGPU's event methods.
pub trait Backend {
    /// Reads guest VRAM.
    ///
    /// # Errors
    /// [`Denied`] when a byte lies outside of the guest's VRAM.
    fn vram_read(&mut self, address: GuestVramAddr, data: &mut [u8]) -> Result<(), Denied>;

    /// Writes guest VRAM.
    ///
    /// # Errors
    /// [`Unwritten::Denied`] when a byte lies outside of the guest's VRAM; [`Unwritten::NoMemory`].
    fn vram_write(&mut self, address: GuestVramAddr, data: &[u8]) -> Result<(), Unwritten>;

    /// Reads through an aperture, translated by the guest's page tables. `offset` is within the BAR.
    ///
    /// # Errors
    /// [`Denied`] when no valid mapping is there.
    fn aperture_read(&mut self, aperture: Aperture, offset: u64, data: &mut [u8]) -> Result<(), Denied>;

    /// Writes through an aperture, translated by the guest's page tables. `offset` is within the BAR.
    ///
    /// # Errors
    /// [`Unwritten::Denied`] when no valid, writable mapping is there; [`Unwritten::NoMemory`].
    fn aperture_write(&mut self, aperture: Aperture, offset: u64, data: &[u8]) -> Result<(), Unwritten>;

    /// The guest has named the instance block of an aperture, or `None`: it has been unbound.
    fn bind_aperture(&mut self, aperture: Aperture, instance: Option<Place>);

    /// The guest has placed PRAMIN, the window on VRAM of BAR0, at `base`, or `None`: on what is no VRAM. For who shows memory there without
    /// a message; what comes by message is [read](Self::vram_read) and [written](Self::vram_write) by address.
    fn place_window(&mut self, _base: Option<GuestVramAddr>) {}

    /// The guest flushes the TLB for one page directory, or for all (`None`).
    fn flush_tlb(&mut self, directory: Option<Place>, hub_only: bool);

    /// The guest flushes posted writes of the apertures. What it wrote before is visible to the GPU when this returns.
    fn flush_apertures(&mut self) {}

    /// The guest has started a falcon of its vGPU with this code and data. Nothing of that runs anywhere.
    fn firmware_started(&mut self, _falcon: Falcon, _code: &[u32], _data: &[u32]) {}

    /// The guest has named the instance block of a channel, or `None`: it has been unbound.
    fn bind_channel(&mut self, channel: VirtualChannelId, instance: Option<Place>);

    /// The guest makes a channel runnable, or stops it.
    fn enable_channel(&mut self, channel: VirtualChannelId, enabled: bool);

    /// Returns what the channel does now.
    fn channel_state(&mut self, channel: VirtualChannelId) -> ChannelState;

    /// The guest submits a runlist of `length` entries. Completion is reported by `VGpu::runlist_done`.
    fn submit_runlist(&mut self, list: Place, length: u32);

    /// The guest begins to take a channel off its engines.
    fn preempt(&mut self, channel: VirtualChannelId);

    /// Returns whether the channel is still to leave its engines since [`Self::preempt`].
    fn preempting(&mut self, channel: VirtualChannelId) -> bool;

    /// Returns what an engine does for this guest. `engine` is below `nvspec::fifo::engine::COUNT`.
    fn engine_status(&mut self, engine: u32) -> EngineStatus;

    /// The guest stops (`true`) or allows scheduling on the engines whose bits are set, for its own channels.
    fn block_engines(&mut self, engines: u32, blocked: bool);

    /// The guest resets an engine: its own channels on that engine lose their state, no one else's do.
    /// `engine` is below `nvspec::fifo::engine::COUNT`.
    fn reset_engine(&mut self, engine: u32);

    /// The guest resets the host unit: no channel of its runs any more.
    fn reset_fifo(&mut self);

    /// The card's clock, in nanoseconds.
    fn now_ns(&mut self) -> u64;

    /// Signals the guest.
    fn interrupt(&mut self, line: InterruptLine);

    /// The guest allows (or forbids) the device to access its RAM: PCI command register.
    fn bus_master(&mut self, enabled: bool);
}
