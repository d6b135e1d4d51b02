//! A fake kernel with one group, which contains a software card.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use card::{Aperture, Card, DmaMemory, InterruptMode};
use parking_lot::Mutex;
use simgpu::SimGpu;
use tempfile::TempDir;
use vfio_bindings::bindings::vfio::*;
use vfio_host::Address;
use vfio_host::fake::{Fake as FakeSysfs, Plan};
use vmm_sys_util::eventfd::EventFd;

use crate::kernel::{Dependent, DeviceInfo, FileOpenError, IommuInfo, Irq, Kernel, OpenKernel, Region, Window};
use crate::{OpenError, Place, Reset, VfioCard};

/// Properties of the host and its function. Each test changes only the properties that it examines.
#[derive(Clone)]
pub struct Nature {
    pub open: Option<i32>,
    /// True if the kernel has function nodes and iommufd.
    pub node: bool,
    /// Error from binding the function, if binding fails.
    pub bind: Option<i32>,
    pub version: u32,
    pub type1: bool,
    pub group_flags: u32,
    pub set_iommu: Option<i32>,
    pub iommu: IommuInfo,
    pub limit: usize,
    pub memlock: u64,
    /// Barrier at which each mapping waits for other mappings before it completes.
    pub pins_together: Option<Arc<std::sync::Barrier>>,
    pub flags: u32,
    pub sizes: [u64; 3],
    pub mappable: bool,
    pub power: u16,
    pub insomnia: bool,
    pub boot0: Option<u32>,
    pub posted: bool,
    pub dependents: Vec<Dependent>,
    pub reset_loses_post: bool,
    pub device_gone: bool,
}

impl Default for Nature {
    fn default() -> Self {
        Self {
            open: None,
            node: false,
            bind: None,
            version: VFIO_API_VERSION,
            type1: true,
            group_flags: VFIO_GROUP_FLAGS_VIABLE,
            set_iommu: None,
            iommu: IommuInfo {
                page_sizes: 0x4020_1000,
                usable: vec![0..0xfee0_0000, 0xfef0_0000..1 << 39],
                available: Some(65535),
            },
            limit: 100,
            memlock: 1 << 30,
            pins_together: None,
            flags: VFIO_DEVICE_FLAGS_PCI,
            sizes: [16 << 20, 128 << 20, 64 << 20],
            mappable: true,
            power: 3,
            insomnia: false,
            boot0: None,
            posted: true,
            dependents: Vec::new(),
            reset_loses_post: false,
            device_gone: false,
        }
    }
}

/// Kernel state that the calls have changed.
#[derive(Debug, Default)]
struct State {
    bound: bool,
    joined: bool,
    iommu: bool,
    device: bool,
    command: u16,
    power: u16,
    posted: bool,
    irq: Option<u32>,
    /// Event descriptors through which the host reports the loss of the card, by interrupt index.
    watched: Vec<(u32, EventFd)>,
    mapped: BTreeMap<u64, u64>,
    log: Vec<&'static str>,
}

/// The kernel and the card, which tests inspect while a card is open and after it has been closed.
pub struct Machine {
    pub nature: Nature,
    pub sim: Arc<SimGpu>,
    state: Mutex<State>,
    windows: AtomicUsize,
    /// True if the function has disappeared, so that its BARs read as ones.
    pub silent: AtomicBool,
    pub sysfs: FakeSysfs,
    place: Place,
    _folder: TempDir,
}

pub const GROUP: u32 = 7;
/// Name of the function's node, if the kernel has nodes.
const NODE: &str = "vfio4";

impl Machine {
    /// Creates a machine with the properties `nature` and a card that is bound to vfio-pci.
    pub fn new(nature: Nature) -> Arc<Self> {
        let config = simgpu::Config { vram_mib: 64, ..simgpu::Config::default() };
        Self::around(Arc::new(SimGpu::new(&config).unwrap()), nature)
    }

