//! Tests of disabling and enabling bus mastering. Tables that map RAM are unlinked and relinked, and keep their
//! entries.

use super::*;

const RAM: u64 = 0x1000 * PAGE;

impl World {
    fn bar(&mut self, barred: bool) -> SyncReport {
        let mut report = SyncReport::default();
        for id in self.spaces.bar_ram(barred) {
            (0..RELINK_PIECES).for_each(|piece| report.merge(&self.spaces.relink(id, piece, &mut self.card)));
            self.spaces.flushed(id, &mut self.card);
        }
        report
    }

    /// Creates a directory entry whose table maps only RAM, and another one whose table maps only VRAM.
    fn both() -> Self {
        let mut world = Self::mapped();
        world.write(vram(DIRECTORY + 8), pde(None, Some(SPT + 0x8000), EIGHTH));
        world.write(vram(SPT + 0x8000), pte(0, LARGE));
        for page in 0..64 {
            world.write(vram(SPT + page * 8), pte(2, RAM + page * PAGE));
        }
        world.write(vram(SPT + 64 * 8), pte(0, LARGE));
        assert!(world.sync().changed());
        world
    }
}

const SECOND_TABLE_VA: u64 = nvspec::mmu::PDE_SPAN;

#[test]
fn barring_ram_costs_a_directory_entry_for_any_table() {
    let mut world = World::both();
    assert_eq!(world.at(63 * PAGE).map(|(aperture, _)| aperture), Some(2));
    let report = world.bar(true);
    assert_eq!(report.entries_written, 1, "more than the directory entry was written");
    assert_eq!(world.at(63 * PAGE), None);
    assert!(world.at(SECOND_TABLE_VA).is_some(), "a table that maps only VRAM was unlinked");
    let report = world.bar(false);
    assert_eq!((report.entries_written, report.translated), (1, 0));
    assert_eq!(world.at(63 * PAGE).map(|(aperture, _)| aperture), Some(2));
    assert_eq!(world.bar(false).entries_written, 0);
}

#[test]
fn no_change_of_a_guests_tables_brings_barred_ram_back() {
    let mut world = World::both();
    world.bar(true);
    let ram = std::mem::take(&mut world.grants.ram);
    // Add another directory entry for the unlinked table, another entry in that table, and an entry in the linked
    // table.
    world.write(vram(DIRECTORY + 16), pde(Some(LPT), Some(SPT), EIGHTH));
    world.write(vram(SPT + 65 * 8), pte(2, RAM));
    world.write(vram(SPT + 0x8000 + 8), pte(2, RAM));
    world.sync();
    world.prepare();
    assert!(reachable(&world.card, world.directory()).iter().all(|page| page.aperture == 0));
    // The table is relinked once its last RAM entry has been removed.
    for page in 0..=65 {
        if page != 64 {
            world.write(vram(SPT + page * 8), 0);
        }
    }
    world.sync();
    assert!(world.at(64 * PAGE).is_some(), "a table that no longer maps RAM was not relinked");
    assert!(reachable(&world.card, world.directory()).iter().all(|page| page.aperture == 0));
    // Entries denied in the meantime are mapped once they are granted.
    world.grants.ram = ram;
    world.bar(false);
    world.spaces.granted();
    world.prepare();
    assert_eq!(world.at(SECOND_TABLE_VA + PAGE).map(|(aperture, _)| aperture), Some(2));
    world.check_isolation();
}
