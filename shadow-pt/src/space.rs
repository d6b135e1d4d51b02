//! A guest address space: a directory, its tables, and their shadows.

use crate::bits::{bit, members};
use crate::host::{FIRST_ENTRY, HostTable, frame};
use crate::mirror::{Mirror, PAGE_BYTES, PAGE_ENTRIES, RawEntry, Runs};
use crate::mode::Scope;
use crate::pages::{FrameRun, User};
use crate::reverse::Piece;
use crate::shared::Shared;
use crate::split::{Pair, SplitWrites, Splits};
use crate::table::{Books, Changes, Table, TableKey, Tables};
use crate::translate::Shadow;
use crate::{Denial, Frames, GuestMemory, Place, ShadowMemory, SyncReport, World};
use nvspec::addr::VramAddr;
use nvspec::mmu::{PD_BYTES, PD_ENTRIES, Pde, TableTarget};
use std::collections::{BTreeMap, BTreeSet};

/// Number of directory entries that refer to a table, and the table's state.
#[derive(Clone, Copy, Debug)]
struct Reference {
    count: u32,
    table: Made,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Made {
    /// The table has not been created yet.
    Wanted,
    /// The table could not be created. It either exceeds the limit and was reported as denied, or is waiting for card
    /// memory.
    Refused,
    /// The table exists and has this number.
    Yes(u32),
}

/// A guest address space and its shadow.
#[derive(Debug)]
pub(crate) struct Space {
    /// Distinguishes the space from previous spaces with the same index.
    pub(crate) generation: u32,
    index: u32,
    pub(crate) directory: Mirror,
    references: BTreeMap<TableKey, Reference>,
    /// Tables that directory entries refer to but that have not been created.
    missing: BTreeSet<TableKey>,
    /// Value of [`Shared::rooms`] at the last attempt to create the missing tables.
    rooms: u64,
    /// Tables with pending work. Contains no duplicates after a synchronization.
    pub(crate) queue: Vec<u32>,
    /// This crate's own tables for split large pages.
    pub(crate) splits: Splits,
    /// Unlinked shadow tables that the card's TLBs may still cache, as addresses and sizes in bytes.
    unlinked: Vec<(VramAddr, u64)>,
    /// Pages that removed entries made writable. The card's TLBs may still cache these entries.
    pub(crate) released: Vec<FrameRun>,
    /// Value of [`Shared::writes`] at the guest's last flush.
    pub(crate) flushed_at: u64,
    /// True if a guest flush has been deferred.
    pub(crate) marked: bool,
    /// True if the guest has announced changes since all pending pages were last read.
    pub(crate) announced: bool,
    /// Tables for mediator pages, one per area.
    pub(crate) host: [Option<HostTable>; 2],
    /// Size of the space's tables in card memory, in bytes.
    table_bytes: u64,
}

impl Space {
    /// Creates an empty shadow of the directory at `place`. All pages are pending.
    pub(crate) fn new(index: u32, generation: u32, place: Place, card: VramAddr, shared: &mut Shared) -> Self {
        let mut directory = Mirror::new(place, card, PD_ENTRIES);
        for page in members(directory.all()) {
            if let Some(frame) = directory.frame(page)
                && shared.pages.register(frame, User::Directory(index, page))
            {
                directory.watched |= bit(page);
            }
        }
        Self {
            generation,
            index,
            directory,
            references: BTreeMap::new(),
            missing: BTreeSet::new(),
            rooms: shared.rooms,
            queue: Vec::new(),
            splits: Splits::default(),
            unlinked: Vec::new(),
            released: Vec::new(),
            flushed_at: shared.writes.wrapping_sub(1),
            marked: false,
            announced: true,
            host: [None; 2],
            table_bytes: 0,
        }
    }

    /// Returns the amount of card memory used by the space, in bytes.
    pub(crate) fn card_bytes(&self) -> u64 {
        let unlinked = self.unlinked.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        let host = self.host.iter().flatten().fold(0u64, |sum, table| sum.saturating_add(table.bytes()));
        PD_BYTES.saturating_add(self.table_bytes).saturating_add(unlinked).saturating_add(host)
    }

