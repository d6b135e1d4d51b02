//! Arrays of entries on the card, with host copies of the guest's entries and of the card's entries.

use crate::bits::{Set512, WORDS, below, bit};
use crate::moved::Moved;
use crate::translate::{PageSize, Pieces, Shadow, translate};
use crate::{Frames, GuestMemory, Place, ShadowMemory, SyncReport};
use nvspec::addr::{SMALL_PAGE, VramAddr};
use nvspec::mmu::{ENTRY_BYTES, Pte};
use std::collections::BTreeMap;
use std::ops::Range;

/// Maximum number of consecutive unchanged entries in a run. These entries are also written.
const GAP: usize = 8;
/// Size of a page of entries in bytes. Tables are read in units of pages.
pub(crate) const PAGE_BYTES: usize = 1 << SMALL_PAGE.trailing_zeros();
/// Number of entries per page.
pub(crate) const PAGE_ENTRIES: u32 = 1 << (SMALL_PAGE.trailing_zeros() - ENTRY_BYTES.trailing_zeros());
/// Number of entries compared at a time.
const GROUP: u32 = 8;

/// An entry as stored in memory.
pub(crate) type RawEntry = [u8; size_of::<Pte>()];

/// A run of changed entries, with a flag that is true if any entry has lost a permission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) range: Range<usize>,
    pub(crate) loses: bool,
}

/// Runs of changed entries, added in ascending order.
#[derive(Debug, Default)]
pub(crate) struct Runs(Vec<Run>);

impl Runs {
    pub(crate) fn push(&mut self, index: usize, loses: bool) {
        let end = index.saturating_add(1);
        match self.0.last_mut() {
            Some(run) if index.saturating_sub(run.range.end) <= GAP => {
                run.range.end = end;
                run.loses |= loses;
            }
            _ => self.0.push(Run { range: index..end, loses }),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the range of each run, from its first to its last changed entry.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.0.iter().map(|run| run.range.clone())
    }

    /// Writes runs of `entries` to the array at `card`: those that lose permissions if `losing` is true, or all others
    /// otherwise.
    pub(crate) fn write(
        &self,
        losing: bool,
        card: VramAddr,
        entries: &[u64],
        memory: &mut impl ShadowMemory,
        report: &mut SyncReport,
    ) {
        for run in self.0.iter().filter(|run| run.loses == losing) {
            write_range(card, entries, run.range.clone(), memory, report);
            report.lost_permission |= losing;
        }
    }
}

/// A directory or table: an array of entries.
#[derive(Debug)]
pub(crate) struct Mirror {
    /// Location of the guest's array, aligned to 4 KiB.
    pub(crate) place: Place,
    /// Location of the shadow on the card.
    pub(crate) card: VramAddr,
    /// Guest's entries as of the last read.
    pub(crate) guest: Box<[RawEntry]>,
    /// Card's entries after all runs have been written.
    pub(crate) shadow: Box<[u64]>,
    /// Mask of pages whose contents may differ from `guest`.
    pub(crate) dirty: u64,
    /// Mask of pages that may change at any time without a trap, because they are writable by the GPU or in guest RAM.
    pub(crate) watched: u64,
    /// Mask of pages that could not be read. Their entries are treated as 0.
    unreadable: u64,
    /// Small entries that replace each split large entry, by index. The large entry in `shadow` is 0.
    pub(crate) splits: BTreeMap<usize, Box<Pieces>>,
    /// Number of entries that map memory, for each page.
    pub(crate) live: Box<[u16]>,
}

impl Mirror {
    /// Creates a mirror of `entries` entries at `place`. All pages are pending. The array at `card` must have been
    /// zeroed.
    pub(crate) fn new(place: Place, card: VramAddr, entries: u32) -> Self {
        let pages = entries.div_ceil(PAGE_ENTRIES);
        let all = below(pages);
        Self {
            place,
            card,
            guest: vec![RawEntry::default(); entries as usize].into(),
            shadow: vec![0; entries as usize].into(),
            dirty: all,
            watched: if matches!(place, Place::Ram(_)) { all } else { 0 },
            unreadable: 0,
            splits: BTreeMap::new(),
            live: vec![0; pages as usize].into(),
        }
    }

