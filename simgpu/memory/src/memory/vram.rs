//! The card's VRAM: a single sparse mapping, in which untouched memory uses no host memory.

use super::BusError;
use nvspec::addr::VramAddr;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create,
};
use std::fs::File;
use std::sync::atomic::Ordering;
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

/// Minimum VRAM size in bytes. A driver needs this much for its own tables.
pub const VRAM_MIN: u64 = 16 << 20;
/// Maximum VRAM size in bytes, which is that of the family's largest board.
pub const VRAM_MAX: u64 = 6 << 30;
/// Granularity of the VRAM size in bytes.
const VRAM_UNIT: u64 = 1 << 20;
/// Seals that fix the file size, because an access beyond its end would raise SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);
/// Page size of the host in bytes.
const HOST_PAGE: usize = 4096;

/// Reason why VRAM could not be created.
#[derive(Debug, thiserror::Error)]
pub enum VramError {
    /// The size is out of range or not a multiple of 1 MiB.
    #[error(
        "a VRAM size of {size:#x} bytes is invalid: it must be a multiple of 1 MiB from {} MiB to {} MiB",
        VRAM_MIN >> 20,
        VRAM_MAX >> 20
    )]
    Size {
        /// Requested size in bytes.
        size: u64,
    },
    /// The file that backs shareable VRAM could not be created.
    #[error("a file of {size:#x} bytes for VRAM could not be created")]
    File {
        /// Requested size in bytes.
        size: u64,
        /// The host's error.
        #[source]
        source: std::io::Error,
    },
    /// The received file has the wrong size or lacks a seal.
    #[error("VRAM of {size:#x} bytes was handed over in a file of {length:#x} bytes, or in one that can be truncated")]
    Other {
        /// Requested size in bytes.
        size: u64,
        /// Size of the file in bytes.
        length: u64,
    },
    /// VRAM could not be mapped.
    #[error("the host could not map {size:#x} bytes for VRAM")]
    Map {
        /// Requested size in bytes.
        size: u64,
        /// The host's error.
        #[source]
        source: vm_memory::mmap::MmapRegionError,
    },
}

/// The card's VRAM, initially zero. Any thread may read and write it.
#[derive(Debug)]
pub struct Vram {
    region: MmapRegion,
    size: u64,
    /// The file that backs the memory, if another process can take it over.
    file: Option<File>,
}

impl Vram {
    /// Allocates `size` zeroed bytes.
    ///
    /// # Errors
    /// Returns a [`VramError`] if the size is invalid or the host lacks memory.
    pub fn new(size: u64) -> Result<Self, VramError> {
        if !(VRAM_MIN..=VRAM_MAX).contains(&size) || !size.is_multiple_of(VRAM_UNIT) {
            return Err(VramError::Size { size });
        }
        let len = usize::try_from(size).map_err(|_| VramError::Size { size })?;
        let region = MmapRegion::new(len).map_err(|source| VramError::Map { size, source })?;
        Ok(Self { region, size, file: None })
    }

    /// Allocates `size` zeroed bytes in a memfd, which can be passed to another process ([`Self::file`]).
    ///
    /// # Errors
    /// Returns a [`VramError`] if the size is invalid or the host lacks memory.
    pub fn shared(size: u64) -> Result<Self, VramError> {
        if !(VRAM_MIN..=VRAM_MAX).contains(&size) || !size.is_multiple_of(VRAM_UNIT) {
            return Err(VramError::Size { size });
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let made = memfd_create("simgpu-vram", flags).and_then(|file| {
            ftruncate(&file, size)?;
            fcntl_add_seals(&file, SEALS)?;
            Ok(File::from(file))
        });
        Self::of_file(made.map_err(|source| VramError::File { size, source: source.into() })?, size)
    }

    /// Maps the memory of another process's card, which this process takes over.
    ///
    /// # Errors
    /// Returns a [`VramError`] if the size is invalid, or if the file has a different size, lacks a seal, or cannot be
    /// mapped.
    pub fn of_file(file: File, size: u64) -> Result<Self, VramError> {
        let refused = |source| VramError::File { size, source };
        let seals = fcntl_get_seals(&file).map_err(|source| refused(source.into()))?;
        let length = file.metadata().map_err(refused)?.len();
        if length != size || !(VRAM_MIN..=VRAM_MAX).contains(&size) || !seals.contains(SEALS) {
            return Err(VramError::Other { size, length });
        }
        let len = usize::try_from(size).map_err(|_| VramError::Size { size })?;
        let mapped = file.try_clone().map_err(refused)?;
        let region = MmapRegion::from_file(FileOffset::new(mapped, 0), len);
        let region = region.map_err(|source| VramError::Map { size, source })?;
        Ok(Self { region, size, file: Some(file) })
    }

    /// Returns the file that backs the memory, so that another process can take it over. Returns `None` unless the
    /// memory is [shared](Self::shared).
    #[must_use]
    pub fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// Turns the memory controllers off, so that the memory does not respond.
    #[must_use]
    pub fn off(self) -> Self {
        Self { size: 0, ..self }
    }

    /// Returns the number of accessible bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns a slice of a range, which must be entirely within VRAM.
    pub(super) fn piece(&self, address: VramAddr, len: u64) -> Result<VolatileSlice<'_, ()>, BusError> {
        let beyond = BusError::BeyondVram { address, len, size: self.size };
        if address.0 >= self.size || len > self.size - address.0 {
            return Err(beyond);
        }
        // Neither value exceeds the mapping size, so both fit in `usize`.
        self.region.get_slice(address.0 as usize, len as usize).map_err(|_| beyond)
    }

