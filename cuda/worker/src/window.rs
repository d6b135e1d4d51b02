//! The window shared by the guest and the worker, and its blobs.
//!
//! UNSAFETY: maps the whole window once, and parts of it again at the addresses of pinned memory.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

use cuda_ring::{ADDRESSES, BlobKind, PINNED_ADDRESSES, Shared};

/// Maximum number of a program's blobs.
const MAX_BLOBS: usize = 4096;

/// Reason why a window cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WindowError {
    /// The file cannot be queried or mapped.
    #[error("cannot map the window: {0}")]
    Map(#[from] io::Error),
    /// A blob does not fit its kind or the window, has an unknown kind, or differs from an earlier blob with its
    /// identifier.
    #[error("blob {0} does not fit its kind or the window")]
    Blob(u32),
    /// The program has too many blobs.
    #[error("the program has more than {MAX_BLOBS} blobs")]
    TooMany,
}

/// A blob in the window.
#[derive(Clone, Copy, Debug)]
pub struct Blob {
    /// Kind of the blob.
    pub kind: BlobKind,
    /// Serial number, which distinguishes uses of the same identifier.
    pub serial: u32,
    /// Offset in the window, in bytes.
    pub offset: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Address where the blob is mapped for the card, if the guest has pinned it.
    pub pinned: Option<u64>,
}

/// The mapped window and its blobs.
#[derive(Debug)]
pub struct Window {
    descriptor: OwnedFd,
    base: u64,
    bytes: u64,
    blobs: BTreeMap<u32, Blob>,
}

impl Window {
    /// Maps a whole window. The file must never shrink.
    ///
    /// # Errors
    /// Returns an error if the file cannot be mapped.
    pub fn map(descriptor: OwnedFd) -> Result<Self, WindowError> {
        let bytes = rustix::fs::fstat(&descriptor).map_err(io::Error::from)?.st_size.cast_unsigned();
        // SAFETY: the mapping is new, and the kernel chooses its address.
        let base = unsafe { map(None, bytes, &descriptor, 0)? };
        Ok(Self { descriptor, base, bytes, blobs: BTreeMap::new() })
    }

    /// Records a blob with its offset and size. Has no effect if the blob is already recorded.
    ///
    /// # Errors
    /// Returns an error if the kind is unknown, if the blob does not fit its kind or the window, if it differs from an
    /// earlier blob with its identifier, or if the program has too many blobs.
    pub fn add(&mut self, id: u32, kind: u32, serial: u32, (offset, bytes): (u64, u64)) -> Result<(), WindowError> {
        let kind = BlobKind::from_number(kind).ok_or(WindowError::Blob(id))?;
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes)
            && offset.is_multiple_of(4096)
            && bytes > 0
            && bytes.is_multiple_of(4096)
            && kind.bytes().is_none_or(|right| bytes >= right);
        if let Some(known) = self.blobs.get(&id) {
            let same = (known.kind, known.serial, known.offset, known.bytes) == (kind, serial, offset, bytes);
            return if same { Ok(()) } else { Err(WindowError::Blob(id)) };
        }
        if !fits {
            return Err(WindowError::Blob(id));
        }
        if self.blobs.len() >= MAX_BLOBS {
            return Err(WindowError::TooMany);
        }
        self.blobs.insert(id, Blob { kind, serial, offset, bytes, pinned: None });
        Ok(())
    }

    /// Returns the blob with this identifier.
    pub fn blob(&self, id: u32) -> Option<Blob> {
        self.blobs.get(&id).copied()
    }

    /// Returns all blobs with their identifiers.
    pub fn blobs(&self) -> impl Iterator<Item = (u32, Blob)> {
        self.blobs.iter().map(|(id, blob)| (*id, *blob))
    }

    /// Returns the window's file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Returns the file offset and the size of each pinned blob, in bytes.
    pub fn pinned(&self) -> Vec<(u64, u64)> {
        let pinned = self.blobs.values().filter(|blob| blob.pinned.is_some());
        pinned.map(|blob| (blob.offset, blob.bytes)).collect()
    }

    /// Removes a blob. The blob must not be mapped for the card.
    pub fn remove(&mut self, id: u32) {
        self.blobs.remove(&id);
    }

    /// Returns the memory of the blob of the given kind that has the lowest identifier.
    pub fn first(&self, kind: BlobKind) -> Option<Shared> {
        let blob = self.blobs.values().find(|blob| blob.kind == kind)?;
        // SAFETY: the range was checked, and the window stays mapped until the process exits.
        Some(unsafe { Shared::new(self.base + blob.offset, blob.bytes) })
    }

    /// Unmaps the window.
    ///
    /// # Safety
    /// Values returned by [`Self::first`] must not be used afterwards.
    #[cfg(any(test, feature = "fuzz"))]
    pub unsafe fn unmap(&mut self) {
        let ids: Vec<u32> = self.blobs.keys().copied().collect();
        ids.into_iter().for_each(|id| self.unpin(id));
        // SAFETY: guaranteed by the caller; the mapping was created by `map`.
        unsafe { libc::munmap(self.base as *mut libc::c_void, self.bytes as usize) };
    }

    /// Returns a blob's address in the mapping of the whole window.
    pub fn address(&self, blob: &Blob) -> u64 {
        self.base + blob.offset
    }

    /// Maps a pinned blob at the guest's address. Returns false if the blob cannot be pinned, or if the address is
    /// misaligned, in use, or outside the range for pinned memory.
    pub fn pin(&mut self, id: u32, address: u64) -> bool {
        let Some(blob) = self.blobs.get_mut(&id) else { return false };
        let end = address.checked_add(blob.bytes);
        let fits =
            address >= PINNED_ADDRESSES && address.is_multiple_of(4096) && end.is_some_and(|end| end <= ADDRESSES.end);
        if !fits || blob.kind != BlobKind::Pinned || blob.pinned.is_some() {
            return false;
        }
        // SAFETY: the kernel rejects an address that is already in use.
        let mapped = unsafe { map(Some(address), blob.bytes, &self.descriptor, blob.offset) };
        blob.pinned = mapped.is_ok().then_some(address);
        mapped.is_ok()
    }

    /// Reverts [`Self::pin`]. The card must no longer use the memory.
    pub fn unpin(&mut self, id: u32) {
        let Some(blob) = self.blobs.get_mut(&id) else { return };
        if let Some(address) = blob.pinned.take() {
            // SAFETY: the mapping was created by `pin`, and no other code uses it.
            unsafe { libc::munmap(address as *mut libc::c_void, blob.bytes as usize) };
        }
    }
}

/// Maps a part of the window.
///
/// # Safety
/// The mapping never replaces another one: the kernel chooses the address, or rejects one that is already in use.
unsafe fn map(address: Option<u64>, bytes: u64, descriptor: &OwnedFd, offset: u64) -> io::Result<u64> {
    let fixed = if address.is_some() { libc::MAP_FIXED_NOREPLACE } else { 0 };
    // SAFETY: guaranteed by the caller.
    let found = unsafe {
        libc::mmap(
            address.unwrap_or(0) as *mut libc::c_void,
            bytes as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_NORESERVE | fixed,
            descriptor.as_raw_fd(),
            offset.cast_signed(),
        )
    };
    if found == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(found as u64) }
}
