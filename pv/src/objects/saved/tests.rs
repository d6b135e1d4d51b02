//! Tests of saved tables that were modified.

use super::*;
use crate::abi::Status;
use crate::{Counts, SLOT_BYTES};
use proptest::prelude::*;

const BASE: GuestVramAddr = GuestVramAddr(64 << 20);
const LIMIT_BYTES: u64 = 8 << 20;

fn id(handle: u32) -> TableId {
    TableId::new(handle).unwrap()
}

/// Creates two directories (one of them bound), a free slot, and a small-page and a large-page table. The bound
/// directory refers to both tables, and the other one to the small-page table, which has no handle.
fn tables() -> Tables {
    let mut tables = Tables::new(BASE, LIMIT_BYTES);
    let kinds = [Kind::Directory, Kind::Small, Kind::Large, Kind::Directory, Kind::Small];
    for (handle, kind) in (1..).zip(kinds) {
        tables.create(id(handle), kind).unwrap();
    }
    tables.set(id(1), 3, Some(id(2)), Some(id(3))).unwrap();
    tables.set(id(4), 0, Some(id(2)), None).unwrap();
    tables.run(id(2), 0, 600, 0x11, 0x10).unwrap();
    tables.bind(id(1), GuestVramAddr(0x1000)).unwrap();
    tables.destroy(id(2)).unwrap();
    tables.destroy(id(5)).unwrap();
    tables
}

fn refused(edit: impl FnOnce(&mut SavedTables)) -> String {
    let mut saved = tables().save();
    edit(&mut saved);
    Tables::restored(saved, BASE, LIMIT_BYTES).expect_err("the tables were restored").to_string()
}

/// Returns an entry of the saved table in a slot.
fn entry(saved: &mut SavedTables, slot: usize, index: usize) -> &mut u64 {
    let (_, page) = &mut saved.slots[slot].table.as_mut().unwrap().pages[0];
    &mut page[index]
}

#[test]
fn tables_live_while_referenced() {
    let mut tables = Tables::restored(tables().save(), BASE, LIMIT_BYTES).unwrap();
    assert_eq!(tables.counts(), super::tests::tables().counts());
    assert_eq!((tables.counts().directories, tables.counts().small, tables.counts().large), (2, 1, 1));
    tables.set(id(1), 3, None, None).unwrap();
    assert_eq!(tables.counts().small, 1, "the other directory still refers to the table");
    tables.set(id(4), 0, None, None).unwrap();
    assert_eq!(tables.counts().small, 0);
}

#[test]
fn a_lower_limit_takes_nothing_away() {
    let mut tables = Tables::restored(tables().save(), BASE, 0x1000).unwrap();
    assert_eq!(tables.counts().small, 1);
    assert_eq!(tables.create(id(9), Kind::Large), Err(Status::Limit));
}

#[test]
fn tables_that_cannot_be_are_refused() {
    assert!(refused(|saved| saved.base += SLOT_BYTES).contains("table space starts"));
    assert!(refused(|saved| saved.limit = 0x1000).contains("exceed the limit"));
    assert!(refused(|saved| saved.handles[0].0 = 0).contains("a handle is 0"));
    assert!(refused(|saved| saved.handles.reverse()).contains("not in ascending order"));
    assert!(refused(|saved| saved.handles[0].1 = 77).contains("slot 77 does not contain a table"));
    assert!(refused(|saved| saved.handles[0].1 = saved.free[0]).contains("does not contain a table"));
    // A block must be bound to a directory, and a directory entry must refer to a table of the type of its field.
    assert!(
        refused(|saved| saved.bindings[0].1 = saved.handles[1].1)
            .contains("does not contain a table of the expected type")
    );
    assert!(refused(|saved| saved.bindings[0].0 = BASE.0).contains("in table space"));
    assert!(refused(|saved| saved.free.clear()).contains("the list of free slots"));
    assert!(refused(|saved| saved.free.push(0)).contains("the list of free slots"));
    assert!(refused(|saved| saved.handles.truncate(0)).contains("is unreferenced"));
    assert!(
        refused(|saved| saved.slots[1].table.as_mut().unwrap().pages[0].1.truncate(9)).contains("empty, truncated")
    );
    assert!(refused(|saved| saved.slots[1].table.as_mut().unwrap().pages[0].0 = 99).contains("not in ascending order"));
    assert!(refused(|saved| saved.slots[1].table.as_mut().unwrap().pages[1].0 = 99).contains("out of range"));
}

#[test]
fn entries_of_directories_name_only_tables_here() {
    let small = |frame: u32| u64::from(Pde::new().with_small_target(TableTarget::Vram).with_small_frame(frame));
    let frame = |slot: u64| u32::try_from((BASE.0 + slot * SLOT_BYTES) / SMALL_PAGE).unwrap();
    // Invalid targets: the directory itself, a large-page table instead of a small-page table, guest VRAM, the middle
    // of a table, and guest RAM.
    assert!(refused(|saved| *entry(saved, 0, 3) = small(frame(0))).contains("of the expected type"));
    assert!(refused(|saved| *entry(saved, 0, 3) = small(frame(2))).contains("of the expected type"));
    assert!(refused(|saved| *entry(saved, 0, 3) = small(0x100)).contains("refers to 0x100000"));
    assert!(refused(|saved| *entry(saved, 0, 3) = small(frame(1) + 1)).contains("is not the address of a table"));
    let ram = Pde::new().with_small_target(TableTarget::SysCoherent).with_small_frame(1);
    assert!(refused(|saved| *entry(saved, 0, 3) = ram.into()).contains("the invalid entry"));
    assert!(refused(|saved| *entry(saved, 0, 3) |= 1 << 35).contains("the invalid entry"));
}

proptest! {
    /// Modifies the bytes of saved tables. They must either be rejected or be restored without a panic.
    #[test]
    fn edited_bytes_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        steps in prop::collection::vec((0u8..5, 1u32..6, 1u32..6, 0u32..9), 0..30),
    ) {
        let mut bytes = postcard::to_allocvec(&tables().save()).unwrap();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let Ok((saved, _)) = postcard::take_from_bytes::<SavedTables>(&bytes) else { return Ok(()) };
        let Ok(mut tables) = Tables::restored(saved, BASE, LIMIT_BYTES) else { return Ok(()) };
        for (what, a, b, index) in steps {
            let _ = match what {
                0 => tables.create(id(a), Kind::ALL[b as usize % 3]),
                1 => tables.destroy(id(a)),
                2 => tables.set(id(a), index, Some(id(b)), None),
                3 => tables.bind(id(a), GuestVramAddr(0x1000 * u64::from(index))),
                _ => tables.run(id(a), index, 600, 1, 0),
            };
            let _ = tables.counts();
            tables.take_written(|_, _| ());
        }
        let saved = tables.save();
        let again = Tables::restored(saved.clone(), BASE, LIMIT_BYTES).map_err(|why| TestCaseError::fail(why.to_string()))?;
        prop_assert_eq!(again.save(), saved);
        tables.clear();
        prop_assert_eq!(tables.counts(), Counts::default());
    }
}
