//! The shadow of a guest page table.

use crate::bits::{self, Set512, bit};
use crate::mirror::{Mirror, PAGE_ENTRIES, RawEntry, Runs};
use crate::moved::Moved;
use crate::pages::{FrameRun, PageIndex, User};
use crate::reverse::{Piece, ReverseMap};
use crate::translate::{Named, PageSize, Shadow, loses, named, translate};
use crate::{Denial, Frames, GuestRange, Place, SyncReport};
use nvspec::addr::{Gpa, GuestVramAddr, SMALL_PAGE, VramAddr};
use nvspec::mmu::{ENTRY_BYTES, Pde, Pte, TableTarget};

/// Identifies a guest table. Directory entries that refer to the same memory with the same interpretation share a
/// shadow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TableKey {
    pub(crate) place: Place,
    pub(crate) size: PageSize,
    pub(crate) entries: u32,
}

impl TableKey {
    /// Returns the large-page and small-page tables of a directory entry.
    pub(crate) fn both(pde: Pde) -> [Option<Self>; 2] {
        let large = place(pde.large_target(), pde.large_address());
        let small = place(pde.small_target(), pde.small_address());
        [
            large.map(|place| Self { place, size: PageSize::Large, entries: pde.large_entries() }),
            small.map(|place| Self { place, size: PageSize::Small, entries: pde.small_entries() }),
        ]
    }

    /// Returns the size of the shadow on the card in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.entries).saturating_mul(ENTRY_BYTES).next_multiple_of(SMALL_PAGE)
    }
}

fn place(target: TableTarget, address: u64) -> Option<Place> {
    match target {
        TableTarget::None => None,
        TableTarget::Vram => Some(Place::Vram(GuestVramAddr(address))),
        TableTarget::SysCoherent | TableTarget::SysNonCoherent => Some(Place::Ram(Gpa(address))),
    }
}

/// State that must be updated when an entry changes.
pub(crate) struct Books<'a> {
    pub(crate) reverse: &'a mut ReverseMap,
    /// VRAM pages that have become writable by the GPU.
    pub(crate) gained: &'a mut Vec<FrameRun>,
    /// Pages that removed entries made writable. The card's TLBs may still cache these entries.
    pub(crate) released: &'a mut Vec<FrameRun>,
    /// Number of large entries that may still be split.
    pub(crate) splits_left: &'a mut u64,
    /// True if entries may be partially written, because the guest has not flushed.
    pub(crate) half_written: bool,
}

/// Changes to a table in one synchronization.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Runs of changed card entries.
    pub(crate) runs: Runs,
    /// Large entries whose replacement entries have changed.
    pub(crate) splits: Vec<usize>,
}

impl Changes {
    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty() && self.splits.is_empty()
    }
}

/// Maximum number of entries per table that are read again before they are reported as denied. Each guest CPU may still
/// be writing one entry.
const MAX_DOUBTED: usize = 16;

/// The shadow of a guest table.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) key: TableKey,
    /// Index of the table's space.
    pub(crate) space: u32,
    pub(crate) mirror: Mirror,
    /// Number of entries that refer to memory but have no shadow entry, for each page. They may be granted later.
    absent: Box<[u16]>,
    /// Index and value of each entry that was not granted when it was first read. A driver writes the two halves of an
    /// entry separately, so the entry may be incomplete when another CPU submits work. The mirror contains 0 for these
    /// entries, and their pages are read again.
    doubted: Vec<(usize, u64)>,
    /// Mask of pages whose absent entries must be checked again.
    pub(crate) recheck: u64,
    /// True if the table is in its space's queue of tables with pending work.
    pub(crate) queued: bool,
    /// Number of entries through which the card can access RAM.
    pub(crate) ram: u32,
    /// True if the directory does not link the table, because the VM's RAM is barred and the table maps RAM.
    pub(crate) barred: bool,
}

