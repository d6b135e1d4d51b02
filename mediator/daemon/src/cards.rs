//! The opened cards of a configuration, which create the devices of virtual machines.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use firmware::{Inbox, Set, Store};
use locks::{Mutex, rank};
use physical::{GoingCard, Physical};
use saved_state::SavedState;
use sched::VgpuParams;
use vmm_glue::{IrqCounts, Link};
use vram::{OnFull, QuantaConfig, Summary, TenantId};

use super::backend::{Awaiting, BackendError, Built, CardBackend, CardStatus, Movable, OpenCard};
use super::memory::ram_share;
use card_manager::shortage::Shortage;
use card_manager::usage::SchedulerUsage;
use card_manager::{Chaos, Division, Handed, ManagedCard, Reopened, SavedHost, Share, Sharing};
use config::check::{MAX_CHANNELS, MIN_VM_VRAM_MIB};
use config::memory::QuantaSpec;
use config::{Apertures, CardKind, CardMemory, CardSpec, Residue, VmSpec};
use passthrough::PassthroughDevice;
use vgpu::{MediatedVm, PvSettings, SavedSide, Settings};

/// Opens real and software cards.
#[derive(Clone, Debug, Default)]
pub struct Cards {
    /// Falcon firmware for real cards. Both fields are `None` without a state directory.
    store: Option<Store>,
    inbox: Option<Inbox>,
}

impl Cards {
    /// Returns the opener for a daemon's cards. `state_dir` is the daemon's state directory, if configured.
    #[must_use]
    pub fn new(state_dir: Option<&Path>) -> Self {
        let store = state_dir.map(Store::within);
        let inbox = store.clone().map(Inbox::for_store).transpose();
        let inbox = inbox.unwrap_or_else(|error| {
            tracing::warn!(%error, "firmware loaded by guests is not recorded");
            None
        });
        Self { store, inbox }
    }

    /// Returns the approved firmware for a card's falcons, or placeholders for a software card.
    fn firmware(&self, kind: CardKind) -> Result<Set, BackendError> {
        if kind == CardKind::Simgpu {
            return Ok(Set::stand_in());
        }
        let store = self.store.as_ref().ok_or_else(|| {
            BackendError::failed("no `state_dir` is configured to store the firmware of the card's falcons")
        })?;
        store.approved().map_err(BackendError::failed)?.map_err(BackendError::failed)
    }
}

impl OpenCard for Cards {
    fn open(&self, spec: &CardSpec) -> Result<Box<dyn CardBackend>, BackendError> {
        let card = Physical::open(spec).map_err(BackendError::failed)?;
        // Firmware is needed only when the mediator initializes the card, so an operator may install it later.
        if let Err(error) = self.firmware(spec.kind) {
            tracing::warn!(card = spec.name, %error, "virtual machines cannot share the card yet");
        }
        Ok(Box::new(OwnedCard::new(spec, self, card, 0)))
    }
}

/// Nanoseconds per millisecond.
const MS: u64 = 1_000_000;

/// Converts a card's memory settings to the card manager's format, with sizes in chunks of `chunk_kib` KiB.
fn division(memory: &CardMemory, chunk_kib: u64) -> Division {
    let chunks = |mib: u64| u32::try_from(mib.saturating_mul(1024) / chunk_kib.max(1)).unwrap_or(u32::MAX);
    let QuantaSpec { mode, window_ms, on_permille, margin_permille, factor, min_ms, max_ms } = memory.quanta;
    Division {
        balance: vram::balance::Config {
            policy: memory.victims,
            return_interval_ns: memory.return_ms.saturating_mul(MS),
            settle_ns: memory.settle_ms.saturating_mul(MS),
            idle_after_ns: memory.idle_ms.saturating_mul(MS),
            low_water: chunks(memory.low_water_mib),
            ..vram::balance::Config::default()
        },
        quanta: QuantaConfig {
            mode,
            window_ns: window_ms.saturating_mul(MS),
            on_permille,
            margin_permille,
            factor: factor.unwrap_or(QuantaConfig::default().factor),
            min_ns: min_ms.saturating_mul(MS),
            max_ns: max_ms.saturating_mul(MS),
        },
        reserve: chunks(memory.reserve_mib),
        chaos: Chaos { every: memory.chaos_every, seed: memory.chaos_seed },
    }
}

