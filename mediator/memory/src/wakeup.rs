//! Wakes the thread that moves memory.

use locks::{Condvar, Mutex, rank};
use std::time::Duration;

/// Any thread may signal it when memory should move; signalling does not block.
#[derive(Debug, Default)]
pub struct Wakeup {
    rung: Mutex<rank::Wakeup, bool>,
    wake: Condvar,
}

impl Wakeup {
    /// Wakes the waiter, now or at its next wait.
    pub fn ring(&self) {
        *self.rung.lock() = true;
        self.wake.notify_all();
    }

    /// Returns whether it was signalled since the end of the last wait.
    #[must_use]
    pub fn is_rung(&self) -> bool {
        *self.rung.lock()
    }

    /// Waits until it is signalled or, if set, for `limit`.
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
