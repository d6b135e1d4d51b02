//! Reports the usage of card memory, and changes memory settings at run time.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value};
use vram::{GuestVramAddr, Limits, OnFull, Step, TenantId, To};

use super::vm::Running;
use super::{Card, Daemon, DaemonError, State};
use api::EventKind;
use card_manager::ManagedCard;
use card_manager::balance::Hint;
use card_manager::holdings::Holdings;
use card_manager::iova::RamShare;
use card_manager::shortage::Shortage;
use card_manager::{Accesses, Counted, Moved};
use config::patch::patched;
use config::{CardMemory, CardSpec, RamSpec, VmSpec, check};
use events::{NewEvent, changed_in};

impl Daemon {
    /// Returns a card's memory usage.
    ///
    /// # Errors
    /// Returns an error if the card does not exist or is passed through, or if the owner of a CUDA card does not
    /// respond.
    pub fn memory(&self, card: &str) -> Result<api::CardMemory, DaemonError> {
        let known = self.known(card)?;
        if let Some(cuda) = known.cuda.as_deref() {
            return self.cuda_memory(cuda);
        }
        let (users, settings) = {
            let state = self.state.lock();
            let users: Vec<(VmSpec, Option<Arc<Running>>)> = state
                .vms
                .values()
                .filter(|entry| entry.spec.card == card)
                .map(|entry| (entry.spec.clone(), entry.life.running().cloned()))
                .collect();
            (users, state.tunings.get(card).map(|tuning| tuning.memory))
        };
        if let Some((spec, _)) = users.iter().find(|(spec, _)| spec.passthrough) {
            return Err(DaemonError::NoScheduler(spec.name.clone()));
        }
        let settings = settings.unwrap_or(known.spec.memory);
        let holdings = known.backend.mediated().map(|host| host.lock().holdings());
        let (mut tenants, mut counters) = (BTreeMap::new(), BTreeMap::new());
        for (spec, running) in users {
            let Some(backend) = running.map(|running| Arc::clone(&running.backend)) else { continue };
            let Some(vm) = backend.scheduled_as() else { continue };
            counters.insert(spec.name.clone(), (vm, backend.status().counters));
            tenants.insert(vm, (spec.name, spec.memory));
        }
        let view = holdings.as_ref().map(|holdings| &holdings.view);
        let mut shown = card_views::memory(&known.spec, settings, view, &tenants);
        for one in &mut shown.vms {
            if let (Some((vm, counters)), Some(holdings)) = (counters.get(&one.vm), &holdings) {
                add_moves(one, *vm, counters, holdings);
            }
        }
        Ok(shown)
    }

    /// Returns the memory usage of all cards, except for passed-through cards and CUDA cards with unresponsive owners.
    #[must_use]
    pub fn memories(&self) -> Vec<api::CardMemory> {
        self.cards.keys().filter_map(|card| self.memory(card).ok()).collect()
    }

    /// Changes a card's memory settings. Keys that `patch` omits keep their values. Returns an error, and changes
    /// nothing, if the card does not exist or is passed through, if the revision differs, if a setting is invalid, or
    /// if the owner of a CUDA card rejects the change. Also returns an error if this owner does not respond, or if the
    /// change cannot be saved.
    pub(crate) fn set_memory_if(
        &self,
        card: &str,
        patch: &Map<String, Value>,
        expected: Option<&str>,
    ) -> Result<api::CardMemory, DaemonError> {
        if let Some(cuda) = self.known(card)?.cuda.as_deref() {
            self.tune_cuda(cuda, &Map::new(), patch, expected)?;
        } else {
            let _one_at_a_time = self.tuning.lock();
            // A card that is passed through has no memory settings.
            self.memory(card)?;
            self.tune_memory(card, patch, expected)?;
        }
        self.keep()?;
        self.memory(card)
    }

