//! Snapshot of the division of a card's memory, which can be read without delaying the card.

use super::Memory;
use super::balance::Division;
use super::moved::Moved;
use super::refusals::Refusals;
use std::collections::BTreeMap;
use tenancy::MemoryView;
use vram::TenantId;

/// Snapshot of a card's memory.
#[derive(Clone, Debug)]
pub struct Holdings {
    /// Settings for dividing the memory.
    pub division: Division,
    /// Division of the memory, in the format common to all kinds of cards.
    pub view: MemoryView,
    /// Totals of the moves of each VM's memory.
    pub moved: BTreeMap<TenantId, Moved>,
    /// Denied memory requests of each VM.
    pub refusals: Refusals,
}

impl Memory {
    /// Returns a snapshot of the memory.
    pub fn holdings(&self, now: u64) -> Holdings {
        Holdings {
            division: self.divider.division(),
            view: self.divider.residency().view(&self.vram.chunks, now),
            moved: self.moved.clone(),
            refusals: self.vram.refusals.clone(),
        }
    }
}