/// A card owned by this daemon.
struct OwnedCard {
    spec: CardSpec,
    cards: Cards,
    card: Physical,
    /// The card's mediator state. Exists from the first mediated VM until a passthrough VM needs the card.
    host: Mutex<rank::Ownership, Option<Arc<ManagedCard>>>,
    /// The card's scheduler settings, which exist even while the mediator does not own the card.
    scheduler: Mutex<rank::SchedulerSettings, sched::Config>,
    /// The card's memory settings.
    memory: Mutex<rank::MemorySettings, CardMemory>,
    next_vm: AtomicU32,
    /// True once the card has been released for passthrough, because the VRAM may then contain a passthrough VM's data.
    left_over: AtomicBool,
}

impl OwnedCard {
    fn new(spec: &CardSpec, cards: &Cards, card: Physical, next_vm: u32) -> Self {
        let (host, next_vm) = (Mutex::new(None), AtomicU32::new(next_vm));
        let (scheduler, memory) = (Mutex::new(spec.scheduler), Mutex::new(spec.memory));
        let (spec, cards, left_over) = (spec.clone(), cards.clone(), AtomicBool::new(false));
        Self { spec, cards, card, host, scheduler, memory, next_vm, left_over }
    }

    /// Returns the current settings in the format of the card manager.
    fn sharing(&self) -> Sharing {
        Sharing {
            chunk_bytes: self.spec.chunk_kib << 10,
            reserve_bytes: self.spec.reserve_mib() << 20,
            host_bytes: self.spec.memory.host_mib << 20,
            division: division(&self.memory.lock(), self.spec.chunk_kib),
            scheduler: *self.scheduler.lock(),
            clear: self.spec.residue == Residue::Clear,
            engines_zero: !self.card.is_of_this_process(),
            shared: self.card.is_of_this_process(),
        }
    }

    /// Returns a virtual machine's settings. Its guest sees `vram_bytes` bytes of VRAM, which are all guaranteed if
    /// `on_full` is `refuse`.
    fn settings(&self, vm: &VmSpec, vram_bytes: u64) -> Settings {
        let mut memory = vm.memory.limits(vm.vram_mib.unwrap_or(0), &self.spec);
        if memory.on_full == OnFull::Refuse {
            let chunk = self.spec.chunk_kib << 10;
            memory.guarantee = u32::try_from(vram_bytes.checked_div(chunk).unwrap_or(0)).unwrap_or(u32::MAX);
        }
        let share = Share {
            vram_bytes,
            memory,
            channels: vm.channels(),
            hang_limit: vm.hang_limit(),
            time: vm.time_share(),
            ram: ram_share(&vm.memory.ram.on(&self.spec.memory)),
        };
        let paravirtual = vm.paravirtual.offered.then(|| PvSettings {
            table_bytes: vm.paravirtual.tables_mib << 20,
            segment_bytes: vm.paravirtual.segments_mib << 20,
            group: vm.paravirtual.group.as_deref().map(Into::into),
        });
        let apertures = match vm.apertures {
            Apertures::Trapped => vgpu::Apertures::Trapped,
            Apertures::Remapped => vgpu::Apertures::Remapped,
        };
        Settings { share, shadow: vm.shadow, apertures, queue_limit: vm.memory.queue_limit(), paravirtual }
    }

    /// Releases the card for passthrough, after zeroing the data that an earlier passthrough VM left in VRAM.
    fn hand_over(&self) -> Result<(), BackendError> {
        // The mediator itself scrubs the memory of its VMs. This scrub removes an earlier passthrough VM's data.
        if self.left_over.swap(true, Ordering::Relaxed) {
            let host = self.host()?;
            while host.lock().vram_mut().scrub_piece().map_err(BackendError::failed)? {}
        }
        if let Some(host) = self.host.lock().take() {
            host.close();
        }
        Ok(())
    }

