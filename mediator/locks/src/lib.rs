//! The mediator's locks. Each lock has a rank, which is its position in the order in which threads take locks
//! ([`rank`]). In debug builds, taking a lock out of order panics, as does waiting with a VM's lock or a card's lock
//! held. The hold times of these two kinds are always measured ([`holds`]).
//!
//! The underlying locks are `parking_lot`'s or, in tests, those of a checker that controls the scheduling of threads
//! (`checked`, with the feature `checked`).
//!
//! The crate waits only for locks, and does not depend on the data that they protect.

mod meter;
mod order;
pub mod rank;
mod ticks;

#[cfg(any(test, feature = "checked"))]
pub mod checked;

pub use meter::{Holds, Long, holds, measure_work, worked};
pub use order::HeldRanks;
pub use rank::{Measured, Rank};

use meter::Share;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::time::Duration;
use ticks::Ticks;

/// A family of locks.
pub trait Locks: 'static {
    /// True if hold times are measured.
    const MEASURES: bool;
    /// A lock around a value.
    type Mutex<T>;
    /// The guard of a held lock.
    type Guard<'a, T: 'a>: DerefMut<Target = T>;

    /// Creates an unlocked lock.
    fn mutex<T>(value: T) -> Self::Mutex<T>;

    /// Takes the lock, waiting for it if necessary.
    fn lock<T>(mutex: &Self::Mutex<T>) -> Self::Guard<'_, T>;

    /// Takes the lock if it is free.
    fn try_lock<T>(mutex: &Self::Mutex<T>) -> Option<Self::Guard<'_, T>>;

    /// Calls `act` with the set of locks that this thread holds. Does nothing if the thread is exiting and holds no
    /// locks.
    fn with_held(act: impl FnOnce(&HeldRanks));
}

/// The daemon's locks.
#[derive(Clone, Copy, Debug)]
pub struct Real;

thread_local! {
    static HELD: HeldRanks = const { HeldRanks::new() };
}

impl Locks for Real {
    const MEASURES: bool = true;
    type Mutex<T> = parking_lot::Mutex<T>;
    type Guard<'a, T: 'a> = parking_lot::MutexGuard<'a, T>;

    fn mutex<T>(value: T) -> Self::Mutex<T> {
        parking_lot::Mutex::new(value)
    }

    fn lock<T>(mutex: &Self::Mutex<T>) -> Self::Guard<'_, T> {
        mutex.lock()
    }

    fn try_lock<T>(mutex: &Self::Mutex<T>) -> Option<Self::Guard<'_, T>> {
        mutex.try_lock()
    }

    fn with_held(act: impl FnOnce(&HeldRanks)) {
        // An exiting thread may drop guards after its thread-local storage was destroyed. The order is not checked
        // then.
        let _ = HELD.try_with(act);
    }
}

/// A lock of rank `K` around a value.
pub struct Mutex<K: Rank, T, L: Locks = Real> {
    raw: L::Mutex<T>,
    share: Option<Share>,
    rank: PhantomData<fn() -> K>,
}

/// Measurement of one hold.
struct Hold<'a> {
    share: &'a Share,
    since: Ticks,
    /// Thread CPU time at which it took the lock, in ns, if CPU time is measured.
    work: Option<u64>,
    place: &'static Location<'static>,
}

impl<'a> Hold<'a> {
    fn begin(share: &'a Share, place: &'static Location<'static>) -> Self {
        Self { share, since: Ticks::now(), work: meter::work(), place }
    }

    /// Records the hold until now.
    fn record(&self) {
        if let Some((before, now)) = self.work.zip(meter::work()) {
            self.share.record_work(now.saturating_sub(before), self.place);
        }
        self.share.record(self.since.elapsed_ns(), self.place);
    }
}

/// The guard of a held lock.
#[must_use]
pub struct Guard<'a, K: Rank, T: 'a, L: Locks = Real> {
    raw: L::Guard<'a, T>,
    measured: Option<Hold<'a>>,
    rank: PhantomData<K>,
}

impl<K: Rank, T, L: Locks> Mutex<K, T, L> {
    /// Creates an unlocked lock.
    pub fn new(value: T) -> Self {
        let share = K::MEASURED.filter(|_| L::MEASURES).map(Share::new);
        Self { raw: L::mutex(value), share, rank: PhantomData }
    }

