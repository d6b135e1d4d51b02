//! A mediated VM as the vfio-user server, the card's interrupt thread and the daemon see it.

use super::backend::VmBackend as Backend;
use super::mailbox::{Held, Mailbox, Recipient};
use super::patience::{self, Patience};
use super::pv::{After, Interface, PvSettings};
use super::remap::Remap;
use super::spaces::Owned;
use crate::admin::api::{Denied, Driver, InterruptKind};
use crate::config::Apertures;
use crate::daemon::backend::{BackendError, BackendStatus, Built, VmBackend};
use crate::host::{GuestEvent, GuestEvents, HostCard, HostError, HostState, Ranges, Share};
use devmodel::backend::Aperture;
use devmodel::denied::Site;
use devmodel::events::{CopyError, EngineError, GraphError, MmuFault, PbdmaError};
use devmodel::{VGpu, VGpuConfig};
use nvspec::regs::windows::pramin;
use nvspec::regs::{pbdma, pfifo, pgraph};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;
use vmm_glue::device::NUM_REGIONS;
use vmm_glue::{AccessError, Device, DmaRegion, Link, MapError, RegionIndex, RegionInfo};
use vram::VmId;

/// Time between two looks for doorbells that are no messages. They are looked for only where a driver has put them under a
/// mapped part of an aperture, which nouveau does not.
const POLL: Duration = Duration::from_micros(200);

/// The vGPU and its side of the card: one lock, so that a register access and an interrupt do not mix.
pub(super) struct Core {
    pub(super) gpu: VGpu,
    pub(super) backend: Backend,
    /// A thread looks for doorbells under mapped apertures.
    polls: bool,
}

/// What a mediated VM is made of.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What it may have of the card.
    pub share: Share,
    /// How much work a TLB flush of its guest does.
    pub shadow: shadow_pt::Mode,
    /// How BAR1 and BAR3 are served.
    pub apertures: Apertures,
    /// How long work may wait for memory.
    pub queue_limit: Duration,
    /// What it may have of the paravirtual interface, if it is offered.
    pub paravirtual: Option<PvSettings>,
}

/// A mediated VM, from any thread.
pub struct MediatedVm {
    /// Lock order: this, then the card's.
    core: Mailbox<Core>,
    host: Arc<HostCard>,
    vm: VmId,
}

/// A mediated VM, as the server drives it.
pub struct MediatedDevice {
    vm: Arc<MediatedVm>,
    pci: devmodel::pci::PciIdentity,
    config_bytes: u64,
}

impl MediatedVm {
    /// A VM numbered `vm` on `host`.
    ///
    /// # Errors
    /// When the card has too little memory left, or the description is out of range.
    pub fn build(host: &Arc<HostCard>, vm: VmId, settings: &Settings, link: &Link) -> Result<Built, BackendError> {
        let (device, backend) = Self::parts(host, vm, settings, link)?;
        Ok(Built { device: Box::new(device), backend })
    }

    /// The two halves of what [`Self::build`] makes.
    pub(super) fn parts(
        host: &Arc<HostCard>,
        vm: VmId,
        settings: &Settings,
        link: &Link,
    ) -> Result<(MediatedDevice, Arc<Self>), BackendError> {
        let Settings { share, shadow, apertures, queue_limit, paravirtual } = settings;
        let mut config = VGpuConfig::of_chip(host.info().chip, share.vram_bytes, Arc::clone(&host.info().vbios));
        // All numbers are the guest's to use; how many at a time is checked at bind.
        config.channels = nvspec::fifo::CHANNELS;
        let card = host.card().identity();
        config.pci.bar1_bytes = card.bar1_size;
        config.pci.bar3_bytes = card.bar3_size;
        let pci = config.pci;
        config.vendor_capability = paravirtual.as_ref().map(PvSettings::capability).unwrap_or_default();
        let gpu = VGpu::new(config).map_err(BackendError::failed)?;
        let mut backend = Backend::new(Arc::clone(host), vm, link.clone(), *shadow, share.vram_bytes);
        backend.queue_limit = *queue_limit;
        backend.patience = Patience::new(*queue_limit);
        let interface = |settings| Box::new(Interface::new(settings, vm, share.vram_bytes, share.channels));
        backend.pv = paravirtual.as_ref().map(interface);
        let core = Core { gpu, backend, polls: false };
        let this = Arc::new(Self { core: Mailbox::new(core), host: Arc::clone(host), vm });
        let events: Weak<Self> = Arc::downgrade(&this);
        host.add_vm(vm, share, events).map_err(|error| match error {
            HostError::OutOfMemory(shortage) => BackendError::lacking(shortage),
            other => BackendError::failed(other),
        })?;
        if *apertures == Apertures::Remapped {
            match Remap::open(host, pci.bar1_bytes, pci.bar3_bytes) {
                Ok(remap) => this.core().backend.remap = remap,
                Err(error) => {
                    host.remove_vm(vm).map_err(BackendError::failed)?;
                    return Err(BackendError::failed(error));
                }
            }
        }
        let device = MediatedDevice { vm: Arc::clone(&this), pci, config_bytes: devmodel::pci::CONFIG_BYTES as u64 };
        Ok((device, this))
    }

