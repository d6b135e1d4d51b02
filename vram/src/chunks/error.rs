//! Errors of the chunk table.

use super::limits::OnFull;
use super::state::Tier;
use crate::{GuestVramAddr, TenantId};

/// Limit that prevents a VM from getting a card chunk or host slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// All card chunks are in use or promised.
    Card {
        /// Number of zeroed chunks without an owner.
        free: u32,
        /// Number of chunks without an owner that are not zeroed yet.
        to_scrub: u32,
        /// Number of chunks without an owner that are reserved for other VMs, the mediator, or evictions.
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

    /// Returns the limit that the operator should change: `host`, the limit on host memory, or `self` if host memory
    /// was not considered or the VM must not use it.
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

/// Reason for rejecting a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The chunk size is not a power of two from 128 KiB to 64 MiB.
    #[error("chunk size {0:#x} is not a power of two from 0x20000 to 0x4000000 bytes")]
    ChunkSize(u64),
    /// The card's VRAM is smaller than one chunk, or has too many chunks.
    #[error("{0:#x} bytes of VRAM are not a valid number of chunks")]
    CardSize(u64),
    /// No chunk is available for the VM.
    #[error("VM {vm} gets no chunk: {limit}{}", and(.host))]
    Full {
        /// VM that needs a chunk.
        vm: TenantId,
        /// Limit of the preferred memory, which is the card at the first use of a chunk.
        limit: Limit,
        /// Limit that prevents placement in host memory, or `None` if host memory was not considered.
        host: Option<Limit>,
    },
    /// The card does not have enough VRAM for the mediator in addition to the chunks promised to VMs.
    #[error(
        "the request needs {wanted} chunks of VRAM, {free} are free and {to_scrub} more will be free after scrubbing, \
         of which {promised} are promised to others"
    )]
    CardFull {
        /// Requested number of chunks.
        wanted: u64,
        /// Number of zeroed chunks without an owner.
        free: u32,
        /// Number of chunks without an owner that are not zeroed yet.
        to_scrub: u32,
        /// Number of chunks without an owner that are guaranteed to VMs or kept for the reserve.
        promised: u32,
    },
    /// The guarantee exceeds the number of chunks that the card can still promise.
    #[error(
        "VM {vm} cannot be guaranteed {wanted} chunks of the card: {now} can be promised at once, {left} when \
         chunks of other VMs beyond their guarantees are moved; lower another VM's guarantee"
    )]
    Promise {
        /// VM with the guarantee.
        vm: TenantId,
        /// Requested guarantee, in chunks.
        wanted: u32,
        /// Number of chunks that can be promised now, including those already promised to the VM.
        now: u32,
        /// Number of card chunks that remain after the other VMs' guarantees, the mediator's share, and the reserve.
        left: u32,
    },
    /// The guarantee exceeds the quota.
    #[error("VM {vm}: a guarantee of {guarantee} chunks is more than the quota of {quota}")]
    Guarantee {
        /// VM with the limits.
        vm: TenantId,
        /// Guarantee in chunks.
        guarantee: u32,
        /// Quota in chunks.
        quota: u32,
    },
    /// The weight is below 1.
    #[error("VM {0}: weight must be at least 1")]
    Weight(TenantId),
    /// Too few chunks have been zeroed. The caller must do scrub work and retry. If there is no scrub work, another
    /// thread is already doing it.
    #[error("{short} chunks of {} must be scrubbed first", match .tier { Tier::Card => "VRAM", Tier::Host => "host memory" })]
    NeedsScrub {
        /// Memory that has too few zeroed chunks.
        tier: Tier,
        /// Number of missing chunks.
        short: u32,
    },
    /// The requested VRAM size is 0.
    #[error("a VM needs at least one byte of VRAM")]
    Empty,
    /// The VM's VRAM exceeds 1 TiB.
    #[error("{0:#x} bytes of VRAM for a VM are more than 0x10000000000")]
    Advertised(u64),
    /// The VM already has VRAM.
    #[error("VM {0} already has VRAM")]
    Exists(TenantId),
    /// The VM does not exist, so it has no VRAM.
    #[error("VM {0} has no VRAM")]
    NoSuchVm(TenantId),
    /// The address is outside the guest's VRAM.
    #[error("{address} is outside the VRAM of VM {vm}")]
    OutOfRange {
        /// VM that was accessed.
        vm: TenantId,
        /// Requested address.
        address: GuestVramAddr,
    },
    /// The guest chunk does not exist, or it is unplaced and therefore cannot move.
    #[error("guest chunk {index} of VM {vm} has no place")]
    NotPlaced {
        /// VM of the guest chunk.
        vm: TenantId,
        /// Index of the guest chunk.
        index: u32,
    },
    /// The guest chunk is already in the destination memory, reaches it without a copy, or must not move.
    #[error("guest chunk {index} of VM {vm} is already there")]
    Settled {
        /// VM of the guest chunk.
        vm: TenantId,
        /// Index of the guest chunk.
        index: u32,
    },
    /// All chunks of the reserve are in use.
    #[error("the reserve of {0} chunks is used up")]
    ReserveFull(u32),
    /// The guest chunk is already moving.
    #[error("guest chunk {index} of VM {vm} is moving")]
    Moving {
        /// VM of the guest chunk.
        vm: TenantId,
        /// Index of the guest chunk.
        index: u32,
    },
}

fn and(host: &Option<Limit>) -> String {
    host.map_or_else(String::new, |limit| format!("; and none in host memory: {limit}"))
}
