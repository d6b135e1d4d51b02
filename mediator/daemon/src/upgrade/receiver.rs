//! Receiving daemon of an upgrade.
//!
//! Until the other daemon releases ownership, this daemon does not access that daemon's cards and clients, and does not
//! remove paths. Only configured changes to the permissions of sockets take effect earlier.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use api::EventKind;
use events::{Log, NewEvent, author};
use handover::{Introduction, Package, Receiver, Takeover};
use saved_state::SavedState;
use vgpu::SavedSide;
use vmm_glue::{Link, StopHandle, SuspendedClient};
use vram::TenantId;

use super::EventsPart;
use super::cuda;
use super::{APERTURES, CLIENTS, HANDOVER_TIMEOUT, HOST_MEMORY, SOCKET, STATE_LOCK, UNIT, VRAM, known, monotonic_ns};
use crate::backend::Built;
use crate::cards::{Cards, GivenCard, ReopenedCard};
use crate::draining::Arrival;
use crate::endpoint::EndpointServer;
use crate::vm::{EarlierClient, Running, Seen};
use crate::{Card, Daemon, DaemonError, Endpoint, Entry, Life, memory};
use config::{CardSpec, Config, VmSpec};
use handover::{CudaPart, Roster, RosterCard, RosterCudaCard, RosterVm};
use listening::Activated;
use listening::{SocketPath, Sockets};
use overrides::OverrideStore;

/// Owner number of the roster.
const ROSTER: u32 = 0;

/// Receiving end of the connection between the two daemons.
pub(crate) struct Successor {
    receiver: Receiver,
    roster: Roster,
    events: Log,
    cuda_cards: Vec<RosterCudaCard>,
    pub(super) descriptors: Package,
}

/// A virtual machine that has been created but is not served yet.
pub(super) struct Coming {
    pub spec: VmSpec,
    pub saved: RosterVm,
    pub server: EndpointServer,
    pub path: Option<SocketPath>,
    pub link: Link,
    pub stop: StopHandle,
    pub built: Built,
    pub parked: SuspendedClient,
}

impl Successor {
    /// Connects to the daemon at the other end of standard input, and receives its state.
    ///
    /// # Errors
    /// Returns an error if there is no such daemon, or if this program cannot read its state.
    pub fn meet() -> Result<Self, String> {
        let socket = std::io::stdin().as_fd().try_clone_to_owned().map_err(|error| error.to_string())?;
        handover::points::here("receiver: started");
        let introduction = Introduction { program: env!("CARGO_PKG_VERSION").to_owned(), reads: known() };
        let receiver = Receiver::connect(socket, &introduction)
            .map_err(|error| format!("{error}; --takeover is used only internally by `mediatorctl daemon upgrade`"))?;
        handover::points::here("receiver: known");
        let package = receiver.take(HANDOVER_TIMEOUT).map_err(|error| error.to_string())?;
        handover::points::here("receiver: given");
        match roster(&package) {
            Ok((roster, events, cuda_cards)) => Ok(Self { receiver, roster, events, cuda_cards, descriptors: package }),
            Err(why) => {
                // The other daemon may have exited in the meantime.
                let _nobody = receiver.refuse(&why);
                Err(why)
            }
        }
    }

    /// Rejects the takeover before receiving the state, and sends the reason to the daemon at the other end of standard
    /// input.
    pub(crate) fn decline(why: &str) {
        if let Ok(socket) = std::io::stdin().as_fd().try_clone_to_owned() {
            // The other daemon may have exited in the meantime.
            let _nobody = Receiver::decline(socket, why);
        }
    }

    /// Rejects the takeover, and sends the reason to the other daemon.
    pub fn refuse(self, why: &str) {
        // The other daemon may have exited in the meantime.
        let _nobody = self.receiver.refuse(why);
    }

    /// Returns the listening sockets. Their paths still belong to the other daemon.
    ///
    /// # Errors
    /// Returns an error if a descriptor is not a listening socket.
    pub fn sockets(&mut self) -> Result<Sockets, String> {
        let mut activated = Activated::default();
        for (name, fd) in self.take(SOCKET) {
            activated.stored.insert(name, UnixListener::from(fd));
        }
        for (name, fd) in self.take(UNIT) {
            activated.listeners.insert(name, UnixListener::from(fd));
        }
        activated.check().map_err(|error| error.to_string())?;
        Ok(Sockets::handed(activated))
    }

