//! Accounts of the card and of each VM, in chunks.

use crate::VmId;
use std::collections::BTreeMap;

/// Accounts of the whole card, in chunks. `free + to_scrub + mediator` and all VMs' `placed` make `total`.
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
    /// Of the two above, those that back reservations of VMs which have not used them up.
    pub promised: u32,
    /// Of the first two, those that are left for the mediator, within what was set aside for it.
    pub set_aside: u32,
    /// The mediator's.
    pub mediator: u32,
    /// Each VM's.
    pub vms: BTreeMap<VmId, VmSummary>,
    /// Chunks scrubbed since the table was made.
    pub scrubbed: u64,
}

impl Summary {
    /// Chunks without an owner that are promised to no one: what a new reservation can have.
    #[must_use]
    pub fn spare(&self) -> u32 {
        (self.free + self.to_scrub).saturating_sub(self.promised + self.set_aside)
    }
}

/// Accounts of a VM, in chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmSummary {
    /// What its guest believes to have.
    pub advertised: u32,
    /// What it is sure to get: all that is advertised, or nothing.
    pub reserved: u32,
    /// What has a place on the card.
    pub placed: u32,
    /// Most that ever had a place at a time.
    pub peak: u32,
}
