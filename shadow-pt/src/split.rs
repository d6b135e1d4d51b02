//! This crate's small-page tables for split large pages, whose 4 KiB pages are not contiguous for the card.
//!
//! Each table belongs to a pair: the large-page table and the small-page table (if any) of a directory entry. It
//! contains the small entries that replace large entries. All other entries are copied from the shadow of the guest's
//! small-page table.

use crate::mirror::{Mirror, Runs, write_range};
use crate::table::TableKey;
#[cfg(any(test, feature = "fuzz"))]
use crate::table::Tables;
use crate::translate::{LARGE_PAGES, loses};
use crate::{ShadowMemory, SyncReport};
use nvspec::addr::{SMALL_PAGE, VramAddr};
use nvspec::mmu::{ENTRY_BYTES, Pde};
use std::collections::BTreeMap;
use std::ops::Range;

/// Number of entries in a page. Whole tables are written page by page.
const ENTRIES_PER_PAGE: usize = (SMALL_PAGE / ENTRY_BYTES) as usize;

/// A directory entry's large-page table and small-page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Pair {
    pub(crate) large: TableKey,
    pub(crate) small: Option<TableKey>,
    /// Number of small-page table entries that the hardware can reach through the directory entry.
    entries: u32,
}

impl Pair {
    /// Returns the pair of a directory entry, or `None` if it does not refer to a large-page table.
    pub(crate) fn from_pde(pde: Pde) -> Option<Self> {
        let [large, small] = TableKey::both(pde);
        Some(Self { large: large?, small, entries: pde.small_entries() })
    }

    fn bytes(&self) -> u64 {
        u64::from(self.entries).saturating_mul(ENTRY_BYTES).next_multiple_of(SMALL_PAGE)
    }
}

/// The replacement table of a pair.
#[derive(Debug)]
struct SplitTable {
    card: VramAddr,
    /// The card's entries after all pending writes.
    shadow: Box<[u64]>,
}

impl SplitTable {
    /// Updates the entries in `range` from `large` and `small`, and adds changed entries to `runs`.
    fn update(&mut self, range: Range<usize>, large: &Mirror, small: Option<&Mirror>, runs: &mut Runs) {
        let Some(entries) = self.shadow.get_mut(range.clone()) else { return };
        for (index, entry) in range.zip(entries) {
            let wanted = match large.splits.get(&(index >> LARGE_PAGES.trailing_zeros())) {
                Some(pieces) => pieces.get(index & within()).copied().unwrap_or(0),
                None => small.map_or(0, |small| small.entry(index)),
            };
            if wanted != *entry {
                runs.push(index, loses(*entry, wanted));
                *entry = wanted;
            }
        }
    }
}

/// Returns the mask of the bits of a small entry's index that select the page within a large page.
const fn within() -> usize {
    (LARGE_PAGES as usize).wrapping_sub(1)
}

/// Returns the indices of the small entries that replace a large entry.
fn covered(index: usize) -> Range<usize> {
    let start = index.wrapping_shl(LARGE_PAGES.trailing_zeros());
    start..start.saturating_add(LARGE_PAGES as usize)
}

/// Entries to write to one replacement table.
#[derive(Debug)]
struct Writes {
    pair: Pair,
    runs: Vec<Runs>,
}

/// Entries to write to a space's replacement tables, before and after the large entries are written. Small entries that
/// replace large entries are written before the large entries. All other small entries are written after the large
/// entries, which may hide them.
#[derive(Debug, Default)]
pub(crate) struct SplitWrites {
    before: Vec<Writes>,
    after: Vec<Writes>,
}

/// A space's pairs, and their replacement tables.
#[derive(Debug, Default)]
pub(crate) struct Splits {
    /// Number of directory entries that refer to each pair.
    pairs: BTreeMap<Pair, u32>,
    made: BTreeMap<Pair, SplitTable>,
    /// Pairs that may need a replacement table but have none. The value is true if creating the table has failed.
    wanted: BTreeMap<Pair, bool>,
    /// Pairs whose reference count has dropped to 0. The count may have risen since.
    orphans: Vec<Pair>,
}

/// Result of creating replacement tables.
#[derive(Debug, Default)]
pub(crate) struct Made {
    /// Pairs for which a replacement table was created.
    pub(crate) fresh: Vec<Pair>,
    /// True if the directory must be relinked: creating a table has failed for the first time, or a table that could
    /// not be created is no longer needed.
    pub(crate) changes: bool,
    /// True if a table newly exceeds the limit.
    pub(crate) denied: bool,
    /// Number of tables that could not be created because card memory is exhausted.
    pub(crate) waiting: u64,
}

/// Card memory to free at the next TLB flush, as start addresses and sizes in bytes.
pub(crate) type Unlinked = Vec<(VramAddr, u64)>;

