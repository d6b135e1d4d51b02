//! A VM that is a domain of a fake hypervisor. It resembles [`Guest`](super::Guest), but is accessed through Xen's I/O
//! requests.

use super::{Machine, Rig};
use nvspec::regs::{pbus, windows::pramin};
use std::cell::Cell;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vgpu::{Apertures, MediatedVm, Settings};
use vmm_glue::memory::PAGE_SIZE;
use vmm_glue::{IrqCounts, Link, RegionIndex, StopHandle};
use vram::TenantId;
use xen_device::fake::{FakeDomain, FakeSpec, FakeXen};
use xen_device::{XenOptions, XenServer};

/// Timeout of a wait, longer than any operation takes, even on a loaded host.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Configuration space offsets and addresses of BAR0, BAR1 and BAR3. The larger BARs are above 4 GiB, where firmware
/// would place them.
const PLACES: [(u64, u64); 3] = [(0x10, 0xe000_0000), (0x14, 0x10_0000_0000), (0x1c, 0x20_0000_0000)];
/// Offset of the vGPU's MSI capability.
const MSI: u64 = 0x68;

/// A VM on a card, and the thread that serves its domain.
pub struct XenVm {
    /// Fake hypervisor.
    pub xen: FakeXen,
    backend: Arc<MediatedVm>,
    stop: StopHandle,
    thread: Option<JoinHandle<()>>,
    name: String,
    vram_bytes: u64,
    /// Number of pages that the host can add to a domain, in addition to the domain's RAM.
    pub spare: u64,
}

impl XenVm {
    /// Creates a VM with the ID `vm`, for a domain named `name`.
    ///
    /// # Panics
    /// Panics if the card has no memory for the VM.
    #[must_use]
    pub fn new(rig: &Rig, vm: u32, settings: &Settings, name: &str) -> Self {
        let link = Link::new(IrqCounts { intx: 1, msi: 1, ..IrqCounts::default() }).expect("a link");
        let (mut device, backend) =
            MediatedVm::build(&rig.host, TenantId(vm), settings, &link).expect("the card has space for the VM");
        let (xen, stop) = (FakeXen::default(), StopHandle::new().expect("a handle"));
        let options = XenOptions::new(name.parse().expect("a name"));
        let mut server = XenServer::with(options, xen.hypervisor(), xen.store());
        let stopped = stop.clone();
        let thread =
            std::thread::spawn(move || server.run(&link, &mut device, &stopped).expect("the server does not fail"));
        let vram_bytes = settings.share.vram_bytes;
        let info = rig.host.card().identity();
        let spare =
            if settings.apertures == Apertures::Remapped { (info.bar1_size + info.bar3_size) / PAGE_SIZE } else { 0 };
        Self { xen, backend, stop, thread: Some(thread), name: name.to_owned(), vram_bytes, spare }
    }

    /// Creates a domain for the VM, with `kib` KiB of RAM and two CPUs, of which a driver uses only the first. The
    /// domain is served, its BARs are mapped, and MSI is enabled.
    #[must_use]
    pub fn domain(&self, id: u16, kib: u64) -> XenGuest {
        let domain = self.xen.create(FakeSpec { kib, cpus: 2, spare: self.spare, ..FakeSpec::new(id, &self.name) });
        domain.wait_served();
        for (bar, place) in PLACES {
            domain.config_write(bar, place as u32);
            if bar != 0x10 {
                domain.config_write(bar + 4, (place >> 32) as u32);
            }
        }
        domain.config_write(0x04, 0x0006);
        domain.config_write(MSI + 4, 0xfee0_0000);
        domain.config_write(MSI + 8, 0);
        domain.config_write(MSI + 12, 0x41);
        domain.config_write(MSI, 1 << 16);
        XenGuest { domain, taken: Cell::new(0), vram_bytes: self.vram_bytes }
    }

    /// Returns a counter of the status that operators see.
    ///
    /// # Panics
    /// Panics if the counter does not exist.
    #[must_use]
    pub fn counter(&self, name: &str) -> u64 {
        *self.backend.status().counters.get(name).expect("the counter exists")
    }
}

