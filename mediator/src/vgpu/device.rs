//! A mediated VM as the vfio-user server, the card's interrupt thread and the daemon see it.

use super::backend::VmBackend as Backend;
use crate::admin::api::{Denied, Driver, InterruptKind};
use crate::daemon::backend::{BackendError, BackendStatus, Built, VmBackend};
use crate::host::{GuestEvent, GuestEvents, HostCard, HostError, Share};
use devmodel::backend::Aperture;
use devmodel::denied::Site;
use devmodel::events::{CopyError, EngineError, GraphError, MmuFault, PbdmaError};
use devmodel::{VGpu, VGpuConfig};
use nvspec::regs::{pbdma, pfifo, pgraph};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use vmm_glue::device::NUM_REGIONS;
use vmm_glue::{AccessError, Device, DmaRegion, Link, MapError, RegionIndex, RegionInfo};
use vram::VmId;

/// The vGPU and its side of the card: one lock, so that a register access and an interrupt do not mix.
struct Core {
    gpu: VGpu,
    backend: Backend,
}

/// What a mediated VM is made of.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// What it may have of the card.
    pub share: Share,
    /// How much work a TLB flush of its guest does.
    pub shadow: shadow_pt::Mode,
}

/// A mediated VM, from any thread.
pub struct MediatedVm {
    /// Lock order: this, then the card's.
    core: Mutex<Core>,
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
        let Settings { share, shadow } = settings;
        let mut config = VGpuConfig::of_chip(host.info().chip, share.vram_bytes, Arc::clone(&host.info().vbios));
        // All numbers are the guest's to use; how many at a time is checked at bind.
        config.channels = nvspec::fifo::CHANNELS;
        let card = host.card().identity();
        config.pci.bar1_bytes = card.bar1_size;
        config.pci.bar3_bytes = card.bar3_size;
        let pci = config.pci;
        let gpu = VGpu::new(config).map_err(BackendError::failed)?;
        let backend = Backend::new(Arc::clone(host), vm, link.clone(), *shadow);
        let this = Arc::new(Self { core: Mutex::new(Core { gpu, backend }), host: Arc::clone(host), vm });
        let events: Weak<Self> = Arc::downgrade(&this);
        host.add_vm(vm, share, events).map_err(|error| match error {
            HostError::OutOfMemory { .. } => BackendError::quota(error),
            other => BackendError::failed(other),
        })?;
        let device = MediatedDevice { vm: Arc::clone(&this), pci, config_bytes: devmodel::pci::CONFIG_BYTES as u64 };
        Ok((device, this))
    }

    /// Writes guest VRAM as the guest's CPU does.
    #[cfg(any(test, feature = "test-rig"))]
    pub(super) fn cpu_write(
        &self,
        address: nvspec::addr::GuestVramAddr,
        data: &[u8],
    ) -> Result<(), devmodel::backend::Denied> {
        self.core.lock().backend.guest_write(address, data)
    }
}

impl Core {
    /// What an access has left to do outside of the registers.
    fn settle(&mut self) {
        for fault in std::mem::take(&mut self.backend.faults) {
            self.gpu.mmu_fault(fault, &mut self.backend);
        }
        if std::mem::take(&mut self.backend.runlist_done) {
            self.gpu.runlist_done(&mut self.backend);
        }
    }
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
        regions
    }

    fn region_read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        let Core { gpu, backend } = &mut *self.vm.core.lock();
        match region {
            RegionIndex::Bar0 => gpu.bar0_read(offset, data, backend),
            RegionIndex::Bar1 => gpu.aperture_read(Aperture::Bar1, offset, data, backend),
            RegionIndex::Bar3 => gpu.aperture_read(Aperture::Bar3, offset, data, backend),
            RegionIndex::Config => gpu.config_read(offset, data),
            _ => return Err(AccessError::Invalid),
        }
        Ok(())
    }

    fn region_write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        let core = &mut *self.vm.core.lock();
        let Core { gpu, backend } = core;
        match region {
            RegionIndex::Bar0 => gpu.bar0_write(offset, data, backend),
            RegionIndex::Bar1 => gpu.aperture_write(Aperture::Bar1, offset, data, backend),
            RegionIndex::Bar3 => gpu.aperture_write(Aperture::Bar3, offset, data, backend),
            RegionIndex::Config => gpu.config_write(offset, data, backend),
            _ => return Err(AccessError::Invalid),
        }
        core.settle();
        Ok(())
    }

    fn dma_map(&mut self, region: &DmaRegion) -> Result<(), MapError> {
        self.vm.core.lock().backend.lend(region).map_err(|error| MapError(error.to_string()))
    }

    fn dma_unmap(&mut self, gpa: u64, size: u64) {
        self.vm.core.lock().backend.withdraw(gpa, size);
    }

    fn reset(&mut self) {
        let Core { gpu, backend } = &mut *self.vm.core.lock();
        gpu.reset(backend);
        backend.quiesce();
    }

    fn disconnected(&mut self) {
        let quiet = {
            let Core { gpu, backend } = &mut *self.vm.core.lock();
            gpu.reset(backend);
            backend.quiesce();
            backend.forget_ram();
            backend.quiet
        };
        // The next client may be another's.
        if let Err(error) = self.vm.host.wipe_vm(self.vm.vm, quiet) {
            tracing::error!(%error, "the memory of a VM that has gone could not be wiped");
        }
    }

    fn memory_not_shared(&mut self, gpa: u64) {
        self.vm.core.lock().backend.withdraw_unshared(gpa);
    }
}