    /// Returns the card's mediator state, unless it does not exist or has failed.
    fn working(&self) -> Option<Arc<ManagedCard>> {
        self.host.lock().clone().filter(|host| host.failure().is_none())
    }

    fn host(&self) -> Result<Arc<ManagedCard>, BackendError> {
        let mut host = self.host.lock();
        if let Some(host) = &*host {
            return match host.failure() {
                None => Ok(Arc::clone(host)),
                Some(why) => Err(BackendError::failed(format!("the card has failed: {why}; restart the daemon"))),
            };
        }
        let firmware = self.cards.firmware(self.spec.kind)?;
        let opened = ManagedCard::open(self.card.card(), &self.spec.name, &self.sharing(), firmware);
        let opened = opened.map_err(BackendError::failed)?;
        if let Some(inbox) = &self.cards.inbox {
            opened.collect_firmware(inbox.clone());
        }
        let mib = opened.info().vram_bytes >> 20;
        if mib < self.spec.vram_mib {
            opened.close();
            let what = format!("vram_mib: {}, but the card has {mib} MiB; correct the key", self.spec.vram_mib);
            return Err(BackendError::failed(what));
        }
        Ok(Arc::clone(host.insert(opened)))
    }
}

impl CardBackend for OwnedCard {
    fn status(&self) -> CardStatus {
        let id = self.card.card().identity();
        let chunks = self.working().map(|host| host.lock().vram().chunks.summary());
        let mib = |count: fn(&Summary) -> u32| {
            chunks.as_ref().map(|chunks| u64::from(count(chunks)).saturating_mul(chunks.chunk_bytes) >> 20)
        };
        let own = self.working().map_or(0, |host| host.own_channels());
        // If the mediator has not initialized the card yet, identify the chip by the PCI device ID.
        let known = || nvspec::chip::CHIPS.iter().find(|chip| chip.pci_device == id.device);
        let chip = self.working().map(|host| host.info().chip).or_else(known);
        let placed = |chunks: &Summary| chunks.vms.values().map(|vm| vm.placed).fold(0, u32::saturating_add);
        CardStatus {
            failed: self.host.lock().as_ref().and_then(|host| host.failure()).map(str::to_owned),
            trouble: None,
            pci_id: format!("{:04x}:{:04x}", id.vendor, id.device),
            model: chip.map(|chip| chip.name.to_owned()).unwrap_or_default(),
            uuid: None,
            owner_restarts: None,
            apertures_mib: Some([id.bar1_size >> 20, id.bar3_size >> 20]),
            channels: MAX_CHANNELS.saturating_sub(own),
            vram_free_mib: mib(Summary::spare),
            vram_placed_mib: mib(placed).unwrap_or(0),
            vram_mediator_mib: mib(|chunks| chunks.mediator).unwrap_or(0),
            strangers: Vec::new(),
            unexplained_bytes: 0,
        }
    }

    fn scheduler(&self, recent_ns: u64) -> Option<SchedulerUsage> {
        let usage = self.working().map(|host| host.lock().scheduler_usage(recent_ns));
        Some(usage.unwrap_or_else(|| SchedulerUsage::idle(*self.scheduler.lock())))
    }

    fn set_scheduler(&self, config: sched::Config) {
        let host = self.host.lock();
        *self.scheduler.lock() = config;
        if let Some(host) = host.as_ref().filter(|host| host.failure().is_none()) {
            host.lock().feeder().set_scheduler(config);
        }
    }

    fn set_share(&self, vm: TenantId, params: VgpuParams) {
        if let Some(host) = self.working() {
            host.lock().feeder().set_share(vm, params);
        }
    }

    fn release_vm(&self, vm: TenantId) {
        if let Some(host) = self.working() {
            host.lock().feeder().release_vm(vm);
        }
    }

    fn start_record(&self, names: &BTreeMap<TenantId, String>, limit: usize) -> bool {
        self.working().is_some_and(|host| host.lock().start_record(names, limit))
    }

