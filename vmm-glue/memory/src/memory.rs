//! Client memory: a table that maps guest physical addresses to mappings.
//!
//! Other threads use a [`MemoryTable`], a snapshot of the regions. After a client has removed a region, the snapshot is
//! still safe to access, but the memory no longer belongs to the guest. A device must therefore end its accesses in
//! `Device::dma_unmap`, and take a new snapshot afterwards. Data is copied only through volatile slices, because the
//! guest may change it at any time: copy the data first, then validate and use the copy.

mod mapping;
mod saved;
mod sigbus;
mod touched;
mod views;
mod written;

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::RwLock;
use thiserror::Error;
use vm_memory::VolatileMemory;

pub use mapping::ClientFile;
pub use mapping::{LentPages, MapFileError, Mapping, Sharing};
pub use saved::SavedRegion;
pub use sigbus::withdrawals;
pub use touched::FirstTouches;
pub use written::{LOG_BLOCK, WriteLog};

use crate::wake::Wake;

/// Granularity of region addresses, sizes and file offsets, in bytes.
pub const PAGE_SIZE: u64 = 4096;

/// Limits on a client's memory.
#[derive(Clone, Copy, Debug)]
pub struct MemoryLimits {
    /// Maximum number of regions at a time.
    pub regions: usize,
    /// Maximum number of distinct files that back regions at a time. Each file keeps one of this process's descriptors
    /// open, and all devices and the operator share the process's limit.
    pub files: usize,
    /// Maximum number of mapped bytes at a time. All devices share the process's address space.
    pub mapped_bytes: u64,
    /// True if files on any file system are accepted. Otherwise, only memory files (memfd, `/dev/shm`, hugetlbfs) are,
    /// because accesses to a file on a network or FUSE file system can block threads indefinitely.
    pub any_file_system: bool,
}

impl Default for MemoryLimits {
    fn default() -> Self {
        Self { regions: 4096, files: 512, mapped_bytes: 1 << 40, any_file_system: false }
    }
}

/// A region of client memory.
#[derive(Clone, Debug)]
pub struct DmaRegion {
    /// First guest physical address.
    pub gpa: u64,
    /// Size in bytes: a nonzero multiple of [`PAGE_SIZE`]. `gpa + size` does not overflow.
    pub size: u64,
    /// True if the device may read the region.
    pub readable: bool,
    /// True if the device may write the region.
    pub writable: bool,
    /// The mapping into this process, if any. Unmapped memory is accessible only through `vmm_glue::dma::DmaClient`.
    pub mapping: Option<Arc<Mapping>>,
}

impl DmaRegion {
    /// Creates a region of `size` bytes at `gpa`.
    #[must_use]
    pub fn new(gpa: u64, size: u64, readable: bool, writable: bool, mapping: Option<Arc<Mapping>>) -> Self {
        Self { gpa, size, readable, writable, mapping }
    }

    /// Returns the first guest physical address after the region.
    pub fn end(&self) -> u64 {
        self.gpa.saturating_add(self.size)
    }

    /// Returns the number of bytes mapped into this process.
    fn mapped_bytes(&self) -> u64 {
        if self.mapping.is_some() { self.size } else { 0 }
    }

    /// Returns true if the memory is known to be private to the client (`share=off`). The mapping then contains only
    /// zeros.
    pub fn is_not_shared(&self) -> bool {
        self.mapping.as_ref().is_some_and(|mapping| mapping.sharing() == Sharing::Private)
    }

    /// Returns true if the client has withdrawn the mapped memory.
    pub fn is_withdrawn(&self) -> bool {
        self.mapping.as_ref().is_some_and(|mapping| mapping.is_withdrawn())
    }
}

