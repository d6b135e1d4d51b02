//! Random victim selection.

use super::{Choose, Hints};

/// Selects chunks with a seeded random generator. Its state is saved, so the sequence must not depend on the version of
/// a crate.
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next random number below `bound`, which must not be 0. Uses SplitMix64 (Steele, Lea and Flood,
    /// OOPSLA 2014), and scales the upper bits to the range.
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        ((u128::from(mixed) * bound as u128) >> 64) as usize
    }
}

impl Choose for Random {
    fn victims(&mut self, _: &mut Hints, candidates: &mut Vec<u32>, count: usize) {
        for at in 0..count.min(candidates.len()) {
            let other = at + self.below(candidates.len() - at);
            candidates.swap(at, other);
        }
        candidates.truncate(count);
    }

    fn returns(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize) {
        self.victims(hints, candidates, count);
    }

    fn phase(&self) -> u64 {
        self.0
    }
}
