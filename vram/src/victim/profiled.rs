//! Victim selection by the number of accesses to chunks, from an earlier profile or the card's counters.

use super::{Choose, Hints, keep_least};
use std::cmp::Reverse;

/// Selects chunks by number of accesses, fewest first.
#[derive(Debug)]
pub(super) struct Profiled;

impl Choose for Profiled {
    fn victims(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize) {
        keep_least(candidates, count, |index| hints.accesses(index));
    }

    fn returns(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize) {
        keep_least(candidates, count, |index| Reverse(hints.accesses(index)));
    }
}
