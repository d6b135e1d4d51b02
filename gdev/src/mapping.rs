//! Memory mappings: buffers of the DRM device, and regions of the PCI function.
//!
//! UNSAFETY: maps files and accesses device memory. All accesses are checked against the mapping's length. Each access
//! is a single machine instruction of the requested width, so that a trapping VMM sees that width.

#![expect(unsafe_code, reason = "mmap and device memory accesses of an exact width")]

use std::arch::asm;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

/// A shared mapping of part of a file.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: this value is the only owner of the mapping, which any thread of the process may access.
unsafe impl Send for Mapping {}

// SAFETY: each access is one machine instruction on memory that Rust does not use, so concurrent accesses are not data
// races.
unsafe impl Sync for Mapping {}

/// Width of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// 8 bits.
    Byte,
    /// 16 bits.
    Word,
    /// 32 bits.
    Dword,
    /// 64 bits.
    Qword,
}

impl Width {
    /// All widths.
    pub const ALL: [Self; 4] = [Self::Byte, Self::Word, Self::Dword, Self::Qword];

    /// Returns the width in bytes.
    pub fn bytes(self) -> usize {
        match self {
            Self::Byte => 1,
            Self::Word => 2,
            Self::Dword => 4,
            Self::Qword => 8,
        }
    }
}

impl Mapping {
    /// Maps `length` bytes of `file`, starting at `offset`, for reading and writing.
    pub fn new(file: &File, offset: u64, length: usize) -> io::Result<Self> {
        let offset = i64::try_from(offset).map_err(io::Error::other)?;
        // SAFETY: a new mapping at an address that the kernel chooses cannot overlap memory that Rust uses.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                offset,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { base, length })
    }

    /// Returns the size of the mapping in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.length
    }

    /// Returns a pointer to the first byte, which is valid as long as the mapping exists.
    #[must_use]
    pub fn start(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the address in this process of the first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// Performs one load of the given width. `offset` may be unaligned.
    ///
    /// # Panics
    /// Panics if the access exceeds the mapping, which is a bug, because offsets come from this program itself.
    pub fn load(&self, offset: usize, width: Width) -> u64 {
        let address = self.checked(offset, width.bytes());
        let value: u64;
        // SAFETY: `checked` has verified that all bytes are in the mapping, which exists as long as `self`. A load does
        // not change this program's memory, and x86 loads require no alignment.
        unsafe {
            match width {
                Width::Byte => asm!("movzx {1:e}, byte ptr [{0}]", in(reg) address, out(reg) value, options(nostack)),
                Width::Word => asm!("movzx {1:e}, word ptr [{0}]", in(reg) address, out(reg) value, options(nostack)),
                Width::Dword => asm!("mov {1:e}, dword ptr [{0}]", in(reg) address, out(reg) value, options(nostack)),
                Width::Qword => asm!("mov {1}, qword ptr [{0}]", in(reg) address, out(reg) value, options(nostack)),
            }
        }
        value
    }

    /// Performs one store of the given width. `offset` may be unaligned.
    ///
    /// # Panics
    /// Panics if the access exceeds the mapping, which is a bug, because offsets come from this program itself.
    pub fn store(&self, offset: usize, width: Width, value: u64) {
        let address = self.checked(offset, width.bytes());
        // SAFETY: `checked` has verified that all bytes are in the mapping, which exists as long as `self` and is not
        // borrowed Rust memory. x86 stores require no alignment.
        unsafe {
            match width {
                Width::Byte => {
                    asm!("mov byte ptr [{0}], {1}", in(reg) address, in(reg_byte) value as u8, options(nostack))
                }
                Width::Word => asm!("mov word ptr [{0}], {1:x}", in(reg) address, in(reg) value, options(nostack)),
                Width::Dword => asm!("mov dword ptr [{0}], {1:e}", in(reg) address, in(reg) value, options(nostack)),
                Width::Qword => asm!("mov qword ptr [{0}], {1}", in(reg) address, in(reg) value, options(nostack)),
            }
        }
    }

    /// Copies data out of the mapping, 8 bytes at a time where aligned.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let mut at = offset;
        let mut rest = out;
        while !rest.is_empty() {
            let width = widest(at, rest.len());
            let (piece, tail) = rest.split_at_mut(width.bytes());
            piece.copy_from_slice(&self.load(at, width).to_le_bytes()[..width.bytes()]);
            at += width.bytes();
            rest = tail;
        }
    }

    /// Copies data into the mapping, 8 bytes at a time where aligned.
    pub fn write(&self, offset: usize, data: &[u8]) {
        let mut at = offset;
        let mut rest = data;
        while !rest.is_empty() {
            let width = widest(at, rest.len());
            let (piece, tail) = rest.split_at(width.bytes());
            let mut bytes = [0; 8];
            bytes[..piece.len()].copy_from_slice(piece);
            self.store(at, width, u64::from_le_bytes(bytes));
            at += width.bytes();
            rest = tail;
        }
    }

    fn checked(&self, offset: usize, bytes: usize) -> *mut u8 {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.length), "{bytes} bytes at {offset:#x} of {:#x}", self.length);
        // SAFETY: the assertion above ensures that the offset is within the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

/// Returns the widest naturally aligned access at `at` that does not exceed `left` bytes.
fn widest(at: usize, left: usize) -> Width {
    let fits = |width: &Width| at.is_multiple_of(width.bytes()) && width.bytes() <= left;
    Width::ALL.into_iter().rev().find(fits).unwrap_or(Width::Byte)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `length` describe a mapping that only `self` owns.
        unsafe {
            libc::munmap(self.base.as_ptr().cast(), self.length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::FromRawFd;

    fn memory(length: usize) -> Mapping {
        // SAFETY: the name is a C string. The descriptor is new and has no other owner.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"access".as_ptr(), 0)) };
        file.set_len(length as u64).expect("set_len");
        Mapping::new(&file, 0, length).expect("mmap")
    }

    #[test]
    fn every_width_reads_back_at_every_alignment() {
        let memory = memory(4096);
        for width in Width::ALL {
            for offset in 16..32 {
                memory.write(0, &[0xaa; 64]);
                memory.store(offset, width, 0x1122_3344_5566_7788);
                let mask = if width == Width::Qword { u64::MAX } else { (1 << (8 * width.bytes())) - 1 };
                assert_eq!(memory.load(offset, width), 0x1122_3344_5566_7788 & mask);
                assert_eq!(memory.load(offset - 1, Width::Byte), 0xaa);
                assert_eq!(memory.load(offset + width.bytes(), Width::Byte), 0xaa);
            }
        }
    }

    #[test]
    fn bytes_copied_in_come_out_at_odd_places() {
        let memory = memory(4096);
        let data: Vec<u8> = (0..100).collect();
        for offset in 0..9 {
            memory.write(offset, &data);
            let mut out = vec![0; 100];
            memory.read(offset, &mut out);
            assert_eq!(out, data);
        }
    }

    #[test]
    #[should_panic(expected = "4 bytes at 0xffd")]
    fn beyond_the_end_is_refused() {
        memory(4096).load(4093, Width::Dword);
    }
}
