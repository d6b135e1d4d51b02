//! Tests of split large pages, whose 4 KiB pages are not contiguous for the card.

use super::*;
use crate::model::world::walk;

/// First I/O page for guest VRAM in host memory.
const HOST: u64 = 0x2_0000;

impl World {
    /// Moves guest VRAM pages to host memory starting at I/O page `to`, or back to the card.
    fn host(&mut self, first: u64, pages: u64, to: Option<u64>) -> SyncReport {
        for page in first..first + pages {
            self.grants.hosted.remove(&page);
        }
        self.grants.hosted.extend((first..first + pages).zip(to.into_iter().flat_map(|to| to..)));
        let range = GuestRange::Vram(GuestVramAddr(first * PAGE), pages * PAGE);
        let (touched, report) = self.spaces.retranslate(
            range,
            &mut Parts { guest: &mut self.guest, frames: &mut self.grants, memory: &mut self.card },
        );
        assert_eq!(touched, if report.changed() { vec![self.id] } else { vec![] });
        self.spaces.flushed(self.id, &mut self.card);
        report
    }
}

#[test]
fn page_moved_to_host_leaves_rest_of_its_large_page_in_place() {
    for small in [None, Some(SPT)] {
        let mut world = World::with(Mode::LazyAdd, 4 << 20);
        world.write(vram(DIRECTORY), pde(Some(LPT), small, EIGHTH));
        world.write(vram(LPT + 8), pte(0, 2 * LARGE));
        // Write a small entry that the large page hides, and a small entry outside the large page.
        world.write(vram(SPT + 37 * 8), pte(0, 3 * LARGE));
        world.write(vram(SPT + 5 * 8), pte(0, 3 * LARGE));
        world.prepare();
        let (tables, bytes) = (world.spaces.tables(), world.spaces.card_bytes());
        let report = world.host(64 + 5, 1, Some(HOST));
        assert!(report.lost_permission, "the card's TLBs may cache the large page");
        assert_eq!(world.at(LARGE + 4 * PAGE), Some((0, 7 * LARGE + 4 * PAGE)));
        assert_eq!(world.at(LARGE + 5 * PAGE), Some((2, HOST * PAGE)));
        assert_eq!(world.at(LARGE + 6 * PAGE), Some((0, 7 * LARGE + 6 * PAGE)));
        assert_eq!(world.at(5 * PAGE), small.map(|_| (0, 90 * LARGE)));
        let found = world.spaces.resolve(world.id, GpuVa(LARGE + 5 * PAGE + 8)).unwrap();
        assert_eq!((found.place, found.writable), (vram(2 * LARGE + 5 * PAGE + 8), true));
        // The replacement table has the size of the guest's table, and counts towards card memory.
        assert_eq!((world.spaces.tables(), world.spaces.card_bytes()), (tables, bytes + 0x8000));
        // Change the small entry outside the large page, and the hidden one.
        world.write(vram(SPT + 5 * 8), pte(0, 4 * LARGE));
        world.write(vram(SPT + 37 * 8), pte(0, 4 * LARGE));
        world.prepare();
        assert_eq!(world.at(5 * PAGE), small.map(|_| (0, 12 * LARGE)));
        assert_eq!(world.at(LARGE + 5 * PAGE), Some((2, HOST * PAGE)));
        // Move the page back to the card.
        let report = world.host(64 + 5, 1, None);
        assert!(report.lost_permission);
        assert_eq!(world.page(LARGE + 5 * PAGE).map(|page| page.large), Some(true));
        assert_eq!(world.at(5 * PAGE), small.map(|_| (0, 12 * LARGE)));
        assert_eq!(world.spaces.card_bytes(), bytes);
    }
}