    /// Changes a card's memory settings. The caller must hold `tuning`.
    pub(super) fn tune_memory(
        &self,
        card: &str,
        patch: &Map<String, Value>,
        expected: Option<&str>,
    ) -> Result<(), DaemonError> {
        let known = self.known(card)?;
        let wrong = |what| DaemonError::Setting { of: format!("card `{card}`"), what };
        let mut state = self.state.lock();
        state.expect(expected)?;
        let now = state.tunings.get(card).map_or(known.spec.memory, |tuning| tuning.memory);
        let memory: CardMemory = patched(&now, patch).map_err(wrong)?;
        let spec = CardSpec { memory, ..known.spec.clone() };
        if let Some((key, what)) = memory.check(spec.chunk_kib, spec.shared_mib()).into_iter().next() {
            return Err(wrong(format!("{key}: {what}")));
        }
        if memory.host_mib > known.spec.memory.host_mib {
            return Err(wrong(more_host_memory(memory.host_mib, known.spec.memory.host_mib)));
        }
        self.fits(&state, &spec, None)?;
        let before = set_rams(&state, known, &memory)?;
        known.backend.set_memory(memory).map_err(|error| {
            before.restore();
            match error.lacks {
                Some(what_to_do) => DaemonError::Quota { of: format!("card `{card}`"), what: error.what, what_to_do },
                None => DaemonError::Failed(format!("card `{card}`: {}", error.what)),
            }
        })?;
        state.revision.next();
        if let Some(tuning) = state.tunings.get_mut(card) {
            tuning.memory = memory;
        }
        tracing::info!(card, ?memory, "the card's memory settings have changed");
        self.events.add(NewEvent::card(EventKind::Changed, card, changed_in("memory", patch)));
        Ok(())
    }

    /// Checks that the card can satisfy its VMs' guarantees if `changed` replaces one VM's settings.
    fn fits(&self, state: &State, card: &CardSpec, changed: Option<&VmSpec>) -> Result<(), DaemonError> {
        let specs: Vec<CardSpec> =
            self.specs.iter().map(|one| if one.name == card.name { card.clone() } else { one.clone() }).collect();
        let mut there: Vec<&VmSpec> = Vec::new();
        // Check the changed VM last, so that the error names it if the guarantees do not fit.
        let others = state.vms.values().map(|entry| &entry.spec).filter(|vm| vm.card == card.name);
        let others = others.filter(|vm| changed.is_none_or(|changed| changed.name != vm.name));
        for vm in others.chain(changed) {
            let refusals: Vec<_> = check::vm(vm, &self.spec, &specs, &there)
                .into_iter()
                .filter(|refusal| refusal.field.starts_with("memory") || refusal.field == "vram_mib")
                .collect();
            if !refusals.is_empty() {
                return Err(DaemonError::Refused { vm: vm.name.clone(), refusals });
            }
            there.push(vm);
        }
        Ok(())
    }

    /// Returns the memory settings of a virtual machine, or of a tenant of a CUDA card.
    ///
    /// # Errors
    /// Returns an error if neither has this name, or if the virtual machine is being created or removed, or uses its
    /// card in passthrough.
    pub fn vm_memory(&self, name: &str) -> Result<api::VmMemorySettings, DaemonError> {
        if self.is_tenant(name) {
            return self.tenant_spec(name).map(|tenant| tenant.memory);
        }
        self.with_scheduled(&mut self.state.lock(), name, |spec, _, _| Ok(spec.memory.clone()))
    }

    /// Changes the memory settings of a virtual machine, or of a tenant of a CUDA card. Keys that `patch` omits keep
    /// their values. Returns the same errors as [`Self::vm_memory`], and an error if the revision is not `expected`, or
    /// if a setting is invalid or cannot be guaranteed; in these cases, nothing changes. Also returns an error if the
    /// change cannot be saved.
    pub(crate) fn set_vm_memory_if(
        &self,
        name: &str,
        patch: &Map<String, Value>,
        expected: Option<&str>,
    ) -> Result<api::VmMemorySettings, DaemonError> {
        if self.is_tenant(name) {
            let patch = api::TenantPatch { memory: patch.clone(), ..api::TenantPatch::default() };
            return self.set_tenant_if(name, &patch, expected).map(|tenant| tenant.memory);
        }
        let memory = {
            let _one_at_a_time = self.tuning.lock();
            self.tune_vm_memory(name, patch, expected)?
        };
        self.keep()?;
        Ok(memory)
    }

