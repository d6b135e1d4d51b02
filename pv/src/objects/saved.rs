//! Saved form of a guest's page tables. A table's reference count is derived from the objects that refer to it.

use super::contents::{Contents, SavedPage};
use super::slots::{Object, SavedSlot, SlotId, Slots};
use super::{MAX_BINDINGS, Tables};
use crate::operation::{Kind, TableId};
use nvspec::addr::{GuestVramAddr, SMALL_PAGE};
use nvspec::mmu::{Pde, TableTarget};
use saved_state::{Invalid, ascend, first_version};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Saved form of a virtual machine's page tables.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedTables {
    pub(crate) limit: u64,
    /// Start of table space.
    pub(crate) base: u64,
    pub(crate) slots: Vec<SavedSlot>,
    /// Free slots. The last one is used next.
    pub(crate) free: Vec<u32>,
    /// Handles and their slots, in ascending order of handles.
    pub(crate) handles: Vec<(u32, u32)>,
    /// Instance blocks and the slots of their directories, in ascending order of addresses.
    pub(crate) bindings: Vec<(u64, u32)>,
}

first_version!(SavedTables, "pv");

/// Saved form of a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedTable {
    pub(crate) kind: SavedKind,
    /// Numbers and contents of nonempty pages.
    pub(crate) pages: Vec<(u8, SavedPage)>,
}

/// Saved form of a table's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SavedKind {
    Directory,
    Small,
    Large,
}

impl Tables {
    /// Saves the tables.
    #[must_use]
    pub fn save(&self) -> SavedTables {
        let Self { limit, used: _, slots, handles, bindings } = self;
        let (base, slots, free) = slots.save();
        let handles: BTreeMap<u32, u32> = handles.iter().map(|(table, slot)| (table.0.get(), slot.number())).collect();
        let bindings: BTreeMap<u64, u32> = bindings.iter().map(|(block, slot)| (block.0, slot.number())).collect();
        let (handles, bindings) = (handles.into_iter().collect(), bindings.into_iter().collect());
        SavedTables { limit: *limit, base: base.0, slots, free, handles, bindings }
    }

    /// Restores the tables of a guest with VRAM that ends at `base`. `limit` is the maximum total size of the tables in
    /// bytes. The tables may exceed this limit if it was lowered.
    ///
    /// # Errors
    /// Returns an error if the saved form is invalid.
    pub fn restored(saved: SavedTables, base: GuestVramAddr, limit: u64) -> Result<Self, Invalid> {
        let mut tables = Self::new(base, limit);
        let SavedTables { limit: had, base: at, slots, free, handles, bindings } = saved;
        let base = tables.slots.base();
        Invalid::unless(at == base.0, || format!("table space starts at {at:#x} instead of {:#x}", base.0))?;
        tables.slots = Slots::restored(base, slots, free)?;
        tables.used = tables.slots.objects().fold(0u64, |sum, object| sum.saturating_add(object.kind.bytes()));
        Invalid::unless(tables.used <= had, || {
            format!("tables of {:#x} bytes exceed the limit of {had:#x}", tables.used)
        })?;
        let ordered = ascend(handles.iter().map(|(table, _)| table)) && ascend(bindings.iter().map(|(block, _)| block));
        Invalid::unless(ordered && bindings.len() <= MAX_BINDINGS, || {
            "handles or instance blocks are not in ascending order, or too many".into()
        })?;
        let mut names = Names::new();
        for (table, slot) in handles {
            let table = TableId::new(table).ok_or_else(|| Invalid::new("a handle is 0"))?;
            let slot = names.name(slot, &tables.slots, |_| true)?;
            tables.handles.insert(table, slot);
        }
        for (block, slot) in bindings {
            let block = GuestVramAddr(block);
            Invalid::unless(!tables.contains(block), || format!("an instance block is at {block}, in table space"))?;
            let slot = names.name(slot, &tables.slots, |kind| kind == Kind::Directory)?;
            tables.bindings.insert(block, slot);
        }
        let directories = tables.slots.objects().filter(|object| object.kind == Kind::Directory);
        for entry in directories.flat_map(|object| object.contents.entries()) {
            names.of_entry(Pde::from(entry), &tables.slots)?;
        }
        tables.slots.set_names(&names.0)?;
        Ok(tables)
    }
}

/// Number of references to each table, by slot.
struct Names(BTreeMap<u32, u64>);

impl Names {
    fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Adds a reference to the table in a slot. `wanted` must return true for the table's type.
    fn name(&mut self, slot: u32, slots: &Slots, wanted: impl FnOnce(Kind) -> bool) -> Result<SlotId, Invalid> {
        let id = SlotId::numbered(slot);
        let object = slots.get(id).filter(|object| wanted(object.kind));
        Invalid::unless(object.is_some(), || format!("slot {slot} does not contain a table of the expected type"))?;
        let names = self.0.entry(slot).or_default();
        *names = names.saturating_add(1);
        Ok(id)
    }

    /// Adds references to the tables of a directory entry. The entry must be one that [`Tables::set`] can write.
    fn of_entry(&mut self, pde: Pde, slots: &Slots) -> Result<(), Invalid> {
        let mut again = Pde::new();
        if pde.small_target() == TableTarget::Vram {
            let frame = self.of_address(pde.small_address(), slots, Kind::Small)?;
            again = again.with_small_target(TableTarget::Vram).with_small_frame(frame);
        }
        if pde.large_target() == TableTarget::Vram {
            let frame = self.of_address(pde.large_address(), slots, Kind::Large)?;
            again = again.with_large_target(TableTarget::Vram).with_large_frame(frame);
        }
        Invalid::unless(again == pde, || format!("a directory contains the invalid entry {:#x}", u64::from(pde)))
    }

    fn of_address(&mut self, address: u64, slots: &Slots, kind: Kind) -> Result<u32, Invalid> {
        let slot = slots.at(GuestVramAddr(address)).filter(|slot| slots.address(*slot).0 == address);
        let slot = slot.ok_or_else(|| {
            Invalid::new(format_args!("a directory refers to {address:#x}, which is not the address of a table"))
        })?;
        self.name(slot.number(), slots, |of| of == kind)?;
        u32::try_from(address.checked_div(SMALL_PAGE).unwrap_or(0))
            .map_err(|_| Invalid::new("the address of a table does not fit in a directory entry"))
    }
}

impl SavedTable {
    pub(super) fn from_contents(kind: Kind, contents: &Contents) -> Self {
        let kind = match kind {
            Kind::Directory => SavedKind::Directory,
            Kind::Small => SavedKind::Small,
            Kind::Large => SavedKind::Large,
        };
        Self { kind, pages: contents.save() }
    }

    /// Restores the table, without references.
    pub(super) fn restored(self) -> Result<Object, Invalid> {
        let Self { kind, pages } = self;
        let kind = match kind {
            SavedKind::Directory => Kind::Directory,
            SavedKind::Small => Kind::Small,
            SavedKind::Large => Kind::Large,
        };
        Ok(Object::unnamed(kind, Contents::restored(kind, pages)?))
    }
}

#[cfg(test)]
mod tests;
