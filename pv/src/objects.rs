//! Page tables that the mediator maintains for a virtual machine.
//!
//! Invariants, which hold for all guest requests:
//! - A directory entry is either empty or refers to a small-page table, a large-page table, or both, in the fields of
//!   the same type. Only [`Tables::set`] writes these entries. Directories are never used as tables, so a chain of
//!   references consists of at most two links.
//! - A table exists as long as a handle, a directory entry, or the address space of an instance block refers to it. A
//!   new table is empty. A removed table is unreadable, and is reported as written.
//! - The total size of all tables is within the limit. The size does not depend on the tables' contents.
//!
//! Each table has an address in *table space*: guest VRAM addresses beyond the end of guest VRAM. A page table walker
//! (`shadow-pt`) therefore reads and walks these tables in the same way as tables in guest VRAM, and validates all of
//! their entries. This crate only checks types, and does not translate entries.

mod contents;
mod saved;
mod slots;

pub use saved::SavedTables;

use crate::abi::Status;
use crate::operation::{Kind, TableId};
use nvspec::addr::{GuestVramAddr, SMALL_PAGE};
use nvspec::mmu::{Pde, SPT_BYTES, TableTarget};
use slots::{Object, SlotId, Slots};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use zerocopy::little_endian::U64;

/// Distance between the addresses of consecutive tables in bytes, which is the size of the largest table.
pub const SLOT_BYTES: u64 = SPT_BYTES;
/// Maximum number of instance blocks bound to directories of these tables. Exceeds the card's number of channels,
/// because instance blocks are bound before they are used.
pub const MAX_BINDINGS: usize = 1024;

/// Error for an address that is not in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no table at this address")]
pub struct NoTable;

/// Numbers and sizes of tables and bindings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of page directories.
    pub directories: u64,
    /// Number of 4 KiB page tables.
    pub small: u64,
    /// Number of 128 KiB page tables.
    pub large: u64,
    /// Total size of all tables in bytes, to which the limit applies.
    pub bytes: u64,
    /// Host memory used for the contents of tables, in bytes.
    pub resident_bytes: u64,
    /// Number of instance blocks that are bound to a directory.
    pub bindings: u64,
}

/// Page tables of a virtual machine.
#[derive(Debug)]
pub struct Tables {
    limit: u64,
    /// Total size of all tables in bytes.
    used: u64,
    slots: Slots,
    handles: HashMap<TableId, SlotId>,
    bindings: HashMap<GuestVramAddr, SlotId>,
}

impl Tables {
    /// Creates an empty set of tables. `base` is the end of guest VRAM. Table space starts at the next multiple of
    /// [`SLOT_BYTES`]. `limit` is the maximum total size of all tables in bytes.
    #[must_use]
    pub fn new(base: GuestVramAddr, limit: u64) -> Self {
        let base = GuestVramAddr(base.0.checked_next_multiple_of(SLOT_BYTES).unwrap_or(u64::MAX));
        Self { limit, used: 0, slots: Slots::new(base), handles: HashMap::new(), bindings: HashMap::new() }
    }

    /// Returns true if `address` is in table space, even if it is not the address of a table.
    #[must_use]
    pub fn contains(&self, address: GuestVramAddr) -> bool {
        address >= self.slots.base()
    }

    /// Creates an empty table.
    ///
    /// # Errors
    /// Returns [`Status::Exists`] if the handle is in use, or [`Status::Limit`] if the limit would be exceeded.
    pub fn create(&mut self, table: TableId, kind: Kind) -> Result<(), Status> {
        let Entry::Vacant(handle) = self.handles.entry(table) else { return Err(Status::Exists) };
        let used = self.used.checked_add(kind.bytes()).filter(|used| *used <= self.limit).ok_or(Status::Limit)?;
        handle.insert(self.slots.insert(kind).ok_or(Status::Limit)?);
        self.used = used;
        Ok(())
    }

    /// Frees a handle. Its table is freed once nothing else refers to it.
    ///
    /// # Errors
    /// Returns [`Status::NoObject`] if the table does not exist.
    pub fn destroy(&mut self, table: TableId) -> Result<(), Status> {
        let slot = self.handles.remove(&table).ok_or(Status::NoObject)?;
        self.release(slot);
        Ok(())
    }

