//! Interface between a vGPU and the mediator: a trait implemented by the mediator, and by a mock in tests.
//!
//! All addresses and numbers are the guest's: guest VRAM addresses, guest bus addresses, and virtual channel and engine
//! numbers. The implementation translates them, checks bounds, and ensures isolation. The vGPU only decodes accesses
//! and rejects invalid encodings.

use nvspec::addr::GuestVramAddr;
use nvspec::falcon::Falcon;
use nvspec::fifo::VirtualChannelId;

/// A VRAM aperture of a vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Aperture {
    /// BAR1: VRAM access, and the doorbells (USERD).
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

/// The accessed memory does not belong to the guest. A denied read does not modify `data`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the guest must not access this address")]
pub struct Denied;

/// Reason why a write to VRAM or through an aperture failed. Some bytes may have been written. The caller may retry the
/// write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteFailure {
    /// The memory does not belong to the guest. The write is dropped.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// No memory is available for the write at the moment.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
}

/// No memory is available for the guest's write. A retry may succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no memory is available for the guest's write")]
pub struct NoMemory;

/// Channel state shown in the channel's register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelState {
    /// True if the guest has enabled the channel.
    pub enabled: bool,
    /// True if the channel is waiting for a semaphore.
    pub acquire_pending: bool,
    /// True if the channel's context is loaded on a PBDMA or an engine.
    pub loaded: bool,
    /// True if the channel has work that has not been fetched yet.
    pub pending: bool,
}

/// Engine state shown in the engine's register.
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
    /// An MSI message. Sent only while MSI is enabled and armed.
    Msi,
    /// Level of INTx: true if INTx is asserted. Sent only if the level changes.
    Intx(bool),
}

/// Requests from a vGPU to the mediator. The vGPU is borrowed during a call, so the implementation must not call it.
/// Results are reported later through the vGPU's event methods.
pub trait Backend {
    /// Reads guest VRAM at `address` into `data`.
    ///
    /// # Errors
    /// Returns [`Denied`] if any byte is outside the guest's VRAM.
    fn vram_read(&mut self, address: GuestVramAddr, data: &mut [u8]) -> Result<(), Denied>;

    /// Writes `data` to guest VRAM at `address`.
    ///
    /// # Errors
    /// Returns [`WriteFailure::Denied`] if any byte is outside the guest's VRAM, or [`WriteFailure::NoMemory`] if no
    /// memory is available for the write.
    fn vram_write(&mut self, address: GuestVramAddr, data: &[u8]) -> Result<(), WriteFailure>;

    /// Reads through an aperture, using the guest's page tables. `offset` is the byte offset in the BAR.
    ///
    /// # Errors
    /// Returns [`Denied`] if the address is not mapped.
    fn aperture_read(&mut self, aperture: Aperture, offset: u64, data: &mut [u8]) -> Result<(), Denied>;

    /// Writes through an aperture, using the guest's page tables. `offset` is the byte offset in the BAR.
    ///
    /// # Errors
    /// Returns [`WriteFailure::Denied`] if the address is not mapped writable, or [`WriteFailure::NoMemory`] if no
    /// memory is available for the write.
    fn aperture_write(&mut self, aperture: Aperture, offset: u64, data: &[u8]) -> Result<(), WriteFailure>;

    /// Binds an aperture to an instance block at the guest's request, or unbinds it if `instance` is `None`.
    fn bind_aperture(&mut self, aperture: Aperture, instance: Option<Place>);

    /// Called when the guest has moved PRAMIN, the VRAM window in BAR0, to `base`, or outside VRAM if `base` is `None`.
    /// The default implementation suffices unless memory is mapped into the window. For trapped accesses, the vGPU
    /// calls [`Self::vram_read`] and [`Self::vram_write`] with the VRAM address.
    fn place_window(&mut self, _base: Option<GuestVramAddr>) {}

    /// Flushes the guest's translations of one page directory, or of all directories if `directory` is `None`. If
    /// `hub_only` is true, flushes only the hub's TLB.
    fn flush_tlb(&mut self, directory: Option<Place>, hub_only: bool);

    /// Flushes posted aperture writes at the guest's request. On return, all previous writes are visible to the GPU.
    fn flush_apertures(&mut self) {}

    /// Called when the guest has started a virtual falcon with this code and data. The code is not executed.
    fn firmware_started(&mut self, _falcon: Falcon, _code: &[u32], _data: &[u32]) {}

    /// Binds a channel to an instance block at the guest's request, or unbinds it if `instance` is `None`.
    fn bind_channel(&mut self, channel: VirtualChannelId, instance: Option<Place>);

    /// Enables or disables a channel at the guest's request.
    fn enable_channel(&mut self, channel: VirtualChannelId, enabled: bool);

    /// Returns the channel's current state.
    fn channel_state(&mut self, channel: VirtualChannelId) -> ChannelState;

    /// Submits a runlist with `length` entries. The mediator reports its completion through `VGpu::runlist_done`.
    fn submit_runlist(&mut self, list: Place, length: u32);

    /// Starts removing a channel from its engines.
    fn preempt(&mut self, channel: VirtualChannelId);

    /// Returns true while the channel is still on an engine after [`Self::preempt`].
    fn preempting(&mut self, channel: VirtualChannelId) -> bool;

    /// Returns the state of an engine for this guest. `engine` is less than `nvspec::fifo::engine::COUNT`.
    fn engine_status(&mut self, engine: u32) -> EngineStatus;

    /// Stops scheduling the guest's channels on the engines in the mask if `blocked` is true. Otherwise, resumes
    /// scheduling.
    fn block_engines(&mut self, engines: u32, blocked: bool);

    /// Resets an engine for the guest. Only the guest's channels on this engine lose their state. `engine` is less than
    /// `nvspec::fifo::engine::COUNT`.
    fn reset_engine(&mut self, engine: u32);

    /// Resets the host unit for the guest. This stops all of the guest's channels.
    fn reset_fifo(&mut self);

    /// Returns the card's time in ns.
    fn now_ns(&mut self) -> u64;

    /// Signals an interrupt to the guest.
    fn interrupt(&mut self, line: InterruptLine);

    /// Permits or denies DMA to guest RAM, according to the PCI command register.
    fn bus_master(&mut self, enabled: bool);
}
