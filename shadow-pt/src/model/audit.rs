//! Recomputes all derived state from the mirrors, and compares it with the actual state.

use super::world::PAGE;
use crate::AddressSpaces;
use crate::bits::{bit, members};
use crate::pages::User;
use crate::reverse::{BLOCK_PAGES_SHIFT, Piece};
use crate::table::Table;
use crate::translate::{PIECES_BYTES, PageSize, named};
use nvspec::mmu::Pte;
use std::collections::{BTreeMap, BTreeSet};

impl AddressSpaces {
    /// Panics if counts, the reverse map, the index of table pages, or the queues are inconsistent with the mirrors.
    /// All spaces must have been flushed. `unseen` lists the addresses of pages that the CPU can write without a trap.
    pub(crate) fn audit(&self, unseen: &BTreeSet<u64>) {
        let mut records: BTreeMap<u64, u32> = BTreeMap::new();
        let mut writable: BTreeMap<u32, (u32, u32)> = unseen.iter().map(|at| ((at / PAGE) as u32, (0, 1))).collect();
        let mut splits = 0;
        let mut seen = BTreeSet::new();
        for (id, space) in self.each() {
            assert!(space.released.is_empty(), "the space has not been flushed");
            for number in &space.queue {
                let table = self.shared.tables.get(*number).expect("a queue contains a removed table");
                assert!(table.queued && table.is_pending(), "a queue contains a table without work");
            }
            let queue: BTreeSet<u32> = space.queue.iter().copied().collect();
            assert_eq!(queue.len(), space.queue.len(), "a table is in the queue twice");
            for page in members(space.directory.all()) {
                if let Some(frame) = space.directory.frame(page) {
                    self.audit_page(
                        frame,
                        User::Directory(id.index() as u32, page),
                        space.directory.watched & bit(page) != 0,
                        space.directory.dirty & bit(page) != 0,
                    );
                }
            }
            for number in space.numbers() {
                let table = self.shared.tables.get(number).expect("a reference to a removed table");
                assert!(seen.insert(number), "a table belongs to two spaces");
                assert_eq!(table.queued, queue.contains(&number));
                assert!(table.queued || !table.is_pending(), "a table with pending work is not in the queue");
                self.audit_table(number, table, &mut records, &mut writable);
                splits += table.mirror.splits.len() as u64;
            }
            space.splits.audit(&self.shared.tables, |key| space.table(key));
        }
        assert_eq!(seen.len(), self.tables());
        assert_eq!(&records, self.shared.reverse.records());
        for frame in 0..1 << BLOCK_PAGES_SHIFT {
            let (large, small) = self.shared.pages.counts(frame);
            let wanted = writable.get(&frame).copied().unwrap_or_default();
            assert_eq!((large, small), wanted, "page {frame:#x} has wrong counts");
        }
        assert!(writable.keys().all(|frame| frame >> BLOCK_PAGES_SHIFT == 0), "the model's VRAM fits in one block");
        assert_eq!(self.shared.splits_left + splits, self.shared.limits.table_bytes / PIECES_BYTES);
        if self.count() == 0 && unseen.is_empty() {
            assert!(self.shared.pages.is_empty());
        }
    }

    fn audit_table(
        &self,
        number: u32,
        table: &Table,
        records: &mut BTreeMap<u64, u32>,
        writable: &mut BTreeMap<u32, (u32, u32)>,
    ) {
        let mirror = &table.mirror;
        for page in members(mirror.all()) {
            let mut live = 0;
            for index in mirror.range(page) {
                let shadow = mirror.effective(index);
                live += u16::from(shadow != 0);
                let Some(named) = named(mirror.raw(index), table.key.size) else {
                    assert_eq!(shadow, 0);
                    continue;
                };
                let block = u64::from(named.frame >> BLOCK_PAGES_SHIFT) | u64::from(named.system) << 31;
                let piece = u64::from(number) << 6 | u64::from(page);
                assert_eq!(Piece::new(number, page).table(), number);
                *records.entry(block << 32 | piece).or_default() += 1;
                if shadow != 0 && !named.system && !Pte::from(shadow).read_only() {
                    let large = table.key.size == PageSize::Large;
                    for frame in named.frame..named.frame + if large { 32 } else { 1 } {
                        let counts = writable.entry(frame).or_default();
                        *(if large { &mut counts.0 } else { &mut counts.1 }) += 1;
                    }
                }
            }
            assert_eq!(mirror.live[page as usize], live);
            if let Some(frame) = mirror.frame(page) {
                let (dirty, watched) = (mirror.dirty & bit(page) != 0, mirror.watched & bit(page) != 0);
                self.audit_page(frame, User::Table(number, page), watched, dirty);
            } else {
                assert_eq!(mirror.watched, mirror.all(), "a table in RAM is not watched");
            }
        }
    }

    fn audit_page(&self, frame: u32, user: User, watched: bool, dirty: bool) {
        let pages = &self.shared.pages;
        assert!(pages.users(frame).contains(&user), "{user:?} is not registered for {frame:#x}");
        assert_eq!(watched, pages.counts(frame) != (0, 0), "{user:?} does not watch {frame:#x}");
        assert!(dirty || pages.news(frame), "{user:?} would not be notified of changes to {frame:#x}");
    }
}
