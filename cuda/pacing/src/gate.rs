//! The submission gate. It is closed while another tenant has the slice or chunks are relocated.
//!
//! A submission through the open gate costs two atomic updates of a counter that few threads share. Closing the gate
//! waits until no thread is in the real driver's submit functions.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Reason for closing: the slice has ended or has not begun.
pub const NO_SLICE: u32 = 1;
/// Reason for closing: the owner has ordered a relocation of chunks.
pub const ORDER: u32 = 2;
/// Reason for closing: memory is being copied for an export.
pub const EXPORT: u32 = 4;
/// Index of the first bit used by [`order_of`].
const ORDERS_OF_CARDS: usize = 8;
/// Maximum number of cards of a program.
pub const MAX_CARDS: usize = 16;

/// Number of counters for threads in the driver. Each counter has its own cache line.
const STRIPES: usize = 32;

/// Returns the reason for closing if the owner of another card has ordered a relocation of chunks.
pub const fn order_of(card: usize) -> u32 {
    1 << (ORDERS_OF_CARDS + card % MAX_CARDS)
}

#[derive(Debug)]
#[repr(align(64))]
struct Stripe(AtomicU32);

thread_local! {
    static THREAD_STRIPE: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Gate that submissions pass through. It closes for several reasons, and counts the submissions in progress.
#[derive(Debug)]
pub struct Gate {
    stripes: [Stripe; STRIPES],
    /// Bit mask of the reasons why the gate is closed.
    closed: AtomicU32,
    /// Number of threads that have been assigned a stripe.
    next_stripe: AtomicU32,
    /// Number of threads blocked by the gate.
    held: AtomicU32,
    /// Set if the owner has been notified that a submission is waiting.
    told: AtomicBool,
    /// Set while one submission may pass outside the slice.
    steps: AtomicBool,
    /// Time until which one thread spins for the next slice, in ns of [`Gate::clock`].
    soon: AtomicU64,
    /// Set while a thread spins for the next slice.
    looks: AtomicBool,
    lock: Mutex<()>,
    opened: Condvar,
    start: Instant,
}

/// Reason why [`Held::wait`] returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// The gate is open, or a step may let the submission pass.
    Opened,
    /// The caller must notify the owner that a submission is waiting, and then wait again.
    NotifyOwner,
}

/// Counts the thread as blocked by the gate until the value is dropped.
#[derive(Debug)]
pub struct Held<'a>(&'a Gate);

impl Default for Gate {
    fn default() -> Self {
        Self::new()
    }
}

