//! A mapping of client memory: a file, or pages that a hypervisor lends.
#![expect(unsafe_code, reason = "maps memory and hands out volatile slices of it")]
// UNSAFETY: maps and unmaps a client's file, and creates slices of the mapping. The rest of this module is safe.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use thiserror::Error;
use vm_memory::{VolatileMemory, VolatileSlice, volatile_memory};

use super::sigbus;
use super::touched::{FirstTouches, Looked};
use crate::wake::Wake;

/// `f_type` of tmpfs, which also backs memfds and `/dev/shm`.
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// `f_type` of hugetlbfs, which also backs huge-page memfds.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Reasons for rejecting a region's file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "the messages document the variants")]
pub enum MapFileError {
    #[error("cannot read the file's properties: {0}")]
    Stat(Errno),
    #[error("not a regular file; use a memfd, or a file in /dev/shm or on hugetlbfs")]
    NotRegular,
    #[error("file system type {0:#x} can block the device; use a memfd, or a file in /dev/shm or on hugetlbfs")]
    FileSystem(u64),
    #[error("the file has {file_size:#x} bytes, but the region needs {size:#x} bytes at {offset:#x}")]
    TooShort { file_size: u64, offset: u64, size: u64 },
    #[error("the file offset {offset:#x} and size {size:#x} are too large for this host")]
    TooLarge { offset: u64, size: u64 },
    #[error("mmap failed: {0}")]
    Mmap(Errno),
}

/// The file of one or more mappings. All regions of a file share one descriptor.
#[derive(Debug)]
pub(super) struct Backing {
    pub(super) fd: OwnedFd,
    device: u64,
    inode: u64,
    /// Set if the client cannot truncate the file.
    sealed: bool,
    /// A [`Sharing`] as a number.
    sharing: AtomicU8,
}

/// Pages mapped into this process without a file.
///
/// # Safety
/// The memory at [`Self::base`] is page-aligned, is [`Self::len`] bytes long, stays mapped, readable and writable until
/// the value is dropped, and is accessed only with volatile operations.
pub unsafe trait LentPages: Send + Sync + std::fmt::Debug {
    /// Returns the start of the memory.
    fn base(&self) -> *mut u8;

    /// Returns the size in bytes, a multiple of the page size.
    fn len(&self) -> usize;

