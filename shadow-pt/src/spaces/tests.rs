use super::*;
use crate::model::world::{self, Card, GUEST_VRAM, Grants, Guest, LARGE, PAGE, reachable};
use crate::{Denial, Parts};
use nvspec::mmu::PD_BYTES;

mod bar;
mod modes;
mod splits;

const DIRECTORY: u64 = 0x1_0000;
/// Address of a large-page table.
const LPT: u64 = 0x2_0000;
/// Address of a small-page table, which the directory entry reduces to an eighth of its full size (32 KiB).
const SPT: u64 = 0x3_0000;
const EIGHTH: u64 = 3 << 2;

struct World {
    guest: Guest,
    grants: Grants,
    card: Card,
    spaces: AddressSpaces,
    id: SpaceId,
}

fn vram(at: u64) -> Place {
    Place::Vram(GuestVramAddr(at))
}

fn pde(large: Option<u64>, small: Option<u64>, size: u64) -> u64 {
    let large = large.map_or(0, |at| 1 | (at >> 12) << 4);
    large | size | small.map_or(0, |at| (1 << 32) | (at >> 12) << 36)
}

fn pte(aperture: u64, address: u64) -> u64 {
    1 | (address >> 12) << 4 | aperture << 33
}

impl World {
    fn new() -> Self {
        Self::with(Mode::Incremental, 4 << 20)
    }

    fn with(mode: Mode, table_bytes: u64) -> Self {
        let mut card = Card::default();
        let mut grants = Grants::default();
        // Grant a contiguous range of writable RAM, a range of two writable parts, and a read-only range.
        grants.map(0x1000, 0x8000, 64, true);
        grants.map(0x1040, 0x9000, 32, true);
        grants.map(0x2000, 0xb000, 32, false);
        let mut spaces = AddressSpaces::new(mode, Limits { table_bytes });
        let id = spaces.open(vram(DIRECTORY), &mut card).unwrap();
        Self { guest: Guest::new(), grants, card, spaces, id }
    }

    /// Creates a world in which one directory entry refers to both tables.
    fn mapped() -> Self {
        Self::mapped_in(Mode::Incremental)
    }

    fn mapped_in(mode: Mode) -> Self {
        let mut world = Self::with(mode, 4 << 20);
        world.write(vram(DIRECTORY), pde(Some(LPT), Some(SPT), EIGHTH));
        world
    }

    /// Writes guest memory as the guest's CPU.
    fn write(&mut self, place: Place, value: u64) {
        self.guest.write64(place, value);
        if let Place::Vram(at) = place {
            self.spaces.written(at, 8);
        }
    }

    /// Handles a guest flush without flushing the card's TLBs.
    fn flush_only(&mut self, busy: bool) -> SyncReport {
        self.spaces.flush(
            self.id,
            busy,
            &mut Parts { guest: &mut self.guest, frames: &mut self.grants, memory: &mut self.card },
        )
    }

    fn flush(&mut self, busy: bool) -> SyncReport {
        let report = self.flush_only(busy);
        self.spaces.flushed(self.id, &mut self.card);
        report
    }

    fn sync(&mut self) -> SyncReport {
        self.flush(true)
    }

    fn prepare(&mut self) -> SyncReport {
        let report = self
            .spaces
            .prepare(self.id, &mut Parts { guest: &mut self.guest, frames: &mut self.grants, memory: &mut self.card });
        self.spaces.flushed(self.id, &mut self.card);
        report
    }

    fn directory(&self) -> u64 {
        self.spaces.directory(self.id).unwrap().0
    }

    fn invalidate(&mut self, range: GuestRange) -> SyncReport {
        let mut withdrawal = self.spaces.withdraw(range);
        let mut report = SyncReport::default();
        while let Some((touched, step)) = self.spaces.invalidate(&mut withdrawal, &mut self.card) {
            assert_eq!(touched, if step.changed() { vec![self.id] } else { vec![] });
            report.merge(&step);
        }
        self.spaces.flushed(self.id, &mut self.card);
        report
    }

