//! The units of the card (chunks) or of the host (slots), each with a chunk's size and in one state.

mod saved;

#[cfg(test)]
pub(super) use saved::SavedPiece;
pub(crate) use saved::SavedStock;

use super::state::ChunkState;
use std::collections::{BTreeSet, VecDeque};

/// All units of the card's or the host's memory, indexed by number. Invariant: `free`, `to_scrub` and `scrubbing` agree
/// with `states`.
///
/// `states` grows with use up to `limit`, so that a large unused limit costs nothing. The limit may fall below the
/// number of owned units. In this case no unit is allocated until enough units are released, and units beyond the limit
/// are dropped once they are zeroed.
#[derive(Debug)]
pub(super) struct Stock {
    states: Vec<ChunkState>,
    free: BTreeSet<u32>,
    to_scrub: VecDeque<u32>,
    scrubbing: u32,
    /// Units that become quarantined once they have lost their owner.
    condemned: BTreeSet<u32>,
    /// Number of quarantined units.
    quarantined: u32,
    scrubbed: u64,
    limit: u32,
}

impl Stock {
    /// Creates a stock of up to `limit` units, all zeroed.
    pub(super) fn zeroed(limit: u32) -> Self {
        let (free, to_scrub) = (BTreeSet::new(), VecDeque::new());
        Self {
            states: Vec::new(),
            free,
            to_scrub,
            scrubbing: 0,
            condemned: BTreeSet::new(),
            quarantined: 0,
            scrubbed: 0,
            limit,
        }
    }

    /// Creates a stock of `count` units, all of which must be scrubbed before their first use.
    pub(super) fn dirty(count: u32) -> Self {
        let states = vec![ChunkState::NeedsScrub; count as usize];
        Self { states, to_scrub: (0..count).collect(), ..Self::zeroed(count) }
    }

    pub(super) fn limit(&self) -> u32 {
        self.limit
    }

    pub(super) fn set_limit(&mut self, limit: u32) {
        self.limit = limit;
        self.trim();
    }

    /// Returns the number of tracked units. Units within the limit are tracked from their first use on, units beyond it
    /// until they are zeroed and free.
    pub(super) fn end(&self) -> u32 {
        self.states.len() as u32
    }

    pub(super) fn state(&self, number: u32) -> ChunkState {
        self.states.get(number as usize).copied().unwrap_or(ChunkState::Free)
    }

    /// Returns the number of units that have an owner, are the destination of a move, or are quarantined.
    pub(super) fn owned(&self) -> u32 {
        self.end() - self.free.len() as u32 - self.unscrubbed()
    }

    /// Returns the number of units without an owner that are not zeroed.
    pub(super) fn unscrubbed(&self) -> u32 {
        self.to_scrub.len() as u32 + self.scrubbing
    }

    /// Returns the number of units that can get an owner, zeroed or not.
    pub(super) fn room(&self) -> u32 {
        self.limit.saturating_sub(self.owned())
    }

    /// Returns the number of units that can get an owner now.
    pub(super) fn free(&self) -> u32 {
        let fresh = self.limit.saturating_sub(self.end());
        let beyond = if self.end() > self.limit { self.free.range(self.limit..).count() as u32 } else { 0 };
        (self.free.len() as u32 - beyond + fresh).min(self.room())
    }

    /// Returns the number of units scrubbed since the table was created.
    pub(super) fn scrub_count(&self) -> u64 {
        self.scrubbed
    }

    /// Gives an owner to the first free unit. Returns `None` if no unit is zeroed and within the limit.
    pub(super) fn take(&mut self, to: ChunkState) -> Option<u32> {
        if self.room() == 0 {
            return None;
        }
        let number = match self.free.first() {
            Some(&number) if number < self.limit => number,
            _ if self.end() < self.limit => self.grow(),
            _ => return None,
        };
        self.claim(number, to);
        Some(number)
    }

