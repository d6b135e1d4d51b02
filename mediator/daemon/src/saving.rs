//! Saves a virtual machine's vGPU to a byte stream, and restores a vGPU from such a stream.
//!
//! The stream passes in chunks through an unnamed file, so that neither the VM nor other changes wait for the client of
//! the admin API. The VMM waits while its VM is saved to this file. A restored vGPU is created on the same card as the
//! current one, and replaces it after the whole stream has been read and checked. On any failure, the virtual machine
//! continues unchanged.

use std::time::Instant;

use admin_socket::{Spool, Spooled};
use api::EventKind;
use events::NewEvent;
use vgpu::{Coming, MediatedVm};

use super::backend::{Awaiting, Built};
use super::moving::{MIB, Plan, REST_LIMIT, STILL_LIMIT};
use super::{Daemon, DaemonError};

/// Maximum overhead of a stream, as a divisor of the VM's memory size.
const SPOOL_PART: u64 = 64;
/// Maximum size of a stream excluding the VM's memory, in bytes. Saved page tables and channel states are smaller.
const SPOOL_HEAD: u64 = 256 * MIB;

impl Daemon {
    /// Saves a virtual machine's vGPU, and passes the bytes to `out` in order. Returns an error if the vGPU cannot be
    /// saved, or if `out` fails. In both cases, the virtual machine continues.
    pub(crate) fn save_vm(
        &self,
        name: &str,
        out: impl FnMut(Vec<u8>) -> Result<(), String>,
    ) -> Result<(), DaemonError> {
        let saved = self.save_to(name, out);
        match &saved {
            Ok(mib) => self.note_saved(EventKind::Saved, name, format!("saved, with {mib} MiB of memory")),
            Err(error) => self.note_saved(EventKind::SaveFailed, name, error.to_string()),
        }
        saved.map(drop)
    }

    /// Logs an event about a virtual machine, with its card. Does nothing if the virtual machine does not exist.
    fn note_saved(&self, kind: EventKind, name: &str, text: String) {
        let card = self.state.lock().vms.get(name).map(|entry| entry.spec.card.clone());
        card.into_iter().for_each(|card| self.events.add(NewEvent::vm(kind, name, &*text).on(&card)));
    }

    /// Saves a virtual machine's vGPU, and passes the bytes to `out` in order. Returns the size of its memory in MiB.
    fn save_to(&self, name: &str, mut out: impl FnMut(Vec<u8>) -> Result<(), String>) -> Result<u64, DaemonError> {
        let no = |why: &dyn std::fmt::Display| DaemonError::NotSaved { vm: name.to_owned(), why: why.to_string() };
        let (mut spooled, mib) = {
            let _one_at_a_time = self.changing.lock();
            self.save_here(name, &no)?
        };
        loop {
            let bytes = spooled.next_piece().map_err(|why| no(&why))?;
            if bytes.is_empty() {
                return Ok(mib);
            }
            out(bytes).map_err(|why| no(&why))?;
        }
    }

    /// Saves a vGPU to a temporary file of this process. Returns the file, and the memory size in MiB. The caller must
    /// hold `changing`.
    fn save_here(
        &self,
        name: &str,
        no: &dyn Fn(&dyn std::fmt::Display) -> DaemonError,
    ) -> Result<(Spooled, u64), DaemonError> {
        let Plan { running, .. } = self.plan_at_home(name, no)?;
        let vm = running.backend.mediated().ok_or_else(|| no(&"its device is not a mediated device"))?;
        vm.check_movable().map_err(|error| no(&error))?;
        let mut spool = self.spool(vm).map_err(|why| no(&why))?;
        let began = Instant::now();
        running.park();
        let rest = running.rested(Some(began + REST_LIMIT)).map_err(|why| {
            running.go_on_later(name);
            no(&why)
        })?;
        let saved = vm.save_all(STILL_LIMIT).map_err(|error| no(&error)).and_then(|mut saving: vgpu::Saving| {
            while let Some(bytes) = saving.next_bytes().map_err(|error| no(&error))? {
                spool.write(&bytes).map_err(|why| no(&why))?;
            }
            Ok(saving.memory_bytes())
        });
        running.go_on(name, rest)?;
        let bytes = saved?;
        tracing::info!(vm = name, mib = bytes / MIB, waited_ms = began.elapsed().as_millis(), "the VM was saved");
        Ok((spool.rewind().map_err(|why| no(&why))?, bytes.div_ceil(MIB)))
    }

    /// Creates a temporary file whose size limit suffices for a virtual machine.
    fn spool(&self, vm: &MediatedVm) -> Result<Spool, String> {
        let bytes = vm.origin().vram_bytes;
        let most = bytes.saturating_add(bytes / SPOOL_PART).saturating_add(SPOOL_HEAD);
        Spool::new(self.spec.state_dir.as_deref(), most)
    }

