//! Policy for programs that loop over more memory than the card has. In a loop, the most recently used chunk is needed
//! last, so LRU is the worst policy.
//!
//! The policy uses only the order of arrivals and evictions, because a card without reference bits provides no other
//! information. The first victim is the chunk before one that is needed now, because loops usually access buffers in
//! address order. The next victim is the latest arrival. A chunk that is needed again soon after its eviction is not
//! part of a loop, but is always in use. It is spared for a number of evictions, which doubles each time.

use super::{Choose, Hints, keep_least};
use std::cmp::Reverse;

/// Selects the most recently used chunk, except for chunks that are always in use.
#[derive(Debug)]
pub(super) struct Loops;

impl Choose for Loops {
    fn victims(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize) {
        let all = candidates.clone();
        let residency_history = &hints.residency_history;
        keep_least(candidates, count, |index| {
            (
                residency_history.is_spared(index),
                !residency_history.is_behind(index),
                Reverse((residency_history.came(index), index)),
            )
        });
        hints.residency_history.gave_up(&all, candidates);
    }

    fn returns(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize) {
        // First return chunks that are always in use, and then the chunks that were evicted longest ago, because a loop
        // needs these next.
        keep_least(candidates, count, |index| {
            (Reverse(hints.residency_history.allowance(index)), hints.residency_history.went(index))
        });
    }
}