    /// Sets an entry of a directory.
    ///
    /// # Errors
    /// Returns [`Status::NoObject`], [`Status::WrongType`] or [`Status::Range`] if the arguments are invalid. The entry
    /// is then unchanged.
    pub fn set(
        &mut self,
        directory: TableId,
        index: u32,
        small: Option<TableId>,
        large: Option<TableId>,
    ) -> Result<(), Status> {
        let directory = self.of_kind(directory, |kind| kind == Kind::Directory)?;
        let small = small.map(|table| self.of_kind(table, |kind| kind == Kind::Small)).transpose()?;
        let large = large.map(|table| self.of_kind(table, |kind| kind == Kind::Large)).transpose()?;
        let mut pde = Pde::new();
        if let Some(frame) = small.map(|slot| self.frame(slot)).transpose()? {
            pde = pde.with_small_target(TableTarget::Vram).with_small_frame(frame);
        }
        if let Some(frame) = large.map(|slot| self.frame(slot)).transpose()? {
            pde = pde.with_large_target(TableTarget::Vram).with_large_frame(frame);
        }
        let object = self.slots.get(directory).ok_or(Status::NoObject)?;
        let before = object.contents.entry(index).ok_or(Status::Range)?;
        // Add new references before removing previous ones, so that a table in both entries remains referenced.
        for slot in [small, large].into_iter().flatten() {
            self.slots.retain(slot);
        }
        self.slots.write(directory, index, 1, |_| pde.into());
        self.forget_entry(Pde::from(before));
        Ok(())
    }

    /// Writes `count` entries of a table. Each entry is greater than the preceding one by `step`, modulo 2^64.
    ///
    /// # Errors
    /// Returns [`Status::NoObject`], [`Status::WrongType`] or [`Status::Range`] if the arguments are invalid. No entry
    /// is then written.
    pub fn run(&mut self, table: TableId, first: u32, count: u32, entry: u64, step: u64) -> Result<(), Status> {
        self.write(table, first, count, |nth| entry.wrapping_add(step.wrapping_mul(nth.into())))
    }