    /// Changes a mediated virtual machine's memory settings, without saving the change. The caller must hold `tuning`.
    ///
    /// The daemon's state is unlocked while memory moves for the change. The checks are then repeated. If one fails,
    /// the virtual machine's previous settings are restored.
    pub(super) fn tune_vm_memory(
        &self,
        name: &str,
        patch: &Map<String, Value>,
        expected: Option<&str>,
    ) -> Result<api::VmMemorySettings, DaemonError> {
        let tuning = self.check_vm_memory(&mut self.state.lock(), name, patch, expected)?;
        let VmTuning { host, vm, limits, ram, settings, chunk_bytes } = &tuning;
        let (before, ram_before) = {
            let state = host.lock();
            (state.vram().chunks.limits(*vm), state.memory().iova().share_and_charged(*vm).0)
        };
        let restore_limits = || {
            if let Some(Err(error)) = before.map(|before| host.lock().memory_mut().set_limits(*vm, before)) {
                tracing::debug!(vm = name, %error, "memory limits were not restored: the VM no longer exists");
            }
        };
        host.make_room(|state| state.memory_mut().set_limits(*vm, *limits))
            .map_err(|error| lacking(name, Shortage::from_error(&error, *chunk_bytes)))?;
        let lent = host.lock().set_ram(*vm, ram_share(ram));
        if let Err(shortage) = lent {
            restore_limits();
            return Err(lacking(name, shortage));
        }
        let mut state = self.state.lock();
        let again = self.check_vm_memory(&mut state, name, patch, expected).and_then(|again| {
            let same = again.vm == *vm && again.limits == *limits && again.ram == *ram;
            if same { Ok(()) } else { Err(DaemonError::NoVm(name.to_owned())) }
        });
        if let Err(error) = again {
            drop(state);
            restore_limits();
            Lent { host: Some(Arc::clone(host)), shares: vec![(*vm, ram_before)] }.restore();
            return Err(error);
        }
        if let Some(running) = state.vms.get(name).and_then(|entry| entry.life.running()) {
            running.link.memory().first_touches().set_limit(touch_limit(ram));
        }
        self.with_scheduled(&mut state, name, |spec, _, _| {
            spec.memory = settings.clone();
            Ok(())
        })?;
        state.revision.next();
        tracing::info!(vm = name, ?limits, "the VM's memory limits have changed");
        self.events.add(NewEvent::vm(EventKind::Changed, name, changed_in("memory", patch)));
        Ok(tuning.settings)
    }

    /// Checks a change to a virtual machine's memory settings, without applying it.
    fn check_vm_memory(
        &self,
        state: &mut State,
        name: &str,
        patch: &Map<String, Value>,
        expected: Option<&str>,
    ) -> Result<VmTuning, DaemonError> {
        state.expect(expected)?;
        let (wanted, vm, card, host) = self.with_scheduled(state, name, |spec, card, id| {
            let wrong = |what| DaemonError::Setting { of: format!("VM `{name}`"), what };
            let memory = patched(&spec.memory, patch).map_err(wrong)?;
            Ok((VmSpec { memory, ..spec.clone() }, id, card.spec.name.clone(), mediated(card)?))
        })?;
        let tuned = state.tunings.get(&card).map(|tuning| tuning.memory);
        let known = self.known(&card)?;
        let spec = CardSpec { memory: tuned.unwrap_or(known.spec.memory), ..known.spec.clone() };
        self.fits(state, &spec, Some(&wanted))?;
        let vram = host.lock().vram().chunks.vm_bytes(vm).unwrap_or(0) >> 20;
        let mut limits = wanted.memory.limits(vram, &spec);
        if limits.on_full == OnFull::Refuse {
            // All VRAM visible to the guest is guaranteed.
            limits.guarantee = limits.quota;
        }
        let ram = wanted.memory.ram.on(&spec.memory);
        Ok(VmTuning { host, vm, limits, ram, settings: wanted.memory, chunk_bytes: known.spec.chunk_kib << 10 })
    }

