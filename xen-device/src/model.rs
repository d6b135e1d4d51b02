//! A small device for tests of this server. It has two BARs, one MSI message and one interrupt pin, and reads guest
//! memory.
//!
//! It checks the server's obligations to a device: aligned accesses inside regions, paired map and unmap calls, and no
//! call after the end.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use vm_memory::{Bytes, VolatileMemory, VolatileSlice};
use vmm_glue::device::{AccessError, Ack, Device, MapError, NUM_REGIONS, RegionIndex, RegionInfo};
use vmm_glue::link::Link;
use vmm_glue::mappable::{MmapArea, region_memory};
use vmm_glue::memory::{DmaRegion, Mapping};

/// Size of the 32-bit BAR0 in bytes. The mask in configuration space must match it.
pub const BAR0: u64 = 0x2000;
/// Size of the 64-bit BAR1 in bytes.
pub const BAR1: u64 = 0x2000;
/// Mappable part of each BAR.
pub const AREA: MmapArea = MmapArea { offset: 0x1000, size: 0x1000 };
/// Offset of the MSI capability.
pub const MSI: u64 = 0x40;

/// Registers of BAR0 that have an effect. The rest of BAR0 is memory.
pub mod register {
    /// Triggers the message when written.
    pub const MESSAGE: u64 = 0x00;
    /// Sets the pin's level when written.
    pub const PIN: u64 = 0x08;
    /// Reads 8 bytes of guest memory at the written address into [`DATA`].
    pub const FETCH: u64 = 0x10;
    /// The fetched bytes, or all ones if the guest has no memory there.
    pub const DATA: u64 = 0x18;
}

/// Record of all calls to a device.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Accesses to BARs: region, offset, length in bytes, and a flag that is true for a write.
    pub accesses: Vec<(RegionIndex, u64, usize, bool)>,
    /// Currently mapped memory: sizes in bytes by address.
    pub mapped: BTreeMap<u64, u64>,
    /// Number of domains that have connected.
    pub came: u64,
    /// Number of domains that have disconnected.
    pub went: u64,
    /// Set by a test to make the device reject pages for its regions.
    pub refuses: bool,
}

/// A device that checks and records the calls of its server.
#[derive(Debug)]
pub struct Model {
    link: Link,
    bars: [Vec<u8>; 2],
    config: [u8; 256],
    writable: [u8; 256],
    /// The file that a client maps.
    file: Arc<OwnedFd>,
    lent: [Option<Arc<Mapping>>; 2],
    seen: Arc<Mutex<Seen>>,
}

impl Model {
    /// Creates a device and the record of its calls.
    #[must_use]
    pub fn new(link: &Link) -> (Self, Arc<Mutex<Seen>>) {
        let seen = Arc::<Mutex<Seen>>::default();
        let mut this = Self {
            link: link.clone(),
            bars: [BAR0, BAR1].map(|size| vec![0; usize::try_from(size).unwrap_or(0)]),
            config: [0; 256],
            writable: [0; 256],
            file: Arc::new(region_memory("model", BAR1).expect("a memory file")),
            lent: [None, None],
            seen: Arc::clone(&seen),
        };
        this.clear();
        (this, seen)
    }

