//! Quanta of memory for tenants with several cards.
//!
//! Such a tenant can work only if its memory is on all of its cards. Its cards therefore give it their quanta in the
//! order of their numbers. The first card that other tenants compete for decides: its quantum starts when the memory is
//! loaded on all cards, and the quanta of the others last as long ([`vram::Lead`]). A tenant that has a card waits only
//! for higher cards, so tenants cannot wait for each other in a circle. The wait is bounded, because the owner of
//! another card may be stopped.
//!
//! Each owner sends a tenant's state to the owners of its next lower and its next higher card. A card whose owner is
//! not linked counts as free.

use gang::{CardId, GangId};
use std::collections::{BTreeMap, BTreeSet};
use vram::{Lead, QuantumState, TenantId};

/// Maximum number of states of one card that are stored. A card's states arrive in any order with the tenants that the
/// daemon adds here, so states of unknown tenants are stored, too.
const MAX_STATES: usize = 1024;

/// A tenant with several cards.
#[derive(Debug)]
struct Gang {
    tenant: TenantId,
    cards: BTreeSet<CardId>,
    /// The state that each card was sent last.
    sent: BTreeMap<CardId, QuantumState>,
}

/// A state to send to the owner of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateMessage {
    /// The card of the recipient.
    pub to: CardId,
    /// The tenant.
    pub gang: GangId,
    /// The tenant's state on this owner's card.
    pub state: QuantumState,
}

/// The quanta of tenants with several cards, on one card.
#[derive(Debug)]
pub struct GangQuanta {
    card: CardId,
    gangs: BTreeMap<GangId, Gang>,
    /// States on the other linked cards.
    states: BTreeMap<CardId, BTreeMap<GangId, QuantumState>>,
}

impl GangQuanta {
    /// Creates the state of a card without tenants and links.
    #[must_use]
    pub fn new(card: CardId) -> Self {
        Self { card, gangs: BTreeMap::new(), states: BTreeMap::new() }
    }

    /// Adds a tenant with its cards, which include this one.
    pub fn join(&mut self, gang: GangId, tenant: TenantId, cards: BTreeSet<CardId>) {
        self.gangs.insert(gang, Gang { tenant, cards, sent: BTreeMap::new() });
    }

    /// Removes a tenant.
    pub fn leave(&mut self, tenant: TenantId) {
        self.gangs.retain(|_, gang| gang.tenant != tenant);
    }

    /// Records that messages to the owner of this card arrive from now on.
    pub fn reached(&mut self, card: CardId) {
        self.lost(card);
        self.states.insert(card, BTreeMap::new());
    }

    /// Records that the link to the owner of a card has ended.
    pub fn lost(&mut self, card: CardId) {
        self.states.remove(&card);
        for gang in self.gangs.values_mut() {
            gang.sent.remove(&card);
        }
    }

    /// Records a state on another card.
    pub fn received(&mut self, card: CardId, gang: GangId, state: QuantumState) {
        if let Some(states) = self.states.get_mut(&card)
            && (states.len() < MAX_STATES || states.contains_key(&gang))
        {
            states.insert(gang, state);
        }
    }

    /// Returns the states that other owners do not know yet. `state` returns a tenant's state on this card.
    pub fn messages(&mut self, state: impl Fn(TenantId) -> QuantumState) -> Vec<StateMessage> {
        let mut due = Vec::new();
        for (&id, gang) in &self.gangs {
            let state = state(gang.tenant);
            let up = match self.lead(id, gang) {
                Some(Lead::Waits) => QuantumState::Waits,
                Some(Lead::Holds) if state == QuantumState::Free => QuantumState::Holds,
                _ => state,
            };
            let is_usable = matches!(state, QuantumState::Free | QuantumState::Holds);
            let down = if is_usable && self.is_unready(id, gang) { QuantumState::Loads } else { state };
            due.extend(self.lower(gang).map(|to| StateMessage { to, gang: id, state: down }));
            due.extend(self.higher(gang).map(|to| StateMessage { to, gang: id, state: up }));
        }
        due.retain(|StateMessage { to, gang, state }| {
            let Some(gang) = self.gangs.get_mut(gang).filter(|_| self.states.contains_key(to)) else { return false };
            gang.sent.insert(*to, *state).unwrap_or(QuantumState::Free) != *state
        });
        due
    }

    /// Returns the tenants whose quanta a lower card decides at present.
    #[must_use]
    pub fn leads(&self) -> BTreeMap<TenantId, Lead> {
        let led = self.gangs.iter().filter_map(|(id, gang)| Some((gang.tenant, self.lead(*id, gang)?)));
        led.collect()
    }

    /// Returns the tenants whose quanta this card decides, and whose memory is not ready on a higher card.
    #[must_use]
    pub fn unready(&self) -> BTreeSet<TenantId> {
        let decided = self.gangs.iter().filter(|(id, gang)| self.lead(**id, gang).is_none());
        decided.filter(|(id, gang)| self.is_unready(**id, gang)).map(|(_, gang)| gang.tenant).collect()
    }

    /// Returns a tenant's next lower card.
    fn lower(&self, gang: &Gang) -> Option<CardId> {
        gang.cards.range(..self.card).next_back().copied()
    }

    /// Returns a tenant's next higher card.
    fn higher(&self, gang: &Gang) -> Option<CardId> {
        gang.cards.range(self.card..).copied().find(|card| *card != self.card)
    }

    fn lead(&self, id: GangId, gang: &Gang) -> Option<Lead> {
        match self.state(self.lower(gang)?, id) {
            QuantumState::Free => None,
            QuantumState::Waits => Some(Lead::Waits),
            // The memory can be loaded on both cards at the same time.
            QuantumState::Loads | QuantumState::Holds => Some(Lead::Holds),
        }
    }

    fn is_unready(&self, id: GangId, gang: &Gang) -> bool {
        let state = self.higher(gang).map(|card| self.state(card, id));
        matches!(state, Some(QuantumState::Waits | QuantumState::Loads))
    }

    fn state(&self, card: CardId, gang: GangId) -> QuantumState {
        self.states.get(&card).and_then(|states| states.get(&gang)).copied().unwrap_or(QuantumState::Free)
    }
}

#[cfg(test)]
mod tests;
