//! Doorbells that are submitted after the reply to their write, to shorten the wait of the guest's CPU.
//!
//! 1. A write rings a doorbell. [`Core::defer_doorbell`] stores it in [`Core::deferred`], and the write returns
//!    [`vmm_glue::Ack::Deferred`].
//! 2. The server sends the reply, and calls [`vmm_glue::Device::complete`] before any other method of the device.
//! 3. [`Core::complete_deferred`] submits the doorbell. Locking the VM does not.
//!
//! Other threads may lock the VM between steps 1 and 3:
//! - The thread that polls doorbells under mapped apertures calls [`Core::complete_deferred`] first, because the guest
//!   may have rung the doorbell that this thread finds after the reply.
//! - A thread that saves or moves the VM also calls this function. The server completes the write before it hands the
//!   VM to such a thread, so there is no deferred doorbell at that time. [`Core::write_down`] rejects a VM that has
//!   one.
//! - The card's interrupt thread, the mover and the operator's threads do not submit the doorbell, because they do not
//!   act on behalf of the guest. The doorbell refers to a virtual channel, which these threads do not change.
//! - [`Core::clean`] drops the doorbell together with its channel.

use super::backend::RungDoorbell;
use super::device::{Core, MediatedDevice, MediatedVm};
use card_manager::mailbox::MailboxGuard;

impl Core {
    /// Defers the doorbell that the current write has rung, if it may be submitted after the reply. In this case,
    /// returns true, and the caller must complete the write later.
    pub(super) fn defer_doorbell(&mut self) -> bool {
        // Moves of pages wait for the VM's work, so do not defer its doorbell.
        if self.backend.moves_wait() {
            return false;
        }
        let Some(doorbell) = self.backend.take_doorbell() else { return false };
        self.deferred = Some(doorbell);
        true
    }

    /// Submits the deferred doorbell, unless it was already submitted.
    pub(super) fn complete_deferred(&mut self) {
        let Some(RungDoorbell { channel, gp_put }) = self.deferred.take() else { return };
        self.backend.ring_shown(channel, gp_put);
        self.finish_access();
    }
}

impl MediatedVm {
    /// Submits the deferred doorbell, unless it was already submitted, and handles queued events.
    pub(super) fn complete_deferred(&self) {
        self.core().complete_deferred();
    }
}

impl MediatedDevice {
    /// Locks the VM for a call from the server. The server has already completed the last deferred write.
    #[track_caller]
    pub(super) fn enter(&self) -> MailboxGuard<'_, Core> {
        let core = self.vm.core();
        // PANIC: only a bug in the server can cause this, and only debug builds check it.
        debug_assert_eq!(core.deferred, None, "a call overtook a deferred doorbell");
        core
    }
}
