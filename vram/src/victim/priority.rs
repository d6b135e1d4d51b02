//! Victim selection by the priorities of the owner's buffers, as in the GPUswap dissertation.

use super::{Choose, Hints, keep_least};
use std::cmp::Reverse;

/// Selects chunks by priority, lowest first.
#[derive(Debug)]
pub(super) struct Priority;

impl Choose for Priority {
    fn victims(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize) {
        keep_least(candidates, count, |index| hints.priority(index));
    }

    fn returns(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize) {
        keep_least(candidates, count, |index| Reverse(hints.priority(index)));
    }
}
