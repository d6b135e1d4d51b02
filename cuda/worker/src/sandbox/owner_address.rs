//! The owner's address for `connect`, in a page that nothing can change.
//!
//! A filter of system calls sees pointers, and not their memory. So the only address that a worker may connect to is in
//! a page of its own: the lowest that a process may map, of a sealed file. The filter allows `connect` with the pointer
//! to this page only, and no call that would map, unmap, move or unprotect memory below the page's end ([`LIMIT`]).
//! No mapping reaches over the page from below, because the kernel refuses lower ones.
//!
//! UNSAFETY: maps the page and reads it.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::CStr;
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, absolute};

use rustix::fs::{MemfdFlags, SealFlags};

/// Address of the page: the lowest that systems allow (`vm.mmap_min_addr`).
pub(super) const ADDRESS: u64 = 0x1_0000;
/// End of the page.
pub(super) const LIMIT: u64 = ADDRESS + BYTES as u64;
/// Size of the page.
const BYTES: usize = 4096;
/// Offset of the path in `sockaddr_un`.
const PATH: usize = 2;
/// Size of the path in `sockaddr_un`, with the zero at its end.
const MAX_PATH: usize = 108;

/// The page.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnerAddress {
    /// Length of the address.
    pub(super) length: u64,
}

impl OwnerAddress {
    /// Maps the page with the address of the socket at `path`.
    pub(super) fn keep(path: &Path) -> io::Result<Self> {
        let path = absolute(path)?;
        let path = path.as_os_str().as_bytes();
        if path.len() >= MAX_PATH || path.contains(&0) {
            return Err(io::ErrorKind::InvalidFilename.into());
        }
        let mut page = vec![0; BYTES];
        page[..PATH].copy_from_slice(&(libc::AF_UNIX as u16).to_ne_bytes());
        page[PATH..PATH + path.len()].copy_from_slice(path);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = std::fs::File::from(rustix::fs::memfd_create("owner-address", flags)?);
        file.write_all(&page)?;
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE);
        // SAFETY: a new mapping; `MAP_FIXED_NOREPLACE` replaces none.
        let found = unsafe { libc::mmap(ADDRESS as *mut libc::c_void, BYTES, protection, flags, file.as_raw_fd(), 0) };
        if found == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // A kernel before 4.17 does not know the flag, and takes the address as a hint.
        if found as u64 != ADDRESS {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        Ok(Self { length: (PATH + path.len() + 1) as u64 })
    }

    /// Returns true if an address that a thread passes to `connect` is this one.
    ///
    /// # Safety
    /// `address` is readable for `length` bytes.
    pub(super) unsafe fn is(self, address: u64, length: u64) -> bool {
        if address == 0 || !(PATH as u64 + 1..=(PATH + MAX_PATH) as u64).contains(&length) {
            return false;
        }
        // SAFETY: the caller's promise.
        let asked = unsafe { std::slice::from_raw_parts(address as *const u8, length as usize) };
        // SAFETY: the page is mapped for good, and contains a zero after the path.
        let own = unsafe { CStr::from_ptr((ADDRESS as usize + PATH) as *const libc::c_char) };
        let (family, path) = asked.split_at(PATH);
        let end = path.iter().position(|byte| *byte == 0).unwrap_or(path.len());
        family == (libc::AF_UNIX as u16).to_ne_bytes() && path.get(..end) == Some(own.to_bytes())
    }
}
