//! State and owner of a chunk.

use crate::{HostAddr, TenantId, VramAddr};

/// Number of a chunk of the card's VRAM, counted from address 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId(pub(super) u32);

impl ChunkId {
    pub(crate) const fn number(self) -> u32 {
        self.0
    }

    pub(crate) const fn numbered(number: u32) -> Self {
        Self(number)
    }
}

/// Memory that can back guest VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// VRAM of the card.
    Card,
    /// Pinned host memory.
    Host,
}

/// Location of a byte on the card or in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Address on the card.
    Card(VramAddr),
    /// Address in host memory.
    Host(HostAddr),
}

impl Place {
    /// Returns the VRAM address if the location is on the card.
    #[must_use]
    pub const fn card(self) -> Option<VramAddr> {
        match self {
            Self::Card(address) => Some(address),
            Self::Host(_) => None,
        }
    }

    /// Returns the address in the host pool if the location is in host memory.
    #[must_use]
    pub const fn host(self) -> Option<HostAddr> {
        match self {
            Self::Host(address) => Some(address),
            Self::Card(_) => None,
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Card(address) => write!(f, "{address} on the card"),
            Self::Host(address) => write!(f, "{address} in host memory"),
        }
    }
}

/// A card chunk or host slot, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Spot {
    Card(u32),
    Host(u32),
}

impl Spot {
    pub(super) const fn tier(self) -> Tier {
        match self {
            Self::Card(_) => Tier::Card,
            Self::Host(_) => Tier::Host,
        }
    }

    pub(super) const fn number(self) -> u32 {
        match self {
            Self::Card(number) | Self::Host(number) => number,
        }
    }

    pub(super) const fn new(tier: Tier, number: u32) -> Self {
        match tier {
            Tier::Card => Self::Card(number),
            Tier::Host => Self::Host(number),
        }
    }

    /// Returns the chunk or slot `steps` after this one in the same memory.
    pub(super) fn after(self, steps: u32) -> Option<Self> {
        Some(Self::new(self.tier(), self.number().checked_add(steps)?))
    }
}

/// Number of a move of a guest chunk, from [`begin_move`](super::ChunkTable::begin_move) to its end. Numbers are not
/// reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MoveId(pub(super) u64);

/// Use of a card chunk or host slot. The owner and the state are one value, so that they are always consistent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkState {
    /// Zeroed and without an owner.
    Free,
    /// Without an owner, but still contains the last owner's data.
    NeedsScrub,
    /// Without an owner. The caller of [`take_scrub_work`](super::ChunkTable::take_scrub_work) is zeroing it.
    Scrubbing,
    /// Unusable, because the card may still access the chunk on behalf of its last owner.
    Quarantined,
    /// Owned by the mediator, for tables, instance blocks, and rings. VMs cannot access it. Only card chunks have this
    /// state.
    Mediator,
    /// Destination of a move, which overwrites it. VMs cannot access it.
    Arriving(MoveId),
    /// Owned by a VM, as its guest chunk `index`.
    Vm {
        /// VM that owns the chunk.
        vm: TenantId,
        /// Index of the guest chunk.
        index: u32,
    },
}

impl ChunkState {
    /// Returns true if a chunk can change from `self` to `to`. A chunk that had an owner gets its next owner only after
    /// `Scrubbing`, or as the destination of a move, which overwrites it.
    #[must_use]
    pub const fn can_go(self, to: Self) -> bool {
        matches!(
            (self, to),
            (Self::Free, Self::Mediator | Self::Arriving(_) | Self::Vm { .. })
                | (Self::Arriving(_), Self::Vm { .. })
                | (Self::Mediator | Self::Arriving(_) | Self::Vm { .. }, Self::NeedsScrub)
                | (Self::NeedsScrub, Self::Scrubbing | Self::Arriving(_))
                | (Self::Scrubbing, Self::Free)
                | (
                    Self::Free
                        | Self::NeedsScrub
                        | Self::Scrubbing
                        | Self::Mediator
                        | Self::Arriving(_)
                        | Self::Vm { .. },
                    Self::Quarantined
                )
        )
    }
}

/// Contents of VRAM when the table is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// VRAM contains zeros.
    Zeroed,
    /// VRAM may contain arbitrary data. Each chunk is scrubbed before its first use.
    Unknown,
}

/// A card chunk or host slot to fill with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubWork {
    /// Start location of the chunk or slot, to be passed to [`scrubbed`](super::ChunkTable::scrubbed).
    pub place: Place,
    /// Size in bytes.
    pub bytes: u64,
}
