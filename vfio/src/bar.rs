//! Accesses to a region of a function: through a mapping if the whole region is mappable, and through the device file
//! otherwise.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vfio_bindings::bindings::vfio::VFIO_REGION_INFO_FLAG_MMAP;

use crate::kernel::{Kernel, Region, Window};

/// A region of a function, which may be mapped.
pub struct Bar {
    // Declared first, so that it is dropped before the device files.
    window: Option<Box<dyn Window>>,
    kernel: Arc<dyn Kernel>,
    region: Region,
    /// True if an access has failed and the failure was logged.
    failed: AtomicBool,
}

impl Bar {
    /// Wraps `region`. Maps the region if it is entirely mappable.
    pub fn new(kernel: Arc<dyn Kernel>, region: Region) -> Self {
        let whole = region.flags & VFIO_REGION_INFO_FLAG_MMAP != 0 && !region.sparse;
        let window = whole.then(|| kernel.map_region(&region)).and_then(|mapped| {
            mapped.inspect_err(|error| tracing::warn!(%error, "cannot map a BAR; each access is a system call")).ok()
        });
        // Accesses are checked against the region's size, so the mapping must cover the whole region.
        let window = window.filter(|window| window.len() as u64 == region.size);
        Self { window, kernel, region, failed: AtomicBool::new(false) }
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> u64 {
        self.region.size
    }

    /// Returns true if the region is mapped.
    pub fn is_mapped(&self) -> bool {
        self.window.is_some()
    }

    fn holds(&self, offset: u64, len: usize) -> bool {
        offset.checked_add(len as u64).is_some_and(|end| end <= self.region.size)
    }

    fn seen<T>(&self, result: io::Result<T>) -> Option<T> {
        result
            .inspect_err(|error| {
                if !self.failed.swap(true, Ordering::Relaxed) {
                    tracing::error!(%error, "the card rejected an access; further errors are not logged");
                }
            })
            .ok()
    }

    /// Reads a register. Returns all ones if the offset is unaligned or outside the region, or if the read fails.
    pub fn read32(&self, offset: u32) -> u32 {
        if !offset.is_multiple_of(4) || !self.holds(u64::from(offset), 4) {
            return u32::MAX;
        }
        if let Some(window) = &self.window {
            return window.read32(offset as usize);
        }
        let mut bytes = [0; 4];
        let read = self.kernel.read(self.region.offset + u64::from(offset), &mut bytes);
        self.seen(read).map_or(u32::MAX, |()| u32::from_le_bytes(bytes))
    }

    /// Writes a register. Drops the write if the offset is unaligned or outside the region.
    pub fn write32(&self, offset: u32, value: u32) {
        if !offset.is_multiple_of(4) || !self.holds(u64::from(offset), 4) {
            return;
        }
        match &self.window {
            Some(window) => window.write32(offset as usize, value),
            None => {
                let written = self.kernel.write(self.region.offset + u64::from(offset), &value.to_le_bytes());
                self.seen(written);
            }
        }
    }

    /// Reads bytes. Returns all ones if any byte is outside the region, or if the read fails.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        if !self.holds(offset, data.len()) {
            data.fill(0xff);
            return;
        }
        let Some(window) = &self.window else {
            let read = self.kernel.read(self.region.offset + offset, data);
            if self.seen(read).is_none() {
                data.fill(0xff);
            }
            return;
        };
        let mut at = offset as usize;
        let mut rest = data;
        while !rest.is_empty() {
            let (piece, behind) = rest.split_at_mut(width(at, rest.len()));
            match piece.len() {
                8 => piece.copy_from_slice(&window.read64(at).to_le_bytes()),
                4 => piece.copy_from_slice(&window.read32(at).to_le_bytes()),
                _ => piece.fill(window.read8(at)),
            }
            at += piece.len();
            rest = behind;
        }
    }

    /// Writes bytes. Drops the write if any byte is outside the region.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if !self.holds(offset, data.len()) {
            return;
        }
        let Some(window) = &self.window else {
            let written = self.kernel.write(self.region.offset + offset, data);
            self.seen(written);
            return;
        };
        let mut at = offset as usize;
        let mut rest = data;
        while !rest.is_empty() {
            let (piece, behind) = rest.split_at(width(at, rest.len()));
            match *piece {
                [a, b, c, d, e, f, g, h] => window.write64(at, u64::from_le_bytes([a, b, c, d, e, f, g, h])),
                [a, b, c, d] => window.write32(at, u32::from_le_bytes([a, b, c, d])),
                [byte] => window.write8(at, byte),
                // `width` returns only these sizes.
                _ => {}
            }
            at += piece.len();
            rest = behind;
        }
    }

    /// Reads bytes from a region that is never mapped. Returns errors to the caller.
    pub fn try_read<const N: usize>(&self, offset: u64) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        if !self.holds(offset, N) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.kernel.read(self.region.offset + offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Writes bytes to a region that is never mapped. Returns errors to the caller.
    pub fn try_write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if !self.holds(offset, data.len()) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.kernel.write(self.region.offset + offset, data)
    }
}

/// Returns the size of the next access for `len` bytes at `at`: the largest of 8, 4 and 1 that divides `at` and does
/// not exceed `len`.
fn width(at: usize, len: usize) -> usize {
    [8, 4].into_iter().find(|&size| at.is_multiple_of(size) && len >= size).unwrap_or(1)
}
