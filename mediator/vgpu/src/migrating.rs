//! Migration controlled by the client, which saves or loads the VM's state through vfio-user messages.
//!
//! The saved state is the stream of a saved VM (`saving`). The protocol requires that a state be loaded in place:
//! starting to load drops the VM's previous state, and after an invalid state, the device fails until the client resets
//! it. Therefore, the card never needs memory for two copies.

use super::device::{Core, MediatedDevice, MediatedVm, Settings};
use super::saving::{Coming, Phase, Reading, Saving};
use card_manager::ManagerError;
use std::ops::Range;
use std::time::Duration;
use vmm_glue::{Migration, MigrationError};

/// Time limit for the VM's work to leave the engines and for operations in progress to end.
// TIMEOUT: same as for moving a VM. Only the VM's client waits, and QEMU times out a request after 5 s.
const STILL_LIMIT: Duration = Duration::from_secs(2);

fn refused(error: ManagerError) -> MigrationError {
    match error {
        ManagerError::Saved(_) => MigrationError::invalid(error),
        other => MigrationError::failed(other),
    }
}

/// Returns the error for a request that the device cannot handle in its state. The server makes no such requests.
fn misplaced() -> MigrationError {
    MigrationError::failed("the device cannot handle this request in its current state")
}

impl Core {
    /// Starts or stops logging the guest RAM that the VM's work on the card may write.
    pub(super) fn log_writes(&mut self, on: bool) {
        self.client.logs = on;
        self.backend.log_ram(on);
    }
}

impl MediatedVm {
    /// Resets the VM, whose work is stopped, to its initial state. The client stays connected and the VM stays stopped.
    fn forget_all(&self, settings: &Settings) -> Result<(), ManagerError> {
        {
            let core = &mut *self.core();
            core.clean();
            core.backend.forget_arrival(settings.paravirtual.as_ref());
        }
        self.host().wait_departed(self.vm);
        let quiet = {
            let core = &mut *self.core();
            core.backend.end_quiesce();
            core.backend.is_quiet()
        };
        if !quiet {
            return Err(ManagerError::NotStill);
        }
        self.host().wipe_vm(self.vm, quiet)
    }
}

impl MediatedDevice {
    /// Returns the phase of the migration, or `None` if none has started.
    fn phase(&mut self) -> Option<&mut Phase> {
        self.migration_state.downcast_mut()
    }

    fn take_phase(&mut self) -> Phase {
        self.phase().map(std::mem::take).unwrap_or_default()
    }

    fn be(&mut self, phase: Phase) {
        self.migration_state = Box::new(phase);
    }

    /// Ends the migration. Called once the client has reset the device or disconnected, and the VM has been cleaned.
    /// Returns true if the VM still has memory from an incomplete or invalid state.
    #[must_use]
    pub(super) fn end_migration(&mut self) -> bool {
        let phase = self.take_phase();
        let core = &mut *self.enter();
        core.client.stopped = false;
        let half = matches!(phase, Phase::Loading(..) | Phase::Failed(_));
        if half {
            core.backend.forget_arrival(self.settings.paravirtual.as_ref());
            self.vm.host().lock().travels(self.vm.vm, false);
        }
        half
    }
}

impl Migration for MediatedDevice {
    fn stop(&mut self) -> Result<(), MigrationError> {
        self.enter().client.stopped = true;
        match self.vm.host().halt(self.vm.vm, STILL_LIMIT) {
            Ok(halted) => {
                self.be(Phase::Stopped(halted));
                Ok(())
            }
            Err(error) => {
                self.enter().client.stopped = false;
                Err(refused(error))
            }
        }
    }

    fn start(&mut self) {
        {
            let core = &mut *self.enter();
            core.client.stopped = false;
            if core.client.logs {
                // From now on, also log pages that were already reported.
                core.backend.log_ram(true);
            }
        }
        self.be(Phase::Running);
        self.vm.go_on();
        self.vm.host().look_again();
    }

    fn begin_saving(&mut self) -> Result<(), MigrationError> {
        let Phase::Stopped(halted) = self.take_phase() else { return Err(misplaced()) };
        match self.vm.head(&halted, STILL_LIMIT) {
            Ok(head) => {
                let overlay = self.enter().backend.remap().overlay();
                self.be(Phase::Saving(Box::new(Reading::new(Saving::for_halted(halted, &head, overlay)))));
                Ok(())
            }
            Err(error) => {
                self.be(Phase::Stopped(halted));
                Err(refused(error))
            }
        }
    }

    fn save(&mut self, data: &mut [u8]) -> Result<usize, MigrationError> {
        let Some(Phase::Saving(reading)) = self.phase() else { return Err(misplaced()) };
        reading.read(data).map_err(refused)
    }

    fn end_saving(&mut self) {
        let phase = match self.take_phase() {
            Phase::Saving(reading) => Phase::Stopped(reading.into_halted()),
            other => other,
        };
        self.be(phase);
    }

    fn begin_loading(&mut self) -> Result<(), MigrationError> {
        let Phase::Stopped(halted) = self.take_phase() else { return Err(misplaced()) };
        let Self { vm, settings, .. } = self;
        let begin = || {
            vm.forget_all(settings)?;
            vm.await_arrival()?;
            Coming::new(vm, settings)
        };
        match begin() {
            Ok(coming) => {
                self.be(Phase::Loading(halted, Box::new(coming)));
                Ok(())
            }
            Err(error) => {
                self.be(Phase::Failed(Some(halted)));
                Err(refused(error))
            }
        }
    }

    fn load(&mut self, data: &[u8]) -> Result<(), MigrationError> {
        let Some(Phase::Loading(_, coming)) = self.phase() else { return Err(misplaced()) };
        coming.feed(data).map_err(refused)
    }

    fn end_loading(&mut self) -> Result<(), MigrationError> {
        let Phase::Loading(halted, coming) = self.take_phase() else { return Err(misplaced()) };
        let become_one = || {
            let come = coming.finish(halted.strikes())?;
            // The client may lend different memory than before.
            self.vm.await_arrival()?;
            self.vm.become_one(come, &self.settings)
        };
        match become_one() {
            Ok(()) => {
                self.be(Phase::Stopped(halted));
                Ok(())
            }
            Err(error) => {
                self.be(Phase::Failed(Some(halted)));
                Err(refused(error))
            }
        }
    }

    fn log_writes(&mut self, on: bool) {
        self.enter().log_writes(on);
    }

    fn take_written(&mut self, range: Range<u64>, each: &mut dyn FnMut(Range<u64>)) {
        let runs = matches!(self.phase(), None | Some(Phase::Running));
        let written = self.enter().backend.take_written(range, runs);
        written.into_iter().for_each(each);
    }
}
