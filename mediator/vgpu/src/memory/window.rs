//! Host memory under a part of an aperture: a file that the VMM maps, mapped here as well, and for the card.

use card::{DmaMemory, HostMemory};
use nvspec::addr::{Iova, SMALL_PAGE};
use owner::{HostCard, HostError};
use rustix::fs::{FallocateFlags, SealFlags, fcntl_get_seals, fstat};
use saved_state::Invalid;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vm_memory::{Bytes, FileOffset, MmapRegion};
use vmm_glue::MmapArea;
use vmm_glue::mappable::region_memory;

/// The memory under the bytes from `start` on of an aperture. Offsets in the file are offsets in the aperture.
#[derive(Debug)]
pub(crate) struct WindowMemory {
    file: Arc<OwnedFd>,
    region: Arc<MmapRegion>,
    area: MmapArea,
    iova: Iova,
}

impl WindowMemory {
    /// Zeros under the bytes from `start` to `end` of an aperture, mapped for the card to read and to write. `name` shows
    /// in `/proc`.
    pub(crate) fn new(host: &HostCard, name: &str, start: u64, end: u64) -> Result<Self, HostError> {
        let file =
            region_memory(name, end).map_err(|error| HostError::host("no memory file for an aperture", error))?;
        let mut window = Self::mapped(file, start, end)?;
        let size = window.area.size;
        window.iova =
            host.lock().memory_mut().iova_mut().allocate(size, 0).ok_or(HostError::OutOfIova { len: size })?;
        if let Err(error) = window.lend(host) {
            host.lock().memory_mut().iova_mut().free(window.iova);
            return Err(error);
        }
        Ok(window)
    }

    /// The memory that `file` has under the bytes from `start` to `end` of an aperture, mapped for the card where it was, at `iova`: whoever
    /// has these addresses claims them for it.
    pub(crate) fn of_file(
        host: &HostCard,
        file: OwnedFd,
        (start, end): (u64, u64),
        iova: Iova,
    ) -> Result<Self, HostError> {
        let look = |error| HostError::host("memory of an aperture cannot be looked at", error);
        let (seals, stat) = (fcntl_get_seals(&file).map_err(look)?, fstat(&file).map_err(look)?);
        let sound = seals.contains(SealFlags::SHRINK | SealFlags::GROW) && u64::try_from(stat.st_size) == Ok(end);
        Invalid::unless(sound, || {
            format!(
                "memory of an aperture of {end:#x} bytes was handed over in a file of {:#x}, or in one that can be cut",
                stat.st_size
            )
        })?;
        let window = Self { iova, ..Self::mapped(file, start, end)? };
        window.lend(host)?;
        Ok(window)
    }

    /// The memory, which no card sees yet.
    fn mapped(file: OwnedFd, start: u64, end: u64) -> Result<Self, HostError> {
        let own =
            file.try_clone().map_err(|error| HostError::host("no descriptor of an aperture's memory file", error))?;
        let refused = |error| HostError::host("no mapping of an aperture's memory", error);
        let size = usize::try_from(end - start).map_err(|error| refused(io::Error::other(error)))?;
        let region = MmapRegion::from_file(FileOffset::new(File::from(own), start), size)
            .map_err(|error| refused(io::Error::other(error)))?;
        let area = MmapArea { offset: start, size: end - start };
        Ok(Self { file: Arc::new(file), region: Arc::new(region), area, iova: Iova(0) })
    }

    /// Returns where the card sees the first byte.
    pub(crate) fn first(&self) -> Iova {
        self.iova
    }

    /// The file, and the part of the aperture that it is under.
    pub(crate) fn area(&self) -> (Arc<OwnedFd>, MmapArea) {
        (Arc::clone(&self.file), self.area)
    }

    /// Returns where the card sees a page of it: number of the page in the aperture.
    pub(crate) fn iova(&self, page: u32) -> Iova {
        self.iova.offset(self.at(page, 0) as u64)
    }

    /// Reads from byte `offset` of a page on. Bytes lie within the page.
    pub(crate) fn read(&self, page: u32, offset: u64, data: &mut [u8]) {
        if let Err(error) = HostMemory::as_volatile_slice(&*self.region).read_slice(data, self.at(page, offset)) {
            tracing::error!(%error, page, "memory under an aperture could not be read");
            data.fill(0);
        }
    }

    /// Writes from byte `offset` of a page on. Bytes lie within the page.
    pub(crate) fn write(&self, page: u32, offset: u64, data: &[u8]) {
        if let Err(error) = HostMemory::as_volatile_slice(&*self.region).write_slice(data, self.at(page, offset)) {
            tracing::error!(%error, page, "memory under an aperture could not be written");
        }
    }

    /// Zeros everything, whatever the client has written where nothing is mapped. The card has no access meanwhile.
    pub(crate) fn blank(&self, host: &HostCard) -> Result<(), HostError> {
        // What the card has mapped are pages; it must not keep those that the file gives up.
        self.take_back(host);
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punched = rustix::fs::fallocate(&*self.file, hole, self.area.offset, self.area.size);
        self.lend(host)?;
        punched.map_err(|error| HostError::host("memory under an aperture cannot be zeroed", error))
    }

    /// Takes it from the card. `reachable`: translations that name it may be left in the card's TLBs; its I/O addresses
    /// are then never used again.
    pub(crate) fn close(self, host: &HostCard, reachable: bool) {
        if self.take_back(host) && !reachable {
            host.lock().memory_mut().iova_mut().free(self.iova);
        }
    }

    fn lend(&self, host: &HostCard) -> Result<(), HostError> {
        let region = Arc::clone(&self.region);
        let memory = DmaMemory::new(region, 0, self.region.size(), true)?;
        Ok(host.card().map_dma(self.iova.0, memory)?)
    }

    fn take_back(&self, host: &HostCard) -> bool {
        if let Err(error) = host.lock().vram().memory.barrier() {
            tracing::error!(%error, "what was written under an aperture last is lost");
        }
        let unmapped = host.card().unmap_dma(self.iova.0, self.area.size);
        unmapped.inspect_err(|error| tracing::error!(%error, "the card keeps memory under an aperture mapped")).is_ok()
    }

    fn at(&self, page: u32, offset: u64) -> usize {
        (u64::from(page) * SMALL_PAGE + offset - self.area.offset) as usize
    }
}