    /// Restores a virtual machine's vGPU from the chunks that `next` returns in order; an empty chunk ends the stream.
    /// Returns an error if the stream is not a saved virtual machine that can run on this card, or if `next` fails. In
    /// this case, the virtual machine continues unchanged.
    pub(crate) fn restore_vm(
        &self,
        name: &str,
        next: impl FnMut() -> Result<Vec<u8>, String>,
    ) -> Result<api::Restored, DaemonError> {
        let restored = self.restore_from(name, next);
        match &restored {
            Ok(api::Restored { memory_mib, pause_ms, .. }) => {
                let text =
                    format!("continues from a saved VM with {memory_mib} MiB of memory, waited for {pause_ms} ms");
                self.note_saved(EventKind::Restored, name, text);
            }
            Err(error) => self.note_saved(EventKind::RestoreFailed, name, error.to_string()),
        }
        restored
    }

    fn restore_from(
        &self,
        name: &str,
        mut next: impl FnMut() -> Result<Vec<u8>, String>,
    ) -> Result<api::Restored, DaemonError> {
        let no = |why: &dyn std::fmt::Display| DaemonError::NotRestored { vm: name.to_owned(), why: why.to_string() };
        // Read the whole stream first, so that no VM waits for the sender.
        let mut spool = {
            let Plan { running, .. } = self.plan_at_home(name, &no)?;
            let vm = running.backend.mediated().ok_or_else(|| no(&"its device is not a mediated device"))?;
            self.spool(vm).map_err(|why| no(&why))?
        };
        loop {
            let bytes = next().map_err(|why| no(&why))?;
            if bytes.is_empty() {
                break;
            }
            spool.write(&bytes).map_err(|why| no(&why))?;
        }
        let mut spooled = spool.rewind().map_err(|why| no(&why))?;
        let _one_at_a_time = self.changing.lock();
        let plan = self.plan_at_home(name, &no)?;
        let Plan { running, to, spec, .. } = &plan;
        let here = running.backend.mediated().ok_or_else(|| no(&"its device is not a mediated device"))?;
        here.check_movable().map_err(|error| no(&error))?;
        let host = to.backend.mediated().ok_or_else(|| no(&"its card is out of service"))?;
        let vram_bytes = host.lock().vram().chunks.vm_bytes(here.id()).ok_or_else(|| no(&"it has no memory"))?;
        let spec = {
            let ram = self.state.lock().ram(spec, &to.spec);
            let mut spec = spec.clone();
            spec.memory.ram = ram;
            spec
        };
        let Awaiting { device, vm, settings } =
            to.backend.await_vm(&spec, vram_bytes, &running.link).map_err(|error| {
                no(&format_args!("the card needs enough memory for both the current and the restored vGPU: {error}"))
            })?;
        let come = (|| {
            vm.await_arrival().map_err(|error| no(&error))?;
            let mut coming = Coming::new(&vm, &settings).map_err(|error| no(&error))?;
            loop {
                let bytes = spooled.next_piece().map_err(|why| no(&why))?;
                if bytes.is_empty() {
                    return Ok(coming);
                }
                coming.feed(&bytes).map_err(|error| no(&error))?;
            }
        })();
        // The stream is complete. The VMM waits from here on.
        let paused = Instant::now();
        let taken = come.and_then(|coming| {
            running.park();
            let rest = running.rested(Some(paused + REST_LIMIT)).map_err(|why| {
                running.go_on_later(name);
                no(&why)
            })?;
            let bytes = coming.memory_bytes();
            match coming.take_place(here, STILL_LIMIT) {
                Ok(left) => Ok((bytes, rest, left)),
                Err(error) => {
                    running.go_on(name, rest)?;
                    Err(no(&error))
                }
            }
        });
        let (bytes, rest, left) = taken.inspect_err(|_| {
            if let Err(error) = vm.release() {
                tracing::error!(vm = name, %error, "the card keeps resources of a VM whose move failed");
            }
        })?;
        self.goes_on(name, running, rest, &plan.spec, Built { device, backend: vm })?;
        let waited = paused.elapsed();
        // Release the previous vGPU after the VM has resumed, so that the VM does not wait for the scrub.
        drop(left);
        self.keep()?;
        tracing::info!(
            vm = name,
            mib = bytes / MIB,
            waited_ms = waited.as_millis(),
            "the VM continues from the saved state"
        );
        Ok(api::Restored {
            vm: name.to_owned(),
            card: plan.spec.card.clone(),
            memory_mib: bytes.div_ceil(MIB),
            pause_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
        })
    }

    /// Returns a plan to recreate a running virtual machine on its own card, or the reason why this is impossible.
    fn plan_at_home(
        &self,
        name: &str,
        no: &dyn Fn(&dyn std::fmt::Display) -> DaemonError,
    ) -> Result<Plan<'_>, DaemonError> {
        let card = {
            let state = self.state.lock();
            let entry = state.vms.get(name).ok_or_else(|| DaemonError::NoVm(name.to_owned()))?;
            if entry.spec.xen_domain.is_some() {
                return Err(no(&"it is a Xen domain, whose requests cannot be suspended"));
            }
            entry.spec.card.clone()
        };
        self.plan_move(name, &card)
    }
}
