//! Arrivals and evictions of a VM's chunks, as observed by a policy.

/// A chunk counts as always in use if fewer than this number of arrivals occur between its eviction and its return.
const AT_ONCE: u64 = 3;
/// Number of evictions for which such a chunk is spared at first.
const SPARED: u32 = 16;
/// Maximum number of evictions for which a chunk is spared.
const SPARED_MAX: u32 = 4096;
/// Maximum number of recorded chunks that are needed on the card but are not there.
const WANTED_MAX: usize = 64;

/// Arrivals and evictions of a VM's chunks. It allocates no memory before the first arrival.
#[derive(Debug, Default)]
pub(in crate::victim) struct ResidencyHistory {
    /// Number of arrivals so far.
    count: u64,
    chunks: Vec<Coming>,
    /// Chunks that are needed on the card but are not there.
    wanted: Vec<u32>,
}

/// History of one chunk.
#[derive(Clone, Copy, Debug, Default)]
struct Coming {
    /// Sequence number of the chunk's last arrival, starting at 1, or 0 if it has not arrived.
    came: u64,
    /// Number of arrivals before the chunk's last eviction, plus one, or 0 if the chunk was not evicted or has
    /// returned.
    went: u64,
    /// Number of further evictions for which the chunk is spared.
    spared: u32,
    /// Number of evictions for which the chunk was last spared.
    allowance: u32,
}

impl ResidencyHistory {
    fn chunk_record(&self, index: u32) -> Coming {
        self.chunks.get(index as usize).copied().unwrap_or_default()
    }

    /// Records that the chunks arrived on the card together, for a VM with `all` chunks.
    pub(super) fn arrived(&mut self, chunks: std::ops::Range<usize>, all: u32) {
        if chunks.is_empty() {
            return;
        }
        self.chunks.resize(all as usize, Coming::default());
        self.count += 1;
        let count = self.count;
        for chunk in self.chunks.get_mut(chunks.clone()).unwrap_or_default() {
            if chunk.went > 0 {
                let again = count.saturating_sub(chunk.went) < AT_ONCE;
                chunk.allowance = match again {
                    true => chunk.allowance.saturating_mul(2).clamp(SPARED, SPARED_MAX),
                    false => chunk.allowance / 2,
                };
                chunk.spared = if again { chunk.allowance } else { 0 };
            }
            (chunk.came, chunk.went) = (count, 0);
        }
        self.wanted.retain(|index| !chunks.contains(&(*index as usize)));
    }

    /// Records that a chunk is needed on the card. The record is removed at the next eviction if the chunk has not
    /// arrived by then.
    pub(super) fn wants(&mut self, index: u32) {
        if self.wanted.len() < WANTED_MAX && !self.wanted.contains(&index) {
            self.wanted.push(index);
        }
    }

    /// Records that `chosen`, selected from all `candidates`, are evicted.
    pub(in crate::victim) fn gave_up(&mut self, candidates: &[u32], chosen: &[u32]) {
        for &index in candidates {
            if let Some(chunk) = self.chunks.get_mut(index as usize) {
                // Count down the evictions for which the chunk is still spared.
                chunk.spared = chunk.spared.saturating_sub(1);
            }
        }
        let count = self.count;
        for &index in chosen {
            if let Some(chunk) = self.chunks.get_mut(index as usize) {
                (chunk.went, chunk.spared) = (count + 1, 0);
            }
        }
        self.wanted.clear();
    }

    /// Returns true if a chunk must be spared while there are other candidates.
    pub(in crate::victim) fn is_spared(&self, index: u32) -> bool {
        self.chunk_record(index).spared > 0
    }

    /// Returns true if the chunk after this one is needed now.
    pub(in crate::victim) fn is_behind(&self, index: u32) -> bool {
        index.checked_add(1).is_some_and(|next| self.wanted.contains(&next))
    }

    /// Returns the sequence number of a chunk's last arrival, or 0 if it has not arrived.
    pub(in crate::victim) fn came(&self, index: u32) -> u64 {
        self.chunk_record(index).came
    }

    /// Returns the number of arrivals before a chunk's eviction, plus one, or 0 if the chunk is not evicted.
    pub(in crate::victim) fn went(&self, index: u32) -> u64 {
        self.chunk_record(index).went
    }

    /// Returns a chunk's allowance, which grows each time the chunk is needed again soon after an eviction.
    pub(in crate::victim) fn allowance(&self, index: u32) -> u32 {
        self.chunk_record(index).allowance
    }
}
