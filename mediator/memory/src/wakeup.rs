//! Wakes the thread that moves memory.

use locks::{Condvar, Mutex, rank};
use std::time::Duration;

/// Rung by whoever finds that memory should move. Does not hold up who rings.
#[derive(Debug, Default)]
pub struct Wakeup {
    rung: Mutex<rank::Wakeup, bool>,
    wake: Condvar,
}

impl Wakeup {
    /// Wakes who waits, or will.
    pub fn ring(&self) {
        *self.rung.lock() = true;
        self.wake.notify_all();
    }

    /// Returns whether it was rung since the last wait has ended.
    #[must_use]
    pub fn is_rung(&self) -> bool {
        *self.rung.lock()
    }

    /// Waits until it is rung or, if there is such a time, for `limit`.
    pub fn wait(&self, limit: Option<Duration>) {
        let mut rung = self.rung.lock();
        if !*rung {
            match limit {
                Some(limit) => self.wake.wait_for(&mut rung, limit),
                None => self.wake.wait(&mut rung),
            }
        }
        *rung = false;
    }
}