    /// Returns the aperture and the address that the card reaches at `va`.
    fn at(&self, va: u64) -> Option<(u64, u64)> {
        self.page(va).map(|page| (page.aperture, page.address))
    }

    fn page(&self, va: u64) -> Option<world::Page> {
        world::walk((false, self.directory()), va, &|ram, at| {
            assert!(!ram, "the directory is in host memory");
            Some(self.card.read64(at))
        })
    }

    /// Checks that all pages that the card can reach belong to the guest.
    fn check_isolation(&self) {
        for page in reachable(&self.card, self.directory()) {
            match page.aperture {
                0 => assert!(self.grants.owns_vram(page.address), "the guest does not own the VRAM of {page:x?}"),
                1 => panic!("{page:x?} is peer memory"),
                _ => assert!(
                    self.grants.owns_ram(page.address, !page.read_only),
                    "the guest does not own the RAM of {page:x?}"
                ),
            }
        }
    }
}

#[test]
fn nothing_is_mapped_before_the_first_synchronisation() {
    let world = World::mapped();
    assert!(reachable(&world.card, world.directory()).is_empty());
}

#[test]
fn legal_entries_of_both_sizes_are_translated() {
    let mut world = World::mapped();
    world.write(vram(LPT + 3 * 8), pte(0, 2 * LARGE));
    world.write(vram(SPT + 5 * 8), pte(0, LARGE + PAGE));
    world.write(vram(SPT + 6 * 8), pte(2, 0x1003 * PAGE));
    let report = world.sync();
    assert_eq!(world.at(3 * LARGE + 7 * PAGE), Some((0, 7 * LARGE + 7 * PAGE)));
    assert_eq!(world.at(5 * PAGE), Some((0, 41 * LARGE + PAGE)));
    assert_eq!(world.at(6 * PAGE), Some((2, 0x8003 * PAGE)));
    assert_eq!(world.at(7 * PAGE), None);
    assert_eq!((report.denied.total(), report.lost_permission, report.tables_scanned), (0, false, 3));
    // The report covers the directory, 1024/8 large entries, and 32768/8 small entries.
    assert_eq!(report.bytes_scanned, 0x1_0000 + 0x400 + 0x8000);
    world.check_isolation();
}

#[test]
fn unchanged_entries_are_not_rewritten() {
    let mut world = World::mapped();
    for index in 0..100 {
        world.write(vram(SPT + index * 8), pte(0, index * PAGE));
    }
    let first = world.sync();
    // One directory entry and one run of 100 entries were written.
    assert_eq!((first.entries_written, first.writes), (101, 2));
    let second = world.sync();
    assert_eq!((second.entries_written, second.writes), (0, 0));
    world.write(vram(SPT + 50 * 8), pte(0, 0));
    let third = world.sync();
    assert_eq!((third.entries_written, third.writes, third.lost_permission), (1, 1, true));
}

#[test]
fn unmapped_is_unreachable_after_the_flush() {
    let mut world = World::mapped();
    world.write(vram(SPT), pte(0, 0));
    world.write(vram(SPT + 8), pte(0, PAGE));
    world.sync();
    world.write(vram(SPT), 0);
    assert!(world.sync().lost_permission);
    assert_eq!((world.at(0), world.at(PAGE)), (None, Some((0, 40 * LARGE + PAGE))));
    world.write(vram(SPT + 8), pte(0, PAGE) | 4);
    assert!(world.sync().lost_permission);
    assert!(world.page(PAGE).unwrap().read_only);
    world.write(vram(DIRECTORY), 0);
    assert!(world.sync().lost_permission);
    assert_eq!(world.at(PAGE), None);
    // Only the directory remains.
    assert_eq!(world.card.allocated.len(), 1);
    assert_eq!(world.spaces.card_bytes(), PD_BYTES);
}

#[test]
fn gaining_is_not_losing() {
    let mut world = World::mapped();
    world.write(vram(SPT), pte(0, 0) | 4);
    world.sync();
    world.write(vram(SPT), pte(0, 0));
    world.write(vram(SPT + 8), pte(0, 0));
    assert!(!world.sync().lost_permission);
    assert!(!world.page(0).unwrap().read_only);
}