impl Gate {
    /// Returns an open gate.
    pub fn new() -> Self {
        Self {
            stripes: [const { Stripe(AtomicU32::new(0)) }; STRIPES],
            closed: AtomicU32::new(0),
            next_stripe: AtomicU32::new(0),
            held: AtomicU32::new(0),
            told: AtomicBool::new(false),
            steps: AtomicBool::new(false),
            soon: AtomicU64::new(0),
            looks: AtomicBool::new(false),
            lock: Mutex::new(()),
            opened: Condvar::new(),
            start: Instant::now(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the index of this thread's counter.
    #[inline]
    fn stripe(&self) -> usize {
        THREAD_STRIPE
            .try_with(|mine| {
                if mine.get() == usize::MAX {
                    mine.set(self.next_stripe.fetch_add(1, Ordering::Relaxed) as usize % STRIPES);
                }
                mine.get()
            })
            .unwrap_or(0)
    }

    /// Returns true if the gate is closed for any reason.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst) != 0
    }

    /// Counts this thread as inside the driver if the gate is open. Returns the stripe for [`Self::done`].
    #[inline]
    pub fn pass(&self) -> Option<usize> {
        let mine = self.stripe();
        let stripe = self.stripes.get(mine)?;
        stripe.0.fetch_add(1, Ordering::SeqCst);
        if !self.is_closed() || self.takes_step() {
            return Some(mine);
        }
        stripe.0.fetch_sub(1, Ordering::SeqCst);
        None
    }

    /// Returns true if a step lets this submission pass. Each step lets only one submission pass.
    fn takes_step(&self) -> bool {
        self.steps() && self.closed.load(Ordering::SeqCst) == NO_SLICE && self.steps.swap(false, Ordering::SeqCst)
    }

    fn steps(&self) -> bool {
        self.steps.load(Ordering::SeqCst)
    }

    /// Lets one blocked submission pass while the gate remains closed. Returns when a submission has passed,
    /// immediately if none is blocked, or after `limit` if the gate is also closed for another reason.
    pub fn step(&self, limit: Duration) {
        {
            let _guard = self.lock();
            // The owner must be notified again if further submissions wait.
            self.told.store(false, Ordering::SeqCst);
            self.steps.store(self.is_held(), Ordering::SeqCst);
            self.opened.notify_all();
        }
        let since = Instant::now();
        while self.steps() && since.elapsed() < limit {
            std::thread::sleep(Duration::from_micros(20));
        }
        self.steps.store(false, Ordering::SeqCst);
    }

    /// Counts this thread as outside the driver.
    #[inline]
    pub fn done(&self, stripe: usize) {
        if let Some(stripe) = self.stripes.get(stripe) {
            stripe.0.fetch_sub(1, Ordering::Release);
        }
    }

    /// Counts this thread as blocked until the result is dropped.
    pub fn hold(&self) -> Held<'_> {
        self.held.fetch_add(1, Ordering::SeqCst);
        Held(self)
    }

    /// Returns the time since the gate was created, in ns.
    fn clock(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    fn is_soon(&self) -> bool {
        self.clock() < self.soon.load(Ordering::SeqCst)
    }

    /// Records that a slice is expected to begin within `time`. Until then, one waiting thread spins instead of
    /// sleeping.
    pub fn soon(&self, time: Duration) {
        self.soon.store(self.clock() + time.as_nanos() as u64, Ordering::SeqCst);
        let _guard = self.lock();
        self.opened.notify_all();
    }

    /// Returns true if a submission is blocked, for any reason.
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::SeqCst) > 0
    }

    /// Returns true if a submission is waiting and the owner has been notified.
    pub fn is_told(&self) -> bool {
        self.told.load(Ordering::SeqCst)
    }

    /// Closes the gate for `reason`, and waits until no thread is inside the driver or until `deadline`. Returns true
    /// if no thread is inside.
    pub fn close(&self, reason: u32, deadline: Option<Instant>) -> bool {
        self.closed.fetch_or(reason, Ordering::SeqCst);
        if self.is_held() {
            let _guard = self.lock();
            self.opened.notify_all();
        }
        loop {
            if self.stripes.iter().all(|stripe| stripe.0.load(Ordering::SeqCst) == 0) {
                return true;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return false;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Clears `reason`. The gate opens if no other reason remains.
    pub fn open(&self, reason: u32) {
        let _guard = self.lock();
        if reason & NO_SLICE != 0 {
            self.told.store(false, Ordering::SeqCst);
        }
        self.closed.fetch_and(!reason, Ordering::SeqCst);
        if !self.is_closed() {
            self.opened.notify_all();
        }
    }

    /// Returns true if the gate would be open without `reason`. Ignores closures by the program's own threads.
    pub fn opens_without(&self, reason: u32) -> bool {
        self.closed.load(Ordering::SeqCst) & !reason & !EXPORT == 0
    }
}

impl Held<'_> {
    /// Waits until the gate is open, a step may let the submission pass, or the owner must be notified. If a slice ends
    /// while a relocation blocks this thread, the owner must be notified that a submission is waiting.
    pub fn wait(&self) -> Wake {
        let gate = self.0;
        let mut guard = gate.lock();
        while gate.is_closed() && !gate.steps() {
            if gate.closed.load(Ordering::SeqCst) & NO_SLICE != 0 && !gate.told.swap(true, Ordering::SeqCst) {
                return Wake::NotifyOwner;
            }
            if gate.is_soon() && !gate.looks.swap(true, Ordering::SeqCst) {
                drop(guard);
                while gate.is_closed() && gate.is_soon() && !gate.steps() {
                    std::thread::yield_now();
                }
                gate.looks.store(false, Ordering::SeqCst);
                guard = gate.lock();
            } else {
                guard = gate.opened.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
        }
        Wake::Opened
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests;