    /// Returns the configuration with all run-time changes, and the store for these changes.
    ///
    /// # Errors
    /// Returns the same errors as [`OverrideStore::handed`].
    pub fn override_store(&mut self, file: Config) -> Result<(Config, OverrideStore), String> {
        let lock = self.descriptors.take(STATE_LOCK).pop().map(File::from);
        OverrideStore::handed(file, &self.roster.state, lock)
            .map_err(|error| format!("{:#}", anyhow::Error::new(error)))
    }

    /// Removes all descriptors whose names start with `prefix`, and returns them with the rest of their names.
    fn take(&mut self, prefix: &str) -> Vec<(String, OwnedFd)> {
        let of = self.descriptors.descriptors.extract_if(.., |(name, _)| name.starts_with(prefix));
        of.map(|(name, fd)| (name.get(prefix.len()..).unwrap_or_default().to_owned(), fd)).collect()
    }
}

/// Returns the daemon's own part of the state, the event log, and the cards with owner processes.
fn roster(package: &Package) -> Result<(Roster, Log, Vec<RosterCudaCard>), String> {
    let mut file = SavedState::parse(&package.file, &known()).map_err(|error| error.to_string())?;
    let roster = file.take(ROSTER).map_err(|error| error.to_string())?;
    let events = match file.owners::<EventsPart>().is_empty() {
        true => Log::new(),
        false => file.take(ROSTER).map(|EventsPart(saved)| Log::restored(saved)).map_err(|error| error.to_string())?,
    };
    let cuda_cards = match file.owners::<CudaPart>().is_empty() {
        true => Vec::new(),
        false => file.take(ROSTER).map(|CudaPart(cards)| cards).map_err(|error| error.to_string())?,
    };
    file.finish().map_err(|error| error.to_string())?;
    Ok((roster, events, cuda_cards))
}

