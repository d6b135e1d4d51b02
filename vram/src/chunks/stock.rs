//! Units of one memory: card chunks or host slots. Each unit has the size of a chunk and one state.

mod saved;

#[cfg(test)]
pub(super) use saved::SavedPiece;
pub(crate) use saved::SavedStock;

use super::state::ChunkState;
use std::collections::{BTreeSet, VecDeque};

/// All units of card or host memory, indexed by number. Invariant: `free`, `to_scrub`, and `scrubbing` are consistent
/// with `states`.
///
/// `states` grows with use up to `limit`, so a large unused limit has no cost. If the limit is lowered below the number
/// of owned units, no unit is allocated until enough units have been released. Units beyond the limit are removed when
/// they have been zeroed.
#[derive(Debug)]
pub(super) struct Stock {
    states: Vec<ChunkState>,
    free: BTreeSet<u32>,
    to_scrub: VecDeque<u32>,
    scrubbing: u32,
    /// Units that will be quarantined when they lose their owner or their scrub ends.
    condemned: BTreeSet<u32>,
    /// Number of quarantined units.
    quarantined: u32,
    scrubbed: u64,
    limit: u32,
}

impl Stock {
    /// Creates a stock of at most `limit` zeroed units.
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

    /// Creates a stock of `count` units that must be scrubbed before their first use.
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

    /// Returns the number of tracked units. A unit within the limit is tracked from its first use, and a unit beyond
    /// the limit is tracked until it is zeroed and free.
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

    /// Returns the number of units (zeroed or dirty) that can get an owner.
    pub(super) fn room(&self) -> u32 {
        self.limit.saturating_sub(self.owned())
    }

    /// Returns the number of zeroed units that can get an owner.
    pub(super) fn free(&self) -> u32 {
        let fresh = self.limit.saturating_sub(self.end());
        let beyond = if self.end() > self.limit { self.free.range(self.limit..).count() as u32 } else { 0 };
        (self.free.len() as u32 - beyond + fresh).min(self.room())
    }

    /// Returns the number of units scrubbed since the table was created.
    pub(super) fn scrub_count(&self) -> u64 {
        self.scrubbed
    }

    /// Assigns the first free unit to an owner. Returns `None` if no zeroed unit is available within the limit.
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

    /// Allocates a unit as the destination of a copy of a whole chunk. Prefers a dirty unit, because the copy makes
    /// scrubbing unnecessary. Returns `None` if no units remain, or if all remaining units are being scrubbed.
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

    /// Assigns `count` contiguous units, aligned to `align`, to an owner. Returns `Err(true)` if such a run may become
    /// available after scrubbing, or `Err(false)` otherwise.
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

    /// Permanently excludes a unit from use: immediately if it is free or waits to be scrubbed, or otherwise after it
    /// has lost its owner or has been scrubbed.
    pub(super) fn quarantine(&mut self, number: u32) {
        match self.state(number) {
            ChunkState::Quarantined => {}
            ChunkState::NeedsScrub => {
                self.to_scrub.retain(|waiting| *waiting != number);
                self.condemn(number);
            }
            ChunkState::Free if number < self.end() => {
                self.free.remove(&number);
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

    /// Removes a unit's owner.
    pub(super) fn abandon(&mut self, number: u32) {
        if self.condemned.contains(&number) {
            return self.condemn(number);
        }
        self.go(number, ChunkState::NeedsScrub);
        self.to_scrub.push_back(number);
    }

    /// Returns the unit that has waited longest to be scrubbed, and marks it as being scrubbed.
    pub(super) fn take_scrub(&mut self) -> Option<u32> {
        let number = self.to_scrub.pop_front()?;
        self.go(number, ChunkState::Scrubbing);
        self.scrubbing += 1;
        Some(number)
    }

    /// Records that a unit has been zeroed.
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

    /// Adds a unit that was never used, and returns its number.
    fn grow(&mut self) -> u32 {
        let number = self.end();
        self.states.push(ChunkState::Free);
        self.free.insert(number);
        number
    }

    /// Removes free units beyond the limit.
    fn trim(&mut self) {
        while self.end() > self.limit && self.states.last() == Some(&ChunkState::Free) {
            self.states.pop();
            self.free.remove(&self.end());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunks::state::MoveId;

    #[test]
    fn copy_takes_no_unit_beyond_a_lowered_limit() {
        let mut stock = Stock::zeroed(4);
        for number in 0..4 {
            assert_eq!(stock.take(ChunkState::Mediator), Some(number));
        }
        stock.abandon(3);
        stock.abandon(1);
        stock.set_limit(3);
        let arriving = ChunkState::Arriving(MoveId(1));
        assert_eq!(stock.take_for_copy(arriving), Some(1));
        assert_eq!(stock.take_for_copy(arriving), None, "only the unit beyond the limit is left");
    }
}