    /// Returns the manager of a card, or `None` if the mediator does not own the card.
    #[cfg(any(test, feature = "test-rig"))]
    #[must_use]
    #[cfg(test)]
    pub(crate) fn host_of(&self, card: &str) -> Option<Arc<ManagedCard>> {
        self.cards.get(card)?.backend.mediated()
    }

    /// Returns the backend of a virtual machine, if the virtual machine is running.
    #[cfg(test)]
    pub(crate) fn running_vm(&self, name: &str) -> Option<Arc<dyn super::backend::VmBackend>> {
        self.state.lock().vms.get(name)?.life.running().map(|running| Arc::clone(&running.backend))
    }

    /// Moves a virtual machine's memory to host memory, or back to the card. Returns when the move is complete. Returns
    /// the same errors as [`Self::vm_memory`], and an error for a tenant of a CUDA card, or if the range is outside the
    /// guest's VRAM.
    pub(crate) fn move_vm_memory(
        &self,
        name: &str,
        request: &api::MoveRequest,
        to: To,
    ) -> Result<api::MoveReport, DaemonError> {
        let (host, vm, card) = self.with_scheduled(&mut self.state.lock(), name, |_, card, vm| {
            Ok((mediated(card)?, vm, card.spec.name.clone()))
        })?;
        let (steps, chunk_bytes) = {
            let state = host.lock();
            let (chunk_bytes, bytes) =
                (state.vram().chunks.chunk_bytes(), state.vram().chunks.vm_bytes(vm).unwrap_or(0));
            let range = request.range.unwrap_or(api::Range { start: 0, bytes });
            outside(name, range, bytes)?;
            let most = request.mib.map_or(u64::MAX, |mib| mib.saturating_mul(1 << 20).div_ceil(chunk_bytes));
            let most = usize::try_from(most).unwrap_or(usize::MAX);
            let chunks = state.memory().movable(vm, GuestVramAddr(range.start), range.bytes, to != To::Card);
            let steps: Vec<Step> = chunks.into_iter().take(most).map(|index| Step { vm, index, to }).collect();
            (steps, chunk_bytes)
        };
        let done = host.relocate_counted(vm, &steps);
        host.look_again();
        let stayed_bytes = u64::from(done.stayed) * chunk_bytes;
        let (mib, place) = (done.bytes >> 20, if to == To::Card { "the card" } else { "host memory" });
        let stayed = if stayed_bytes > 0 { format!(", {} MiB stayed", stayed_bytes >> 20) } else { String::new() };
        let what = format!("{mib} MiB of its memory were moved to {place}{stayed}");
        self.events.add(NewEvent::vm(EventKind::MemoryMoved, name, what).on(&card));
        let reason = (stayed_bytes > 0).then(|| self.memory(&card).ok()?.why_stayed(name, to == To::Card)).flatten();
        Ok(api::MoveReport { moved_bytes: done.bytes, stayed_bytes, suspended_ns: done.suspended_ns, reason })
    }

    /// Starts counting accesses to a guest's VRAM. Counting continues until the recording is
    /// [stopped](AccessRecord::end) or dropped. Returns the same errors as [`Self::vm_memory`], and an error for a
    /// tenant of a CUDA card, or if accesses are already being counted.
    pub(crate) fn record_vm_accesses(&self, name: &str) -> Result<AccessRecord, DaemonError> {
        let (host, vm) = self.with_scheduled(&mut self.state.lock(), name, |_, card, vm| Ok((mediated(card)?, vm)))?;
        if !host.lock().start_accesses(vm) {
            return Err(DaemonError::Counting(name.to_owned()));
        }
        Ok(AccessRecord { host, vm, name: name.to_owned(), over: false })
    }