#[test]
fn losses_are_written_before_gains() {
    let mut world = World::mapped();
    world.write(vram(SPT + 100 * 8), pte(0, 0));
    world.sync();
    world.card.writes.clear();
    world.write(vram(SPT), pte(0, 0));
    world.write(vram(SPT + 100 * 8), 0);
    world.sync();
    let written: Vec<u64> =
        world.card.writes.iter().map(|(_, data)| u64::from_le_bytes(data[..8].try_into().unwrap()) & 1).collect();
    assert_eq!(written, [0, 1]);
}

#[test]
fn a_new_table_is_filled_before_it_is_linked() {
    let mut world = World::mapped();
    world.write(vram(SPT), pte(0, 0));
    world.sync();
    let linked = world.card.writes.iter().position(|(at, _)| *at == world.directory()).unwrap();
    assert_eq!(linked, world.card.writes.len() - 1);
    assert_eq!(world.card.writes.len(), 2);
}

#[test]
fn tables_are_freed_only_after_the_flush() {
    let mut world = World::mapped();
    world.sync();
    world.write(vram(DIRECTORY), 0);
    world.flush_only(true);
    assert!(world.card.freed.is_empty(), "the card's TLBs may still refer to a freed table");
    world.spaces.flushed(world.id, &mut world.card);
    assert_eq!(world.card.freed.len(), 2);
}

#[test]
fn denied_entries_are_counted_once_and_never_reach_the_card() {
    let mut world = World::mapped();
    world.write(vram(SPT), pte(0, GUEST_VRAM));
    world.write(vram(SPT + 8), pte(1, 0));
    world.write(vram(SPT + 16), pte(2, 0x7777 * PAGE));
    world.write(vram(SPT + 24), pte(0, 0) | (0xff << 36));
    world.write(vram(LPT + 8), pte(2, 0x1030 * PAGE));
    world.write(vram(LPT + 16), pte(0, PAGE));
    let denied = world.sync().denied;
    for (reason, count) in
        [(Denial::Vram, 1), (Denial::Peer, 1), (Denial::Ram, 1), (Denial::Kind, 1), (Denial::Unaligned, 2)]
    {
        assert_eq!(denied.count_of(reason), count, "{}", reason.name());
    }
    assert!(reachable(&world.card, world.directory()).is_empty());
    assert_eq!(world.sync().denied.total(), 0, "no page has changed");
}

#[test]
fn an_entry_that_is_half_written_is_not_denied() {
    let whole = pte(2, 0x1000 * PAGE);
    let half = whole & u64::from(u32::MAX);
    // The partially written entry refers to VRAM that the guest does not own.
    const { assert!(0x1000 * PAGE >= GUEST_VRAM) };
    let mut world = World::mapped();
    world.write(vram(SPT), half);
    assert_eq!((world.prepare().denied.total(), world.at(0)), (0, None));
    world.write(vram(SPT), whole);
    assert_eq!((world.sync().denied.total(), world.at(0)), (0, Some((2, 0x8000 * PAGE))));
    // If the entry stays the same, the guest has finished writing it.
    world.write(vram(SPT), half);
    assert_eq!((world.prepare().denied.total(), world.at(0)), (0, None));
    assert_eq!((world.prepare().denied.count_of(Denial::Vram), world.at(0)), (1, None));
    assert_eq!(world.prepare().denied.total(), 0, "no page has changed");
}

#[test]
fn prepare_before_work_completes_deferred_flush() {
    let mut world = World::mapped_in(Mode::LazyAdd);
    world.write(vram(SPT), pte(0, GUEST_VRAM));
    assert_eq!(world.flush(false).denied.total(), 0, "the page has not been read yet");
    assert_eq!(world.prepare().denied.count_of(Denial::Vram), 1);
}