    fn core(&self) -> Held<'_, Core> {
        self.core.lock()
    }

    /// Does `act` while the VM is at work for long.
    #[cfg(test)]
    pub(super) fn while_locked(&self, act: impl FnOnce()) {
        let _core = self.core();
        act();
    }

    /// Writes guest VRAM as the guest's CPU does.
    #[cfg(any(test, feature = "test-rig"))]
    pub(super) fn cpu_write(
        &self,
        address: nvspec::addr::GuestVramAddr,
        data: &[u8],
    ) -> Result<(), devmodel::backend::Denied> {
        self.core().backend.guest_write(address, data)
    }

    /// Reads guest VRAM where it lives, USERD pages as any other.
    #[cfg(any(test, feature = "test-rig"))]
    pub(super) fn vram_peek(&self, address: nvspec::addr::GuestVramAddr, data: &mut [u8]) -> Option<()> {
        let place = nvspec::addr::Place::Vram(address);
        self.core().backend.with_channels(|_, _, guest, _| guest.fill(place, data))
    }

    /// Looks for doorbells under mapped apertures, as long as there may be any. `false` when there are none.
    fn poll(&self) -> bool {
        let core = &mut *self.core();
        core.polls = !core.backend.polled.is_empty();
        if core.polls {
            core.backend.poll();
            core.settle();
        }
        core.polls
    }

    /// Starts to look for doorbells under mapped apertures, where there are any and nobody does.
    fn start_polling(this: &Arc<Self>, core: &mut Core) {
        if core.polls || core.backend.polled.is_empty() {
            return;
        }
        let vm = Arc::downgrade(this);
        let body = move || {
            while vm.upgrade().is_some_and(|vm| vm.poll()) {
                std::thread::sleep(POLL);
            }
        };
        match std::thread::Builder::new().name(format!("doorbells-{}", this.vm)).spawn(body) {
            Ok(_) => core.polls = true,
            Err(error) => tracing::error!(%error, "doorbells under a mapped aperture are not seen: no thread"),
        }
    }
}

impl Core {
    /// Takes everything of the guest's driver off the card. What lived under mapped apertures is lost.
    fn clean(&mut self) {
        let Self { gpu, backend, .. } = self;
        backend.remap.closing = true;
        gpu.reset(backend);
        backend.reset_pv();
        backend.quiesce();
        backend.remap.closing = false;
    }

    /// What an access has left to do outside of the registers.
    fn settle(&mut self) {
        for fault in std::mem::take(&mut self.backend.faults) {
            self.gpu.mmu_fault(fault, &mut self.backend);
        }
        if std::mem::take(&mut self.backend.runlist_done) {
            self.gpu.runlist_done(&mut self.backend);
        }
    }

    /// Reads BAR0: the chip's registers, and what is beside it.
    fn bar0_read(&mut self, offset: u64, data: &mut [u8]) {
        match &self.backend.pv {
            Some(pv) if Interface::covers(offset) => pv.read(offset, data),
            _ => {
                self.count_window(offset, data.len());
                self.gpu.bar0_read(offset, data, &mut self.backend);
            }
        }
    }

    /// Writes BAR0. Whether the guest has batches for us.
    fn bar0_write(&mut self, offset: u64, data: &[u8]) -> bool {
        match &mut self.backend.pv {
            Some(pv) if Interface::covers(offset) => {
                match pv.write(offset, data) {
                    After::Nothing => {}
                    After::Doorbell => return true,
                    After::Reset => self.reset_pv(),
                    After::Start => self.start_pv(),
                }
                self.signal_pv();
            }
            _ => {
                self.count_window(offset, data.len());
                self.gpu.bar0_write(offset, data, &mut self.backend);
            }
        }
        false
    }

