//! The device, as it is served.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use thiserror::Error;

use crate::mappable::{Mappable, MappableError, MmapArea};
use crate::memory::{DmaRegion, Mapping};
use crate::migration::Migration;

/// Number of regions of a PCI function: six BARs, the expansion ROM, configuration space, legacy VGA.
pub const NUM_REGIONS: usize = 9;

/// A region of the device, checked to be one of the nine of a PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names say it")]
pub enum RegionIndex {
    Bar0 = 0,
    Bar1 = 1,
    Bar2 = 2,
    Bar3 = 3,
    Bar4 = 4,
    Bar5 = 5,
    /// The expansion ROM.
    Rom = 6,
    /// PCI configuration space.
    Config = 7,
    /// Legacy VGA ranges.
    Vga = 8,
}

impl RegionIndex {
    /// All regions in the order of their numbers.
    pub const ALL: [Self; NUM_REGIONS] =
        [Self::Bar0, Self::Bar1, Self::Bar2, Self::Bar3, Self::Bar4, Self::Bar5, Self::Rom, Self::Config, Self::Vga];

    /// The region with a wire number, `None` when there is none.
    pub fn from_wire(index: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(index).ok()?).copied()
    }
}

/// Properties of a region.
#[derive(Clone, Debug, Default)]
pub struct RegionInfo {
    size: u64,
    readable: bool,
    writable: bool,
    mappable: Option<Mappable>,
}

impl RegionInfo {
    /// A trapped region of `size` bytes that can be read and written.
    pub const fn read_write(size: u64) -> Self {
        Self { size, readable: true, writable: true, mappable: None }
    }

    /// A trapped region of `size` bytes that can only be read.
    pub const fn read_only(size: u64) -> Self {
        Self { size, readable: true, writable: false, mappable: None }
    }

    /// The same region, of which clients may map `areas`; `file` backs them. The rest stays trapped.
    ///
    /// [`crate::mappable`] says what the file must be and what the device must know.
    pub fn with_mappable(self, file: Arc<OwnedFd>, areas: Vec<MmapArea>) -> Result<Self, MappableError> {
        let mappable = Some(Mappable::new(file, areas, self.size, self.writable)?);
        Ok(Self { mappable, ..self })
    }

    /// Bytes; 0 means that there is no such region.
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Returns whether clients may read.
    pub const fn readable(&self) -> bool {
        self.readable
    }

    /// Returns whether clients may write.
    pub const fn writable(&self) -> bool {
        self.writable
    }

    /// Returns what clients may map.
    pub const fn mappable(&self) -> Option<&Mappable> {
        self.mappable.as_ref()
    }
}

/// Why a device refuses an access. The client sees an `errno`; what hardware would answer to an odd access (all ones,
/// a dropped write) is not an error and is the device's to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AccessError {
    /// Not allowed (`EACCES`).
    #[error("access denied")]
    Denied,
    /// Wrong size or offset (`EINVAL`).
    #[error("access of a size or at an offset that the device does not take")]
    Invalid,
    /// The device failed (`EIO`).
    #[error("the device failed")]
    Failed,
}

/// Why a device refuses a memory region; the client's `DMA_MAP` fails with `EINVAL`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct MapError(pub String);

/// A virtual PCI function.
///
/// Every call comes from the thread that runs the server, one at a time, and should return soon: while it runs, a virtual
/// CPU may wait. A handler must not wait for [`crate::dma::DmaClient`]; the client cannot answer before it has its reply.
pub trait Device: Send {
    /// The regions, asked once per client before its first access; the order is that of [`RegionIndex`].
    ///
    /// A client keeps what it has mapped for as long as it likes: a mappable region needs another file for the next one.
    fn regions(&self) -> [RegionInfo; NUM_REGIONS];

    /// A client has negotiated; accesses may follow.
    fn connected(&mut self) {}

    /// Reads `data.len()` bytes at `offset` of `region`.
    ///
    /// The length is 1, 2, 4 or 8, `offset` is a multiple of it, and the bytes lie inside of a readable region: the
    /// server cuts other accesses into such pieces, lowest address first. They may lie in an area that clients can map.
    fn region_read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), AccessError>;

    /// Writes `data` at `offset` of `region`, in pieces as for [`Device::region_read`].
    fn region_write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<(), AccessError>;

    /// Writes as [`Device::region_write`] does, for a client that waits for the answer, and may leave work behind it to
    /// [`Device::settle`]: such that no later access can tell, as of a write that a PCI bus posts. Returns whether it has.
    ///
    /// # Errors
    /// As [`Device::region_write`]; then nothing is left.
    fn region_write_first(&mut self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<bool, AccessError> {
        self.region_write(region, offset, data).map(|()| false)
    }

    /// Does what [`Device::region_write_first`] has left. Called behind its answer, before anything else of the client's.
    fn settle(&mut self) {}

    /// The client lends memory, already in [`crate::GuestMemory`]; an error takes it out again.
    fn dma_map(&mut self, region: &DmaRegion) -> Result<(), MapError>;

    /// The client takes back the region of `size` bytes at guest physical address `gpa`, exactly as it was mapped. It is
    /// no longer in [`crate::GuestMemory`].
    ///
    /// When this returns, the device no longer reads or writes there.
    fn dma_unmap(&mut self, gpa: u64, size: u64);

    /// Resets the device, as a function level reset does. Pending interrupts are gone already.
    fn reset(&mut self);

    /// The client is gone: its memory has been unmapped (by [`Device::dma_unmap`] calls), its interrupts are detached. The
    /// next client must find a clean device.
    fn disconnected(&mut self);

    /// The client, which cannot map files, has memory of its own under an area that clients can map, and the device has it as `pages`: it is
    /// to have there what it would have in the file. Comes at most once for each area of a client, before or while accesses by messages go
    /// there, which show the same memory. The device keeps it until [`Device::disconnected`].
    ///
    /// # Errors
    /// When the device does not take it; then what the file has stays valid, and is accessed by messages.
    fn lend_area(&mut self, region: RegionIndex, area: MmapArea, pages: &Arc<Mapping>) -> Result<(), MapError> {
        let _ = pages;
        Err(MapError(format!("nothing of region {region:?} at {:#x} is lent", area.offset)))
    }

    /// The client of a process that was killed may have `file` mapped, which backed the areas of a region there, where this device has a file of
    /// its own: it is to have that one in its place, of zeros, as after a reset. Comes before [`Device::connected`].
    ///
    /// # Errors
    /// When the region has no such areas, or the file cannot be theirs.
    fn take_file(&mut self, region: RegionIndex, file: Arc<OwnedFd>) -> Result<(), MapError> {
        drop(file);
        Err(MapError(format!("nothing of region {region:?} can be mapped")))
    }

    /// Returns whether a new device of this kind, whose configuration space is made as this one's is now, is this one after a reset: so
    /// that a client can go on with it when this process was killed.
    fn is_renewable(&self) -> bool {
        false
    }

    /// Returns the device as one whose state can be taken elsewhere, if it can.
    fn migration(&mut self) -> Option<&mut dyn Migration> {
        None
    }

    /// The memory at guest physical address `gpa` is private to the client (`share=off`): the device would read zeros.
    /// Called once per file of memory; the server has logged it.
    fn memory_not_shared(&mut self, gpa: u64) {
        let _ = gpa;
    }
}
