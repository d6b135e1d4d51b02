//! Mediated VMs without a VMM: a software card, its card manager, and devices that are called as the server calls them.
//!
//! Parts: [`Rig`] (the card), [`altered`] (a card with overridden behaviour), [`Guest`] (one VM: registers, apertures,
//! RAM, interrupts), [`driver`] and [`paravirtual`] (low-level drivers for tests that control registers, page tables,
//! submissions and batches), [`fuzz`] (arbitrary sequences of accesses), [`Handover`] (handover to another owner),
//! [`in_process_vm`] (guests that run workloads with the library `gdev`), [`RemoteGuest`] (a VM served over a daemon's
//! socket), [`xen`] (a Xen domain without Xen), [`Machine`] (the interface between a driver and any kind of VM),
//! [`service_manager`] (starts a daemon, and keeps its sockets). The rig panics on misuse.
//!
//! The crate does not boot guests or run VMMs; the crate `tests` does both.

pub mod altered;
pub mod driver;
pub mod fuzz;
mod handover;
pub mod in_process_vm;
mod machine;
pub mod paravirtual;
mod remote;
pub mod service_manager;
pub mod xen;

use card::Card;
use card_manager::iova::RamShare;
use card_manager::{Division, ManagedCard, Share, Sharing};
use nvspec::regs::{pbus, windows::pramin};
use simgpu::{Config, SimGpu, TimeModel};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use vgpu::{Apertures, Coming, Left, MediatedDevice, MediatedVm, Settings};
use vm_device::{DeviceError, DeviceStatus};
use vmm_glue::client::{memory_file, wait_event};
use vmm_glue::{Ack, Deferred, Device, IrqCounts, Link, Migration, RegionIndex};
use vram::{Limits, Summary, TenantId};

pub use handover::Handover;
use machine::Ram;
pub use machine::{Machine, read_file};
pub use remote::RemoteGuest;

/// Timeout of a wait, longer than any operation takes.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Chunk size in bytes.
pub const CHUNK: u64 = 2 << 20;
/// Size of the segments in which a saved VM is loaded, in bytes.
const PART: usize = 100_000;
/// Memory reserved for the mediator on a card, in bytes.
const RESERVED_BYTES: u64 = 16 << 20;

/// A card and its manager.
pub struct Rig {
    /// Software card.
    pub card: Arc<SimGpu>,
    /// Card manager of the card.
    pub host: Arc<ManagedCard>,
}

impl Rig {
    /// Creates a card with `vram_mib` MiB of VRAM, and initializes it.
    #[must_use]
    pub fn new(vram_mib: u32) -> Self {
        Self::wrapped(vram_mib, |card| card)
    }

    /// Like [`Self::new`], but the card manager accesses the card through the return value of `wrap`.
    #[must_use]
    pub fn wrapped(vram_mib: u32, wrap: impl FnOnce(Arc<SimGpu>) -> Arc<dyn Card>) -> Self {
        Self::made(&Config { vram_mib, ..Config::default() }, &sharing(), wrap)
    }

    /// Creates a card on which work takes time, with the scheduler settings `scheduler`.
    #[must_use]
    pub fn timed(vram_mib: u32, time: TimeModel, scheduler: sched::Config) -> Self {
        let sharing = Sharing { scheduler, ..sharing() };
        Self::made(&Config { vram_mib, time: Some(time), ..Config::default() }, &sharing, |card| card)
    }

    /// Creates a card with the settings `config` and `sharing`. The card manager accesses the card through the return
    /// value of `wrap`.
    #[must_use]
    pub fn made(config: &Config, sharing: &Sharing, wrap: impl FnOnce(Arc<SimGpu>) -> Arc<dyn Card>) -> Self {
        let card = Arc::new(SimGpu::new(config).expect("a card"));
        let host = ManagedCard::open(wrap(Arc::clone(&card)), "rig", sharing, firmware::Set::stand_in());
        Self { card, host: host.expect("the card starts") }
    }

    /// Creates a VM with `vram_mib` MiB of VRAM and without RAM.
    #[must_use]
    pub fn guest(&self, vm: u32, vram_mib: u64, channels: u32) -> Guest {
        self.guest_with(vm, &settings(vram_mib, channels))
    }

    /// Creates a VM with arbitrary settings, without RAM.
    #[must_use]
    pub fn guest_with(&self, vm: u32, settings: &Settings) -> Guest {
        let link = Link::new(IrqCounts { intx: 1, msi: 1, ..IrqCounts::default() }).expect("a link");
        let (mut device, backend) =
            MediatedVm::build(&self.host, TenantId(vm), settings, &link).expect("the card has space for the VM");
        device.connected();
        let msi = link.attach_msi().expect("an event");
        let vram_bytes = settings.share.vram_bytes;
        Guest { device, backend, link, settings: settings.clone(), msi, ram: Ram::default(), vram_bytes }
    }