/// Reasons for a failed access to guest memory. Addresses are guest physical.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "the messages document the variants")]
pub enum MemoryError {
    #[error("no memory at guest physical address {gpa:#x}")]
    NotMapped { gpa: u64 },
    #[error("memory at guest physical address {gpa:#x} is not readable")]
    NotReadable { gpa: u64 },
    #[error("memory at guest physical address {gpa:#x} is not writable")]
    NotWritable { gpa: u64 },
    #[error("memory at guest physical address {gpa:#x} has no file; access it through DMA messages")]
    NoFile { gpa: u64 },
    #[error("memory at guest physical address {gpa:#x} is private to the VMM; start the VMM with share=on")]
    NotShared { gpa: u64 },
    #[error("memory at guest physical address {gpa:#x} was withdrawn by the VMM")]
    Withdrawn { gpa: u64 },
    #[error(
        "memory at guest physical address {gpa:#x} was never touched by the VM, and the limit on memory that the \
         daemon may touch first is reached"
    )]
    Untouched { gpa: u64 },
}

/// Reasons why a region cannot be added.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages document the variants")]
pub enum AddError {
    #[error(
        "address {gpa:#x}, size {size:#x} and file offset {offset:#x} must be multiples of 4096, and the size \
        must not be 0"
    )]
    Unaligned { gpa: u64, size: u64, offset: u64 },
    #[error("address {gpa:#x} and size {size:#x} exceed the address space")]
    Overflow { gpa: u64, size: u64 },
    #[error("overlaps the region at {gpa:#x} of {size:#x} bytes")]
    Overlap { gpa: u64, size: u64 },
    #[error("{0} regions are already mapped, which is the maximum")]
    TooMany(usize),
    #[error(
        "the region has a new file, but the other regions already use the maximum of {0} different files; lend \
         memory as parts of fewer files"
    )]
    TooManyFiles(usize),
    #[error("{have:#x} bytes are already mapped; the maximum is {limit:#x}")]
    TooMuch { have: u64, limit: u64 },
    #[error("the file of the memory cannot be mapped")]
    File(#[from] MapFileError),
}

/// A snapshot of the regions, sorted by address and without overlaps.
#[derive(Clone, Debug, Default)]
pub struct MemoryTable {
    regions: Vec<DmaRegion>,
    /// Total size of the mapped regions in bytes, which is cached because each table change needs it.
    mapped_bytes: u64,
    /// Log of this process's writes, shared by all of a client's tables.
    writes: Arc<WriteLog>,
}

impl MemoryTable {
    /// Returns the regions in ascending address order.
    pub fn regions(&self) -> &[DmaRegion] {
        &self.regions
    }

    /// Returns the region that contains a guest physical address.
    pub fn find(&self, gpa: u64) -> Option<&DmaRegion> {
        let behind = self.regions.partition_point(|region| region.gpa <= gpa);
        self.regions.get(behind.checked_sub(1)?).filter(|region| gpa < region.end())
    }

    /// Copies guest memory at guest physical address `gpa` to `data`. The range may span adjacent regions.
    pub fn read(&self, gpa: u64, data: &mut [u8]) -> Result<(), MemoryError> {
        let mut at = gpa;
        let mut rest = data;
        while !rest.is_empty() {
            let (region, slice) = self.piece(at, rest.len())?;
            if !region.readable {
                return Err(MemoryError::NotReadable { gpa: at });
            }
            let (head, tail) = rest.split_at_mut(slice.len());
            slice.copy_to(head);
            at = at.saturating_add(len64(head.len()));
            rest = tail;
        }
        Ok(())
    }

    /// Copies `data` to guest memory at guest physical address `gpa`. The range may span adjacent regions.
    ///
    /// On error, part of the data may already have been written.
    pub fn write(&self, gpa: u64, data: &[u8]) -> Result<(), MemoryError> {
        let mut at = gpa;
        let mut rest = data;
        while !rest.is_empty() {
            let (region, slice) = self.piece(at, rest.len())?;
            if !region.writable {
                return Err(MemoryError::NotWritable { gpa: at });
            }
            let (head, tail) = rest.split_at(slice.len());
            slice.copy_from(head);
            self.writes.note(at, head.len());
            at = at.saturating_add(len64(head.len()));
            rest = tail;
        }
        Ok(())
    }

