//! Table space: slots for tables, and their written pages.

mod saved;

pub(crate) use saved::SavedSlot;

use super::contents::Contents;
use super::{NoTable, SLOT_BYTES};
use crate::operation::Kind;
use nvspec::addr::{BUS_BITS, GuestVramAddr, SMALL_PAGE};

/// A slot for a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SlotId(u32);

/// A table and its reference count.
#[derive(Debug)]
pub(super) struct Object {
    pub(super) kind: Kind,
    /// Number of references to the table, from its handle, directory entries, and instance blocks.
    names: u64,
    pub(super) contents: Contents,
}

#[derive(Debug, Default)]
struct Slot {
    object: Option<Object>,
    /// Bit mask of pages that may have changed since the last report. It is nonzero for an empty slot if the removal of
    /// its table has not been reported.
    written: u64,
}

const _: () = assert!(SLOT_BYTES / SMALL_PAGE <= u64::BITS as u64);

/// All slots. Their number is the largest number of tables that existed at a time, which is bounded by the table limit.
#[derive(Debug)]
pub(super) struct Slots {
    base: GuestVramAddr,
    slots: Vec<Slot>,
    /// Free slots. The last one is used next.
    free: Vec<SlotId>,
    /// Slots with written pages. Contains no duplicates.
    written: Vec<SlotId>,
}

impl Slots {
    /// Creates table space at `base`, which must be a multiple of [`SLOT_BYTES`].
    pub(super) const fn new(base: GuestVramAddr) -> Self {
        Self { base, slots: Vec::new(), free: Vec::new(), written: Vec::new() }
    }

    pub(super) const fn base(&self) -> GuestVramAddr {
        self.base
    }

    pub(super) fn address(&self, slot: SlotId) -> GuestVramAddr {
        self.base.offset(u64::from(slot.0).saturating_mul(SLOT_BYTES))
    }

    /// Returns the slot that contains `address`.
    pub(super) fn at(&self, address: GuestVramAddr) -> Option<SlotId> {
        let slot = address.0.checked_sub(self.base.0)? / SLOT_BYTES;
        u32::try_from(slot).ok().map(SlotId)
    }

    pub(super) fn get(&self, slot: SlotId) -> Option<&Object> {
        self.slots.get(slot.0 as usize)?.object.as_ref()
    }

    pub(super) fn objects(&self) -> impl Iterator<Item = &Object> {
        self.slots.iter().filter_map(|slot| slot.object.as_ref())
    }

    /// Creates an empty table with one reference, in a free slot or a new one. Returns `None` if a new slot's address
    /// does not fit in a directory entry.
    pub(super) fn insert(&mut self, kind: Kind) -> Option<SlotId> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let slot = SlotId(u32::try_from(self.slots.len()).ok()?);
                let end = self.address(slot).checked_add(SLOT_BYTES)?;
                if end.0 > 1 << BUS_BITS {
                    return None;
                }
                self.slots.push(Slot::default());
                slot
            }
        };
        let contents = Contents::new(kind);
        // The slot was unreadable until now, and now reads as zeros.
        self.mark(slot, contents.all_pages());
        self.slots.get_mut(slot.0 as usize)?.object = Some(Object { kind, names: 1, contents });
        Some(slot)
    }

    /// Adds a reference.
    pub(super) fn retain(&mut self, slot: SlotId) {
        if let Some(object) = self.get_mut(slot) {
            object.names = object.names.saturating_add(1);
        }
    }

    /// Removes a reference. If it was the last one, removes and returns the table.
    pub(super) fn release(&mut self, slot: SlotId) -> Option<Object> {
        let object = self.get_mut(slot)?;
        object.names = object.names.saturating_sub(1);
        if object.names != 0 {
            return None;
        }
        let object = self.slots.get_mut(slot.0 as usize)?.object.take()?;
        self.mark(slot, object.contents.all_pages());
        self.free.push(slot);
        Some(object)
    }

    /// Writes entries of a table. Ignores entries beyond the end.
    pub(super) fn write(&mut self, slot: SlotId, first: u32, count: u32, value: impl Fn(u32) -> u64) {
        let Some(object) = self.get_mut(slot) else { return };
        let pages = object.contents.write(first, count, value);
        self.mark(slot, pages);
    }

    pub(super) fn read(&self, address: GuestVramAddr, data: &mut [u8]) -> Result<(), NoTable> {
        let object = self.at(address).and_then(|slot| self.get(slot)).ok_or(NoTable)?;
        let offset = usize::try_from(address.0 % SLOT_BYTES).map_err(|_| NoTable)?;
        if object.contents.read(offset, data) { Ok(()) } else { Err(NoTable) }
    }

    /// Removes all tables.
    pub(super) fn clear(&mut self) {
        self.free.clear();
        // Reuse the lowest slots first.
        for index in (0..u32::try_from(self.slots.len()).unwrap_or(u32::MAX)).rev() {
            let slot = SlotId(index);
            let object = self.slots.get_mut(index as usize).and_then(|slot| slot.object.take());
            if let Some(object) = object {
                self.mark(slot, object.contents.all_pages());
            }
            self.free.push(slot);
        }
    }

    pub(super) fn take_written(&mut self, mut each: impl FnMut(GuestVramAddr, u64)) {
        self.written.sort_unstable();
        // Current range, which may be extended.
        let mut range = (self.base, 0u64);
        for slot in std::mem::take(&mut self.written) {
            let address = self.address(slot);
            let Some(slot) = self.slots.get_mut(slot.0 as usize) else { continue };
            let mut left = std::mem::take(&mut slot.written);
            let mut page = 0u64;
            while left != 0 {
                if left & 1 != 0 {
                    let at = address.offset(page.saturating_mul(SMALL_PAGE));
                    if range.0.offset(range.1) != at {
                        if range.1 != 0 {
                            each(range.0, range.1);
                        }
                        range = (at, 0);
                    }
                    range.1 = range.1.saturating_add(SMALL_PAGE);
                }
                left >>= 1;
                page = page.saturating_add(1);
            }
        }
        if range.1 != 0 {
            each(range.0, range.1);
        }
    }

    fn get_mut(&mut self, slot: SlotId) -> Option<&mut Object> {
        self.slots.get_mut(slot.0 as usize)?.object.as_mut()
    }

    /// Records that pages of a slot may have changed.
    fn mark(&mut self, slot: SlotId, pages: u64) {
        let Some(found) = self.slots.get_mut(slot.0 as usize) else { return };
        if found.written == 0 && pages != 0 {
            self.written.push(slot);
        }
        found.written |= pages;
    }
}
