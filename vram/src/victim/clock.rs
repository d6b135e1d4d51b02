//! Second-chance algorithm, based on the uses that the mediator observes: copies, and submissions that refer to
//! buffers.

use super::{Choose, Hints, keep_least};

/// Selects chunks that have not been used since the clock hand last passed them.
#[derive(Debug)]
pub(super) struct Clock;

impl Choose for Clock {
    fn victims(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize) {
        let start = candidates.partition_point(|&index| index < hints.hand);
        candidates.rotate_left(start);
        // The hand passes all used chunks in the first round, so no chunk is referenced in the second round.
        let mut chosen: Vec<u32> = Vec::with_capacity(count.min(candidates.len()));
        let mut spared = Vec::new();
        for &index in &*candidates {
            if chosen.len() == count {
                break;
            }
            if hints.is_referenced(index) {
                hints.pass(index);
                spared.push(index);
            } else {
                chosen.push(index);
            }
        }
        let missing = count - chosen.len();
        chosen.extend(spared.into_iter().take(missing));
        hints.hand = chosen.last().map_or(hints.hand, |&index| index.saturating_add(1));
        *candidates = chosen;
    }

    fn returns(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize) {
        keep_least(candidates, count, |index| !hints.is_referenced(index));
    }
}
