//! Memory quanta for tenants with several cards.
//!
//! Such a tenant can work only if its memory is on all of its cards. Therefore, the tenant gets the quanta of its cards
//! in ascending order of card numbers. The lowest card with competing tenants decides: its quantum starts when the
//! memory is loaded on all cards, and the quanta on the other cards last as long ([`vram::Lead`]). A tenant that holds
//! a card waits only for higher cards, so circular waits cannot occur. The wait is bounded, because the owner of
//! another card may be stopped.
//!
//! A tenant that must wait for its quantum may have a kernel in flight on another card that spins for a peer on this
//! card. When the turn on the other card ends, the peer is admitted ([`gang`]), but only for a limited time. After that
//! time, the tenant gets further turns even though it waits for its quantum ([`GangQuanta::is_stuck_elsewhere`]).
//!
//! Each owner sends a tenant's state to the owners of its next lower and its next higher card. A card whose owner is
//! not linked counts as free.

use gang::{CardId, GangId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use vram::{Lead, QuantumState, TenantId};

/// Maximum number of stored states per card. A state may arrive before the daemon adds its tenant to this owner, so
/// states of unknown tenants are stored, too.
const MAX_STATES: usize = 1024;

/// A tenant with several cards.
#[derive(Debug)]
struct Gang {
    tenant: TenantId,
    cards: BTreeSet<CardId>,
    /// Last state sent to each card.
    sent: BTreeMap<CardId, CardState>,
}

/// A tenant's combined state on a card and on all of its cards beyond that one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardState {
    /// State of the tenant's memory quantum.
    pub quantum: QuantumState,
    /// True if the tenant's work is still in flight after the end of the tenant's turn. Such work may wait for work on
    /// other cards.
    pub is_stuck: bool,
}

impl CardState {
    const FREE: Self = Self { quantum: QuantumState::Free, is_stuck: false };
}

/// A state to send to the owner of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateMessage {
    /// The card of the recipient.
    pub to: CardId,
    /// The tenant with several cards.
    pub gang: GangId,
    /// The tenant's combined state on this owner's card and on the tenant's cards beyond it.
    pub state: CardState,
}

/// The quanta of tenants with several cards, on one card.
#[derive(Debug)]
pub struct GangQuanta {
    card: CardId,
    gangs: BTreeMap<GangId, Gang>,
    /// States on the other linked cards.
    states: BTreeMap<CardId, BTreeMap<GangId, CardState>>,
}

impl GangQuanta {
    /// Creates the state of a card without tenants or links.
    #[must_use]
    pub fn new(card: CardId) -> Self {
        Self { card, gangs: BTreeMap::new(), states: BTreeMap::new() }
    }

    /// Adds a tenant. `cards` contains all of its cards, including this one.
    pub fn join(&mut self, gang: GangId, tenant: TenantId, cards: BTreeSet<CardId>) {
        self.gangs.insert(gang, Gang { tenant, cards, sent: BTreeMap::new() });
    }

    /// Removes a tenant.
    pub fn leave(&mut self, tenant: TenantId) {
        self.gangs.retain(|_, gang| gang.tenant != tenant);
    }

    /// Records that a new link to the owner of a card is up. Both owners send their states again.
    pub fn reached(&mut self, card: CardId) {
        self.lost(card);
        self.states.insert(card, BTreeMap::new());
    }

    /// Records that the link to the owner of a card is down.
    pub fn lost(&mut self, card: CardId) {
        self.states.remove(&card);
        for gang in self.gangs.values_mut() {
            gang.sent.remove(&card);
        }
    }

    /// Records a tenant's state on another card.
    pub fn received(&mut self, card: CardId, gang: GangId, state: CardState) {
        if let Some(states) = self.states.get_mut(&card)
            && (states.len() < MAX_STATES || states.contains_key(&gang))
        {
            states.insert(gang, state);
        }
    }

    /// Returns the states that other owners do not know yet, and records them as sent. `state` returns a tenant's state
    /// on this card.
    pub fn messages(&mut self, state: impl Fn(TenantId) -> CardState) -> Vec<StateMessage> {
        let mut due = Vec::new();
        for (&id, gang) in &self.gangs {
            let CardState { quantum, is_stuck } = state(gang.tenant);
            let (lower, higher) = (self.lower(gang), self.higher(gang));
            let up = match self.lead(id, gang) {
                Some(Lead::Waits) => QuantumState::Waits,
                Some(Lead::Holds) if quantum == QuantumState::Free => QuantumState::Holds,
                _ => quantum,
            };
            let is_usable = matches!(quantum, QuantumState::Free | QuantumState::Holds);
            let down = if is_usable && self.is_unready(id, gang) { QuantumState::Loads } else { quantum };
            let is_stuck_beyond = |card: Option<CardId>| card.is_some_and(|card| self.state(card, id).is_stuck);
            let message = |to, quantum, from| {
                let state = CardState { quantum, is_stuck: is_stuck || is_stuck_beyond(from) };
                StateMessage { to, gang: id, state }
            };
            due.extend(lower.map(|to| message(to, down, higher)));
            due.extend(higher.map(|to| message(to, up, lower)));
        }
        due.retain(|StateMessage { to, gang, state }| {
            let Some(gang) = self.gangs.get_mut(gang).filter(|_| self.states.contains_key(to)) else { return false };
            gang.sent.insert(*to, *state).unwrap_or(CardState::FREE) != *state
        });
        due
    }

    /// Returns the tenants whose quanta are currently determined by a lower card.
    #[must_use]
    pub fn leads(&self) -> BTreeMap<TenantId, Lead> {
        let led = self.gangs.iter().filter_map(|(id, gang)| Some((gang.tenant, self.lead(*id, gang)?)));
        led.collect()
    }

    /// Returns the tenants whose quanta this card determines and whose memory has not been loaded on all higher cards.
    #[must_use]
    pub fn unready(&self) -> BTreeSet<TenantId> {
        let decided = self.gangs.iter().filter(|(id, gang)| self.lead(**id, gang).is_none());
        decided.filter(|(id, gang)| self.is_unready(**id, gang)).map(|(_, gang)| gang.tenant).collect()
    }

    /// Returns true if a tenant's work on another card may wait for its work on this card.
    #[must_use]
    pub fn is_stuck_elsewhere(&self, tenant: TenantId) -> bool {
        let gang = self.gangs.iter().find(|(_, gang)| gang.tenant == tenant);
        gang.is_some_and(|(id, gang)| {
            let others = [self.lower(gang), self.higher(gang)];
            others.into_iter().flatten().any(|card| self.state(card, *id).is_stuck)
        })
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
        match self.state(self.lower(gang)?, id).quantum {
            QuantumState::Free => None,
            QuantumState::Waits => Some(Lead::Waits),
            // The memory can be loaded on both cards at the same time.
            QuantumState::Loads | QuantumState::Holds => Some(Lead::Holds),
        }
    }

    fn is_unready(&self, id: GangId, gang: &Gang) -> bool {
        let state = self.higher(gang).map(|card| self.state(card, id).quantum);
        matches!(state, Some(QuantumState::Waits | QuantumState::Loads))
    }

    fn state(&self, card: CardId, gang: GangId) -> CardState {
        self.states.get(&card).and_then(|states| states.get(&gang)).copied().unwrap_or(CardState::FREE)
    }
}

#[cfg(test)]
mod tests;