    /// Counts what goes through the window on VRAM.
    fn count_window(&mut self, offset: u64, bytes: usize) {
        if (u64::from(pramin::BASE)..u64::from(pramin::END)).contains(&offset) {
            self.backend.counts.aperture_bytes += bytes as u64;
        }
    }
}

/// What is left of a write of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Served {
    Whole,
    /// The guest has batches for us.
    Batches,
    /// There is no memory for it yet.
    Again,
}

impl MediatedDevice {
    /// Serves a write. The VM's lock is free when it returns, for memory may have to move.
    fn write_once(&self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<Served, AccessError> {
        let core = &mut *self.vm.core();
        let Core { gpu, backend, .. } = core;
        let (base, end) = (u64::from(pramin::BASE), u64::from(pramin::END));
        let mut batches = false;
        match region {
            RegionIndex::Bar0 => {
                let window = base <= offset && offset.saturating_add(data.len() as u64) <= end;
                backend.patience.begin(window);
                batches = core.bar0_write(offset, data);
            }
            RegionIndex::Bar1 | RegionIndex::Bar3 => {
                let aperture = aperture(region);
                if backend.patience.is_first() {
                    backend.remap.count_message(aperture, offset);
                    backend.counts.aperture_bytes += data.len() as u64;
                }
                backend.patience.begin(true);
                gpu.aperture_write(aperture, offset, data, backend);
            }
            RegionIndex::Config => gpu.config_write(offset, data, backend),
            _ => return Err(AccessError::Invalid),
        }
        if core.backend.patience.end() {
            return Ok(Served::Again);
        }
        core.settle();
        MediatedVm::start_polling(&self.vm, core);
        Ok(if batches { Served::Batches } else { Served::Whole })
    }

    /// Deals with the batches that were there when the doorbell was rung. The VM's lock is free between two, for who waits
    /// for it serves others as well.
    fn serve_batches(&self) {
        for _ in 0..pv::abi::MAX_QUEUE {
            let core = &mut *self.vm.core();
            let more = core.serve_pv();
            core.settle();
            MediatedVm::start_polling(&self.vm, core);
            if !more {
                break;
            }
        }
    }
}

/// The aperture of a region that is one.
fn aperture(region: RegionIndex) -> Aperture {
    if region == RegionIndex::Bar1 { Aperture::Bar1 } else { Aperture::Bar3 }
}

impl Device for MediatedDevice {
    fn regions(&self) -> [RegionInfo; NUM_REGIONS] {
        let mut regions: [RegionInfo; NUM_REGIONS] = Default::default();
        for (index, size) in [
            (RegionIndex::Bar0, self.pci.bar0_bytes),
            (RegionIndex::Bar1, self.pci.bar1_bytes),
            (RegionIndex::Bar3, self.pci.bar3_bytes),
            (RegionIndex::Config, self.config_bytes),
        ] {
            regions[index as usize] = RegionInfo::read_write(size);
        }
        let core = self.vm.core();
        for (index, aperture) in [(RegionIndex::Bar1, Aperture::Bar1), (RegionIndex::Bar3, Aperture::Bar3)] {
            let Some((file, area)) = core.backend.remap.area(aperture) else { continue };
            let region = &mut regions[index as usize];
            match region.clone().with_mappable(file, vec![area]) {
                Ok(mappable) => *region = mappable,
                Err(error) => tracing::error!(%error, ?index, "an aperture cannot be mapped, and is trapped"),
            }
        }
        regions
    }

    fn region_read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        let core = &mut *self.vm.core();
        let Core { gpu, backend, .. } = core;
        match region {
            RegionIndex::Bar0 => core.bar0_read(offset, data),
            RegionIndex::Bar1 | RegionIndex::Bar3 => {
                let aperture = aperture(region);
                backend.remap.count_message(aperture, offset);
                backend.counts.aperture_bytes += data.len() as u64;
                gpu.aperture_read(aperture, offset, data, backend);
            }
            RegionIndex::Config => gpu.config_read(offset, data),
            _ => return Err(AccessError::Invalid),
        }
        Ok(())
    }