    fn clear(&mut self) {
        self.bars.iter_mut().for_each(|bar| bar.fill(0));
        self.config = [0; 256];
        let mut put = |at: usize, bytes: &[u8], mask: &[u8]| {
            self.config.iter_mut().skip(at).zip(bytes).for_each(|(to, from)| *to = *from);
            self.writable.iter_mut().skip(at).zip(mask).for_each(|(to, from)| *to = *from);
        };
        put(0, &[0xde, 0x10, 0xd8, 0x06, 0, 0, 0x10, 0], &[0, 0, 0, 0, 0x06, 0x04]);
        put(0x10, &[0; 4], &[0, 0xe0, 0xff, 0xff]);
        put(0x14, &[4, 0, 0, 0, 0, 0, 0, 0], &(!(BAR1.saturating_sub(1))).to_le_bytes());
        put(0x34, &[0x40, 0, 0, 0], &[]);
        put(0x3c, &[0, 1], &[0xff]);
        // MSI: one message, 64-bit address.
        put(0x40, &[5, 0, 0x80, 0], &[0, 0, 1, 0, 0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
    }

    fn place(&mut self, region: RegionIndex, offset: u64, len: usize) -> Option<&mut [u8]> {
        assert!(len.is_power_of_two() && len <= 8, "an access of {len} bytes");
        assert!(offset.is_multiple_of(u64::try_from(len).unwrap_or(1)), "{len} bytes at {offset:#x}");
        let memory: &mut [u8] = match (region, &mut self.bars) {
            (RegionIndex::Bar0, [bar, _]) | (RegionIndex::Bar1, [_, bar]) => bar,
            (RegionIndex::Config, _) => &mut self.config,
            _ => panic!("region {region:?} has no bytes"),
        };
        let start = usize::try_from(offset).ok()?;
        Some(memory.get_mut(start..start.checked_add(len)?).expect("inside the region"))
    }

    /// Returns the pages lent for an offset, and the offset within these pages.
    fn lent(&self, region: RegionIndex, offset: u64) -> Option<(VolatileSlice<'_>, usize)> {
        let at = offset.checked_sub(AREA.offset).filter(|at| *at < AREA.size)?;
        let pages = self.lent.get(usize::from(region as u8))?.as_ref()?;
        Some((VolatileMemory::as_volatile_slice(&**pages), usize::try_from(at).ok()?))
    }

    fn act(&mut self, offset: u64, value: u64) {
        match offset {
            register::MESSAGE => drop(self.link.interrupts().trigger_msi(0)),
            register::PIN => self.link.interrupts().set_intx_level(value != 0),
            register::FETCH => {
                let mut bytes = [0xff; 8];
                if self.link.memory().read(value, &mut bytes).is_err() {
                    bytes = [0xff; 8];
                }
                if let Some(place) = self.place(RegionIndex::Bar0, register::DATA, 8) {
                    place.copy_from_slice(&bytes);
                }
            }
            _ => {}
        }
    }
}

impl Device for Model {
    fn regions(&self) -> [RegionInfo; NUM_REGIONS] {
        RegionIndex::ALL.map(|region| match region {
            RegionIndex::Bar0 | RegionIndex::Bar1 => {
                let size = if region == RegionIndex::Bar0 { BAR0 } else { BAR1 };
                let mappable = RegionInfo::read_write(size).with_mappable(Arc::clone(&self.file), vec![AREA]);
                mappable.expect("a file of the region's size")
            }
            RegionIndex::Config => RegionInfo::read_write(256),
            _ => RegionInfo::default(),
        })
    }

    fn connected(&mut self) {
        let mut seen = self.seen.lock();
        assert!(seen.mapped.is_empty(), "memory was mapped before its domain connected");
        seen.came = seen.came.saturating_add(1);
    }

    fn region_read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        match self.lent(region, offset) {
            Some((pages, at)) => pages.read_slice(data, at).expect("inside of the area"),
            None => data.copy_from_slice(self.place(region, offset, data.len()).ok_or(AccessError::Invalid)?),
        }
        if region != RegionIndex::Config {
            self.seen.lock().accesses.push((region, offset, data.len(), false));
        }
        Ok(())
    }

    fn region_write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<Ack, AccessError> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let masks = if region == RegionIndex::Config { self.writable.get(start..).unwrap_or_default() } else { &[] };
        let masks: Vec<u8> = masks.iter().copied().chain(std::iter::repeat(0xff)).take(data.len()).collect();
        if let Some((pages, at)) = self.lent(region, offset) {
            pages.write_slice(data, at).expect("inside of the area");
            self.seen.lock().accesses.push((region, offset, data.len(), true));
            return Ok(Ack::Done);
        }
        let place = self.place(region, offset, data.len()).ok_or(AccessError::Invalid)?;
        for ((to, from), mask) in place.iter_mut().zip(data).zip(masks) {
            *to = *to & !mask | from & mask;
        }
        if region != RegionIndex::Config {
            self.seen.lock().accesses.push((region, offset, data.len(), true));
        }
        if region == RegionIndex::Bar0 {
            let mut value = [0; 8];
            value.iter_mut().zip(data).for_each(|(to, from)| *to = *from);
            self.act(offset, u64::from_le_bytes(value));
        }
        Ok(Ack::Done)
    }

    fn dma_map(&mut self, region: &DmaRegion) -> Result<(), MapError> {
        assert!(region.mapping.is_some() && region.readable && region.writable, "{region:?}");
        let before = self.seen.lock().mapped.insert(region.gpa, region.size);
        assert_eq!(before, None, "{:#x} is mapped twice", region.gpa);
        Ok(())
    }

    fn dma_unmap(&mut self, gpa: u64, size: u64) {
        assert!(self.link.memory().snapshot().find(gpa).is_none(), "{gpa:#x} is still in the table");
        assert_eq!(self.seen.lock().mapped.remove(&gpa), Some(size), "{gpa:#x} of {size:#x}");
    }

    fn reset(&mut self) {
        self.clear();
    }

    fn lend_area(&mut self, region: RegionIndex, area: MmapArea, pages: &Arc<Mapping>) -> Result<(), MapError> {
        assert_eq!(area, AREA);
        assert_eq!(u64::try_from(pages.len()), Ok(area.size));
        if self.seen.lock().refuses {
            return Err(MapError("the model rejects pages".to_owned()));
        }
        let place = self.lent.get_mut(usize::from(region as u8)).expect("a BAR that can be mapped");
        assert!(place.replace(Arc::clone(pages)).is_none(), "pages for {region:?} are lent twice");
        Ok(())
    }

    fn disconnected(&mut self) {
        self.clear();
        self.lent = [None, None];
        let mut seen = self.seen.lock();
        assert!(seen.mapped.is_empty(), "memory outlives its domain");
        seen.went = seen.went.saturating_add(1);
    }
}
