//! Hints about a VM's chunks.

mod residency_history;
mod saved;

pub(crate) use saved::SavedHints;

use residency_history::ResidencyHistory;
use std::ops::RangeInclusive;

/// Priority of a chunk without a hint.
pub const PRIORITY_DEFAULT: u8 = 128;

/// Hints about a VM's chunks. Each kind of hint has one entry per guest chunk, or no entries before the first hint is
/// set.
#[derive(Debug)]
pub struct Hints {
    /// Number of guest chunks.
    chunks: u32,
    priorities: Vec<u8>,
    accesses: Vec<u32>,
    /// One bit per chunk, set if the chunk has been used since the clock hand last passed it.
    referenced: Vec<u64>,
    /// Guest chunk to which the clock hand points.
    pub(super) hand: u32,
    pub(super) residency_history: ResidencyHistory,
}

impl Hints {
    /// Creates empty hints for a VM with `chunks` guest chunks.
    #[must_use]
    pub fn new(chunks: u32) -> Self {
        Self {
            chunks,
            priorities: Vec::new(),
            accesses: Vec::new(),
            referenced: Vec::new(),
            hand: 0,
            residency_history: ResidencyHistory::default(),
        }
    }

    /// Sets the eviction priority of `chunks`. Chunks with the lowest priority are evicted first.
    pub fn set_priority(&mut self, chunks: RangeInclusive<u32>, priority: u8) {
        let range = self.within(&chunks);
        self.priorities.resize(self.chunks as usize, PRIORITY_DEFAULT);
        self.priorities[range].fill(priority);
    }

    /// Returns a chunk's eviction priority.
    #[must_use]
    pub fn priority(&self, index: u32) -> u8 {
        self.priorities.get(index as usize).copied().unwrap_or(PRIORITY_DEFAULT)
    }

    /// Sets the access frequency of each of `chunks`, in the unit of the VM's profile.
    pub fn set_accesses(&mut self, chunks: RangeInclusive<u32>, count: u32) {
        let range = self.within(&chunks);
        self.accesses.resize(self.chunks as usize, 0);
        self.accesses[range].fill(count);
    }

    /// Returns a chunk's access frequency, or 0 if there is no hint.
    #[must_use]
    pub fn accesses(&self, index: u32) -> u32 {
        self.accesses.get(index as usize).copied().unwrap_or(0)
    }

    /// Records a use of the chunks.
    pub fn touch(&mut self, chunks: RangeInclusive<u32>) {
        let range = self.within(&chunks);
        if range.is_empty() {
            return;
        }
        self.referenced.resize((self.chunks as usize).div_ceil(64), 0);
        let (first, last) = (range.start, range.end - 1);
        for word in first / 64..=last / 64 {
            let from = if word == first / 64 { first % 64 } else { 0 };
            let to = if word == last / 64 { last % 64 } else { 63 };
            self.referenced[word] |= (u64::MAX >> (63 - (to - from))) << from;
        }
    }

    /// Records that the chunks arrived on the card together and are in use.
    pub fn arrived(&mut self, chunks: RangeInclusive<u32>) {
        let range = self.within(&chunks);
        self.residency_history.arrived(range, self.chunks);
    }

    /// Records that a chunk is needed on the card but is not there.
    pub fn wants(&mut self, index: u32) {
        self.residency_history.wants(index);
    }

    /// Returns true if a chunk has been used since the clock hand last passed it.
    #[must_use]
    pub fn is_referenced(&self, index: u32) -> bool {
        self.referenced.get(index as usize / 64).is_some_and(|word| word >> (index % 64) & 1 == 1)
    }

    /// Records that the clock hand has passed a chunk.
    pub(super) fn pass(&mut self, index: u32) {
        if let Some(word) = self.referenced.get_mut(index as usize / 64) {
            *word &= !(1 << (index % 64));
        }
    }

    /// Returns the part of the range `chunks` that exists.
    fn within(&self, chunks: &RangeInclusive<u32>) -> std::ops::Range<usize> {
        let end = chunks.end().saturating_add(1).min(self.chunks) as usize;
        (*chunks.start() as usize).min(end)..end
    }
}
