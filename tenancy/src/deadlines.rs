//! Timers of a CUDA card's owner.

use std::collections::BTreeMap;
use vram::TenantId;

/// A time at which the owner's behaviour changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Deadline {
    /// Processes of an earlier owner are no longer expected to reconnect.
    Reconnection,
    /// Responses to requests for empty chunks are no longer expected.
    Reclaims,
    /// The attempt to free memory for a guarantee ends.
    Guarantee,
    /// Allocations may wait for evictions again.
    EvictionWait,
    /// Memory may be pinned for the stock again, because no memory has moved for a while.
    Restock,
    /// The second time limit of a tenant's current turn.
    SecondLimit(TenantId),
}

impl Deadline {
    /// Returns true if the core must be called at this time. The other deadlines only permit more actions at later
    /// events.
    const fn wakes(self) -> bool {
        match self {
            Self::Reconnection | Self::Reclaims | Self::SecondLimit(_) => true,
            Self::Guarantee | Self::EvictionWait | Self::Restock => false,
        }
    }
}

/// Pending deadlines and their times, in ns of the core's clock.
#[derive(Debug, Default)]
pub struct Deadlines {
    at: BTreeMap<Deadline, u64>,
}

impl Deadlines {
    /// Sets a deadline, replacing its previous time.
    pub fn set(&mut self, deadline: Deadline, at: u64) {
        self.at.insert(deadline, at);
    }

    /// Sets a deadline unless it is already set to a later time.
    pub fn postpone(&mut self, deadline: Deadline, at: u64) {
        let set = self.at.entry(deadline).or_insert(at);
        *set = at.max(*set);
    }

    /// Removes a deadline.
    pub fn cancel(&mut self, deadline: Deadline) {
        self.at.remove(&deadline);
    }

    /// Returns true if a deadline is set, even if its time has passed.
    pub fn is_set(&self, deadline: Deadline) -> bool {
        self.at.contains_key(&deadline)
    }

    /// Returns true if a deadline is set and in the future.
    pub fn is_ahead(&self, deadline: Deadline, now: u64) -> bool {
        self.remaining(deadline, now) > 0
    }

    /// Returns the time until a deadline in ns, or 0 if it has passed or is not set.
    pub fn remaining(&self, deadline: Deadline, now: u64) -> u64 {
        self.at.get(&deadline).map_or(0, |at| at.saturating_sub(now))
    }

    /// Removes a deadline if it has passed. Returns true if it had passed.
    pub fn take(&mut self, deadline: Deadline, now: u64) -> bool {
        let has_passed = self.at.get(&deadline).is_some_and(|at| *at <= now);
        has_passed && self.at.remove(&deadline).is_some()
    }

    /// Removes the second limits that have passed, and returns their tenants.
    pub fn take_second_limits(&mut self, now: u64) -> Vec<TenantId> {
        let passed = self.at.extract_if(.., |deadline, at| matches!(deadline, Deadline::SecondLimit(_)) && *at <= now);
        let tenant = |(deadline, _)| if let Deadline::SecondLimit(tenant) = deadline { Some(tenant) } else { None };
        passed.filter_map(tenant).collect()
    }

    /// Returns the time in ns until the earliest deadline at which the core must be called.
    pub fn next(&self, now: u64) -> Option<u64> {
        let waking = self.at.iter().filter(|(deadline, _)| deadline.wakes());
        waking.map(|(_, at)| at.saturating_sub(now)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_deadline_is_taken_once() {
        let mut deadlines = Deadlines::default();
        assert!(!deadlines.take(Deadline::Reclaims, 5) && deadlines.next(0).is_none());
        deadlines.set(Deadline::Reclaims, 10);
        assert!(deadlines.is_ahead(Deadline::Reclaims, 9) && !deadlines.is_ahead(Deadline::Reclaims, 10));
        assert_eq!((deadlines.next(4), deadlines.next(30)), (Some(6), Some(0)));
        assert!(!deadlines.take(Deadline::Reclaims, 9));
        assert!(deadlines.take(Deadline::Reclaims, 10) && !deadlines.take(Deadline::Reclaims, 10));
    }

    #[test]
    fn deadlines_without_work_do_not_wake() {
        let mut deadlines = Deadlines::default();
        deadlines.set(Deadline::EvictionWait, 10);
        deadlines.postpone(Deadline::Restock, 20);
        deadlines.postpone(Deadline::Restock, 15);
        assert_eq!((deadlines.next(0), deadlines.remaining(Deadline::Restock, 5)), (None, 15));
        deadlines.set(Deadline::SecondLimit(TenantId(2)), 40);
        deadlines.set(Deadline::SecondLimit(TenantId(3)), 30);
        assert_eq!((deadlines.next(0), deadlines.take_second_limits(35)), (Some(30), vec![TenantId(3)]));
        assert!(deadlines.is_set(Deadline::SecondLimit(TenantId(2))));
        deadlines.cancel(Deadline::SecondLimit(TenantId(2)));
        assert_eq!(deadlines.next(0), None);
    }
}