    /// Always false: a mapping has at least one page.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The source of a mapping's memory.
#[derive(Debug)]
pub(super) enum Source {
    File {
        backing: Arc<Backing>,
        looked: Looked,
    },
    /// Lent pages, which are unmapped on drop.
    Lent(#[expect(dead_code, reason = "held until the mapping is dropped")] Box<dyn LentPages>),
}

/// Kind of mapping that the client has of a file: shared memory, or a private copy (`share=off`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Not determined yet.
    Unknown,
    /// The client and the device access the same bytes.
    Shared,
    /// The client's memory is elsewhere, and the file contains only zeros.
    Private,
}

/// Mapped, shared client memory. Accesses never fail: if the client truncates the file, or the host cannot load a page,
/// anonymous zero pages replace the whole mapping, and [`Mapping::is_withdrawn`] returns true.
#[derive(Debug)]
pub struct Mapping {
    /// Start of the mapping.
    pub(super) base: *mut u8,
    /// Number of mapped bytes, a multiple of the file's page size.
    pub(super) mapped: usize,
    /// Offset of the region's first byte in the mapping.
    pub(super) skip: usize,
    /// Size of the region in bytes.
    pub(super) len: usize,
    /// Offset of the region's first byte in the file.
    pub(super) offset: u64,
    pub(super) writable: bool,
    // Dropped first, so that this process no longer repairs faults in the range.
    pub(super) guard: sigbus::Guard,
    pub(super) source: Source,
}

/// Part of a client's file to map.
#[derive(Debug)]
pub struct ClientFile {
    /// Descriptor of the file.
    pub fd: OwnedFd,
    /// Offset of the part in the file, in bytes.
    pub offset: u64,
    /// Size of the part in bytes.
    pub size: u64,
    /// True to map the part as writable.
    pub writable: bool,
    /// Counter of pages that this process is the first to touch.
    pub touches: Arc<FirstTouches>,
}

// SAFETY: this value owns the memory behind the pointer until it is dropped, and uses it only through volatile
// accesses, which are valid on any thread.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`. No method writes a field through a shared reference.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps part of a client's file. `known` are mappings that may use the same file.
    pub fn new<'a>(
        file: ClientFile,
        any_file_system: bool,
        known: impl Iterator<Item = &'a Mapping>,
        wake: &Arc<Wake>,
    ) -> Result<Self, MapFileError> {
        let ClientFile { fd, offset, size, writable, touches } = file;
        let stat = rustix::fs::fstat(&fd).map_err(MapFileError::Stat)?;
        if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::RegularFile {
            return Err(MapFileError::NotRegular);
        }
        let statfs = rustix::fs::fstatfs(&fd).map_err(MapFileError::Stat)?;
        // The field's type depends on the architecture, but its value is a 32-bit number.
        let kind = u64::try_from(statfs.f_type).unwrap_or(u64::MAX) & 0xffff_ffff;
        if !any_file_system && kind != TMPFS_MAGIC && kind != HUGETLBFS_MAGIC {
            return Err(MapFileError::FileSystem(kind));
        }
        let file_size = u64::try_from(stat.st_size).unwrap_or(0);
        if offset.checked_add(size).is_none_or(|end| end > file_size) {
            return Err(MapFileError::TooShort { file_size, offset, size });
        }
        // Map whole huge pages, because QEMU splits its memory at smaller boundaries.
        let huge = u64::try_from(statfs.f_bsize).unwrap_or(0);
        let page = if kind == HUGETLBFS_MAGIC && huge.is_power_of_two() { huge } else { super::PAGE_SIZE };
        let too_large = MapFileError::TooLarge { offset, size };
        let start = offset.checked_sub(offset.checked_rem(page).unwrap_or(0)).ok_or(too_large.clone())?;
        let end = offset.saturating_add(size).checked_next_multiple_of(page).ok_or(too_large.clone())?;
        let narrow = |value: u64| usize::try_from(value).map_err(|_| too_large.clone());
        let mapped = narrow(end.saturating_sub(start))?;
        let skip = narrow(offset.saturating_sub(start))?;
        let len = narrow(size)?;

        let backing = known
            .filter_map(Mapping::backing)
            .find(|backing| backing.device == stat.st_dev && backing.inode == stat.st_ino)
            .cloned();
        let backing = backing.unwrap_or_else(|| {
            let sealed = rustix::fs::fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
            Arc::new(Backing { fd, device: stat.st_dev, inode: stat.st_ino, sealed, sharing: AtomicU8::new(0) })
        });
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: the kernel chooses the address of the new mapping, and no other code uses this memory.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                mapped,
                prot,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &backing.fd,
                start,
            )
        };
        let base = base.map_err(MapFileError::Mmap)?.cast::<u8>();
        let guard = sigbus::Guard::new(base.addr(), mapped, writable, Arc::clone(wake));
        let source = Source::File { backing, looked: Looked::new(len, touches) };
        Ok(Self { base, mapped, skip, len, offset, writable, guard, source })
    }

    /// Maps anonymous zero pages in place of part of a client's file that can no longer be mapped. The mapping is
    /// marked as withdrawn from the start.
    pub fn withdrawn(file: ClientFile, wake: &Arc<Wake>) -> Result<Self, MapFileError> {
        let ClientFile { fd, offset, size, writable, touches } = file;
        let stat = rustix::fs::fstat(&fd).map_err(MapFileError::Stat)?;
        let mapped = usize::try_from(size).map_err(|_| MapFileError::TooLarge { offset, size })?;
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses the address of the new mapping, and no other code uses this memory.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), mapped, prot, flags) };
        let base = base.map_err(MapFileError::Mmap)?.cast::<u8>();
        let guard = sigbus::Guard::new(base.addr(), mapped, writable, Arc::clone(wake));
        guard.trip();
        let (device, inode, sharing) = (stat.st_dev, stat.st_ino, AtomicU8::new(0));
        let backing = Arc::new(Backing { fd, device, inode, sealed: false, sharing });
        let source = Source::File { backing, looked: Looked::new(mapped, touches) };
        Ok(Self { base, mapped, skip: 0, len: mapped, offset, writable, guard, source })
    }

    /// Creates a readable and writable mapping of all lent pages.
    pub fn of_lent(pages: Box<dyn LentPages>, wake: &Arc<Wake>) -> Self {
        let (base, len) = (pages.base(), pages.len());
        let guard = sigbus::Guard::new(base.addr(), len, true, Arc::clone(wake));
        Self { base, mapped: len, skip: 0, len, offset: 0, writable: true, guard, source: Source::Lent(pages) }
    }

    /// Maps part of a file, for tests without a client.
    ///
    /// # Errors
    /// Returns an error if the file cannot be mapped at this offset.
    #[cfg(feature = "client")]
    pub fn of_file(fd: OwnedFd, offset: u64, size: u64, wake: &Arc<Wake>) -> Result<Self, MapFileError> {
        let file = ClientFile { fd, offset, size, writable: true, touches: Arc::default() };
        Self::new(file, false, std::iter::empty(), wake)
    }

    /// Returns the file, if any.
    fn backing(&self) -> Option<&Arc<Backing>> {
        match &self.source {
            Source::File { backing, .. } => Some(backing),
            Source::Lent(_) => None,
        }
    }

    /// Returns the identity of the file, if any. All mappings of the same file in one table return the same value.
    pub(super) fn file(&self) -> Option<*const ()> {
        self.backing().map(|backing| Arc::as_ptr(backing).cast())
    }

    /// Returns the size of the region in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: a region has at least one page.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the region's first byte in this process. The memory may change at any time.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.wrapping_add(self.skip)
    }

    /// Returns true if the device may write the memory. Otherwise, a write faults in this process.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Returns true if the memory was withdrawn. The mapping then contains only zeros.
    pub fn is_withdrawn(&self) -> bool {
        self.guard.is_tripped()
    }

    /// Returns true if the client cannot truncate the memory: its file is sealed, or it has no file.
    pub fn is_sealed(&self) -> bool {
        self.backing().is_none_or(|backing| backing.sealed)
    }

    /// Returns the sharing state of this file's memory.
    pub fn sharing(&self) -> Sharing {
        let Some(backing) = self.backing() else { return Sharing::Shared };
        match backing.sharing.load(Ordering::Relaxed) {
            1 => Sharing::Shared,
            2 => Sharing::Private,
            _ => Sharing::Unknown,
        }
    }

    /// Returns true if `len` bytes at `offset` may be accessed. Counts the untouched pages in this range, up to the
    /// operator's limit. Must be called before each access.
    pub fn may_touch(&self, offset: usize, len: usize) -> bool {
        match &self.source {
            Source::File { backing, looked } => looked.may_touch(offset, len, |page| self.data_from(backing, page)),
            // The pages belong to the guest and are already charged to it.
            Source::Lent(_) => true,
        }
    }

    /// Returns the first page at or after `page` that has data in the file, or the highest possible page number if
    /// there is none.
    fn data_from(&self, backing: &Backing, page: usize) -> usize {
        let page_size = super::PAGE_SIZE;
        let start = u64::try_from(page).unwrap_or(u64::MAX).saturating_mul(page_size).saturating_add(self.offset);
        // This call changes the file offset of the client's file, which is otherwise unused. A file system without
        // support for holes reports the whole file as data. Such a file system uses huge pages, which `MemoryMax` does
        // not limit.
        match rustix::fs::seek(&backing.fd, rustix::fs::SeekFrom::Data(start)) {
            Ok(at) => usize::try_from(at.saturating_sub(self.offset) / page_size).unwrap_or(usize::MAX),
            Err(Errno::NXIO) => usize::MAX,
            Err(_) => page,
        }
    }

    /// Stores the sharing state for all regions of this file.
    pub fn set_sharing(&self, sharing: Sharing) {
        let number = match sharing {
            Sharing::Unknown => 0,
            Sharing::Shared => 1,
            Sharing::Private => 2,
        };
        if let Some(backing) = self.backing() {
            backing.sharing.store(number, Ordering::Relaxed);
        }
    }

    /// Reads the file at byte `offset` of the region. Unlike a mapped access, this does not allocate pages of the file.
    pub fn peek(&self, offset: u64, data: &mut [u8]) -> Result<usize, Errno> {
        let backing = self.backing().ok_or(Errno::NOTSUP)?;
        rustix::io::pread(&backing.fd, data, self.offset.saturating_add(offset))
    }

    /// Returns the number of allocated 512-byte blocks of the whole file.
    pub fn blocks(&self) -> Result<u64, Errno> {
        let backing = self.backing().ok_or(Errno::NOTSUP)?;
        rustix::fs::fstat(&backing.fd).map(|stat| u64::try_from(stat.st_blocks).unwrap_or(0))
    }
}

impl VolatileMemory for Mapping {
    type B = ();

    fn len(&self) -> usize {
        self.len
    }

    fn get_slice(&self, offset: usize, count: usize) -> volatile_memory::Result<VolatileSlice<'_, ()>> {
        self.compute_end_offset(offset, count)?;
        // SAFETY: `compute_end_offset` checked the range against `len`, and the memory is mapped as long as `self`
        // exists. The memory is accessed only with volatile operations.
        Ok(unsafe { VolatileSlice::new(self.as_ptr().wrapping_add(offset), count) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Release the guard first. From this point on, this process no longer repairs faults in the range.
        self.guard.release();
        if matches!(self.source, Source::Lent(_)) {
            return;
        }
        // SAFETY: `base` and `mapped` are from `mmap`. Slices borrow `self`, so none are left.
        let result = unsafe { rustix::mm::munmap(self.base.cast(), self.mapped) };
        if let Err(errno) = result {
            tracing::error!(%errno, "cannot unmap a client's memory; its address space is leaked");
        }
    }
}