    /// Returns a slice of 1 to `len` bytes of the memory at guest physical address `gpa`, and its region.
    ///
    /// Writing to the slice faults if the region is not writable, so check [`DmaRegion::writable`].
    pub fn piece(&self, gpa: u64, len: usize) -> Result<(&DmaRegion, vm_memory::VolatileSlice<'_>), MemoryError> {
        let region = self.find(gpa).ok_or(MemoryError::NotMapped { gpa })?;
        let mapping = region.mapping.as_ref().ok_or(MemoryError::NoFile { gpa })?;
        if region.is_not_shared() {
            return Err(MemoryError::NotShared { gpa });
        }
        if mapping.is_withdrawn() {
            return Err(MemoryError::Withdrawn { gpa });
        }
        let none = MemoryError::NotMapped { gpa };
        let offset = usize::try_from(gpa.saturating_sub(region.gpa)).map_err(|_| none)?;
        let len = mapping.len().saturating_sub(offset).min(len);
        if !mapping.may_touch(offset, len) {
            return Err(MemoryError::Untouched { gpa });
        }
        let slice = mapping.get_slice(offset, len).map_err(|_| none)?;
        Ok((region, slice))
    }
}

/// A client's memory. The server modifies the table, and any thread can read it.
#[derive(Debug, Default)]
pub struct GuestMemory {
    table: RwLock<Arc<MemoryTable>>,
    touches: Arc<FirstTouches>,
}

impl GuestMemory {
    /// Returns the current regions.
    pub fn snapshot(&self) -> Arc<MemoryTable> {
        Arc::clone(&self.table.read())
    }

    /// Returns the counter of pages that this process was the first to touch, which also contains the limit.
    pub fn first_touches(&self) -> &FirstTouches {
        &self.touches
    }

    /// Returns the log of this process's writes.
    pub fn writes(&self) -> Arc<WriteLog> {
        Arc::clone(&self.table.read().writes)
    }

    /// Copies data from the current guest memory. See [`MemoryTable::read`].
    pub fn read(&self, gpa: u64, data: &mut [u8]) -> Result<(), MemoryError> {
        self.snapshot().read(gpa, data)
    }

    /// Copies data to the current guest memory. See [`MemoryTable::write`].
    pub fn write(&self, gpa: u64, data: &[u8]) -> Result<(), MemoryError> {
        self.snapshot().write(gpa, data)
    }

    /// Validates, maps and adds a region. `request` is untrusted.
    pub fn add(&self, request: AddRegion, limits: &MemoryLimits, wake: &Arc<Wake>) -> Result<DmaRegion, AddError> {
        let AddRegion { gpa, size, offset, readable, writable, fd } = request;
        let map = |table: &MemoryTable| {
            let Some(fd) = fd else { return Ok(None) };
            table.room_for(size, limits)?;
            let known = table.regions.iter().filter_map(|region| region.mapping.as_deref());
            let touches = Arc::clone(&self.touches);
            let file = ClientFile { fd, offset, size, writable, touches };
            let mapping = Mapping::new(file, limits.any_file_system, known.clone(), wake)?;
            if !known.clone().any(|other| other.file() == mapping.file()) {
                let files: BTreeSet<_> = known.filter_map(Mapping::file).collect();
                if files.len() >= limits.files {
                    return Err(AddError::TooManyFiles(files.len()));
                }
            }
            Ok(Some(Arc::new(mapping)))
        };
        self.place(RegionBounds { gpa, size, offset, readable, writable }, limits, map)
    }

    /// Adds a withdrawn region, whose file can no longer be mapped.
    pub fn add_withdrawn(
        &self,
        request: AddRegion,
        limits: &MemoryLimits,
        wake: &Arc<Wake>,
    ) -> Result<DmaRegion, AddError> {
        let AddRegion { gpa, size, offset, readable, writable, fd } = request;
        let map = |table: &MemoryTable| {
            let Some(fd) = fd else { return Ok(None) };
            table.room_for(size, limits)?;
            let file = ClientFile { fd, offset, size, writable, touches: Arc::clone(&self.touches) };
            Ok(Some(Arc::new(Mapping::withdrawn(file, wake)?)))
        };
        self.place(RegionBounds { gpa, size, offset, readable, writable }, limits, map)
    }

