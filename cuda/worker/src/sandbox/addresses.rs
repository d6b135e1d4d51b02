//! Socket addresses of the card's owner and of the next daemon for `connect`, in an immutable page. A system call
//! filter sees pointers, but not the memory that they point to. Therefore, the addresses that a worker may connect to
//! are in a separate page of a sealed file, at the lowest address that a process may map. The filter allows `connect`
//! only with pointers into this page, and forbids calls that map, unmap, move or unprotect memory below the end of the
//! page ([`LIMIT`]). No mapping can start below the page and overlap it, because the kernel rejects lower addresses.
//!
//! UNSAFETY: maps the page and reads it.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::CStr;
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{PathBuf, absolute};

use rustix::fs::{MemfdFlags, SealFlags};

/// Address of the page, the lowest one that common systems allow (`vm.mmap_min_addr`).
pub(super) const ADDRESS: u64 = 0x1_0000;
/// End of the page.
pub(super) const LIMIT: u64 = ADDRESS + BYTES as u64;
/// Size of the page in bytes.
const BYTES: usize = 4096;
/// Offset of the path in `sockaddr_un`, in bytes.
const PATH: usize = 2;
/// Size of the path in `sockaddr_un`, including the terminating NUL.
const MAX_PATH: usize = 108;

/// Maximum number of socket addresses.
const MAX_ADDRESSES: usize = 2;
/// Stride of socket addresses in the page, in bytes.
const STRIDE: usize = 256;

/// A socket address in the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kept {
    /// Address of the `sockaddr_un`.
    pub(super) pointer: u64,
    /// Length to pass to `connect`, in bytes.
    pub(super) length: u64,
}

/// Socket addresses in the page.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Addresses([Option<Kept>; MAX_ADDRESSES]);

impl Addresses {
    /// Maps the page, with the addresses of the sockets at `paths`.
    pub(super) fn keep(paths: &[PathBuf]) -> io::Result<Self> {
        let mut kept = Self::default();
        if paths.is_empty() {
            return Ok(kept);
        }
        if paths.len() > MAX_ADDRESSES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut page = vec![0; BYTES];
        for ((path, slot), at) in paths.iter().zip(&mut kept.0).zip((0..).step_by(STRIDE)) {
            let path = absolute(path)?;
            let path = path.as_os_str().as_bytes();
            if path.len() >= MAX_PATH || path.contains(&0) {
                return Err(io::ErrorKind::InvalidFilename.into());
            }
            page[at..at + PATH].copy_from_slice(&(libc::AF_UNIX as u16).to_ne_bytes());
            page[at + PATH..][..path.len()].copy_from_slice(path);
            *slot = Some(Kept { pointer: ADDRESS + at as u64, length: (PATH + path.len() + 1) as u64 });
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = std::fs::File::from(rustix::fs::memfd_create("addresses", flags)?);
        file.write_all(&page)?;
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE);
        // SAFETY: the mapping is new; `MAP_FIXED_NOREPLACE` does not replace another one.
        let found = unsafe { libc::mmap(ADDRESS as *mut libc::c_void, BYTES, protection, flags, file.as_raw_fd(), 0) };
        if found == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // A kernel before 4.17 ignores the flag and uses the address as a hint.
        if found as u64 != ADDRESS {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        Ok(kept)
    }

    /// Wraps socket addresses without mapping a page.
    #[cfg(test)]
    pub(super) fn of(kept: &[Kept]) -> Self {
        let mut all = Self::default();
        all.0.iter_mut().zip(kept).for_each(|(slot, kept)| *slot = Some(*kept));
        all
    }

    /// Returns the socket addresses.
    pub(super) fn all(self) -> impl Iterator<Item = Kept> {
        self.0.into_iter().flatten()
    }

    /// Returns the stored address that equals the one that a thread passes to `connect`.
    ///
    /// # Safety
    /// `address` is readable for `length` bytes.
    pub(super) unsafe fn find(self, address: u64, length: u64) -> Option<Kept> {
        if address == 0 || !(PATH as u64 + 1..=(PATH + MAX_PATH) as u64).contains(&length) {
            return None;
        }
        // SAFETY: guaranteed by the caller.
        let asked = unsafe { std::slice::from_raw_parts(address as *const u8, length as usize) };
        let (family, path) = asked.split_at(PATH);
        let end = path.iter().position(|byte| *byte == 0).unwrap_or(path.len());
        let is_own = |kept: &Kept| {
            // SAFETY: the page stays mapped, and the path is NUL-terminated.
            let own = unsafe { CStr::from_ptr((kept.pointer as usize + PATH) as *const libc::c_char) };
            path.get(..end) == Some(own.to_bytes())
        };
        if family != (libc::AF_UNIX as u16).to_ne_bytes() {
            return None;
        }
        self.all().find(is_own)
    }
}
