//! Argument and result types of [`Channels`](crate::Channels).

use crate::{GuestInstance, Place, TenantId};
use nvspec::addr::{GpuVa, VramAddr};
use nvspec::fifo::{ChannelId, VirtualChannelId};

/// Addresses of the host's structures in VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Address of the contiguous instance blocks of the 128 physical channels, a multiple of 4 KiB.
    pub instances: VramAddr,
    /// Address of the USERD pages of the 128 physical channels, a multiple of 4 KiB.
    pub userd: VramAddr,
    /// Addresses of two runlist pages, which are used alternately. They are multiples of 4 KiB.
    pub runlists: [VramAddr; 2],
    /// Address of the work areas of the 128 physical channels, a multiple of 4 KiB. Each work area has
    /// [`WORK_BYTES`](crate::WORK_BYTES) bytes.
    pub work: VramAddr,
    /// Address of the context images of the 128 physical channels, a multiple of 4 KiB. The images of consecutive
    /// channels are [`Self::images_stride`] bytes apart.
    pub images: VramAddr,
    /// Size of PGRAPH's context image in bytes, as reported by its firmware. At most
    /// [`GRAPH_IMAGE_MAX`](crate::GRAPH_IMAGE_MAX).
    pub graph_image: u64,
}

/// Arguments of a bind.
#[derive(Clone, Copy, Debug)]
pub struct Bind<'a> {
    /// Location of the guest's instance block.
    pub instance: Place,
    /// Decoded instance block.
    pub guest: &'a GuestInstance,
    /// VRAM address of the shadow of the guest's page directory.
    pub directory: VramAddr,
}

/// Reason for pausing a VM's channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// The guest has blocked engines.
    Guest,
    /// The host is moving memory that the channels may use.
    Memory,
    /// Another VM is using the card's memory for a quantum.
    Turn,
    /// The VM has exceeded its interrupt rate limit.
    InterruptRateLimit,
    /// The card is paused for all VMs.
    Standstill,
}

/// Reason why a channel does not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hindrance {
    /// The guest has not enabled or listed the channel.
    Guest,
    /// The VM's channels are paused.
    Paused(Pause),
    /// The channel has ended, or was never bound.
    Ended,
}

impl Pause {
    /// All reasons.
    const ALL: [Self; 5] = [Self::Guest, Self::Memory, Self::Turn, Self::InterruptRateLimit, Self::Standstill];

    /// Returns the first reason in a VM's mask, if any.
    pub(crate) fn first(paused: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|why| paused & why.bit() != 0)
    }

    /// Returns the mask of all reasons.
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

/// Reason why a channel cannot be bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// The VM is unknown.
    #[error("the VM is unknown")]
    NoSuchVm,
    /// The channel number is out of range.
    #[error("a card has 128 channels")]
    NoSuchChannel,
    /// The VM has reached its channel limit.
    #[error("all {cap} channels of the VM are in use")]
    Cap {
        /// Channel limit of the VM.
        cap: u32,
    },
    /// All of the card's channels are in use.
    #[error("all channels of the card are in use")]
    Full,
    /// The channel that was bound to this number cannot be ended.
    #[error(transparent)]
    Stuck(#[from] Stuck),
}

/// A channel that the card has not removed from its engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("channel {} does not leave the card, so the engine that runs it must be reset", .channel.0)]
pub struct Stuck {
    /// Physical channel number.
    pub channel: ChannelId,
}

/// Result of submitting a guest's runlist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Submitted {
    /// Number of this VM's channels in the runlist.
    pub listed: u32,
    /// Number of entries that do not refer to a bound channel or that repeat a channel.
    pub ignored: u32,
    /// True if no removed channel is on an engine. Otherwise, `Channels::runlists_taken` reports when this is the case.
    pub taken: bool,
}

