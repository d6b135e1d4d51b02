//! Core of the daemon: cards and virtual machines, and operations that add or remove virtual machines.
//!
//! Parts: `backend` (the interface to a virtual machine's device), `cards` (the cards of a configuration), `vm` (a
//! virtual machine's thread), `endpoint` (a socket or a Xen domain), `show` (a virtual machine's status for operators),
//! `scheduling` (shares of the cards' time), `draining` (drained cards), `moving` (moves from one card to another),
//! `rebalancing` (automatic moves), `leases` (limits that last until a process exits), `upgrade` (takeover by another
//! daemon), `desired` (all changeable settings in one document; the crate `overrides` stores them, and the crate
//! `listening` opens the sockets), `account` (users and groups), `error`, `devices` (crates `vgpu` and `passthrough` as
//! backends), `admin` (the admin API), `serving` (the main loop of a ready daemon), `program` (startup and exit of the
//! process), `fixture` (feature `test-rig`).
//!
//! Each virtual machine has one thread, which runs its vfio-user server. The admin API runs on another thread. Virtual
//! machines are added and removed one at a time. Both operations can be slow because they scrub memory, but readers
//! never wait.
//!
//! Lock order: `locks::rank`.
//!
//! The daemon does not launch VMMs, reload its configuration (the next daemon reads it), write to the configuration
//! file (overrides are stored separately), or preserve a guest's card state if the daemon is killed (the VMM stays
//! connected).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use api::EventKind;
use events::{Log, NewEvent, Observer, author};
use locks::{Mutex, rank};
use vmm_glue::memory::MemoryLimits;
use vmm_glue::{Link, ParkError, StopHandle, SuspendedClient};

use config::check::{self, MAX_VMS};
use config::{CardKind, CardSpec, Config, DaemonSpec, ProfileSpec, RamSpec, TenantSpec, VmSpec};

mod admin;
mod backend;
mod cards;
mod cuda;
mod desired;
mod devices;
mod draining;
mod endpoint;
mod error;
#[cfg(any(test, feature = "test-rig"))]
pub mod fixture;
mod leases;
mod memory;
mod moving;
mod profiles;
pub mod program;
mod rebalancing;
mod saving;
mod scheduling;
mod serving;
mod show;
mod tenants;
mod upgrade;
mod vm;

#[cfg(test)]
mod tests;

pub use error::DaemonError;
pub(crate) use scheduling::{HISTORY_MS, WINDOW_MS};

use backend::{CardBackend, OpenCard};
use cuda::CudaCard;
use draining::Arrival;
use endpoint::{Endpoint, EndpointServer};
use listening::{Sockets, folders};
use metrics::moves::Moves;
use overrides::Revision;
use overrides::lease::Lease;
use overrides::{Live, OverrideStore, Tuning};
use show::{Found, show};
use upgrade::{Generations, UpgradeChain};
use vm::{EarlierClient, End, Running, Seen};

/// Maximum number of memory regions that a VM may lend to a passed-through card; a VM with a virtual IOMMU lends single
/// pages. Each region is a mapping in this process, and the kernel permits 65,530 mappings (`vm.max_map_count`).
const PASSED_THROUGH_REGIONS: usize = 32 << 10;

/// A virtual machine's table entry.
struct Entry {
    spec: VmSpec,
    life: Life,
}

/// Lifecycle stage of a virtual machine.
#[derive(Clone)]
enum Life {
    /// The virtual machine is being created.
    Starting,
    /// The virtual machine's thread is running, or has failed.
    Running(Arc<Running>),
    /// The virtual machine is being removed.
    Stopping(Arc<Running>),
}

impl Life {
    fn running(&self) -> Option<&Arc<Running>> {
        match self {
            Self::Starting => None,
            Self::Running(running) | Self::Stopping(running) => Some(running),
        }
    }
}

