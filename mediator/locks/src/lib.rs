//! The mediator's locks. Each lock has a rank, which is its position in the lock order ([`rank`]). Debug builds panic
//! if a lock is acquired out of order, or if a thread waits while it holds a lock whose holder must not wait, such as a
//! VM's or a card's lock. The hold times of VMs' and cards' locks are always measured ([`holds`]).
//!
//! The underlying locks are those of `parking_lot` or, in tests, those of a checker that controls thread scheduling
//! (`checked`, with the feature `checked`).
//!
//! The crate only waits for locks, and does not access the data that they protect.

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
    /// True if this family measures hold times.
    const MEASURES: bool;
    /// A mutex.
    type Mutex<T>;
    /// Guard of an acquired mutex.
    type Guard<'a, T: 'a>: DerefMut<Target = T>;

    /// Creates an unlocked mutex.
    fn mutex<T>(value: T) -> Self::Mutex<T>;

    /// Acquires the lock, waiting for it if necessary.
    fn lock<T>(mutex: &Self::Mutex<T>) -> Self::Guard<'_, T>;

    /// Acquires the lock if it is free.
    fn try_lock<T>(mutex: &Self::Mutex<T>) -> Option<Self::Guard<'_, T>>;

    /// Calls `act` with the ranks of the locks that this thread holds. Does nothing if the thread is exiting and its
    /// thread-local storage has been destroyed.
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
        // An exiting thread may drop guards after its thread-local storage was destroyed. In this case, the order is
        // not checked.
        let _ = HELD.try_with(act);
    }
}

/// A mutex of rank `K`.
pub struct Mutex<K: Rank, T, L: Locks = Real> {
    raw: L::Mutex<T>,
    share: Option<Share>,
    rank: PhantomData<fn() -> K>,
}

/// A hold that is being measured.
struct Hold<'a> {
    share: &'a Share,
    since: Ticks,
    /// Thread CPU time in ns when the lock was acquired, if CPU time is measured.
    work: Option<u64>,
    place: &'static Location<'static>,
}

impl<'a> Hold<'a> {
    fn begin(share: &'a Share, place: &'static Location<'static>) -> Self {
        Self { share, since: Ticks::now(), work: meter::work(), place }
    }

    /// Records the hold in the statistics.
    fn record(&self) {
        if let Some((before, now)) = self.work.zip(meter::work()) {
            self.share.record_work(now.saturating_sub(before), self.place);
        }
        self.share.record(self.since.elapsed_ns(), self.place);
    }
}

/// Guard of an acquired lock.
#[must_use]
pub struct Guard<'a, K: Rank, T: 'a, L: Locks = Real> {
    raw: L::Guard<'a, T>,
    measured: Option<Hold<'a>>,
    rank: PhantomData<K>,
}

impl<K: Rank, T, L: Locks> Mutex<K, T, L> {
    /// Creates an unlocked mutex.
    pub fn new(value: T) -> Self {
        let share = K::MEASURED.filter(|_| L::MEASURES).map(Share::new);
        Self { raw: L::mutex(value), share, rank: PhantomData }
    }

    /// Acquires the lock, waiting for it if necessary.
    ///
    /// # Panics
    /// In debug builds, panics if this thread holds a lock of the same or a later rank.
    #[track_caller]
    pub fn lock(&self) -> Guard<'_, K, T, L> {
        if cfg!(debug_assertions) {
            // Check the order before waiting, so that a potential deadlock panics.
            L::with_held(HeldRanks::take::<K>);
        }
        self.guard(L::lock(&self.raw), Location::caller())
    }

    /// Acquires the lock if it is free.
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

    /// Returns the hold times of this lock, which are empty if hold times are not measured.
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
    /// Records the hold in the statistics.
    fn record(&self) {
        if let Some(hold) = &self.measured {
            hold.record();
        }
    }
}

impl<'a, K: Rank, T: 'a> Guard<'a, K, T, Real> {
    /// Releases the lock to a waiting thread, if any, and then reacquires it. Costs almost nothing if no thread is
    /// waiting.
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
        // The lock itself is released when the field is dropped.
        self.record();
        if cfg!(debug_assertions) {
            L::with_held(HeldRanks::release::<K>);
        }
    }
}

/// A condition variable for a [`Mutex`].
#[derive(Debug, Default)]
pub struct Condvar(parking_lot::Condvar);

impl Condvar {
    /// Wakes all waiting threads.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Releases the lock, waits for a wakeup, and reacquires the lock.
    ///
    /// # Panics
    /// In debug builds, panics if this thread holds another lock whose holder must not wait.
    pub fn wait<K: Rank, T>(&self, guard: &mut Guard<'_, K, T, Real>) {
        Self::waits(guard, |raw| self.0.wait(raw));
    }

    /// Same as [`Self::wait`], but waits for at most `limit`.
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

/// Returns the number of times that this thread has acquired locks of rank `K`, or 0 if the build does not check the
/// order.
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

/// Asserts that this thread may wait for the card, a VMM, or another thread.
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
