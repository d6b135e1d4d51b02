//! Guest CPU writes to VRAM that wait for memory. The VM's CPUs stop until the mover has found memory, or until too
//! many of its scans have failed.
//!
//! VMMs give up on an unresponsive device (QEMU after 5 s), so a write waits for at most `MAX_WAIT`. Within this limit,
//! no write is lost while memory is being freed. The mover needs only a fraction of this time, unless the host does not
//! schedule it.

use super::pending::Wait;
use card_manager::{CardState, Looks};
use std::time::Duration;
use vram::TenantId;

/// Maximum time that a write may wait while the mover's scans fail.
const MAX_WAIT: Duration = Duration::from_secs(1);
/// Time after a failed wait during which no write waits unless memory is found, as a multiple of the wait limit.
/// Without this pause, a guest that fills memory could wait for every eight bytes.
const BACKOFF_FACTOR: u32 = 10;
/// Interval between attempts of a waiting write.
pub(crate) const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// State of a VM's blocked writes.
#[derive(Debug, Default)]
pub(crate) struct WriteWait {
    /// Maximum time that a write may wait: the operator's limit for work, but at most [`MAX_WAIT`].
    limit: Duration,
    /// Wait of the current write, if it waits.
    wait: Option<Wait>,
    /// Counts of the mover's scans when a write last gave up.
    gave_up: Option<Looks>,
}

impl WriteWait {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit: limit.min(MAX_WAIT), ..Self::default() }
    }

    /// Starts or continues the wait of a write for which no memory is free. Returns true if the caller must retry the
    /// write after [`RETRY_INTERVAL`], or false if the write is lost.
    pub(crate) fn waits(&mut self, state: &CardState, vm: TenantId) -> bool {
        let looks = state.vram().looks(vm);
        let rests =
            |at: &Looks| at.useful == looks.useful && !state.vram().is_vain(vm, *at, self.limit * BACKOFF_FACTOR);
        if self.wait.is_none() && self.gave_up.as_ref().is_some_and(rests) {
            return false;
        }
        let wait = *self.wait.get_or_insert_with(|| Wait::begin(state, vm));
        let over = wait.is_over(state, vm, self.limit);
        if over {
            (self.wait, self.gave_up) = (None, Some(looks));
        }
        !over
    }

    /// Ends the wait of a write that was executed or lost.
    pub(crate) fn end(&mut self) {
        self.wait = None;
    }

    /// Returns true if the current write has not waited yet.
    pub(crate) fn is_first(&self) -> bool {
        self.wait.is_none()
    }
}
