//! Timers of a CUDA card's owner.

use std::collections::BTreeMap;
use vram::TenantId;

/// A time at which the owner's behaviour changes. `U` identifies users of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Deadline<U> {
    /// Processes of an earlier owner are no longer expected to reconnect.
    Reconnection,
    /// Responses to requests for empty chunks are no longer expected.
    Reclaims,
    /// The attempt to free memory for a guarantee ends.
    Guarantee,
    /// Allocations may wait for evictions again.
    EvictionWait,
    /// Memory may be pinned for the stock again, because no memory has moved for some time.
    Restock,
    /// A tenant's current turn reaches its second time limit.
    SecondLimit(TenantId),
    /// A tenant that was preparing to leave for another card remains, because the daemon has not continued the move.
    Departure(TenantId),
    /// The accounts of an earlier owner's tenants that were not added are discarded.
    Accounts,
    /// The next part of a user's report about its memory from an earlier owner must have arrived.
    Report(U),
    /// The driver must have suspended a user.
    Suspension(U),
}

impl<U> Deadline<U> {
    /// Returns true if the core must be called at this deadline. The other deadlines only permit more actions at later
    /// events.
    const fn wakes(&self) -> bool {
        match self {
            Self::Reconnection
            | Self::Reclaims
            | Self::SecondLimit(_)
            | Self::Departure(_)
            | Self::Accounts
            | Self::Report(_)
            | Self::Suspension(_) => true,
            Self::Guarantee | Self::EvictionWait | Self::Restock => false,
        }
    }
}

/// Deadlines with their times, in ns on the core's clock.
#[derive(Debug)]
pub struct Deadlines<U> {
    at: BTreeMap<Deadline<U>, u64>,
}

impl<U: Copy + Ord> Default for Deadlines<U> {
    fn default() -> Self {
        Self { at: BTreeMap::new() }
    }
}

impl<U: Copy + Ord> Deadlines<U> {
    /// Sets a deadline, replacing its previous time.
    pub fn set(&mut self, deadline: Deadline<U>, at: u64) {
        self.at.insert(deadline, at);
    }

    /// Sets a deadline unless it already has a later time.
    pub fn postpone(&mut self, deadline: Deadline<U>, at: u64) {
        let set = self.at.entry(deadline).or_insert(at);
        *set = at.max(*set);
    }

    /// Removes a deadline. Returns true if it was set.
    pub fn cancel(&mut self, deadline: Deadline<U>) -> bool {
        self.at.remove(&deadline).is_some()
    }

    /// Removes the deadlines of a tenant.
    pub fn forget_tenant(&mut self, tenant: TenantId) {
        for deadline in [Deadline::SecondLimit(tenant), Deadline::Departure(tenant)] {
            self.cancel(deadline);
        }
    }

    /// Removes the deadlines of a user.
    pub fn forget_user(&mut self, user: U) {
        for deadline in [Deadline::Report(user), Deadline::Suspension(user)] {
            self.cancel(deadline);
        }
    }

    /// Returns true if a deadline is set, even if it has passed.
    #[must_use]
    pub fn is_set(&self, deadline: Deadline<U>) -> bool {
        self.at.contains_key(&deadline)
    }

    /// Returns true if a deadline is in the future.
    #[must_use]
    pub fn is_ahead(&self, deadline: Deadline<U>, now: u64) -> bool {
        self.remaining(deadline, now) > 0
    }

    /// Returns the time in ns until a deadline, or 0 if it has passed or is not set.
    #[must_use]
    pub fn remaining(&self, deadline: Deadline<U>, now: u64) -> u64 {
        self.at.get(&deadline).map_or(0, |at| at.saturating_sub(now))
    }

    /// Removes the deadlines that have passed and at which the core must act, and returns them.
    pub fn take_passed(&mut self, now: u64) -> Vec<Deadline<U>> {
        self.at.extract_if(.., |deadline, at| deadline.wakes() && *at <= now).map(|(deadline, _)| deadline).collect()
    }

    /// Returns the time in ns until the first deadline at which the core must be called.
    #[must_use]
    pub fn next(&self, now: u64) -> Option<u64> {
        let waking = self.at.iter().filter(|(deadline, _)| deadline.wakes());
        waking.map(|(_, at)| at.saturating_sub(now)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: TenantId = TenantId(2);

    #[test]
    fn passed_deadline_is_taken_once() {
        let mut deadlines = Deadlines::<u64>::default();
        assert!(deadlines.take_passed(5).is_empty() && deadlines.next(0).is_none());
        deadlines.set(Deadline::Reclaims, 10);
        assert!(deadlines.is_ahead(Deadline::Reclaims, 9) && !deadlines.is_ahead(Deadline::Reclaims, 10));
        assert_eq!((deadlines.next(4), deadlines.next(30)), (Some(6), Some(0)));
        assert!(deadlines.take_passed(9).is_empty());
        assert_eq!((deadlines.take_passed(10), deadlines.take_passed(10)), (vec![Deadline::Reclaims], vec![]));
    }

    #[test]
    fn deadlines_without_work_do_not_wake() {
        let mut deadlines = Deadlines::default();
        deadlines.set(Deadline::EvictionWait, 10);
        deadlines.postpone(Deadline::Restock, 20);
        deadlines.postpone(Deadline::Restock, 15);
        assert_eq!((deadlines.next(0), deadlines.remaining(Deadline::Restock, 5)), (None, 15));
        assert!(deadlines.take_passed(30).is_empty() && deadlines.is_set(Deadline::Restock));
        deadlines.set(Deadline::SecondLimit(ONE), 40);
        deadlines.set(Deadline::Suspension(7), 30);
        assert_eq!((deadlines.next(0), deadlines.take_passed(35)), (Some(30), vec![Deadline::Suspension(7)]));
        assert!(deadlines.cancel(Deadline::SecondLimit(ONE)) && !deadlines.cancel(Deadline::SecondLimit(ONE)));
        deadlines.set(Deadline::Report(7), 50);
        deadlines.set(Deadline::Departure(ONE), 50);
        deadlines.forget_user(7);
        deadlines.forget_tenant(ONE);
        assert_eq!(deadlines.next(0), None);
    }
}
