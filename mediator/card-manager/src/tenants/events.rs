//! Card events that concern a single VM.

use channels::Doorbell;
use devmodel::events::SmError;
use nvspec::addr::GpuVa;
use nvspec::fifo::VirtualChannelId;

/// A card event for one VM. It contains physical addresses and numbers where the card manager does not know the
/// guest's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestEvent {
    /// Work on an engine has raised its non-stall interrupt, and the VM had work on this engine.
    NonStall {
        /// Engine number, as defined in `nvspec::fifo::engine`.
        engine: u32,
    },
    /// The VM's last submitted runlist is in effect.
    Runlist,
    /// Departing channels have left the card ([`take_left`](crate::CardState::take_left)).
    Left,
    /// The card may be able to accept the remaining entries of a channel's ring.
    Resume(Doorbell),
    /// The VM's PTIMER alarm is due or nearly due.
    Alarm,
    /// Memory that the VM waits for may be available, or the wait has reached its time limit.
    Memory,
    /// A channel occupied an engine for too long without progress, and was removed from the card.
    Hang {
        /// Engine number, as defined in `nvspec::fifo::engine`.
        engine: u32,
        /// The VM's channel.
        channel: VirtualChannelId,
    },
    /// The card's MMU rejected an access by a channel. The channel was removed from the card.
    MmuFault {
        /// The VM's channel.
        channel: VirtualChannelId,
        /// Number of the fault unit.
        unit: u32,
        /// GPU virtual address.
        va: GpuVa,
        /// Fault type, in the format of `pfifo::FAULT_TYPE`.
        kind: u32,
    },
    /// A PBDMA found a method that it cannot execute, and skipped it.
    Pbdma {
        /// The VM's channel.
        channel: VirtualChannelId,
        /// Number of the PBDMA.
        unit: u32,
        /// Interrupt causes, in the format of `pbdma::INTR_0`.
        intr: u32,
        /// Method, in the format of `pbdma::METHOD_0`.
        method: u32,
        /// Data of the method.
        data: u32,
    },
    /// PGRAPH rejected a method and skipped it.
    Graph {
        /// The VM's channel.
        channel: VirtualChannelId,
        /// Interrupt causes, in the format of `pgraph::INTR`.
        intr: u32,
        /// Error code, in the format of `pgraph::DATA_ERROR`.
        code: u32,
        /// Class of the subchannel.
        class: u32,
        /// Trapped method, in the format of `pgraph::TRAPPED_ADDRESS`.
        address: u32,
        /// Data of the method.
        data: u32,
        /// Units that trapped, in the format of `pgraph::TRAP`.
        trap: u32,
        /// Error report of the first multiprocessor that trapped, if any.
        sm: Option<SmError>,
    },
    /// A copy engine rejected a method and skipped it.
    Copy {
        /// The VM's channel.
        channel: VirtualChannelId,
        /// Number of the copy engine: 0 or 1.
        engine: u32,
        /// Interrupt causes, in the format of `ce0::INTR`.
        intr: u32,
        /// Error report, in the format of `nvspec::class::ce90b5::error`.
        report: u32,
        /// Data of the method.
        data: u32,
    },
}
