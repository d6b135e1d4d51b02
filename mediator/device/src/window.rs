//! Host memory under a part of an aperture: a file that the VMM maps, mapped here as well, and for the card; or pages of a domain of Xen,
//! which has them there itself.

use super::memory::shared_memory;
use card::{DmaMemory, HostMemory};
use nvspec::addr::{Iova, SMALL_PAGE};
use owner::{HostCard, HostError};
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

/// Bytes that are zeroed by one write.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// The memory under the bytes from `start` on of an aperture. Offsets in the file are offsets in the aperture.
#[derive(Debug)]
pub struct WindowMemory {
    file: Arc<OwnedFd>,
    region: Arc<dyn HostMemory>,
    /// The region is the file's, and not what a client has lent in its place.
    is_files: bool,
    area: MmapArea,
    iova: Iova,
}

impl WindowMemory {
    /// Zeros under the bytes from `start` to `end` of an aperture, mapped for the card to read and to write. `name` shows
    /// in `/proc`.
    ///
    /// # Errors
    /// When there is no memory, or no I/O addresses.
    pub fn new(host: &HostCard, name: &str, start: u64, end: u64) -> Result<Self, HostError> {
        let file =
            region_memory(name, end).map_err(|error| HostError::host("no memory file for an aperture", error))?;
        Self::mapped(Arc::new(file), start, end)?.placed(host)
    }

    /// The same memory, mapped for another card, or once more for the same: whoever has it mapped goes on with it.
    ///
    /// # Errors
    /// When the card does not take it, or has no I/O addresses for it.
    pub fn on(&self, host: &HostCard) -> Result<Self, HostError> {
        let Self { file, region, is_files, area, iova } = self;
        let (file, region) = (Arc::clone(file), Arc::clone(region));
        Self { file, region, is_files: *is_files, area: *area, iova: *iova }.placed(host)
    }

    /// Mapped for a card, at I/O addresses that nobody has.
    fn placed(self, host: &HostCard) -> Result<Self, HostError> {
        let size = self.area.size;
        let iova = host.lock().memory_mut().iova_mut().allocate(size, 0).ok_or(HostError::OutOfIova { len: size })?;
        let window = Self { iova, ..self };
        if let Err(error) = window.lend(host) {
            host.lock().memory_mut().iova_mut().free(iova);
            return Err(error);
        }
        Ok(window)
    }

    /// The memory that `file` has under the bytes from `start` to `end` of an aperture, mapped for the card where it was, at `iova`: whoever
    /// has these addresses claims them for it.
    ///
    /// # Errors
    /// When the file is not that memory, or the card does not take it.
    pub fn of_file(host: &HostCard, file: OwnedFd, (start, end): (u64, u64), iova: Iova) -> Result<Self, HostError> {
        let window = Self { iova, ..Self::checked(Arc::new(file), start, end)? };
        window.lend(host)?;
        Ok(window)
    }

    /// The memory that `file` has for the same part of the aperture, zeroed, at I/O addresses that nobody has.
    ///
    /// # Errors
    /// When the file is not that memory, or the card does not take it.
    pub fn taken(&self, host: &HostCard, file: Arc<OwnedFd>) -> Result<Self, HostError> {
        let MmapArea { offset, size } = self.area;
        let window = Self::checked(file, offset, offset + size)?.placed(host)?;
        if let Err(error) = window.blank(host) {
            window.close(host, false);
            return Err(error);
        }
        Ok(window)
    }

    /// The memory of a file that another process has handed over, which no card sees yet.
    fn checked(file: Arc<OwnedFd>, start: u64, end: u64) -> Result<Self, HostError> {
        let look = |error| HostError::host("memory of an aperture cannot be looked at", error);
        let (seals, stat) = (fcntl_get_seals(&file).map_err(look)?, fstat(&file).map_err(look)?);
        let sound = seals.contains(SealFlags::SHRINK | SealFlags::GROW) && u64::try_from(stat.st_size) == Ok(end);
        Invalid::unless(sound, || {
            format!(
                "memory of an aperture of {end:#x} bytes was handed over in a file of {:#x}, or in one that can be cut",
                stat.st_size
            )
        })?;
        Self::mapped(file, start, end)
    }

    /// The memory, which no card sees yet.
    fn mapped(file: Arc<OwnedFd>, start: u64, end: u64) -> Result<Self, HostError> {
        let own =
            file.try_clone().map_err(|error| HostError::host("no descriptor of an aperture's memory file", error))?;
        let refused = |error| HostError::host("no mapping of an aperture's memory", error);
        let size = usize::try_from(end - start).map_err(|error| refused(io::Error::other(error)))?;
        let region = MmapRegion::from_file(FileOffset::new(File::from(own), start), size)
            .map_err(|error| refused(io::Error::other(error)))?;
        let area = MmapArea { offset: start, size: end - start };
        Ok(Self { file, region: Arc::new(region), is_files: true, area, iova: Iova(0) })
    }