    /// Returns a mask of all pages.
    pub(crate) fn all(&self) -> u64 {
        below(u32::try_from(self.live.len()).unwrap_or(u64::BITS))
    }

    /// Returns a mask of the pages that must be read.
    pub(crate) fn pending(&self) -> u64 {
        self.dirty | self.watched
    }

    /// Returns those of `pages` that have shadow entries, and can therefore lose permissions.
    pub(crate) fn losing(&self, pages: u64) -> u64 {
        crate::bits::members(pages)
            .filter(|page| self.live.get(*page as usize).is_some_and(|live| *live != 0))
            .fold(0, |set, page| set | bit(page))
    }

    /// Marks unreadable pages for rereading. Returns true if such pages exist.
    pub(crate) fn retry(&mut self) -> bool {
        self.dirty |= self.unreadable;
        self.unreadable != 0
    }

    /// Returns true if no page is readable.
    pub(crate) fn is_lost(&self) -> bool {
        self.unreadable == self.all()
    }

    /// Returns the frame number of `page` in guest VRAM, or `None` if the page is in RAM or its address does not fit in
    /// an entry.
    pub(crate) fn frame(&self, page: u32) -> Option<u32> {
        match self.page_place(page)? {
            Place::Vram(address) => crate::pages::PageIndex::frame(address.0),
            Place::Ram(_) => None,
        }
    }

    fn page_place(&self, page: u32) -> Option<Place> {
        self.place.checked_add(u64::from(page).saturating_mul(SMALL_PAGE))
    }

    /// Returns the indices of a page's entries.
    pub(crate) fn range(&self, page: u32) -> Range<usize> {
        let start = page.saturating_mul(PAGE_ENTRIES) as usize;
        start.min(self.guest.len())..start.saturating_add(PAGE_ENTRIES as usize).min(self.guest.len())
    }

    /// Reads a page of the guest's array into `buffer`, or zeros if the memory is unreadable. Returns the entries that
    /// differ from the mirror, or `None` if no entry differs. Marks the page as clean, but does not modify the mirrored
    /// entries.
    pub(crate) fn read(
        &mut self,
        page: u32,
        buffer: &mut [u8; PAGE_BYTES],
        guest: &mut impl GuestMemory,
        report: &mut SyncReport,
    ) -> Option<Set512> {
        let known = self.guest.get(self.range(page))?.as_flattened();
        let buffer = buffer.get_mut(..known.len())?;
        self.dirty &= !bit(page);
        let read = self.place.checked_add(u64::from(page).saturating_mul(SMALL_PAGE));
        if read.is_some_and(|place| guest.read(place, buffer).is_ok()) {
            self.unreadable &= !bit(page);
            report.pages = report.pages.saturating_add(1);
            report.bytes_scanned = report.bytes_scanned.saturating_add(buffer.len() as u64);
        } else {
            self.unreadable |= bit(page);
            buffer.fill(0);
        }
        difference(known, buffer)
    }

    /// Returns the guest's entry as of the last read.
    pub(crate) fn raw(&self, index: usize) -> u64 {
        self.guest.get(index).map_or(0, |raw| u64::from_le_bytes(*raw))
    }

    /// Returns the card's entry.
    pub(crate) fn entry(&self, index: usize) -> u64 {
        self.shadow.get(index).copied().unwrap_or(0)
    }

    /// Returns the card's entry for a guest entry, or for its first 4 KiB page if the entry is split. Returns 0 if the
    /// card has no such entry.
    pub(crate) fn effective(&self, index: usize) -> u64 {
        match self.entry(index) {
            0 => self.splits.get(&index).and_then(|pieces| pieces.first()).copied().unwrap_or(0),
            entry => entry,
        }
    }

    /// Returns true if the card's entry matches `shadow`, or will match it once all pending writes complete.
    pub(crate) fn is(&self, index: usize, shadow: &Shadow) -> bool {
        match (shadow, self.splits.get(&index)) {
            (Shadow::Entry(entry), None) => *entry == self.entry(index),
            (Shadow::Split(pieces), Some(known)) => pieces == known,
            _ => false,
        }
    }

