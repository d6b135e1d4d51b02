//! Errors of the chunk table.

use super::limits::OnFull;
use super::state::Tier;
use crate::{GuestVramAddr, TenantId};

/// Limit that prevents a VM from getting a chunk of the card or a host slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The card has no chunk that is not promised.
    Card {
        /// Number of free chunks.
        free: u32,
        /// Number of chunks without an owner that are not zeroed yet.
        to_scrub: u32,
        /// Number of these chunks that are promised.
        promised: u32,
    },
    /// The VM's quota of this many chunks is used up.
    Quota(u32),
    /// The host's budget of this many chunks is used up.
    HostBudget(u32),
    /// The VM's swap cap of this many chunks is used up.
    SwapCap(u32),
    /// The VM's policy for a full card does not allow swapping.
    Policy(OnFull),
}

impl Limit {
    /// Returns the name of the limit as one word.
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

    /// Returns the one of two limits that an operator must change: the limit that excludes a VM from host memory, or
    /// the card's limit if the VM's policy forbids host memory.
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

/// Reasons why the table refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The chunk size is not a power of two from 128 KiB to 64 MiB.
    #[error("chunk size {0:#x} is not a power of two from 0x20000 to 0x4000000 bytes")]
    ChunkSize(u64),
    /// The card does not have a whole chunk, or has more chunks than can be counted.
    #[error("{0:#x} bytes of VRAM are not a valid number of chunks")]
    CardSize(u64),
    /// No chunk is available for a VM.
    #[error("VM {vm} gets no chunk: {limit}{}", and(.host))]
    Full {
        /// The VM.
        vm: TenantId,
        /// Limit of the preferred memory. At the first use of a chunk, this is the card.
        limit: Limit,
        /// Limit of host memory, if host memory would have been enough.
        host: Option<Limit>,
    },
    /// The card has too little VRAM for the mediator in addition to the VRAM that is promised to VMs.
    #[error(
        "the request needs {wanted} chunks of VRAM, {free} are free and {to_scrub} more will be free after scrubbing, \
         of which {promised} are promised to others"
    )]
    CardFull {
        /// Number of requested chunks.
        wanted: u64,
        /// Number of free chunks.
        free: u32,
        /// Number of chunks without an owner that are not zeroed yet.
        to_scrub: u32,
        /// Number of chunks without an owner that back the guarantees of VMs.
        promised: u32,
    },
    /// A guarantee exceeds the chunks that the card can promise.
    #[error(
        "VM {vm} cannot be guaranteed {wanted} chunks of the card: {now} can be promised at once, {left} when what others \
         have beyond their guarantees is moved; lower another VM's guarantee"
    )]
    Promise {
        /// The VM.
        vm: TenantId,
        /// The requested guarantee.
        wanted: u32,
        /// Number of chunks that can be promised now, including those already promised to the VM.
        now: u32,
        /// Number of card chunks that remain after the guarantees of the other VMs and the mediator's share.
        left: u32,
    },
    /// The guarantee exceeds the quota.
    #[error("VM {vm}: a guarantee of {guarantee} chunks is more than the quota of {quota}")]
    Guarantee {
        /// The VM.
        vm: TenantId,
        /// The guarantee.
        guarantee: u32,
        /// The quota.
        quota: u32,
    },
    /// The weight is below 1.
    #[error("VM {0}: weight must be at least 1")]
    Weight(TenantId),
    /// Enough chunks will be free after zeroing. Take scrub work and retry. If no scrub work can be taken, another
    /// thread is doing it.
    #[error("{short} chunks of {} must be scrubbed first", match .tier { Tier::Card => "VRAM", Tier::Host => "host memory" })]
    NeedsScrub {
        /// The memory.
        tier: Tier,
        /// Number of missing chunks.
        short: u32,
    },
    /// A VM was created without VRAM.
    #[error("a VM needs at least one byte of VRAM")]
    Empty,
    /// The VM's VRAM exceeds the largest map.
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
        /// The VM.
        vm: TenantId,
        /// The requested address.
        address: GuestVramAddr,
    },
    /// The guest chunk is unplaced, so it cannot move, or the VM's guest has no such chunk.
    #[error("guest chunk {index} of VM {vm} has no place")]
    NotPlaced {
        /// The VM.
        vm: TenantId,
        /// The guest chunk.
        index: u32,
    },
    /// The guest chunk is already in that memory, or needs no copy.
    #[error("guest chunk {index} of VM {vm} is already there")]
    Settled {
        /// The VM.
        vm: TenantId,
        /// The guest chunk.
        index: u32,
    },
    /// The reserve of this many chunks is used up.
    #[error("the reserve of {0} chunks is used up")]
    ReserveFull(u32),
    /// The guest chunk is moving. The chunk can move again afterwards.
    #[error("guest chunk {index} of VM {vm} is moving")]
    Moving {
        /// The VM.
        vm: TenantId,
        /// The guest chunk.
        index: u32,
    },
}

fn and(host: &Option<Limit>) -> String {
    host.map_or_else(String::new, |limit| format!("; and none in host memory: {limit}"))
}
