//! Implements the traits of the rust-vmm crates for client memory.

use vm_memory::guest_memory::{Error, GuestMemorySliceIterator, Result};
use vm_memory::{GuestAddress, GuestMemory, GuestMemoryMmap, Permissions, VolatileSlice};

use super::MemoryTable;

/// The segments of a range, one for each region that it overlaps.
struct Pieces<'a> {
    table: &'a MemoryTable,
    at: u64,
    left: usize,
    access: Permissions,
}

impl<'a> Pieces<'a> {
    fn piece(&self) -> Option<VolatileSlice<'a>> {
        let (region, slice) = self.table.piece(self.at, self.left).ok()?;
        let allowed = match self.access {
            Permissions::No => true,
            Permissions::Read => region.readable,
            Permissions::Write => region.writable,
            Permissions::ReadWrite => region.readable && region.writable,
        };
        allowed.then_some(slice)
    }
}

impl<'a> Iterator for Pieces<'a> {
    type Item = Result<VolatileSlice<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        let Some(slice) = self.piece().filter(|slice| !slice.is_empty()) else {
            self.left = 0;
            return Some(Err(Error::InvalidGuestAddress(GuestAddress(self.at))));
        };
        if matches!(self.access, Permissions::Write | Permissions::ReadWrite) {
            // The thread that serves the client writes immediately, before any reader can take the log.
            self.table.writes.note(self.at, slice.len());
        }
        self.at = self.at.saturating_add(super::len64(slice.len()));
        self.left = self.left.saturating_sub(slice.len());
        Some(Ok(slice))
    }
}

impl std::iter::FusedIterator for Pieces<'_> {}

impl<'a> GuestMemorySliceIterator<'a, ()> for Pieces<'a> {}

/// Excludes memory that is private to the client, was withdrawn, or is not mapped in this process, and memory that this
/// process may not be the first to touch.
impl GuestMemory for MemoryTable {
    type PhysicalMemory = GuestMemoryMmap<()>;
    type Bitmap = ();

    fn check_range(&self, addr: GuestAddress, count: usize, access: Permissions) -> bool {
        Pieces { table: self, at: addr.0, left: count, access }.all(|piece| piece.is_ok())
    }

    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        access: Permissions,
    ) -> Result<impl GuestMemorySliceIterator<'a, ()>> {
        Ok(Pieces { table: self, at: addr.0, left: count, access })
    }
}
