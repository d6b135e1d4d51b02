//! The host memory that the card can access: a table that maps I/O virtual addresses to host memory.
//!
//! Lock order: the table's lock is the innermost. Removing a mapping acquires the write lock, so it returns only after
//! accesses in flight have ended.

use super::BusError;
use card::{DmaError, DmaMemory};
use nvspec::addr::{BUS_BITS, Iova, SMALL_PAGE};
use parking_lot::{RwLock, RwLockReadGuard};
use std::collections::BTreeMap;
use vm_memory::VolatileSlice;

/// The table of host memory mappings. Its ranges consist of 4 KiB pages below 2^40, and do not overlap.
#[derive(Debug, Default)]
pub struct Sysmem {
    /// Host memory, by I/O virtual start address.
    table: RwLock<BTreeMap<u64, DmaMemory>>,
}

impl Sysmem {
    /// Creates an empty table.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Maps `memory` for the card at `iova`.
    ///
    /// # Errors
    /// Returns [`DmaError::Unaligned`], [`DmaError::OutOfReach`] or [`DmaError::Overlap`] if the range is rejected. The
    /// table is then unchanged.
    pub fn map(&self, iova: Iova, memory: DmaMemory) -> Result<(), DmaError> {
        let (iova, len) = (iova.0, memory.len() as u64);
        if len == 0 || !iova.is_multiple_of(SMALL_PAGE) || !len.is_multiple_of(SMALL_PAGE) {
            return Err(DmaError::Unaligned { iova, len });
        }
        let end = iova.checked_add(len).filter(|end| *end <= 1 << BUS_BITS).ok_or(DmaError::OutOfReach {
            iova,
            len,
            bits: BUS_BITS,
        })?;
        let mut table = self.table.write();
        if let Some((existing, other)) = table.range(..end).next_back()
            && existing + other.len() as u64 > iova
        {
            return Err(DmaError::Overlap { iova, len, existing: *existing });
        }
        table.insert(iova, memory);
        Ok(())
    }

    /// Removes the mapping with exactly this range. On return, no access to the memory is in flight, and none can
    /// start.
    ///
    /// # Errors
    /// Returns [`DmaError::NotMapped`] if no mapping has exactly this range.
    pub fn unmap(&self, iova: Iova, len: u64) -> Result<(), DmaError> {
        let mut table = self.table.write();
        match table.get(&iova.0) {
            Some(memory) if memory.len() as u64 == len => {
                table.remove(&iova.0);
                Ok(())
            }
            _ => Err(DmaError::NotMapped { iova: iova.0, len }),
        }
    }

    /// Returns true if the card may write at this address.
    #[must_use]
    pub fn is_writable(&self, iova: Iova) -> bool {
        self.view().piece(iova, 1, true).is_ok()
    }

    /// Returns the number of mappings.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.read().len()
    }

    /// Returns true if the table has no mappings.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true if a reader could acquire the lock immediately, because no writer holds it or waits for it.
    #[cfg(test)]
    pub(super) fn is_free(&self) -> bool {
        self.table.try_read().is_some()
    }

    /// Locks the table, so that no mapping can be removed until the view is dropped.
    #[must_use]
    pub fn view(&self) -> SysmemView<'_> {
        SysmemView { table: self.table.read() }
    }
}

/// The table, locked for reading.
#[derive(Debug)]
pub struct SysmemView<'a> {
    table: RwLockReadGuard<'a, BTreeMap<u64, DmaMemory>>,
}

impl SysmemView<'_> {
    /// Returns the longest slice that starts at `iova`, is within one mapping, and is at most `len` bytes long.
    pub(super) fn piece(&self, iova: Iova, len: u64, write: bool) -> Result<VolatileSlice<'_, ()>, BusError> {
        let unmapped = BusError::Unmapped { iova };
        let (start, memory) = self.table.range(..=iova.0).next_back().ok_or(unmapped)?;
        let offset = iova.0 - start;
        let rest = (memory.len() as u64).checked_sub(offset).filter(|rest| *rest > 0).ok_or(unmapped)?;
        if write && !memory.writable() {
            return Err(BusError::ReadOnly { iova });
        }
        // Neither value exceeds the mapping size, so both fit in `usize`.
        memory.slice(offset as usize, rest.min(len) as usize).map_err(|_| unmapped)
    }
}
