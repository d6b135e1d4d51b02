//! Reports the sharing of the cards' time, and changes the shares at run time.

use std::collections::BTreeMap;
use std::sync::Arc;

use cuda_control::{Answer, Request};
use sched::{Engine, History, VgpuParams};
use serde_json::{Map, Value};
use vram::TenantId;

use super::vm::Running;
use super::{Card, Daemon, DaemonError, Life, State};
use api::EventKind;
use card_manager::overdue::Overdue;
use card_manager::usage::{SchedulerUsage, TimeView};
use config::VmSpec;
use config::patch::patched;
use events::{NewEvent, changed_in};

/// Nanoseconds per millisecond.
const MS: u64 = 1_000_000;
/// Length of a history interval in ms.
const INTERVAL_MS: u64 = History::INTERVAL_NS / MS;
/// Maximum length of a history in ms.
pub(crate) const HISTORY_MS: u64 = INTERVAL_MS * History::MAX_INTERVALS as u64;
/// Maximum size of a scheduler recording in bytes; sufficient for about 200,000 events.
pub(crate) const RECORD_BYTES: usize = 32 << 20;
/// Maximum size in bytes of a CUDA card's recording, which is sent as one message; sufficient for about 50,000 events.
const CUDA_RECORD_BYTES: usize = 8 << 20;
/// Event text for an operator's release of an object from quarantine.
pub(super) const RELEASED: &str = "released from quarantine, and its strikes are cleared";
/// Default length of the window over which shares are measured, in ms.
pub(crate) const WINDOW_MS: u64 = 1000;

impl Daemon {
    /// Returns a card's time sharing, with the shares received in the last complete window of `window_ms` milliseconds,
    /// rounded up to whole history intervals.
    ///
    /// # Errors
    /// Returns an error if the card does not exist or is passed through, if the window is out of range, or if the owner
    /// of a CUDA card does not respond.
    pub fn scheduler(&self, card: &str, window_ms: u64) -> Result<api::CardScheduler, DaemonError> {
        let window_ms = within("window_ms", window_ms)?;
        // Exclude the current interval, which is incomplete.
        let CardTime { settings, view, names, overdue, killed } =
            self.card_time(card, window_ms * MS + History::INTERVAL_NS)?;
        let mut shown = card_views::scheduler(card, settings, window_ms, &view, &names);
        for vm in &mut shown.vms {
            vm.overdue = overdue.get(&vm.vm).into_iter().flatten().map(show_overdue).collect();
            if let (Some(killed), Some(engine)) = (killed.get(&vm.vm), vm.engines.get_mut(&Engine::Compute)) {
                engine.killed = *killed;
            }
        }
        Ok(shown)
    }

    /// Returns the time sharing of all cards that have a scheduler, except for CUDA cards with unresponsive owners.
    ///
    /// # Errors
    /// Returns an error if the window is out of range.
    pub fn schedulers(&self, window_ms: u64) -> Result<Vec<api::CardScheduler>, DaemonError> {
        let shown = self.cards.keys().map(|card| self.scheduler(card, window_ms));
        shown
            .filter(|shown| {
                !matches!(shown, Err(DaemonError::NoScheduler(_) | DaemonError::Unscheduled(_) | DaemonError::Owner(_)))
            })
            .collect()
    }

    /// Changes a card's scheduler settings. Keys that `patch` omits keep their values. Queued and running work
    /// continues.
    ///
    /// # Errors
    /// Returns an error, and changes nothing, if the card does not exist or is passed through, if a setting is invalid,
    /// or if the owner of a CUDA card rejects the change. Also returns an error if this owner does not respond, or if
    /// the change cannot be saved.
    pub fn set_scheduler(&self, card: &str, patch: &Map<String, Value>) -> Result<api::CardScheduler, DaemonError> {
        self.set_scheduler_if(card, patch, None)
    }

    /// Like [`Self::set_scheduler`], but only if the revision is still `expected`. Returns the same errors as
    /// [`Self::set_scheduler`], and an error if the revision differs.
    pub(crate) fn set_scheduler_if(
        &self,
        card: &str,
        patch: &Map<String, Value>,
        expected: Option<&str>,
    ) -> Result<api::CardScheduler, DaemonError> {
        if let Some(cuda) = self.known(card)?.cuda.as_deref() {
            self.tune_cuda(cuda, patch, &Map::new(), expected)?;
        } else {
            let _one_at_a_time = self.tuning.lock();
            self.tune_card(card, patch, expected)?;
        }
        self.keep()?;
        self.scheduler(card, WINDOW_MS)
    }

