//! Tests of the modes and of the pages read in each: GPU writes, shared pages, withdrawal and relocation.

use super::*;
use crate::{HOST_PAGES, HostPage, SHARED_PAGES};
use nvspec::mmu::Rights;

#[test]
fn flush_reads_one_page_after_one_change_and_none_without() {
    for mode in [Mode::Incremental, Mode::LazyAdd] {
        let mut world = World::mapped_in(mode);
        for index in 0..4096 {
            world.write(vram(SPT + index * 8), pte(0, (index % 0x10) * PAGE));
        }
        world.prepare();
        let reads = world.guest.reads;
        assert_eq!(world.flush(false), SyncReport::default());
        assert_eq!(world.prepare(), SyncReport::default());
        assert_eq!(world.guest.reads, reads);

        world.write(vram(SPT + 1000 * 8), pte(0, 0));
        let report = world.flush(false);
        let wanted = SyncReport {
            tables_scanned: 1,
            pages: 1,
            bytes_scanned: PAGE,
            translated: 1,
            entries_written: 1,
            writes: 1,
            lost_permission: true,
            ..SyncReport::default()
        };
        assert_eq!(report, wanted, "{mode}");
        assert_eq!(world.guest.reads, reads + 1);

        // A change to a directory entry causes one directory page to be read.
        world.write(vram(DIRECTORY + 16), pde(Some(LPT), None, EIGHTH));
        let report = world.flush(false);
        assert_eq!((report.pages, report.entries_written, report.lost_permission), (1, 1, false));
        // Pages without tables are not read.
        world.write(vram(0x9_0000), 1);
        assert_eq!(world.flush(false), SyncReport::default());
    }
}

#[test]
fn naive_reads_and_writes_everything_each_time() {
    let mut world = World::mapped_in(Mode::Naive);
    world.write(vram(SPT), pte(0, 0));
    world.sync();
    let report = world.flush(false);
    // The directory, 128 large entries and 4096 small entries were read.
    assert_eq!((report.pages, report.bytes_scanned), (16 + 1 + 8, 0x1_0000 + 0x400 + 0x8000));
    assert_eq!((report.translated, report.entries_written), (128 + 4096, 8192 + 128 + 4096));
    assert!(!report.lost_permission && report.changed());
}

#[test]
fn lazy_does_nothing_at_a_flush_and_everything_before_work() {
    let mut world = World::mapped_in(Mode::Lazy);
    world.write(vram(SPT), pte(0, 0));
    let report = world.flush(false);
    assert_eq!((report.changed(), report.deferred), (false, 16));
    assert_eq!(world.prepare().pages, 16 + 1 + 8);
    assert!(world.at(0).is_some());
    world.write(vram(SPT), 0);
    assert!(!world.flush(false).changed());
    assert!(world.at(0).is_some(), "lazy mode must keep removed permissions");
    assert!(world.flush(true).lost_permission);
    assert_eq!(world.at(0), None);
}

#[test]
fn permission_gains_are_deferred_and_losses_are_not() {
    let mut world = World::mapped_in(Mode::LazyAdd);
    world.write(vram(SPT), pte(0, 0));
    let report = world.flush(false);
    // The directory consists of sixteen pages without shadow entries.
    assert_eq!((report.pages, report.changed(), report.deferred), (0, false, 16));
    assert_eq!(world.at(0), None);
    world.prepare();
    assert!(world.at(0).is_some());

    // Adding an entry to a page without shadow entries is deferred. Removing an entry from a page with shadow entries
    // is not deferred.
    world.write(vram(SPT + 512 * 8), pte(0, PAGE));
    world.write(vram(SPT), 0);
    let report = world.flush(false);
    assert_eq!((report.pages, report.lost_permission, report.deferred), (1, true, 1));
    assert_eq!((world.at(0), world.at(512 * PAGE)), (None, None));
    assert_eq!(world.spaces.waiting(world.id), 1);
    // While the card has work, all updates take effect immediately.
    assert_eq!((world.flush(true).pages, world.at(512 * PAGE).is_some()), (1, true));
    assert_eq!(world.spaces.waiting(world.id), 0);
}

#[test]
fn a_directory_entry_that_changes_tables_is_a_loss_at_once() {
    let mut world = World::mapped_in(Mode::LazyAdd);
    world.write(vram(SPT), pte(0, 0));
    world.write(vram(SPT + 0x8000), pte(0, PAGE));
    world.prepare();
    world.write(vram(DIRECTORY), pde(None, Some(SPT + 0x8000), EIGHTH));
    assert!(world.flush(false).lost_permission);
    assert_eq!(world.at(0), None);
    world.prepare();
    assert_eq!(world.at(0), Some((0, 40 * LARGE + PAGE)));
}

