//! A snapshot of the division of a card's memory, which can be read without delaying the card.

use super::Memory;
use super::balance::Division;
use super::moved::Moved;
use super::refusals::Refusals;
use std::collections::BTreeMap;
use vram::balance::Entitlement;
use vram::{Summary, TenantId, Turn};

/// State of a card's memory at a point in time.
#[derive(Clone, Debug)]
pub struct Holdings {
    /// Settings for dividing the memory.
    pub division: Division,
    /// The accounts, in chunks.
    pub summary: Summary,
    /// Measured speed of copies between the card and the host, in bytes per second; 0 before the first copy.
    pub bytes_per_second: u64,
    /// The current quantum, if any.
    pub turn: Option<Turn>,
    /// Entitlement of each VM, in chunks.
    pub entitled: BTreeMap<TenantId, Entitlement>,
    /// Number of chunks of each VM that are pinned to the card.
    pub pinned: BTreeMap<TenantId, u32>,
    /// Moves of the memory of each VM.
    pub moved: BTreeMap<TenantId, Moved>,
    /// Refused requests of each VM.
    pub refusals: Refusals,
    /// Number of quanta that have started so far.
    pub turns: u64,
}

impl Memory {
    /// Returns the current state.
    pub fn holdings(&self, now: u64) -> Holdings {
        let (chunks, balancer) = (&self.vram.chunks, self.divider.residency().balancer());
        let summary = chunks.summary();
        Holdings {
            division: self.divider.division(),
            bytes_per_second: self.divider.residency().quanta().bandwidth(),
            turn: self.divider.residency().turn().cloned(),
            entitled: balancer.entitlements(chunks, now),
            pinned: summary.vms.keys().map(|vm| (*vm, balancer.pinned(*vm))).collect(),
            moved: self.moved.clone(),
            refusals: self.vram.refusals.clone(),
            turns: self.divider.residency().begun(),
            summary,
        }
    }
}