    /// Adds a region at `gpa` for the whole `mapping`, which the device may read and write.
    pub fn add_mapping(&self, gpa: u64, mapping: Arc<Mapping>, limits: &MemoryLimits) -> Result<DmaRegion, AddError> {
        let size = len64(mapping.len());
        let bounds = RegionBounds { gpa, size, offset: 0, readable: true, writable: true };
        self.place(bounds, limits, |table| {
            table.room_for(size, limits)?;
            Ok(Some(mapping))
        })
    }

    /// Validates a region, maps it with the given function, and adds it.
    fn place(
        &self,
        bounds: RegionBounds,
        limits: &MemoryLimits,
        map: impl FnOnce(&MemoryTable) -> Result<Option<Arc<Mapping>>, AddError>,
    ) -> Result<DmaRegion, AddError> {
        let RegionBounds { gpa, size, offset, readable, writable } = bounds;
        if size == 0 || [gpa, size, offset].iter().any(|value| value % PAGE_SIZE != 0) {
            return Err(AddError::Unaligned { gpa, size, offset });
        }
        let end = gpa.checked_add(size).ok_or(AddError::Overflow { gpa, size })?;
        let mut table = self.table.write();
        let place = table.regions.partition_point(|region| region.gpa < gpa);
        let before = place.checked_sub(1).and_then(|before| table.regions.get(before)).filter(|it| it.end() > gpa);
        if let Some(other) = before.or(table.regions.get(place).filter(|it| it.gpa < end)) {
            return Err(AddError::Overlap { gpa: other.gpa, size: other.size });
        }
        if table.regions.len() >= limits.regions {
            return Err(AddError::TooMany(table.regions.len()));
        }
        let mapping = map(&table)?;
        let region = DmaRegion::new(gpa, size, readable, writable, mapping);
        Arc::make_mut(&mut table).insert(place, region.clone());
        Ok(region)
    }

    /// Removes the region that starts at `gpa`.
    pub fn remove(&self, gpa: u64) -> Option<DmaRegion> {
        let mut table = self.table.write();
        let place = table.regions.binary_search_by_key(&gpa, |region| region.gpa).ok()?;
        Some(Arc::make_mut(&mut table).remove(place))
    }
}

impl MemoryTable {
    /// Returns the number of mapped bytes of all regions.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes
    }

    /// Returns the regions that start in `gpa..=last`.
    pub fn starting_in(&self, gpa: u64, last: u64) -> &[DmaRegion] {
        let from = self.regions.partition_point(|region| region.gpa < gpa);
        let behind = self.regions.partition_point(|region| region.gpa <= last);
        self.regions.get(from..behind).unwrap_or_default()
    }

    fn insert(&mut self, place: usize, region: DmaRegion) {
        self.mapped_bytes = self.mapped_bytes.saturating_add(region.mapped_bytes());
        self.regions.insert(place, region);
    }

    fn remove(&mut self, place: usize) -> DmaRegion {
        let region = self.regions.remove(place);
        self.mapped_bytes = self.mapped_bytes.saturating_sub(region.mapped_bytes());
        region
    }

    /// Checks that `size` more bytes may be mapped.
    fn room_for(&self, size: u64, limits: &MemoryLimits) -> Result<(), AddError> {
        let have = self.mapped_bytes();
        match have.checked_add(size) {
            Some(sum) if sum <= limits.mapped_bytes => Ok(()),
            _ => Err(AddError::TooMuch { have, limit: limits.mapped_bytes }),
        }
    }
}

/// Unvalidated address range and permissions of a region to be added.
#[derive(Clone, Copy)]
struct RegionBounds {
    gpa: u64,
    size: u64,
    offset: u64,
    readable: bool,
    writable: bool,
}

/// An unvalidated region offered by a client.
#[derive(Debug)]
pub struct AddRegion {
    /// First guest physical address.
    pub gpa: u64,
    /// Size in bytes.
    pub size: u64,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// True if the device may read the memory.
    pub readable: bool,
    /// True if the device may write the memory.
    pub writable: bool,
    /// The file, if the client passed one.
    pub fd: Option<OwnedFd>,
}

fn len64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