    /// Updates the frames of the small entries in `range` that refer to moved VRAM, up to the first entry that requires
    /// a full translation. Returns the index of that entry, or the end of the range.
    pub(crate) fn relocate(
        &mut self,
        range: Range<usize>,
        moved: &mut Moved,
        frames: &mut impl Frames,
        runs: &mut Runs,
        report: &mut SyncReport,
    ) -> usize {
        let (start, end) = (range.start, range.end);
        let (Some(guest), Some(shadow)) = (self.guest.get(range.clone()), self.shadow.get_mut(range)) else {
            return end;
        };
        for (index, (raw, known)) in (start..).zip(guest.iter().zip(shadow)) {
            let (raw, old) = (u64::from_le_bytes(*raw), Pte::from(*known));
            let new = match moved.next_entry(raw.into(), old) {
                Some(new) => new,
                None if raw == 0 || moved.is_elsewhere(raw.into()) => continue,
                None => match moved.entry(raw.into(), old, frames) {
                    Some(new) => new,
                    None => return index,
                },
            };
            let new = u64::from(new);
            debug_assert_eq!(translate(raw, PageSize::Small, frames), Ok(Shadow::Entry(new)), "{raw:#x}");
            report.translated = report.translated.saturating_add(1);
            if new != *known {
                // The new entry does not refer to the old frame, so it loses permissions.
                runs.push(index, true);
                *known = new;
            }
        }
        end
    }

    /// Sets the guest's and the card's entry, and updates the number of entries that map memory.
    pub(crate) fn set(&mut self, index: usize, raw: u64, shadow: Shadow) {
        if let Some(known) = self.guest.get_mut(index) {
            *known = raw.to_le_bytes();
        }
        let before = self.effective(index) != 0;
        let Some(known) = self.shadow.get_mut(index) else { return };
        *known = shadow.entry();
        match shadow {
            Shadow::Entry(_) => drop(self.splits.remove(&index)),
            Shadow::Split(pieces) => drop(self.splits.insert(index, pieces)),
        }
        let after = self.effective(index) != 0;
        if before != after
            && let Some(live) = self.live.get_mut(index.wrapping_shr(PAGE_ENTRIES.trailing_zeros()))
        {
            *live = if after { live.saturating_add(1) } else { live.saturating_sub(1) };
        }
    }

    /// Writes runs to the card: those that lose permissions if `losing` is true, or all others otherwise.
    pub(crate) fn write(&self, runs: &Runs, losing: bool, memory: &mut impl ShadowMemory, report: &mut SyncReport) {
        runs.write(losing, self.card, &self.shadow, memory, report);
    }

    /// Writes all entries to the card.
    pub(crate) fn write_all(&self, memory: &mut impl ShadowMemory, report: &mut SyncReport) {
        for page in crate::bits::members(self.all()) {
            write_range(self.card, &self.shadow, self.range(page), memory, report);
        }
    }
}

/// Writes the entries in `range` to the card's array at `card`.
pub(crate) fn write_range(
    card: VramAddr,
    entries: &[u64],
    range: Range<usize>,
    memory: &mut impl ShadowMemory,
    report: &mut SyncReport,
) {
    let Some(entries) = entries.get(range.clone()) else { return };
    let at = card.offset((range.start as u64).saturating_mul(ENTRY_BYTES));
    if let [entry] = entries {
        memory.write(at, &entry.to_le_bytes());
    } else {
        let bytes: Vec<RawEntry> = entries.iter().map(|entry| entry.to_le_bytes()).collect();
        memory.write(at, bytes.as_flattened());
    }
    report.writes = report.writes.saturating_add(1);
    report.entries_written = report.entries_written.saturating_add(entries.len() as u64);
}

/// Returns the entries that differ between two pages of the same length, or `None` if all are equal.
fn difference(old: &[u8], new: &[u8]) -> Option<Set512> {
    if old == new {
        return None;
    }
    let mut set = [0; WORDS];
    let (old, new): (&[RawEntry], &[RawEntry]) = (old.as_chunks().0, new.as_chunks().0);
    for (group, (old, new)) in (0u32..).zip(old.chunks(GROUP as usize).zip(new.chunks(GROUP as usize))) {
        if old == new {
            continue;
        }
        for (index, (old, new)) in (0u32..).zip(old.iter().zip(new)) {
            if old != new {
                crate::bits::insert(&mut set, group.saturating_mul(GROUP).saturating_add(index));
            }
        }
    }
    Some(set)
}