impl Table {
    /// Creates a table. The shadow at `card` must have been zeroed.
    pub(crate) fn new(key: TableKey, space: u32, card: VramAddr) -> Self {
        let mirror = Mirror::new(key.place, card, key.entries);
        let absent = vec![0; mirror.live.len()].into();
        Self { key, space, mirror, absent, doubted: Vec::new(), recheck: 0, queued: false, ram: 0, barred: false }
    }

    /// Returns true if the next [`crate::AddressSpaces::prepare`] must read or recheck pages of the table.
    pub(crate) fn is_pending(&self) -> bool {
        (self.mirror.pending() | self.recheck) != 0
    }

    /// Adds the pages of this table to the index. `own` is the number of the table.
    pub(crate) fn register(&mut self, own: u32, pages: &mut PageIndex) {
        for page in bits::members(self.mirror.all()) {
            if let Some(frame) = self.mirror.frame(page)
                && pages.register(frame, User::Table(own, page))
            {
                self.mirror.watched |= bit(page);
            }
        }
    }

    /// Removes the table's entries from all counts, and its pages from the index. Does not change the entries on the
    /// card.
    pub(crate) fn retire(&mut self, own: u32, pages: &mut PageIndex, books: &mut Books<'_>) {
        for page in bits::members(self.mirror.all()) {
            if let Some(frame) = self.mirror.frame(page) {
                pages.unregister(frame, User::Table(own, page));
            }
            let at = page as usize;
            let used = |counts: &[u16]| counts.get(at).is_some_and(|count| *count != 0);
            if used(&self.mirror.live) || used(&self.absent) {
                for index in self.mirror.range(page) {
                    self.set(index, Piece::new(own, page), 0, Shadow::Entry(0), books, &mut Changes::default());
                }
            }
            books.reverse.flush();
        }
    }

    /// Sets an entry to `raw` in the copy of the guest's entries, and to `shadow` in the copy of the card's entries.
    /// Records the changed entries in `changes`, and updates `books`.
    fn set(
        &mut self,
        index: usize,
        piece: Piece,
        raw: u64,
        shadow: Shadow,
        books: &mut Books<'_>,
        changes: &mut Changes,
    ) {
        let size = self.key.size;
        let raw_before = self.mirror.raw(index);
        let same = self.mirror.is(index, &shadow);
        if raw_before == raw && same {
            return;
        }
        let (old, before) = (self.mirror.entry(index), self.mirror.effective(index));
        let (new, split) = (shadow.entry(), matches!(shadow, Shadow::Split(_)));
        let was_split = self.mirror.splits.contains_key(&index);
        self.mirror.set(index, raw, shadow);
        let after = self.mirror.effective(index);
        if new != old {
            changes.runs.push(index, loses(old, new));
        }
        if (split || was_split) && !same {
            changes.splits.push(index);
        }
        match (was_split, split) {
            (false, true) => *books.splits_left = books.splits_left.saturating_sub(1),
            (true, false) => *books.splits_left = books.splits_left.saturating_add(1),
            _ => {}
        }
        let names = [named(raw_before, size), named(raw, size)];
        books.reverse.change(piece, names[0], names[1]);
        let absent = [names[0].is_some() && before == 0, names[1].is_some() && after == 0];
        if absent[0] != absent[1]
            && let Some(count) = self.absent.get_mut(piece.page() as usize)
        {
            *count = if absent[1] { count.saturating_add(1) } else { count.saturating_sub(1) };
        }
        let maps_ram = [(names[0], before), (names[1], after)].map(|(named, shadow)| is_ram(named, shadow));
        self.ram = match maps_ram {
            [false, true] => self.ram.saturating_add(1),
            [true, false] => self.ram.saturating_sub(1),
            _ => self.ram,
        };
        let exposes = [exposes(names[0], before), exposes(names[1], after)];
        if exposes[0] != exposes[1] {
            let large = size == PageSize::Large;
            exposes[0].into_iter().for_each(|frame| FrameRun::push(books.released, frame, large));
            exposes[1].into_iter().for_each(|frame| FrameRun::push(books.gained, frame, large));
        }
    }