    /// Returns the card memory of the replacement tables and of unlinked tables, as start addresses and sizes in bytes.
    pub(crate) fn old_tables(&self) -> impl Iterator<Item = (VramAddr, u64)> + '_ {
        self.splits.cards().chain(self.unlinked.iter().copied())
    }

    /// Returns the number of the table with this key, if it exists.
    pub(crate) fn table(&self, key: &TableKey) -> Option<u32> {
        made(&self.references, key)
    }

    /// Returns the number of guest table pages that must be read, excluding pages that are only watched.
    pub(crate) fn waiting(&self, tables: &Tables) -> u64 {
        let own = u64::from(self.directory.dirty.count_ones());
        let tables = self.queue.iter().filter_map(|number| tables.get(*number));
        tables.fold(own, |sum, table| sum.saturating_add(u64::from((table.mirror.dirty | table.recheck).count_ones())))
    }

    /// Returns the numbers of the existing tables.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.references.values().filter_map(|reference| match reference.table {
            Made::Yes(number) => Some(number),
            Made::Wanted | Made::Refused => None,
        })
    }

    /// Returns true if the shadow reflects all changes that the guest has announced.
    pub(crate) fn is_settled(&self, tables: &Tables) -> bool {
        let known = !self.marked && !self.announced && self.waiting(tables) == 0;
        known && self.missing.is_empty() && self.splits.is_idle()
    }

    fn is_idle(&self) -> bool {
        self.directory.pending() == 0 && self.queue.is_empty() && self.missing.is_empty() && self.splits.is_idle()
    }

    /// Updates the shadow from the guest's current tables, limited to `scope` and to the memory granted by `world`.
    /// `unflushed` is false if the guest has just flushed its TLB. Otherwise, the guest may still be writing an entry.
    pub(crate) fn sync(
        &mut self,
        shared: &mut Shared,
        scope: Scope,
        unflushed: bool,
        world: &mut impl World,
    ) -> SyncReport {
        let mut report = SyncReport::default();
        if scope == Scope::Everything {
            self.directory.dirty = self.directory.all();
        } else if self.is_idle() {
            return report;
        }
        let mut relink = self.read_directory(shared, scope, world, &mut report);
        if scope != Scope::Losing && self.make_tables(shared, world, &mut report) {
            relink = self.directory.all();
        }
        let work = self.read_tables(shared, scope, unflushed, world, &mut report);
        self.commit(shared, &work, relink, world, &mut report);
        if scope == Scope::Everything {
            for number in self.numbers() {
                if let Some(table) = shared.tables.get(number) {
                    table.mirror.write_all(world, &mut report);
                }
            }
            self.splits.write_all(world, &mut report);
            self.directory.write_all(world, &mut report);
        }
        self.requeue(&mut shared.tables);
        report
    }

    /// Writes the mirror changes in `work` to the card, and relinks the directory pages in `relink`.
    ///
    /// The order of writes keeps a large page accessible while it is split or merged. Small entries that replace large
    /// entries are written first, together with the links to their tables. Next come changes that remove permissions,
    /// then new tables, then changes that add permissions. All other small entries in replacement tables are written
    /// last.
    pub(crate) fn commit(
        &mut self,
        shared: &mut Shared,
        work: &[(u32, Changes)],
        mut relink: u64,
        memory: &mut impl ShadowMemory,
        report: &mut SyncReport,
    ) {
        let (writes, linked) = self.split(shared, work, memory, report);
        self.splits.write(&writes, true, memory, report);
        if linked {
            relink = self.directory.all();
        }
        let links = self.link(relink, &shared.tables);
        if linked {
            self.directory.write(&links, true, memory, report);
            self.directory.write(&links, false, memory, report);
        }
        let each = |losing: bool, report: &mut SyncReport, memory: &mut _| {
            for (number, changes) in work {
                if let Some(table) = shared.tables.get(*number) {
                    table.mirror.write(&changes.runs, losing, memory, report);
                }
            }
        };
        each(true, report, memory);
        if !linked {
            self.directory.write(&links, true, memory, report);
        }
        each(false, report, memory);
        if !linked {
            self.directory.write(&links, false, memory, report);
        }
        self.splits.write(&writes, false, memory, report);
        self.unsplit(shared, memory, report);
        if shared.ram_barred && self.bar_tables(shared) {
            // Relink the tables that no longer map RAM on the card.
            self.relink(self.directory.all(), shared, memory, report);
        }
    }

    /// Marks tables that map RAM as barred if RAM is barred, and all other tables as not barred. Returns true if any
    /// mark changes, in which case [`Self::relink`] must be called.
    pub(crate) fn bar_tables(&self, shared: &mut Shared) -> bool {
        let mut changed = false;
        for number in self.numbers() {
            let Some(table) = shared.tables.get_mut(number) else { continue };
            let bar = shared.ram_barred && table.ram != 0;
            changed |= std::mem::replace(&mut table.barred, bar) != bar;
        }
        changed
    }

    /// Relinks the directory's `pages` in the mirror and on the card.
    pub(crate) fn relink(
        &mut self,
        pages: u64,
        shared: &Shared,
        memory: &mut impl ShadowMemory,
        report: &mut SyncReport,
    ) {
        let links = self.link(pages, &shared.tables);
        for losing in [true, false] {
            self.directory.write(&links, losing, memory, report);
        }
    }

    /// Updates the host copies of the replacement tables from the mirrors, and creates missing replacement tables.
    /// Returns the entries to write, and a flag that is true if the directory must be relinked.
    fn split(
        &mut self,
        shared: &mut Shared,
        work: &[(u32, Changes)],
        memory: &mut impl ShadowMemory,
        report: &mut SyncReport,
    ) -> (SplitWrites, bool) {
        let mut writes = SplitWrites::default();
        let Self { references, splits, table_bytes, .. } = self;
        let Shared { tables, limits, table_bytes: all_bytes, .. } = shared;
        let mirror = |key: &TableKey| made(references, key).and_then(|number| tables.get(number)).map(|t| &t.mirror);
        for (number, changes) in work {
            let Some(table) = tables.get(*number) else { continue };
            if !changes.splits.is_empty() {
                splits.touch(&table.key);
                splits.large_changed(&table.key, &changes.splits, mirror, &mut writes);
            }
            if !splits.is_empty() && !changes.runs.is_empty() {
                splits.small_changed(&table.key, &changes.runs, mirror, &mut writes);
            }
        }
        if splits.is_idle() {
            return (writes, false);
        }
        let made = splits.make(limits.table_bytes.saturating_sub(*all_bytes), mirror, memory);
        splits.fill(&made.fresh, mirror, &mut writes);
        let bytes = Splits::bytes_of(&made.fresh);
        *table_bytes = table_bytes.saturating_add(bytes);
        *all_bytes = all_bytes.saturating_add(bytes);
        if made.denied {
            report.denied.add(Denial::Limit);
        }
        report.waiting = report.waiting.saturating_add(made.waiting);
        (writes, made.changes || !made.fresh.is_empty())
    }

    /// Drops unneeded replacement tables.
    fn unsplit(&mut self, shared: &mut Shared, memory: &mut impl ShadowMemory, report: &mut SyncReport) {
        if self.splits.is_empty() {
            return;
        }
        let Self { references, splits, unlinked, .. } = self;
        let tables = &shared.tables;
        let mirror = |key: &TableKey| made(references, key).and_then(|number| tables.get(number)).map(|t| &t.mirror);
        let bytes = splits.drop_unneeded(mirror, unlinked);
        if bytes == 0 {
            return;
        }
        self.give_back(shared, bytes);
        self.relink(self.directory.all(), shared, memory, report);
    }

    /// Subtracts `bytes` bytes of tables from the size to which the limit applies.
    fn give_back(&mut self, shared: &mut Shared, bytes: u64) {
        self.table_bytes = self.table_bytes.saturating_sub(bytes);
        shared.table_bytes = shared.table_bytes.saturating_sub(bytes);
        shared.rooms = shared.rooms.wrapping_add(1);
    }

    /// Reads changes to the guest's directory. Returns the pages that must be relinked.
    fn read_directory(
        &mut self,
        shared: &mut Shared,
        scope: Scope,
        guest: &mut impl GuestMemory,
        report: &mut SyncReport,
    ) -> u64 {
        let pending = self.directory.pending();
        let now = if scope == Scope::Losing { self.directory.losing(pending) } else { pending };
        report.deferred = report.deferred.saturating_add(u64::from((self.directory.dirty & !now).count_ones()));
        if now == 0 {
            return 0;
        }
        let (lost, pages) = (self.directory.is_lost(), report.pages);
        let mut buffer = [0; PAGE_BYTES];
        let mut relink = 0;
        let mut orphans = Vec::new();
        for page in members(now) {
            let changed = self.directory.read(page, &mut buffer, guest, report);
            self.directory.frame(page).into_iter().for_each(|frame| shared.pages.clear_marked(frame));
            let Some(changed) = changed else { continue };
            relink |= bit(page);
            let fresh: &[RawEntry] = buffer.as_chunks().0;
            for at in crate::bits::members512(&changed) {
                let raw = fresh.get(at as usize).map_or(0, |raw| u64::from_le_bytes(*raw));
                self.take_entry(page.saturating_mul(PAGE_ENTRIES).saturating_add(at), raw, &mut orphans, report);
            }
        }
        for key in orphans {
            if self.references.get(&key).is_some_and(|reference| reference.count == 0) {
                self.drop_table(shared, &key);
            }
        }
        let bytes = self.splits.drop_orphans(&mut self.unlinked);
        if bytes != 0 {
            self.give_back(shared, bytes);
        }
        if report.pages != pages {
            report.tables_scanned = report.tables_scanned.saturating_add(1);
        }
        if self.directory.is_lost() && !lost {
            report.denied.add(Denial::Table);
        }
        relink
    }

    /// Records `raw` as the guest's new directory entry. Appends to `orphans` the previous entry's tables whose
    /// reference count drops to 0.
    fn take_entry(&mut self, index: u32, raw: u64, orphans: &mut Vec<TableKey>, report: &mut SyncReport) {
        let at = index as usize;
        let pdes = [Pde::from(self.directory.raw(at)), Pde::from(raw)];
        let [before, after] = pdes.map(TableKey::both);
        self.directory.set(at, raw, Shadow::Entry(self.directory.entry(at)));
        if index >= FIRST_ENTRY {
            if after.iter().any(Option::is_some) {
                report.denied.add(Denial::Reserved);
            }
            return;
        }
        self.splits.relink(pdes[0], pdes[1]);
        for key in before.into_iter().flatten() {
            if let Some(reference) = self.references.get_mut(&key) {
                reference.count = reference.count.saturating_sub(1);
                if reference.count == 0 {
                    orphans.push(key);
                }
            }
        }
        for key in after.into_iter().flatten() {
            let reference = self.references.entry(key).or_insert_with(|| {
                self.missing.insert(key);
                Reference { count: 0, table: Made::Wanted }
            });
            reference.count = reference.count.saturating_add(1);
        }
    }

    /// Drops a table. Its shadow is freed at the next flush of the card's TLBs.
    fn drop_table(&mut self, shared: &mut Shared, key: &TableKey) {
        let Some(reference) = self.references.remove(key) else { return };
        self.missing.remove(key);
        let Made::Yes(number) = reference.table else { return };
        let Some(mut table) = shared.tables.remove(number) else { return };
        let Shared { pages, reverse, gained, splits_left, .. } = shared;
        let released = &mut self.released;
        table.retire(number, pages, &mut Books { reverse, gained, released, splits_left, half_written: false });
        self.unlinked.push((table.mirror.card, key.bytes()));
        self.give_back(shared, key.bytes());
    }

    /// Creates missing tables, to the extent permitted by the limit and card memory. Returns true if any table was
    /// created.
    fn make_tables(&mut self, shared: &mut Shared, memory: &mut impl ShadowMemory, report: &mut SyncReport) -> bool {
        if self.missing.is_empty() {
            return false;
        }
        let Self { index, references, missing, rooms, queue, table_bytes, .. } = self;
        // If no memory has been freed since the last attempt, retry only the first rejected table. It may have been
        // rejected because card memory was exhausted.
        let mut again = *rooms != shared.rooms;
        *rooms = shared.rooms;
        let mut tried = false;
        let mut made = false;
        missing.retain(|key| {
            let Some(reference) = references.get_mut(key) else { return false };
            let refused = reference.table == Made::Refused;
            if refused && tried && !again {
                return true;
            }
            let fits = shared.table_bytes.saturating_add(key.bytes()) <= shared.limits.table_bytes;
            let Some(card) = fits.then(|| memory.alloc(key.bytes())).flatten() else {
                tried |= refused;
                if fits {
                    report.waiting = report.waiting.saturating_add(1);
                } else if !refused {
                    report.denied.add(Denial::Limit);
                }
                reference.table = Made::Refused;
                return true;
            };
            again |= refused;
            let mut table = Table::new(*key, *index, card);
            table.queued = true;
            let number = shared.tables.insert(table);
            if let Some(table) = shared.tables.get_mut(number) {
                table.register(number, &mut shared.pages);
            }
            reference.table = Made::Yes(number);
            queue.push(number);
            *table_bytes = table_bytes.saturating_add(key.bytes());
            shared.table_bytes = shared.table_bytes.saturating_add(key.bytes());
            made = true;
            false
        });
        made
    }

    /// Updates the tables' mirrors from the guest's tables. Returns the changes to each table.
    fn read_tables(
        &mut self,
        shared: &mut Shared,
        scope: Scope,
        unflushed: bool,
        world: &mut (impl GuestMemory + Frames),
        report: &mut SyncReport,
    ) -> Vec<(u32, Changes)> {
        if scope == Scope::Everything {
            self.queue = self.numbers().collect();
        }
        let Shared { tables, pages, reverse, gained, splits_left, writes, .. } = shared;
        let written = *writes != self.flushed_at;
        let released = &mut self.released;
        let mut books = Books { reverse, gained, released, splits_left, half_written: false };
        let mut buffer = [0; PAGE_BYTES];
        let mut work = Vec::new();
        for number in &self.queue {
            let Some(table) = tables.get_mut(*number).filter(|table| table.space == self.index) else { continue };
            let read = if scope == Scope::Everything { table.mirror.all() } else { table.mirror.pending() };
            let read = if scope == Scope::Losing { table.mirror.losing(read) } else { read };
            let now = if scope == Scope::Losing { read } else { read | table.recheck };
            let waits = (table.mirror.dirty | table.recheck) & !now;
            report.deferred = report.deferred.saturating_add(u64::from(waits.count_ones()));
            let (lost, read_before) = (table.mirror.is_lost(), report.pages);
            let mut changes = Changes::default();
            for page in members(now) {
                let piece = Piece::new(*number, page);
                books.half_written = unflushed && (written || table.mirror.watched & bit(page) != 0);
                let range = table.mirror.range(page);
                let mut changed = None;
                let mut fresh = None;
                if read & bit(page) != 0 {
                    changed = table.mirror.read(page, &mut buffer, world, report);
                    table.mirror.frame(page).into_iter().for_each(|frame| pages.clear_marked(frame));
                    fresh = Some(buffer.as_slice());
                }
                if scope == Scope::Everything {
                    changed = Some(crate::bits::below512(range.len()));
                }
                if changed.is_some() || table.recheck & bit(page) != 0 {
                    table.take(piece, changed.unwrap_or_default(), fresh, world, &mut books, &mut changes, report);
                }
            }
            if report.pages != read_before {
                report.tables_scanned = report.tables_scanned.saturating_add(1);
            }
            if table.mirror.is_lost() && !lost {
                report.denied.add(Denial::Table);
            }
            if !changes.is_empty() {
                work.push((*number, changes));
            }
        }
        work
    }

    /// Removes duplicates and tables without pending work from the queue.
    fn requeue(&mut self, tables: &mut Tables) {
        let index = self.index;
        for number in &self.queue {
            if let Some(table) = tables.get_mut(*number).filter(|table| table.space == index) {
                table.queued = false;
            }
        }
        self.queue.retain(|number| {
            let table = tables.get_mut(*number).filter(|table| table.space == index);
            table.is_some_and(|table| {
                let keep = table.is_pending() && !table.queued;
                table.queued |= keep;
                keep
            })
        });
    }

    /// Links the directory's `pages` in the mirror to the shadows of the guest's tables. Returns the changed entries.
    fn link(&mut self, pages: u64, tables: &Tables) -> Runs {
        let mut runs = Runs::default();
        for page in members(pages) {
            for index in self.directory.range(page) {
                let (raw, old) = (self.directory.raw(index), self.directory.entry(index));
                if index >= FIRST_ENTRY as usize || (raw == 0 && old == 0) {
                    continue;
                }
                let new = self.shadow_pde(Pde::from(raw), tables);
                if new != old {
                    runs.push(index, loses_pde(old, new));
                    self.directory.set(index, raw, Shadow::Entry(new));
                }
            }
        }
        runs
    }

    /// Returns the shadow of a directory entry, with the same size code and with the addresses of the shadow tables.
    /// Returns 0 if no shadow table exists, or if one is barred.
    fn shadow_pde(&self, guest: Pde, tables: &Tables) -> u64 {
        let [large_table, small_table] = TableKey::both(guest).map(|key| tables.get(self.table(&key?)?));
        if [large_table, small_table].into_iter().flatten().any(|table| table.barred) {
            return 0;
        }
        let large = large_table.and_then(|table| frame(table.mirror.card));
        let stand_in = large_table.and_then(|table| self.splits.stand_in(&Pair::from_pde(guest)?, &table.mirror));
        let small = stand_in.unwrap_or_else(|| small_table.map(|table| table.mirror.card)).and_then(frame);
        if large.is_none() && small.is_none() {
            return 0;
        }
        let mut pde = Pde::new().with_large_size(guest.large_size());
        if let Some(frame) = large {
            pde = pde.with_large_target(TableTarget::Vram).with_large_frame(frame);
        }
        if let Some(frame) = small {
            pde = pde.with_small_target(TableTarget::Vram).with_small_frame(frame);
        }
        pde.into()
    }

    /// Marks unreadable directory pages for rereading after a grant of memory.
    pub(crate) fn granted(&mut self) {
        self.directory.retry();
    }

    /// Frees unlinked tables after a flush of the card's TLBs. Returns the pages that removed entries had made
    /// writable.
    pub(crate) fn flushed(&mut self, memory: &mut impl ShadowMemory) -> Vec<FrameRun> {
        for (address, bytes) in self.unlinked.drain(..) {
            memory.free(address, bytes);
        }
        std::mem::take(&mut self.released)
    }

    /// Frees the space's memory. The card must no longer use the directory. Returns the pages that the space's entries
    /// had made writable.
    pub(crate) fn close(mut self, shared: &mut Shared, memory: &mut impl ShadowMemory) -> Vec<FrameRun> {
        let keys: Vec<TableKey> = self.references.keys().copied().collect();
        for key in &keys {
            self.drop_table(shared, key);
        }
        let bytes = self.splits.clear(&mut self.unlinked);
        self.give_back(shared, bytes);
        for page in members(self.directory.all()) {
            if let Some(frame) = self.directory.frame(page) {
                shared.pages.unregister(frame, User::Directory(self.index, page));
            }
        }
        let released = self.flushed(memory);
        for host in self.host.iter().flatten() {
            memory.free(host.card(), host.bytes());
        }
        memory.free(self.directory.card, PD_BYTES);
        released
    }
}

/// Returns the number of the table with this key, if it exists.
fn made(references: &BTreeMap<TableKey, Reference>, key: &TableKey) -> Option<u32> {
    match references.get(key)?.table {
        Made::Yes(number) => Some(number),
        Made::Wanted | Made::Refused => None,
    }
}

/// Returns true if `old` refers to a table to which `new` does not refer, or has a different table size.
fn loses_pde(old: u64, new: u64) -> bool {
    let (old, new) = (Pde::from(old), Pde::from(new));
    let large = (old.large_target(), old.large_frame()) != (new.large_target(), new.large_frame());
    let small = (old.small_target(), old.small_frame()) != (new.small_target(), new.small_frame());
    let size = old.large_size() != new.large_size() && u64::from(old) != 0;
    (old.large_target() != TableTarget::None && large) || (old.small_target() != TableTarget::None && small) || size
}
