//! Accounts of the card, of host memory and of each VM, in chunks.

use super::limits::Limits;
use crate::VmId;
use std::collections::BTreeMap;

/// Accounts of the whole card, in chunks. `free + to_scrub + quarantined + mediator + arriving + parked` and all VMs'
/// `placed` make `total`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Chunks of the card.
    pub total: u32,
    /// Zeroed, without an owner.
    pub free: u32,
    /// Without an owner, not zeroed yet (being scrubbed included).
    pub to_scrub: u32,
    /// Without an owner for good: the card may still reach them for the last one.
    pub quarantined: u32,
    /// Of `free` and `to_scrub`, those that back guarantees of VMs which have not used them up.
    pub promised: u32,
    /// Of the first two, those that are left for the mediator, within what was set aside for it.
    pub set_aside: u32,
    /// Of the first two, those that are left of the reserve.
    pub reserve: u32,
    /// In the reserve: VMs' chunks that count as in host memory.
    pub parked: u32,
    /// The mediator's.
    pub mediator: u32,
    /// Destinations of moves under way, those of chunks included that have lost their owner meanwhile.
    pub arriving: u32,
    /// Host memory's accounts.
    pub host: HostSummary,
    /// Each VM's.
    pub vms: BTreeMap<VmId, VmSummary>,
    /// Chunks scrubbed since the table was made.
    pub scrubbed: u64,
    /// Moves from the card to host memory since then, those of VMs that are gone included.
    pub moved_out: u64,
    /// Moves from host memory to the card, likewise.
    pub moved_in: u64,
}

impl Summary {
    /// Chunks without an owner that are promised to no one: what a new guarantee can have.
    #[must_use]
    pub fn spare(&self) -> u32 {
        (self.free + self.to_scrub).saturating_sub(self.promised + self.set_aside + self.reserve)
    }
}

/// Accounts of host memory for chunks, in slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostSummary {
    /// Most that may be used.
    pub budget: u32,
    /// Used, those included that moves under way go to. More than the budget after that was lowered.
    pub used: u32,
    /// Zeroed or never used, and within the budget.
    pub free: u32,
    /// Without an owner, not zeroed yet.
    pub to_scrub: u32,
    /// Without an owner for good, within what is used: the card may still reach them for the last one.
    pub quarantined: u32,
    /// No slot from this number on holds anything: the memory behind it can be given back.
    pub end: u32,
    /// Slots scrubbed since the table was made.
    pub scrubbed: u64,
}

/// Accounts of a VM, in chunks. `placed + parked + host + unbacked` make `advertised`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmSummary {
    /// Chunks that its guest believes to have.
    pub advertised: u32,
    /// Chunks that have their place on the card, and count there.
    pub placed: u32,
    /// Chunks that have their place on the card, in the reserve, and count as in host memory.
    pub parked: u32,
    /// Chunks that have their place in host memory.
    pub host: u32,
    /// Chunks that have no place yet.
    pub unbacked: u32,
    /// Chunks that are moving now, from where they count above.
    pub moving: u32,
    /// Its limits.
    pub limits: Limits,
    /// Chunks that it is sure to get on the card: its guarantee, or all of what its guest has if that is less.
    pub guarantee: u32,
    /// Most that it ever had on the card at a time, with what was on the way there.
    pub peak: u32,
    /// Most that it ever had in host memory at a time, with what was on the way there.
    pub host_peak: u32,
    /// Chunks whose first place was in host memory.
    pub born_in_host: u64,
    /// Moves from the card to host memory.
    pub moved_out: u64,
    /// Moves from host memory to the card.
    pub moved_in: u64,
}
