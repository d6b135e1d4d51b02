//! The device interface of the server.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use thiserror::Error;

use crate::mappable::{Mappable, MappableError, MmapArea};
use crate::migration::Migration;
use vmm_memory::memory::{DmaRegion, Mapping};

/// Number of regions of a PCI function: six BARs, the expansion ROM, configuration space, and legacy VGA.
pub const NUM_REGIONS: usize = 9;

/// A device region, guaranteed to be one of the nine regions of a PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names are self-explanatory")]
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
    /// All regions in numerical order.
    pub const ALL: [Self; NUM_REGIONS] =
        [Self::Bar0, Self::Bar1, Self::Bar2, Self::Bar3, Self::Bar4, Self::Bar5, Self::Rom, Self::Config, Self::Vga];

    /// Returns the region with a wire number, or `None` if it does not exist.
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
    /// Creates a trapped read-write region of `size` bytes.
    pub const fn read_write(size: u64) -> Self {
        Self { size, readable: true, writable: true, mappable: None }
    }

    /// Creates a trapped read-only region of `size` bytes.
    pub const fn read_only(size: u64) -> Self {
        Self { size, readable: true, writable: false, mappable: None }
    }

    /// Lets clients map `areas` of the region, backed by `file`. The rest of the region remains trapped.
    ///
    /// [`crate::mappable`] lists the requirements for the file and the device.
    pub fn with_mappable(self, file: Arc<OwnedFd>, areas: Vec<MmapArea>) -> Result<Self, MappableError> {
        let mappable = Some(Mappable::new(file, areas, self.size, self.writable)?);
        Ok(Self { mappable, ..self })
    }

    /// Returns the size in bytes, or 0 if the region does not exist.
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Returns true if clients may read the region.
    pub const fn readable(&self) -> bool {
        self.readable
    }

    /// Returns true if clients may write the region.
    pub const fn writable(&self) -> bool {
        self.writable
    }

    /// Returns the areas that clients may map.
    pub const fn mappable(&self) -> Option<&Mappable> {
        self.mappable.as_ref()
    }
}

/// Reason for rejecting an access, which the client receives as an `errno`. If hardware would ignore an unsupported
/// access (reads return all ones, writes are dropped), the device does the same instead of returning an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AccessError {
    /// The access is not permitted (`EACCES`).
    #[error("access denied")]
    Denied,
    /// The access has an invalid size or offset (`EINVAL`).
    #[error("the device does not accept this size or offset")]
    Invalid,
    /// The device failed (`EIO`).
    #[error("the device failed")]
    Failed,
}

/// Reason for rejecting a memory region. The client's `DMA_MAP` fails with `EINVAL`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct MapError(pub String);

/// Result of a write.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a deferred write must be completed"]
pub enum Ack {
    /// The write is done.
    Done,
    /// The server can reply to the client now. [`Device::complete`] performs the rest of the write.
    Deferred(Deferred),
}

impl Ack {
    /// Completes the write now, because no client waits for its reply or because further writes follow.
    pub fn complete_now(self, device: &mut dyn Device) {
        match self {
            Self::Done => {}
            Self::Deferred(deferred) => device.complete(deferred),
        }
    }
}

/// The unfinished part of a write, to be passed to [`Device::complete`]. The device stores the data, because its other
/// threads may have to perform this part earlier. The type is not `Copy`, so that each deferred write is completed only
/// once.
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use = "pass it to `Device::complete`"]
pub struct Deferred(());

/// A virtual PCI function.
///
/// The server's thread makes all calls, one at a time. Calls should return quickly, because a virtual CPU may be
/// waiting. A handler must not wait for [`crate::dma::DmaClient`]: the client cannot reply before it has received the
/// reply to its own request.
///
/// After a write that returned [`Ack::Deferred`], the next call is [`Device::complete`].
pub trait Device: Send {
    /// Returns the regions in [`RegionIndex`] order. Called once per client, before its first access.
    ///
    /// A client may keep its mappings forever, so a mappable region needs a new file for each client.
    fn regions(&self) -> [RegionInfo; NUM_REGIONS];

    /// Called when a client has completed negotiation. Accesses may follow.
    fn connected(&mut self) {}

