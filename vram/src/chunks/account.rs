//! Accounts of the card, of host memory and of each VM, in chunks.

use super::limits::Limits;
use crate::TenantId;
use std::collections::BTreeMap;

/// Accounts of the whole card, in chunks. `free + to_scrub + quarantined + mediator + arriving + parked` and all VMs'
/// `placed` make `total`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Size of a chunk in bytes.
    pub chunk_bytes: u64,
    /// Chunks of the card.
    pub total: u32,
    /// Zeroed, without an owner.
    pub free: u32,
    /// Free chunks that are not zeroed yet, including chunks being scrubbed.
    pub to_scrub: u32,
    /// Out of use: the card may still reach them for their last owner.
    pub quarantined: u32,
    /// Of `free` and `to_scrub`, the chunks that back the unused part of VMs' guarantees.
    pub promised: u32,
    /// Of the first two, the chunks left for the mediator, within its share.
    pub set_aside: u32,
    /// Of the first two, the chunks left for the reserve.
    pub reserve: u32,
    /// In the reserve: VMs' chunks that count as in host memory.
    pub parked: u32,
    /// Owned by the mediator.
    pub mediator: u32,
    /// Destinations of moves in flight, including moves of chunks that no longer have an owner.
    pub arriving: u32,
    /// Accounts of host memory.
    pub host: HostSummary,
    /// Accounts of each VM.
    pub vms: BTreeMap<TenantId, VmSummary>,
    /// Chunks scrubbed since the table was made.
    pub scrubbed: u64,
    /// Moves from the card to host memory since then, including those of VMs that are gone.
    pub moved_out: u64,
    /// Moves from host memory to the card, likewise.
    pub moved_in: u64,
}

impl Summary {
    /// Returns the chunks without an owner that are not promised: a new guarantee can take them.
    #[must_use]
    pub fn spare(&self) -> u32 {
        (self.free + self.to_scrub).saturating_sub(self.promised + self.set_aside + self.reserve)
    }
}

/// Accounts of host memory for chunks, in slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostSummary {
    /// Maximum number that may be used.
    pub budget: u32,
    /// Used, including the destinations of moves in flight. Exceeds the budget after that was lowered.
    pub used: u32,
    /// Zeroed or never used, and within the budget.
    pub free: u32,
    /// Free slots that are not zeroed yet.
    pub to_scrub: u32,
    /// Out of use, counted as used: the card may still reach them for their last owner.
    pub quarantined: u32,
    /// Slots at or above this number hold no data, so their memory can be freed.
    pub end: u32,
    /// Slots scrubbed since the table was made.
    pub scrubbed: u64,
}

/// Accounts of a VM, in chunks. `placed + parked + host + unbacked` make `advertised`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmSummary {
    /// Chunks that its guest sees.
    pub advertised: u32,
    /// Chunks that are on the card, and count there.
    pub placed: u32,
    /// Chunks that are on the card, in the reserve, and count as in host memory.
    pub parked: u32,
    /// Chunks that are in host memory.
    pub host: u32,
    /// Unplaced chunks.
    pub unbacked: u32,
    /// Chunks that move now; the source counts above.
    pub moving: u32,
    /// Its limits.
    pub limits: Limits,
    /// Chunks guaranteed to it on the card: its guarantee, or its guest's whole VRAM if that is less.
    pub guarantee: u32,
    /// Peak number of chunks on the card, including chunks on the way there.
    pub peak: u32,
    /// Peak number of chunks in host memory, including chunks on the way there.
    pub host_peak: u32,
    /// Chunks that were first placed in host memory.
    pub born_in_host: u64,
    /// Moves from the card to host memory.
    pub moved_out: u64,
    /// Moves from host memory to the card.
    pub moved_in: u64,
}
