//! The interface to the card's owner: a trait that the mediator implements, and a mock in the tests.
//!
//! All addresses and numbers in this module are the guest's: guest VRAM addresses, guest bus addresses, and virtual
//! channel and engine numbers. The implementation does the translation, the bounds checks and the isolation. The vGPU
//! only decodes, and rejects invalid encodings.

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

/// The access is outside the guest's memory. The implementation has not changed `data`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the guest may not access this address")]
pub struct Denied;

/// Reason why a write to VRAM or through an aperture failed. Some bytes may have been written; the caller may write
/// them again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteFailure {
    /// The write is outside the guest's memory and is lost.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// No memory is currently available for the write.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
}

/// No memory is available for the guest's write. The same write may succeed later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no memory is available for the guest's write")]
pub struct NoMemory;

/// State of a channel, as its register shows it.
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

/// State of an engine, as its register shows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStatus {
    /// Channel on the engine, if it belongs to this guest.
    pub channel: Option<VirtualChannelId>,
    /// True if the engine is working for this guest.
    pub busy: bool,
}

/// A signal from a vGPU to its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterruptLine {
    /// One MSI message. The vGPU sends the message only while MSI is enabled, and after the guest has re-armed it.
    Msi,
    /// The INTx level: true if asserted. The vGPU sends the signal only when the level changes.
    Intx(bool),
}

/// Requests from a vGPU to the mediator. The vGPU is borrowed during a call, so an implementation must not call back
/// into it; the mediator reports results later, through the vGPU's event methods.
pub trait Backend {
    /// Reads guest VRAM.
    ///
    /// # Errors
    /// [`Denied`] if a byte is outside the guest's VRAM.
    fn vram_read(&mut self, address: GuestVramAddr, data: &mut [u8]) -> Result<(), Denied>;

    /// Writes guest VRAM.
    ///
    /// # Errors
    /// [`WriteFailure::Denied`] if a byte is outside the guest's VRAM; [`WriteFailure::NoMemory`] if no memory is
    /// available for the write.
    fn vram_write(&mut self, address: GuestVramAddr, data: &[u8]) -> Result<(), WriteFailure>;

    /// Reads through an aperture, which the guest's page tables translate. `offset` is within the BAR.
    ///
    /// # Errors
    /// [`Denied`] if no valid mapping exists.
    fn aperture_read(&mut self, aperture: Aperture, offset: u64, data: &mut [u8]) -> Result<(), Denied>;

    /// Writes through an aperture, which the guest's page tables translate. `offset` is within the BAR.
    ///
    /// # Errors
    /// [`WriteFailure::Denied`] if no valid, writable mapping exists; [`WriteFailure::NoMemory`] if no memory is
    /// available for the write.
    fn aperture_write(&mut self, aperture: Aperture, offset: u64, data: &[u8]) -> Result<(), WriteFailure>;

    /// Handles the guest's binding of an instance block to an aperture; `None` unbinds it.
    fn bind_aperture(&mut self, aperture: Aperture, instance: Option<Place>);

    /// Handles a move of PRAMIN, BAR0's window on VRAM, to `base`; `None` means that the guest moved the window outside
    /// VRAM. Only an implementation that maps memory into the window needs this; the vGPU [reads](Self::vram_read) and
    /// [writes](Self::vram_write) trapped accesses by address.
    fn place_window(&mut self, _base: Option<GuestVramAddr>) {}

    /// Handles the guest's TLB flush for one page directory, or for all directories with `None`.
    fn flush_tlb(&mut self, directory: Option<Place>, hub_only: bool);

    /// Handles the guest's flush of posted aperture writes. When this returns, the GPU sees all earlier writes.
    fn flush_apertures(&mut self) {}

    /// Handles the start of one of the vGPU's falcons with this code and data. No falcon executes the code.
    fn firmware_started(&mut self, _falcon: Falcon, _code: &[u32], _data: &[u32]) {}

    /// Handles the guest's binding of an instance block to a channel; `None` unbinds it.
    fn bind_channel(&mut self, channel: VirtualChannelId, instance: Option<Place>);

    /// Handles the guest's enabling or stopping of a channel.
    fn enable_channel(&mut self, channel: VirtualChannelId, enabled: bool);

    /// Returns the current state of the channel.
    fn channel_state(&mut self, channel: VirtualChannelId) -> ChannelState;

    /// Handles the submission of a runlist of `length` entries. The mediator reports its completion through
    /// `VGpu::runlist_done`.
    fn submit_runlist(&mut self, list: Place, length: u32);

    /// Starts to remove a channel from its engines, at the guest's request.
    fn preempt(&mut self, channel: VirtualChannelId);

    /// Returns true if the channel has not left its engines yet after [`Self::preempt`].
    fn preempting(&mut self, channel: VirtualChannelId) -> bool;

    /// Returns an engine's state for this guest. `engine` is below `nvspec::fifo::engine::COUNT`.
    fn engine_status(&mut self, engine: u32) -> EngineStatus;

    /// Stops scheduling the guest's own channels on the engines whose bits are set, or resumes it if `blocked` is
    /// false.
    fn block_engines(&mut self, engines: u32, blocked: bool);

    /// Resets an engine for the guest: only the guest's own channels on this engine lose their state. `engine` is below
    /// `nvspec::fifo::engine::COUNT`.
    fn reset_engine(&mut self, engine: u32);

    /// Resets the host unit for the guest, which stops all of the guest's channels.
    fn reset_fifo(&mut self);

    /// Returns the card's clock, in nanoseconds.
    fn now_ns(&mut self) -> u64;

    /// Signals the guest.
    fn interrupt(&mut self, line: InterruptLine);

    /// Allows or forbids accesses of the device to the guest's RAM, according to the PCI command register.
    fn bus_master(&mut self, enabled: bool);
}
