//! Passes a card through to a VM without mediation. Passthrough is the baseline of all overhead figures, and helps to
//! distinguish card faults from mediator faults.
//!
//! Accesses to BAR0 become 32-bit register accesses, into which smaller accesses are merged. BAR1 and BAR3 are the
//! card's apertures, and the expansion ROM contains the PROM image. Guest memory is mapped at its guest-physical
//! addresses while the guest has bus mastering enabled. A thread relays the card's interrupts in the mode that the
//! guest has selected.
//!
//! The crate does not validate accesses: the guest has the same access to the card as a driver on bare metal. A VM uses
//! the card exclusively, and the card is reset between clients.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

use card::{Aperture, Card, DmaMemory, InterruptMode};
use devmodel::pci::{PciConfig, PciEvents, PciIdentity};
use nvspec::regs::ppci;
use vm_device::{DeviceError, DeviceStatus, InterruptKind, memory_of};
use vmm_glue::device::NUM_REGIONS;
use vmm_glue::{AccessError, Ack, Device, DmaRegion, Interrupts, Link, MapError, RegionIndex, RegionInfo};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};

/// Mode in which the card's interrupts are delivered to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Line {
    Off = 0,
    Intx = 1,
    Msi = 2,
}

/// State shared by the device's thread, the relay, and the admin API.
#[derive(Debug)]
pub struct PassthroughVm {
    interrupts: Arc<Interrupts>,
    /// Current [`Line`] as a number.
    line: AtomicU8,
    pin: Pin,
    bus_master: AtomicBool,
    dma_regions: AtomicU32,
    interrupts_relayed: AtomicU64,
    register_reads: AtomicU64,
    register_writes: AtomicU64,
    aperture_reads: AtomicU64,
    aperture_writes: AtomicU64,
    out_of_reach: AtomicU64,
    pci_id: (u16, u16),
    vram_mib: u64,
}

/// The card's interrupt pin, as seen by the relay.
#[derive(Debug, Default)]
struct Pin {
    /// Level of the pin. The client's pin is changed under the same lock, so that both levels are always equal.
    level: locks::Mutex<locks::rank::Level, bool>,
    /// Copy of `level`, which register accesses read without acquiring the lock. It is set before the client can
    /// observe the interrupt.
    hint: AtomicBool,
}

impl Pin {
    fn raise(&self, interrupts: &Interrupts) {
        self.hint.store(true, Ordering::Release);
        let mut level = self.level.lock();
        *level = true;
        interrupts.set_intx_level(true);
    }

    /// Deasserts the pin. Returns true if the pin was asserted.
    fn lower(&self, interrupts: &Interrupts) -> bool {
        if !self.hint.load(Ordering::Acquire) {
            return false;
        }
        let mut level = self.level.lock();
        if *level {
            self.hint.store(false, Ordering::Release);
            interrupts.set_intx_level(false);
        }
        std::mem::take(&mut *level)
    }
}

impl PassthroughVm {
    fn line(&self) -> Line {
        match self.line.load(Ordering::Acquire) {
            1 => Line::Intx,
            2 => Line::Msi,
            _ => Line::Off,
        }
    }
}

impl PassthroughVm {
    /// Returns the device status.
    #[must_use]
    pub fn status(&self) -> DeviceStatus {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counters = [
            ("interrupts", load(&self.interrupts_relayed)),
            ("register_reads", load(&self.register_reads)),
            ("register_writes", load(&self.register_writes)),
            ("aperture_reads", load(&self.aperture_reads)),
            ("aperture_writes", load(&self.aperture_writes)),
            ("dma_regions_mapped", u64::from(self.dma_regions.load(Ordering::Relaxed))),
            ("dma_regions_out_of_reach", load(&self.out_of_reach)),
        ];
        DeviceStatus {
            vram_mib: self.vram_mib,
            channels_used: 0,
            pci_id: self.pci_id,
            bus_master: self.bus_master.load(Ordering::Relaxed),
            interrupts: match self.line() {
                Line::Off => InterruptKind::Off,
                Line::Intx => InterruptKind::Intx,
                Line::Msi => InterruptKind::Msi,
            },
            denied: Vec::new(),
            counters: counters.map(|(name, count)| (name.to_owned(), count)).into(),
        }
    }
}

/// Minimum size of an expansion ROM BAR in bytes.
const LEAST_ROM: usize = 2048;