    fn end_record(&self) -> Option<Vec<u8>> {
        self.working()?.lock().end_record()
    }

    fn mediated(&self) -> Option<Arc<ManagedCard>> {
        self.working()
    }

    fn movable(&self) -> Result<Option<Movable>, BackendError> {
        // Hand over a card even if it has no virtual machines, because this process has opened it.
        let card = self.card.going().map_err(BackendError::failed)?;
        let Some(host) = self.working() else { return Ok(None) };
        let next_vm = self.next_vm.load(Ordering::Relaxed);
        Ok(Some(Movable { host, card, next_vm }))
    }

    fn set_memory(&self, memory: CardMemory) -> Result<(), BackendError> {
        let host = self.host.lock();
        if let Some(host) = host.as_ref().filter(|host| host.failure().is_none()) {
            let mut state = host.lock();
            state.memory_mut().set_division(&division(&memory, self.spec.chunk_kib)).map_err(|error| {
                let Shortage { what, what_to_do } = Shortage::from_error(&error, self.spec.chunk_kib << 10);
                BackendError::lacking(Shortage::new(format!("memory.reserve_mib: {what}"), what_to_do))
            })?;
            let slots = u32::try_from((memory.host_mib << 10) / self.spec.chunk_kib).unwrap_or(u32::MAX);
            state.vram_mut().chunks.set_host_budget(slots);
        }
        *self.memory.lock() = memory;
        Ok(())
    }

    fn await_vm(&self, vm: &VmSpec, vram_bytes: u64, link: &Link) -> Result<Awaiting, BackendError> {
        let id = TenantId(self.next_vm.fetch_add(1, Ordering::Relaxed));
        let host = self.host()?;
        let settings = self.settings(vm, vram_bytes);
        let (device, made) = MediatedVm::build(&host, id, &settings, link)?;
        tracing::info!(vm = %id, name = vm.name, card = self.spec.name, "log messages about the card contain the VM's number");
        Ok(Awaiting { device: Box::new(device), vm: made, settings })
    }

    fn build(&self, vm: &VmSpec, link: &Link) -> Result<Built, BackendError> {
        if vm.passthrough {
            self.hand_over()?;
            let (card, CardSpec { vram_mib, flr, .. }) = (self.card.card(), &self.spec);
            let (device, vm) = PassthroughDevice::build(card, *vram_mib, *flr, &vm.name, link)?;
            return Ok(Built { device: Box::new(device), backend: vm });
        }
        let vram = vm.vram_mib.unwrap_or(0);
        let vram_bytes = vram.saturating_mul(1 << 20);
        let id = TenantId(self.next_vm.fetch_add(1, Ordering::Relaxed));
        let host = self.host()?;
        let memory = vm.memory.limits(vram, &self.spec);
        let mut vram_bytes = vram_bytes;
        if memory.on_full == OnFull::Refuse {
            // The guest sees only memory that can be guaranteed, and all of it is guaranteed.
            let state = host.lock();
            let chunk = state.vram().chunks.chunk_bytes();
            let most = memory.guarantee.max(state.vram().chunks.spare()).min(memory.quota);
            vram_bytes = vram_bytes.min(u64::from(most).saturating_mul(chunk));
        }
        if vram_bytes < MIN_VM_VRAM_MIB << 20 {
            let what = format!(
                "memory.on_full: with `refuse`, the guest sees only memory that can be reserved for it: {} MiB of card \
                 `{}`, expected at least {MIN_VM_VRAM_MIB}",
                vram_bytes >> 20,
                self.spec.name,
            );
            let what_to_do = "remove another VM, lower its `memory.guarantee_mib`, or choose another `memory.on_full`";
            return Err(BackendError::lacking(Shortage::new(what, what_to_do)));
        }
        tracing::info!(vm = %id, name = vm.name, card = self.spec.name, "log messages about the card contain the VM's number");
        let (device, vm) = MediatedVm::build(&host, id, &self.settings(vm, vram_bytes), link)?;
        Ok(Built { device: Box::new(device), backend: vm })
    }
}