#[test]
fn the_gpu_writes_tables_that_it_maps_and_is_seen() {
    for mode in [Mode::Incremental, Mode::LazyAdd] {
        let mut world = World::mapped_in(mode);
        world.write(vram(SPT), pte(0, SPT));
        world.write(vram(SPT + 8), pte(0, 0));
        world.prepare();
        // GPU writes are not reported, so the first page of the small-page table is read every time.
        assert_eq!((world.flush(false).pages, world.prepare().pages), (1, 1));
        world.guest.write64(vram(SPT + 8), pte(0, PAGE));
        assert!(world.flush(false).lost_permission);
        assert_eq!(world.at(PAGE), Some((0, 40 * LARGE + PAGE)));
        // Now the page is mapped read-only. It is read once more, because the GPU may have written it earlier.
        world.write(vram(SPT), pte(0, SPT) | 4);
        assert_eq!(world.flush_only(false).pages, 1);
        // The GPU writes through stale TLB entries.
        world.guest.write64(vram(SPT + 8), 0);
        world.spaces.flushed(world.id, &mut world.card);
        assert_eq!((world.flush(false).pages, world.at(PAGE)), (1, None));
        assert_eq!((world.flush(false).pages, world.prepare().pages), (0, 0));
    }
}

#[test]
fn a_large_page_exposes_all_tables_in_it() {
    let mut world = World::mapped();
    world.write(vram(LPT), pte(0, LPT));
    world.sync();
    // The 128 KiB at 0x2_0000 contain the large-page table and eight pages of the small-page table.
    assert_eq!(world.sync().pages, 9);
    world.guest.write64(vram(SPT + 4095 * 8), pte(0, 0));
    world.sync();
    assert!(world.at(4095 * PAGE).is_some());
    world.write(vram(LPT), 0);
    world.sync();
    assert_eq!((world.sync().pages, world.sync().pages), (9, 0));
}

#[test]
fn gpu_writable_page_that_becomes_table_is_watched() {
    let mut world = World::mapped();
    world.write(vram(SPT), pte(0, 0x5_0000));
    world.sync();
    assert_eq!(world.sync().pages, 0);
    world.write(vram(DIRECTORY + 8), pde(None, Some(0x5_0000), EIGHTH));
    world.sync();
    world.guest.write64(vram(0x5_0000), pte(0, PAGE));
    assert_eq!(world.sync().pages, 1);
    assert!(world.at(1 << 27).is_some());
}

#[test]
fn another_space_that_exposes_a_table_counts() {
    let mut world = World::mapped();
    let first = world.id;
    world.sync();
    world.id = world.spaces.open(vram(0x9_0000), &mut world.card).unwrap();
    world.write(vram(0x9_0000), pde(None, Some(0x6_0000), EIGHTH));
    world.write(vram(0x6_0000), pte(0, SPT));
    world.sync();
    let second = std::mem::replace(&mut world.id, first);
    world.guest.write64(vram(SPT), pte(0, 0));
    assert_eq!((world.sync().pages, world.at(0).is_some()), (1, true));
    // Close the other space.
    world.guest.write64(vram(SPT), 0);
    world.spaces.close(second, &mut world.card);
    assert_eq!((world.sync().pages, world.at(0)), (1, None));
    assert_eq!(world.sync().pages, 0);
}

#[test]
fn write_reaches_all_spaces_and_tables_sharing_the_page() {
    let mut world = World::new();
    world.write(vram(DIRECTORY), pde(Some(SPT), Some(SPT), EIGHTH));
    let first = world.id;
    world.id = world.spaces.open(vram(SPT), &mut world.card).unwrap();
    let second = world.id;
    for id in [first, second] {
        world.id = id;
        world.prepare();
        assert_eq!(world.prepare().pages, 0);
    }
    world.write(vram(SPT), pte(0, 5 * LARGE));
    world.id = first;
    assert_eq!(world.sync().pages, 2, "the page contains a large-page and a small-page table");
    world.id = second;
    assert_eq!(world.sync().pages, 3, "the page contains a directory whose entry refers to two pages of a table");
    // A longer write affects all pages that it overlaps.
    world.spaces.written(GuestVramAddr(SPT - 1), PAGE + 2);
    world.id = first;
    assert_eq!(world.sync().pages, 3);
}

#[test]
fn withdrawn_entry_removed_by_guest_does_not_return() {
    let mut world = World::mapped_in(Mode::LazyAdd);
    let range = GuestRange::Ram(Gpa(0x1000 * PAGE), PAGE);
    world.write(vram(SPT), pte(2, 0x1000 * PAGE));
    world.prepare();
    world.invalidate(range);
    world.write(vram(SPT), 0);
    assert_eq!(world.flush(false).deferred, 1, "the page cannot lose a permission");
    let (touched, _) = world
        .spaces
        .retranslate(range, &mut Parts { guest: &mut world.guest, frames: &mut world.grants, memory: &mut world.card });
    assert_eq!((touched, world.at(0)), (vec![], None));
    world.prepare();
    assert_eq!(world.at(0), None);
}

