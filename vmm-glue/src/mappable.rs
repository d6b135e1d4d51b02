//! Parts of a region that a client can map and access without messages.
//!
//! A [`Mappable`] consists of a file (a memfd) and the areas of a region that it backs. File offsets equal region
//! offsets. The reply to `DEVICE_GET_REGION_INFO` always lists the areas in a sparse-mmap capability, even if one area
//! is the whole region, because QEMU (at least up to 11.1) maps nothing without the capability. The reply carries the
//! file's descriptor only with the capability, that is, if the reply fits (`argsz`) and the client accepts descriptors.
//! The kernel creates the client's copy of the descriptor when the reply is sent. This process does not duplicate it.
//!
//! Requirements for a device:
//! - The areas only tell an honest client which parts are mappable. The descriptor gives access to the whole file, so
//!   the file must not contain data that the client may not read. Unless it is sealed against writing, the file must
//!   also not contain data that the client may not write.
//! - A mapping cannot be revoked, not even from a disconnected client. Each client therefore needs a new file:
//!   [`crate::Device::regions`] is called once per client.
//! - Data in these areas can change at any time, so copy it first, then validate and use the copy.
//! - The client can also access a mapped area through messages, which the device must handle.
//! - QEMU, at least up to 11.1, stops posting writes to the whole device as soon as one region has a mappable area.
//!
//! The file is sealed. Otherwise, the client could truncate it (`SIGBUS` at the device's next access), grow it at the
//! host's expense, or seal it against the device.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{FileType, MemfdFlags, SealFlags};
use rustix::io::Errno;
use thiserror::Error;

use vmm_memory::memory::PAGE_SIZE;

/// Maximum number of areas per region.
pub const MAX_AREAS: usize = 64;

/// Seals required on every file.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A part of a region that a client may map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmapArea {
    /// Offset in the region and in the file in bytes, a multiple of the file's page size.
    pub offset: u64,
    /// Size in bytes, a nonzero multiple of the file's page size.
    pub size: u64,
}

/// Reasons why part of a region cannot be offered to clients.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "the messages document the variants")]
pub enum MappableError {
    #[error("{0} areas; a region must have 1 to {MAX_AREAS}")]
    Count(usize),
    #[error("the area at {offset:#x} of {size:#x} bytes is not a whole number of {page:#x}-byte pages")]
    Unaligned { offset: u64, size: u64, page: u64 },
    #[error("the area at {offset:#x} starts before {least:#x}, the end of the previous area")]
    Order { offset: u64, least: u64 },
    #[error("the area at {offset:#x} of {size:#x} bytes is not inside the region's {region:#x} bytes")]
    Outside { offset: u64, size: u64, region: u64 },
    #[error("cannot read the file's properties: {0}")]
    Stat(Errno),
    #[error("not a regular file; a memfd is required")]
    NotRegular,
    #[error("the areas extend to {end:#x}, beyond the file's {file:#x} bytes")]
    TooShort { file: u64, end: u64 },
    #[error("the file lacks the seals {missing:?}; a client could modify it under the device")]
    NotSealed { missing: SealFlags },
    #[error("the region is read-only but the file is writable; seal the file against writing (F_SEAL_FUTURE_WRITE)")]
    Writable,
}

/// A file and the validated areas of a region that it backs.
#[derive(Clone, Debug)]
pub struct Mappable {
    file: Arc<OwnedFd>,
    areas: Vec<MmapArea>,
}

impl Mappable {
    /// Validates `areas` against `file` and a region of `region` bytes. `writable` is true if clients may write the
    /// region.
    pub(crate) fn new(
        file: Arc<OwnedFd>,
        areas: Vec<MmapArea>,
        region: u64,
        writable: bool,
    ) -> Result<Self, MappableError> {
        if areas.is_empty() || areas.len() > MAX_AREAS {
            return Err(MappableError::Count(areas.len()));
        }
        let stat = rustix::fs::fstat(&file).map_err(MappableError::Stat)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(MappableError::NotRegular);
        }
        let seals = rustix::fs::fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        let missing = SEALS.difference(seals);
        if !missing.is_empty() {
            return Err(MappableError::NotSealed { missing });
        }
        if !writable && !seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
            return Err(MappableError::Writable);
        }
        // Sealable files are on tmpfs or hugetlbfs, which report the page size as the block size.
        let statfs = rustix::fs::fstatfs(&file).map_err(MappableError::Stat)?;
        let page = u64::try_from(statfs.f_bsize).unwrap_or(0).max(PAGE_SIZE);
        let mut end = 0u64;
        for &MmapArea { offset, size } in &areas {
            if size == 0 || !offset.is_multiple_of(page) || !size.is_multiple_of(page) {
                return Err(MappableError::Unaligned { offset, size, page });
            }
            if offset < end {
                return Err(MappableError::Order { offset, least: end });
            }
            end = match offset.checked_add(size) {
                Some(end) if end <= region => end,
                _ => return Err(MappableError::Outside { offset, size, region }),
            };
        }
        let file_size = u64::try_from(stat.st_size).unwrap_or(0);
        if end > file_size {
            return Err(MappableError::TooShort { file: file_size, end });
        }
        Ok(Self { file, areas })
    }

    /// Returns the file. Clients receive a descriptor of it.
    pub fn file(&self) -> &Arc<OwnedFd> {
        &self.file
    }

    /// Returns the 1 to [`MAX_AREAS`] areas, in ascending order and without overlaps.
    pub fn areas(&self) -> &[MmapArea] {
        &self.areas
    }
}