/// Resources of a card that another daemon has handed over.
pub(crate) struct GivenCard {
    /// The card's memory.
    pub vram: File,
    /// Host memory for the card's chunks.
    pub host_memory: Option<File>,
    /// ID of the next virtual machine.
    pub next_vm: u32,
    /// The card's virtual machines, each with the size of the VRAM that its guest sees, in bytes.
    pub vms: BTreeMap<TenantId, (VmSpec, u64)>,
}

/// A card rebuilt from the state of another daemon, which still owns it.
pub(crate) struct ReopenedCard {
    owned: OwnedCard,
    card: GoingCard,
    reopened: Reopened,
    settings: BTreeMap<TenantId, Settings>,
    vms: Vec<Arc<MediatedVm>>,
}

impl Cards {
    /// Rebuilds a card from the state that another daemon saved in `file`, without accessing the card. Returns an error
    /// if the state is invalid, or does not match the configuration.
    pub(crate) fn reopen(
        &self,
        spec: &CardSpec,
        given: GivenCard,
        file: &mut SavedState<'_>,
    ) -> Result<ReopenedCard, BackendError> {
        let GivenCard { vram, host_memory, next_vm, vms } = given;
        let saved = SavedHost::read(file).map_err(BackendError::failed)?;
        let card = GoingCard::come(spec, file, vram).map_err(BackendError::failed)?;
        let owned = OwnedCard::new(spec, self, Physical::come(&card), next_vm);
        let settings: BTreeMap<TenantId, Settings> =
            vms.iter().map(|(id, (vm, bytes))| (*id, owned.settings(vm, *bytes))).collect();
        let reopened = ManagedCard::reopen(
            owned.card.card(),
            &owned.sharing(),
            self.firmware(spec.kind)?,
            Handed { saved, host_memory },
            &|vm, info, card| Some(settings.get(&vm)?.surroundings(info, card)),
        )
        .map_err(BackendError::failed)?;
        Ok(ReopenedCard { owned, card, reopened, settings, vms: Vec::new() })
    }
}

impl ReopenedCard {
    /// Returns the configuration of the card.
    pub(crate) fn spec(&self) -> &CardSpec {
        &self.owned.spec
    }

    /// Returns the number of interrupt vectors of a virtual machine's device, by type.
    pub(crate) fn irqs(&self) -> IrqCounts {
        self.owned.irqs()
    }

    /// Creates the device of a saved virtual machine, whose client uses `link`. Returns an error if the state is
    /// invalid.
    pub(crate) fn vm(&mut self, vm: TenantId, side: SavedSide, link: &Link) -> Result<Built, BackendError> {
        let settings = self.settings.get(&vm).ok_or_else(|| BackendError::failed("it was not saved"))?;
        let (device, made) = MediatedVm::reopen(&mut self.reopened, vm, side, settings, link)?;
        self.vms.push(Arc::clone(&made));
        Ok(Built { device: Box::new(device), backend: made })
    }

    /// Takes over the card after the other daemon has released it. Returns an error if the card does not respond.
    pub(crate) fn take_over(self) -> Result<Box<dyn CardBackend>, BackendError> {
        let Self { owned, card, reopened, settings, vms } = self;
        card.go_on();
        let host = reopened.take_over(&owned.spec.name).map_err(BackendError::failed)?;
        if let Some(inbox) = &owned.cards.inbox {
            host.collect_firmware(inbox.clone());
        }
        // These settings may have changed after the state was saved.
        for (vm, Settings { share, .. }) in settings {
            let mut state = host.lock();
            state.feeder().set_share(vm, share.time);
            if let Err(error) = state.memory_mut().set_limits(vm, share.memory) {
                tracing::warn!(%vm, %error, "the VM keeps its previous memory limits");
            }
            if let Err(shortage) = state.set_ram(vm, share.ram) {
                tracing::warn!(%vm, what = shortage.what, "the VM keeps its previous RAM limits");
            }
        }
        vms.iter().for_each(|vm| vm.go_on());
        *owned.host.lock() = Some(host);
        Ok(Box::new(owned))
    }
}