    /// Returns true if a VM's VRAM at `address` is in host memory.
    pub fn in_host(&self, vm: u32, address: u64) -> bool {
        let found = self.host.lock().vram().chunks.lookup(TenantId(vm), vram::GuestVramAddr(address), 1);
        matches!(found, vram::Lookup::Placed(vram::Place::Host(_)))
    }

    /// Returns the resource usage of the card: chunks by state, and the numbers of channels and I/O address ranges.
    #[must_use]
    pub fn usage(&self) -> (Summary, u32, usize) {
        let channels = self.host.channels_in_use();
        let state = self.host.lock();
        (state.vram().chunks.summary(), channels, state.memory().iova().ranges())
    }
}

/// Returns the default settings of a card.
#[must_use]
pub fn sharing() -> Sharing {
    Sharing {
        chunk_bytes: CHUNK,
        reserve_bytes: RESERVED_BYTES,
        host_bytes: 0,
        division: Division::default(),
        scheduler: sched::Config::default(),
        clear: true,
        engines_zero: false,
        shared: false,
    }
}

/// Returns the default settings of a VM with `vram_mib` MiB of guaranteed VRAM.
#[must_use]
pub fn settings(vram_mib: u64, channels: u32) -> Settings {
    let share = Share {
        vram_bytes: vram_mib << 20,
        memory: Limits::RESERVED,
        channels,
        hang_limit: None,
        time: sched::VgpuParams { max_run_ns: None, ..Default::default() },
        ram: RamShare::default(),
    };
    Settings {
        share,
        shadow: shadow_pt::Mode::default(),
        apertures: Apertures::Trapped,
        queue_limit: Duration::ZERO,
        paravirtual: None,
    }
}

/// Mediated VM.
pub struct Guest {
    device: MediatedDevice,
    backend: Arc<MediatedVm>,
    link: Link,
    settings: Settings,
    msi: OwnedFd,
    ram: Ram,
    /// Size of the VRAM in bytes.
    pub vram_bytes: u64,
}

