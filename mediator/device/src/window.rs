//! Host memory behind part of an aperture: either a file that is mapped by the VMM, by this process and for the card,
//! or pages that a Xen domain has mapped.

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

/// Block of zeros to write per call.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Memory behind an aperture, starting at byte `start`. Offsets in the file equal offsets in the aperture.
#[derive(Debug)]
pub struct WindowMemory {
    file: Arc<OwnedFd>,
    region: Arc<dyn HostMemory>,
    /// True if the memory belongs to the file; false if it consists of pages lent by a client.
    is_files: bool,
    area: MmapArea,
    iova: Iova,
}

impl WindowMemory {
    /// Creates zeroed memory for bytes `start` to `end` of an aperture, which the card can read and write. `name`
    /// appears in `/proc`.
    ///
    /// # Errors
    /// Returns an error if the host has too little memory, or if the card has no I/O addresses left.
    pub fn new(host: &ManagedCard, name: &str, start: u64, end: u64) -> Result<Self, ManagerError> {
        let file = region_memory(name, end)
            .map_err(|error| ManagerError::host("no memory file is available for an aperture", error))?;
        Self::mapped(Arc::new(file), start, end)?.placed(host)
    }

    /// Maps the same memory for another card, or a second time for the same card. Existing mappings stay valid.
    ///
    /// # Errors
    /// Returns an error if the card rejects the memory or has no I/O addresses left.
    pub fn on(&self, host: &ManagedCard) -> Result<Self, ManagerError> {
        let Self { file, region, is_files, area, iova } = self;
        let (file, region) = (Arc::clone(file), Arc::clone(region));
        Self { file, region, is_files: *is_files, area: *area, iova: *iova }.placed(host)
    }

    /// Maps the memory for a card at unused I/O addresses.
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

    /// Maps the memory in `file` for bytes `start` to `end` of an aperture, at its former I/O address `iova`. The
    /// caller must have reserved these addresses.
    ///
    /// # Errors
    /// Returns an error if the file does not contain this memory, or if the card rejects it.
    pub fn of_file(host: &ManagedCard, file: OwnedFd, start: u64, end: u64, iova: Iova) -> Result<Self, ManagerError> {
        let window = Self { iova, ..Self::checked(Arc::new(file), start, end)? };
        window.lend(host)?;
        Ok(window)
    }

    /// Maps the memory in `file` for the same part of the aperture at unused I/O addresses, and zeroes it.
    ///
    /// # Errors
    /// Returns an error if the file does not contain this memory, or if the card rejects it.
    pub fn taken(&self, host: &ManagedCard, file: Arc<OwnedFd>) -> Result<Self, ManagerError> {
        let MmapArea { offset, size } = self.area;
        let window = Self::checked(file, offset, offset + size)?.placed(host)?;
        if let Err(error) = window.blank(host) {
            window.close(host, false);
            return Err(error);
        }
        Ok(window)
    }

    /// Returns the memory in a file from another process, not yet mapped for a card.
    fn checked(file: Arc<OwnedFd>, start: u64, end: u64) -> Result<Self, ManagerError> {
        let look = |error| ManagerError::host("the state of an aperture's memory file cannot be read", error);
        let (seals, stat) = (fcntl_get_seals(&file).map_err(look)?, fstat(&file).map_err(look)?);
        let sound = seals.contains(SealFlags::SHRINK | SealFlags::GROW) && u64::try_from(stat.st_size) == Ok(end);
        Invalid::unless(sound, || {
            format!(
                "memory of an aperture of {end:#x} bytes was handed over in a file of {:#x}, or in one that can be truncated",
                stat.st_size
            )
        })?;
        Self::mapped(file, start, end)
    }

