//! A snapshot of how a card's memory is divided, which can be read without delaying the card.

use super::Memory;
use super::balance::Division;
use super::moved::Moved;
use super::refusals::Refusals;
use std::collections::BTreeMap;
use tenancy::MemoryView;
use vram::TenantId;

/// State of a card's memory at a point in time.
#[derive(Clone, Debug)]
pub struct Holdings {
    /// Settings for dividing the memory.
    pub division: Division,
    /// The division, in a form common to all kinds of cards.
    pub view: MemoryView,
    /// Moves of each VM's memory.
    pub moved: BTreeMap<TenantId, Moved>,
    /// Denied requests of each VM.
    pub refusals: Refusals,
}

impl Memory {
    /// Returns the current state.
    pub fn holdings(&self, now: u64) -> Holdings {
        Holdings {
            division: self.divider.division(),
            view: self.divider.residency().view(&self.vram.chunks, now),
            moved: self.moved.clone(),
            refusals: self.vram.refusals.clone(),
        }
    }
}
