//! For programs that go over more than the card has, again and again: of a loop, what was used just now is needed last, so that to
//! give up what was used longest ago is the worst that one can do.
//!
//! It knows of a chunk only when it came to the card and when it went; a card without reference bits shows no more. First
//! goes the chunk before one that is wanted now, since buffers are gone over in the order of addresses; then what came last. A
//! chunk that is wanted again at once was no part of a loop but is always in use: it is spared for so many victims, and for twice as
//! many each time that this happens again.

use super::{Choose, Hints, keep_least};
use std::cmp::Reverse;

/// Chooses what was used just now, but for what is always in use.
#[derive(Debug)]
pub(super) struct Loops;

impl Choose for Loops {
    fn victims(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize) {
        let all = candidates.clone();
        let comings = &hints.comings;
        keep_least(candidates, count, |index| {
            (comings.is_spared(index), !comings.is_behind(index), Reverse((comings.came(index), index)))
        });
        hints.comings.gave_up(&all, candidates);
    }

    fn returns(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize) {
        // What was wanted at once comes back before all, then what has been away longest: a loop comes to it next.
        keep_least(candidates, count, |index| (Reverse(hints.comings.allowance(index)), hints.comings.went(index)));
    }
}
