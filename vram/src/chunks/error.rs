//! Errors of the chunk table.

use super::limits::OnFull;
use super::state::Tier;
use crate::{GuestVramAddr, TenantId};

/// Limit that prevents a VM from getting a chunk of the card or a host slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// No chunk of the card is available without breaking promises.
    Card {
        /// Number of free chunks.
        free: u32,
        /// Number of chunks without an owner that are not zeroed yet.
        to_scrub: u32,
        /// Number of these chunks that are promised.
        promised: u32,
    },
    /// The VM's quota of this number of chunks is used up.
    Quota(u32),
    /// The host's budget of this number of chunks is used up.
    HostBudget(u32),
    /// The VM's swap cap of this number of chunks is used up.
    SwapCap(u32),
    /// The VM's policy for a full card does not allow swapping.
    Policy(OnFull),
}

impl Limit {
    /// Returns the one-word name of the limit.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Card { .. } => "card",
            Self::Quota(_) => "quota",
            Self::HostBudget(_) => "host_budget",
            Self::SwapCap(_) => "swap_cap",
            Self::Policy(_) => "policy",
        }
    }

    /// Returns the limit that an operator must change: `host`, which excludes a VM from host memory, or `self` if the
    /// VM's policy forbids host memory.
    #[must_use]
    pub const fn decisive(self, host: Option<Self>) -> Self {
        match host {
            None | Some(Self::Policy(_)) => self,
            Some(host) => host,
        }
    }
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Card { free, to_scrub, promised } => write!(
                f,
                "{free} of the card's chunks are free and {to_scrub} more will be free after scrubbing, of which \
                 {promised} are reserved for others"
            ),
            Self::Quota(chunks) => write!(f, "its quota of {chunks} chunks on the card is used up"),
            Self::HostBudget(chunks) => write!(f, "the budget of {chunks} chunks of host memory is used up"),
            Self::SwapCap(chunks) => write!(f, "its swap cap of {chunks} chunks of host memory is used up"),
            Self::Policy(policy) => write!(f, "its policy for a full card is `{policy}`, not `swap`"),
        }
    }
}

/// Reasons for rejecting a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The chunk size is not a power of two from 128 KiB to 64 MiB.
    #[error("chunk size {0:#x} is not a power of two from 0x20000 to 0x4000000 bytes")]
    ChunkSize(u64),
    /// The card has less than one chunk, or too many chunks.
    #[error("{0:#x} bytes of VRAM are not a valid number of chunks")]
    CardSize(u64),
    /// No chunk is available for the VM.
    #[error("VM {vm} gets no chunk: {limit}{}", and(.host))]
    Full {
        /// VM.
        vm: TenantId,
        /// Limit of the preferred memory, which is the card at the first use of a chunk.
        limit: Limit,
        /// Limit of host memory, if host memory was an alternative.
        host: Option<Limit>,
    },
    /// The card's VRAM is too small for the mediator in addition to the promises to VMs.
    #[error(
        "the request needs {wanted} chunks of VRAM, {free} are free and {to_scrub} more will be free after scrubbing, \
         of which {promised} are promised to others"
    )]
    CardFull {
        /// Requested number of chunks.
        wanted: u64,
        /// Number of free chunks.
        free: u32,
        /// Number of chunks without an owner that are not zeroed yet.
        to_scrub: u32,
        /// Number of chunks without an owner for the guarantees of VMs.
        promised: u32,
    },
    /// The guarantee exceeds the number of chunks that the card can promise.
    #[error(
        "VM {vm} cannot be guaranteed {wanted} chunks of the card: {now} can be promised at once, {left} when \
         chunks of other VMs beyond their guarantees are moved; lower another VM's guarantee"
    )]
    Promise {
        /// VM.
        vm: TenantId,
        /// Requested guarantee.
        wanted: u32,
        /// Number of chunks that can be promised now, including existing promises to the VM.
        now: u32,
        /// Number of card chunks that remain after the guarantees of the other VMs and the mediator's share.
        left: u32,
    },
    /// The guarantee exceeds the quota.
    #[error("VM {vm}: a guarantee of {guarantee} chunks is more than the quota of {quota}")]
    Guarantee {
        /// VM.
        vm: TenantId,
        /// Guarantee.
        guarantee: u32,
        /// Quota.
        quota: u32,
    },
    /// The weight is below 1.
    #[error("VM {0}: weight must be at least 1")]
    Weight(TenantId),
    /// Enough chunks will be free after zeroing. Do scrub work and retry. If there is no scrub work, another thread is
    /// doing it.
    #[error("{short} chunks of {} must be scrubbed first", match .tier { Tier::Card => "VRAM", Tier::Host => "host memory" })]
    NeedsScrub {
        /// Memory.
        tier: Tier,
        /// Number of missing chunks.
        short: u32,
    },
    /// A VM was created without VRAM.
    #[error("a VM needs at least one byte of VRAM")]
    Empty,
    /// The VM's VRAM is too large.
    #[error("{0:#x} bytes of VRAM for a VM are more than 0x10000000000")]
    Advertised(u64),
    /// The VM already has VRAM.
    #[error("VM {0} has VRAM already")]
    Exists(TenantId),
    /// No VM with this number has VRAM.
    #[error("VM {0} has no VRAM")]
    NoSuchVm(TenantId),
    /// The address is outside the guest's VRAM.
    #[error("{address} is outside the VRAM of VM {vm}")]
    OutOfRange {
        /// VM.
        vm: TenantId,
        /// Requested address.
        address: GuestVramAddr,
    },
    /// The guest chunk is unplaced, so it cannot move, or it does not exist.
    #[error("guest chunk {index} of VM {vm} has no place")]
    NotPlaced {
        /// VM.
        vm: TenantId,
        /// Index of the guest chunk.
        index: u32,
    },
    /// The guest chunk is already in that memory, or needs no copy.
    #[error("guest chunk {index} of VM {vm} is already there")]
    Settled {
        /// VM.
        vm: TenantId,
        /// Index of the guest chunk.
        index: u32,
    },
    /// The reserve of this number of chunks is used up.
    #[error("the reserve of {0} chunks is used up")]
    ReserveFull(u32),
    /// The guest chunk is moving, and can be moved again afterwards.
    #[error("guest chunk {index} of VM {vm} is moving")]
    Moving {
        /// VM.
        vm: TenantId,
        /// Index of the guest chunk.
        index: u32,
    },
}

fn and(host: &Option<Limit>) -> String {
    host.map_or_else(String::new, |limit| format!("; and none in host memory: {limit}"))
}
