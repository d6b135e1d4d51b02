//! What a chunk is, and what it is used for.

use crate::{CardAddr, VmId};

/// A chunk of the card's VRAM, counted from address 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId(pub(super) u32);

/// What a chunk is used for; owner and state in one, so that they cannot disagree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkState {
    /// Zeroed, without an owner.
    Free,
    /// Without an owner, holding what the last one left.
    NeedsScrub,
    /// Without an owner, being zeroed by who took it from [`take_scrub_work`](super::ChunkTable::take_scrub_work).
    Scrubbing,
    /// The mediator's own: tables, instance blocks, rings. No VM reaches it.
    Mediator,
    /// A VM's, as its guest chunk `index`.
    Vm {
        /// The owner.
        vm: VmId,
        /// Which chunk of the guest's VRAM it holds.
        index: u32,
    },
}

impl ChunkState {
    /// Whether a chunk may go from `self` to `to`. A chunk that had an owner reaches the next only by way of `Scrubbing`.
    #[must_use]
    pub const fn can_go(self, to: Self) -> bool {
        matches!(
            (self, to),
            (Self::Free, Self::Mediator | Self::Vm { .. })
                | (Self::Mediator | Self::Vm { .. }, Self::NeedsScrub)
                | (Self::NeedsScrub, Self::Scrubbing)
                | (Self::Scrubbing, Self::Free)
        )
    }
}

/// What VRAM holds when the table is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Zeros, certainly.
    Zeroed,
    /// Anything: every chunk is scrubbed before its first use.
    Unknown,
}

/// A chunk to fill with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubWork {
    /// For [`scrubbed`](super::ChunkTable::scrubbed).
    pub chunk: ChunkId,
    /// Where it begins on the card.
    pub address: CardAddr,
    /// Bytes.
    pub bytes: u64,
}