    /// Writes a list of entries of a table.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn list(&mut self, table: TableId, first: u32, entries: &[U64]) -> Result<(), Status> {
        let count = u32::try_from(entries.len()).map_err(|_| Status::Range)?;
        self.write(table, first, count, |nth| entries.get(nth as usize).map_or(0, |entry| entry.get()))
    }

    /// Clears `count` entries of a table.
    ///
    /// # Errors
    /// See [`Self::run`].
    pub fn zero(&mut self, table: TableId, first: u32, count: u32) -> Result<(), Status> {
        self.write(table, first, count, |_| 0)
    }

    /// Binds the address space of an instance block to a directory, replacing any previous binding.
    ///
    /// # Errors
    /// Returns [`Status::NoObject`] or [`Status::WrongType`] if the directory is invalid, [`Status::Range`] if the
    /// block is outside guest VRAM, or [`Status::Limit`] if [`MAX_BINDINGS`] other blocks are bound.
    pub fn bind(&mut self, directory: TableId, instance: GuestVramAddr) -> Result<(), Status> {
        let slot = self.of_kind(directory, |kind| kind == Kind::Directory)?;
        if self.contains(instance) {
            return Err(Status::Range);
        }
        if self.bindings.len() >= MAX_BINDINGS && !self.bindings.contains_key(&instance) {
            return Err(Status::Limit);
        }
        self.slots.retain(slot);
        if let Some(before) = self.bindings.insert(instance, slot) {
            self.release(before);
        }
        Ok(())
    }

    /// Unbinds the address space of an instance block. The address space then uses the directory in the block. Returns
    /// true if the address space was bound.
    pub fn unbind(&mut self, instance: GuestVramAddr) -> bool {
        let before = self.bindings.remove(&instance);
        if let Some(slot) = before {
            self.release(slot);
        }
        before.is_some()
    }

    /// Returns the table space address of the directory to which an instance block is bound, if any.
    #[must_use]
    pub fn directory_of(&self, instance: GuestVramAddr) -> Option<GuestVramAddr> {
        self.bindings.get(&instance).map(|slot| self.slots.address(*slot))
    }

    /// Returns the table space address of a directory.
    ///
    /// # Errors
    /// Returns [`Status::NoObject`] or [`Status::WrongType`] if there is no such directory.
    pub fn address(&self, directory: TableId) -> Result<GuestVramAddr, Status> {
        Ok(self.slots.address(self.of_kind(directory, |kind| kind == Kind::Directory)?))
    }

    /// Reads table space.
    ///
    /// # Errors
    /// Returns an error if the range is not within a single table. `data` is then unchanged.
    pub fn read(&self, address: GuestVramAddr, data: &mut [u8]) -> Result<(), NoTable> {
        self.slots.read(address, data)
    }

    /// Calls `each` with the address and size in bytes of every table space range that may have changed since the last
    /// call. Ranges are in ascending order, and adjacent 4 KiB pages are merged.
    pub fn take_written(&mut self, each: impl FnMut(GuestVramAddr, u64)) {
        self.slots.take_written(each);
    }

    /// Returns the total size in bytes of tables that can still be created.
    #[must_use]
    pub const fn bytes_left(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }

    /// Removes all tables and bindings.
    pub fn clear(&mut self) {
        self.handles.clear();
        self.bindings.clear();
        self.slots.clear();
        self.used = 0;
    }

    /// Returns the numbers and sizes of tables and bindings.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let mut counts = Counts { bytes: self.used, bindings: self.bindings.len() as u64, ..Counts::default() };
        for object in self.slots.objects() {
            let of_kind = match object.kind {
                Kind::Directory => &mut counts.directories,
                Kind::Small => &mut counts.small,
                Kind::Large => &mut counts.large,
            };
            *of_kind = of_kind.saturating_add(1);
            counts.resident_bytes = counts.resident_bytes.saturating_add(object.contents.resident_bytes());
        }
        counts
    }

    /// Returns the slot of a handle's table if `wanted` returns true for its type.
    fn of_kind(&self, table: TableId, wanted: impl FnOnce(Kind) -> bool) -> Result<SlotId, Status> {
        let slot = *self.handles.get(&table).ok_or(Status::NoObject)?;
        let object = self.slots.get(slot).ok_or(Status::NoObject)?;
        if wanted(object.kind) { Ok(slot) } else { Err(Status::WrongType) }
    }

    /// Returns the frame number of a table, as used in directory entries.
    fn frame(&self, slot: SlotId) -> Result<u32, Status> {
        u32::try_from(self.slots.address(slot).0 / SMALL_PAGE).map_err(|_| Status::Limit)
    }

    fn write(&mut self, table: TableId, first: u32, count: u32, value: impl Fn(u32) -> u64) -> Result<(), Status> {
        let slot = self.of_kind(table, |kind| kind != Kind::Directory)?;
        let entries = self.slots.get(slot).ok_or(Status::NoObject)?.kind.entries();
        let end = first.checked_add(count).ok_or(Status::Range)?;
        if end > entries {
            return Err(Status::Range);
        }
        self.slots.write(slot, first, count, value);
        Ok(())
    }

    /// Removes a reference to a table. Frees the table if no references remain.
    fn release(&mut self, slot: SlotId) {
        let Some(Object { kind, contents, .. }) = self.slots.release(slot) else { return };
        self.used = self.used.saturating_sub(kind.bytes());
        if kind == Kind::Directory {
            for pde in contents.entries() {
                self.forget_entry(Pde::from(pde));
            }
        }
    }

    /// Removes the references of a directory entry. Its tables do not refer to other tables.
    fn forget_entry(&mut self, pde: Pde) {
        let small = (pde.small_target() == TableTarget::Vram).then(|| pde.small_address());
        let large = (pde.large_target() == TableTarget::Vram).then(|| pde.large_address());
        for address in [small, large].into_iter().flatten() {
            let gone = self.slots.at(GuestVramAddr(address)).and_then(|slot| self.slots.release(slot));
            if let Some(object) = gone {
                self.used = self.used.saturating_sub(object.kind.bytes());
            }
        }
    }
}

#[cfg(test)]
mod holes;