#[test]
fn many_denied_entries_count_at_once() {
    let mut world = World::mapped();
    (0..100).for_each(|entry| world.write(vram(SPT + 8 * entry), pte(0, GUEST_VRAM)));
    let first = world.prepare().denied.count_of(Denial::Vram);
    assert_eq!(
        (first, world.prepare().denied.count_of(Denial::Vram)),
        (84, 16),
        "the number of entries that are read twice is bounded"
    );
}

#[test]
fn a_large_page_of_ram_needs_every_piece() {
    let mut world = World::mapped();
    world.write(vram(LPT), pte(2, 0x1020 * PAGE));
    world.write(vram(LPT + 8), pte(2, 0x1000 * PAGE));
    // Map a large page with discontiguous I/O addresses, and one whose last 4 KiB page is not granted.
    world.grants.map(0x1050, 0xc000, 16, true);
    world.write(vram(LPT + 16), pte(2, 0x1040 * PAGE));
    world.grants.ram.remove(&0x201f);
    world.write(vram(LPT + 24), pte(2, 0x2000 * PAGE));
    assert_eq!(world.sync().denied.count_of(Denial::Ram), 1);
    assert_eq!(world.at(31 * PAGE), Some((2, 0x803f * PAGE)));
    assert_eq!(world.at(2 * LARGE + 15 * PAGE), Some((2, 0x900f * PAGE)));
    assert_eq!(world.at(2 * LARGE + 16 * PAGE), Some((2, 0xc000 * PAGE)));
    assert_eq!(world.at(3 * LARGE), None);
    world.check_isolation();
}

#[test]
fn withdrawn_ram_is_unmapped_at_once_and_remapped_when_granted() {
    let mut world = World::mapped();
    world.write(vram(SPT), pte(2, 0x1000 * PAGE));
    world.write(vram(SPT + 8), pte(0, GUEST_VRAM - PAGE));
    world.write(vram(LPT + 8), pte(3, 0x1000 * PAGE));
    world.sync();
    // A range of one byte is sufficient.
    let report = world.invalidate(GuestRange::Ram(Gpa(0x101f * PAGE + 0xfff), 1));
    assert_eq!((report.entries_written, report.lost_permission), (1, true));
    assert_eq!((world.at(LARGE), world.at(0).is_some()), (None, true));
    world.invalidate(GuestRange::Ram(Gpa(0x1000 * PAGE), 64 * PAGE));
    assert_eq!((world.at(0), world.at(PAGE).is_some()), (None, true));
    for page in 0x1000..0x1040 {
        world.grants.ram.remove(&page);
    }
    assert_eq!(world.sync().denied.total(), 0, "the guest has not written anything");
    assert_eq!(world.at(0), None);
    world.grants.map(0x1000, 0xd000, 64, true);
    world.spaces.granted();
    world.sync();
    assert_eq!(world.at(0), Some((2, 0xd000 * PAGE)));
    assert_eq!(world.at(LARGE + PAGE), Some((3, 0xd001 * PAGE)));
}

#[test]
fn withdrawn_ram_is_unmapped_in_bounded_steps() {
    const PAGES: u64 = 9;
    let mut world = World::mapped();
    for index in 0..PAGES * 512 {
        world.write(vram(SPT + index * 8), pte(2, 0x1000 * PAGE));
    }
    world.sync();
    let mapped = |world: &World| (0..PAGES * 512).filter(|index| world.at(index * PAGE).is_some()).count();
    let before = mapped(&world);
    let mut withdrawal = world.spaces.withdraw(GuestRange::Ram(Gpa(0x1000 * PAGE), PAGE));
    let mut written = Vec::new();
    while let Some((_, step)) = world.spaces.invalidate(&mut withdrawal, &mut world.card) {
        written.push(step.entries_written);
    }
    // Other threads can acquire the lock between steps.
    assert!(written.len() > 2 && written.iter().all(|entries| *entries <= 1024), "{written:?}");
    assert!(before > 1024 && mapped(&world) == 0, "{before} entries were mapped");
}

