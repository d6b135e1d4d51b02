//! Tenants of CUDA cards: adds, removes and reports them, and changes their settings while their programs run.
//!
//! A change holds only its card's lock while it waits for the owner, so readers and changes to other cards do not wait.

mod moving;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_control::{Answer, Request};
use cuda_status::Seen;
use serde_json::{Map, Value};

use super::cuda::{self, Change, CudaCard};
use super::draining::Arrival;
use super::scheduling::RELEASED;
use super::{Daemon, DaemonError, Entry, Life, State};
use api::{EventKind, TenantPatch};
use config::check::{self, MAX_TENANTS, Refusal};
use config::cuda::placement_order;
use config::patch::{patched, table};
use config::{CardSpec, Links, OnRemove, TenantSpec};
use events::{NewEvent, changed};
use listening::folders;
use overrides::Tuning;

/// Window over which used card time is measured, in ns.
const WINDOW_NS: u64 = 1_000_000_000;
/// Time limit for a removed tenant's processes to exit.
// TIMEOUT: a killed process exits immediately, unless the driver prevents it. If the limit is exceeded, the operator is
// notified.
const LEAVING: Duration = Duration::from_secs(10);
/// Interval at which the processes are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The right to change a tenant's cards, one after the other. Other changes to the tenant wait meanwhile.
struct ChangingCards<'a> {
    daemon: &'a Daemon,
    name: String,
}

impl Drop for ChangingCards<'_> {
    fn drop(&mut self) {
        self.daemon.state.lock().changing_tenants.remove(&self.name);
    }
}

impl State {
    /// Calls `then` with the names of all other VMs, and with all other tenants, including VMs on CUDA cards.
    fn beside<T>(&self, spec: &TenantSpec, then: impl FnOnce(&[&str], &[&TenantSpec]) -> T) -> T {
        // A VM on a CUDA card is a tenant under its own name.
        let is_it = |name: &str| name == spec.name && self.cuda_vm(name).is_some();
        let vms: Vec<&str> = self.vms.keys().map(String::as_str).filter(|name| !is_it(name)).collect();
        let on_cards: Vec<TenantSpec> = self.cuda_vms().collect();
        let others = self.tenants.values().chain(&on_cards).filter(|other| other.name != spec.name);
        then(&vms, &others.collect::<Vec<_>>())
    }

    /// Returns all reasons to reject a tenant, given all other tenants.
    fn refusals(&self, spec: &TenantSpec, daemon: &Daemon) -> Vec<Refusal> {
        let cards = self.marked(&daemon.specs);
        self.beside(spec, |vms, others| check::tenant(spec, &daemon.spec, &cards, vms, others))
    }

    /// Returns the VMs on CUDA cards, as tenants of their cards.
    fn cuda_vms(&self) -> impl Iterator<Item = TenantSpec> {
        self.vms.values().filter(|entry| entry.spec.cuda.is_some()).map(|entry| entry.spec.as_tenant())
    }

    /// Returns the host memory that the windows of a card's VMs need, in MiB.
    fn windows_mib(&self, card: &str) -> u64 {
        config::windows_mib(card, self.vms.values().map(|entry| &entry.spec))
    }

    /// Returns a running VM on a CUDA card, as a tenant of this card.
    fn cuda_vm(&self, name: &str) -> Option<TenantSpec> {
        let entry = self.vms.get(name).filter(|entry| matches!(entry.life, Life::Running(_)))?;
        entry.spec.cuda.is_some().then(|| entry.spec.as_tenant())
    }

    /// Returns a tenant of a CUDA card; the tenant may be a VM.
    fn tenant(&self, name: &str) -> Option<TenantSpec> {
        self.tenants.get(name).cloned().or_else(|| self.cuda_vm(name))
    }

    /// Stores a tenant's or VM's changed settings. Returns true if the settings belong to a VM.
    fn store_tenant(&mut self, spec: TenantSpec) -> bool {
        match self.vms.get_mut(&spec.name) {
            Some(Entry { spec: vm, .. }) => {
                (vm.vram_mib, vm.memory, vm.time) = (Some(spec.vram_mib), spec.memory, spec.time);
                true
            }
            None => {
                self.tenants.insert(spec.name.clone(), spec);
                false
            }
        }
    }

