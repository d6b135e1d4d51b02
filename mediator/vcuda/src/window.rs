//! The host-visible window: memory of one file, mapped by the guest, the workers and this process.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{FallocateFlags, fallocate};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};
use vmm_glue::mappable::region_memory;

use crate::core::{Range, Words};

/// The window of one client.
#[derive(Debug)]
pub(crate) struct Window {
    file: Arc<OwnedFd>,
    region: MmapRegion,
    bytes: u64,
}

impl Window {
    /// Creates a zeroed window of `bytes` bytes. Its memory is allocated on first write.
    pub(crate) fn new(bytes: u64) -> io::Result<Self> {
        let file = region_memory("cuda-window", bytes)?;
        let size = usize::try_from(bytes).map_err(io::Error::other)?;
        let own = File::from(file.try_clone()?);
        let region = MmapRegion::from_file(FileOffset::new(own, 0), size).map_err(io::Error::other)?;
        Ok(Self { file: Arc::new(file), region, bytes })
    }

    /// Takes over the window of another process, including its contents.
    ///
    /// # Errors
    /// Returns an error if the file cannot be mapped or has a different size.
    pub(crate) fn adopt(file: Arc<OwnedFd>, bytes: u64) -> io::Result<Self> {
        if rustix::fs::fstat(&file)?.st_size.cast_unsigned() != bytes {
            return Err(io::Error::other("the window has a different size"));
        }
        let size = usize::try_from(bytes).map_err(io::Error::other)?;
        let own = File::from(file.try_clone()?);
        let region = MmapRegion::from_file(FileOffset::new(own, 0), size).map_err(io::Error::other)?;
        Ok(Self { file, region, bytes })
    }

    /// Returns the window's file.
    pub(crate) fn file(&self) -> &Arc<OwnedFd> {
        &self.file
    }

    /// Returns the size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Zeroes a range and releases its memory to the host.
    pub(crate) fn zero(&self, range: Range) -> io::Result<()> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&*self.file, how, range.offset, range.size)?)
    }

    /// Zeroes the whole window.
    pub(crate) fn zero_all(&self) -> io::Result<()> {
        self.zero(Range { offset: 0, size: self.bytes })
    }

    /// Stores a 64-bit word. Logs an error if the word is outside the window.
    pub(crate) fn store(&self, offset: u64, value: u64) {
        if let Ok(offset) = usize::try_from(offset) {
            let stored = self.region.as_volatile_slice().store(value.to_le(), offset, Ordering::Release);
            if let Err(error) = stored {
                tracing::error!(%error, offset, "cannot write a word of the window");
            }
        }
    }

    /// Reads the window for a client that does not map it.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        if self.region.as_volatile_slice().read_slice(data, offset).is_err() {
            data.fill(0xff);
        }
    }

    /// Writes to the window for a client that does not map it.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        // Writes outside the window are ignored, as on a bus.
        let _ = self.region.as_volatile_slice().write_slice(data, offset);
    }
}

impl Words for Window {
    fn load(&self, offset: u64) -> u64 {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        self.region.as_volatile_slice().load(offset, Ordering::Acquire).map_or(0, u64::from_le)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_part_has_no_memory_and_reads_as_zeros() {
        let window = Window::new(1 << 30).unwrap();
        for offset in [0, 0x1000, 0x2000] {
            window.store(offset + 8, 7);
        }
        window.zero(Range { offset: 0x1000, size: 0x1000 }).unwrap();
        assert_eq!(rustix::fs::fstat(window.file()).unwrap().st_blocks, 16);
        assert_eq!([8, 0x1008, 0x2008].map(|offset| window.load(offset)), [7, 0, 7]);
        window.zero_all().unwrap();
        assert_eq!(window.load(8), 0);
        let mut data = [1; 4];
        window.read((1 << 30) - 2, &mut data);
        assert_eq!(data, [0xff; 4]);
        assert_eq!(window.load(1 << 30), 0);
    }
}