/// A card as a VM's device.
pub struct PassthroughDevice {
    card: Arc<dyn Card>,
    link: Link,
    pci: PciConfig,
    /// Expansion ROM contents, padded to the BAR size. Empty if the card has no ROM.
    rom: Vec<u8>,
    shared: Arc<PassthroughVm>,
    /// Memory regions lent by the client, by guest-physical address. They are mapped for the card while the guest has
    /// bus mastering enabled.
    regions: BTreeMap<u64, Lending>,
    event: EventFd,
    stop: Arc<AtomicBool>,
    relay: locks::Mutex<locks::rank::Relay, Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Lending {
    size: u64,
    memory: DmaMemory,
    mapped: bool,
}

impl PassthroughDevice {
    /// Resets `card`, which has `vram_mib` MiB of VRAM, and connects it to the VM `name` through `link`. `flr` is true
    /// if the function supports function-level resets.
    ///
    /// # Errors
    /// Returns an error if no file descriptors or threads are available, or if the sizes of the card's BARs are
    /// invalid.
    pub fn build(
        card: Arc<dyn Card>,
        vram_mib: u64,
        flr: bool,
        name: &str,
        link: &Link,
    ) -> Result<(Self, Arc<PassthroughVm>), DeviceError> {
        let id = card.identity();
        let identity = PciIdentity {
            vendor: id.vendor,
            device: id.device,
            subsystem_vendor: id.subsystem_vendor,
            subsystem: id.subsystem,
            revision: id.revision,
            class: id.class,
            bar0_bytes: id.bar0_size,
            bar1_bytes: id.bar1_size,
            bar3_bytes: id.bar3_size,
        };
        let shared = Arc::new(PassthroughVm {
            interrupts: Arc::clone(link.interrupts()),
            line: AtomicU8::new(Line::Off as u8),
            pin: Pin::default(),
            bus_master: AtomicBool::new(false),
            dma_regions: AtomicU32::new(0),
            interrupts_relayed: AtomicU64::new(0),
            register_reads: AtomicU64::new(0),
            register_writes: AtomicU64::new(0),
            aperture_reads: AtomicU64::new(0),
            aperture_writes: AtomicU64::new(0),
            out_of_reach: AtomicU64::new(0),
            pci_id: (id.vendor, id.device),
            vram_mib,
        });
        let event = EventFd::new(EFD_CLOEXEC)?;
        let stop = Arc::new(AtomicBool::new(false));
        let relay = Relay { event: event.try_clone()?, shared: Arc::clone(&shared), stop: Arc::clone(&stop) };
        let span = tracing::info_span!(parent: None, "vm", name);
        let relay =
            std::thread::Builder::new().name(format!("irq-{name}")).spawn(move || span.in_scope(|| relay.run()))?;
        card.reset();
        let mut pci = PciConfig::new(&identity)?;
        let control = card.read32(ppci::ROM_CONTROL::OFFSET);
        let mut rom = bringup::start::read_vbios(&*card).to_vec();
        card.write32(ppci::ROM_CONTROL::OFFSET, control);
        if !rom.is_empty() {
            rom.resize(rom.len().next_power_of_two().max(LEAST_ROM), 0xff);
            pci.add_rom(rom.len() as u64)?;
        }
        if flr {
            pci.add_reset();
        }
        let device = Self {
            pci,
            rom,
            card,
            link: link.clone(),
            shared: Arc::clone(&shared),
            regions: BTreeMap::new(),
            event,
            stop,
            relay: locks::Mutex::new(Some(relay)),
        };
        Ok((device, shared))
    }

    fn read_registers(&self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        self.shared.register_reads.fetch_add(1, Ordering::Relaxed);
        let offset = u32::try_from(offset).map_err(|_| AccessError::Invalid)?;
        for (register, piece) in (offset & !3..).step_by(4).zip(pieces_mut(offset, data)) {
            let value = self.card.read32(register).to_le_bytes();
            let from = place(offset, register);
            piece.copy_from_slice(value.get(from..).and_then(|v| v.get(..piece.len())).ok_or(AccessError::Invalid)?);
        }
        self.look_at_pin();
        Ok(())
    }

    fn write_registers(&self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        self.shared.register_writes.fetch_add(1, Ordering::Relaxed);
        let offset = u32::try_from(offset).map_err(|_| AccessError::Invalid)?;
        for (register, piece) in (offset & !3..).step_by(4).zip(pieces(offset, data)) {
            let mut value = if piece.len() == 4 { [0; 4] } else { self.card.read32(register).to_le_bytes() };
            let from = place(offset, register);
            let target = value.get_mut(from..).and_then(|v| v.get_mut(..piece.len())).ok_or(AccessError::Invalid)?;
            target.copy_from_slice(piece);
            self.card.write32(register, u32::from_le_bytes(value));
        }
        self.look_at_pin();
        Ok(())
    }