    /// Takes the lock, waiting for it if necessary.
    ///
    /// # Panics
    /// In debug builds, panics if this thread holds a lock of the same rank or a later one.
    #[track_caller]
    pub fn lock(&self) -> Guard<'_, K, T, L> {
        if cfg!(debug_assertions) {
            // Check before waiting, so that a deadlock is reported as an error.
            L::with_held(HeldRanks::take::<K>);
        }
        self.guard(L::lock(&self.raw), Location::caller())
    }

    /// Takes the lock if it is free.
    ///
    /// # Panics
    /// Panics for the same reasons as [`Self::lock`].
    #[track_caller]
    pub fn try_lock(&self) -> Option<Guard<'_, K, T, L>> {
        let raw = L::try_lock(&self.raw)?;
        if cfg!(debug_assertions) {
            L::with_held(HeldRanks::take::<K>);
        }
        Some(self.guard(raw, Location::caller()))
    }

    /// Returns this lock's hold times; empty if they are not measured.
    #[must_use]
    pub fn holds(&self) -> Holds {
        self.share.as_ref().map(Share::holds).unwrap_or_default()
    }

    fn guard<'a>(&'a self, raw: L::Guard<'a, T>, place: &'static Location<'static>) -> Guard<'a, K, T, L> {
        let measured = self.share.as_ref().map(|share| Hold::begin(share, place));
        Guard { raw, measured, rank: PhantomData }
    }
}

impl<K: Rank, T: Default, L: Locks> Default for Mutex<K, T, L> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<K: Rank, T, L: Locks> fmt::Debug for Mutex<K, T, L> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Mutex({})", K::NAME)
    }
}

impl<'a, K: Rank, T: 'a, L: Locks> Guard<'a, K, T, L> {
    /// Records the hold until now.
    fn record(&self) {
        if let Some(hold) = &self.measured {
            hold.record();
        }
    }
}

impl<'a, K: Rank, T: 'a> Guard<'a, K, T, Real> {
    /// Releases the lock to a waiting thread, and then takes it again. Costs almost nothing if no thread is waiting.
    pub fn give_way(&mut self) {
        self.record();
        parking_lot::MutexGuard::bump(&mut self.raw);
        if let Some(hold) = &mut self.measured {
            *hold = Hold::begin(hold.share, hold.place);
        }
    }
}

impl<'a, K: Rank, T: 'a, L: Locks> Deref for Guard<'a, K, T, L> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.raw
    }
}

impl<'a, K: Rank, T: 'a, L: Locks> DerefMut for Guard<'a, K, T, L> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.raw
    }
}

impl<'a, K: Rank, T: 'a, L: Locks> Drop for Guard<'a, K, T, L> {
    fn drop(&mut self) {
        // The lock itself is released later, when the field is dropped.
        self.record();
        if cfg!(debug_assertions) {
            L::with_held(HeldRanks::release::<K>);
        }
    }
}

/// A condition variable for holders of a lock.
#[derive(Debug, Default)]
pub struct Condvar(parking_lot::Condvar);

impl Condvar {
    /// Wakes all waiters.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Releases the lock, waits to be woken, and takes the lock again.
    ///
    /// # Panics
    /// In debug builds, panics if this thread holds another lock whose holder must not wait.
    pub fn wait<K: Rank, T>(&self, guard: &mut Guard<'_, K, T, Real>) {
        Self::waits(guard, |raw| self.0.wait(raw));
    }

    /// Like [`Self::wait`], for at most `limit`.
    ///
    /// # Panics
    /// Panics for the same reasons as [`Self::wait`].
    pub fn wait_for<K: Rank, T>(&self, guard: &mut Guard<'_, K, T, Real>, limit: Duration) {
        Self::waits(guard, |raw| _ = self.0.wait_for(raw, limit));
    }

    fn waits<'a, K: Rank, T>(
        guard: &mut Guard<'a, K, T, Real>,
        wait: impl FnOnce(&mut parking_lot::MutexGuard<'a, T>),
    ) {
        if cfg!(debug_assertions) {
            Real::with_held(|held| held.wait(Some(K::POSITION)));
        }
        guard.record();
        wait(&mut guard.raw);
        if let Some(hold) = &mut guard.measured {
            *hold = Hold::begin(hold.share, hold.place);
        }
    }
}

/// Returns how often this thread has taken locks of rank `K`; 0 in builds that do not check the order.
#[must_use]
pub fn taken<K: Rank>() -> u64 {
    let mut count = 0;
    Real::with_held(|held| count = held.taken::<K>());
    count
}

/// Sleeps for `time`.
///
/// # Panics
/// In debug builds, panics if this thread holds a lock whose holder must not wait.
pub fn sleep(time: Duration) {
    may_wait();
    std::thread::sleep(time);
}

/// Declares that the following code waits for the card, a VMM, or another thread.
///
/// # Panics
/// In debug builds, panics if this thread holds a lock whose holder must not wait.
pub fn may_wait() {
    if cfg!(debug_assertions) {
        Real::with_held(|held| held.wait(None));
    }
}

#[cfg(test)]
mod tests;