    /// Takes a unit as the destination of a copy of a whole chunk. Prefers a unit that waits to be scrubbed, because
    /// the copy overwrites the unit and saves the scrub. Returns `None` if no units are left, or if all others are
    /// being scrubbed.
    pub(super) fn take_for_copy(&mut self, to: ChunkState) -> Option<u32> {
        if self.room() == 0 {
            return None;
        }
        let limit = self.limit;
        let Some(at) = self.to_scrub.iter().position(|number| *number < limit) else { return self.take(to) };
        let number = self.to_scrub.remove(at)?;
        self.go(number, to);
        Some(number)
    }

    /// Gives an owner to `count` contiguous units, the first of which is a multiple of `align`. Returns `Err(true)` if
    /// scrubbing could produce such a run, and `Err(false)` if not.
    pub(super) fn take_run(&mut self, count: u32, align: u32, to: ChunkState) -> Result<u32, bool> {
        let fits = |first: u32, usable: &dyn Fn(ChunkState) -> bool| {
            first.checked_add(count).is_some_and(|end| end <= self.limit)
                && (first..first + count).all(|number| usable(self.state(number)))
        };
        let candidates = || (0..self.limit).step_by(align.max(1) as usize);
        let is_free = |state| state == ChunkState::Free;
        let Some(first) = candidates().find(|&first| fits(first, &is_free)) else {
            let unowned = |state| matches!(state, ChunkState::Free | ChunkState::NeedsScrub | ChunkState::Scrubbing);
            return Err(candidates().any(|first| fits(first, &unowned)));
        };
        while self.end() < first + count {
            self.grow();
        }
        (first..first + count).for_each(|number| self.claim(number, to));
        Ok(first)
    }

    /// Returns the number of quarantined units.
    pub(super) fn quarantined(&self) -> u32 {
        self.quarantined
    }

    /// Takes a unit out of use: immediately if it has no owner, otherwise when it loses its owner.
    pub(super) fn quarantine(&mut self, number: u32) {
        match self.state(number) {
            ChunkState::Quarantined => {}
            ChunkState::NeedsScrub => {
                self.to_scrub.retain(|waiting| *waiting != number);
                self.condemn(number);
            }
            _ => drop(self.condemned.insert(number)),
        }
    }

    fn condemn(&mut self, number: u32) {
        self.condemned.remove(&number);
        self.go(number, ChunkState::Quarantined);
        self.quarantined += 1;
    }

    /// Removes the unit's owner.
    pub(super) fn abandon(&mut self, number: u32) {
        if self.condemned.contains(&number) {
            return self.condemn(number);
        }
        self.go(number, ChunkState::NeedsScrub);
        self.to_scrub.push_back(number);
    }

    /// Takes the unit that has waited longest to be scrubbed.
    pub(super) fn take_scrub(&mut self) -> Option<u32> {
        let number = self.to_scrub.pop_front()?;
        self.go(number, ChunkState::Scrubbing);
        self.scrubbing += 1;
        Some(number)
    }

    /// Records that the unit is zeroed.
    pub(super) fn scrubbed(&mut self, number: u32) {
        self.scrubbing -= 1;
        if self.condemned.contains(&number) {
            return self.condemn(number);
        }
        self.go(number, ChunkState::Free);
        self.scrubbed += 1;
        self.free.insert(number);
        self.trim();
    }

    pub(super) fn go(&mut self, number: u32, to: ChunkState) {
        let state = &mut self.states[number as usize];
        assert!(state.can_go(to), "unit {number} cannot change from {state:?} to {to:?}");
        *state = to;
    }

    fn claim(&mut self, number: u32, to: ChunkState) {
        self.free.remove(&number);
        self.go(number, to);
    }

    /// Adds a unit that was never used.
    fn grow(&mut self) -> u32 {
        let number = self.end();
        self.states.push(ChunkState::Free);
        self.free.insert(number);
        number
    }

    /// Drops free units beyond the limit.
    fn trim(&mut self) {
        while self.end() > self.limit && self.states.last() == Some(&ChunkState::Free) {
            self.states.pop();
            self.free.remove(&self.end());
        }
    }
}