    /// Rearms the card's interrupt, so that the card signals again if its pin is still asserted. Must be called after
    /// accesses that may have deasserted the pin.
    ///
    /// While the client masks the pin, another signal has no effect. When the client unmasks the pin, its level
    /// determines whether an interrupt is delivered.
    fn look_at_pin(&self) {
        if self.shared.pin.lower(&self.shared.interrupts) {
            self.card.unmask_intx();
        }
    }

    fn act_on(&mut self, events: PciEvents) {
        if events.reset {
            return self.clean();
        }
        if let Some(master) = events.bus_master {
            self.shared.bus_master.store(master, Ordering::Relaxed);
            if master {
                self.map_all();
                self.link.check_shared();
            } else {
                self.unmap_all();
            }
        }
        if events.msi.is_some() || events.intx_disabled.is_some() {
            self.route_interrupts();
        }
    }

    fn route_interrupts(&self) {
        let line = match (self.pci.msi_enabled(), self.pci.intx_disabled()) {
            (true, _) => Line::Msi,
            (false, false) => Line::Intx,
            (false, true) => Line::Off,
        };
        if line == self.shared.line() {
            return;
        }
        self.quiet_interrupts();
        self.shared.line.store(line as u8, Ordering::Release);
        let mode = match line {
            Line::Off => return,
            Line::Intx => InterruptMode::Intx,
            Line::Msi => InterruptMode::Msi,
        };
        match self.event.try_clone() {
            Ok(event) => self.card.set_interrupt(mode, Some(event)),
            Err(error) => tracing::error!(%error, "cannot duplicate the eventfd of the card's interrupt"),
        }
    }

    fn quiet_interrupts(&self) {
        match self.shared.line() {
            Line::Off => {}
            Line::Intx => self.card.set_interrupt(InterruptMode::Intx, None),
            Line::Msi => self.card.set_interrupt(InterruptMode::Msi, None),
        }
        self.shared.line.store(Line::Off as u8, Ordering::Release);
        self.shared.pin.lower(&self.shared.interrupts);
    }

    fn map_all(&mut self) {
        for (&gpa, lending) in &mut self.regions {
            lending.map(gpa, &*self.card, &self.shared);
        }
    }

    fn unmap_all(&mut self) {
        for (&gpa, lending) in &mut self.regions {
            lending.unmap(gpa, &*self.card, &self.shared);
        }
    }

    /// Restores the card's initial state.
    fn clean(&mut self) {
        self.quiet_interrupts();
        self.card.reset();
        self.pci.reset();
        self.shared.bus_master.store(false, Ordering::Relaxed);
        self.unmap_all();
        self.route_interrupts();
    }
}

impl Lending {
    fn map(&mut self, gpa: u64, card: &dyn Card, shared: &PassthroughVm) {
        if self.mapped {
            return;
        }
        match card.map_dma(gpa, self.memory.clone()) {
            Ok(()) => {
                self.mapped = true;
                shared.dma_regions.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => {
                shared.out_of_reach.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(%error, "cannot map part of guest memory for the card");
            }
        }
    }

    fn unmap(&mut self, gpa: u64, card: &dyn Card, shared: &PassthroughVm) {
        if !std::mem::take(&mut self.mapped) {
            return;
        }
        shared.dma_regions.fetch_sub(1, Ordering::Relaxed);
        if let Err(error) = card.unmap_dma(gpa, self.size) {
            tracing::error!(%error, "cannot unmap guest memory from the card");
        }
    }
}

impl Device for PassthroughDevice {
    fn regions(&self) -> [RegionInfo; NUM_REGIONS] {
        let id = self.card.identity();
        let mut regions: [RegionInfo; NUM_REGIONS] = Default::default();
        let mut set = |index: RegionIndex, info| regions[index as usize] = info;
        set(RegionIndex::Bar0, RegionInfo::read_write(id.bar0_size));
        set(RegionIndex::Bar1, RegionInfo::read_write(id.bar1_size));
        set(RegionIndex::Bar3, RegionInfo::read_write(id.bar3_size));
        if !self.rom.is_empty() {
            set(RegionIndex::Rom, RegionInfo::read_only(self.rom.len() as u64));
        }
        set(RegionIndex::Config, RegionInfo::read_write(devmodel::pci::CONFIG_BYTES as u64));
        regions
    }

    fn connected(&mut self) {
        self.route_interrupts();
    }