impl Daemon {
    /// Takes over from another daemon, with the configuration `config`. Returns an error if the state does not match
    /// the configuration, or if a resource is not available. In this case, the other daemon is notified, and continues.
    pub(crate) fn take_over(
        config: Config,
        opener: &Cards,
        sockets: Sockets,
        override_store: OverrideStore,
        mut successor: Successor,
    ) -> Result<Arc<Self>, DaemonError> {
        let refused = |successor: Successor, why: String| {
            successor.refuse(&why);
            DaemonError::Failed(why)
        };
        let vms = config.vms.clone();
        let tenants = config.tenants.clone();
        let mut cards = Vec::new();
        let mut coming = Vec::new();
        for saved in std::mem::take(&mut successor.roster.cards) {
            match reopened(&config, opener, &sockets, &mut successor, saved) {
                Ok((card, its)) => {
                    cards.push(card);
                    coming.extend(its);
                }
                Err(why) => return Err(refused(successor, why)),
            }
        }
        let events = Arc::new(std::mem::take(&mut successor.events));
        let mut cuda_cards = Vec::new();
        for saved in std::mem::take(&mut successor.cuda_cards) {
            match cuda::restored(&config, &sockets, &events, &mut successor, saved) {
                Ok((card, its)) => {
                    cuda_cards.push(card);
                    coming.extend(its);
                }
                Err(why) => return Err(refused(successor, why)),
            }
        }
        let is_given = |spec: &CardSpec| {
            cards.iter().any(|(name, _)| *name == spec.name)
                || cuda_cards.iter().any(|card| card.spec().name == spec.name)
        };
        let others = config.cards.iter().filter(|spec| !is_given(spec));
        let opened = match Self::opened(others, opener, &config, &events) {
            Ok(opened) => opened,
            Err(error) => return Err(refused(successor, error.to_string())),
        };
        let Successor { receiver, roster, events: _, cuda_cards: _, descriptors: _ } = successor;
        let failed = |error: handover::Error| DaemonError::Failed(format!("the other daemon continues: {error}"));
        handover::points::here("receiver: made");
        receiver.ready().map_err(failed)?;
        handover::points::here("receiver: ready");
        receiver.wait(HANDOVER_TIMEOUT).map_err(failed)?;
        handover::points::here("receiver: owner");
        sockets.own();
        let mut all: BTreeMap<String, Card> = opened;
        for (name, card) in cards {
            let spec = card.spec().clone();
            match card.take_over() {
                Ok(backend) => {
                    tracing::info!(card = name.as_str(), "card was taken over");
                    all.insert(name, Card { spec, backend, cuda: None });
                }
                Err(error) => {
                    // Other cards continue.
                    tracing::error!(card = name.as_str(), %error, "the card is lost, with its VMs; restart the daemon");
                    coming.retain(|vm: &Coming| vm.spec.card != name);
                }
            }
        }
        for card in cuda_cards {
            let (name, spec) = (card.spec().name.clone(), card.spec().clone());
            if let Err(error) = card.begin() {
                tracing::error!(card = name.as_str(), %error, "the owner of the card cannot be used; restart the daemon");
            }
            let socket_dir = config.daemon.socket_dir.clone();
            let backend = Box::new(crate::cuda::Backend { card: Arc::clone(&card), socket_dir });
            all.insert(name, Card { spec, backend, cuda: Some(card) });
        }
        handover::points::here("receiver: has the cards");
        let daemon = Arc::new(Self::with(config, all, sockets, override_store, events));
        for vm in coming {
            handover::points::here("receiver: serves");
            let name = vm.spec.name.clone();
            if let Err(error) = daemon.serve_again(vm) {
                tracing::error!(vm = name.as_str(), %error, "a VM is lost");
            }
        }
        handover::points::here("receiver: serves all");
        let pause = Duration::from_nanos(monotonic_ns().saturating_sub(roster.began_ns));
        let _first = daemon.line.last.set(Takeover::now(pause, roster.upgrades.saturating_add(1)));
        tracing::info!(pause_ms = pause.as_millis() as u64, "the VMs of the previous daemon continue");
        let (version, pid, pause_ms) = (env!("CARGO_PKG_VERSION"), std::process::id(), pause.as_millis());
        let what = format!("mediatord {version}, process {pid}, has taken over; VMs waited {pause_ms} ms");
        daemon.events.add(NewEvent::daemon(EventKind::Upgraded, what));
        for vm in vms.into_iter().filter(|vm| !daemon.state.lock().vms.contains_key(&vm.name)) {
            let name = vm.name.clone();
            let added = || daemon.reserve(vm, None, Arrival::Configured).and_then(|spec| daemon.fill(&spec));
            if let Err(error) = author::acting(author::configuration(), added) {
                tracing::error!(vm = name.as_str(), %error, "a VM that was added to the configuration cannot be started");
            }
        }
        daemon.confirm_owners();
        let tenants = daemon.resume_leases(tenants);
        if let Err(error) = author::acting(author::configuration(), || daemon.start_tenants(tenants)) {
            tracing::error!(%error, "tenants cannot be started");
        }
        daemon.sockets.end_unused();
        // Save changes that the other daemon has not saved, and drop overrides that the configuration makes redundant.
        if let Err(error) = daemon.keep() {
            tracing::warn!(%error, "cannot save run-time changes");
        }
        Ok(daemon)
    }

    /// Sends this configuration's settings to the owners that the other daemon started, unless they already have them.
    fn confirm_owners(&self) {
        let vms: Vec<VmSpec> = self.state.lock().vms.values().map(|entry| entry.spec.clone()).collect();
        for card in self.cards.values().filter_map(|card| card.cuda.as_deref()) {
            let name = card.spec().name.as_str();
            if let Err(error) = card.confirm_rules() {
                tracing::error!(card = name, %error, "cannot set the rules of the card");
            }
            for vm in vms.iter().filter(|vm| vm.card == name) {
                if let Err(error) = crate::cuda::function::confirm(card, vm, &self.spec.socket_dir) {
                    tracing::error!(vm = vm.name, %error, "cannot set the VM's share of its card");
                }
            }
        }
    }