#[test]
fn a_large_page_that_is_all_in_the_host_is_one_entry_there() {
    let mut world = World::mapped();
    world.write(vram(LPT + 8), pte(0, 2 * LARGE));
    world.sync();
    for page in 0..31 {
        world.host(64 + page, 1, Some(HOST + page));
        assert_eq!(world.page(LARGE).map(|page| page.large), Some(false));
    }
    world.host(64 + 31, 1, Some(HOST + 31));
    assert_eq!(world.page(LARGE).map(|page| (page.large, page.aperture, page.address)), Some((true, 2, HOST * PAGE)));
    // The pages are in host memory but misaligned, so small entries are still used.
    world.host(64, 32, Some(HOST + 33));
    assert_eq!(world.page(LARGE).map(|page| (page.large, page.aperture)), Some((false, 2)));
    assert_eq!(world.at(LARGE + 31 * PAGE), Some((2, (HOST + 64) * PAGE)));
    world.host(64, 32, None);
    assert_eq!(world.page(LARGE).map(|page| (page.large, page.aperture)), Some((true, 0)));
}

#[test]
fn each_pair_of_tables_has_its_own() {
    let mut world = World::mapped();
    world.write(vram(DIRECTORY + 8), pde(Some(LPT), None, EIGHTH));
    world.write(vram(DIRECTORY + 16), pde(None, Some(SPT), EIGHTH));
    world.write(vram(LPT), pte(0, 2 * LARGE));
    world.write(vram(SPT + 40 * 8), pte(0, 0));
    world.write(vram(SPT), pte(0, LARGE));
    world.sync();
    let before = world.spaces.card_bytes();
    world.host(64, 1, Some(HOST));
    assert_eq!(world.spaces.card_bytes(), before + 2 * 0x8000);
    let span = 1 << 27;
    for (base, head, rest) in [
        (0, Some((2, HOST * PAGE)), Some((0, 40 * LARGE))),
        (span, Some((2, HOST * PAGE)), None),
        (2 * span, Some((0, 41 * LARGE)), Some((0, 40 * LARGE))),
    ] {
        assert_eq!((world.at(base), world.at(base + 40 * PAGE)), (head, rest), "{base:#x}");
    }
    // When the guest removes the directory entry, the replacement table is dropped as well.
    world.write(vram(DIRECTORY + 8), 0);
    assert!(world.sync().lost_permission);
    assert_eq!(world.spaces.card_bytes(), before + 0x8000);
    assert_eq!(world.at(0), Some((2, HOST * PAGE)));
    world.spaces.close(world.id, &mut world.card);
    assert!(world.card.allocated.is_empty());
}

#[test]
fn split_page_over_limit_exposes_no_hidden_small_entries() {
    // The limit permits two tables, but not three.
    let mut world = World::with(Mode::Incremental, 0x8000 + PAGE);
    world.write(vram(DIRECTORY), pde(Some(LPT), Some(SPT), EIGHTH));
    world.write(vram(LPT), pte(0, 2 * LARGE));
    world.write(vram(SPT), pte(0, LARGE));
    world.sync();
    let report = world.host(64, 1, Some(HOST));
    assert_eq!(report.denied.count_of(Denial::Limit), 1);
    assert_eq!((world.at(0), world.at(PAGE)), (None, None), "the hidden entry must not be used");
    assert_eq!(world.spaces.resolve(world.id, GpuVa(0)), None);
    assert_eq!(world.sync().denied.total(), 0, "no page has changed");
    world.host(64, 1, None);
    world.sync();
    assert_eq!(world.at(0), Some((0, 7 * LARGE)));
    world.write(vram(LPT), 0);
    world.sync();
    assert_eq!(world.at(0), Some((0, 41 * LARGE)));
}

#[test]
fn split_page_waits_for_card_memory() {
    let mut world = World::mapped();
    world.write(vram(LPT), pte(0, 2 * LARGE));
    world.sync();
    world.card.room = Some(0);
    let report = world.host(64, 1, Some(HOST));
    assert_eq!((report.waiting, report.denied.total(), world.at(0)), (1, 0, None));
    assert_eq!(world.sync().waiting, 1);
    world.card.room = None;
    assert_eq!(world.sync().waiting, 0);
    assert_eq!(world.at(0), Some((2, HOST * PAGE)));
}