    /// Returns the memory in a file, not yet mapped for a card.
    fn mapped(file: Arc<OwnedFd>, start: u64, end: u64) -> Result<Self, ManagerError> {
        let own = file.try_clone().map_err(|error| {
            ManagerError::host("no file descriptor is available for an aperture's memory file", error)
        })?;
        let refused = |error| ManagerError::host("an aperture's memory cannot be mapped", error);
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

    /// Returns the file and the part of the aperture that it backs.
    pub fn area(&self) -> (Arc<OwnedFd>, MmapArea) {
        (Arc::clone(&self.file), self.area)
    }

    /// Returns the I/O address of a page, given its number in the aperture.
    pub fn iova(&self, page: u32) -> Iova {
        self.iova.offset(self.at(page, 0) as u64)
    }

    /// Returns the memory and the offset of a page in it.
    pub fn region(&self, page: u32) -> (Arc<dyn HostMemory>, usize) {
        (Arc::clone(&self.region), self.at(page, 0))
    }

    /// Reads `data` at byte `offset` of a page. All bytes must be within the page.
    pub fn read(&self, page: u32, offset: u64, data: &mut [u8]) {
        if let Err(error) = self.region.as_volatile_slice().read_slice(data, self.at(page, offset)) {
            tracing::error!(%error, page, "memory under an aperture could not be read");
            data.fill(0);
        }
    }

    /// Writes `data` at byte `offset` of a page. All bytes must be within the page.
    pub fn write(&self, page: u32, offset: u64, data: &[u8]) {
        if let Err(error) = self.region.as_volatile_slice().write_slice(data, self.at(page, offset)) {
            tracing::error!(%error, page, "memory under an aperture could not be written");
        }
    }

    /// Replaces the file with pages lent by the client, both for this process and for the card. The memory must be
    /// unused and inaccessible to the card. The new pages are zeroed.
    ///
    /// # Errors
    /// Returns an error if the number of pages differs, or if the card rejects the pages. The memory is then unchanged.
    pub fn replace(&mut self, host: &ManagedCard, pages: &Arc<Mapping>) -> Result<(), ManagerError> {
        if u64::try_from(pages.len()) != Ok(self.area.size) {
            let error = io::Error::other(format!("{:#x} bytes for {:#x}", pages.len(), self.area.size));
            return Err(ManagerError::host("memory of the wrong size for an aperture", error));
        }
        if !self.take_back(host) {
            return Err(ManagerError::host("memory under an aperture cannot be released", io::ErrorKind::ResourceBusy));
        }
        let old =
            (std::mem::replace(&mut self.region, shared_memory(pages)), std::mem::replace(&mut self.is_files, false));
        self.zero(0, self.area.size);
        self.lend(host).inspect_err(|_| {
            (self.region, self.is_files) = old;
            if let Err(error) = self.lend(host) {
                tracing::error!(%error, "the card has lost memory under an aperture");
            }
        })
    }

    /// Zeroes all memory, including data that the client wrote to unmapped parts. The card must not access the memory
    /// during this call.
    ///
    /// The memory is zeroed in place. With an IOMMU, unmapping and remapping the memory would need a call per page, and
    /// QEMU waits only 5 s for a reset.
    ///
    /// # Errors
    /// Returns an error if the file cannot report which parts of it were written.
    pub fn blank(&self, host: &ManagedCard) -> Result<(), ManagerError> {
        barrier(host);
        if !self.is_files {
            self.zero(0, self.area.size);
            return Ok(());
        }
        // Parts that were never written have no pages, and this loop does not allocate any.
        let end = self.area.offset + self.area.size;
        let mut at = self.area.offset;
        loop {
            let next = |from| match seek(&*self.file, from) {
                Ok(found) => Ok(found.min(end)),
                Err(Errno::NXIO) => Ok(end),
                Err(error) => Err(ManagerError::host("memory under an aperture cannot be zeroed", error)),
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
                tracing::error!(%error, at, "memory under an aperture could not be zeroed");
                return;
            }
            at += piece.len();
        }
    }

    /// Unmaps the memory from the card. If `reachable` is true, its I/O addresses are never reused, because the card's
    /// TLBs may still translate to it.
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
        unmapped.inspect_err(|error| tracing::error!(%error, "the card keeps memory under an aperture mapped")).is_ok()
    }

    fn at(&self, page: u32, offset: u64) -> usize {
        (u64::from(page) * SMALL_PAGE + offset - self.area.offset) as usize
    }
}

/// Waits until the card's writes have arrived.
fn barrier(host: &ManagedCard) {
    if let Err(error) = host.lock().vram().memory.barrier() {
        tracing::error!(%error, "the last writes under an aperture are lost");
    }
}
