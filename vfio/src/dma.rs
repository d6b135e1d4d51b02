//! Host memory that a card may access, with a record of each mapping.

use std::collections::BTreeMap;
use std::ops::Range;

use card::{DmaError, DmaMemory};
use nvspec::addr::BUS_BITS;
use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit};

use crate::kernel::{IommuInfo, Kernel};

/// Size in bytes of the smallest mappable page.
pub const PAGE: u64 = 4096;

/// The mappings of a card. A mapping's memory stays allocated until the kernel has removed the mapping.
pub struct Mappings {
    /// I/O addresses that the IOMMU can map and that the card can generate.
    usable: Vec<Range<u64>>,
    /// Mapped ranges, by start address. Do not hold this lock while the kernel pins pages. Pinning takes time
    /// proportional to the number of pages, and other threads must be able to map memory during that time.
    mapped: Mutex<BTreeMap<u64, Mapping>>,
}

/// An I/O address range in use, keyed by its start.
struct Mapping {
    len: u64,
    /// The mapped memory, or `None` while the kernel is mapping or unmapping it.
    memory: Option<DmaMemory>,
}

impl Mappings {
    /// Creates an empty set of mappings for an IOMMU with the capabilities `info`.
    pub fn new(info: &IommuInfo) -> Self {
        let reach = 1 << BUS_BITS;
        let clipped = |range: &Range<u64>| range.start.min(reach)..range.end.min(reach);
        let mut usable: Vec<_> = info.usable.iter().map(clipped).collect();
        if usable.is_empty() {
            // The kernel does not report the ranges, so assume that all addresses are mappable.
            usable.push(0..reach);
        }
        usable.retain(|range| !range.is_empty());
        usable.sort_unstable_by_key(|range| range.start);
        Self { usable, mapped: Mutex::default() }
    }

    /// Returns the mappable I/O addresses.
    pub fn usable(&self) -> &[Range<u64>] {
        &self.usable
    }

    /// Returns the I/O addresses that the card can generate but the IOMMU cannot map.
    pub fn unmappable(&self) -> Vec<Range<u64>> {
        let starts = self.usable.iter().map(|range| range.start).chain([1 << BUS_BITS]);
        let ends = std::iter::once(0).chain(self.usable.iter().map(|range| range.end));
        ends.zip(starts).map(|(start, end)| start..end).filter(|range| !range.is_empty()).collect()
    }

    /// Maps `memory` for the card at `iova`.
    ///
    /// # Errors
    /// Returns a [`DmaError`] if the memory cannot be mapped.
    pub fn map(&self, kernel: &dyn Kernel, iova: u64, memory: DmaMemory) -> Result<(), DmaError> {
        let len = memory.len() as u64;
        let page = |value: u64| value.is_multiple_of(PAGE);
        if !page(iova) || !page(len) || !page(memory.host_address().addr() as u64) || len == 0 {
            return Err(DmaError::Unaligned { iova, len });
        }
        let end = iova.checked_add(len).filter(|end| *end <= 1 << BUS_BITS);
        let end = end.ok_or(DmaError::OutOfReach { iova, len, bits: BUS_BITS })?;
        if !self.usable.iter().any(|range| range.start <= iova && end <= range.end) {
            return Err(DmaError::Reserved { iova, len });
        }
        // Reject memory that has not been touched, because pinning would allocate all of it.
        if memory.slice(0, memory.len()).is_err() {
            return Err(DmaError::Untouched { iova, len });
        }
        {
            let mut mapped = self.mapped.lock();
            let before = mapped.range(..end).next_back();
            if let Some((&existing, _)) = before.filter(|(start, mapping)| **start + mapping.len > iova) {
                return Err(DmaError::Overlap { iova, len, existing });
            }
            mapped.insert(iova, Mapping { len, memory: None });
        }
        let done = kernel.map(iova, &memory);
        let mut mapped = self.mapped.lock();
        match done {
            Ok(()) => {
                mapped.insert(iova, Mapping { len, memory: Some(memory) });
                Ok(())
            }
            Err(error) => {
                mapped.remove(&iova);
                Err(refusal(error, iova, len, mapped.len()))
            }
        }
    }

    /// Removes a mapping.
    ///
    /// # Errors
    /// Returns an error if no mapping has exactly this range, or if the kernel cannot remove the mapping. The memory
    /// then stays allocated.
    pub fn unmap(&self, kernel: &dyn Kernel, iova: u64, len: u64) -> Result<(), DmaError> {
        let memory = {
            let mut mapped = self.mapped.lock();
            let there = mapped.get_mut(&iova).filter(|mapping| mapping.len == len);
            // A mapping that is being created does not exist yet, and one that is being removed no longer exists.
            there.and_then(|mapping| mapping.memory.take()).ok_or(DmaError::NotMapped { iova, len })?
        };
        let refused = match kernel.unmap(iova, len) {
            Ok(gone) if gone == len => None,
            Ok(gone) => {
                let what = format!("the kernel unmapped {gone:#x} bytes of the {len:#x} at I/O address {iova:#x}");
                Some(std::io::Error::other(what))
            }
            Err(error) => Some(error),
        };
        let mut mapped = self.mapped.lock();
        match refused {
            None => {
                mapped.remove(&iova);
                Ok(())
            }
            Some(error) => {
                mapped.insert(iova, Mapping { len, memory: Some(memory) });
                Err(DmaError::Host(error))
            }
        }
    }

    /// Removes all mappings. If the kernel cannot remove a mapping, its memory stays allocated for the lifetime of the
    /// process.
    pub fn unmap_all(&self, kernel: &dyn Kernel) {
        let all = std::mem::take(&mut *self.mapped.lock());
        for (iova, Mapping { len, memory }) in all {
            if !kernel.unmap(iova, len).is_ok_and(|gone| gone == len) {
                tracing::error!(iova, len, "memory remains mapped for a closed card");
                std::mem::forget(memory);
            }
        }
    }
}

/// Converts a kernel error, for a card with `mappings` existing mappings.
fn refusal(error: std::io::Error, iova: u64, len: u64, mappings: usize) -> DmaError {
    match error.raw_os_error() {
        Some(libc::EEXIST) => DmaError::Overlap { iova, len, existing: iova },
        Some(libc::ENOSPC) => DmaError::Exhausted { iova, len, mappings },
        Some(libc::ENOMEM) => match getrlimit(Resource::Memlock).current {
            Some(limit) => DmaError::MemoryLock { iova, len, limit },
            None => DmaError::Host(error),
        },
        _ => DmaError::Host(error),
    }
}
