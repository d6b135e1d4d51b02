//! Events of the card that concern one VM.

use channels::Doorbell;
use devmodel::events::SmError;
use nvspec::addr::GpuVa;
use nvspec::fifo::VirtualChannelId;

/// A card event for one VM, with physical addresses and numbers where the VM's are unknown here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestEvent {
    /// Work of an engine has raised its interrupt; the VM had work there.
    NonStall {
        /// The engine's number in `nvspec::fifo::engine`.
        engine: u32,
    },
    /// The runlist that the VM submitted last is in force.
    Runlist,
    /// Departing channels have left the card ([`take_left`](crate::CardState::take_left)).
    Left,
    /// The remaining entries of a channel's ring fit on the card again.
    Resume(Doorbell),
    /// The VM's PTIMER alarm is due or nearly due.
    Alarm,
    /// Memory that the VM waits for may be available, or its wait has reached the limit.
    Memory,
    /// A channel held an engine for too long without progress. It is off the card.
    Hang {
        /// The engine's number in `nvspec::fifo::engine`.
        engine: u32,
        /// The VM's channel.
        channel: VirtualChannelId,
    },
    /// A channel's access was refused by the card's MMU. The channel is off the card.
    MmuFault {
        /// The VM's channel.
        channel: VirtualChannelId,
        /// Fault unit.
        unit: u32,
        /// GPU virtual address.
        va: GpuVa,
        /// The fault's type word, as `pfifo::FAULT_TYPE`.
        kind: u32,
    },
    /// A PBDMA met a method that it cannot execute, and has continued after it.
    Pbdma {
        /// The VM's channel.
        channel: VirtualChannelId,
        /// PBDMA.
        unit: u32,
        /// Bits as `pbdma::INTR_0`.
        intr: u32,
        /// Word as `pbdma::METHOD_0`.
        method: u32,
        /// Data of the method.
        data: u32,
    },
    /// PGRAPH refused a method, and has continued after it.
    Graph {
        /// The VM's channel.
        channel: VirtualChannelId,
        /// Bits as `pgraph::INTR`.
        intr: u32,
        /// Word as `pgraph::DATA_ERROR`.
        code: u32,
        /// Class of the subchannel.
        class: u32,
        /// Word as `pgraph::TRAPPED_ADDRESS`.
        address: u32,
        /// Data of the method.
        data: u32,
        /// Units that trapped, word as `pgraph::TRAP`.
        trap: u32,
        /// Report of a multiprocessor, if one trapped: the first that does.
        sm: Option<SmError>,
    },
    /// A copy engine refused a method, and has continued after it.
    Copy {
        /// The VM's channel.
        channel: VirtualChannelId,
        /// Copy engine, 0 or 1.
        engine: u32,
        /// Bits as `ce0::INTR`.
        intr: u32,
        /// Word as `nvspec::class::ce90b5::error`.
        report: u32,
        /// Data of the method.
        data: u32,
    },
}
