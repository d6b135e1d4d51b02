//! The interface to the card's owner: a trait implemented by the mediator, and by a mock in tests.
//!
//! All addresses and numbers in this module are the guest's: guest VRAM addresses, guest bus addresses, and virtual
//! channel and engine numbers. The implementation performs translation, bounds checks and isolation. The vGPU only
//! decodes accesses and rejects invalid encodings.

use nvspec::addr::GuestVramAddr;
use nvspec::falcon::Falcon;
use nvspec::fifo::VirtualChannelId;

/// The two memory BARs of a vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Aperture {
    /// BAR1: general VRAM access, and the doorbells (USERD).
    Bar1,
    /// BAR3 (BAR2 in NVIDIA's numbering): instance memory.
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

/// The access is outside the guest's memory. `data` is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the guest may not access this address")]
pub struct Denied;

/// Reason why a VRAM or aperture write failed. Some bytes may have been written; the caller may retry the write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteFailure {
    /// The write is outside the guest's memory and is lost.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// No memory is currently available for the write.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
}

/// No memory is available for the guest's write. Retrying it later may succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no memory is available for the guest's write")]
pub struct NoMemory;

/// Channel state, as shown in its register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelState {
    /// True if the guest has made the channel runnable.
    pub enabled: bool,
    /// True if the channel is waiting for a semaphore.
    pub acquire_pending: bool,
    /// True if a PBDMA or engine holds the channel's context.
    pub loaded: bool,
    /// True if the channel has unfetched work.
    pub pending: bool,
}

/// Engine state, as shown in its register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStatus {
    /// Channel on the engine, if it belongs to this guest.
    pub channel: Option<VirtualChannelId>,
    /// True if the engine is executing work of this guest.
    pub busy: bool,
}

/// A signal from a vGPU to its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterruptLine {
    /// One MSI message, which the vGPU sends only while MSI is enabled and after the guest has re-armed it.
    Msi,
    /// The INTx level, true if asserted. Sent only when the level changes.
    Intx(bool),
}

/// Requests from a vGPU to the mediator. The vGPU is borrowed during a call, so an implementation must not call back
/// into it; the mediator reports results later through the vGPU's event methods.
pub trait Backend {
    /// Reads guest VRAM.
    ///
    /// # Errors
    /// Returns [`Denied`] if any byte is outside the guest's VRAM.
    fn vram_read(&mut self, address: GuestVramAddr, data: &mut [u8]) -> Result<(), Denied>;

    /// Writes guest VRAM.
    ///
    /// # Errors
    /// Returns [`WriteFailure::Denied`] if any byte is outside the guest's VRAM; returns [`WriteFailure::NoMemory`] if
    /// no memory is available for the write.
    fn vram_write(&mut self, address: GuestVramAddr, data: &[u8]) -> Result<(), WriteFailure>;

    /// Reads through an aperture, using the guest's page tables. `offset` is within the BAR.
    ///
    /// # Errors
    /// Returns [`Denied`] if there is no valid mapping.
    fn aperture_read(&mut self, aperture: Aperture, offset: u64, data: &mut [u8]) -> Result<(), Denied>;

    /// Writes through an aperture, using the guest's page tables. `offset` is within the BAR.
    ///
    /// # Errors
    /// Returns [`WriteFailure::Denied`] if there is no valid, writable mapping; returns [`WriteFailure::NoMemory`] if
    /// no memory is available for the write.
    fn aperture_write(&mut self, aperture: Aperture, offset: u64, data: &[u8]) -> Result<(), WriteFailure>;

    /// Called when the guest binds an instance block to an aperture; `None` unbinds it.
    fn bind_aperture(&mut self, aperture: Aperture, instance: Option<Place>);

    /// Called when the guest moves PRAMIN, BAR0's window into VRAM, to `base`; `None` means outside VRAM. Only needed
    /// if memory is mapped into the window; the vGPU [reads](Self::vram_read) and [writes](Self::vram_write) by address
    /// on trapped accesses.
    fn place_window(&mut self, _base: Option<GuestVramAddr>) {}

    /// Called when the guest flushes the TLBs for one page directory, or for all directories (`None`).
    fn flush_tlb(&mut self, directory: Option<Place>, hub_only: bool);

    /// Called when the guest flushes posted aperture writes. On return, the GPU sees all earlier writes.
    fn flush_apertures(&mut self) {}

    /// Called when one of the vGPU's falcons starts with this code and data, which no falcon executes.
    fn firmware_started(&mut self, _falcon: Falcon, _code: &[u32], _data: &[u32]) {}

    /// Called when the guest binds an instance block to a channel; `None` unbinds it.
    fn bind_channel(&mut self, channel: VirtualChannelId, instance: Option<Place>);

    /// Called when the guest enables or stops a channel.
    fn enable_channel(&mut self, channel: VirtualChannelId, enabled: bool);

    /// Returns the channel's current state.
    fn channel_state(&mut self, channel: VirtualChannelId) -> ChannelState;

    /// Called when the guest submits a runlist of `length` entries. The mediator reports its completion through
    /// `VGpu::runlist_done`.
    fn submit_runlist(&mut self, list: Place, length: u32);

    /// Starts removing a channel from its engines, at the guest's request.
    fn preempt(&mut self, channel: VirtualChannelId);

    /// Returns true if the channel has not left its engines yet after [`Self::preempt`].
    fn preempting(&mut self, channel: VirtualChannelId) -> bool;

    /// Returns an engine's state for this guest. `engine` is less than `nvspec::fifo::engine::COUNT`.
    fn engine_status(&mut self, engine: u32) -> EngineStatus;

    /// Stops scheduling the guest's channels on the engines in the mask, or resumes it if `blocked` is false.
    fn block_engines(&mut self, engines: u32, blocked: bool);

    /// Resets an engine for the guest: only the guest's channels on this engine lose their state. `engine` is less than
    /// `nvspec::fifo::engine::COUNT`.
    fn reset_engine(&mut self, engine: u32);

    /// Resets the host unit for the guest, which stops all of the guest's channels.
    fn reset_fifo(&mut self);

    /// Returns the card's clock in ns.
    fn now_ns(&mut self) -> u64;

    /// Signals the guest.
    fn interrupt(&mut self, line: InterruptLine);

    /// Allows or forbids device accesses to guest RAM, based on the PCI command register.
    fn bus_master(&mut self, enabled: bool);
}