impl Splits {
    /// Records that a directory entry has changed.
    pub(crate) fn relink(&mut self, before: Pde, after: Pde) {
        if let Some(pair) = Pair::from_pde(before)
            && let Some(count) = self.pairs.get_mut(&pair)
        {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.orphans.push(pair);
            }
        }
        if let Some(pair) = Pair::from_pde(after) {
            let count = self.pairs.entry(pair).or_insert_with(|| {
                self.wanted.insert(pair, false);
                0
            });
            *count = count.saturating_add(1);
        }
    }

    /// Drops the tables of pairs to which no directory entry refers. Returns their total size in bytes.
    pub(crate) fn drop_orphans(&mut self, unlinked: &mut Unlinked) -> u64 {
        let mut bytes = 0u64;
        for pair in std::mem::take(&mut self.orphans) {
            if self.pairs.get(&pair).is_some_and(|count| *count == 0) {
                self.pairs.remove(&pair);
                self.wanted.remove(&pair);
                bytes = bytes.saturating_add(self.drop_table(&pair, unlinked));
            }
        }
        bytes
    }

    fn drop_table(&mut self, pair: &Pair, unlinked: &mut Unlinked) -> u64 {
        let Some(table) = self.made.remove(pair) else { return 0 };
        unlinked.push((table.card, pair.bytes()));
        pair.bytes()
    }

    /// Drops all tables. Returns their total size in bytes.
    pub(crate) fn clear(&mut self, unlinked: &mut Unlinked) -> u64 {
        let bytes = self.made.keys().fold(0u64, |sum, pair| sum.saturating_add(pair.bytes()));
        unlinked.extend(std::mem::take(&mut self.made).into_iter().map(|(pair, table)| (table.card, pair.bytes())));
        *self = Self::default();
        bytes
    }

    /// Returns the tables' card memory, as start addresses and sizes in bytes.
    pub(crate) fn cards(&self) -> impl Iterator<Item = (VramAddr, u64)> + '_ {
        self.made.iter().map(|(pair, table)| (table.card, pair.bytes()))
    }

    /// Returns true if there is no pending work.
    pub(crate) fn is_idle(&self) -> bool {
        self.wanted.is_empty()
    }

    /// Records that split entries of large-page table `key` have changed, so that its pairs must be checked.
    pub(crate) fn touch(&mut self, key: &TableKey) {
        let first = Pair { large: *key, small: None, entries: 0 };
        for (pair, _) in self.pairs.range(first..).take_while(|(pair, _)| pair.large == *key) {
            if !self.made.contains_key(pair) {
                self.wanted.entry(*pair).or_insert(false);
            }
        }
    }

    /// Creates the needed tables, up to a total size of `room` bytes. The tables are empty.
    pub(crate) fn make<'a>(
        &mut self,
        mut room: u64,
        large: impl Fn(&TableKey) -> Option<&'a Mirror>,
        memory: &mut impl ShadowMemory,
    ) -> Made {
        let mut done = Made::default();
        let mut full = false;
        let Self { made, wanted, .. } = self;
        wanted.retain(|pair, known| {
            if large(&pair.large).is_none_or(|large| large.splits.is_empty()) {
                // Relink the pair, which no longer needs a table.
                done.changes |= *known;
                return false;
            }
            let fits = room >= pair.bytes();
            let card = if full || !fits { None } else { memory.alloc(pair.bytes()) };
            let Some(card) = card else {
                full = true;
                let new = !std::mem::replace(known, true);
                done.changes |= new;
                done.denied |= new && !fits;
                done.waiting = done.waiting.saturating_add(u64::from(fits));
                return true;
            };
            room = room.saturating_sub(pair.bytes());
            made.insert(*pair, SplitTable { card, shadow: vec![0; pair.entries as usize].into() });
            done.fresh.push(*pair);
            false
        });
        done
    }

    /// Returns the total size in bytes of the tables of `pairs`.
    pub(crate) fn bytes_of(pairs: &[Pair]) -> u64 {
        pairs.iter().fold(0, |sum, pair| sum.saturating_add(pair.bytes()))
    }

    /// Drops unneeded tables. Returns their total size in bytes.
    pub(crate) fn drop_unneeded<'a>(
        &mut self,
        large: impl Fn(&TableKey) -> Option<&'a Mirror>,
        unlinked: &mut Unlinked,
    ) -> u64 {
        let unneeded = |pair: &&Pair| large(&pair.large).is_none_or(|large| large.splits.is_empty());
        let unneeded: Vec<Pair> = self.made.keys().filter(unneeded).copied().collect();
        unneeded.iter().fold(0u64, |sum, pair| sum.saturating_add(self.drop_table(pair, unlinked)))
    }

    /// Fills newly created tables.
    pub(crate) fn fill<'a>(
        &mut self,
        fresh: &[Pair],
        mirror: impl Fn(&TableKey) -> Option<&'a Mirror>,
        writes: &mut SplitWrites,
    ) {
        for pair in fresh {
            let (Some(table), Some(large)) = (self.made.get_mut(pair), mirror(&pair.large)) else { continue };
            let small = pair.small.and_then(|key| mirror(&key));
            let mut runs = Runs::default();
            table.update(0..table.shadow.len(), large, small, &mut runs);
            writes.before.push(Writes { pair: *pair, runs: vec![runs] });
        }
    }

    /// Updates the replacement tables after changes to the split entries in large-page table `key`.
    pub(crate) fn large_changed<'a>(
        &mut self,
        key: &TableKey,
        changed: &[usize],
        mirror: impl Fn(&TableKey) -> Option<&'a Mirror>,
        writes: &mut SplitWrites,
    ) {
        let Some(large) = mirror(key) else { return };
        for (pair, table) in self.made.iter_mut().filter(|(pair, _)| pair.large == *key) {
            let small = pair.small.and_then(|key| mirror(&key));
            let [mut before, mut after] = [Runs::default(), Runs::default()];
            for index in changed {
                let runs = if large.splits.contains_key(index) { &mut before } else { &mut after };
                table.update(covered(*index), large, small, runs);
            }
            writes.before.push(Writes { pair: *pair, runs: vec![before] });
            writes.after.push(Writes { pair: *pair, runs: vec![after] });
        }
    }

    /// Updates the replacement tables after changes to the entries in small-page table `key`.
    pub(crate) fn small_changed<'a>(
        &mut self,
        key: &TableKey,
        changed: &Runs,
        mirror: impl Fn(&TableKey) -> Option<&'a Mirror>,
        writes: &mut SplitWrites,
    ) {
        let Some(small) = mirror(key) else { return };
        for (pair, table) in self.made.iter_mut().filter(|(pair, _)| pair.small.as_ref() == Some(key)) {
            let Some(large) = mirror(&pair.large) else { continue };
            let mut runs = Runs::default();
            for range in changed.ranges() {
                table.update(range, large, Some(small), &mut runs);
            }
            writes.after.push(Writes { pair: *pair, runs: vec![runs] });
        }
    }

    /// Returns true if no tables exist.
    pub(crate) fn is_empty(&self) -> bool {
        self.made.is_empty()
    }

    /// Writes the entries that replace large entries if `before` is true, or all other entries otherwise.
    pub(crate) fn write(
        &self,
        writes: &SplitWrites,
        before: bool,
        memory: &mut impl ShadowMemory,
        report: &mut SyncReport,
    ) {
        for Writes { pair, runs } in if before { &writes.before } else { &writes.after } {
            let Some(table) = self.made.get(pair) else { continue };
            for losing in [true, false] {
                runs.iter().for_each(|runs| runs.write(losing, table.card, &table.shadow, memory, report));
            }
        }
    }

    /// Writes all entries of all tables.
    pub(crate) fn write_all(&self, memory: &mut impl ShadowMemory, report: &mut SyncReport) {
        for table in self.made.values() {
            for start in (0..table.shadow.len()).step_by(ENTRIES_PER_PAGE) {
                let end = start.saturating_add(ENTRIES_PER_PAGE).min(table.shadow.len());
                write_range(table.card, &table.shadow, start..end, memory, report);
            }
        }
    }

    /// Returns the replacement for the small-page table in a directory entry of `pair`, or `None` if the guest's table
    /// must be used. `large` is the large-page table of the pair. Returns `Some(None)` if the replacement does not
    /// exist, so that the entry must not refer to any small-page table.
    pub(crate) fn stand_in(&self, pair: &Pair, large: &Mirror) -> Option<Option<VramAddr>> {
        if large.splits.is_empty() {
            return None;
        }
        Some(self.made.get(pair).map(|table| table.card))
    }

    /// Returns the entry through which the card accesses 4 KiB page `index` of a directory entry of `pair`. Returns
    /// `None` if the page is not in a split large page.
    pub(crate) fn piece(&self, pair: &Pair, index: usize, large: &Mirror) -> Option<u64> {
        let pieces = large.splits.get(&(index >> LARGE_PAGES.trailing_zeros()))?;
        if self.made.contains_key(pair) { pieces.get(index & within()).copied() } else { Some(0) }
    }

    /// Checks that each pair with a table is in use and needs the table, and that the table's entries are correct. For
    /// tests only.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn audit(&self, tables: &Tables, number: impl Fn(&TableKey) -> Option<u32>) {
        assert!(self.orphans.is_empty());
        let mirror = |key: &TableKey| tables.get(number(key)?).map(|table| &table.mirror);
        for (pair, table) in &self.made {
            assert!(self.pairs.get(pair).is_some_and(|count| *count != 0), "an unreferenced pair has a table");
            let large = mirror(&pair.large).expect("the pair has no large-page table");
            assert!(!large.splits.is_empty(), "the pair does not need its table");
            for (index, entry) in table.shadow.iter().enumerate() {
                let small = pair.small.and_then(|key| mirror(&key)).map_or(0, |small| small.entry(index));
                let wanted = large
                    .splits
                    .get(&(index / 32))
                    .map_or(small, |pieces| pieces.get(index % 32).copied().unwrap_or(small));
                assert_eq!(*entry, wanted, "entry {index:#x} of {pair:?}");
            }
        }
        assert!(self.pairs.values().all(|count| *count != 0));
    }
}