    /// Reads the bytes at `address` into `data`.
    ///
    /// # Errors
    /// Returns [`BusError::BeyondVram`] if part of the range is beyond the end of VRAM. Nothing is read in this case.
    pub fn read(&self, address: VramAddr, data: &mut [u8]) -> Result<(), BusError> {
        if !data.is_empty() {
            self.piece(address, data.len() as u64)?.copy_to(data);
        }
        Ok(())
    }

    /// Writes `data` to `address`.
    ///
    /// # Errors
    /// Returns [`BusError::BeyondVram`] if part of the range is beyond the end of VRAM. Nothing is written in this
    /// case.
    pub fn write(&self, address: VramAddr, data: &[u8]) -> Result<(), BusError> {
        if data.len() >= HOST_PAGE && data.iter().all(|byte| *byte == 0) {
            return self.clear(address, data.len());
        }
        if !data.is_empty() {
            self.piece(address, data.len() as u64)?.copy_from(data);
        }
        Ok(())
    }

    /// Zeroes a range. Skips pages that are already zero, and frees whole pages of a file, so that scrubbing untouched
    /// memory allocates no host memory.
    fn clear(&self, address: VramAddr, len: usize) -> Result<(), BusError> {
        let mut now = [0; HOST_PAGE];
        let mut done = 0;
        while done < len {
            let at = address.0 + done as u64;
            let run = (len - done).min(HOST_PAGE - at as usize % HOST_PAGE);
            let whole = (len - done) / HOST_PAGE * HOST_PAGE;
            if let Some(file) = self.file.as_ref().filter(|_| run == HOST_PAGE && whole > 0) {
                // Reading a page of the file would allocate it, so punch holes instead.
                let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                self.piece(address.offset(done as u64), whole as u64)?;
                if fallocate(file, holes, at, whole as u64).is_ok() {
                    done += whole;
                    continue;
                }
            }
            let piece = self.piece(address.offset(done as u64), run as u64)?;
            piece.copy_to(&mut now[..run]);
            if now[..run].iter().any(|byte| *byte != 0) {
                piece.copy_from(&[0; HOST_PAGE][..run]);
            }
            done += run;
        }
        Ok(())
    }

    /// Reads 32 bits, in a single access if aligned.
    ///
    /// # Errors
    /// Returns [`BusError::BeyondVram`] if the address is beyond the end of VRAM.
    pub fn read32(&self, address: VramAddr) -> Result<u32, BusError> {
        let piece = self.piece(address, 4)?;
        if let Ok(value) = piece.load::<u32>(0, Ordering::Acquire) {
            return Ok(value);
        }
        let mut bytes = [0; 4];
        piece.copy_to(&mut bytes[..]);
        Ok(u32::from_le_bytes(bytes))
    }

    /// Writes 32 bits, in a single access if aligned.
    ///
    /// # Errors
    /// Returns [`BusError::BeyondVram`] if the address is beyond the end of VRAM.
    pub fn write32(&self, address: VramAddr, value: u32) -> Result<(), BusError> {
        let piece = self.piece(address, 4)?;
        if piece.store(value, 0, Ordering::Release).is_err() {
            piece.copy_from(&value.to_le_bytes()[..]);
        }
        Ok(())
    }
}
