//! Events of the card that concern one VM.

use channels::Doorbell;
use devmodel::events::SmError;
use nvspec::addr::GpuVa;
use nvspec::fifo::VirtualChannelId;

/// A card event for one VM. The event contains physical addresses and numbers if the card manager has no record of the
/// VM's own addresses and numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestEvent {
    /// Work of an engine has raised its interrupt; the VM had work on this engine.
    NonStall {
        /// Number of the engine in `nvspec::fifo::engine`.
        engine: u32,
    },
    /// The last runlist that the VM submitted is in effect.
    Runlist,
    /// Departing channels have left the card ([`take_left`](crate::CardState::take_left)).
    Left,
    /// The remaining entries of a channel's ring fit on the card again.
    Resume(Doorbell),
    /// The VM's PTIMER alarm is due or nearly due.
    Alarm,
    /// Memory that the VM waits for may be available, or its wait has reached the time limit.
    Memory,
    /// A channel held an engine for too long without progress. The channel is off the card.
    Hang {
        /// Number of the engine in `nvspec::fifo::engine`.
        engine: u32,
        /// The VM's channel.
        channel: VirtualChannelId,
    },
    /// The card's MMU rejected an access of a channel. The channel is off the card.
    MmuFault {
        /// The VM's channel.
        channel: VirtualChannelId,
        /// Number of the fault unit.
        unit: u32,
        /// GPU virtual address.
        va: GpuVa,
        /// The fault's type word, in the format of `pfifo::FAULT_TYPE`.
        kind: u32,
    },
    /// A PBDMA found a method that it cannot execute, and has skipped it.
    Pbdma {
        /// The VM's channel.
        channel: VirtualChannelId,
        /// Number of the PBDMA.
        unit: u32,
        /// Bits in the format of `pbdma::INTR_0`.
        intr: u32,
        /// Word in the format of `pbdma::METHOD_0`.
        method: u32,
        /// Data of the method.
        data: u32,
    },
    /// PGRAPH rejected a method, and has skipped it.
    Graph {
        /// The VM's channel.
        channel: VirtualChannelId,
        /// Bits in the format of `pgraph::INTR`.
        intr: u32,
        /// Word in the format of `pgraph::DATA_ERROR`.
        code: u32,
        /// Class of the subchannel.
        class: u32,
        /// Word in the format of `pgraph::TRAPPED_ADDRESS`.
        address: u32,
        /// Data of the method.
        data: u32,
        /// Units that trapped, as a word in the format of `pgraph::TRAP`.
        trap: u32,
        /// Error report of the first multiprocessor that trapped, if any.
        sm: Option<SmError>,
    },
    /// A copy engine rejected a method, and has skipped it.
    Copy {
        /// The VM's channel.
        channel: VirtualChannelId,
        /// Number of the copy engine: 0 or 1.
        engine: u32,
        /// Bits in the format of `ce0::INTR`.
        intr: u32,
        /// Word in the format of `nvspec::class::ce90b5::error`.
        report: u32,
        /// Data of the method.
        data: u32,
    },
}