    fn region_write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        let mut served = self.write_once(region, offset, data)?;
        while served == Served::Again {
            std::thread::sleep(patience::RETRY);
            served = self.write_once(region, offset, data)?;
        }
        if served == Served::Batches {
            self.serve_batches();
        }
        Ok(())
    }

    fn dma_map(&mut self, region: &DmaRegion) -> Result<(), MapError> {
        self.vm.core().backend.lend(region).map_err(|error| MapError(error.to_string()))
    }

    fn dma_unmap(&mut self, gpa: u64, size: u64) {
        self.vm.core().backend.withdraw(gpa, size);
    }

    fn reset(&mut self) {
        let core = &mut *self.vm.core();
        core.clean();
        core.backend.remap.blank(&self.vm.host);
    }

    fn disconnected(&mut self) {
        let quiet = {
            let core = &mut *self.vm.core();
            core.clean();
            core.backend.forget_ram();
            // What the client has mapped it keeps.
            core.backend.remap.renew(&self.vm.host, self.pci.bar1_bytes, self.pci.bar3_bytes);
            core.backend.quiet
        };
        // The next client may be another's.
        if let Err(error) = self.vm.host.wipe_vm(self.vm.vm, quiet) {
            tracing::error!(%error, "the memory of a VM that has gone could not be wiped");
        }
    }

    fn memory_not_shared(&mut self, gpa: u64) {
        self.vm.core().backend.withdraw_unshared(gpa);
    }
}

impl GuestEvents for MediatedVm {
    fn deliver(&self, event: GuestEvent) {
        self.core.deliver(event);
    }

    fn relocated(&self, commit: &mut dyn FnMut(&mut HostState) -> Ranges) -> Result<(), HostError> {
        self.core().relocated(commit)
    }
}

impl Core {
    /// Memory of the VM moves, as `commit` says.
    fn relocated(&mut self, commit: &mut dyn FnMut(&mut HostState) -> Ranges) -> Result<(), HostError> {
        let Backend { host, vm, link, ram, spaces, remap, bus_master, pv, .. } = &mut self.backend;
        let tables = pv.as_deref().map(|pv| &pv.tables);
        let owned = Owned { vm: *vm, ram, link, bus_master: *bus_master, remap, tables };
        let state = &mut *host.lock();
        let ranges = commit(state)
            .into_iter()
            .map(|(at, bytes)| shadow_pt::GuestRange::Vram(nvspec::addr::GuestVramAddr(at.0), bytes));
        spaces.relocated(state, &owned, &ranges.collect::<Vec<_>>())
    }
}

impl Recipient for Core {
    fn take_up(&mut self, event: GuestEvent) {
        let Self { gpu, backend, .. } = &mut *self;
        match event {
            GuestEvent::Resume(doorbell) => backend.submit(doorbell),
            GuestEvent::Memory => backend.retry(),
            GuestEvent::Hang { engine, channel } => {
                backend.counts.hangs += 1;
                tracing::warn!(vm = %backend.vm, ?channel, engine, "a channel made no progress and was killed");
                if backend.end_retired(channel).is_some() {
                    gpu.ctxsw_timeout(engine, channel, backend);
                }
            }
            GuestEvent::NonStall { engine } => gpu.non_stall(engine, backend),
            GuestEvent::MmuFault { channel, unit, va, kind } => {
                backend.counts.faults += 1;
                let instance = backend.end_retired(channel);
                tracing::warn!(vm = %backend.vm, ?channel, unit, %va, kind, "a guest's access faulted");
                let field = |field: nvspec::Field| field.get(kind);
                gpu.mmu_fault(
                    MmuFault {
                        unit,
                        instance,
                        va,
                        reason: field(pfifo::FAULT_TYPE::REASON),
                        client: field(pfifo::FAULT_TYPE::CLIENT),
                        hub: field(pfifo::FAULT_TYPE::HUB) != 0,
                        write: field(pfifo::FAULT_TYPE::WRITE) != 0,
                        gpc: field(pfifo::FAULT_TYPE::GPC),
                    },
                    backend,
                );
            }
            GuestEvent::Pbdma { channel, unit, intr, method, data } => gpu.pbdma_error(
                PbdmaError {
                    unit,
                    channel,
                    intr,
                    subchannel: pbdma::METHOD_0::SUBCHANNEL.get(method),
                    method: pbdma::METHOD_0::METHOD.get(method) << 2,
                    data,
                },
                backend,
            ),
            GuestEvent::Graph { channel, intr, code, class, address, data, trap, sm } => {
                let instance = backend.instances.get(&channel).copied();
                let error = GraphError {
                    intr,
                    code,
                    instance,
                    subchannel: pgraph::TRAPPED_ADDRESS::SUBCHANNEL.get(address),
                    class,
                    method: pgraph::TRAPPED_ADDRESS::METHOD.get(address) << 2,
                    data,
                    trap,
                    sm,
                };
                gpu.engine_error(EngineError::Graph(error), backend);
            }
            GuestEvent::Copy { channel, engine, intr, report, data } => {
                let instance = backend.instances.get(&channel).copied();
                gpu.engine_error(EngineError::Copy(CopyError { engine, intr, instance, report, data }), backend);
            }
        }
        self.settle();
    }
}

