//! Moves a virtual machine to another card while its guest runs.
//!
//! While the guest runs, the virtual machine is created on the other card, and its memory is evicted from the current
//! card. Then the VMM waits: `vgpu` copies the guest's state, and the connection continues with the device on the other
//! card. If any step before that fails, the virtual machine resumes on its current card.

use std::sync::Arc;
use std::time::{Duration, Instant};

use config::VmSpec;
use events::author;

use super::backend::{Awaiting, Built};
use super::draining::Arrival;
use super::vm::{Rest, Running};
use super::{Card, Daemon, DaemonError, Life, memory};

/// Time limit for quiescing a virtual machine's VMM connection.
// TIMEOUT: covers an incomplete request, or a write that waits up to a second for memory.
pub(super) const REST_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for the VM's work to leave the engines. Work that is still running is then treated as hung.
// TIMEOUT: twice the limit of an upgrade, because only this VM waits. Compute work either ends within milliseconds, or
// takes longer than guest drivers wait.
pub(super) const STILL_LIMIT: Duration = Duration::from_secs(2);
/// Bytes per MiB.
pub(super) const MIB: u64 = 1 << 20;

/// A planned move.
pub(super) struct Plan<'a> {
    /// The running virtual machine.
    pub(super) running: Arc<Running>,
    from: &'a Card,
    pub(super) to: &'a Card,
    /// Settings of the virtual machine on the target card.
    pub(super) spec: VmSpec,
}

impl Daemon {
    /// Live-migrates a virtual machine to another card if the revision of the settings is still `expected`.
    ///
    /// # Errors
    /// Returns an error, and leaves the virtual machine on its current card, if the revision differs, if the virtual
    /// machine or the card is not suitable, or if the move fails.
    pub fn move_vm(&self, name: &str, card: &str, expected: Option<&str>) -> Result<api::Moved, DaemonError> {
        self.move_if(name, Some(card), expected)
    }

    /// Moves a virtual machine to another card, after a successful [`Self::may_move`]. If the virtual machine or its
    /// card has failed, recreates the virtual machine on the other card, because its VMM has lost its device. The
    /// caller must hold `changing`. Returns the same errors as [`Self::move_vm`].
    pub(crate) fn move_vm_now(&self, name: &str, card: &str) -> Result<api::Moved, DaemonError> {
        let began = Instant::now();
        // The kill count starts at zero on the next card, so log this card's kills first.
        author::acting(author::daemon(), || self.observe());
        let plan = self.plan_move(name, card)?;
        if let Some(vm) = plan.running.backend.cuda() {
            return self.move_programs(name, card, vm);
        }
        let (from, to) = (plan.from.spec.name.clone(), plan.to.spec.name.clone());
        let dead = plan.from.backend.status().failed.is_some() || plan.running.seen.failed.lock().is_some();
        let (pause, parts, bytes) = if dead {
            self.place_anew(name, plan.spec).map(|()| (Duration::ZERO, api::PauseParts::default(), 0))?
        } else {
            self.carry_over(name, &plan)?
        };
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Ok(api::Moved {
            vm: name.to_owned(),
            from,
            to,
            pause_ms: ms(pause),
            pause: parts,
            memory_mib: bytes / MIB,
            total_ms: ms(began.elapsed()),
        })
    }