    /// Applies hints about ranges of a guest's VRAM. Returns the same errors as [`Self::vm_memory`], and an error for a
    /// tenant of a CUDA card, if a range is outside the guest's VRAM, or if the pinned memory exceeds the guarantee.
    pub(crate) fn hint_vm_memory(&self, name: &str, hints: &api::Hints) -> Result<(), DaemonError> {
        // The hints must not change while the state is being handed over to another daemon.
        let _settings = self.tuning.lock();
        let (host, vm) = self.with_scheduled(&mut self.state.lock(), name, |_, card, vm| Ok((mediated(card)?, vm)))?;
        let mut state = host.lock();
        let (bytes, chunk_bytes) = (state.vram().chunks.vm_bytes(vm).unwrap_or(0), state.vram().chunks.chunk_bytes());
        for api::Hint { range, pinned, priority, accesses } in &hints.hints {
            outside(name, *range, bytes)?;
            let said = [pinned.map(Hint::Pinned), priority.map(Hint::Priority), accesses.map(Hint::Accesses)];
            for hint in said.into_iter().flatten() {
                state
                    .memory_mut()
                    .hint(vm, GuestVramAddr(range.start), range.bytes, hint)
                    .map_err(|error| lacking(name, Shortage::of_pin(&error, chunk_bytes)))?;
            }
        }
        Ok(())
    }
}

/// A running recording of a VM's memory accesses.
pub(crate) struct AccessRecord {
    host: Arc<ManagedCard>,
    vm: TenantId,
    name: String,
    over: bool,
}

impl AccessRecord {
    /// Stops the recording, and returns the access counts.
    ///
    /// # Errors
    /// Returns an error if the virtual machine has left the card in the meantime.
    pub fn end(mut self) -> Result<api::AccessProfile, DaemonError> {
        self.over = true;
        let mut state = self.host.lock();
        let (chunk_bytes, ended) = (state.vram().chunks.chunk_bytes(), state.end_accesses(self.vm));
        drop(state);
        let Accesses { counted, counts } = ended.ok_or_else(|| {
            DaemonError::Failed(format!("VM `{}` left the card while its accesses were being counted", self.name))
        })?;
        let counted = match counted {
            Counted::Bursts => api::Counted::Bursts,
            Counted::Submissions => api::Counted::Submissions,
        };
        let accessed = (0u64..).zip(counts).filter(|(_, count)| *count != 0).map(|(index, count)| {
            let start = index.saturating_mul(chunk_bytes);
            api::Accessed { range: api::Range { start, bytes: chunk_bytes }, count }
        });
        Ok(api::AccessProfile { counted, ranges: accessed.collect() })
    }
}

impl Drop for AccessRecord {
    fn drop(&mut self) {
        // The client has disconnected, so discard the recording.
        if !self.over {
            self.host.lock().end_accesses(self.vm);
        }
    }
}

/// Returns the message for a request that exceeds the host memory reserved when the daemon started.
pub(super) fn more_host_memory(mib: u64, most: u64) -> String {
    format!(
        "memory.host_mib: {mib}, expected at most the {most} that the daemon was started with; change the configuration file and \
         start it again"
    )
}

/// A checked change to a virtual machine's memory settings, which is not applied yet.
struct VmTuning {
    host: Arc<ManagedCard>,
    vm: TenantId,
    limits: Limits,
    ram: RamSpec,
    settings: api::VmMemorySettings,
    chunk_bytes: u64,
}

/// Converts an optional size in MiB to bytes; 0 if absent.
pub(super) fn bytes(mib: Option<u64>) -> u64 {
    mib.unwrap_or(0).saturating_mul(1 << 20)
}

/// Returns the maximum amount of RAM that the daemon may touch before the guest does, in bytes.
pub(super) fn touch_limit(ram: &RamSpec) -> u64 {
    ram.touch_mib.map_or(u64::MAX, |mib| bytes(Some(mib)))
}

/// Returns the settings for a virtual machine's lent RAM, in the format of the card manager.
pub(super) fn ram_share(ram: &RamSpec) -> RamShare {
    RamShare { quota: bytes(ram.quota_mib), guarantee: bytes(ram.guarantee_mib) }
}