impl Drop for XenVm {
    fn drop(&mut self) {
        self.stop.stop();
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            assert!(matches!(ended, Some(Ok(()))), "the server's thread has panicked");
            self.backend.release().expect("all resources are released");
        }
    }
}

/// CPU and RAM of a domain.
pub struct XenGuest {
    /// The domain in the fake hypervisor.
    pub domain: FakeDomain,
    /// Number of MSI messages already consumed.
    taken: Cell<usize>,
    vram_bytes: u64,
}

impl XenGuest {
    /// Accesses up to 8 bytes of a region: writes `data`, or reads if `data` is `None`.
    fn access(&self, region: RegionIndex, offset: u64, size: u32, data: Option<u64>) -> u64 {
        match (region, data) {
            (RegionIndex::Config, data) => self.domain.config(offset, size, data),
            (_, None) => self.domain.read(0, Self::place(region, offset), size),
            (_, Some(data)) => {
                self.domain.write(0, Self::place(region, offset), size, data);
                data
            }
        }
    }

    fn place(region: RegionIndex, offset: u64) -> u64 {
        let number = match region {
            RegionIndex::Bar0 => 0,
            RegionIndex::Bar1 => 1,
            RegionIndex::Bar3 => 2,
            _ => panic!("a driver accesses only BARs"),
        };
        PLACES[number].1 + offset
    }

    fn window(&self, at: u64) -> u64 {
        let pramin = PLACES[0].1 + u64::from(pbus::PRAMIN_WINDOW::OFFSET);
        self.domain.write(0, pramin, 4, at >> 16);
        PLACES[0].1 + u64::from(pramin::BASE) + (at & 0xffff)
    }
}

impl Machine for XenGuest {
    fn read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) {
        for (at, piece) in (offset..).step_by(8).zip(data.chunks_mut(8)) {
            let read = self.access(region, at, piece.len() as u32, None).to_le_bytes();
            piece.copy_from_slice(&read[..piece.len()]);
        }
    }

    fn write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) {
        for (at, piece) in (offset..).step_by(8).zip(data.chunks(8)) {
            let mut value = [0; 8];
            value[..piece.len()].copy_from_slice(piece);
            self.access(region, at, piece.len() as u32, Some(u64::from_le_bytes(value)));
        }
    }

    fn vram_bytes(&self) -> u64 {
        self.vram_bytes
    }

    /// Reads through PRAMIN.
    fn vram_read(&self, at: u64, data: &mut [u8]) {
        for (at, piece) in (at..).step_by(8).zip(data.chunks_mut(8)) {
            let read = self.domain.read(0, self.window(at), piece.len() as u32).to_le_bytes();
            piece.copy_from_slice(&read[..piece.len()]);
        }
    }

    /// Writes through PRAMIN.
    fn vram_write(&self, at: u64, data: &[u8]) {
        for (at, piece) in (at..).step_by(8).zip(data.chunks(8)) {
            let mut value = [0; 8];
            value[..piece.len()].copy_from_slice(piece);
            self.domain.write(0, self.window(at), piece.len() as u32, u64::from_le_bytes(value));
        }
    }

    fn ram_read(&self, gpa: u64, data: &mut [u8]) {
        self.domain.file().read_exact_at(data, gpa).expect("the address is in the domain's RAM");
    }

    fn ram_write(&self, gpa: u64, data: &[u8]) {
        self.domain.file().write_all_at(data, gpa).expect("the address is in the domain's RAM");
    }

    fn wait_msi(&self) -> bool {
        let end = Instant::now() + WAIT_TIMEOUT;
        loop {
            let count = self.domain.messages().len();
            if count > self.taken.get() {
                self.taken.set(count);
                return true;
            }
            assert!(Instant::now() < end, "no interrupt in {} s", WAIT_TIMEOUT.as_secs());
            std::thread::yield_now();
        }
    }
}