#[test]
fn withdrawn_ram_is_found_by_whichever_entry_is_left() {
    for left in 0..4 {
        let mut world = World::mapped();
        for index in 0..4 {
            world.write(vram(SPT + index * 8), pte(2, (0x1000 + index) * PAGE));
        }
        world.sync();
        for index in (0..4).filter(|index| *index != left) {
            world.write(vram(SPT + index * 8), 0);
            world.sync();
        }
        assert!(world.at(left * PAGE).is_some());
        assert!(world.invalidate(GuestRange::Ram(Gpa((0x1000 + left) * PAGE), PAGE)).lost_permission);
        assert_eq!(world.at(left * PAGE), None);
    }
}

#[test]
fn withdrawn_vram_is_unreachable_at_once() {
    let mut world = World::mapped();
    world.write(vram(SPT), pte(0, LARGE));
    world.write(vram(SPT + 8), pte(2, 0x1000 * PAGE));
    world.write(vram(LPT + 8), pte(0, LARGE));
    world.sync();
    let report = world.invalidate(GuestRange::Vram(GuestVramAddr(LARGE), LARGE));
    assert_eq!(report.entries_written, 2);
    assert_eq!((world.at(0), world.at(LARGE), world.at(PAGE).is_some()), (None, None, true));
}

#[test]
fn directory_used_as_its_own_table_keeps_isolation() {
    let mut world = World::new();
    let own = pde(Some(DIRECTORY), Some(DIRECTORY), 0);
    world.write(vram(DIRECTORY), own);
    world.write(vram(DIRECTORY + 8), pte(0, 3 * LARGE));
    world.sync();
    // Interpreted as an entry, the first dword refers to VRAM frame 0x10. Its low bits select a supported or an
    // unsupported storage kind.
    assert_eq!(world.at(PAGE), Some((0, 90 * LARGE)));
    world.check_isolation();
}

#[test]
fn shared_table_is_read_and_kept_once() {
    let mut world = World::new();
    for index in 0..8190 {
        world.write(vram(DIRECTORY + index * 8), pde(None, Some(SPT), EIGHTH));
    }
    world.write(vram(SPT), pte(0, 0));
    let report = world.sync();
    assert_eq!(report.tables_scanned, 2);
    assert_eq!(world.spaces.card_bytes(), PD_BYTES + 0x8000);
    assert_eq!(world.at(5 << 27), Some((0, 40 * LARGE)));
    assert_eq!(world.at(8189 << 27), Some((0, 40 * LARGE)));
}

#[test]
fn tables_in_ram_are_tables() {
    let mut world = World::new();
    for page in 0x1000..0x1008 {
        world.guest.ram.insert(page, vec![0; 4096]);
    }
    let at = 0x1000 * PAGE;
    world.write(vram(DIRECTORY), EIGHTH | (2 << 32) | (at >> 12) << 36);
    world.write(Place::Ram(Gpa(at + 8)), pte(2, at));
    world.sync();
    assert_eq!(world.at(PAGE), Some((2, 0x8000 * PAGE)));
    // Withdraw the RAM that contains the table.
    world.guest.ram.clear();
    let report = world.sync();
    assert_eq!((report.denied.count_of(Denial::Table), report.lost_permission), (1, true));
    assert_eq!(world.at(PAGE), None);
    assert_eq!(world.sync().denied.total(), 0);
}

#[test]
fn table_past_end_of_guest_vram_is_read_up_to_the_end() {
    let mut world = World::new();
    let last = GUEST_VRAM - PAGE;
    world.write(vram(DIRECTORY), pde(None, Some(last), 0));
    world.write(vram(last), pte(0, 0));
    let report = world.sync();
    assert_eq!((report.denied.total(), report.bytes_scanned), (0, 0x1_0000 + PAGE));
    assert_eq!(world.at(0), Some((0, 40 * LARGE)));
    world.write(vram(DIRECTORY), pde(None, Some(GUEST_VRAM), 0));
    assert_eq!(world.sync().denied.count_of(Denial::Table), 1);
    assert_eq!(world.at(0), None);
}

