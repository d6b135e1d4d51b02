//! A region of a function, mapped into this process.
#![expect(unsafe_code, reason = "maps and accesses device memory")]
// UNSAFETY: maps device memory. Every access is checked for alignment and against the length of the mapping, which
// exists as long as the value. Accesses are volatile and have exactly the requested size, because the target is a
// register or a doorbell.

use std::fs::File;
use std::io;
use std::ptr::{NonNull, null_mut};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::kernel::Window;

/// A mapped region.
pub struct Mapped {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is used only for single volatile accesses, and the device defines the effect of races.
unsafe impl Send for Mapped {}
// SAFETY: as above, each access is a single volatile access, and the device defines the effect of races.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps `len` bytes of a device file, starting at `offset`.
    ///
    /// # Errors
    /// Returns the kernel's error if the call fails.
    pub fn new(file: &File, offset: u64, len: u64) -> io::Result<Self> {
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // SAFETY: the kernel chooses an unused address.
        let base =
            unsafe { mmap(null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, offset)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }

    /// Returns the address of an aligned access of type `T` at `offset`, or `None` if the access is misaligned or
    /// outside the mapping.
    fn place<T>(&self, offset: usize) -> Option<*mut T> {
        let fits = offset.checked_add(size_of::<T>()).is_some_and(|end| end <= self.len);
        // A mapping starts at a page boundary.
        (fits && offset.is_multiple_of(size_of::<T>())).then(|| self.base.as_ptr().wrapping_add(offset).cast())
    }

    fn read<T>(&self, offset: usize) -> Option<T> {
        // SAFETY: `place` has checked bounds and alignment. `T` is an unsigned integer, for which all bytes are valid.
        self.place::<T>(offset).map(|place| unsafe { place.read_volatile() })
    }

    fn write<T>(&self, offset: usize, value: T) {
        if let Some(place) = self.place::<T>(offset) {
            // SAFETY: `place` has checked bounds and alignment.
            unsafe { place.write_volatile(value) };
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `new` created, and no references into it exist.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "a mapping was unmapped twice");
    }
}

impl Window for Mapped {
    fn len(&self) -> usize {
        self.len
    }

    fn read8(&self, offset: usize) -> u8 {
        self.read(offset).unwrap_or(u8::MAX)
    }

    fn read32(&self, offset: usize) -> u32 {
        self.read(offset).unwrap_or(u32::MAX)
    }

    fn read64(&self, offset: usize) -> u64 {
        self.read(offset).unwrap_or(u64::MAX)
    }

    fn write8(&self, offset: usize, value: u8) {
        self.write(offset, value);
    }

    fn write32(&self, offset: usize, value: u32) {
        self.write(offset, value);
    }

    fn write64(&self, offset: usize, value: u64) {
        self.write(offset, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_reach_the_file_and_never_beyond() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let window = Mapped::new(&file, 4096, 4096).unwrap();
        window.write32(0, 0x1234_5678);
        window.write8(4095, 7);
        window.write64(8, u64::MAX - 1);
        assert_eq!((window.read32(0), window.read8(4095), window.read64(8)), (0x1234_5678, 7, u64::MAX - 1));
        for offset in [4096, 4094, 1, usize::MAX, usize::MAX - 3] {
            window.write32(offset, 0);
            assert_eq!(window.read32(offset), u32::MAX, "{offset:#x}");
        }
        assert_eq!((window.read32(0), window.read8(0)), (0x1234_5678, 0x78));
        assert_eq!(Mapped::new(&file, 1, 4096).err().and_then(|error| error.raw_os_error()), Some(libc::EINVAL));
    }
}
