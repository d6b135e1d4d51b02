//! A mediated VM, and its interfaces to the vfio-user server, the card's interrupt thread, and the daemon.

use super::Apertures;
use super::backend::{self, Description, RungDoorbell, VmBackend as Backend, WaitingDoorbells};
use super::memory::{MappedWindow, Remap};
use super::pv::{Interface, Progress, PvSettings, RegisterEffect};
use super::work::Runlist;
use super::write_wait;
use card_manager::mailbox::{Mailbox, MailboxGuard};
use card_manager::{ManagedCard, ManagerError, Share};
use devmodel::backend::{Aperture, Backend as _, NoMemory};
use devmodel::{VGpu, VGpuConfig};
use nvspec::regs::windows::pramin;
use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use vm_device::{DeviceError, DeviceStatus};
use vmm_glue::device::NUM_REGIONS;
use vmm_glue::{
    AccessError, Ack, Deferred, Device, DmaRegion, Link, MapError, Mapping, Migration, MmapArea, RegionIndex,
    RegionInfo,
};
use vram::TenantId;

/// The vGPU and its backend on the card, under one lock, so that register accesses and interrupts cannot interleave.
pub(super) struct Core {
    pub(super) gpu: VGpu,
    pub(super) backend: Backend,
    /// Set if a thread polls doorbells under mapped apertures.
    pub(super) polls: bool,
    /// Card time at which the guest's armed alarm expires, in ns.
    pub(super) alarm: Option<u64>,
    /// Doorbell whose write was replied to, but whose work has not been submitted yet.
    pub(super) deferred: Option<RungDoorbell>,
    /// Channels whose doorbells are submitted when the card resumes.
    pub(super) rung: WaitingDoorbells,
    /// Set if the VM has moved to another card, so events must be ignored.
    pub(super) gone: bool,
    pub(super) client: Client,
    pub(super) board: Arc<StatusCell>,
}

/// Migration state requested by the VMM.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Client {
    /// Set if the client has stopped the VM.
    pub(super) stopped: bool,
    /// Set while writes to guest RAM by the VM's work are logged for the client.
    pub(super) logs: bool,
}

/// The VM's status for operators, readable without the VM's lock. On request, the lock's holder publishes it on
/// release.
#[derive(Debug, Default)]
pub(super) struct StatusCell {
    pub(super) wanted: AtomicBool,
    pub(super) latest: locks::Mutex<locks::rank::StatusCell, DeviceStatus>,
}

impl StatusCell {
    pub(super) fn publish(&self, status: DeviceStatus) {
        self.wanted.store(false, Ordering::Relaxed);
        *self.latest.lock() = status;
    }
}

/// Settings of a mediated VM.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The VM's share of the card.
    pub share: Share,
    /// TLB flush mode of the shadow page tables.
    pub shadow: shadow_pt::Mode,
    /// Method of serving BAR1 and BAR3.
    pub apertures: Apertures,
    /// Maximum time that work may wait for memory.
    pub queue_limit: Duration,
    /// Settings of the paravirtual interface, or `None` if it is not offered.
    pub paravirtual: Option<PvSettings>,
}

/// A mediated VM, usable from any thread.
pub struct MediatedVm {
    pub(super) core: Mailbox<Core>,
    pub(super) board: Arc<StatusCell>,
    pub(super) host: Arc<ManagedCard>,
    pub(super) vm: TenantId,
    pub(super) link: Link,
}

/// Device of a mediated VM, as seen by the vfio-user server.
pub struct MediatedDevice {
    pub(super) vm: Arc<MediatedVm>,
    pci: devmodel::pci::PciIdentity,
    config_bytes: u64,
    pub(super) settings: Settings,
    /// State of a migration, which `migrating` manages.
    pub(super) migration_state: Box<dyn Any + Send>,
}

