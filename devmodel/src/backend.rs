//! The interface to the card's owner: one trait, implemented by the mediator (and by a mock in the tests).
//!
//! Everything in this module is in the guest's own terms: guest VRAM addresses, guest bus addresses, virtual channel
//! and engine numbers. The implementer handles translation, bounds and isolation; the vGPU only decodes, and refuses
//! invalid encodings.

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

/// The access is outside the guest's memory; the implementer has not changed `data`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the access is outside of what the guest may reach")]
pub struct Denied;

/// Reason that a write to VRAM or through an aperture failed. The part that was already written may be written again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteFailure {
    /// The write is outside the guest's memory, and is lost.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// No memory is available for the write at present.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
}

/// No memory is available for the guest's write. The same write may succeed later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no memory for what the guest writes")]
pub struct NoMemory;

/// State of a channel, as shown in its register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelState {
    /// True if the guest has made the channel runnable.
    pub enabled: bool,
    /// True if the channel waits for a semaphore.
    pub acquire_pending: bool,
    /// True if a PBDMA or engine holds the channel's context.
    pub loaded: bool,
    /// True if the channel has unfetched work.
    pub pending: bool,
}

/// State of an engine, as shown in its register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStatus {
    /// Channel on the engine, if it belongs to this guest.
    pub channel: Option<VirtualChannelId>,
    /// True if the engine is working for this guest.
    pub busy: bool,
}

/// Ways in which a vGPU signals its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterruptLine {
    /// One MSI message. Only called while the guest has MSI enabled and re-armed.
    Msi,
    /// The INTx level: true if asserted. Only called when it changes.
    Intx(bool),
}

/// Requests of a vGPU to the mediator. The vGPU is borrowed during calls, so an implementation must not call back into
/// it; it reports later through the vGPU's event methods.
pub trait Backend {
    /// Reads guest VRAM.
    ///
    /// # Errors
    /// [`Denied`] if a byte is outside the guest's VRAM.
    fn vram_read(&mut self, address: GuestVramAddr, data: &mut [u8]) -> Result<(), Denied>;

    /// Writes guest VRAM.
    ///
    /// # Errors
    /// [`WriteFailure::Denied`] if a byte is outside the guest's VRAM; [`WriteFailure::NoMemory`].
    fn vram_write(&mut self, address: GuestVramAddr, data: &[u8]) -> Result<(), WriteFailure>;

    /// Reads through an aperture, translated by the guest's page tables. `offset` is within the BAR.
    ///
    /// # Errors
    /// [`Denied`] if there is no valid mapping.
    fn aperture_read(&mut self, aperture: Aperture, offset: u64, data: &mut [u8]) -> Result<(), Denied>;

    /// Writes through an aperture, translated by the guest's page tables. `offset` is within the BAR.
    ///
    /// # Errors
    /// [`WriteFailure::Denied`] without a valid, writable mapping; [`WriteFailure::NoMemory`].
    fn aperture_write(&mut self, aperture: Aperture, offset: u64, data: &[u8]) -> Result<(), WriteFailure>;

    /// Handles the guest's binding of an aperture's instance block; `None` unbinds it.
    fn bind_aperture(&mut self, aperture: Aperture, instance: Option<Place>);

    /// Handles a move of PRAMIN, BAR0's window on VRAM, to `base`; `None` if the guest moved it outside VRAM. Needed
    /// only to map memory in the window; trapped accesses are [read](Self::vram_read) and [written](Self::vram_write)
    /// by address.
    fn place_window(&mut self, _base: Option<GuestVramAddr>) {}

    /// Handles the guest's TLB flush for one page directory, or for all directories (`None`).
    fn flush_tlb(&mut self, directory: Option<Place>, hub_only: bool);

    /// Handles the guest's flush of posted aperture writes. When this returns, the GPU sees all earlier writes.
    fn flush_apertures(&mut self) {}

    /// Handles the guest's start of a falcon of its vGPU with this code and data. The code is never executed.
    fn firmware_started(&mut self, _falcon: Falcon, _code: &[u32], _data: &[u32]) {}

    /// Handles the guest's binding of a channel's instance block; `None` unbinds it.
    fn bind_channel(&mut self, channel: VirtualChannelId, instance: Option<Place>);

    /// Handles the guest's enabling or stopping of a channel.
    fn enable_channel(&mut self, channel: VirtualChannelId, enabled: bool);

    /// Returns the current state of the channel.
    fn channel_state(&mut self, channel: VirtualChannelId) -> ChannelState;

    /// Handles the guest's submission of a runlist of `length` entries. `VGpu::runlist_done` reports its completion.
    fn submit_runlist(&mut self, list: Place, length: u32);

    /// Starts taking a channel off its engines, on the guest's request.
    fn preempt(&mut self, channel: VirtualChannelId);

    /// Returns true if the channel has not left its engines yet since [`Self::preempt`].
    fn preempting(&mut self, channel: VirtualChannelId) -> bool;

    /// Returns an engine's state for this guest. `engine` is below `nvspec::fifo::engine::COUNT`.
    fn engine_status(&mut self, engine: u32) -> EngineStatus;

    /// Stops (`true`) or allows scheduling of the guest's own channels on the engines whose bits are set.
    fn block_engines(&mut self, engines: u32, blocked: bool);

    /// Resets an engine for the guest: only the guest's own channels on that engine lose their state. `engine` is below
    /// `nvspec::fifo::engine::COUNT`.
    fn reset_engine(&mut self, engine: u32);

    /// Resets the host unit for the guest, which stops all of the guest's channels.
    fn reset_fifo(&mut self);

    /// Returns the card's clock, in nanoseconds.
    fn now_ns(&mut self) -> u64;

    /// Signals the guest.
    fn interrupt(&mut self, line: InterruptLine);

    /// Allows or forbids the device to access the guest's RAM, as set in the PCI command register.
    fn bus_master(&mut self, enabled: bool);
}