#[test]
fn a_directory_beyond_the_guests_memory_maps_nothing() {
    for place in [vram(GUEST_VRAM), vram(!0xfff), Place::Ram(Gpa(0x5000))] {
        let mut world = World::new();
        world.id = world.spaces.open(place, &mut world.card).unwrap();
        let report = world.sync();
        assert_eq!((report.denied.count_of(Denial::Table), report.writes), (1, 0));
        assert_eq!(world.sync().denied.total(), 0);
    }
}

#[test]
fn reserved_entries_stay_the_hosts() {
    let mut world = World::new();
    world.write(vram(DIRECTORY + 8191 * 8), pde(Some(LPT), None, EIGHTH));
    world.write(vram(LPT), pte(0, 0));
    let report = world.sync();
    assert_eq!((report.denied.count_of(Denial::Reserved), report.writes), (1, 0));
    assert_eq!(world.at(8191 << 27), None);
    assert_eq!(world.sync().denied.total(), 0);
}

#[test]
fn tables_over_limit_are_absent_and_existing_ones_stay() {
    let mut world = World::with(Mode::Incremental, 0x8000);
    world.write(vram(DIRECTORY), pde(None, Some(SPT), EIGHTH));
    world.write(vram(SPT), pte(0, 0));
    world.sync();
    // Add a second table whose key precedes that of the first one.
    world.write(vram(DIRECTORY + 8), pde(None, Some(LPT), EIGHTH));
    assert_eq!(world.sync().denied.count_of(Denial::Limit), 1);
    assert_eq!((world.at(0).is_some(), world.at(1 << 27)), (true, None));
    assert_eq!(world.spaces.card_bytes(), PD_BYTES + 0x8000);
    // Now the tables fit again.
    world.write(vram(DIRECTORY), 0);
    world.sync();
    world.write(vram(LPT), pte(0, 0));
    world.sync();
    assert_eq!((world.at(0), world.at(1 << 27).is_some()), (None, true));
}

#[test]
fn tables_wait_until_card_memory_is_available() {
    let mut world = World::mapped();
    world.write(vram(SPT), pte(0, 0));
    world.write(vram(LPT + 8), pte(0, LARGE));
    world.card.room = Some(1);
    for _ in 0..2 {
        let report = world.sync();
        assert_eq!((report.waiting, report.denied.total()), (1, 0), "the entry must be neither denied nor dropped");
    }
    // Tables are created in address order, so the large-page table gets the memory.
    assert_eq!((world.at(0), world.at(LARGE).is_some()), (None, true));
    world.card.room = None;
    assert_eq!(world.sync().waiting, 0);
    assert!(world.at(0).is_some());
    world.card.room = Some(0);
    assert_eq!(world.spaces.open(vram(0), &mut world.card), Err(NoMemory));
}

#[test]
fn destroying_frees_everything() {
    let mut world = World::mapped();
    world.sync();
    world.write(vram(DIRECTORY), pde(None, Some(SPT), EIGHTH));
    world.flush_only(true);
    world.spaces.close(world.id, &mut world.card);
    assert!(world.card.allocated.is_empty());
}

#[test]
fn resolve_matches_shadow_mappings() {
    let mut world = World::mapped();
    world.write(vram(SPT + 8), pte(2, 0x2000 * PAGE));
    world.write(vram(LPT + 8), pte(0, 3 * LARGE) | 4);
    world.write(vram(SPT + 33 * 8), pte(0, 0));
    let resolve = |world: &World, va| world.spaces.resolve(world.id, GpuVa(va));
    assert_eq!(resolve(&world, PAGE), None);
    world.sync();
    let place = Place::Ram(Gpa(0x2000 * PAGE + 0x10));
    assert_eq!(resolve(&world, PAGE + 0x10), Some(Mapping { place, bytes: PAGE - 0x10, writable: false }));
    let place = vram(3 * LARGE + PAGE);
    assert_eq!(resolve(&world, LARGE + PAGE), Some(Mapping { place, bytes: PAGE, writable: false }));
    for va in [0, 1 << 27, 4096 * PAGE, crate::HOST_BASE.0, 1 << 40, u64::MAX] {
        assert_eq!(resolve(&world, va), None, "{va:#x}");
    }
}

