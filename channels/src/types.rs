//! Argument and result types of [`Channels`](crate::Channels).

use crate::{GuestInstance, Place, TenantId};
use nvspec::addr::{GpuVa, VramAddr};
use nvspec::fifo::{ChannelId, VirtualChannelId};

/// Layout of the host's structures in VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Instance blocks of the 128 physical channels, consecutive; a multiple of 4 KiB.
    pub instances: VramAddr,
    /// USERD pages of the 128 physical channels; a multiple of 4 KiB.
    pub userd: VramAddr,
    /// Two pages for runlists, used alternately; multiples of 4 KiB.
    pub runlists: [VramAddr; 2],
    /// Work areas of the 128 physical channels, [`WORK_BYTES`](crate::WORK_BYTES) each; a multiple of 4 KiB.
    pub work: VramAddr,
    /// Context images of the 128 physical channels, [`Self::images_stride`] each; a multiple of 4 KiB.
    pub images: VramAddr,
    /// Size of PGRAPH's context image in bytes, from its firmware; at most [`GRAPH_IMAGE_MAX`](crate::GRAPH_IMAGE_MAX).
    pub graph_image: u64,
}

/// Arguments of a bind.
#[derive(Clone, Copy, Debug)]
pub struct Bind<'a> {
    /// The guest's instance block.
    pub instance: Place,
    /// Its content.
    pub guest: &'a GuestInstance,
    /// The shadow of the guest's page directory.
    pub directory: VramAddr,
}

/// Reasons to keep a VM's channels from running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// The guest pauses engines.
    Guest,
    /// The host moves memory that the channels may use.
    Memory,
    /// Another VM has the card's memory for a quantum.
    Turn,
    /// The VM has exceeded its interrupt rate limit.
    InterruptRateLimit,
    /// The card is paused, for all VMs.
    Standstill,
}

/// Reason that keeps a channel from running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hindrance {
    /// The guest has not enabled or listed the channel.
    Guest,
    /// Its VM's channels are paused.
    Paused(Pause),
    /// It has ended, or was never bound.
    Ended,
}

impl Pause {
    /// All reasons.
    const ALL: [Self; 5] = [Self::Guest, Self::Memory, Self::Turn, Self::InterruptRateLimit, Self::Standstill];

    /// Returns the first of the reasons in a VM's set.
    pub(crate) fn first(paused: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|why| paused & why.bit() != 0)
    }

    /// Returns the set of all reasons.
    pub(crate) fn all() -> u8 {
        Self::ALL.into_iter().fold(0, |all, why| all | why.bit())
    }

    pub(crate) const fn bit(self) -> u8 {
        match self {
            Self::Guest => 1,
            Self::Memory => 2,
            Self::Turn => 4,
            Self::InterruptRateLimit => 8,
            Self::Standstill => 16,
        }
    }
}

/// Reason that a channel is not bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// No VM has that number.
    #[error("the VM is not known")]
    NoSuchVm,
    /// No channel has that number.
    #[error("a card has 128 channels")]
    NoSuchChannel,
    /// The VM has reached its limit of channels.
    #[error("the VM has all of its {cap} channels in use")]
    Cap {
        /// Its cap.
        cap: u32,
    },
    /// All of the card's channels are in use.
    #[error("all channels of the card are in use")]
    Full,
    /// The channel that was bound there before cannot be ended.
    #[error(transparent)]
    Stuck(#[from] Stuck),
}

/// The card did not take a channel off its engines in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the card does not let go of channel {}; the engine that runs it must be reset", .channel.0)]
pub struct Stuck {
    /// The physical channel.
    pub channel: ChannelId,
}

/// Outcome of a guest's runlist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Submitted {
    /// Channels of this VM that are in the runlist now.
    pub listed: u32,
    /// Entries that name no bound channel, or one twice.
    pub ignored: u32,
    /// No removed channel is on an engine. If false, `Channels::runlists_taken` reports it later.
    pub taken: bool,
}

