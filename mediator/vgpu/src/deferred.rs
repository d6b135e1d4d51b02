//! A doorbell that is submitted after the answer to its write, so that the guest's CPU waits for a shorter time.
//!
//! 1. A write rings a doorbell. [`Core::defer_doorbell`] leaves the doorbell in [`Core::deferred`], and the write
//!    returns [`vmm_glue::Ack::Deferred`].
//! 2. The server sends the answer and calls [`vmm_glue::Device::complete`] before any other method of the device.
//! 3. [`Core::complete_deferred`] submits the doorbell. Taking the VM's lock never does this.
//!
//! Between steps 1 and 3, other threads may take the VM's lock:
//! - The thread that polls doorbells under mapped apertures calls [`Core::complete_deferred`] first: the guest may have
//!   rung such a doorbell since the answer.
//! - A thread that saves or moves the VM also calls this function. The server has completed the write before the VM is
//!   handed to such a thread, so there is no deferred doorbell, and [`Core::write_down`] refuses a VM that still has
//!   one.
//! - The card's interrupt thread, the mover and the operator's threads do not submit the doorbell: their work is not an
//!   access of the guest. The doorbell names a virtual channel, which these threads do not change.
//! - [`Core::clean`] drops the doorbell together with its channel.

use super::backend::RungDoorbell;
use super::device::{Core, MediatedDevice, MediatedVm};
use card_manager::mailbox::MailboxGuard;

impl Core {
    /// Defers the doorbell that the current write rang, if it may be submitted after the answer. Returns true if the
    /// write must be completed later.
    pub(super) fn defer_doorbell(&mut self) -> bool {
        // Pages that must move wait for the VM's work, so the doorbell is submitted first.
        if self.backend.moves_wait() {
            return false;
        }
        let Some(doorbell) = self.backend.take_doorbell() else { return false };
        self.deferred = Some(doorbell);
        true
    }

    /// Submits the doorbell of an answered write, if it is still outstanding.
    pub(super) fn complete_deferred(&mut self) {
        let Some(RungDoorbell { channel, gp_put }) = self.deferred.take() else { return };
        self.backend.ring_shown(channel, gp_put);
        self.finish_access();
    }
}

impl MediatedVm {
    /// Submits the doorbell of an answered write, if it is still outstanding, and handles queued events.
    pub(super) fn complete_deferred(&self) {
        self.core().complete_deferred();
    }
}

impl MediatedDevice {
    /// Takes the VM's lock for a call of the server. The server has completed the last deferred write.
    #[track_caller]
    pub(super) fn enter(&self) -> MailboxGuard<'_, Core> {
        let core = self.vm.core();
        // PANIC: only a bug in the server can cause it, and only in a debug build.
        debug_assert_eq!(core.deferred, None, "a call overtakes a deferred doorbell");
        core
    }
}