#[test]
fn a_closed_space_is_no_space_and_its_name_is_not_used_again() {
    let mut world = World::mapped();
    world.sync();
    world.spaces.close(world.id, &mut world.card);
    assert_eq!((world.spaces.count(), world.spaces.find(vram(DIRECTORY))), (0, None));
    let new = world.spaces.open(vram(DIRECTORY), &mut world.card).unwrap();
    assert_ne!(new, world.id);
    assert_eq!((world.spaces.directory(world.id), world.spaces.guest_directory(world.id)), (None, None));
    assert_eq!(world.sync(), SyncReport::default());
    world.spaces.close(world.id, &mut world.card);
    assert_eq!(world.spaces.ids().collect::<Vec<_>>(), [new]);
}

#[test]
fn spaces_are_bounded() {
    let mut world = World::new();
    for index in 1..MAX_SPACES as u64 {
        world.spaces.open(vram(index * PAGE + 0x100_0000), &mut world.card).unwrap();
    }
    assert_eq!(world.spaces.open(vram(0), &mut world.card), Err(NoMemory));
    assert!(world.spaces.open(vram(DIRECTORY + 0xfff), &mut world.card).is_ok(), "the space already exists");
    assert_eq!(world.spaces.count(), MAX_SPACES);
}

#[test]
fn the_limit_is_for_all_spaces_together() {
    let mut world = World::with(Mode::Incremental, 0x9000);
    world.write(vram(DIRECTORY), pde(Some(LPT), Some(SPT), EIGHTH));
    assert_eq!(world.sync().denied.count_of(Denial::Limit), 0);
    let first = std::mem::replace(&mut world.id, world.spaces.open(vram(0x9_0000), &mut world.card).unwrap());
    world.write(vram(0x9_0000), pde(Some(LPT), None, EIGHTH));
    world.write(vram(LPT), pte(0, 0));
    assert_eq!(world.sync().denied.count_of(Denial::Limit), 1);
    assert_eq!((world.at(0), world.sync().denied.total()), (None, 0));
    world.spaces.close(first, &mut world.card);
    world.sync();
    assert!(world.at(0).is_some());
}

#[test]
fn modes_are_known_by_name() {
    for mode in Mode::ALL {
        assert_eq!(mode.name().parse(), Ok(mode));
    }
    assert_eq!(Mode::default(), Mode::LazyAdd);
    assert!("lazy-".parse::<Mode>().unwrap_err().to_string().contains("lazy-add"));
}

#[test]
fn tables_and_writes_outside_guest_memory_are_harmless() {
    let mut world = World::new();
    world.write(vram(DIRECTORY), pde(Some(0xff_ffff_f000), Some(0xff_fff0_0000), 0));
    world.write(vram(DIRECTORY + 8), 3 | 0xfff_ffff << 4 | 3 << 32 | 0xfff_ffff << 36);
    assert_eq!(world.sync().denied.count_of(Denial::Table), 4);
    world.spaces.written(GuestVramAddr(u64::MAX), u64::MAX);
    world.spaces.written(GuestVramAddr(0), u64::MAX);
    world.spaces.written(GuestVramAddr(0), 0);
    for range in [
        GuestRange::Vram(GuestVramAddr(u64::MAX), u64::MAX),
        GuestRange::Vram(GuestVramAddr(0), u64::MAX),
        GuestRange::Ram(Gpa(0), u64::MAX),
        GuestRange::Ram(Gpa(1), 0),
    ] {
        assert!(!world.invalidate(range).changed());
        assert!(
            world
                .spaces
                .retranslate(
                    range,
                    &mut Parts { guest: &mut world.guest, frames: &mut world.grants, memory: &mut world.card }
                )
                .0
                .is_empty()
        );
    }
    assert_eq!(world.sync().denied.total(), 0);
}
