//! Saved form of table space.

use super::{Object, Slot, SlotId, Slots};
use crate::objects::SLOT_BYTES;
use crate::objects::contents::Contents;
use crate::objects::saved::SavedTable;
use crate::operation::Kind;
use nvspec::addr::{BUS_BITS, GuestVramAddr};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Saved form of a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedSlot {
    pub(crate) table: Option<SavedTable>,
    pub(crate) written: u64,
}

impl Slots {
    /// Returns the start of table space, the slots, and the list of free slots.
    pub(in crate::objects) fn save(&self) -> (GuestVramAddr, Vec<SavedSlot>, Vec<u32>) {
        let Self {
            base,
            slots,
            free,
            // Derived from the written pages of each slot.
            written: _,
        } = self;
        let saved = |slot: &Slot| {
            let Slot { object, written } = slot;
            // The references are counted after the restore.
            let table =
                object.as_ref().map(|Object { kind, names: _, contents }| SavedTable::from_contents(*kind, contents));
            SavedSlot { table, written: *written }
        };
        (*base, slots.iter().map(saved).collect(), free.iter().map(|slot| slot.0).collect())
    }

    /// Restores table space at `base`. The tables have no references until [`Self::set_names`] is called.
    pub(in crate::objects) fn restored(
        base: GuestVramAddr,
        saved: Vec<SavedSlot>,
        free: Vec<u32>,
    ) -> Result<Self, Invalid> {
        let bytes = (saved.len() as u64).saturating_mul(SLOT_BYTES);
        let end = base.checked_add(bytes).filter(|end| end.0 <= 1 << BUS_BITS);
        Invalid::unless(end.is_some(), || format!("{} tables do not fit in table space", saved.len()))?;
        let mut slots = Self::new(base);
        for (number, SavedSlot { table, written }) in (0u32..).zip(saved) {
            let object = table.map(SavedTable::restored).transpose()?;
            slots.slots.push(Slot { object, written });
            if written != 0 {
                slots.written.push(SlotId(number));
            }
        }
        let numbers = (0u32..).zip(&slots.slots);
        let empty: BTreeSet<u32> =
            numbers.filter(|(_, slot)| slot.object.is_none()).map(|(number, _)| number).collect();
        let listed: BTreeSet<u32> = free.iter().copied().collect();
        Invalid::unless(listed.len() == free.len() && listed == empty, || {
            "the list of free slots does not match the empty slots".into()
        })?;
        slots.free = free.into_iter().map(SlotId).collect();
        Ok(slots)
    }

    /// Sets the reference count of each table. Returns an error if a table is unreferenced.
    pub(in crate::objects) fn set_names(&mut self, names: &BTreeMap<u32, u64>) -> Result<(), Invalid> {
        for (number, slot) in (0u32..).zip(&mut self.slots) {
            let Some(object) = &mut slot.object else { continue };
            object.names = names.get(&number).copied().unwrap_or(0);
            Invalid::unless(object.names != 0, || format!("the table in slot {number} is unreferenced"))?;
        }
        Ok(())
    }
}

impl Object {
    pub(in crate::objects) fn unnamed(kind: Kind, contents: Contents) -> Self {
        Self { kind, names: 0, contents }
    }
}

impl SlotId {
    pub(in crate::objects) const fn number(self) -> u32 {
        self.0
    }

    pub(in crate::objects) const fn numbered(number: u32) -> Self {
        Self(number)
    }
}