    /// Creates a machine like [`Self::new`], but with a given card.
    pub fn around(sim: Arc<SimGpu>, nature: Nature) -> Arc<Self> {
        let folder = tempfile::tempdir().unwrap();
        let sysfs = FakeSysfs::new(folder.path());
        sysfs.add(Plan { driver: Some("vfio-pci"), ..Plan::CARD });
        if nature.node {
            sysfs.add_node(Plan::CARD.address, NODE);
        }
        let state = State { power: nature.power, posted: nature.posted, ..State::default() };
        let place = Place { sysfs: sysfs.sysfs(), files: folder.path().join("dev") };
        let state = Mutex::new(state);
        let (windows, silent) = (AtomicUsize::new(0), AtomicBool::new(false));
        Arc::new(Self { nature, sim, state, windows, silent, sysfs, place, _folder: folder })
    }

    pub fn address() -> Address {
        Plan::CARD.address.parse().unwrap()
    }

    /// Reports the loss of the card through the interrupt with this index.
    pub fn take_away(&self, index: u32) {
        let state = self.state.lock();
        let event = state.watched.iter().find(|(of, _)| *of == index).map(|(_, event)| event);
        event.expect("it is watched").write(1).unwrap();
    }

    pub fn open(self: &Arc<Self>, reset: Reset) -> Result<VfioCard, OpenError> {
        VfioCard::open_by(&self.place, &Opener(Arc::clone(self)), Self::address(), reset)
    }

    /// Opens the function at another address.
    pub fn open_at(self: &Arc<Self>, address: &str) -> Result<VfioCard, OpenError> {
        let address = address.parse().expect("an address");
        VfioCard::open_by(&self.place, &Opener(Arc::clone(self)), address, Reset::Auto)
    }

    /// Opens the card.
    pub fn card(self: &Arc<Self>) -> VfioCard {
        self.open(Reset::Auto).unwrap()
    }

    /// Returns the VFIO calls made since the last call of this function.
    pub fn log(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.state.lock().log)
    }

    pub fn mappings(&self) -> Vec<(u64, u64)> {
        self.state.lock().mapped.iter().map(|(iova, len)| (*iova, *len)).collect()
    }

    /// Returns two flags: one is true if the function responds to memory accesses, and the other is true if it may be
    /// bus master.
    pub fn enabled(&self) -> (bool, bool) {
        let command = self.state.lock().command;
        (command & 2 != 0, command & 4 != 0)
    }

    fn region(&self, index: u32) -> Region {
        let (read, write, map) = (VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE, VFIO_REGION_INFO_FLAG_MMAP);
        let map = if self.nature.mappable { map } else { 0 };
        let [bar0, bar1, bar3] = self.nature.sizes;
        let (size, flags) = match index {
            0 => (bar0, read | write | map),
            1 => (bar1, read | write | map),
            3 => (bar3, read | write | map),
            7 => (4096, read | write),
            _ => (0, 0),
        };
        Region { flags, size, offset: u64::from(index) << 40, sparse: false }
    }

    fn register_read(&self, offset: u32) -> u32 {
        let posted = self.state.lock().posted;
        match (offset, self.nature.boot0) {
            (0, Some(boot0)) => boot0,
            (0x02240c, _) if !posted => self.sim.read32(offset) & !2,
            _ => self.sim.read32(offset),
        }
    }

    fn access_read(&self, index: u32, offset: u64, data: &mut [u8]) {
        let state = self.state.lock();
        // The real kernel would kill the process with SIGBUS.
        assert!(state.command & 2 != 0 && state.power == 0, "memory is off, or the function is asleep");
        drop(state);
        match index {
            _ if self.silent.load(Ordering::SeqCst) => data.fill(0xff),
            0 => {
                assert!(data.len() == 4 && offset.is_multiple_of(4), "registers are 32 bits wide");
                data.copy_from_slice(&self.register_read(offset as u32).to_le_bytes());
            }
            1 => self.sim.aperture_read(Aperture::Bar1, offset, data),
            _ => self.sim.aperture_read(Aperture::Bar3, offset, data),
        }
    }

    fn access_write(&self, index: u32, offset: u64, data: &[u8]) {
        let state = self.state.lock();
        assert!(state.command & 2 != 0 && state.power == 0, "memory is off, or the function is asleep");
        drop(state);
        match index {
            _ if self.silent.load(Ordering::SeqCst) => {}
            0 => self
                .sim
                .write32(offset as u32, u32::from_le_bytes(data.try_into().expect("registers are 32 bits wide"))),
            1 => self.sim.aperture_write(Aperture::Bar1, offset, data),
            _ => self.sim.aperture_write(Aperture::Bar3, offset, data),
        }
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) {
        let state = self.state.lock();
        let mut config = [0_u8; 256];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &[0xde, 0x10, 0xd8, 0x06]);
        put(4, &state.command.to_le_bytes());
        put(6, &0x10_u16.to_le_bytes());
        put(8, &[0xa3, 0x00, 0x00, 0x03]);
        put(0x2c, &[0xde, 0x10, 0x6f, 0x07]);
        // A vendor-specific capability precedes the power capability, and the list ends in a cycle.
        put(0x34, &[0x50]);
        put(0x50, &[9, 0x60]);
        put(0x60, &[1, 0x50]);
        put(0x64, &state.power.to_le_bytes());
        data.copy_from_slice(&config[offset as usize..offset as usize + data.len()]);
    }

    fn config_write(&self, offset: u64, data: &[u8]) {
        let mut state = self.state.lock();
        let value = u16::from_le_bytes(data.try_into().expect("registers are 16 bits wide"));
        match offset {
            4 => state.command = value,
            0x64 if !self.nature.insomnia => state.power = value & 3,
            0x64 => {}
            other => panic!("a write to {other:#x} of configuration space"),
        }
    }

    fn after_reset(&self) {
        self.sim.reset();
        let mut state = self.state.lock();
        assert_eq!(state.irq, None, "an interrupt is configured during a reset");
        state.posted &= !self.nature.reset_loses_post;
        // The kernel restores configuration space, but the function may still be asleep.
        state.power = self.nature.power;
    }
}

