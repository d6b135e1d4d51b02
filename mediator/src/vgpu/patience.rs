//! What a guest's CPU writes to VRAM that there is no memory for waits for it, as work does, but not for as long: the VM's
//! CPUs stand still until it is served.

use std::time::{Duration, Instant};

/// How long one write waits at most.
// TIMEOUT: QEMU gives up on a vfio-user device that does not answer for 5 s.
const LIMIT: Duration = Duration::from_secs(1);
/// After a write that has waited in vain, others do not wait for so many times as long: a guest that fills memory writes
/// eight bytes at a time.
const REST: u32 = 10;
/// Time between two tries.
pub(super) const RETRY: Duration = Duration::from_millis(1);

/// What a VM's writes that cannot be done wait for.
#[derive(Debug, Default)]
pub(super) struct Patience {
    /// How long the operator lets work wait.
    limit: Duration,
    /// The write that is being served can be done again.
    again: bool,
    /// It found no memory, and nothing of it counts as denied.
    lacking: bool,
    /// When the write began to wait.
    since: Option<Instant>,
    /// When one has waited in vain.
    gave_up: Option<Instant>,
}

impl Patience {
    pub(super) fn new(limit: Duration) -> Self {
        Self { limit: limit.min(LIMIT), ..Self::default() }
    }

    /// A write is about to be served. `repeatable`: doing it twice does what doing it once does.
    pub(super) fn begin(&mut self, repeatable: bool) {
        let waits = self.since.is_none_or(|since| since.elapsed() < self.limit);
        let rested = self.gave_up.is_none_or(|at| at.elapsed() >= self.limit * REST);
        self.again = repeatable && waits && rested && !self.limit.is_zero();
        self.lacking = false;
    }

    /// The write finds no memory. Whether it is served again later; else it is lost.
    pub(super) fn lacks(&mut self) -> bool {
        self.lacking = self.again;
        if self.again {
            self.since.get_or_insert_with(Instant::now);
        } else if self.since.is_some() {
            self.gave_up = Some(Instant::now());
        }
        self.again
    }

    /// The write was served; whether it is to be again after [`RETRY`].
    pub(super) fn end(&mut self) -> bool {
        self.again = false;
        if !self.lacking {
            self.since = None;
        }
        self.lacking
    }

    /// Whether the write that is being served has not waited before.
    pub(super) fn is_first(&self) -> bool {
        self.since.is_none()
    }
}