    /// Assigns cards to a tenant whose configuration names none.
    fn placed(&self, spec: TenantSpec, daemon: &Daemon, links: &Links, cards: &[CardSpec]) -> TenantSpec {
        let policy = (daemon.spec.placement, links);
        self.beside(&spec.clone(), |vms, others| spec.placed(policy, cards, vms, others))
    }
}

impl Daemon {
    /// Adds a configuration's tenants to the owners of their cards. Returns an error if a tenant is rejected.
    pub(super) fn start_tenants(&self, tenants: Vec<TenantSpec>) -> Result<(), DaemonError> {
        for at in placement_order(&tenants) {
            self.put_tenant(tenants[at].clone(), None, Arrival::Configured)?;
        }
        // The next daemon must find the chosen cards.
        self.keep()
    }

    /// Returns the NVLink connections between the CUDA cards, as their owners report them.
    pub(super) fn links(&self) -> Links {
        let identities = self.cards.iter().filter_map(|(name, card)| Some((name, &card.cuda.as_deref()?.identity)));
        Links::from_reports(identities.map(|(name, identity)| (name.as_str(), identity.uuid.as_str(), &identity.links)))
    }

    fn cuda(&self, card: &str) -> Result<&CudaCard, DaemonError> {
        self.known(card)?.cuda.as_deref().ok_or_else(|| DaemonError::NoCard(card.to_owned()))
    }

    /// Returns true if a tenant of a CUDA card, or a VM on such a card, has this name.
    pub(super) fn is_tenant(&self, name: &str) -> bool {
        self.state.lock().tenant(name).is_some()
    }

    /// Returns the settings of the tenants of one card or of all cards, including VMs.
    pub(super) fn tenant_specs(&self, card: Option<&str>) -> Vec<TenantSpec> {
        let state = self.state.lock();
        let all = state.tenants.values().cloned().chain(state.cuda_vms());
        all.filter(|spec| card.is_none_or(|card| spec.uses(card))).collect()
    }

    /// Returns all tenants, including VMs on CUDA cards, without waiting for owners. If an owner does not respond, its
    /// card's tenants are returned without their programs.
    #[must_use]
    pub fn tenants(&self) -> Vec<api::Tenant> {
        let specs = self.tenant_specs(None);
        let mut seen: BTreeMap<&str, Option<Arc<Seen>>> = BTreeMap::new();
        for card in specs.iter().flat_map(TenantSpec::card_names) {
            seen.entry(card).or_insert_with(|| self.cuda(card).and_then(CudaCard::seen).ok());
        }
        let shown = specs.iter().map(|spec| self.shown(spec, |card| seen.get(card).and_then(Option::as_deref)));
        shown.collect()
    }