    /// Reads `data.len()` bytes at `offset` of `region`.
    ///
    /// The length is 1, 2, 4 or 8, `offset` is a multiple of the length, and all bytes are in a readable region. The
    /// server splits other accesses into such parts, in ascending address order. The bytes may be in a mappable area.
    fn region_read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), AccessError>;

    /// Writes `data` at `offset` of `region`. The server splits accesses as for [`Device::region_read`].
    ///
    /// The device may defer work that the client need not wait for. No later access by the client may observe the
    /// difference, even if the access does not arrive through this trait. Posted writes on a PCI bus provide the same
    /// guarantee.
    fn region_write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<Ack, AccessError>;

    /// Completes a deferred write. Called after the write's reply has been sent, or immediately if no reply precedes
    /// it.
    fn complete(&mut self, deferred: Deferred) {
        let Deferred(()) = deferred;
    }

    /// Called when the client has mapped memory. The region is already in [`crate::GuestMemory`], and is removed again
    /// if this method returns an error.
    fn dma_map(&mut self, region: &DmaRegion) -> Result<(), MapError>;

    /// Called when the client has unmapped the region of `size` bytes at guest physical address `gpa`, with the same
    /// bounds as in [`Device::dma_map`]. The region is no longer in [`crate::GuestMemory`].
    ///
    /// Once this call returns, the device no longer accesses the memory.
    fn dma_unmap(&mut self, gpa: u64, size: u64);

    /// Performs a function-level reset. Pending interrupts are dropped before the call.
    fn reset(&mut self);

    /// Called when the client has disconnected. Its memory has been unmapped with [`Device::dma_unmap`], and its
    /// interrupts are detached. The next client must find the device reset.
    fn disconnected(&mut self);

    /// Lends memory of a client that cannot map files. The client has its own `pages` at the addresses of a mappable
    /// area, and the device must store the area's data in these pages instead of in the file. Called at most once per
    /// area and client, before or between message accesses, which access the same memory. The device uses the pages
    /// until [`Device::disconnected`] is called.
    ///
    /// # Errors
    /// Returns an error if the device rejects the pages. The file's data then remains valid, and the client accesses it
    /// through messages.
    fn lend_area(&mut self, region: RegionIndex, area: MmapArea, pages: &Arc<Mapping>) -> Result<(), MapError> {
        let _ = pages;
        Err(MapError(format!("no part of region {region:?} at {:#x} can be lent", area.offset)))
    }

    /// Replaces the file that backs the areas of a region. The client of a killed process may have mapped `file`, so
    /// the device must use it instead of its own. The device zeroes the file, as on a reset, or keeps its data if the
    /// device has taken over a [journal](Self::take_journal). Called before [`Device::connected`].
    ///
    /// # Errors
    /// Returns an error if the region has no such areas, or if the file does not match them.
    fn take_file(&mut self, region: RegionIndex, file: Arc<OwnedFd>) -> Result<(), MapError> {
        drop(file);
        Err(MapError(format!("no part of region {region:?} can be mapped")))
    }

    /// Returns the device's journal: a file from which a device in the next process resumes if this process is killed.
    /// The file does not change while a client is connected.
    fn journal(&self) -> Option<Arc<OwnedFd>> {
        None
    }

    /// Takes over the [journal](Self::journal) of a killed process. Called before [`Device::take_file`], which then
    /// preserves the file's data.
    ///
    /// # Errors
    /// Returns an error if the device has no journal, or cannot resume from this one.
    fn take_journal(&mut self, file: Arc<OwnedFd>) -> Result<(), MapError> {
        drop(file);
        Err(MapError("the device has no journal".to_owned()))
    }

    /// Returns true if a client can use a new device in place of this device after this process has been killed. The
    /// new device has the same kind and configuration space, and must equal this device after a reset.
    fn is_renewable(&self) -> bool {
        false
    }

    /// Returns the device's migration interface, if it can be migrated.
    fn migration(&mut self) -> Option<&mut dyn Migration> {
        None
    }

    /// Called when the memory at guest physical address `gpa` is found to be private to the client (`share=off`), so
    /// that the device would read zeros. Called once per memory file, after the server has logged this.
    fn memory_not_shared(&mut self, gpa: u64) {
        let _ = gpa;
    }
}