impl MediatedVm {
    /// Creates the VM with number `vm` on `host`.
    ///
    /// # Errors
    /// Returns an error if the card has too little memory left, if a setting is out of range, or if the apertures
    /// cannot be created.
    pub fn build(
        host: &Arc<ManagedCard>,
        vm: TenantId,
        settings: &Settings,
        link: &Link,
    ) -> Result<(MediatedDevice, Arc<Self>), DeviceError> {
        let Settings { share, shadow, apertures, queue_limit, paravirtual } = settings;
        let config = settings.origin(host.info(), host.card().identity());
        let pci = config.pci;
        let gpu = VGpu::new(config)?;
        let (vram_bytes, queue_limit) = (share.vram_bytes, *queue_limit);
        let description = Description { vm, link: link.clone(), shadow: *shadow, vram_bytes, queue_limit };
        let interface = |settings| Box::new(Interface::new(settings, vm, share.channels));
        let backend = Backend::new(Arc::clone(host), description, paravirtual.as_ref().map(interface));
        let board = Arc::<StatusCell>::default();
        let this = Arc::new(Self::from_parts(Core::new(gpu, backend, &board), board, host, vm, link));
        let events: Weak<Self> = Arc::downgrade(&this);
        host.add_vm(vm, share, events)?;
        if *apertures == Apertures::Remapped {
            match Remap::open(host, (pci.bar1_bytes, pci.bar3_bytes)) {
                Ok(remap) => this.core().map(remap),
                Err(error) => {
                    host.remove_vm(vm)?;
                    return Err(error.into());
                }
            }
        }
        Ok((MediatedDevice::for_vm(&this, pci, settings), this))
    }

    /// Returns the VM's card.
    #[must_use]
    pub fn host(&self) -> &Arc<ManagedCard> {
        &self.host
    }

    /// Creates a VM from its parts.
    pub(super) fn from_parts(
        core: Core,
        board: Arc<StatusCell>,
        host: &Arc<ManagedCard>,
        vm: TenantId,
        link: &Link,
    ) -> Self {
        board.publish(core.status());
        Self { core: Mailbox::new(core), board, host: Arc::clone(host), vm, link: link.clone() }
    }

    /// Locks the VM without side effects. Threads that must not overtake a deferred doorbell call
    /// [`Core::complete_deferred`].
    #[track_caller]
    pub(super) fn core(&self) -> MailboxGuard<'_, Core> {
        self.core.lock()
    }

    /// Runs `act` while the VM is locked.
    #[cfg(feature = "test-rig")]
    pub fn while_locked(&self, act: impl FnOnce()) {
        let (held, is_held) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            // Hold the lock on another thread, because `act` may lock other VMs.
            scope.spawn(move || {
                let _core = self.core();
                if held.send(()).is_ok() {
                    let _ = ended.recv();
                }
            });
            if is_held.recv().is_ok() {
                act();
            }
            drop(end);
        });
    }

    /// Writes guest VRAM as the guest's CPU does.
    ///
    /// # Errors
    /// Returns an error if the range is not entirely within the VM's VRAM, or if no memory is free for it.
    #[cfg(feature = "test-rig")]
    pub fn cpu_write(
        &self,
        address: nvspec::addr::GuestVramAddr,
        data: &[u8],
    ) -> Result<(), devmodel::backend::WriteFailure> {
        let core = &mut *self.core();
        let written = core.backend.guest_write(address, data);
        core.finish_access();
        written
    }

    /// Reads guest VRAM at its current location. USERD pages are read like other memory.
    #[cfg(feature = "test-rig")]
    #[must_use]
    pub fn vram_peek(&self, address: nvspec::addr::GuestVramAddr, data: &mut [u8]) -> Option<()> {
        let place = nvspec::addr::Place::Vram(address);
        self.core().backend.fill(place, data)
    }
}

impl Core {
    /// Creates the core from its parts.
    pub(super) fn new(gpu: VGpu, backend: Backend, board: &Arc<StatusCell>) -> Self {
        Self {
            gpu,
            backend,
            polls: false,
            alarm: None,
            deferred: None,
            rung: WaitingDoorbells::new(),
            gone: false,
            client: Client::default(),
            board: Arc::clone(board),
        }
    }

    /// Installs apertures for a client to map. They contain no pages yet.
    fn map(&mut self, remap: Remap) {
        *self.backend.remap_mut() = remap;
        self.backend.show_window(self.gpu.window_base());
    }

