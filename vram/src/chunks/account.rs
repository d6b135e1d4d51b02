//! Accounts of the card, of host memory, and of each VM, in chunks.

use super::limits::Limits;
use crate::TenantId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Accounts of the whole card, in chunks. `free + to_scrub + quarantined + mediator + arriving + parked`, plus the
/// `placed` chunks of all VMs, add up to `total`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Size of a chunk in bytes.
    pub chunk_bytes: u64,
    /// Number of chunks on the card.
    pub total: u32,
    /// Number of zeroed chunks that have no owner.
    pub free: u32,
    /// Number of chunks without an owner that are not zeroed yet, including chunks that are being scrubbed.
    pub to_scrub: u32,
    /// Number of unusable chunks that the card may still access on behalf of their last owner.
    pub quarantined: u32,
    /// Number of chunks among `free` and `to_scrub` that are reserved for the unused part of VMs' guarantees.
    pub promised: u32,
    /// Number of chunks among `free` and `to_scrub` that are reserved for the mediator: the unused part of its share,
    /// and its claim.
    pub set_aside: u32,
    /// Number of chunks among `free` and `to_scrub` that are reserved for the unused part of the reserve.
    pub reserve: u32,
    /// Number of VMs' chunks in the reserve, which are counted as host memory.
    pub parked: u32,
    /// Number of chunks owned by the mediator.
    pub mediator: u32,
    /// Number of destinations of moves in flight, including moves of chunks that no longer have an owner.
    pub arriving: u32,
    /// Accounts of host memory.
    pub host: HostSummary,
    /// Accounts of the VMs.
    pub vms: BTreeMap<TenantId, VmSummary>,
    /// Number of chunks scrubbed since the table was created.
    pub scrubbed: u64,
    /// Number of moves from the card to host memory since the table was created, including those of removed VMs.
    pub moved_out: u64,
    /// Number of moves from host memory to the card since the table was created, including those of removed VMs.
    pub moved_in: u64,
}

impl Summary {
    /// Returns the number of chunks that have no owner and are not reserved for any use. They are available for new
    /// guarantees.
    #[must_use]
    pub fn spare(&self) -> u32 {
        (self.free + self.to_scrub).saturating_sub(self.promised + self.set_aside + self.reserve)
    }
}

/// Accounts of host memory for guest chunks, in slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostSummary {
    /// Maximum number of used slots.
    pub budget: u32,
    /// Number of used slots, including destinations of moves in flight. It can exceed the budget if the budget has been
    /// lowered.
    pub used: u32,
    /// Number of slots within the budget that are zeroed or were never used.
    pub free: u32,
    /// Number of slots without an owner that are not zeroed yet, including slots that are being scrubbed.
    pub to_scrub: u32,
    /// Number of unusable slots that the card may still access on behalf of their last owner. They count as used.
    pub quarantined: u32,
    /// Index of the first slot after all slots with data. Memory starting at this slot can be freed.
    pub end: u32,
    /// Number of slots scrubbed since the table was created.
    pub scrubbed: u64,
}

/// Accounts of a VM, in chunks. `placed + parked + host + unbacked` equals `advertised`, unless the VM has shrunk and
/// has more chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSummary {
    /// Number of chunks that the guest sees.
    pub advertised: u32,
    /// Number of chunks on the card, except for those in the reserve.
    pub placed: u32,
    /// Number of chunks in the reserve, which are on the card but are counted as host memory.
    pub parked: u32,
    /// Number of chunks in host memory.
    pub host: u32,
    /// Number of unplaced chunks.
    pub unbacked: u32,
    /// Number of moving chunks, which are also counted at their source.
    pub moving: u32,
    /// Limits of the VM.
    pub limits: Limits,
    /// Number of chunks guaranteed to the VM on the card, which is its guarantee or the size of its guest's VRAM,
    /// whichever is lower.
    pub guarantee: u32,
    /// Peak number of chunks on the card, including chunks that are moving to it.
    pub peak: u32,
    /// Peak number of chunks in host memory, including chunks that are moving to it.
    pub host_peak: u32,
    /// Number of chunks placed in host memory at their first use.
    pub born_in_host: u64,
    /// Number of moves from the card to host memory.
    pub moved_out: u64,
    /// Number of moves from host memory to the card.
    pub moved_in: u64,
}
