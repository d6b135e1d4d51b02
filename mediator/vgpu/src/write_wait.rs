//! Guest CPU writes to VRAM that wait for memory, like work: the VM's CPUs stop until the mover has found memory or has
//! given up after enough scans.
//!
//! VMMs give up on a device that does not answer for too long (QEMU after 5 s). This limit does not lose a write while
//! memory is being freed: the mover needs a small part of that time, unless the host does not run it.

use super::pending::Wait;
use card_manager::{CardState, Looks};
use std::time::Duration;
use vram::TenantId;

/// Maximum time of unsuccessful mover scans that one write waits for.
const MAX_WAIT: Duration = Duration::from_secs(1);
/// After an unsuccessful wait, further writes do not wait for this many times as long, or until memory was found: a
/// guest that fills memory writes eight bytes at a time.
const BACKOFF_FACTOR: u32 = 10;
/// Time between two attempts.
pub(crate) const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// State of a VM's blocked writes.
#[derive(Debug, Default)]
pub(crate) struct WriteWait {
    /// Time for which the operator lets work wait.
    limit: Duration,
    /// The write that waits.
    wait: Option<Wait>,
    /// State of the mover's scans when the last write gave up.
    gave_up: Option<Looks>,
}

impl WriteWait {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit: limit.min(MAX_WAIT), ..Self::default() }
    }

    /// Handles a write that finds no memory. Returns true if the write must be retried after [`RETRY_INTERVAL`];
    /// otherwise it is lost.
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

    /// Ends a write that was executed or is lost.
    pub(crate) fn end(&mut self) {
        self.wait = None;
    }

    /// Returns whether the current write has not waited before.
    pub(crate) fn is_first(&self) -> bool {
        self.wait.is_none()
    }
}