    /// Changes a card's scheduler settings. The caller must hold `tuning`.
    pub(super) fn tune_card(
        &self,
        card: &str,
        patch: &Map<String, Value>,
        expected: Option<&str>,
    ) -> Result<(), DaemonError> {
        let settings = self.card_time(card, 0)?.settings;
        let wrong = |what| DaemonError::Setting { of: format!("card `{card}`"), what };
        let config = patched(&settings, patch).map_err(wrong)?;
        config.check().map_err(|error| wrong(error.to_string()))?;
        {
            let mut state = self.state.lock();
            state.expect(expected)?;
            state.revision.next();
            if let Some(tuning) = state.tunings.get_mut(card) {
                tuning.scheduler = config;
            }
        }
        self.known(card)?.backend.set_scheduler(config);
        tracing::info!(card, policy = config.policy.name(), "the card's scheduler settings have changed");
        self.events.add(NewEvent::card(EventKind::Changed, card, changed_in("scheduler", patch)));
        Ok(())
    }

    /// Returns the card time that virtual machines and tenants used in the last `since_ms` milliseconds. Returns an
    /// error if the card does not exist or is passed through, if `since_ms` is out of range, or if the owner of a CUDA
    /// card does not respond.
    pub(crate) fn scheduler_history(&self, card: &str, since_ms: u64) -> Result<api::SchedulerHistory, DaemonError> {
        let since_ms = within("since_ms", since_ms)?;
        let CardTime { view, names, .. } = self.card_time(card, since_ms * MS)?;
        Ok(card_views::history(card, since_ms, &view, &names))
    }

    /// Starts recording the inputs and decisions of a card's scheduler. The recording runs until it is
    /// [stopped](SchedulerRecord::end) or dropped, or reaches its maximum size. Returns an error if the card does not
    /// exist, is passed through or unused, or is already being recorded, or if the owner of a CUDA card does not
    /// respond.
    pub(crate) fn record_scheduler(self: &Arc<Self>, card: &str) -> Result<SchedulerRecord, DaemonError> {
        if let Some(cuda) = self.known(card)?.cuda.as_deref() {
            match cuda.change()?.ask(&format!("card `{card}`"), Request::Record(CUDA_RECORD_BYTES)) {
                Err(DaemonError::Setting { .. }) => return Err(DaemonError::NoRecord(card.to_owned())),
                begun => drop(begun?),
            }
        } else {
            let names = self.card_time(card, 0)?.names;
            if !self.known(card)?.backend.start_record(&names, RECORD_BYTES) {
                return Err(DaemonError::NoRecord(card.to_owned()));
            }
        }
        tracing::info!(card, "the card's scheduler is being recorded");
        Ok(SchedulerRecord { daemon: Arc::clone(self), card: card.to_owned(), over: false })
    }

    /// Returns the scheduling settings of a virtual machine, or of a tenant of a CUDA card.
    ///
    /// # Errors
    /// Returns an error if neither has this name, or if the virtual machine is being created or removed, or has a
    /// passed-through card.
    pub fn vm_time(&self, name: &str) -> Result<api::VmTime, DaemonError> {
        if self.is_tenant(name) {
            return self.tenant_spec(name).map(|tenant| tenant.time.params(None).into());
        }
        self.with_scheduled(&mut self.state.lock(), name, |spec, _, _| Ok(spec.time_share().into()))
    }

    /// Changes the scheduling settings of a virtual machine, or of a tenant of a CUDA card. Keys that `patch` omits
    /// keep their values. Returns the errors of [`Self::vm_time`], or an error if a setting is invalid; in these cases,
    /// nothing changes. Also returns an error if the change cannot be saved.
    #[cfg(test)]
    pub(crate) fn set_vm_time(&self, name: &str, patch: &Map<String, Value>) -> Result<api::VmTime, DaemonError> {
        self.set_vm_time_if(name, patch, None)
    }