#[test]
fn relocation_rewrites_only_entries_of_moved_chunk() {
    let mut world = World::mapped();
    world.write(vram(SPT), pte(0, LARGE));
    world.write(vram(SPT + 8), pte(0, 4 * LARGE));
    world.write(vram(LPT + 8), pte(0, LARGE));
    world.sync();
    world.grants.chunks[1] = Some(77);
    let range = GuestRange::Vram(GuestVramAddr(LARGE), LARGE);
    let (touched, report) = world
        .spaces
        .retranslate(range, &mut Parts { guest: &mut world.guest, frames: &mut world.grants, memory: &mut world.card });
    assert_eq!(touched, [world.id]);
    assert_eq!((report.translated, report.entries_written, report.lost_permission), (2, 2, true));
    assert_eq!((world.at(0), world.at(LARGE)), (Some((0, 77 * LARGE)), Some((0, 77 * LARGE))));
    assert_eq!(world.at(PAGE), Some((0, 12 * LARGE)));
    let again = world
        .spaces
        .retranslate(range, &mut Parts { guest: &mut world.guest, frames: &mut world.grants, memory: &mut world.card });
    assert!(again.0.is_empty() && !again.1.changed());
}

#[test]
fn mediator_pages_are_mapped_only_in_requesting_spaces() {
    let mut world = World::mapped();
    world.sync();
    let before = world.spaces.card_bytes();
    let page = VramAddr(0x7000_0000);
    let last = HOST_PAGES - 1;
    world.spaces.map_host(world.id, HostPage::Own(last), page, Rights::ReadOnly, &mut world.card).unwrap();
    world.spaces.map_host(world.id, HostPage::Own(0), page, Rights::ReadWrite, &mut world.card).unwrap();
    let at = |index: u32| crate::HOST_BASE.0 + u64::from(index) * PAGE;
    assert_eq!(world.page(at(0)).map(|page| (page.address, page.read_only)), Some((page.0, false)));
    assert_eq!(world.page(at(last)).map(|page| (page.address, page.read_only)), Some((page.0, true)));
    assert_eq!(world.spaces.resolve(world.id, GpuVa(at(0))), None);
    assert_eq!(world.spaces.card_bytes(), before + 0x8000);
    // The guest's directory entry does not affect the reserved one.
    world.write(vram(DIRECTORY + 8191 * 8), pde(None, Some(SPT), 0));
    assert_eq!(world.sync().denied.count_of(Denial::Reserved), 1);
    assert_eq!((world.at(at(0)), world.at(at(1))), (Some((0, page.0)), None));
    for index in [0, last] {
        world.spaces.unmap_host(world.id, HostPage::Own(index), &mut world.card);
        assert_eq!(world.at(at(index)), None);
    }
    // Shared pages have a separate directory entry and table.
    let shared = HostPage::Shared(SHARED_PAGES - 1);
    world.spaces.map_host(world.id, shared, page, Rights::Privileged, &mut world.card).unwrap();
    assert_eq!(world.at(crate::HOST_BASE.0 - PAGE), Some((0, page.0)));
    let found = world.page(crate::HOST_BASE.0 - PAGE).map(|page| (page.read_only, page.privileged));
    assert_eq!(found, Some((false, true)));
    assert_eq!(world.spaces.card_bytes(), before + 0x8000 + 0x4_0000);
    world.write(vram(DIRECTORY + 8190 * 8), pde(None, Some(SPT), 0));
    assert_eq!(world.sync().denied.count_of(Denial::Reserved), 1);
    assert_eq!((world.at(crate::HOST_BASE.0 - PAGE), world.at(crate::SHARED_BASE.0)), (Some((0, page.0)), None));
    let mut refused =
        |page, at| world.spaces.map_host(world.id, page, at, Rights::ReadWrite, &mut world.card) == Err(NoMemory);
    assert!(refused(HostPage::Own(HOST_PAGES), page) && refused(HostPage::Shared(SHARED_PAGES), page));
    assert!(refused(HostPage::Own(1), VramAddr(1 << 40)));
    world.spaces.close(world.id, &mut world.card);
    assert_eq!(
        world.spaces.map_host(world.id, HostPage::Own(1), page, Rights::ReadWrite, &mut world.card),
        Err(NoMemory)
    );
    assert!(world.card.allocated.is_empty());
}
