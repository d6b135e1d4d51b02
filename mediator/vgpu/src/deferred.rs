//! A doorbell that is submitted after the response to its write, so that the guest's CPU waits less.
//!
//! 1. A write rings a doorbell. [`Core::defer_doorbell`] stores it in [`Core::deferred`], and the write returns
//!    [`vmm_glue::Ack::Deferred`].
//! 2. The server sends the response, and calls [`vmm_glue::Device::complete`] before any other method of the device.
//! 2. The server sends the response, and calls [`vmm_glue::Device::complete`] before any other method of the device.
//!
//! Other threads may lock the VM between steps 1 and 3:
//! - The thread that polls doorbells under mapped apertures calls [`Core::complete_deferred`] first, because the guest
//!   may have rung such a doorbell after the response.
//! - A thread that saves or moves the VM also calls this function. The server completes the write before the VM is
//!   handed to such a thread, so no deferred doorbell exists. [`Core::write_down`] refuses a VM with one.
//! - The card's interrupt thread, the mover and the operator's threads do not submit the doorbell, because their work
//!   is not an access of the guest. The doorbell refers to a virtual channel, which these threads do not change.
//! - [`Core::clean`] drops the doorbell together with its channel.

use super::backend::RungDoorbell;
use super::device::{Core, MediatedDevice, MediatedVm};
use card_manager::mailbox::MailboxGuard;

impl Core {
    /// Defers the doorbell that the current write has rung, if it may be submitted after the response. Returns true if
    /// the write must be completed later.
    pub(super) fn defer_doorbell(&mut self) -> bool {
        // Pages that must move wait for the VM's work, so submit the doorbell first.
        if self.backend.moves_wait() {
            return false;
        }
        let Some(doorbell) = self.backend.take_doorbell() else { return false };
        self.deferred = Some(doorbell);
        true
    }

    /// Submits the doorbell of an acknowledged write, if it was not submitted yet.
    pub(super) fn complete_deferred(&mut self) {
        let Some(RungDoorbell { channel, gp_put }) = self.deferred.take() else { return };
        self.backend.ring_shown(channel, gp_put);
        self.finish_access();
    }
}

impl MediatedVm {
    /// Submits the doorbell of an acknowledged write, if it was not submitted yet, and handles queued events.
    pub(super) fn complete_deferred(&self) {
        self.core().complete_deferred();
    }
}

impl MediatedDevice {
    /// Locks the VM for a call from the server. The server has completed the last deferred write.
    #[track_caller]
    pub(super) fn enter(&self) -> MailboxGuard<'_, Core> {
        let core = self.vm.core();
        // PANIC: only a bug in the server can trigger this, and only in a debug build.
        debug_assert_eq!(core.deferred, None, "a call overtakes a deferred doorbell");
        core
    }
}