/// A validated doorbell, which permits pulls of entries up to `gp_put`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doorbell {
    /// VM that owns the channel.
    pub vm: TenantId,
    /// Guest channel number.
    pub virtual_channel: VirtualChannelId,
    /// Physical channel number.
    pub channel: ChannelId,
    /// GP_PUT as written by the guest: index of the ring entry after the last one written.
    pub gp_put: u32,
    /// Serial number of the binding for which the doorbell was validated.
    pub(crate) serial: u64,
    /// Number of the doorbell within the binding.
    pub(crate) order: u64,
}

/// Submission number, unique since the mediator took over the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Submission(pub u64);

/// Result of pulling entries from a guest's ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pulled {
    /// Submission that contains the entries, or `None` if no entries were pulled.
    pub submission: Option<Submission>,
    /// Number of entries pulled.
    pub taken: u32,
    /// Number of dwords in the push buffers of these entries.
    pub words: u32,
    /// Number of entries up to the doorbell that were not pulled, and remain in the guest's ring.
    pub left: u32,
}

/// Error that makes the rest of a guest's ring unreadable. The channel pulls no more entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullError {
    /// Cause of the error.
    pub fault: RingFault,
    /// Entries pulled before the error.
    pub pulled: Pulled,
}

/// Reason why a guest's ring cannot be read any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingFault {
    /// An entry is at an unmapped address, or in the host's address range.
    #[error("the GPFIFO ring is not mapped at {va}")]
    Unmapped {
        /// Address of the first unreadable entry.
        va: GpuVa,
    },
    /// An entry is not supported.
    #[error("GPFIFO entry {index} ({raw:#018x}) refers to the host's addresses or contains an unsupported operation")]
    Entry {
        /// Index in the guest's ring.
        index: u32,
        /// Entry as written by the guest.
        raw: u64,
    },
}

/// A completed submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// VM that owns the channel.
    pub vm: TenantId,
    /// Guest channel number.
    pub channel: VirtualChannelId,
    /// Physical channel number.
    pub physical: ChannelId,
    /// Number of the submission.
    pub submission: Submission,
    /// Number of the submission within the channel's binding. It starts at 1, and skips 0 when it wraps around.
    pub sequence: u32,
    /// Number of guest entries in the submission.
    pub entries: u32,
    /// Time at which the submission was pulled from the guest's ring, in ns.
    pub submitted_at: u64,
    /// Time at which the end of the submission was detected, in ns.
    pub completed_at: u64,
    /// Card time at which the submission ended, in ns, or `None` if the guest's own methods have consumed the record. A
    /// guest can forge this time.
    pub card_time_ns: Option<u64>,
}

/// A channel that keeps an engine busy without progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hang {
    /// Engine number, as defined in `nvspec::fifo::engine`.
    pub engine: u32,
    /// VM that owns the channel.
    pub vm: TenantId,
    /// Guest channel number.
    pub channel: VirtualChannelId,
    /// Physical channel number.
    pub physical: ChannelId,
    /// Time without progress, in ns.
    pub for_ns: u64,
}

/// A channel without progress for an unknown reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// VM that owns the channel.
    pub vm: TenantId,
    /// Guest channel number.
    pub channel: VirtualChannelId,
    /// GPU virtual address from which the card would fetch next.
    pub at: GpuVa,
}

/// Reason for rejecting a doorbell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DoorbellError {
    /// The channel is not bound.
    #[error("the channel is not bound")]
    Unbound,
    /// The channel's bind was rejected. This error is returned only for the first doorbell. Later doorbells find the
    /// channel unbound.
    #[error("the channel's bind was rejected")]
    Refused,
    /// The index is beyond the end of the ring. On hardware, this causes the PBDMA error GP_PTR.
    #[error("GP_PUT {gp_put} is beyond a ring of {entries} entries")]
    BeyondRing {
        /// Index written by the guest.
        gp_put: u32,
        /// Number of entries in the guest's ring.
        entries: u32,
    },
}

/// A channel's state on the card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HardwareState {
    /// True if the guest has enabled scheduling.
    pub enabled: bool,
    /// True if the channel waits for a semaphore.
    pub acquire_pending: bool,
    /// True if the channel's context is loaded in a PBDMA or an engine.
    pub loaded: bool,
    /// True if the channel has unfetched work.
    pub pending: bool,
}