struct State {
    vms: BTreeMap<String, Entry>,
    /// Settings of the cards, by card name.
    tunings: BTreeMap<String, Tuning>,
    /// Tenants of CUDA cards, by name.
    tenants: BTreeMap<String, TenantSpec>,
    /// Names of the tenants that are being added and may still be rejected.
    coming: BTreeSet<String>,
    /// Names of the tenants whose cards are being changed, one after the other.
    changing_tenants: BTreeSet<String>,
    /// Leases of limits, by tenant.
    leases: BTreeMap<String, Lease>,
    /// Revision of all values in `vms`, `tunings` and `tenants` that operators can change.
    revision: Revision,
    closing: bool,
}

impl State {
    /// Returns a card's current settings.
    fn tuning(&self, card: &CardSpec) -> Tuning {
        self.tunings.get(&card.name).copied().unwrap_or_else(|| Tuning::from_spec(card))
    }

    /// Returns the settings for RAM that a virtual machine lends to a card.
    fn ram(&self, vm: &VmSpec, card: &CardSpec) -> RamSpec {
        vm.memory.ram.on(&self.tuning(card).memory)
    }

    /// Checks that an operator may change the current state. Returns an error if the daemon is shutting down, or if the
    /// operator expected a different revision.
    fn expect(&self, expected: Option<&str>) -> Result<(), DaemonError> {
        if self.closing {
            return Err(DaemonError::ShuttingDown);
        }
        let now = self.revision.to_string();
        match expected {
            Some(expected) if expected != now => Err(DaemonError::Changed { expected: expected.to_owned(), now }),
            _ => Ok(()),
        }
    }
}

/// A card with its configuration.
struct Card {
    spec: CardSpec,
    backend: Box<dyn CardBackend>,
    /// The card and its owner process, if the card uses NVIDIA's driver.
    cuda: Option<Arc<CudaCard>>,
}

/// The daemon, with its cards, virtual machines and tenants.
pub struct Daemon {
    spec: DaemonSpec,
    specs: Vec<CardSpec>,
    profiles: Vec<ProfileSpec>,
    cards: BTreeMap<String, Card>,
    state: Mutex<rank::Daemon, State>,
    /// Held while a virtual machine is added, removed, moved, saved or restored.
    changing: Mutex<rank::Changing, ()>,
    /// Held while settings of a card or a virtual machine are read, changed and stored.
    tuning: Mutex<rank::Tuning, ()>,
    /// File that stores overrides across restarts.
    override_store: Mutex<rank::OverrideStore, OverrideStore>,
    sockets: Sockets,
    /// This daemon's relation to its predecessor and successor.
    line: Generations,
    moves: Moves,
    events: Arc<Log>,
    observer: Mutex<rank::Observing, (Observer, Instant)>,
}

impl Daemon {
    /// Opens a configuration's cards, and starts its virtual machines and tenants. Saves later changes to
    /// `override_store`. Returns an error if a card, virtual machine or tenant cannot be started. In this case,
    /// everything already started is shut down.
    pub(crate) fn start(
        config: Config,
        opener: &dyn OpenCard,
        sockets: Sockets,
        override_store: OverrideStore,
    ) -> Result<Arc<Self>, DaemonError> {
        let events = Arc::new(Log::new());
        let what = format!("mediatord {} has started, process {}", env!("CARGO_PKG_VERSION"), std::process::id());
        events.add(NewEvent::daemon(EventKind::Started, what));
        let cards = Self::opened(config.cards.iter(), opener, &config, &events)?;
        let (vms, tenants) = (config.vms.clone(), config.tenants.clone());
        let daemon = Arc::new(Self::with(config, cards, sockets, override_store, events));
        author::acting(author::configuration(), || {
            for vm in vms {
                let name = vm.name.clone();
                if let Err(error) = daemon.reserve(vm, None, Arrival::Configured).and_then(|spec| daemon.fill(&spec)) {
                    daemon.shut_down();
                    // Virtual machines that an operator added at run time stay in the stored overrides, so that the
                    // next daemon tries to start them again.
                    tracing::error!(vm = name.as_str(), %error, "a VM cannot be started");
                    return Err(error);
                }
            }
            daemon.start_tenants(daemon.resume_leases(tenants))
        })?;
        daemon.sockets.end_unused();
        Ok(daemon)
    }