impl VmBackend for MediatedVm {
    fn status(&self) -> BackendStatus {
        let Core { gpu, backend, .. } = &*self.core();
        let (spaces, shadow_bytes) = backend.spaces.usage();
        let counts = &backend.counts;
        let report = &backend.spaces.report;
        let moved = backend.host.lock().moved(backend.vm).map(|moved| (moved.suspensions.count(), moved.sum.moved));
        let (relocations, chunks_moved) = moved.unwrap_or_default();
        let pv = backend.pv.as_deref().map(Interface::counters).into_iter().flatten();
        let counters: BTreeMap<String, u64> = [
            ("doorbells", counts.doorbells),
            ("doorbells_refused", counts.doorbells_refused),
            ("submissions", counts.submissions),
            ("ring_entries", counts.entries),
            ("hangs", counts.hangs),
            ("memory_waits", counts.memory_waits),
            ("memory_denied", counts.memory_denied),
            ("memory_waited_ns", counts.memory_waited_ns),
            ("memory_writes_waited", counts.writes_waited),
            ("memory_writes_lost", counts.writes_lost),
            ("aperture_bytes", counts.aperture_bytes),
            ("memory_relocations", relocations),
            ("memory_chunks_moved", u64::from(chunks_moved)),
            ("tlb_flushes", counts.flushes),
            ("interrupts", counts.interrupts),
            ("events_lost", self.core.lost()),
            ("channel_binds", counts.binds),
            ("channel_binds_refused", counts.binds_refused),
            ("runlists", counts.runlists),
            ("faults", counts.faults),
            ("address_spaces", spaces as u64),
            ("shadow_bytes", shadow_bytes),
            ("aperture_pages", backend.remap.pages() as u64),
            ("aperture_moves", backend.remap.counts.moves),
            ("aperture_stops", backend.remap.counts.stops),
            ("aperture_messages", backend.remap.counts.messages),
            ("aperture_aliases", backend.remap.counts.aliases),
            ("shadow_syncs", backend.spaces.syncs),
            ("shadow_bytes_scanned", report.bytes_scanned),
            ("shadow_pages_scanned", report.pages),
            ("shadow_pages_deferred", report.deferred),
            ("shadow_entries_translated", report.translated),
            ("shadow_entries_written", report.entries_written),
            ("shadow_entries_denied", report.denied.total()),
        ]
        .into_iter()
        .chain(pv)
        .map(|(name, count)| (name.to_owned(), count))
        .collect();
        let denied = gpu.denials().iter().map(|(site, reason, count)| Denied {
            place: site.to_string(),
            offset: if let Site::Register(offset) = site { Some(offset) } else { None },
            reason: reason.to_string(),
            reads: count.reads,
            writes: count.writes,
        });
        let tables = shadow_pt::Denial::ALL.into_iter().filter(|&why| report.denied.of(why) != 0).map(|why| Denied {
            place: "page table entry".to_owned(),
            offset: None,
            reason: why.name().to_owned(),
            reads: 0,
            writes: report.denied.of(why),
        });
        let pci = gpu.pci();
        let config = gpu.config();
        BackendStatus {
            vram_mib: u64::from(config.vram_mib()),
            channels_used: backend.bound.len() as u32,
            driver: Driver {
                pci_id: format!("{:04x}:{:04x}", config.pci.vendor, config.pci.device),
                bus_master: pci.bus_master(),
                interrupts: if pci.msi_enabled() {
                    InterruptKind::Msi
                } else if backend.link.interrupts().intx_attached() && !pci.intx_disabled() {
                    InterruptKind::Intx
                } else {
                    InterruptKind::Off
                },
                state: None,
            },
            denied: denied.chain(tables).collect(),
            counters,
        }
    }

    fn scheduled_as(&self) -> Option<VmId> {
        Some(self.vm)
    }

    fn release(&self) -> Result<(), BackendError> {
        {
            let core = &mut *self.core();
            core.clean();
            core.backend.forget_ram();
            core.backend.remap.close(&self.host);
        }
        self.host.remove_vm(self.vm).map_err(BackendError::failed)
    }
}
