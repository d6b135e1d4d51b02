//! Wakes the thread that moves memory.

use locks::{Condvar, Mutex, rank};
use std::time::Duration;

/// Signal that memory should move. Any thread may send it without blocking.
#[derive(Debug, Default)]
pub struct Wakeup {
    rung: Mutex<rank::Wakeup, bool>,
    wake: Condvar,
}

impl Wakeup {
    /// Sends the signal. It ends the current wait, or the next one if no thread waits.
    pub fn ring(&self) {
        *self.rung.lock() = true;
        self.wake.notify_all();
    }

    /// Returns true if the signal has been sent since the last wait ended.
    #[must_use]
    pub fn is_rung(&self) -> bool {
        *self.rung.lock()
    }

    /// Waits for the signal, for at most `limit` if it is given.
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