struct Opener(Arc<Machine>);

impl OpenKernel for Opener {
    fn open(&self, group: u32, node: Option<&str>) -> Result<Box<dyn Kernel>, FileOpenError> {
        assert_eq!((group, node.is_some()), (GROUP, self.0.nature.node));
        if node.is_some() {
            assert_eq!(node, Some(NODE));
            self.0.state.lock().device = true;
        }
        if let Some(errno) = self.0.nature.open {
            return Err(FileOpenError { path: "/dev/vfio/7".into(), source: error(errno) });
        }
        Ok(Box::new(FakeKernel(Arc::clone(&self.0))))
    }
}

fn error(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

struct FakeKernel(Arc<Machine>);

impl FakeKernel {
    fn device(&self) -> io::Result<()> {
        let state = self.0.state.lock();
        assert!(state.device, "the function is not open");
        assert!(state.bound || !self.0.nature.node, "the kernel accepts no other call before binding");
        if self.0.nature.device_gone { Err(error(libc::ENODEV)) } else { Ok(()) }
    }
}

impl Drop for FakeKernel {
    fn drop(&mut self) {
        // In the kernel, a mapped BAR would keep the function open and the memory mapped for the card.
        assert_eq!(self.0.windows.load(Ordering::Relaxed), 0, "a BAR is still mapped");
        let mut state = self.0.state.lock();
        // The kernel would remove the mappings, but a card must remove them itself before the memory is freed.
        assert!(state.mapped.is_empty() || std::thread::panicking(), "memory is still mapped: {:?}", state.mapped);
        *state = State { power: 3, posted: state.posted, log: std::mem::take(&mut state.log), ..State::default() };
    }
}

impl Kernel for FakeKernel {
    fn is_node(&self) -> bool {
        self.0.nature.node
    }

    fn bind_iommufd(&self) -> io::Result<()> {
        let mut state = self.0.state.lock();
        assert!(self.0.nature.node && state.device && !std::mem::replace(&mut state.bound, true));
        self.0.nature.bind.map_or(Ok(()), |errno| Err(error(errno)))
    }

    fn attach_space(&self) -> io::Result<()> {
        let mut state = self.0.state.lock();
        assert!(state.bound && !std::mem::replace(&mut state.iommu, true));
        Ok(())
    }

    fn api_version(&self) -> io::Result<u32> {
        assert!(!self.0.nature.node, "there is no container");
        Ok(self.0.nature.version)
    }

    fn has_extension(&self, kind: u32) -> io::Result<bool> {
        Ok(kind == VFIO_TYPE1v2_IOMMU && self.0.nature.type1)
    }

    fn group_flags(&self) -> io::Result<u32> {
        Ok(self.0.nature.group_flags)
    }

    fn set_container(&self) -> io::Result<()> {
        let mut state = self.0.state.lock();
        assert!(!self.0.nature.node, "there is no group");
        assert!(!std::mem::replace(&mut state.joined, true), "the group is already in a container");
        Ok(())
    }

    fn set_iommu(&self, kind: u32) -> io::Result<()> {
        let mut state = self.0.state.lock();
        assert!(state.joined && !state.iommu && kind == VFIO_TYPE1v2_IOMMU);
        if let Some(errno) = self.0.nature.set_iommu {
            return Err(error(errno));
        }
        state.iommu = true;
        Ok(())
    }

    fn iommu_info(&self) -> io::Result<IommuInfo> {
        assert!(self.0.state.lock().iommu);
        Ok(self.0.nature.iommu.clone())
    }

    fn map(&self, iova: u64, memory: &DmaMemory) -> io::Result<()> {
        if let Some(together) = &self.0.nature.pins_together {
            together.wait();
        }
        let mut state = self.0.state.lock();
        assert!(state.iommu && state.device, "the function must be open and have an IOMMU before memory is mapped");
        let len = memory.len() as u64;
        let aligned = [iova, len, memory.host_address().addr() as u64].iter().all(|value| value % 4096 == 0);
        assert!(aligned && len != 0, "{iova:#x}+{len:#x}");
        let within = |range: &Range<u64>| range.start <= iova && iova + len <= range.end;
        assert!(self.0.nature.iommu.usable.iter().any(within), "{iova:#x} is not among the usable addresses");
        let free = state.mapped.iter().all(|(start, size)| start + size <= iova || iova + len <= *start);
        assert!(free, "{iova:#x}+{len:#x} overlaps");
        if state.mapped.len() >= self.0.nature.limit {
            return Err(error(libc::ENOSPC));
        }
        if state.mapped.values().sum::<u64>() + len > self.0.nature.memlock {
            return Err(error(libc::ENOMEM));
        }
        state.mapped.insert(iova, len);
        self.0.sim.map_dma(iova, memory.clone()).map_err(io::Error::other)
    }

    fn unmap(&self, iova: u64, len: u64) -> io::Result<u64> {
        let mut state = self.0.state.lock();
        assert_eq!(state.mapped.remove(&iova), Some(len), "the kernel would unmap a different range");
        self.0.sim.unmap_dma(iova, len).unwrap();
        Ok(len)
    }

    fn open_device(&self, address: Address) -> io::Result<()> {
        let mut state = self.0.state.lock();
        assert!(state.iommu && !state.device && address == Machine::address());
        state.device = true;
        Ok(())
    }

    fn device_info(&self) -> io::Result<DeviceInfo> {
        self.device()?;
        Ok(DeviceInfo { flags: self.0.nature.flags, regions: 9 })
    }

    fn region(&self, index: u32) -> io::Result<Region> {
        self.device()?;
        if index < 9 { Ok(self.0.region(index)) } else { Err(error(libc::EINVAL)) }
    }

    fn set_irq(&self, index: u32, set: Irq<'_>) -> io::Result<()> {
        self.device()?;
        let mode = match index {
            VFIO_PCI_MSI_IRQ_INDEX => InterruptMode::Msi,
            VFIO_PCI_INTX_IRQ_INDEX => InterruptMode::Intx,
            VFIO_PCI_REQ_IRQ_INDEX | VFIO_PCI_ERR_IRQ_INDEX => {
                let Irq::Signal(event) = set else { panic!("interrupt {index} is only ever watched") };
                self.0.state.lock().watched.push((index, event.try_clone()?));
                return Ok(());
            }
            other => panic!("interrupt {other}"),
        };
        let mut state = self.0.state.lock();
        match set {
            Irq::Signal(event) => {
                assert!(state.irq.is_none_or(|now| now == index), "VFIO has one kind of interrupt at a time");
                state.irq = Some(index);
                drop(state);
                self.0.sim.set_interrupt(mode, Some(event.try_clone()?));
            }
            Irq::Off => {
                assert_eq!(state.irq.take(), Some(index), "an interrupt is disabled that is not enabled");
                drop(state);
                self.0.sim.set_interrupt(mode, None);
            }
            Irq::Unmask => {
                assert_eq!((state.irq, mode), (Some(index), InterruptMode::Intx));
                drop(state);
                self.0.sim.unmask_intx();
            }
        }
        Ok(())
    }

    fn reset(&self) -> io::Result<()> {
        self.device()?;
        assert!(self.0.nature.flags & VFIO_DEVICE_FLAGS_RESET != 0, "the function has no reset");
        self.0.state.lock().log.push("function reset");
        self.0.after_reset();
        Ok(())
    }

    fn dependents(&self) -> io::Result<Vec<Dependent>> {
        self.device()?;
        let others = self.0.nature.dependents.clone();
        if others.is_empty() { Err(error(libc::ENODEV)) } else { Ok(others) }
    }

    fn hot_reset(&self) -> io::Result<()> {
        self.device()?;
        assert!(self.0.nature.dependents.iter().all(|other| other.group == GROUP));
        self.0.state.lock().log.push("bus reset");
        self.0.after_reset();
        Ok(())
    }

    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.device()?;
        match (offset >> 40) as u32 {
            7 => self.0.config_read(offset & 0xff_ffff_ffff, data),
            index => self.0.access_read(index, offset & 0xff_ffff_ffff, data),
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.device()?;
        match (offset >> 40) as u32 {
            7 => self.0.config_write(offset & 0xff_ffff_ffff, data),
            index => self.0.access_write(index, offset & 0xff_ffff_ffff, data),
        }
        Ok(())
    }

    fn map_region(&self, region: &Region) -> io::Result<Box<dyn Window>> {
        self.device()?;
        assert!(region.flags & VFIO_REGION_INFO_FLAG_MMAP != 0, "the region cannot be mapped");
        self.0.windows.fetch_add(1, Ordering::Relaxed);
        let index = (region.offset >> 40) as u32;
        Ok(Box::new(FakeWindow { machine: Arc::clone(&self.0), index, len: region.size as usize }))
    }
}

struct FakeWindow {
    machine: Arc<Machine>,
    index: u32,
    len: usize,
}

impl Drop for FakeWindow {
    fn drop(&mut self) {
        self.machine.windows.fetch_sub(1, Ordering::Relaxed);
    }
}

impl FakeWindow {
    fn get<const N: usize>(&self, offset: usize) -> [u8; N] {
        assert!(offset.is_multiple_of(N) && offset + N <= self.len, "an access at {offset:#x} of {N} bytes");
        let mut bytes = [0; N];
        self.machine.access_read(self.index, offset as u64, &mut bytes);
        bytes
    }

    fn put(&self, offset: usize, bytes: &[u8]) {
        let len = bytes.len();
        assert!(offset.is_multiple_of(len) && offset + len <= self.len, "an access at {offset:#x} of {len} bytes");
        self.machine.access_write(self.index, offset as u64, bytes);
    }
}

impl Window for FakeWindow {
    fn len(&self) -> usize {
        self.len
    }

    fn read8(&self, offset: usize) -> u8 {
        u8::from_le_bytes(self.get(offset))
    }

    fn read32(&self, offset: usize) -> u32 {
        u32::from_le_bytes(self.get(offset))
    }

    fn read64(&self, offset: usize) -> u64 {
        u64::from_le_bytes(self.get(offset))
    }

    fn write8(&self, offset: usize, value: u8) {
        self.put(offset, &[value]);
    }

    fn write32(&self, offset: usize, value: u32) {
        self.put(offset, &value.to_le_bytes());
    }

    fn write64(&self, offset: usize, value: u64) {
        self.put(offset, &value.to_le_bytes());
    }
}
