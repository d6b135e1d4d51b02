//! Comings and goings of a VM's chunks, as far as a policy has seen them.

/// A chunk that went and is back before so many others have come was in use all the time.
const AT_ONCE: u64 = 3;
/// Times that such a chunk is spared at first, and at most.
const SPARED: u32 = 16;
const SPARED_MAX: u32 = 4096;
/// Chunks that are wanted at most, of which is known which.
const WANTED_MAX: usize = 64;

/// Comings and goings of a VM's chunks. Nothing is kept before the first.
#[derive(Debug, Default)]
pub(in crate::victim) struct Comings {
    /// Comings so far.
    count: u64,
    chunks: Vec<Coming>,
    /// Chunks that have no place on the card and are wanted there now.
    wanted: Vec<u32>,
}

/// Record of a chunk.
#[derive(Clone, Copy, Debug, Default)]
struct Coming {
    /// The number of its last coming, from 1; 0 if it never came.
    came: u64,
    /// Comings that there had been when it was given up last, and one more; 0 if it was not, or is back.
    went: u64,
    /// Times that it is still spared.
    spared: u32,
    /// Times that it was spared when it was last.
    allowance: u32,
}

impl Comings {
    fn of(&self, index: u32) -> Coming {
        self.chunks.get(index as usize).copied().unwrap_or_default()
    }

    /// Chunks of a VM of `all` have come to the card together.
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

    /// A chunk is wanted on the card. What was wanted and never came is forgotten with the next that comes.
    pub(super) fn wants(&mut self, index: u32) {
        if self.wanted.len() < WANTED_MAX && !self.wanted.contains(&index) {
            self.wanted.push(index);
        }
    }

    /// Of all `candidates`, those of `chosen` go.
    pub(in crate::victim) fn gave_up(&mut self, candidates: &[u32], chosen: &[u32]) {
        for &index in candidates {
            if let Some(chunk) = self.chunks.get_mut(index as usize) {
                // Of those that go, none is spared when it is back but by what that tells.
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

    /// Returns whether a chunk is spared, as long as there are others.
    pub(in crate::victim) fn is_spared(&self, index: u32) -> bool {
        self.of(index).spared > 0
    }

    /// Returns whether the chunk behind it is wanted now.
    pub(in crate::victim) fn is_behind(&self, index: u32) -> bool {
        index.checked_add(1).is_some_and(|next| self.wanted.contains(&next))
    }

    /// The number of a chunk's last coming; 0 if none was seen.
    pub(in crate::victim) fn came(&self, index: u32) -> u64 {
        self.of(index).came
    }

    /// Comings that there had been when a chunk went.
    pub(in crate::victim) fn went(&self, index: u32) -> u64 {
        self.of(index).went
    }

    /// Returns how often a chunk is spared that was in use all the time; 0 of one that was not.
    pub(in crate::victim) fn allowance(&self, index: u32) -> u32 {
        self.of(index).allowance
    }
}