    /// Returns where the card sees the first byte.
    pub fn first(&self) -> Iova {
        self.iova
    }

    /// The file, and the part of the aperture that it is under.
    pub fn area(&self) -> (Arc<OwnedFd>, MmapArea) {
        (Arc::clone(&self.file), self.area)
    }

    /// Returns where the card sees a page of it: number of the page in the aperture.
    pub fn iova(&self, page: u32) -> Iova {
        self.iova.offset(self.at(page, 0) as u64)
    }

    /// The memory, and where in it a page begins.
    pub fn region(&self, page: u32) -> (Arc<dyn HostMemory>, usize) {
        (Arc::clone(&self.region), self.at(page, 0))
    }

    /// Reads from byte `offset` of a page on. Bytes lie within the page.
    pub fn read(&self, page: u32, offset: u64, data: &mut [u8]) {
        if let Err(error) = self.region.as_volatile_slice().read_slice(data, self.at(page, offset)) {
            tracing::error!(%error, page, "memory under an aperture could not be read");
            data.fill(0);
        }
    }

    /// Writes from byte `offset` of a page on. Bytes lie within the page.
    pub fn write(&self, page: u32, offset: u64, data: &[u8]) {
        if let Err(error) = self.region.as_volatile_slice().write_slice(data, self.at(page, offset)) {
            tracing::error!(%error, page, "memory under an aperture could not be written");
        }
    }

    /// Puts pages that the client has lent in the file's place, for the card as well. Nothing lives there, and the card makes no access. They
    /// are zeroed.
    ///
    /// # Errors
    /// When they are not as many, or the card does not take them. All is as it was then.
    pub fn replace(&mut self, host: &HostCard, pages: &Arc<Mapping>) -> Result<(), HostError> {
        if u64::try_from(pages.len()) != Ok(self.area.size) {
            let error = io::Error::other(format!("{:#x} bytes for {:#x}", pages.len(), self.area.size));
            return Err(HostError::host("other memory than is under an aperture", error));
        }
        if !self.take_back(host) {
            return Err(HostError::host("memory under an aperture stays", io::ErrorKind::ResourceBusy));
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

    /// Zeros everything, whatever the client has written where nothing is mapped. The card makes no access meanwhile.
    ///
    /// In place: to take it from a card behind an IOMMU and to give it back takes a call for each page, and QEMU waits 5 s for a reset.
    ///
    /// # Errors
    /// When the file does not say what of it was written.
    pub fn blank(&self, host: &HostCard) -> Result<(), HostError> {
        barrier(host);
        if !self.is_files {
            self.zero(0, self.area.size);
            return Ok(());
        }
        // What nobody has written has no pages, and gets none.
        let end = self.area.offset + self.area.size;
        let mut at = self.area.offset;
        loop {
            let next = |from| match seek(&*self.file, from) {
                Ok(found) => Ok(found.min(end)),
                Err(Errno::NXIO) => Ok(end),
                Err(error) => Err(HostError::host("memory under an aperture cannot be zeroed", error)),
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

    /// Takes it from the card. `reachable`: translations that name it may be left in the card's TLBs; its I/O addresses
    /// are then never used again.
    pub fn close(self, host: &HostCard, reachable: bool) {
        if self.take_back(host) && !reachable {
            host.lock().memory_mut().iova_mut().free(self.iova);
        }
    }

    fn lend(&self, host: &HostCard) -> Result<(), HostError> {
        let region = Arc::clone(&self.region);
        let memory = DmaMemory::new(region, 0, self.area.size as usize, true)?;
        Ok(host.card().map_dma(self.iova.0, memory)?)
    }

    fn take_back(&self, host: &HostCard) -> bool {
        barrier(host);
        let unmapped = host.card().unmap_dma(self.iova.0, self.area.size);
        unmapped.inspect_err(|error| tracing::error!(%error, "the card keeps memory under an aperture mapped")).is_ok()
    }

    fn at(&self, page: u32, offset: u64) -> usize {
        (u64::from(page) * SMALL_PAGE + offset - self.area.offset) as usize
    }
}

/// Waits for what was written for the card.
fn barrier(host: &HostCard) {
    if let Err(error) = host.lock().vram().memory.barrier() {
        tracing::error!(%error, "what was written under an aperture last is lost");
    }
}