    /// Changes the memory behind a mapped window. If this is the PRAMIN window, unmaps it before the change, and maps
    /// it again afterwards.
    fn change<T>(&mut self, showing: MappedWindow, change: impl FnOnce(&mut Remap) -> T) -> T {
        if showing != MappedWindow::Pramin {
            return change(self.backend.remap_mut());
        }
        self.backend.hide_window();
        let done = change(self.backend.remap_mut());
        self.backend.show_window(self.gpu.window_base());
        done
    }

    /// Removes all state of the guest's driver from the card. The contents of pages under mapped apertures are lost.
    pub(super) fn clean(&mut self) {
        let Self { gpu, backend, .. } = self;
        backend.remap_mut().closing = true;
        gpu.reset(backend);
        backend.reset_pv();
        backend.quiesce();
        backend.remap_mut().closing = false;
        // The channel of the doorbell no longer exists.
        self.deferred = None;
    }

    /// Applies the effects that an access has outside the registers.
    pub(super) fn finish_access(&mut self) {
        self.backend.submit_doorbell();
        for fault in self.backend.take_faults() {
            self.gpu.mmu_fault(fault, &mut self.backend);
        }
        if self.backend.runlist_ends(Runlist::Taken) {
            self.gpu.runlist_done(&mut self.backend);
        }
        self.arm();
    }

    /// Arms the guest's alarm on the card's interrupt thread if the alarm time has changed.
    pub(super) fn arm(&mut self) {
        let at = self.gpu.alarm_at();
        if at != self.alarm {
            self.alarm = at;
            let in_ns = at.map(|at| at.saturating_sub(self.backend.now_ns()));
            self.backend.host().lock().arm_guest_alarm(self.backend.vm(), in_ns);
        }
    }

    /// Reads BAR0: the chip's registers, or the paravirtual interface.
    fn bar0_read(&mut self, offset: u64, data: &mut [u8]) {
        match self.backend.pv() {
            Some(pv) if Interface::covers(offset) => pv.read(offset, data),
            _ => {
                self.count_window(offset, data.len());
                self.gpu.bar0_read(offset, data, &mut self.backend);
            }
        }
    }

    /// Writes BAR0. Returns `true` if the paravirtual doorbell was rung.
    fn bar0_write(&mut self, offset: u64, data: &[u8]) -> Result<bool, NoMemory> {
        match self.backend.pv_mut() {
            Some(pv) if Interface::covers(offset) => {
                match pv.write(offset, data) {
                    RegisterEffect::Nothing => {}
                    RegisterEffect::Doorbell => return Ok(true),
                    RegisterEffect::Reset => self.reset_pv(),
                    RegisterEffect::Start => self.start_pv(),
                }
                self.signal_pv();
            }
            _ => {
                if self.backend.is_first_try() {
                    self.count_window(offset, data.len());
                }
                self.gpu.bar0_write(offset, data, &mut self.backend)?;
            }
        }
        Ok(false)
    }

    /// Counts a BAR0 access if it is an access to VRAM through the PRAMIN window.
    fn count_window(&mut self, offset: u64, bytes: usize) {
        if (u64::from(pramin::BASE)..u64::from(pramin::END)).contains(&offset) {
            self.backend.count_window(offset, bytes);
        }
    }
}

/// Outcome of an attempt to execute a guest's write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteOutcome {
    Done,
    /// The guest has submitted batches.
    Batches,
    /// No memory is free for the write, so it must be retried.
    Retry,
    /// Pages under mapped apertures must move before the write is complete.
    AwaitMoves,
    /// The write rang a doorbell, which is deferred until the reply has been sent.
    DoorbellDeferred,
}

impl MediatedDevice {
    /// Creates the device of a VM.
    pub(super) fn for_vm(vm: &Arc<MediatedVm>, pci: devmodel::pci::PciIdentity, settings: &Settings) -> Self {
        let config_bytes = devmodel::pci::CONFIG_BYTES as u64;
        Self { vm: Arc::clone(vm), pci, config_bytes, settings: settings.clone(), migration_state: Box::new(()) }
    }

