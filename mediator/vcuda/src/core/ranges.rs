//! Ranges of the window.

use std::collections::BTreeMap;

use super::PAGE_BYTES;

/// A range of the window. Consists of whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Offset of the first byte.
    pub offset: u64,
    /// Size in bytes, greater than 0.
    pub size: u64,
}

impl Range {
    /// Returns the window offset of the 64-bit word at `offset` in this range, or `None` if it is not inside the range.
    #[must_use]
    pub(super) fn word(self, offset: u64) -> Option<u64> {
        let fits = offset.is_multiple_of(8) && offset.checked_add(8)? <= self.size;
        fits.then(|| self.offset.checked_add(offset)).flatten()
    }
}

/// The used ranges of the window. They do not overlap.
#[derive(Debug)]
pub(super) struct Ranges {
    window_bytes: u64,
    used: BTreeMap<u64, u64>,
}

impl Ranges {
    pub(super) fn new(window_bytes: u64) -> Self {
        Self { window_bytes, used: BTreeMap::new() }
    }

    /// Marks a range as used. Returns false if it does not consist of whole pages of the window, or overlaps a used
    /// range.
    pub(super) fn insert(&mut self, range: Range) -> bool {
        let Range { offset, size } = range;
        let Some(end) = offset.checked_add(size).filter(|&end| end <= self.window_bytes) else { return false };
        let is_whole = offset.is_multiple_of(PAGE_BYTES) && size.is_multiple_of(PAGE_BYTES) && size != 0;
        // Used ranges do not overlap, so only the last one that starts before `end` can overlap this range.
        let before = self.used.range(..end).next_back();
        let overlaps = before.is_some_and(|(&first, &size)| first.saturating_add(size) > offset);
        if !is_whole || overlaps {
            return false;
        }
        self.used.insert(offset, size);
        true
    }

    /// Frees a range.
    pub(super) fn remove(&mut self, range: Range) {
        self.used.remove(&range.offset);
    }
}
