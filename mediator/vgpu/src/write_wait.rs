//! Writes of a guest's CPU to VRAM that there is no memory for wait for it, as work does: the VM's CPUs stand still until
//! the mover has found some, or has looked for it in vain for long enough.
//!
//! VMMs give up on a device that does not answer for too long (QEMU after 5 s). That is no reason to lose a write for which
//! memory is being found: the mover needs a small part of that, unless the host does not let it run.

use super::pending::Wait;
use owner::{HostState, Looks};
use std::time::Duration;
use vram::VmId;

/// Vain looks of the mover, as a time, that one write waits for at most.
const LIMIT: Duration = Duration::from_secs(1);
/// After a write that has waited in vain, others do not wait for so many times as long, or until some memory was found: a
/// guest that fills memory writes eight bytes at a time.
const REST: u32 = 10;
/// Time between two tries.
pub(crate) const RETRY: Duration = Duration::from_millis(1);

/// State of a VM's writes that cannot be done yet.
#[derive(Debug, Default)]
pub(crate) struct WriteWait {
    /// Time for which the operator lets work wait.
    limit: Duration,
    /// The write that waits.
    wait: Option<Wait>,
    /// Looks that the mover had made when one had waited in vain.
    gave_up: Option<Looks>,
}

impl WriteWait {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit: limit.min(LIMIT), ..Self::default() }
    }

    /// A write finds no memory. Whether it is to be served again after [`RETRY`]; else it is lost.
    pub(crate) fn waits(&mut self, state: &HostState, vm: VmId) -> bool {
        let looks = state.vram().looks(vm);
        let rests = |at: &Looks| at.useful == looks.useful && !state.vram().is_vain(vm, *at, self.limit * REST);
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

    /// A write was done, or is lost.
    pub(crate) fn end(&mut self) {
        self.wait = None;
    }

    /// Returns whether the write that is being served has not waited before.
    pub(crate) fn is_first(&self) -> bool {
        self.wait.is_none()
    }
}