impl GuestEvents for MediatedVm {
    fn deliver(&self, event: GuestEvent) {
        let mut core = self.core.lock();
        let Core { gpu, backend } = &mut *core;
        match event {
            GuestEvent::Resume(doorbell) => backend.submit(doorbell),
            GuestEvent::Hang { engine, channel } => {
                backend.counts.hangs += 1;
                backend.take_off(channel);
                tracing::warn!(vm = %self.vm, ?channel, engine, "a channel made no progress and was killed");
                gpu.ctxsw_timeout(engine, channel, backend);
            }
            GuestEvent::NonStall { engine } => gpu.non_stall(engine, backend),
            GuestEvent::MmuFault { channel, unit, va, kind } => {
                backend.counts.faults += 1;
                backend.take_off(channel);
                let instance = backend.instances.get(&channel).copied();
                tracing::warn!(vm = %self.vm, ?channel, unit, %va, kind, "a guest's access faulted");
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
            GuestEvent::Graph { channel, intr, code, class, address, data } => {
                let instance = backend.instances.get(&channel).copied();
                let error = GraphError {
                    intr,
                    code,
                    instance,
                    subchannel: pgraph::TRAPPED_ADDRESS::SUBCHANNEL.get(address),
                    class,
                    method: pgraph::TRAPPED_ADDRESS::METHOD.get(address) << 2,
                    data,
                };
                gpu.engine_error(EngineError::Graph(error), backend);
            }
            GuestEvent::Copy { channel, engine, intr, report, data } => {
                let instance = backend.instances.get(&channel).copied();
                gpu.engine_error(EngineError::Copy(CopyError { engine, intr, instance, report, data }), backend);
            }
        }
        core.settle();
    }
}

impl VmBackend for MediatedVm {
    fn status(&self) -> BackendStatus {
        let Core { gpu, backend } = &*self.core.lock();
        let (spaces, shadow_bytes) = backend.spaces.usage();
        let counts = &backend.counts;
        let report = &backend.spaces.report;
        let counters: BTreeMap<String, u64> = [
            ("doorbells", counts.doorbells),
            ("doorbells_refused", counts.doorbells_refused),
            ("submissions", counts.submissions),
            ("ring_entries", counts.entries),
            ("hangs", counts.hangs),
            ("tlb_flushes", counts.flushes),
            ("interrupts", counts.interrupts),
            ("channel_binds", counts.binds),
            ("channel_binds_refused", counts.binds_refused),
            ("runlists", counts.runlists),
            ("faults", counts.faults),
            ("address_spaces", spaces as u64),
            ("shadow_bytes", shadow_bytes),
            ("shadow_syncs", backend.spaces.syncs),
            ("shadow_bytes_scanned", report.bytes_scanned),
            ("shadow_pages_scanned", report.pages),
            ("shadow_pages_deferred", report.deferred),
            ("shadow_entries_translated", report.translated),
            ("shadow_entries_written", report.entries_written),
            ("shadow_entries_denied", report.denied.total()),
        ]
        .map(|(name, count)| (name.to_owned(), count))
        .into();
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

    fn release(&self) -> Result<(), BackendError> {
        {
            let Core { gpu, backend } = &mut *self.core.lock();
            gpu.reset(backend);
            backend.quiesce();
            backend.forget_ram();
        }
        self.host.remove_vm(self.vm).map_err(BackendError::failed)
    }
}