    /// Returns the shadow of the guest entry `raw`, or an error if the entry is denied or would exceed the limit on
    /// split entries.
    fn shadow(&self, index: usize, raw: u64, frames: &mut impl Frames, books: &Books<'_>) -> Result<Shadow, Denial> {
        let shadow = translate(raw, self.key.size, frames)?;
        let room = *books.splits_left > 0 || self.mirror.splits.contains_key(&index);
        if matches!(shadow, Shadow::Split(_)) && !room { Err(Denial::Limit) } else { Ok(shadow) }
    }

    /// Updates the shadow of the `changed` entries of a page. `fresh` contains their new values if they have been read.
    /// If the page is marked in `recheck`, also updates the shadow of absent entries.
    #[expect(clippy::too_many_arguments, reason = "parts of the state are borrowed separately")]
    pub(crate) fn take(
        &mut self,
        piece: Piece,
        mut changed: Set512,
        fresh: Option<&[u8]>,
        frames: &mut impl Frames,
        books: &mut Books<'_>,
        changes: &mut Changes,
        report: &mut SyncReport,
    ) {
        let page = piece.page();
        let first = page.saturating_mul(PAGE_ENTRIES);
        if self.recheck & bit(page) != 0 {
            self.recheck &= !bit(page);
            if self.absent.get(page as usize).is_some_and(|absent| *absent != 0) {
                for (at, index) in (0u32..).zip(self.mirror.range(page)) {
                    if self.mirror.effective(index) == 0 && self.mirror.raw(index) != 0 {
                        bits::insert(&mut changed, at);
                    }
                }
            }
        }
        let fresh: Option<&[RawEntry]> = fresh.map(|fresh| fresh.as_chunks().0);
        for at in bits::members512(&changed) {
            let index = first.saturating_add(at) as usize;
            let old_raw = self.mirror.raw(index);
            let raw = match fresh {
                Some(fresh) => fresh.get(at as usize).map_or(0, |raw| u64::from_le_bytes(*raw)),
                None => old_raw,
            };
            report.translated = report.translated.saturating_add(1);
            let (raw, new) = match self.shadow(index, raw, frames, books) {
                Ok(new) => {
                    self.doubted.retain(|(doubted, _)| *doubted != index);
                    (raw, new)
                }
                Err(denial) if raw != old_raw => {
                    if books.half_written && self.doubt(index, raw) {
                        self.mirror.dirty |= bit(page);
                        (0, Shadow::Entry(0))
                    } else {
                        report.denied.add(denial);
                        (raw, Shadow::Entry(0))
                    }
                }
                Err(_) => (raw, Shadow::Entry(0)),
            };
            self.set(index, piece, raw, new, books, changes);
        }
        books.reverse.flush();
    }

    /// Records an entry that is not granted. Returns true if the entry must be read again before it is reported: its
    /// value has changed since the last read, and fewer than [`MAX_DOUBTED`] entries are recorded.
    fn doubt(&mut self, index: usize, raw: u64) -> bool {
        if let Some(known) = self.doubted.iter().position(|(doubted, _)| *doubted == index) {
            let (_, seen) = self.doubted.swap_remove(known);
            if seen == raw {
                return false;
            }
        }
        let room = self.doubted.len() < MAX_DOUBTED;
        if room {
            self.doubted.push((index, raw));
        }
        room
    }

    /// Drops the entries of a page that map memory in `range`.
    pub(crate) fn invalidate(&mut self, piece: Piece, range: GuestRange, books: &mut Books<'_>, changes: &mut Changes) {
        for index in self.mirror.range(piece.page()) {
            let raw = self.mirror.raw(index);
            if self.mirror.effective(index) != 0 && names(raw, self.key.size, range) {
                self.set(index, piece, raw, Shadow::Entry(0), books, changes);
            }
        }
        books.reverse.flush();
    }