    /// Resumes serving a virtual machine.
    fn serve_again(&self, vm: Coming) -> Result<(), DaemonError> {
        let Coming { spec, saved, server, path, link, stop, built, parked } = vm;
        let name = spec.name.clone();
        let seen =
            Seen { memory_not_shared: saved.memory_not_shared.into(), resets: saved.resets.into(), ..Seen::default() };
        let failed = |error| DaemonError::Failed(format!("VM `{name}`: {error}"));
        built.backend.begin().map_err(failed)?;
        let earlier = EarlierClient { parked: Some(parked), seen };
        let running = Running::start(&name, server, path, link, stop, built, earlier)?;
        let entry = Entry { spec, life: Life::Running(Arc::new(running)) };
        self.state.lock().vms.insert(name, entry);
        Ok(())
    }
}

/// Rebuilds a card and its virtual machines from the received state, without accessing the card or its clients.
fn reopened(
    config: &Config,
    opener: &Cards,
    sockets: &Sockets,
    successor: &mut Successor,
    saved: RosterCard,
) -> Result<((String, ReopenedCard), Vec<Coming>), String> {
    let RosterCard { name, next_vm, file, vms } = saved;
    let of_card = |why: &dyn std::fmt::Display| format!("card `{name}`: {why}");
    let spec = config.cards.iter().find(|card| card.name == name);
    let spec =
        spec.ok_or_else(|| of_card(&"the configuration no longer contains it; restore it, or remove its VMs first"))?;
    let mut file = SavedState::parse(&file, &known()).map_err(|error| of_card(&error))?;
    let one = |package: &mut Package, prefix: &str| package.take(&format!("{prefix}{name}")).pop().map(File::from);
    let vram = one(&mut successor.descriptors, VRAM).ok_or_else(|| of_card(&"its memory was not handed over"))?;
    let host_memory = one(&mut successor.descriptors, HOST_MEMORY);
    let mut specs = Vec::new();
    for saved in vms {
        let vm = config.vms.iter().find(|vm| vm.name == saved.name && vm.card == name);
        let vm = vm.ok_or_else(|| {
            let what = "the configuration no longer has it on this card; restore it, or remove the VM first";
            format!("VM `{}`: {what}", saved.name)
        })?;
        if vm.passthrough || vm.xen_domain.is_some() {
            return Err(format!("VM `{}`: the configuration has changed it; remove the VM first", saved.name));
        }
        specs.push((vm.clone(), saved));
    }
    let settings = specs.iter().map(|(vm, saved)| (TenantId(saved.id), (vm.clone(), saved.vram_bytes))).collect();
    let given = GivenCard { vram, host_memory, next_vm, vms: settings };
    let mut card = opener.reopen(spec, given, &mut file).map_err(|error| of_card(&error))?;
    let mut coming = Vec::new();
    for (vm, saved) in specs {
        let of_vm = |why: &dyn std::fmt::Display| format!("VM `{}`: {why}", vm.name);
        let endpoint = Endpoint::open(&vm, &config.daemon.socket_dir, sockets).map_err(|error| of_vm(&error))?;
        let ram = vm.memory.ram.on(&spec.memory);
        let limits = crate::memory_limits(&vm, &ram);
        let (server, path) = endpoint.serve(&vm.name, limits, sockets).map_err(|error| of_vm(&error))?;
        let link = Link::new(card.irqs()).map_err(|error| of_vm(&error))?;
        let stop = StopHandle::new().map_err(|error| of_vm(&error))?;
        link.memory().first_touches().set_limit(memory::touch_limit(&ram));
        let clients = file.take(saved.id).map_err(|error| of_vm(&error))?;
        let descriptors = successor.descriptors.take(&format!("{CLIENTS}{}", vm.name));
        let parked = server.parked(clients, descriptors, &link).map_err(|error| of_vm(&error))?;
        let apertures = successor.descriptors.take(&format!("{APERTURES}{}", vm.name));
        let side = SavedSide::read(TenantId(saved.id), &mut file, apertures).map_err(|error| of_vm(&error))?;
        let built = card.vm(TenantId(saved.id), side, &link).map_err(|error| of_vm(&error))?;
        coming.push(Coming { spec: vm, saved, server, path, link, stop, built, parked });
    }
    file.finish().map_err(|error| of_card(&error))?;
    Ok(((name, card), coming))
}