    /// Like `set_vm_time`, but only if the revision is still `expected`. Returns the same errors as `set_vm_time`, and
    /// an error if the revision differs.
    pub(crate) fn set_vm_time_if(
        &self,
        name: &str,
        patch: &Map<String, Value>,
        expected: Option<&str>,
    ) -> Result<api::VmTime, DaemonError> {
        if self.is_tenant(name) {
            let patch = api::TenantPatch { time: patch.clone(), ..api::TenantPatch::default() };
            return self.set_tenant_if(name, &patch, expected).map(|tenant| tenant.time);
        }
        let time = {
            let _one_at_a_time = self.tuning.lock();
            self.tune_vm(name, patch, expected)?
        };
        self.keep()?;
        Ok(time)
    }

    /// Changes a mediated virtual machine's scheduling settings, without saving the change. The caller must hold
    /// `tuning`.
    pub(super) fn tune_vm(
        &self,
        name: &str,
        patch: &Map<String, Value>,
        expected: Option<&str>,
    ) -> Result<api::VmTime, DaemonError> {
        let set = |spec: &mut VmSpec, card: &Card, vm| {
            let wrong = |what| DaemonError::Setting { of: format!("VM `{name}`"), what };
            let time = patched(&spec.time, patch).map_err(wrong)?;
            let params: VgpuParams = time.params(spec.hang_limit_ms);
            params.check().map_err(|error| wrong(error.to_string()))?;
            spec.time = time;
            card.backend.set_share(vm, params);
            tracing::info!(vm = name, ?params, "the VM's share of the card's time has changed");
            Ok(params.into())
        };
        let mut state = self.state.lock();
        state.expect(expected)?;
        let time = self.with_scheduled(&mut state, name, set)?;
        state.revision.next();
        self.events.add(NewEvent::vm(EventKind::Changed, name, changed_in("time", patch)));
        Ok(time)
    }

    /// Releases a virtual machine, or a tenant of a CUDA card, from quarantine, and clears its strikes.
    ///
    /// # Errors
    /// Returns the same errors as [`Self::vm_time`].
    pub fn release_vm(&self, name: &str) -> Result<(), DaemonError> {
        if self.is_tenant(name) {
            return self.release_tenant(name);
        }
        // The strikes must not change while the state is being handed over to another daemon.
        let _settings = self.tuning.lock();
        self.with_scheduled(&mut self.state.lock(), name, |_, card, vm| {
            card.backend.release_vm(vm);
            self.events.add(NewEvent::vm(EventKind::Released, name, RELEASED).on(&card.spec.name));
            Ok(())
        })
    }

    /// Calls `act` with the settings, the card and the scheduler ID of a virtual machine whose work is scheduled.
    pub(super) fn with_scheduled<T>(
        &self,
        state: &mut State,
        name: &str,
        act: impl FnOnce(&mut VmSpec, &Card, TenantId) -> Result<T, DaemonError>,
    ) -> Result<T, DaemonError> {
        let entry = state.vms.get_mut(name).ok_or_else(|| DaemonError::NoVm(name.to_owned()))?;
        let vm = match &entry.life {
            Life::Running(running) => running.backend.scheduled_as(),
            Life::Starting => return Err(DaemonError::Busy(name.to_owned(), "added")),
            Life::Stopping(_) => return Err(DaemonError::Busy(name.to_owned(), "removed")),
        };
        let vm = vm.ok_or_else(|| DaemonError::NoScheduler(name.to_owned()))?;
        let card = self.known(&entry.spec.card)?;
        act(&mut entry.spec, card, vm)
    }

    pub(super) fn known(&self, card: &str) -> Result<&Card, DaemonError> {
        self.cards.get(card).ok_or_else(|| DaemonError::NoCard(card.to_owned()))
    }