    /// Retranslates the entries of a page that map memory in `range`. If the page is pending, its entries may have
    /// changed, so permissions are added only after the page has been read.
    pub(crate) fn retranslate(
        &mut self,
        piece: Piece,
        range: GuestRange,
        frames: &mut impl Frames,
        books: &mut Books<'_>,
        changes: &mut Changes,
        report: &mut SyncReport,
    ) {
        let settled = self.mirror.pending() & bit(piece.page()) == 0;
        // Moved memory is usually mapped by small entries. Only their addresses change, so the counts remain correct.
        let mut moved = if self.key.size == PageSize::Small { Moved::for_range(range) } else { None };
        let mut rest = self.mirror.range(piece.page());
        loop {
            if let Some(moved) = &mut moved {
                rest.start = self.mirror.relocate(rest.clone(), moved, frames, &mut changes.runs, report);
            }
            let Some(index) = rest.next() else { break };
            let (raw, old) = (self.mirror.raw(index), self.mirror.effective(index));
            if raw == 0 || !names(raw, self.key.size, range) {
                continue;
            }
            if old == 0 && !settled {
                self.recheck |= bit(piece.page());
                continue;
            }
            report.translated = report.translated.saturating_add(1);
            let new = self.shadow(index, raw, frames, books).unwrap_or(Shadow::Entry(0));
            self.set(index, piece, raw, new, books, changes);
        }
        books.reverse.flush();
    }

    /// Marks absent entries and unreadable pages for rereading after a grant of memory. Returns true if such entries or
    /// pages exist.
    pub(crate) fn granted(&mut self) -> bool {
        let absent = (0u32..).zip(&self.absent).filter(|(_, absent)| **absent != 0);
        self.recheck |= absent.fold(0, |set, (page, _)| set | bit(page));
        self.mirror.retry() || self.recheck != 0
    }
}

/// Returns true if the card can access RAM through the entry.
fn is_ram(named: Option<Named>, shadow: u64) -> bool {
    shadow != 0 && named.is_some_and(|named| named.system)
}

/// Returns the frame number of the guest VRAM page that the entry makes writable by the GPU, if any.
fn exposes(named: Option<Named>, shadow: u64) -> Option<u32> {
    let named = named.filter(|named| !named.system && shadow != 0 && !Pte::from(shadow).read_only())?;
    Some(named.frame)
}

/// Returns true if the guest entry `raw` refers to a byte in `range`.
fn names(raw: u64, size: PageSize, range: GuestRange) -> bool {
    let (system, start, len) = range.parts();
    let Some(named) = named(raw, size) else { return false };
    let page = u64::from(named.frame).saturating_mul(SMALL_PAGE);
    named.system == system && page < start.saturating_add(len) && start < page.saturating_add(size.bytes())
}

/// All tables of a VM, by number.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    list: Vec<Option<Box<Table>>>,
    free: Vec<u32>,
}

impl Tables {
    pub(crate) fn insert(&mut self, table: Table) -> u32 {
        let table = Some(Box::new(table));
        if let Some(number) = self.free.pop()
            && let Some(slot) = self.list.get_mut(number as usize)
        {
            *slot = table;
            return number;
        }
        self.list.push(table);
        u32::try_from(self.list.len().saturating_sub(1)).unwrap_or(u32::MAX)
    }

    pub(crate) fn remove(&mut self, number: u32) -> Option<Box<Table>> {
        let table = self.list.get_mut(number as usize)?.take();
        if table.is_some() {
            self.free.push(number);
        }
        table
    }

    pub(crate) fn get(&self, number: u32) -> Option<&Table> {
        self.list.get(number as usize)?.as_deref()
    }

    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut Table> {
        self.list.get_mut(number as usize)?.as_deref_mut()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Table> {
        self.list.iter().filter_map(Option::as_deref)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut Table)> {
        (0u32..).zip(&mut self.list).filter_map(|(number, table)| Some((number, table.as_deref_mut()?)))
    }

    /// Returns the number of tables.
    pub(crate) fn count(&self) -> usize {
        self.list.len().saturating_sub(self.free.len())
    }
}