    /// Attempts a write once. The VM is unlocked on return, because memory may have to move before the next attempt.
    fn write_once(&self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<WriteOutcome, AccessError> {
        let core = &mut *self.enter();
        let Core { gpu, backend, .. } = core;
        let written = match region {
            RegionIndex::Bar0 => {
                if backend.is_first_try() {
                    backend.count_register_write();
                }
                core.bar0_write(offset, data)
            }
            RegionIndex::Bar1 | RegionIndex::Bar3 => {
                let aperture = aperture(region);
                if backend.is_first_try() {
                    backend.count_aperture_write(aperture, offset, data.len());
                }
                gpu.aperture_write(aperture, offset, data, backend).map(|()| false)
            }
            RegionIndex::Config => {
                gpu.config_write(offset, data, backend);
                Ok(false)
            }
            _ => return Err(AccessError::Invalid),
        };
        if written.is_err() && core.backend.write_waits() {
            return Ok(WriteOutcome::Retry);
        }
        core.backend.write_ends();
        let deferred = core.defer_doorbell();
        core.finish_access();
        MediatedVm::start_polling(&self.vm, core);
        Ok(match written {
            _ if deferred => WriteOutcome::DoorbellDeferred,
            Ok(true) => WriteOutcome::Batches,
            _ if core.backend.moves_wait() => WriteOutcome::AwaitMoves,
            _ => WriteOutcome::Done,
        })
    }

    /// Moves the due pages that can currently move. Returns true if pages still wait.
    fn look_at_moves(&self) -> bool {
        let core = &mut *self.vm.core();
        let waits = core.backend.look_at_moves();
        core.finish_access();
        MediatedVm::start_polling(&self.vm, core);
        waits
    }

    /// Executes queued batches, at most as many as fit in the queue. Releases the VM's lock between batches, because
    /// threads that wait for it also serve other VMs.
    fn serve_batches(&self) {
        let mut batches = 0;
        while batches < pv::abi::MAX_QUEUE {
            match self.serve_batch() {
                Progress::Idle => break,
                Progress::Batch => batches += 1,
                Progress::Part => {}
                Progress::Waits => locks::sleep(backend::MOVE_POLL_INTERVAL),
            }
        }
    }

    fn serve_batch(&self) -> Progress {
        let core = &mut *self.vm.core();
        let progress = core.serve_pv();
        core.finish_access();
        MediatedVm::start_polling(&self.vm, core);
        progress
    }
}

/// Returns the aperture of a region, which must be BAR1 or BAR3.
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
        for showing in MappedWindow::ALL {
            let Some((file, area)) = core.backend.remap().area(showing) else { continue };
            let region = &mut regions[showing.region() as usize];
            match region.clone().with_mappable(file, vec![area]) {
                Ok(mappable) => *region = mappable,
                Err(error) => tracing::error!(%error, ?showing, "cannot map an aperture, so it will be trapped"),
            }
        }
        regions
    }

    fn region_read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        let core = &mut *self.enter();
        let Core { gpu, backend, .. } = core;
        match region {
            RegionIndex::Bar0 => {
                backend.count_register_read();
                core.bar0_read(offset, data);
            }
            RegionIndex::Bar1 | RegionIndex::Bar3 => {
                let aperture = aperture(region);
                backend.count_aperture_read(aperture, offset, data.len());
                gpu.aperture_read(aperture, offset, data, backend);
            }
            RegionIndex::Config => gpu.config_read(offset, data),
            _ => return Err(AccessError::Invalid),
        }
        Ok(())
    }

    /// Executes a write completely, except for a doorbell that may be deferred.
    fn region_write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<Ack, AccessError> {
        loop {
            match self.write_once(region, offset, data)? {
                WriteOutcome::Done => break,
                WriteOutcome::DoorbellDeferred => return Ok(Ack::Deferred(Deferred::default())),
                WriteOutcome::Retry => locks::sleep(write_wait::RETRY_INTERVAL),
                WriteOutcome::Batches => {
                    self.serve_batches();
                    break;
                }
                WriteOutcome::AwaitMoves => {
                    while self.look_at_moves() {
                        locks::sleep(backend::MOVE_POLL_INTERVAL);
                    }
                    break;
                }
            }
        }
        Ok(Ack::Done)
    }

    fn complete(&mut self, _: Deferred) {
        // Another thread may already have submitted the doorbell.
        self.vm.complete_deferred();
    }

    fn dma_map(&mut self, region: &DmaRegion) -> Result<(), MapError> {
        self.enter().backend.lend(region).map_err(|error| MapError(error.to_string()))
    }

    fn dma_unmap(&mut self, gpa: u64, size: u64) {
        self.enter().backend.withdraw(gpa, size);
    }

    fn reset(&mut self) {
        self.enter().clean();
        let half = self.end_migration();
        self.vm.host.wait_departed(self.vm.vm);
        let quiet = {
            let core = &mut *self.vm.core();
            core.backend.end_quiesce();
            core.backend.show_apertures();
            core.backend.is_quiet()
        };
        if half && let Err(error) = self.vm.host.wipe_vm(self.vm.vm, quiet) {
            tracing::error!(%error, "cannot wipe the memory of an incompletely received VM");
        }
    }

    fn disconnected(&mut self) {
        {
            let core = &mut *self.enter();
            core.clean();
            core.backend.forget_ram();
            core.log_writes(false);
        }
        // Ignore incomplete memory, because all of the VM's memory is wiped below.
        let _half = self.end_migration();
        self.vm.host.wait_departed(self.vm.vm);
        let quiet = {
            let core = &mut *self.vm.core();
            core.backend.end_quiesce();
            // The settings determine how the next client's apertures are served.
            let bars = (self.pci.bar1_bytes, self.pci.bar3_bytes);
            let bars = (self.settings.apertures == Apertures::Remapped).then_some(bars);
            core.change(MappedWindow::Pramin, |remap| remap.renew(&self.vm.host, bars));
            core.backend.is_quiet()
        };
        // The next client may belong to another tenant.
        if let Err(error) = self.vm.host.wipe_vm(self.vm.vm, quiet) {
            tracing::error!(%error, "cannot wipe the memory of a removed VM");
        }
    }

    fn lend_area(&mut self, region: RegionIndex, area: MmapArea, pages: &Arc<Mapping>) -> Result<(), MapError> {
        let core = &mut *self.enter();
        let showing =
            MappedWindow::for_region(region).ok_or_else(|| MapError(format!("no part of {region:?} can be mapped")))?;
        let lent = core.change(showing, |remap| remap.lend(&self.vm.host, showing, area, pages));
        lent.map_err(|error| MapError(error.to_string()))
    }

    fn take_file(&mut self, region: RegionIndex, file: Arc<OwnedFd>) -> Result<(), MapError> {
        let core = &mut *self.enter();
        let showing =
            MappedWindow::for_region(region).ok_or_else(|| MapError(format!("no part of {region:?} can be mapped")))?;
        let taken = core.change(showing, |remap| remap.take_file(&self.vm.host, showing, file));
        taken.map_err(|error| MapError(error.to_string()))
    }

    fn is_renewable(&self) -> bool {
        true
    }

    fn migration(&mut self) -> Option<&mut dyn Migration> {
        self.vm.host.card().takes_any_image().then_some(self)
    }

    fn memory_not_shared(&mut self, gpa: u64) {
        self.enter().backend.withdraw_unshared(gpa);
    }
}

impl MediatedVm {
    /// Returns the configuration of the VM's vGPU, which is needed to restore the vGPU.
    #[must_use]
    pub fn origin(&self) -> VGpuConfig {
        self.core().gpu.config().clone()
    }

    /// Returns the VM's number on the card.
    #[must_use]
    pub fn id(&self) -> TenantId {
        self.vm
    }

    /// Releases all resources that the VM uses on the card. Must be called once, after the device was dropped.
    ///
    /// # Errors
    /// Returns an error if the card has failed or still uses any of these resources.
    pub fn release(&self) -> Result<(), ManagerError> {
        if let Some(why) = self.host.failure() {
            return Err(ManagerError::Failed { why: why.to_owned() });
        }
        {
            let core = &mut *self.core.lock_torn();
            match self.core.is_torn() || core.gone {
                false => core.clean(),
                true => core.backend.quiesce(),
            }
            core.backend.forget_ram();
        }
        self.host.wait_departed(self.vm);
        {
            let core = &mut *self.core.lock_torn();
            core.backend.end_quiesce();
            core.backend.remap_mut().close(&self.host);
        }
        self.host.remove_vm(self.vm)
    }
}