    pub(super) fn plan_move(&self, name: &str, card: &str) -> Result<Plan<'_>, DaemonError> {
        let known = |card: &str| self.cards.get(card).ok_or_else(|| DaemonError::NoCard(card.to_owned()));
        let to = known(card)?;
        let state = self.state.lock();
        let entry = state.vms.get(name).ok_or_else(|| DaemonError::NoVm(name.to_owned()))?;
        let running = match &entry.life {
            Life::Running(running) => Arc::clone(running),
            Life::Starting => return Err(DaemonError::Busy(name.to_owned(), "added")),
            Life::Stopping(_) => return Err(DaemonError::Busy(name.to_owned(), "removed")),
        };
        let from = known(&entry.spec.card)?;
        let spec = VmSpec { card: card.to_owned(), ..entry.spec.clone() };
        Ok(Plan { running, from, to, spec })
    }

    /// Removes a virtual machine that has failed or is on a failed card, and adds it to another card.
    fn place_anew(&self, name: &str, spec: VmSpec) -> Result<(), DaemonError> {
        let to = spec.card.clone();
        self.take_out(name, None)?;
        let added = self.reserve(spec, None, Arrival::New).and_then(|spec| self.fill(&spec));
        added.map(drop).map_err(|error| {
            DaemonError::Failed(format!(
                "VM `{name}` had failed and was removed, but cannot be added to card `{to}`; resolve this and add it again: {error}"
            ))
        })
    }

    /// Moves a virtual machine to another card. Returns the pause duration, its parts, and the number of copied bytes.
    fn carry_over(&self, name: &str, plan: &Plan<'_>) -> Result<(Duration, api::PauseParts, u64), DaemonError> {
        let Plan { running, from, to, spec } = plan;
        let no = |why: &dyn std::fmt::Display| DaemonError::CannotMove {
            vm: name.to_owned(),
            to: to.spec.name.clone(),
            why: why.to_string(),
        };
        let here = running.backend.mediated().ok_or_else(|| no(&"its device is not a mediated device"))?;
        here.check_movable().map_err(|error| no(&error))?;
        let host = from.backend.mediated().ok_or_else(|| no(&"its card is out of service"))?;
        let vram_bytes = host.lock().vram().chunks.vm_bytes(here.id()).ok_or_else(|| no(&"it has no memory"))?;
        let awaiting = {
            let ram = self.state.lock().ram(spec, &to.spec);
            let mut spec = spec.clone();
            spec.memory.ram = ram;
            to.backend.await_vm(&spec, vram_bytes, &running.link).map_err(|error| no(&error))?
        };
        let given_up = |awaiting: Awaiting| {
            let Awaiting { device, vm, .. } = awaiting;
            drop(device);
            host.stays(here.id());
            if let Err(error) = vm.release() {
                tracing::error!(vm = name, %error, "the card keeps resources of a VM whose move failed");
            }
        };
        // This step is slow, and the guest continues to run meanwhile.
        if let Err(error) = awaiting.vm.await_arrival() {
            given_up(awaiting);
            return Err(no(&error));
        }
        host.empty(here.id());
        let ahead = match host.copy_ahead(here.id(), awaiting.vm.host(), awaiting.vm.id()) {
            Ok(bytes) => bytes,
            Err(error) => {
                given_up(awaiting);
                return Err(no(&error));
            }
        };
        let began = Instant::now();
        running.park();
        let rest = match running.rested(Some(began + REST_LIMIT)) {
            Ok(rest) => rest,
            Err(why) => {
                running.go_on_later(name);
                given_up(awaiting);
                return Err(no(&why));
            }
        };
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let rest_us = us(began.elapsed());
        match here.move_to(&awaiting.vm, &awaiting.settings, STILL_LIMIT) {
            Ok(moved) => {
                let Awaiting { device, vm, .. } = awaiting;
                let goes_on = Instant::now();
                self.goes_on(name, running, rest, spec, Built { device, backend: vm })?;
                let (pause, go_on_us) = (began.elapsed(), us(goes_on.elapsed()));
                let vgpu::Parts { still, memory, anew } = moved.parts;
                let bytes = ahead.saturating_add(moved.bytes);
                // No VM waits while the source card scrubs the vacated memory.
                drop(moved);
                let (still_us, memory_us, anew_us) = (us(still), us(memory), us(anew));
                Ok((pause, api::PauseParts { rest_us, still_us, memory_us, anew_us, go_on_us }, bytes))
            }
            Err(error) => {
                given_up(awaiting);
                running.go_on(name, rest)?;
                Err(no(&error))
            }
        }
    }

    /// Resumes a virtual machine with its device on another card.
    pub(super) fn goes_on(
        &self,
        name: &str,
        running: &Running,
        rest: Rest,
        spec: &VmSpec,
        built: Built,
    ) -> Result<(), DaemonError> {
        let moved = running.moved(name, rest, built).inspect_err(|error| {
            *running.seen.failed.lock() = Some(error.to_string());
        })?;
        let mut state = self.state.lock();
        if let Some(card) = self.cards.get(&spec.card) {
            running.link.memory().first_touches().set_limit(memory::touch_limit(&state.ram(spec, &card.spec)));
        }
        let moved = Arc::new(moved);
        if let Some(entry) = state.vms.get_mut(name) {
            entry.spec = spec.clone();
            entry.life = Life::Running(moved);
        }
        state.revision.next();
        Ok(())
    }
}