/// RAM limits of virtual machines before a change.
struct Lent {
    host: Option<Arc<ManagedCard>>,
    shares: Vec<(TenantId, RamShare)>,
}

impl Lent {
    /// Restores the limits.
    fn restore(&self) {
        for (host, &(vm, share)) in self.host.iter().flat_map(|host| self.shares.iter().rev().map(move |of| (host, of)))
        {
            if let Err(error) = host.lock().set_ram(vm, share) {
                tracing::error!(%vm, %error, "cannot restore the VM's previous bus addresses");
            }
        }
    }
}

/// Applies a card's new `memory` settings to its virtual machines' RAM limits. If a change fails, all limits stay
/// unchanged. Returns the previous limits.
fn set_rams(state: &State, card: &Card, memory: &CardMemory) -> Result<Lent, DaemonError> {
    let mut lent = Lent { host: card.backend.mediated(), shares: Vec::new() };
    let users: Vec<_> = state.vms.values().filter(|entry| entry.spec.card == card.spec.name).collect();
    let users: Vec<_> = users.into_iter().filter_map(|entry| Some((entry, entry.life.running()?))).collect();
    for (entry, running) in &users {
        let (Some(host), Some(vm)) = (lent.host.clone(), running.backend.scheduled_as()) else { continue };
        let before = host.lock().memory().iova().share_and_charged(vm).0;
        let set = host.lock().set_ram(vm, ram_share(&entry.spec.memory.ram.on(memory)));
        if let Err(shortage) = set {
            lent.restore();
            return Err(lacking(&entry.spec.name, shortage));
        }
        lent.shares.push((vm, before));
    }
    for (entry, running) in users {
        running.link.memory().first_touches().set_limit(touch_limit(&entry.spec.memory.ram.on(memory)));
    }
    Ok(lent)
}

fn lacking(vm: &str, Shortage { what, what_to_do }: Shortage) -> DaemonError {
    DaemonError::Quota { of: format!("VM `{vm}`"), what, what_to_do }
}

/// Returns an error if a range is empty, or is not within the guest's VRAM.
fn outside(vm: &str, range: api::Range, vram_bytes: u64) -> Result<(), DaemonError> {
    let api::Range { start, bytes } = range;
    if bytes != 0 && start.checked_add(bytes).is_some_and(|end| end <= vram_bytes) {
        return Ok(());
    }
    let what = format!("range: {bytes:#x} bytes from {start:#x} on, expected some of the guest's {vram_bytes:#x}");
    Err(DaemonError::Setting { of: format!("VM `{vm}`"), what })
}

fn mediated(card: &Card) -> Result<Arc<ManagedCard>, DaemonError> {
    let none = || DaemonError::Failed(format!("the mediator does not own card `{}`", card.spec.name));
    card.backend.mediated().ok_or_else(none)
}

/// Adds the counters of memory moves, which exist only on cards owned by the mediator, to a virtual machine's memory
/// status.
fn add_moves(shown: &mut api::VmMemory, vm: TenantId, counters: &BTreeMap<String, u64>, holdings: &Holdings) {
    let Moved { sum, suspensions } = holdings.moved.get(&vm).cloned().unwrap_or_default();
    let refused = holdings.refusals.counts_for(vm).into_iter();
    let counter = |key: &str| counters.get(key).copied().unwrap_or(0);
    shown.cpu_visible_bytes = counter("aperture_pages") * nvspec::addr::SMALL_PAGE;
    shown.relocations = suspensions.count();
    shown.suspended_ns = suspensions.sum();
    shown.suspended_longest_ns = suspensions.max();
    shown.suspensions = (&suspensions).into();
    shown.copied_ns = sum.copied_ns;
    shown.memory_waits = counter("memory_waits");
    shown.memory_denied = counter("memory_denied");
    shown.memory_waited_ns = shown.memory_waited_ns.saturating_add(counter("memory_waited_ns"));
    let chunk_bytes = holdings.view.summary.chunk_bytes;
    shown.refused_bytes = refused.map(|(limit, chunks)| (limit.to_owned(), chunks * chunk_bytes)).collect();
}
