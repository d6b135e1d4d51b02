//! Host memory that backs part of an aperture: either a file that the VMM, this process and the card map, or pages that
//! a Xen domain has lent.

use super::memory::shared_memory;
use card::{DmaMemory, HostMemory};
use card_manager::{ManagedCard, ManagerError};
use nvspec::addr::{Iova, SMALL_PAGE};
use rustix::fs::{SealFlags, SeekFrom, fcntl_get_seals, fstat, seek};
use rustix::io::Errno;
use saved_state::Invalid;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vm_memory::{Bytes, FileOffset, MmapRegion};
use vmm_glue::mappable::region_memory;
use vmm_glue::{Mapping, MmapArea};

/// A block of zeros, written with a single call.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Memory that backs a range of an aperture. Offsets in the file equal offsets in the aperture.
#[derive(Debug)]
pub struct WindowMemory {
    file: Arc<OwnedFd>,
    region: Arc<dyn HostMemory>,
    /// True if a file provides the memory, false if a client has lent the pages.
    is_files: bool,
    area: MmapArea,
    iova: Iova,
}

impl WindowMemory {
    /// Creates zeroed memory for bytes `start` to `end` of an aperture. The card can read and write this memory. `name`
    /// is the file's name in `/proc`.
    ///
    /// # Errors
    /// Returns an error if the host is out of memory, or if no I/O addresses are free.
    pub fn new(host: &ManagedCard, name: &str, start: u64, end: u64) -> Result<Self, ManagerError> {
        let file = region_memory(name, end)
            .map_err(|error| ManagerError::host("cannot create a memory file for an aperture", error))?;
        Self::mapped(Arc::new(file), start, end)?.placed(host)
    }

    /// Maps the same memory for another card, or again for the same card. Existing mappings remain valid.
    ///
    /// # Errors
    /// Returns an error if the card rejects the memory, or if no I/O addresses are free.
    pub fn on(&self, host: &ManagedCard) -> Result<Self, ManagerError> {
        let Self { file, region, is_files, area, iova } = self;
        let (file, region) = (Arc::clone(file), Arc::clone(region));
        Self { file, region, is_files: *is_files, area: *area, iova: *iova }.placed(host)
    }

    /// Maps the memory for a card at free I/O addresses.
    fn placed(self, host: &ManagedCard) -> Result<Self, ManagerError> {
        let size = self.area.size;
        let iova =
            host.lock().memory_mut().iova_mut().allocate(size, 0).ok_or(ManagerError::OutOfIova { len: size })?;
        let window = Self { iova, ..self };
        if let Err(error) = window.lend(host) {
            host.lock().memory_mut().iova_mut().free(iova);
            return Err(error);
        }
        Ok(window)
    }

    /// Maps the memory in `file` for bytes `start` to `end` of an aperture at its previous I/O address `iova`, which
    /// the caller must have reserved.
    ///
    /// # Errors
    /// Returns an error if the file does not contain the range, or if the card rejects the memory.
    pub fn of_file(host: &ManagedCard, file: OwnedFd, start: u64, end: u64, iova: Iova) -> Result<Self, ManagerError> {
        let window = Self { iova, ..Self::checked(Arc::new(file), start, end)? };
        window.lend(host)?;
        Ok(window)
    }

    /// Maps the memory in `file` for the same part of the aperture at free I/O addresses, and zeroes it.
    ///
    /// # Errors
    /// Returns an error if the file does not contain the range, or if the card rejects the memory.
    pub fn taken(&self, host: &ManagedCard, file: Arc<OwnedFd>) -> Result<Self, ManagerError> {
        let MmapArea { offset, size } = self.area;
        let window = Self::checked(file, offset, offset + size)?.placed(host)?;
        if let Err(error) = window.blank(host) {
            window.close(host, false);
            return Err(error);
        }
        Ok(window)
    }

    /// Validates a memory file from another process. The memory is not mapped for a card yet.
    fn checked(file: Arc<OwnedFd>, start: u64, end: u64) -> Result<Self, ManagerError> {
        let look = |error| ManagerError::host("cannot query an aperture's memory file", error);
        let (seals, stat) = (fcntl_get_seals(&file).map_err(look)?, fstat(&file).map_err(look)?);
        let sound = seals.contains(SealFlags::SHRINK | SealFlags::GROW) && u64::try_from(stat.st_size) == Ok(end);
        Invalid::unless(sound, || {
            format!(
                "an aperture of {end:#x} bytes was handed over in a file of {:#x} bytes, or in a file that can shrink",
                stat.st_size
            )
        })?;
        Self::mapped(file, start, end)
    }

    /// Wraps a memory file. The memory is not mapped for a card yet.
    fn mapped(file: Arc<OwnedFd>, start: u64, end: u64) -> Result<Self, ManagerError> {
        let own = file.try_clone().map_err(|error| {
            ManagerError::host("cannot duplicate the file descriptor of an aperture's memory", error)
        })?;
        let refused = |error| ManagerError::host("cannot map an aperture's memory", error);
        let size = usize::try_from(end - start).map_err(|error| refused(io::Error::other(error)))?;
        let region = MmapRegion::from_file(FileOffset::new(File::from(own), start), size)
            .map_err(|error| refused(io::Error::other(error)))?;
        let area = MmapArea { offset: start, size: end - start };
        Ok(Self { file, region: Arc::new(region), is_files: true, area, iova: Iova(0) })
    }

    /// Returns the I/O address of the first byte.
    pub fn first(&self) -> Iova {
        self.iova
    }