    /// Returns a tenant with its programs. A VM's programs have their names and process IDs in the guest.
    fn shown<'a>(&self, spec: &TenantSpec, seen_on: impl Fn(&str) -> Option<&'a Seen>) -> api::Tenant {
        let mut tenant = card_views::tenant(spec, &self.spec.socket_dir, seen_on, WINDOW_NS);
        let vm = self.state.lock().vms.get(&spec.name).and_then(|entry| entry.life.running().cloned());
        if let Some(vm) = vm {
            card_views::add_guest_programs(&mut tenant, &vm.backend.status().programs);
        }
        tenant
    }

    /// Returns one tenant.
    ///
    /// # Errors
    /// Returns an error if no tenant has the name.
    pub fn tenant(&self, name: &str) -> Result<api::Tenant, DaemonError> {
        let spec = self.tenant_spec(name)?;
        let seen = |card: &str| self.cuda(card).and_then(CudaCard::seen).ok();
        let seen: BTreeMap<&str, _> = spec.card_names().into_iter().map(|card| (card, seen(card))).collect();
        Ok(self.shown(&spec, |card| seen.get(card).and_then(Option::as_deref)))
    }

    pub(super) fn tenant_spec(&self, name: &str) -> Result<TenantSpec, DaemonError> {
        self.state.lock().tenant(name).ok_or_else(|| DaemonError::NoTenant(name.to_owned()))
    }

    /// Waits until no other thread changes the tenant or its first card. Returns the tenant's settings at that time,
    /// and the right to change the first card.
    fn tenant_turn(&self, name: &str) -> Result<(TenantSpec, Change<'_>), DaemonError> {
        loop {
            let before = self.tenant_spec(name)?;
            let turn = self.cuda(before.first_card())?.change()?;
            let spec = self.tenant_spec(name)?;
            let is_changing = {
                let state = self.state.lock();
                state.coming.contains(name) || state.changing_tenants.contains(name)
            };
            if is_changing {
                // The tenant is still being added, which waits for memory, or its other cards are being changed.
                drop(turn);
                locks::sleep(owner_process::GUARANTEE_RETRY_INTERVAL);
                continue;
            }
            // In the meantime, the tenant may have been removed, and added to another card.
            if spec.first_card() == before.first_card() {
                return Ok((spec, turn));
            }
        }
    }

    /// Blocks other changes to a tenant until the returned guard is dropped. The caller has the right to change the
    /// tenant's first card.
    fn changing_cards(&self, name: &str) -> ChangingCards<'_> {
        self.state.lock().changing_tenants.insert(name.to_owned());
        ChangingCards { daemon: self, name: name.to_owned() }
    }

    /// Applies a change on each of a tenant's cards: with `turn` on the first card, and then on the others. Returns the
    /// right to change the last card. If the change fails on a card, the following cards are not changed.
    fn on_cards<'a>(
        &'a self,
        spec: &TenantSpec,
        mut turn: Change<'a>,
        mut act: impl FnMut(&Change<'_>) -> Result<(), DaemonError>,
    ) -> Result<(Change<'a>, ChangingCards<'a>), DaemonError> {
        let changing = self.changing_cards(&spec.name);
        act(&turn)?;
        for card in spec.card_names().into_iter().skip(1) {
            drop(turn);
            turn = self.cuda(card)?.change()?;
            act(&turn)?;
        }
        Ok((turn, changing))
    }

    /// Removes the folder of a tenant's sockets.
    fn remove_folder(&self, spec: &TenantSpec) {
        for socket in spec.socket_paths(&self.spec.socket_dir) {
            folders::remove(&spec.name, &socket, &self.spec.socket_dir);
        }
    }

    /// Adds a tenant to its cards other than the first one. Returns true if the tenant is new on at least one of them.
    fn add_to_others(&self, spec: &TenantSpec) -> Result<bool, DaemonError> {
        let mut any_new = false;
        for name in spec.card_names().into_iter().skip(1) {
            let card = self.cuda(name)?;
            let told = cuda::tenant(spec, card.spec(), &self.spec.socket_dir, None)?;
            let (_, is_new) = card.add(card.change()?, &format!("tenant `{}`", spec.name), told)?;
            any_new |= is_new;
        }
        Ok(any_new)
    }

    /// Removes a tenant with several cards from all of them, after one of the cards has rejected the tenant.
    fn withdraw_tenant(&self, spec: &TenantSpec) {
        for card in spec.cards.iter().filter_map(|card| self.cuda(card).ok()) {
            let request = Request::Remove { name: spec.name.clone(), kills: true };
            let removed = card.change().and_then(|turn| turn.ask(&format!("tenant `{}`", spec.name), request));
            if let Err(error) = removed {
                tracing::warn!(tenant = spec.name, card = card.spec().name, %error, "cannot remove a rejected tenant");
            }
        }
    }

    /// Changes a tenant on its cards other than the first one. If a card rejects the change, restores the settings
    /// `before` on the cards that were already changed.
    fn change_on_others(&self, spec: &TenantSpec, before: &TenantSpec) -> Result<(), DaemonError> {
        let of = format!("tenant `{}`", spec.name);
        let change = |spec: &TenantSpec, name: &str| {
            let card = self.cuda(name)?;
            let told = cuda::tenant(spec, card.spec(), &self.spec.socket_dir, None)?;
            card.promise(card.change()?, &of, &Request::Change(told)).map(drop)
        };
        for (at, name) in spec.cards.iter().enumerate().skip(1) {
            if let Err(error) = change(spec, name) {
                for changed in spec.cards.iter().take(at) {
                    if let Err(error) = change(before, changed) {
                        tracing::warn!(tenant = spec.name, card = changed, %error, "cannot undo a rejected change");
                    }
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Adds a tenant if the revision is still `expected`. Its socket exists when this function returns. Returns an
    /// error if the tenant cannot be added; in this case, no part of it remains. Also returns an error if the change
    /// cannot be saved.
    pub(crate) fn add_tenant_if(&self, spec: TenantSpec, expected: Option<&str>) -> Result<api::Tenant, DaemonError> {
        let name = spec.name.clone();
        self.put_tenant(spec, expected, Arrival::New)?;
        self.keep()?;
        self.tenant(&name)
    }

    /// Adds a tenant without saving the change.
    pub(super) fn put_tenant(
        &self,
        spec: TenantSpec,
        expected: Option<&str>,
        arrival: Arrival,
    ) -> Result<(), DaemonError> {
        // Choose a card before waiting for the right to change it, and check again afterwards.
        let spec = {
            let state = self.state.lock();
            state.placed(spec, self, &self.links(), &state.marked(&self.specs))
        };
        let refused = |refusals| DaemonError::TenantRefused { tenant: spec.name.clone(), refusals };
        let Ok(card) = self.cuda(spec.first_card()) else {
            return Err(refused(self.state.lock().refusals(&spec, self)));
        };
        let told = cuda::tenant(&spec, card.spec(), &self.spec.socket_dir, None)?;
        let turn = card.change()?;
        {
            let mut state = self.state.lock();
            state.expect(expected)?;
            let exists = state.tenants.contains_key(&spec.name);
            if exists || state.tenants.len() >= MAX_TENANTS {
                drop(state);
                return Err(match exists {
                    true => DaemonError::TenantThere(spec.name),
                    false => DaemonError::TooManyTenants(MAX_TENANTS),
                });
            }
            let mut refusals = state.refusals(&spec, self);
            let marked = state.marked(&self.specs);
            refusals.extend(spec.card_names().iter().filter_map(|card| arrival.refused(card, &marked)));
            if !refusals.is_empty() {
                return Err(refused(refusals));
            }
            // From here on, the tenant's name and guarantees are reserved.
            state.tenants.insert(spec.name.clone(), spec.clone());
            state.coming.insert(spec.name.clone());
        }
        let socket = spec.socket_path(&self.spec.socket_dir);
        let added = folders::make(&spec.name, &socket, &self.spec.socket_dir)
            .map_err(DaemonError::from)
            .and_then(|()| card.add(turn, &format!("tenant `{}`", spec.name), told))
            .and_then(|(turn, is_new)| {
                drop(turn);
                self.add_to_others(&spec).map(|others| is_new || others)
            });
        if added.is_err() {
            self.withdraw_tenant(&spec);
            self.remove_folder(&spec);
        }
        let mut state = self.state.lock();
        state.coming.remove(&spec.name);
        if added.is_err() {
            state.tenants.remove(&spec.name);
        }
        state.revision.next();
        drop(state);
        if !added? {
            return Ok(());
        }
        let cards = spec.card_names().join(",");
        tracing::info!(tenant = spec.name, cards, "tenant added");
        let what = format!("added to card `{cards}`");
        self.events.add(NewEvent::tenant(EventKind::Added, &spec.name, what).on(spec.first_card()));
        Ok(())
    }

    /// Removes a tenant if the revision is still `expected`: ends its programs according to its policy, removes its
    /// socket, and frees its memory. Returns an error if the tenant does not exist, if the revision differs, if its
    /// card's owner does not respond, if the change cannot be saved, or if its programs do not exit. In the last two
    /// cases, the tenant is removed nevertheless.
    pub(crate) fn remove_tenant_if(&self, name: &str, expected: Option<&str>) -> Result<(), DaemonError> {
        let done = self.take_tenant(name, expected);
        if matches!(done, Ok(()) | Err(DaemonError::Lingering { .. })) {
            self.keep()?;
        }
        done
    }

    /// Removes a tenant without saving the change.
    pub(super) fn take_tenant(&self, name: &str, expected: Option<&str>) -> Result<(), DaemonError> {
        if self.state.lock().cuda_vm(name).is_some() {
            // VMs are removed by `remove_if`.
            return Err(DaemonError::NoTenant(name.to_owned()));
        }
        let (spec, turn) = self.tenant_turn(name)?;
        self.state.lock().expect(expected)?;
        let (of, kills, begin) = (format!("tenant `{name}`"), spec.on_remove == OnRemove::Kill, Instant::now());
        let mut left = Vec::new();
        let _turn = self.on_cards(&spec, turn, |turn| {
            loop {
                match turn.ask(&of, Request::Remove { name: name.to_owned(), kills })? {
                    Answer::Leaving(_) if begin.elapsed() < LEAVING => locks::sleep(POLL_INTERVAL),
                    Answer::Leaving(pids) => break left.extend(pids),
                    _ => break,
                }
            }
            Ok(())
        })?;
        // A process may have used several cards.
        left.sort_unstable();
        left.dedup();
        // Remove the folder while the name is reserved, because the next tenant with this name creates the folder
        // again.
        self.remove_folder(&spec);
        {
            let mut state = self.state.lock();
            state.tenants.remove(name);
            state.revision.next();
        }
        if self.state.lock().leases.remove(name).is_some() {
            self.keep_leases()?;
        }
        tracing::info!(tenant = name, card = spec.first_card(), kills, "tenant removed");
        let what = if kills { "removed, its programs are killed" } else { "removed, its programs are disconnected" };
        self.events.add(NewEvent::tenant(EventKind::Removed, name, what).on(spec.first_card()));
        if left.is_empty() { Ok(()) } else { Err(DaemonError::Lingering { tenant: name.to_owned(), pids: left }) }
    }

    /// Changes a tenant's settings on its cards. Keys that the patch omits keep their values. Returns an error if the
    /// tenant does not exist, if the revision is not `expected`, or if a setting is invalid; in these cases, nothing
    /// changes. Also returns an error if its card's owner does not respond, or if the change cannot be saved.
    pub(crate) fn set_tenant_if(
        &self,
        name: &str,
        patch: &TenantPatch,
        expected: Option<&str>,
    ) -> Result<api::Tenant, DaemonError> {
        let mut keys = table(patch).map_err(|what| DaemonError::Setting { of: format!("tenant `{name}`"), what })?;
        // Drop tables without keys, which change nothing.
        keys.retain(|_, value| value.as_object().is_none_or(|table| !table.is_empty()));
        self.tune_tenant(name, &keys, expected, "")?;
        self.keep()?;
        self.tenant(name)
    }

    /// Changes a tenant's changeable keys without saving the change. The event text ends with `why`.
    pub(super) fn tune_tenant(
        &self,
        name: &str,
        patch: &Map<String, Value>,
        expected: Option<&str>,
        why: &str,
    ) -> Result<(), DaemonError> {
        let of = format!("tenant `{name}`");
        let wrong = |what| DaemonError::Setting { of: of.clone(), what };
        let begin = Instant::now();
        let function = self.state.lock().vms.get(name).and_then(|entry| entry.spec.cuda);
        let other = patch.keys().find(|key| !["memory", "time", "vram_mib"].contains(&key.as_str()));
        if let Some(key) = other.filter(|_| function.is_some()) {
            return Err(wrong(format!(
                "{key}: a VM has no such key, expected `vram_mib`, or keys of `memory` or `time`"
            )));
        }
        let (now, spec, turn) = loop {
            let (now, turn) = self.tenant_turn(name)?;
            let spec = patched(&now, patch).map_err(wrong)?;
            {
                let state = self.state.lock();
                state.expect(expected)?;
                let refusals = state.refusals(&spec, self);
                if !refusals.is_empty() {
                    return Err(DaemonError::TenantRefused { tenant: name.to_owned(), refusals });
                }
            }
            let told = cuda::tenant(&spec, self.cuda(spec.first_card())?.spec(), &self.spec.socket_dir, function)?;
            if turn.moved(&of, &Request::Change(told), begin)? {
                break (now, spec, turn);
            }
            // The card and this tenant may change in the meantime.
            drop(turn);
            locks::sleep(owner_process::GUARANTEE_RETRY_INTERVAL);
        };
        // For a tenant with one card, keep the right to change the card until the settings are stored.
        let (_turn, _changing) = match &*spec.cards {
            [] => (Some(turn), None),
            _ => {
                let changing = self.changing_cards(name);
                drop(turn);
                (None, Some(changing))
            }
        };
        self.change_on_others(&spec, &now)?;
        let TenantSpec { vram_mib, memory, time, .. } = &spec;
        tracing::info!(tenant = name, vram_mib, ?memory, ?time, "the tenant's part of the card has changed");
        let (card, what) = (spec.first_card().to_owned(), changed(patch) + why);
        let mut state = self.state.lock();
        let is_vm = state.store_tenant(spec);
        state.revision.next();
        drop(state);
        self.events.add(match is_vm {
            true => NewEvent::vm(EventKind::Changed, name, what).on(&card),
            false => NewEvent::tenant(EventKind::Changed, name, what).on(&card),
        });
        Ok(())
    }

    /// Releases a tenant from quarantine, and clears its strikes.
    pub(super) fn release_tenant(&self, name: &str) -> Result<(), DaemonError> {
        let (spec, turn) = self.tenant_turn(name)?;
        let release =
            |turn: &Change<'_>| turn.ask(&format!("tenant `{name}`"), Request::Release(name.to_owned())).map(drop);
        self.on_cards(&spec, turn, release)?;
        self.events.add(NewEvent::tenant(EventKind::Released, name, RELEASED).on(spec.first_card()));
        Ok(())
    }

    /// Changes a CUDA card's sharing settings. Keys that the patches omit keep their values.
    pub(super) fn tune_cuda(
        &self,
        card: &CudaCard,
        scheduler: &Map<String, Value>,
        memory: &Map<String, Value>,
        expected: Option<&str>,
    ) -> Result<(), DaemonError> {
        let spec = card.spec();
        let of = format!("card `{}`", spec.name);
        let wrong = |what| DaemonError::Setting { of: of.clone(), what };
        let turn = card.change()?;
        let now = {
            let state = self.state.lock();
            state.expect(expected)?;
            state.tuning(spec)
        };
        let tuning = Tuning {
            scheduler: patched(&now.scheduler, scheduler).map_err(wrong)?,
            memory: patched(&now.memory, memory).map_err(wrong)?,
            ..now
        };
        let wanted = tuning.on(spec);
        let mut mistakes = config::cuda::scheduler(&wanted.scheduler);
        mistakes.extend(config::cuda::memory(&wanted));
        if let Some((key, what)) = mistakes.into_iter().next() {
            return Err(wrong(format!("{key}: {what}")));
        }
        if tuning.memory.host_mib > spec.memory.host_mib {
            return Err(wrong(super::memory::more_host_memory(tuning.memory.host_mib, spec.memory.host_mib)));
        }
        let windows = self.state.lock().windows_mib(&spec.name);
        if tuning.memory.host_mib < windows {
            let what = format!("{} MiB, expected at least {windows} for windows of VMs", tuning.memory.host_mib);
            return Err(wrong(format!("memory.host_mib: {what}")));
        }
        turn.ask(&of, Request::Tune(Box::new(owner_settings::rules(spec, &tuning))))?;
        tracing::info!(card = spec.name, ?tuning, "the sharing of the CUDA card has changed");
        let patches = [("scheduler", scheduler), ("memory", memory)].into_iter().filter(|(_, patch)| !patch.is_empty());
        let patch = patches.map(|(table, patch)| (table.to_owned(), Value::Object(patch.clone()))).collect();
        self.events.add(NewEvent::card(EventKind::Changed, &spec.name, changed(&patch)));
        let mut state = self.state.lock();
        // The card may have been drained while this change waited for the card's owner.
        let drained = state.tuning(spec).drained;
        state.tunings.insert(spec.name.clone(), Tuning { drained, ..tuning });
        state.revision.next();
        Ok(())
    }

    /// Returns the memory usage of a CUDA card's tenants.
    pub(super) fn cuda_memory(&self, card: &CudaCard) -> Result<api::CardMemory, DaemonError> {
        let (spec, seen) = (card.spec(), card.seen()?);
        let (tuning, windows) = {
            let state = self.state.lock();
            (state.tuning(spec), state.windows_mib(&spec.name) << 20)
        };
        let specs = self.tenant_specs(Some(&spec.name)).into_iter();
        let known = |tenant: TenantSpec| Some((seen.tenant(&tenant.name)?.0, (tenant.name, tenant.memory)));
        let names = specs.filter_map(known).collect();
        let memory = card_views::memory(spec, tuning.memory, Some(&seen.card.memory), &names);
        let host_used_bytes = memory.host_used_bytes.saturating_add(windows);
        Ok(api::CardMemory { host_used_bytes, windows_bytes: windows, ..memory })
    }
}