    /// Returns a card's time sharing, with the time used in at least the last `recent_ns` nanoseconds.
    fn card_time(&self, card: &str, recent_ns: u64) -> Result<CardTime, DaemonError> {
        let known = self.known(card)?;
        if let Some(cuda) = known.cuda.as_deref() {
            let seen = cuda.seen()?;
            let settings = self.state.lock().tuning(cuda.spec()).scheduler;
            let killed = seen.card.tenants.values().map(|tenant| (tenant.name.clone(), tenant.killed)).collect();
            // The owner may still list a removed tenant.
            let specs = self.tenant_specs(Some(card)).into_iter();
            let names = specs.filter_map(|spec| Some((seen.tenant(&spec.name)?.0, spec.name))).collect();
            return Ok(CardTime { settings, view: seen.card.time.clone(), names, overdue: BTreeMap::new(), killed });
        }
        let users: Vec<(String, bool, Option<Arc<Running>>)> = {
            let state = self.state.lock();
            let users = state.vms.iter().filter(|(_, entry)| entry.spec.card == card);
            users.map(|(name, entry)| (name.clone(), entry.spec.passthrough, entry.life.running().cloned())).collect()
        };
        if let Some((name, ..)) = users.iter().find(|(_, passthrough, _)| *passthrough) {
            return Err(DaemonError::NoScheduler(name.clone()));
        }
        let usage = known.backend.scheduler(recent_ns).ok_or_else(|| DaemonError::Unscheduled(card.to_owned()))?;
        let number =
            |(name, _, running): (String, bool, Option<Arc<Running>>)| Some((running?.backend.scheduled_as()?, name));
        let names: card_views::Names = users.into_iter().filter_map(number).collect();
        let SchedulerUsage { config, time, overdue } = usage;
        let named = |(vm, overdue): (TenantId, Vec<Overdue>)| Some((names.get(&vm)?.clone(), overdue));
        let overdue = overdue.into_iter().filter_map(named).collect();
        Ok(CardTime { settings: config, view: time, names, overdue, killed: BTreeMap::new() })
    }
}

/// A card's time sharing by tenant, including data that exists only for some kinds of cards.
struct CardTime {
    settings: sched::Config,
    view: TimeView,
    names: card_views::Names,
    /// Overdue submissions, by virtual machine.
    overdue: BTreeMap<String, Vec<Overdue>>,
    /// Number of killed programs, by tenant.
    killed: BTreeMap<String, u64>,
}

/// A running recording of a card's scheduler.
pub(crate) struct SchedulerRecord {
    daemon: Arc<Daemon>,
    card: String,
    over: bool,
}

impl SchedulerRecord {
    /// Stops the recording, and returns it as lines of JSON in the format of [`sched::trace`].
    ///
    /// # Errors
    /// Returns an error if the card was handed over in the meantime.
    pub fn end(mut self) -> Result<Vec<u8>, DaemonError> {
        self.over = true;
        self.daemon.end_record(&self.card)
    }
}

impl Daemon {
    fn end_record(&self, card: &str) -> Result<Vec<u8>, DaemonError> {
        if let Some(cuda) = self.known(card)?.cuda.as_deref() {
            return match cuda.change()?.ask(&format!("card `{card}`"), Request::EndRecord)? {
                Answer::Record(lines) => Ok(lines.into_bytes()),
                other => Err(DaemonError::Failed(format!("the owner of card `{card}` responded {other:?}"))),
            };
        }
        let record = self.known(card)?.backend.end_record();
        record.ok_or_else(|| DaemonError::Failed(format!("the mediator no longer owns card `{card}`")))
    }
}

impl Drop for SchedulerRecord {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        // The client has disconnected, so discard the recording, on another thread because the owner of a CUDA card may
        // respond slowly.
        let (daemon, card) = (Arc::clone(&self.daemon), self.card.clone());
        // If no thread can be created, the recording stops when it is full.
        let _ = std::thread::Builder::new().spawn(move || drop(daemon.end_record(&card)));
    }
}

/// Checks that a history can cover `ms` milliseconds, and rounds `ms` up to whole intervals.
fn within(key: &str, ms: u64) -> Result<u64, DaemonError> {
    if !(INTERVAL_MS..=HISTORY_MS).contains(&ms) {
        let what = format!("{key} = {ms} is not between {INTERVAL_MS} and {HISTORY_MS}");
        return Err(DaemonError::Query(what));
    }
    Ok(ms.next_multiple_of(INTERVAL_MS))
}

fn show_overdue(overdue: &Overdue) -> api::Overdue {
    let Overdue { channel, engine, awaited, age_ns } = *overdue;
    api::Overdue { channel: channel.0.into(), engine, waits_for: awaited.to_string(), age_ms: age_ns / MS }
}
