//! Maps guest memory to the table pages that refer to it.

use crate::GuestRange;
use crate::translate::Named;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Log2 of the size of a guest memory block: 2 MiB.
pub(crate) const BLOCK_SHIFT: u32 = 21;
/// Log2 of the number of 4 KiB pages per block.
pub(crate) const BLOCK_PAGES_SHIFT: u32 = BLOCK_SHIFT - nvspec::addr::SMALL_PAGE.trailing_zeros();
/// Number of the last block that an entry can refer to.
const MAX_BLOCK: u64 = (1 << (nvspec::addr::BUS_BITS - BLOCK_SHIFT)) - 1;
/// Flag that marks the numbers of RAM blocks.
const SYSTEM: u32 = 1 << 31;

/// A page of a table: the number of the table within the VM multiplied by 64, plus the number of the page within the
/// table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Piece(u32);

impl Piece {
    pub(crate) const fn new(table: u32, page: u32) -> Self {
        Self(table.wrapping_shl(6) | (page & 63))
    }

    pub(crate) const fn table(self) -> u32 {
        self.0 >> 6
    }

    pub(crate) const fn page(self) -> u32 {
        self.0 & 63
    }
}

fn block(named: Named) -> u32 {
    (named.frame >> BLOCK_PAGES_SHIFT) | if named.system { SYSTEM } else { 0 }
}

fn key(block: u32, piece: u32) -> u64 {
    u64::from(block) << 32 | u64::from(piece)
}

/// Returns the numbers of the blocks that overlap a RAM range.
fn blocks(range: &Range<u64>) -> std::ops::RangeInclusive<u32> {
    let block = |at: u64| u32::try_from((at >> BLOCK_SHIFT).min(MAX_BLOCK)).unwrap_or(0);
    let first = block(range.start);
    first..=block(range.end.saturating_sub(1)).max(first)
}

/// For each block of guest memory, granted or not, the table pages with entries that refer to it. Uses at most one
/// record in host memory per table entry.
#[derive(Debug, Default)]
pub(crate) struct ReverseMap {
    /// Number of entries by block and table page.
    counts: BTreeMap<u64, u32>,
    /// Key of a count, and its deferred increment. Consecutive entries usually refer to the same block.
    added: (u64, u32),
    removed: (u64, u32),
    /// RAM blocks to which entries have referred since the last report, if logging is enabled.
    log: Option<BTreeSet<u32>>,
}

impl ReverseMap {
    /// Records that an entry of `piece` refers to `named` instead of `before`.
    pub(crate) fn change(&mut self, piece: Piece, before: Option<Named>, named: Option<Named>) {
        let (before, named) = (before.map(block), named.map(block));
        if before == named {
            return;
        }
        if let Some(block) = before {
            let key = key(block, piece.0);
            if self.removed.0 != key {
                self.flush_removed();
                self.removed.0 = key;
            }
            self.removed.1 = self.removed.1.saturating_add(1);
        }
        if let Some(block) = named {
            let key = key(block, piece.0);
            if self.added.0 != key {
                self.flush_added();
                self.added.0 = key;
            }
            self.added.1 = self.added.1.saturating_add(1);
            if block & SYSTEM != 0
                && let Some(log) = &mut self.log
            {
                log.insert(block & !SYSTEM);
            }
        }
    }

    /// Starts or stops logging the RAM blocks to which entries refer. A new log starts with the blocks to which entries
    /// currently refer.
    pub(crate) fn log(&mut self, on: bool) {
        self.flush();
        let named: Vec<u32> = self.named(0..u64::MAX).collect();
        match on {
            true => self.log.get_or_insert_default().extend(named),
            false => self.log = None,
        }
    }

    /// Returns the logged RAM blocks that overlap `range`, and removes the blocks within the range from the log. If the
    /// memory remains in use (`goes_on` is true), keeps the blocks to which entries still refer.
    pub(crate) fn take_named(&mut self, range: Range<u64>, goes_on: bool) -> Vec<Range<u64>> {
        self.flush();
        let still: BTreeSet<u32> = if goes_on { self.named(range.clone()).collect() } else { BTreeSet::new() };
        let Some(log) = &mut self.log else { return Vec::new() };
        let touched: Vec<u32> = log.range(blocks(&range)).copied().collect();
        let bytes = |block: u32| {
            let start = u64::from(block) << BLOCK_SHIFT;
            start..start.saturating_add(1 << BLOCK_SHIFT)
        };
        for block in &touched {
            let all = bytes(*block);
            if range.start <= all.start && all.end <= range.end && !still.contains(block) {
                log.remove(block);
            }
        }
        touched.into_iter().map(bytes).collect()
    }

    /// Returns the RAM blocks that overlap `range` and to which entries currently refer.
    fn named(&self, range: Range<u64>) -> impl Iterator<Item = u32> + '_ {
        let (first, last) = blocks(&range).into_inner();
        let keys = key(first | SYSTEM, 0)..=key(last | SYSTEM, u32::MAX);
        self.counts.range(keys).map(|(key, _)| u32::try_from(key >> 32).unwrap_or(0) & !SYSTEM)
    }

    /// Applies the deferred changes to counts. Must be called after the last entry of each table page.
    pub(crate) fn flush(&mut self) {
        self.flush_added();
        self.flush_removed();
    }

    fn flush_added(&mut self) {
        let (key, count) = std::mem::take(&mut self.added);
        if count != 0 {
            let known = self.counts.entry(key).or_default();
            *known = known.saturating_add(count);
        }
    }

    fn flush_removed(&mut self) {
        let (key, count) = std::mem::take(&mut self.removed);
        if count == 0 {
            return;
        }
        // If both changes are to the same count, apply the increment first.
        if self.added.0 == key {
            self.flush_added();
        }
        if let Some(known) = self.counts.get_mut(&key) {
            *known = known.saturating_sub(count);
            if *known == 0 {
                self.counts.remove(&key);
            }
        }
    }

    /// Returns the table pages that may refer to any byte of `range`, in ascending order.
    pub(crate) fn pieces(&self, range: GuestRange) -> Vec<Piece> {
        let (system, start, len) = range.parts();
        let (first, last) = (start >> BLOCK_SHIFT, start.saturating_add(len.saturating_sub(1)) >> BLOCK_SHIFT);
        if len == 0 || first > MAX_BLOCK {
            return Vec::new();
        }
        let block = |block: u64| u32::try_from(block.min(MAX_BLOCK)).unwrap_or(0) | if system { SYSTEM } else { 0 };
        let keys = key(block(first), 0)..=key(block(last), u32::MAX);
        let mut pieces: Vec<Piece> =
            self.counts.range(keys).map(|(key, _)| Piece((key & 0xffff_ffff) as u32)).collect();
        pieces.sort_unstable();
        pieces.dedup();
        pieces
    }

    /// Returns the number of entries by block and table page, excluding deferred changes. For tests only.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn records(&self) -> &BTreeMap<u64, u32> {
        &self.counts
    }
}