#[test]
fn entries_that_are_reached_stay_reachable_while_they_change() {
    // Check the card's tables after each write. The page must always be accessible, and must never map another page.
    let mut world = World::mapped();
    world.write(vram(LPT), pte(0, 2 * LARGE));
    world.write(vram(SPT + 3 * 8), pte(0, LARGE));
    world.sync();
    for to in [Some(HOST), None] {
        let mut card = Card::default();
        card.allocated.clone_from(&world.card.allocated);
        let (directory, first) = (world.directory(), world.card.writes.len());
        world.grants.hosted.clear();
        world.grants.hosted.extend(to.map(|to| (64 + 3, to)));
        let range = GuestRange::Vram(GuestVramAddr(2 * LARGE + 3 * PAGE), PAGE);
        world.spaces.retranslate(
            range,
            &mut Parts { guest: &mut world.guest, frames: &mut world.grants, memory: &mut world.card },
        );
        for (at, bytes) in world.card.allocated.iter().map(|(at, bytes)| (*at, bytes.len())) {
            card.allocated.entry(at).or_insert_with(|| vec![0; bytes]);
        }
        for (at, data) in &world.card.writes[first..] {
            card.write(VramAddr(*at), data);
            for (page, others) in [(2, false), (3, true)] {
                let found = walk((false, directory), page * PAGE, &|_, at| Some(card.read64(at)));
                let found = found.map(|found| (found.aperture, found.address));
                let old = found == Some((0, 7 * LARGE + page * PAGE));
                assert!(old || (others && found == Some((2, HOST * PAGE))), "{to:?}, page {page}: {found:x?}");
            }
        }
        world.spaces.flushed(world.id, &mut world.card);
    }
}

#[test]
fn page_with_untrapped_writes_is_read_before_announced_work() {
    for mode in [Mode::LazyAdd, Mode::Incremental] {
        let mut world = World::mapped_in(mode);
        assert!(!world.spaces.is_settled(world.id), "no page has been read yet");
        world.prepare();
        world.spaces.unseen(GuestVramAddr(SPT), true);
        world.prepare();
        assert!(world.spaces.is_settled(world.id));
        // This page has no permissions to lose.
        world.guest.write64(vram(SPT), pte(0, LARGE));
        assert!(world.spaces.is_settled(world.id), "no change has been announced");
        world.spaces.announced();
        assert!(!world.spaces.is_settled(world.id));
        world.prepare();
        assert_eq!((world.at(0), world.spaces.is_settled(world.id)), (Some((0, 41 * LARGE)), true));
        world.guest.write64(vram(SPT + PAGE), pte(0, 2 * LARGE));
        world.spaces.unseen(GuestVramAddr(SPT + PAGE), true);
        world.flush(false);
        // If the flush has not read the page, it must be read before work starts.
        assert_eq!(world.spaces.is_settled(world.id), mode == Mode::Incremental);
        world.prepare();
        assert_eq!(world.at(512 * PAGE), Some((0, 7 * LARGE)));
        // Trapped writes announce changes.
        world.write(vram(SPT), 0);
        assert!(!world.spaces.is_settled(world.id));
    }
}

#[test]
fn table_page_with_untrapped_cpu_writes_is_read_at_each_flush() {
    let mut world = World::mapped_in(Mode::LazyAdd);
    world.write(vram(SPT), pte(0, LARGE));
    world.prepare();
    world.spaces.unseen(GuestVramAddr(SPT), true);
    world.guest.write64(vram(SPT), pte(0, 2 * LARGE));
    assert!(world.flush(false).lost_permission);
    assert_eq!(world.at(0), Some((0, 7 * LARGE)));
    // Writes made immediately before trapping is resumed must be detected.
    world.guest.write64(vram(SPT), pte(0, LARGE));
    world.spaces.unseen(GuestVramAddr(SPT), false);
    world.flush(false);
    assert_eq!(world.at(0), Some((0, 41 * LARGE)));
    world.guest.write64(vram(SPT), 0);
    world.flush(false);
    assert_eq!(world.at(0), Some((0, 41 * LARGE)), "this write has not been announced");
}