/// A doorbell that was checked: entries up to it may be pulled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doorbell {
    /// The VM that it belongs to.
    pub vm: TenantId,
    /// Its number for the guest.
    pub virtual_channel: VirtualChannelId,
    /// Its number for the card.
    pub channel: ChannelId,
    /// Index after the last entry of the ring that the guest has written.
    pub gp_put: u32,
    /// The binding that it was checked for.
    pub(crate) serial: u64,
    /// Its number among the doorbells of the binding.
    pub(crate) order: u64,
}

/// A submission's number, unique on the card since the mediator took it over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Submission(pub u64);

/// Entries that were pulled from a guest's ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pulled {
    /// Their submission; `None` if no entry was pulled.
    pub submission: Option<Submission>,
    /// Number of its entries.
    pub taken: u32,
    /// Words of their push buffers.
    pub words: u32,
    /// Entries up to the doorbell that did not fit. Entries that stay in the guest's ring.
    pub left: u32,
}

/// A guest's ring cannot be read further. The channel pulls no more entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullError {
    /// The reason.
    pub fault: RingFault,
    /// Entries before that point.
    pub pulled: Pulled,
}

/// Reason that a guest's ring cannot be read further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingFault {
    /// The ring is not mapped at this address.
    #[error("the GPFIFO ring is not mapped at {va}")]
    Unmapped {
        /// First entry that cannot be read.
        va: GpuVa,
    },
    /// An entry is not supported.
    #[error("GPFIFO entry {index} ({raw:#018x}) names the host's addresses or an operation that is not supported")]
    Entry {
        /// Its index in the guest's ring.
        index: u32,
        /// The entry as the guest wrote it.
        raw: u64,
    },
}

/// A completed submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The VM that it belongs to.
    pub vm: TenantId,
    /// The guest's channel.
    pub channel: VirtualChannelId,
    /// The card's channel.
    pub physical: ChannelId,
    /// The submission.
    pub submission: Submission,
    /// Its number for the channel since bind; from 1, without 0 when it wraps.
    pub sequence: u32,
    /// Number of guest entries in it.
    pub entries: u32,
    /// Time at which it was pulled from the guest's ring.
    pub submitted_at: u64,
    /// Time at which its end was seen.
    pub completed_at: u64,
    /// The card's time when it ended, in ns. `None` if the guest's own methods have swallowed the record. A guest can
    /// forge it.
    pub card_time_ns: Option<u64>,
}

/// A channel that keeps an engine busy without progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hang {
    /// The engine, `nvspec::fifo::engine`.
    pub engine: u32,
    /// The VM that it belongs to.
    pub vm: TenantId,
    /// The guest's channel.
    pub channel: VirtualChannelId,
    /// The card's channel.
    pub physical: ChannelId,
    /// Time without progress.
    pub for_ns: u64,
}

/// A channel that makes no progress without a known reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// The VM that it belongs to.
    pub vm: TenantId,
    /// The guest's channel.
    pub channel: VirtualChannelId,
    /// Address that the card would fetch next.
    pub at: GpuVa,
}

/// Reason that a doorbell is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DoorbellError {
    /// No channel is bound there.
    #[error("the channel is not bound")]
    Unbound,
    /// The channel's bind was refused. Returned for the first doorbell; later ones find the channel unbound.
    #[error("the channel's bind was refused")]
    Refused,
    /// The index is beyond the ring: PBDMA error GP_PTR on hardware.
    #[error("GP_PUT {gp_put} is beyond a ring of {entries} entries")]
    BeyondRing {
        /// The guest's value.
        gp_put: u32,
        /// Entries of its ring.
        entries: u32,
    },
}

/// The card's state of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HardwareState {
    /// The guest has enabled scheduling.
    pub enabled: bool,
    /// Waits for a semaphore.
    pub acquire_pending: bool,
    /// A PBDMA or engine holds its context.
    pub loaded: bool,
    /// True if it has work that is not fetched yet.
    pub pending: bool,
}
