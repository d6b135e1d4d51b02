//! Accounts of the card, of host memory and of each VM, in chunks.

use super::limits::Limits;
use crate::TenantId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Accounts of the whole card, in chunks. `free + to_scrub + quarantined + mediator + arriving + parked` and the
/// `placed` of all VMs add up to `total`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Size of a chunk in bytes.
    pub chunk_bytes: u64,
    /// Number of chunks of the card.
    pub total: u32,
    /// Zeroed chunks without an owner.
    pub free: u32,
    /// Free chunks that are not zeroed yet, including chunks that are being scrubbed.
    pub to_scrub: u32,
    /// Chunks out of use, because the card may still access them for their last owner.
    pub quarantined: u32,
    /// Chunks among `free` and `to_scrub` that back the unused part of VMs' guarantees.
    pub promised: u32,
    /// Chunks among `free` and `to_scrub` that remain for the mediator within its share.
    pub set_aside: u32,
    /// Chunks among `free` and `to_scrub` that remain for the reserve.
    pub reserve: u32,
    /// VMs' chunks in the reserve, which count as in host memory.
    pub parked: u32,
    /// Chunks owned by the mediator.
    pub mediator: u32,
    /// Destinations of moves in flight, including moves of chunks that no longer have an owner.
    pub arriving: u32,
    /// Accounts of host memory.
    pub host: HostSummary,
    /// Accounts of each VM.
    pub vms: BTreeMap<TenantId, VmSummary>,
    /// Number of chunks scrubbed since the table was created.
    pub scrubbed: u64,
    /// Number of moves from the card to host memory since then, including those of removed VMs.
    pub moved_out: u64,
    /// Number of moves from host memory to the card since then, including those of removed VMs.
    pub moved_in: u64,
}

impl Summary {
    /// Returns the number of chunks without an owner that are not promised. A new guarantee can use them.
    #[must_use]
    pub fn spare(&self) -> u32 {
        (self.free + self.to_scrub).saturating_sub(self.promised + self.set_aside + self.reserve)
    }
}

/// Accounts of host memory for chunks, in slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostSummary {
    /// Maximum number of used slots.
    pub budget: u32,
    /// Used slots, including the destinations of moves in flight. The number may exceed a budget that was lowered.
    pub used: u32,
    /// Slots within the budget that are zeroed or were never used.
    pub free: u32,
    /// Free slots that are not zeroed yet.
    pub to_scrub: u32,
    /// Slots out of use, because the card may still access them for their last owner. These slots count as used.
    pub quarantined: u32,
    /// Number of the first slot after all slots that contain data. The memory of that slot and all later ones can be
    /// freed.
    pub end: u32,
    /// Number of slots scrubbed since the table was created.
    pub scrubbed: u64,
}

/// Accounts of a VM, in chunks. `placed + parked + host + unbacked` add up to `advertised`, unless the VM has shrunk
/// and has more chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSummary {
    /// Number of chunks that the guest sees.
    pub advertised: u32,
    /// Chunks that are on the card and not in the reserve.
    pub placed: u32,
    /// Chunks in the reserve. These chunks are on the card, but count as in host memory.
    pub parked: u32,
    /// Chunks that are in host memory.
    pub host: u32,
    /// Unplaced chunks.
    pub unbacked: u32,
    /// Chunks that are moving. Each of them also counts at its source, above.
    pub moving: u32,
    /// Limits of the VM.
    pub limits: Limits,
    /// Number of chunks guaranteed to the VM on the card: its guarantee, or its guest's whole VRAM if that is less.
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
