//! In debug builds, checks that each thread acquires locks in rank order.

use crate::Rank;
use std::cell::RefCell;

/// A lock held by a thread.
#[derive(Clone, Copy, Debug)]
struct Holding {
    position: u8,
    name: &'static str,
    may_wait: bool,
}

/// Ranks of the locks that a thread holds.
#[derive(Debug, Default)]
pub struct HeldRanks {
    now: RefCell<Vec<Holding>>,
    /// Positions of all acquired ranks, each with the number of acquisitions.
    taken: RefCell<Vec<(u8, u64)>>,
}

impl HeldRanks {
    /// Creates an empty set.
    #[must_use]
    pub const fn new() -> Self {
        Self { now: RefCell::new(Vec::new()), taken: RefCell::new(Vec::new()) }
    }

    /// # Panics
    /// Panics if a lock of this or a later rank is held.
    pub(crate) fn take<K: Rank>(&self) {
        let mut held = self.now.borrow_mut();
        if let Some(above) = held.iter().find(|above| above.position >= K::POSITION) {
            let above = above.name;
            drop(held);
            panic!("lock order: {} is taken while {above} is held; see the order in `locks::rank`", K::NAME);
        }
        held.push(Holding { position: K::POSITION, name: K::NAME, may_wait: K::MAY_WAIT });
        let mut taken = self.taken.borrow_mut();
        match taken.iter_mut().find(|(position, _)| *position == K::POSITION) {
            Some((_, count)) => *count += 1,
            None => taken.push((K::POSITION, 1)),
        }
    }

    pub(crate) fn taken<K: Rank>(&self) -> u64 {
        let taken = self.taken.borrow();
        taken.iter().find(|(position, _)| *position == K::POSITION).map_or(0, |(_, count)| *count)
    }

    pub(crate) fn release<K: Rank>(&self) {
        let mut held = self.now.borrow_mut();
        if let Some(index) = held.iter().rposition(|one| one.position == K::POSITION) {
            held.remove(index);
        }
    }

    /// # Panics
    /// Panics if this thread holds a lock whose holder must not wait, except for the lock at position `but`.
    pub(crate) fn wait(&self, but: Option<u8>) {
        let name = self.now.borrow().iter().find(|one| !one.may_wait && Some(one.position) != but).map(|one| one.name);
        if let Some(name) = name {
            panic!("lock order: a thread waits while it holds {name}; release it before waiting");
        }
    }
}