/// Creates a zeroed memfd of `size` bytes for [`crate::RegionInfo::with_mappable`]. The file appears as `name` in
/// `/proc`.
pub fn region_memory(name: &str, size: u64) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, size)?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    const REGION_BYTES: u64 = 0x8000;

    fn area(offset: u64, size: u64) -> MmapArea {
        MmapArea { offset, size }
    }

    /// Offers `areas` of a `REGION_BYTES` region with a file of the same size.
    fn offer(areas: &[MmapArea]) -> Result<Mappable, MappableError> {
        Mappable::new(Arc::new(region_memory("test", REGION_BYTES).unwrap()), areas.to_vec(), REGION_BYTES, true)
    }

    fn refused(areas: &[MmapArea]) -> MappableError {
        offer(areas).unwrap_err()
    }

    #[test]
    fn whole_pages_in_order_are_taken() {
        assert_eq!(offer(&[area(0, REGION_BYTES)]).unwrap().areas(), [area(0, REGION_BYTES)]);
        let touching = [area(0, 0x1000), area(0x1000, 0x1000), area(0x7000, 0x1000)];
        assert_eq!(offer(&touching).unwrap().areas(), touching);
    }

    #[test]
    fn number_of_areas_is_bounded() {
        assert_eq!(refused(&[]), MappableError::Count(0));
        let file = Arc::new(region_memory("test", 0x10_0000).unwrap());
        let areas = |count: usize| (0u64..).take(count).map(|page| area(page * 0x1000, 0x1000)).collect::<Vec<_>>();
        let offer = |count| Mappable::new(file.clone(), areas(count), 0x10_0000, true);
        assert_eq!(offer(MAX_AREAS).unwrap().areas().len(), MAX_AREAS);
        assert_eq!(offer(MAX_AREAS + 1).unwrap_err(), MappableError::Count(MAX_AREAS + 1));
    }

    #[test]
    fn parts_of_pages_are_refused() {
        for (offset, size) in [(0, 0), (0, 0x800), (0, 0x1001), (0x10, 0x1000), (0xfff, 0x1001)] {
            assert_eq!(refused(&[area(offset, size)]), MappableError::Unaligned { offset, size, page: 0x1000 });
        }
    }

    #[test]
    fn disorder_and_overlap_are_refused() {
        let order = |offset, least| MappableError::Order { offset, least };
        assert_eq!(refused(&[area(0x2000, 0x1000), area(0, 0x1000)]), order(0, 0x3000));
        assert_eq!(refused(&[area(0, 0x2000), area(0x1000, 0x2000)]), order(0x1000, 0x2000));
        assert_eq!(refused(&[area(0, 0x1000), area(0, 0x1000)]), order(0, 0x1000));
    }

    #[test]
    fn areas_outside_of_the_region_are_refused() {
        let last = u64::MAX - 0xfff;
        for (offset, size) in
            [(0, REGION_BYTES + 0x1000), (REGION_BYTES, 0x1000), (0x1000, REGION_BYTES), (last, 0x1000), (0x1000, last)]
        {
            assert_eq!(refused(&[area(offset, size)]), MappableError::Outside { offset, size, region: REGION_BYTES });
        }
    }

    #[test]
    fn file_must_reach_to_the_end_of_the_last_area() {
        let file = Arc::new(region_memory("test", 0x3000).unwrap());
        let offer = |areas: &[MmapArea]| Mappable::new(file.clone(), areas.to_vec(), REGION_BYTES, true);
        offer(&[area(0x2000, 0x1000)]).expect("the rest of the region needs no file");
        let short = MappableError::TooShort { file: 0x3000, end: 0x4000 };
        assert_eq!(offer(&[area(0, 0x1000), area(0x3000, 0x1000)]).unwrap_err(), short);
    }

    #[test]
    fn file_that_a_client_could_change_is_refused() {
        let offer =
            |file: OwnedFd| Mappable::new(Arc::new(file), vec![area(0, 0x1000)], REGION_BYTES, true).unwrap_err();
        let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, REGION_BYTES).unwrap();
        assert_eq!(offer(file.try_clone().unwrap()), MappableError::NotSealed { missing: SEALS });
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        assert_eq!(offer(file), MappableError::NotSealed { missing: SealFlags::SEAL });
        let on_disk = tempfile::tempfile().unwrap();
        on_disk.set_len(REGION_BYTES).unwrap();
        assert_eq!(offer(on_disk.into()), MappableError::NotSealed { missing: SEALS });
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(offer(pipe), MappableError::NotRegular);
    }

    #[test]
    fn read_only_region_needs_a_read_only_file() {
        let offer = |file: OwnedFd| Mappable::new(Arc::new(file), vec![area(0, REGION_BYTES)], REGION_BYTES, false);
        assert_eq!(offer(region_memory("test", REGION_BYTES).unwrap()).unwrap_err(), MappableError::Writable);
        let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, REGION_BYTES).unwrap();
        fcntl_add_seals(&file, SEALS | SealFlags::FUTURE_WRITE).unwrap();
        offer(file).unwrap();
    }

    #[test]
    fn memory_of_a_region_cannot_be_resized() {
        let file = region_memory("test", REGION_BYTES).unwrap();
        assert_eq!(ftruncate(&file, 0), Err(Errno::PERM));
        assert_eq!(ftruncate(&file, REGION_BYTES * 2), Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(&file, SealFlags::FUTURE_WRITE), Err(Errno::PERM));
    }
}