    fn region_read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        let aperture = match region {
            RegionIndex::Config => {
                self.pci.read(offset, data);
                return Ok(());
            }
            _ if !self.pci.is_awake() => {
                data.fill(0xff);
                return Ok(());
            }
            RegionIndex::Bar0 => return self.read_registers(offset, data),
            RegionIndex::Bar1 => Aperture::Bar1,
            RegionIndex::Bar3 => Aperture::Bar3,
            RegionIndex::Rom => {
                let from = usize::try_from(offset).map_err(|_| AccessError::Invalid)?;
                let bytes = self.rom.get(from..).and_then(|rest| rest.get(..data.len())).ok_or(AccessError::Invalid)?;
                data.copy_from_slice(bytes);
                return Ok(());
            }
            _ => return Err(AccessError::Denied),
        };
        self.shared.aperture_reads.fetch_add(1, Ordering::Relaxed);
        self.card.aperture_read(aperture, offset, data);
        Ok(())
    }

    fn region_write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<Ack, AccessError> {
        let aperture = match region {
            RegionIndex::Config => {
                let events = self.pci.write(offset, data);
                self.act_on(events);
                return Ok(Ack::Done);
            }
            // Writes to a function in a low-power state are dropped.
            _ if !self.pci.is_awake() => return Ok(Ack::Done),
            RegionIndex::Bar0 => return self.write_registers(offset, data).map(|()| Ack::Done),
            RegionIndex::Bar1 => Aperture::Bar1,
            RegionIndex::Bar3 => Aperture::Bar3,
            _ => return Err(AccessError::Denied),
        };
        self.shared.aperture_writes.fetch_add(1, Ordering::Relaxed);
        self.card.aperture_write(aperture, offset, data);
        Ok(Ack::Done)
    }

    fn dma_map(&mut self, region: &DmaRegion) -> Result<(), MapError> {
        // Memory without a mapping, and memory that the card may not read, is not mapped for the card. The card's
        // accesses to it fault, like accesses beyond the end of memory.
        let Some(mapping) = region.mapping.as_ref().filter(|_| region.readable) else { return Ok(()) };
        let memory = memory_of(mapping, region.writable).map_err(|error| MapError(error.to_string()))?;
        let mut lending = Lending { size: region.size, memory, mapped: false };
        if self.pci.bus_master() {
            lending.map(region.gpa, &*self.card, &self.shared);
            self.link.check_shared();
        }
        self.regions.insert(region.gpa, lending);
        Ok(())
    }

    fn dma_unmap(&mut self, gpa: u64, _: u64) {
        if let Some(mut lending) = self.regions.remove(&gpa) {
            lending.unmap(gpa, &*self.card, &self.shared);
        }
    }

    fn reset(&mut self) {
        self.clean();
    }

    fn disconnected(&mut self) {
        self.clean();
    }
}

impl Drop for PassthroughDevice {
    fn drop(&mut self) {
        self.clean();
        self.quiet_interrupts();
        self.stop.store(true, Ordering::Release);
        // The write does not fail, because the counter is far from its maximum.
        let _ = self.event.write(1);
        if self.relay.lock().take().is_some_and(|relay| relay.join().is_err()) {
            tracing::error!("the thread that relays the card's interrupts panicked");
        }
    }
}

/// State of the relay thread.
struct Relay {
    event: EventFd,
    shared: Arc<PassthroughVm>,
    stop: Arc<AtomicBool>,
}

impl Relay {
    fn run(self) {
        let Self { event, shared, stop } = self;
        loop {
            if let Err(error) = event.read() {
                tracing::error!(%error, "the relay of the card's interrupts stops");
                return;
            }
            if stop.load(Ordering::Acquire) {
                return;
            }
            match shared.line() {
                Line::Off => {}
                Line::Msi => {
                    shared.interrupts_relayed.fetch_add(1, Ordering::Relaxed);
                    shared.interrupts.trigger_msi(0);
                }
                Line::Intx => {
                    shared.interrupts_relayed.fetch_add(1, Ordering::Relaxed);
                    shared.pin.raise(&shared.interrupts);
                }
            }
        }
    }
}

/// Returns the byte position within the register at `register` where an access at `offset` starts.
fn place(offset: u32, register: u32) -> usize {
    offset.saturating_sub(register).min(3) as usize
}

/// Splits the data of an access at `offset` at register boundaries.
fn pieces(offset: u32, data: &[u8]) -> impl Iterator<Item = &[u8]> {
    let head = (4 - (offset & 3) as usize).min(data.len());
    let (head, tail) = data.split_at(head);
    std::iter::once(head).chain(tail.chunks(4))
}

fn pieces_mut(offset: u32, data: &mut [u8]) -> impl Iterator<Item = &mut [u8]> {
    let head = (4 - (offset & 3) as usize).min(data.len());
    let (head, tail) = data.split_at_mut(head);
    std::iter::once(head).chain(tail.chunks_mut(4))
}

#[cfg(test)]
mod tests;