    /// Opens the cards.
    fn opened<'a>(
        specs: impl Iterator<Item = &'a CardSpec>,
        opener: &dyn OpenCard,
        config: &Config,
        events: &Arc<Log>,
    ) -> Result<BTreeMap<String, Card>, DaemonError> {
        let mut cards = BTreeMap::new();
        for spec in specs {
            let failed = |error| DaemonError::Failed(format!("card `{}` cannot be opened: {error}", spec.name));
            let (backend, cuda) = match spec.kind {
                CardKind::Cuda => {
                    let card = Arc::new(CudaCard::open(spec, config, events).map_err(failed)?);
                    let (own, socket_dir) = (Arc::clone(&card), config.daemon.socket_dir.clone());
                    (Box::new(cuda::Backend { card: own, socket_dir }) as Box<dyn CardBackend>, Some(card))
                }
                CardKind::Simgpu | CardKind::Vfio => (opener.open(spec).map_err(failed)?, None),
            };
            let name = &spec.name;
            tracing::info!(card = name.as_str(), kind = %spec.kind, vram_mib = spec.vram_mib, "card is open");
            cards.insert(name.clone(), Card { spec: spec.clone(), backend, cuda });
        }
        Ok(cards)
    }

    /// Creates a daemon with these cards, and without virtual machines or tenants.
    fn with(
        config: Config,
        cards: BTreeMap<String, Card>,
        sockets: Sockets,
        override_store: OverrideStore,
        events: Arc<Log>,
    ) -> Self {
        let Config { daemon, cards: specs, vms: _, tenants: _, profiles } = config;
        let tunings = specs.iter().map(|card| (card.name.clone(), Tuning::from_spec(card))).collect();
        let state = State {
            vms: BTreeMap::new(),
            tunings,
            tenants: BTreeMap::new(),
            coming: BTreeSet::new(),
            changing_tenants: BTreeSet::new(),
            leases: BTreeMap::new(),
            revision: Revision::first(),
            closing: false,
        };
        Self {
            spec: daemon,
            specs,
            profiles,
            cards,
            state: Mutex::new(state),
            changing: Mutex::new(()),
            tuning: Mutex::new(()),
            override_store: Mutex::new(override_store),
            sockets,
            line: Generations::default(),
            moves: Moves::default(),
            events,
            observer: Mutex::new((Observer::default(), Instant::now())),
        }
    }

    /// Sets the parameters for starting this daemon's successor.
    pub(crate) fn continues_by(&self, succession: UpgradeChain) {
        self.line.continues_by(succession);
    }

    /// Returns the status of the daemon itself.
    #[must_use]
    pub fn about(&self) -> api::DaemonInfo {
        let last = self.line.last();
        api::DaemonInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            upgrades: last.map_or(0, |last| last.upgrades),
            upgraded_at: last.map(|last| events::rfc3339(last.at)),
            upgrade_pause_ms: last.map(|last| u64::try_from(last.pause.as_millis()).unwrap_or(u64::MAX)),
            upgrade_failures: self.line.failures(),
        }
    }

    /// Returns the revision of the settings that operators can change. Each change results in a new revision.
    #[must_use]
    pub fn revision(&self) -> String {
        self.state.lock().revision.to_string()
    }

    /// Saves overrides to the file. Called after each change. Returns an error if the file cannot be written, or if the
    /// daemon is shutting down. The change takes effect nevertheless.
    fn keep(&self) -> Result<(), DaemonError> {
        let mut override_store = self.override_store.lock();
        if self.state.lock().closing {
            // During shutdown, virtual machines are removed without an operator's request, so do not save the state.
            return Err(DaemonError::ShuttingDown);
        }
        let live = self.live_now();
        override_store.keep(&live).map_err(|error| DaemonError::NotKept(format!("{:#}", anyhow::Error::new(error))))
    }

    /// Returns the current values of all settings that operators can change.
    fn live_now(&self) -> Live {
        let state = self.state.lock();
        let there = state.vms.iter().filter(|(_, entry)| matches!(entry.life, Life::Running(_)));
        let vms = there.map(|(name, entry)| (name.clone(), entry.spec.clone())).collect();
        let tenants = state.tenants.iter().filter(|(name, _)| !state.coming.contains(*name));
        // Leased values last only as long as a process, so do not save them.
        let without_lease = |spec: &TenantSpec| state.leases.get(&spec.name).map(|lease| lease.without(spec));
        let tenants =
            tenants.map(|(name, spec)| (name.clone(), without_lease(spec).unwrap_or_else(|| spec.clone()))).collect();
        Live { vms, tunings: state.tunings.clone(), tenants }
    }

    /// Compares the state with the previous state, and logs the differences as events.
    pub(crate) fn observe(&self) {
        let mut observer = self.observer.lock();
        let schedulers = self.schedulers(WINDOW_MS).unwrap_or_default();
        let states = events::States { cards: self.cards(), vms: self.vms(), tenants: self.tenants(), schedulers };
        let (observer, began) = &mut *observer;
        observer.compare(&states, began.elapsed()).into_iter().for_each(|event| self.events.add(event));
    }

    /// Returns the `[daemon]` table.
    #[must_use]
    pub fn spec(&self) -> &DaemonSpec {
        &self.spec
    }

    /// Adds a virtual machine. Its socket exists when this function returns.
    ///
    /// # Errors
    /// Returns an error if the virtual machine cannot be added; in this case, no part of it remains. Also returns an
    /// error if the change cannot be saved.
    pub fn add(&self, spec: VmSpec) -> Result<api::Vm, DaemonError> {
        self.add_if(spec, None)
    }

    /// Adds a virtual machine if the revision is still `expected`. Returns the same errors as [`Self::add`], and an
    /// error if the revision differs.
    pub(crate) fn add_if(&self, spec: VmSpec, expected: Option<&str>) -> Result<api::Vm, DaemonError> {
        let _one_at_a_time = self.changing.lock();
        let spec = self.reserve(spec, expected, Arrival::New)?;
        let vm = self.fill(&spec)?;
        self.keep()?;
        Ok(vm)
    }

    /// Validates a virtual machine and reserves its entry. The caller must hold `changing`, or own the daemon.
    fn reserve(&self, spec: VmSpec, expected: Option<&str>, arrival: Arrival) -> Result<VmSpec, DaemonError> {
        let mut state = self.state.lock();
        state.expect(expected)?;
        if state.vms.len() >= MAX_VMS {
            return Err(DaemonError::TooMany(MAX_VMS));
        }
        let others: Vec<_> = state.vms.values().map(|entry| &entry.spec).collect();
        let cards = state.marked(&self.specs);
        let spec = spec.placed(&self.spec, &cards, &others);
        let mut refusals = check::vm(&spec, &self.spec, &cards, &others);
        refusals.extend(taken_by_tenant(&state, &spec));
        refusals.extend(arrival.refused(&spec.card, &cards));
        if !refusals.is_empty() {
            return Err(DaemonError::Refused { vm: spec.name, refusals });
        }
        state.vms.insert(spec.name.clone(), Entry { spec: spec.clone(), life: Life::Starting });
        state.revision.next();
        Ok(spec)
    }

    /// Creates the virtual machine for a reserved entry. The caller must hold `changing`, or own the daemon.
    fn fill(&self, spec: &VmSpec) -> Result<api::Vm, DaemonError> {
        let name = &spec.name;
        let made = self.make(spec);
        let mut state = self.state.lock();
        match made {
            Ok(running) => {
                let running = Arc::new(running);
                if let Some(entry) = state.vms.get_mut(name) {
                    entry.life = Life::Running(running);
                }
                tracing::info!(vm = name.as_str(), card = spec.card.as_str(), "VM added");
                let what = format!("added to card `{}`", spec.card);
                self.events.add(NewEvent::vm(EventKind::Added, name, what).on(&spec.card));
            }
            Err(error) => {
                state.vms.remove(name);
                state.revision.next();
                return Err(error);
            }
        }
        let found = state.vms.get(name).map(|entry| self.found(&state, entry));
        drop(state);
        found.map(show).ok_or_else(|| DaemonError::NoVm(name.clone()))
    }

    fn make(&self, spec: &VmSpec) -> Result<Running, DaemonError> {
        let name = &spec.name;
        let card = self.cards.get(&spec.card).ok_or_else(|| DaemonError::NoCard(spec.card.clone()))?;
        let failed = |what: &dyn std::fmt::Display| DaemonError::Failed(format!("VM `{name}` cannot be added: {what}"));
        // Open the endpoint first, because this step fails most often and is cheap to undo.
        let endpoint = Endpoint::open(spec, &self.spec.socket_dir, &self.sockets)?;
        let ram = self.state.lock().ram(spec, &card.spec);
        let (server, path) = endpoint.serve(name, memory_limits(spec, &ram), &self.sockets)?;
        let built = || {
            let link = Link::new(card.backend.irqs()).map_err(|error| failed(&error))?;
            let stop = StopHandle::new().map_err(|error| failed(&error))?;
            link.memory().first_touches().set_limit(memory::touch_limit(&ram));
            let mut spec = spec.clone();
            spec.memory.ram = ram;
            let built = card.backend.build(&spec, &link).map_err(|error| match error.lacks {
                Some(what_to_do) => DaemonError::Quota { of: format!("VM `{name}`"), what: error.what, what_to_do },
                None => failed(&error),
            })?;
            Ok((link, stop, built))
        };
        match built() {
            Ok((link, stop, built)) => {
                let parked = self.revived(name, &server, &link);
                Running::start(name, server, path, link, stop, built, EarlierClient { parked, seen: Seen::default() })
            }
            Err(error) => {
                if let Some(path) = path {
                    path.forget();
                }
                Err(error)
            }
        }
    }

    /// Returns the VMM connection of a virtual machine that a killed daemon served.
    fn revived(&self, name: &str, server: &EndpointServer, link: &Link) -> Option<SuspendedClient> {
        let left = self.sockets.left(name)?;
        // Earlier versions of the daemon leave no journal.
        let remains = left.remains()?;
        let why = match remains.map_err(ParkError::from).and_then(|remains| server.revived(remains, link)) {
            Ok(parked) => {
                left.taken();
                return Some(parked);
            }
            Err(error) => error.to_string(),
        };
        tracing::error!(vm = name, why, "the VMM of a killed daemon has lost its device");
        None
    }

    /// Removes a virtual machine: disconnects its VMM, removes the socket, and frees its memory and channels.
    ///
    /// # Errors
    /// Returns an error if the virtual machine does not exist, is being created, or is already being removed, or if the
    /// change cannot be saved.
    pub fn remove(&self, name: &str) -> Result<(), DaemonError> {
        self.remove_if(name, None)
    }

    /// Removes a virtual machine if the revision is still `expected`. Returns the same errors as [`Self::remove`], and
    /// an error if the revision differs.
    pub(crate) fn remove_if(&self, name: &str, expected: Option<&str>) -> Result<(), DaemonError> {
        // Report an unknown name before waiting for other changes.
        if !self.state.lock().vms.contains_key(name) {
            return Err(DaemonError::NoVm(name.to_owned()));
        }
        let _one_at_a_time = self.changing.lock();
        self.take_out(name, expected)?;
        self.keep()
    }

    /// Removes a virtual machine and its entry. The caller must hold `changing`.
    fn take_out(&self, name: &str, expected: Option<&str>) -> Result<(), DaemonError> {
        // The removal discards the kill counts, so log the kills first. They are attributed to the daemon, not to the
        // author of the removal.
        author::acting(author::daemon(), || self.observe());
        let (running, card) = {
            let mut state = self.state.lock();
            state.expect(expected)?;
            let entry = state.vms.get_mut(name).ok_or_else(|| DaemonError::NoVm(name.to_owned()))?;
            let card = entry.spec.card.clone();
            let running = match &entry.life {
                Life::Running(running) => Arc::clone(running),
                Life::Starting => return Err(DaemonError::Busy(name.to_owned(), "added")),
                Life::Stopping(_) => return Err(DaemonError::Busy(name.to_owned(), "removed")),
            };
            entry.life = Life::Stopping(Arc::clone(&running));
            state.revision.next();
            (running, card)
        };
        running.end(name, End::Removed);
        if let Some(socket) = &running.socket {
            folders::remove(name, socket, &self.spec.socket_dir);
        }
        self.state.lock().vms.remove(name);
        tracing::info!(vm = name, "VM removed");
        self.events.add(NewEvent::vm(EventKind::Removed, name, "removed").on(&card));
        Ok(())
    }

    /// Returns the status of all virtual machines, sorted by name.
    #[must_use]
    pub fn vms(&self) -> Vec<api::Vm> {
        let entries: Vec<_> = {
            let state = self.state.lock();
            state.vms.values().map(|entry| self.found(&state, entry)).collect()
        };
        entries.into_iter().map(show).collect()
    }

    /// Returns the status of a virtual machine.
    ///
    /// # Errors
    /// Returns an error if the virtual machine does not exist.
    pub fn vm(&self, name: &str) -> Result<api::Vm, DaemonError> {
        let found = {
            let state = self.state.lock();
            state.vms.get(name).map(|entry| self.found(&state, entry))
        };
        found.map(show).ok_or_else(|| DaemonError::NoVm(name.to_owned()))
    }

    /// Returns the input of `show`, which runs after the state lock has been released.
    fn found(&self, state: &State, entry: &Entry) -> Found {
        let card = self.cards.get(&entry.spec.card);
        let ram = card.map(|card| state.ram(&entry.spec, &card.spec)).unwrap_or_default();
        Found { spec: entry.spec.clone(), life: entry.life.clone(), ram }
    }

    /// Returns the status of all cards, sorted by name.
    #[must_use]
    pub fn cards(&self) -> Vec<api::Card> {
        self.cards.values().map(|card| self.show_card(card)).collect()
    }

    /// Returns true if all cards have failed; false if the daemon has no cards, or if another daemon owns them.
    #[must_use]
    pub(crate) fn has_failed(&self) -> bool {
        !self.line.is_gone()
            && !self.cards.is_empty()
            && self.cards.values().all(|card| card.backend.status().failed.is_some())
    }

    /// Returns the status of a card.
    ///
    /// # Errors
    /// Returns an error if the card does not exist.
    pub fn card(&self, name: &str) -> Result<api::Card, DaemonError> {
        let card = self.cards.get(name).ok_or_else(|| DaemonError::NoCard(name.to_owned()))?;
        Ok(self.show_card(card))
    }

    fn show_card(&self, card: &Card) -> api::Card {
        let Card { spec, backend, .. } = card;
        let (users, running): (Vec<VmSpec>, Vec<Option<Arc<Running>>>) = {
            let state = self.state.lock();
            let users = state.vms.values().filter(|entry| entry.spec.card == spec.name);
            users.map(|entry| (entry.spec.clone(), entry.life.running().cloned())).unzip()
        };
        let tenants: Vec<TenantSpec> = {
            let state = self.state.lock();
            state.tenants.values().filter(|tenant| tenant.uses(&spec.name)).cloned().collect()
        };
        let drained = self.state.lock().tuning(spec).drained;
        let status = backend.status();
        let used = running.iter().flatten().map(|running| running.backend.status().channels_used);
        let passthrough = users.iter().any(|vm| vm.passthrough);
        let cuda = spec.kind == CardKind::Cuda;
        let reserved = if passthrough || cuda { 0 } else { spec.reserve_mib() };
        let shared = users.iter().filter(|vm| vm.cuda.is_none()).filter_map(|vm| vm.vram_mib);
        // For a CUDA card, count only guarantees, because tenants' other memory is not reserved.
        let of_vms = users.iter().filter(|vm| vm.cuda.is_some()).filter_map(|vm| vm.memory.guarantee_mib);
        let promised = tenants.iter().filter_map(|tenant| tenant.memory.guarantee_mib).chain(of_vms);
        let shared = shared.chain(promised).fold(0, u64::saturating_add);
        let assigned = if passthrough { spec.vram_mib } else { shared };
        // Use the lower of two limits: the unassigned part of the configured memory, and the card's free VRAM.
        let left = spec.vram_mib.saturating_sub(reserved).saturating_sub(assigned);
        let [bar1_mib, bar3_mib] = status.apertures_mib.unwrap_or([spec.bar1_mib, spec.bar3_mib]);
        api::Card {
            name: spec.name.clone(),
            kind: spec.kind.to_string(),
            error: status.failed.or(status.trouble),
            pci_id: status.pci_id,
            model: status.model,
            uuid: status.uuid,
            owner_restarts: status.owner_restarts,
            device: cuda.then(|| spec.cuda().device),
            vram_mib: spec.vram_mib,
            vram_reserved_mib: reserved,
            vram_assigned_mib: assigned,
            vram_free_mib: status.vram_free_mib.map_or(left, |free| free.min(left)),
            vram_placed_mib: status.vram_placed_mib,
            vram_mediator_mib: status.vram_mediator_mib,
            bar1_mib,
            bar3_mib,
            channels: status.channels,
            channels_used: used.fold(0, u32::saturating_add),
            vms: users.into_iter().map(|vm| vm.name).collect(),
            tenants: tenants.into_iter().map(|tenant| tenant.name).collect(),
            strangers: status.strangers,
            unexplained_bytes: status.unexplained_bytes,
            passthrough,
            drained,
        }
    }

    /// Shuts down all virtual machines. No virtual machine can be added afterwards.
    pub(crate) fn shut_down(&self) {
        self.state.lock().closing = true;
        let _one_at_a_time = self.changing.lock();
        let running: Vec<_> = {
            let mut state = self.state.lock();
            let entries = std::mem::take(&mut state.vms);
            entries.into_iter().filter_map(|(name, entry)| Some((name, entry.life.running()?.clone()))).collect()
        };
        for (_, running) in &running {
            running.stop();
        }
        for (name, running) in running {
            running.end(&name, End::Daemon);
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.shut_down();
    }
}

/// Returns the limits on the memory that a virtual machine may lend.
fn memory_limits(vm: &VmSpec, ram: &RamSpec) -> MemoryLimits {
    // The card manager enforces the quota, which can change later. A passed-through card has no other users.
    let mapped_bytes = if vm.passthrough { memory::bytes(ram.quota_mib) } else { card_manager::iova::SHARED_BYTES };
    let mut limits =
        MemoryLimits { mapped_bytes, files: listening::descriptors::files_of_vm(), ..MemoryLimits::default() };
    if vm.passthrough {
        limits.regions = PASSED_THROUGH_REGIONS;
    }
    limits
}

/// Returns a rejection if a tenant already uses the VM's name.
fn taken_by_tenant(state: &State, vm: &VmSpec) -> Option<check::Refusal> {
    let what = format!("`{}` is the name of a tenant, expected a new one", vm.name);
    let refusal = check::Refusal { kind: check::RefusalKind::Conflict, field: "name", what };
    state.tenants.contains_key(&vm.name).then_some(refusal)
}