impl Guest {
    /// Reads a region as a client would. A denied read returns all ones.
    pub fn read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) {
        if self.device.region_read(region, offset, data).is_err() {
            data.fill(0xff);
        }
    }

    /// Writes a region as a client would. A denied write is dropped.
    pub fn write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) {
        if let Some(deferred) = self.write_until_answered(region, offset, data) {
            self.complete(deferred);
        }
    }

    /// Like [`Self::write`], but returns as soon as the client would receive its response. Returns the deferred part of
    /// the write, if any.
    pub fn write_until_answered(&mut self, region: RegionIndex, offset: u64, data: &[u8]) -> Option<Deferred> {
        match self.device.region_write(region, offset, data) {
            Ok(Ack::Deferred(deferred)) => Some(deferred),
            Ok(Ack::Done) | Err(_) => None,
        }
    }

    /// Executes the deferred part of a write. The guest must not use its device until then.
    pub fn complete(&mut self, deferred: Deferred) {
        self.device.complete(deferred);
    }

    /// Reads a register.
    pub fn rd(&mut self, offset: u32) -> u32 {
        let mut word = [0; 4];
        self.read(RegionIndex::Bar0, offset.into(), &mut word);
        u32::from_le_bytes(word)
    }

    /// Writes a register.
    pub fn wr(&mut self, offset: u32, value: u32) {
        self.write(RegionIndex::Bar0, offset.into(), &value.to_le_bytes());
    }

    /// Writes guest VRAM through PRAMIN.
    pub fn poke(&mut self, at: u64, value: u32) {
        self.wr(pbus::PRAMIN_WINDOW::OFFSET, (at >> 16) as u32);
        self.wr(pramin::BASE + (at & 0xffff) as u32, value);
    }

    /// Reads guest VRAM through PRAMIN.
    pub fn peek(&mut self, at: u64) -> u32 {
        self.wr(pbus::PRAMIN_WINDOW::OFFSET, (at >> 16) as u32);
        self.rd(pramin::BASE + (at & 0xffff) as u32)
    }

    /// Reads guest VRAM at its current location, bypassing the guest's device.
    pub fn vram_read(&self, at: u64, data: &mut [u8]) {
        self.backend.vram_peek(nvspec::addr::GuestVramAddr(at), data).expect("the address is in the VM's VRAM");
    }

    /// Writes guest VRAM as the guest's CPU would, but in one access.
    pub fn vram_write(&self, at: u64, data: &[u8]) {
        self.backend.cpu_write(nvspec::addr::GuestVramAddr(at), data).expect("the address is in the VM's VRAM");
    }

    /// Like [`Self::vram_write`], but returns false if the write fails, for example because no memory is free.
    pub fn vram_try_write(&self, at: u64, data: &[u8]) -> bool {
        self.backend.cpu_write(nvspec::addr::GuestVramAddr(at), data).is_ok()
    }

    /// Returns the file that the client maps for an aperture, if any.
    #[must_use]
    pub fn mapped(&self, region: RegionIndex) -> Option<Arc<OwnedFd>> {
        self.device.regions()[region as usize].mappable().map(|mappable| Arc::clone(mappable.file()))
    }

    /// Returns true if a client may map these bytes of a region.
    #[must_use]
    pub fn maps(&self, region: RegionIndex, offset: u64, len: u64) -> bool {
        let regions = self.device.regions();
        let areas = regions[region as usize].mappable().map(|mappable| mappable.areas()).unwrap_or_default();
        areas.iter().any(|area| offset >= area.offset && offset + len <= area.offset + area.size)
    }

    /// Lends RAM in a new file to the device. Returns false if the device rejects it.
    pub fn map_ram(&mut self, gpa: u64, size: u64, writable: bool) -> bool {
        self.lend_ram(gpa, size, writable, memory_file(size, true).expect("a memory file"))
    }

    /// Lends RAM in `file` to the device. Returns false if the device rejects it.
    pub(crate) fn lend_ram(&mut self, gpa: u64, size: u64, writable: bool, file: OwnedFd) -> bool {
        let given = file.try_clone().expect("another descriptor");
        let Ok(region) = self.link.lend(gpa, size, writable, Some(given)) else { return false };
        if self.device.dma_map(&region).is_err() {
            self.link.take_back(gpa);
            return false;
        }
        self.ram.insert(gpa, size, file);
        true
    }

    /// Withdraws RAM. Returns its file, so that the RAM can still be read.
    pub fn unmap_ram(&mut self, gpa: u64) -> Option<OwnedFd> {
        let region = self.link.take_back(gpa)?;
        self.device.dma_unmap(gpa, region.size);
        self.ram.remove(gpa).map(|(_, file)| file)
    }

    /// Reads guest RAM as the guest's CPU would.
    pub fn ram_read(&self, gpa: u64, data: &mut [u8]) {
        self.ram.read(gpa, data);
    }

    /// Writes guest RAM as the guest's CPU would.
    pub fn ram_write(&self, gpa: u64, data: &[u8]) {
        self.ram.write(gpa, data);
    }

    /// Returns the file of the RAM region that contains `gpa`. The caller can write to it as another guest CPU would.
    pub fn ram_file(&self, gpa: u64) -> OwnedFd {
        self.ram.file_of(gpa)
    }

    /// Returns the 32-bit word of guest RAM at `gpa`.
    #[must_use]
    pub fn ram_word(&self, gpa: u64) -> u32 {
        let mut word = [0; 4];
        self.ram_read(gpa, &mut word);
        u32::from_le_bytes(word)
    }

    /// Returns the start and size of the RAM region that contains `gpa`, if any.
    #[must_use]
    pub fn ram_at(&self, gpa: u64) -> Option<(u64, u64)> {
        self.ram.at(gpa)
    }

    /// Waits for an MSI message.
    pub fn wait_msi(&self) {
        wait_event(self.msi.as_fd(), WAIT_TIMEOUT).expect("an interrupt");
    }

    /// Consumes the MSI messages that have arrived, without waiting. Returns false if there are none.
    #[must_use]
    pub fn take_msi(&self) -> bool {
        wait_event(self.msi.as_fd(), Duration::ZERO).is_ok()
    }

    /// Returns the VM, for threads that inspect it concurrently.
    #[must_use]
    pub fn vm(&self) -> Arc<MediatedVm> {
        Arc::clone(&self.backend)
    }

    /// Calls `act` with the VM's lock held.
    pub fn while_locked(&self, act: impl FnOnce()) {
        self.backend.while_locked(act);
    }

    /// Returns the status that operators see.
    #[must_use]
    pub fn status(&self) -> DeviceStatus {
        self.backend.status()
    }

    /// Returns a counter of the status that operators see.
    #[must_use]
    pub fn counter(&self, name: &str) -> u64 {
        *self.status().counters.get(name).expect("the counter exists")
    }

    /// Returns true if the server was requested to disconnect the client.
    #[must_use]
    pub fn is_disconnected(&self) -> bool {
        self.link.is_disconnecting()
    }

    /// Changes the settings with which the VM is created next.
    pub fn configured(&mut self, change: impl FnOnce(&mut Settings)) {
        change(&mut self.settings);
    }

    /// Returns the last published status of the VM, without querying the VM.
    #[must_use]
    pub fn published(&self) -> DeviceStatus {
        self.backend.published()
    }

    /// Resets the device as its client would.
    pub fn reset(&mut self) {
        self.device.reset();
    }

    /// Disconnects the client, and connects another one.
    pub fn reconnect(&mut self) {
        while let Some(gpa) = self.ram.first() {
            self.unmap_ram(gpa);
        }
        self.device.disconnected();
        self.device.connected();
        self.msi = self.link.attach_msi().expect("an event");
    }

    /// Moves the VM to another card as an operator would. `vm` is its ID on that card. If `emptied` is set, its memory
    /// is evicted from its current card first. Returns the number of bytes copied while the VM was stopped.
    ///
    /// # Errors
    /// Returns an error if the move is not possible. The VM then continues on its current card.
    pub fn move_to(&mut self, to: &Rig, vm: u32, emptied: bool) -> Result<u64, DeviceError> {
        self.move_beside(to, vm, emptied, |_| (), |_, left| drop(left))
    }

    /// Like [`Self::move_to`], but calls `meanwhile` after all memory that can be copied in advance has been copied,
    /// before the VM stops. Calls `behind` after the VM has resumed, before its resources on this card are released.
    ///
    /// # Errors
    /// Returns the same errors as [`Self::move_to`].
    pub fn move_beside(
        &mut self,
        to: &Rig,
        vm: u32,
        emptied: bool,
        meanwhile: impl FnOnce(&mut Self),
        behind: impl FnOnce(&mut Self, Left<'_>),
    ) -> Result<u64, DeviceError> {
        let (device, there) = MediatedVm::build(&to.host, TenantId(vm), &self.settings, &self.link)?;
        let from = Arc::clone(self.backend.host());
        let ahead = || {
            there.await_arrival()?;
            if !emptied {
                return Ok(0);
            }
            from.empty(self.backend.id());
            from.copy_ahead(self.backend.id(), &to.host, there.id())
        };
        let ahead = ahead();
        if ahead.is_ok() {
            meanwhile(self);
        }
        let before = Arc::clone(&self.backend);
        let moved = ahead.and_then(|ahead| Ok((ahead, before.move_to(&there, &self.settings, WAIT_TIMEOUT)?)));
        match moved {
            Ok((ahead, left)) => {
                let bytes = ahead + left.bytes;
                (self.device, self.backend) = (device, there);
                behind(self, left);
                Ok(bytes)
            }
            Err(error) => {
                from.stays(self.backend.id());
                drop(device);
                there.release()?;
                Err(error.into())
            }
        }
    }

    /// Saves the VM as an operator would. The VM continues.
    ///
    /// # Errors
    /// Returns the error that an operator would see if the VM cannot be saved.
    pub fn save(&mut self) -> Result<Vec<u8>, DeviceError> {
        let mut saving = self.backend.save_all(WAIT_TIMEOUT)?;
        let mut all = Vec::new();
        while let Some(bytes) = saving.next_bytes()? {
            all.extend(bytes);
        }
        Ok(all)
    }

    /// Restores the VM from `saved` on a card as an operator would. `vm` is its ID on that card. Returns the size of
    /// the restored memory in bytes.
    ///
    /// # Errors
    /// Returns an error if the restore is not possible. The VM then continues unchanged.
    pub fn restore(&mut self, to: &Rig, vm: u32, saved: &[u8]) -> Result<u64, DeviceError> {
        let (device, there) = MediatedVm::build(&to.host, TenantId(vm), &self.settings, &self.link)?;
        let restore = || {
            there.await_arrival()?;
            let mut coming = Coming::new(&there, &self.settings)?;
            saved.chunks(PART).try_for_each(|part| coming.feed(part))?;
            let bytes = coming.memory_bytes();
            coming.take_place(&self.backend, WAIT_TIMEOUT).map(|_left| bytes)
        };
        match restore() {
            Ok(bytes) => {
                (self.device, self.backend) = (device, there);
                Ok(bytes)
            }
            Err(error) => {
                drop(device);
                there.release()?;
                Err(error.into())
            }
        }
    }

    /// Returns the device's interface for migrations by its client.
    pub fn migration(&mut self) -> &mut dyn Migration {
        self.device.migration().expect("the device supports migration")
    }

    /// Checks that the VM can be moved, or handed over to another process.
    ///
    /// # Errors
    /// Returns an error with the reason if the VM cannot be moved or handed over.
    pub fn check_movable(&self) -> Result<(), card_manager::ManagerError> {
        self.backend.check_movable()
    }

    /// Removes the VM as an operator would.
    ///
    /// # Errors
    /// Returns the error that an operator would see if the VM cannot be removed.
    pub fn remove(self) -> Result<(), card_manager::ManagerError> {
        let Self { device, backend, .. } = self;
        drop(device);
        backend.release()
    }
}
