//! An allocator of address ranges.

use std::collections::BTreeMap;

/// Size of a page in bytes, which is the unit of all ranges.
pub(super) const PAGE_BYTES: u64 = 0x1000;

/// The ends of the free ranges, by start.
#[derive(Debug)]
pub(super) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Creates an allocator for the range from `start` to `end`.
    pub(super) fn new(start: u64, end: u64) -> Self {
        Self(BTreeMap::from([(start, end)]))
    }

    /// Allocates `bytes` bytes, rounded up to whole pages, at the start of the first free range that is large enough.
    /// Returns `None` if no range is large enough.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u64> {
        let bytes = bytes.max(1).checked_next_multiple_of(PAGE_BYTES)?;
        let (&start, &end) = self.0.iter().find(|(start, end)| *end - *start >= bytes)?;
        self.0.remove(&start);
        if start + bytes < end {
            self.0.insert(start + bytes, end);
        }
        Some(start)
    }

    /// Frees a range, and merges it with adjacent free ranges.
    pub(super) fn give(&mut self, at: u64, bytes: u64) {
        let mut start = at;
        let mut end = at + bytes.max(1).next_multiple_of(PAGE_BYTES);
        if let Some((&before, &before_end)) = self.0.range(..start).next_back()
            && before_end == start
        {
            start = before;
        }
        if let Some(after_end) = self.0.remove(&end) {
            end = after_end;
        }
        self.0.insert(start, end);
    }

    /// Returns the number of free bytes.
    pub(super) fn free_bytes(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_do_not_overlap_and_merge_when_freed(
            sizes in prop::collection::vec(1u64..40_000, 1..40),
            order in any::<u64>(),
        ) {
            let (start, end) = (0x10_0000, 0x40_0000);
            let mut ranges = Ranges::new(start, end);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (index, bytes) in sizes.iter().enumerate() {
                if let Some(at) = ranges.take(*bytes) {
                    prop_assert!(at >= start && at + bytes <= end && at % PAGE_BYTES == 0);
                    for (other, length) in &held {
                        prop_assert!(at + bytes <= *other || other + length <= at);
                    }
                    held.push((at, *bytes));
                }
                if order >> (index % 64) & 1 == 1 && !held.is_empty() {
                    let (at, bytes) = held.swap_remove(order as usize % held.len());
                    ranges.give(at, bytes);
                }
            }
            for (at, bytes) in held {
                ranges.give(at, bytes);
            }
            prop_assert_eq!(ranges.free_bytes(), end - start);
            prop_assert_eq!(ranges.take(end - start), Some(start));
            prop_assert_eq!(ranges.take(1), None);
        }
    }
}