    /// Returns the file, and the part of the aperture that it backs.
    pub fn area(&self) -> (Arc<OwnedFd>, MmapArea) {
        (Arc::clone(&self.file), self.area)
    }

    /// Returns the I/O address of page `page` of the aperture.
    pub fn iova(&self, page: u32) -> Iova {
        self.iova.offset(self.at(page, 0) as u64)
    }

    /// Returns the memory that contains a page, and the page's offset in it.
    pub fn region(&self, page: u32) -> (Arc<dyn HostMemory>, usize) {
        (Arc::clone(&self.region), self.at(page, 0))
    }

    /// Reads memory at byte `offset` of a page. The range must be within the page.
    pub fn read(&self, page: u32, offset: u64, data: &mut [u8]) {
        if let Err(error) = self.region.as_volatile_slice().read_slice(data, self.at(page, offset)) {
            tracing::error!(%error, page, "cannot read an aperture's memory");
            data.fill(0);
        }
    }

    /// Writes memory at byte `offset` of a page. The range must be within the page.
    pub fn write(&self, page: u32, offset: u64, data: &[u8]) {
        if let Err(error) = self.region.as_volatile_slice().write_slice(data, self.at(page, offset)) {
            tracing::error!(%error, page, "cannot write an aperture's memory");
        }
    }

    /// Replaces the file with pages lent by the client, both for this process and for the card. The memory must be
    /// unused and inaccessible to the card. Zeroes the new pages.
    ///
    /// # Errors
    /// Returns an error if the number of pages differs, if the previous memory cannot be unmapped, or if the card
    /// rejects the pages. In these cases, the memory is unchanged.
    pub fn replace(&mut self, host: &ManagedCard, pages: &Arc<Mapping>) -> Result<(), ManagerError> {
        if u64::try_from(pages.len()) != Ok(self.area.size) {
            let error = io::Error::other(format!("{:#x} bytes instead of {:#x}", pages.len(), self.area.size));
            return Err(ManagerError::host("the size of an aperture's new memory is wrong", error));
        }
        if !self.take_back(host) {
            return Err(ManagerError::host("cannot replace an aperture's memory", io::ErrorKind::ResourceBusy));
        }
        let old =
            (std::mem::replace(&mut self.region, shared_memory(pages)), std::mem::replace(&mut self.is_files, false));
        self.zero(0, self.area.size);
        self.lend(host).inspect_err(|_| {
            (self.region, self.is_files) = old;
            if let Err(error) = self.lend(host) {
                tracing::error!(%error, "an aperture's memory is no longer mapped for the card");
            }
        })
    }

    /// Zeroes all memory, including memory that the client wrote outside the mapped parts. The card must not access the
    /// memory in the meantime.
    ///
    /// The memory is zeroed in place. Behind an IOMMU, remapping it instead would take a call per page, and QEMU waits
    /// only 5 s for a reset.
    ///
    /// # Errors
    /// Returns an error if the file's allocated ranges cannot be determined.
    pub fn blank(&self, host: &ManagedCard) -> Result<(), ManagerError> {
        barrier(host);
        if !self.is_files {
            self.zero(0, self.area.size);
            return Ok(());
        }
        // Skip holes in the file, which read as zeros, so that no pages are allocated for them.
        let end = self.area.offset + self.area.size;
        let mut at = self.area.offset;
        loop {
            let next = |from| match seek(&*self.file, from) {
                Ok(found) => Ok(found.min(end)),
                Err(Errno::NXIO) => Ok(end),
                Err(error) => Err(ManagerError::host("cannot zero an aperture's memory", error)),
            };
            let first: u64 = next(SeekFrom::Data(at))?;
            if first >= end {
                return Ok(());
            }
            at = next(SeekFrom::Hole(first))?;
            self.zero(first - self.area.offset, at - first);
        }
    }

    fn zero(&self, from: u64, len: u64) {
        let memory = self.region.as_volatile_slice();
        let mut at = from as usize;
        let end = at + len as usize;
        while at < end {
            let piece = &ZEROS[..ZEROS.len().min(end - at)];
            if let Err(error) = memory.write_slice(piece, at) {
                tracing::error!(%error, at, "cannot zero an aperture's memory");
                return;
            }
            at += piece.len();
        }
    }

    /// Unmaps the memory from the card. If `reachable` is true, its I/O addresses are never reused, because the card's
    /// TLBs may still contain translations to them.
    pub fn close(self, host: &ManagedCard, reachable: bool) {
        if self.take_back(host) && !reachable {
            host.lock().memory_mut().iova_mut().free(self.iova);
        }
    }

    fn lend(&self, host: &ManagedCard) -> Result<(), ManagerError> {
        let region = Arc::clone(&self.region);
        let memory = DmaMemory::new(region, 0, self.area.size as usize, true)?;
        Ok(host.card().map_dma(self.iova.0, memory)?)
    }

    fn take_back(&self, host: &ManagedCard) -> bool {
        barrier(host);
        let unmapped = host.card().unmap_dma(self.iova.0, self.area.size);
        unmapped.inspect_err(|error| tracing::error!(%error, "cannot unmap an aperture's memory from the card")).is_ok()
    }

    fn at(&self, page: u32, offset: u64) -> usize {
        (u64::from(page) * SMALL_PAGE + offset - self.area.offset) as usize
    }
}

/// Waits until all of the card's writes have arrived.
fn barrier(host: &ManagedCard) {
    if let Err(error) = host.lock().vram().memory.barrier() {
        tracing::error!(%error, "the card's last writes to an aperture's memory may be lost");
    }
}
