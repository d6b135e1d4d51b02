//! Choice of the chunk of a VM that gives way, and of the one that comes back first.
//!
//! A policy is one file here and a line in [`VictimPolicy`]. It chooses among chunks that may go; which VM has to give, and
//! how many, is for the [`Balancer`](crate::Balancer). What is known about chunks ([`Hints`]) is kept apart
//! from the policies, so that another one can be chosen while VMs run and nothing that was said is lost.

mod clock;
mod hints;
mod loops;
mod priority;
mod profiled;
mod random;

pub(crate) use hints::SavedHints;
pub use hints::{Hints, PRIORITY_DEFAULT};

use std::fmt::{Debug, Display, Formatter};
use std::str::FromStr;

/// Chooses chunks.
pub trait Choose: Debug + Send {
    /// Leaves of `candidates`, guest chunks in ascending order, those `count` that are best given up, the best first; all if
    /// there are fewer.
    fn victims(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize);

    /// As [`Self::victims`], those that are most worth to be on the card.
    fn returns(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize);

    /// Returns where the policy is in what it does at random: a policy that is built from that as its seed goes on as this one.
    fn phase(&self) -> u64 {
        0
    }
}

/// The policies, by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum VictimPolicy {
    /// Any, as GPUswap does: a GPU keeps no reference bits.
    #[default]
    Random,
    /// By what the owner says of its buffers, the lowest priority first.
    Priority,
    /// By how often a profile says that chunks are accessed, the least first.
    Profiled,
    /// By what the mediator sees used: chunks that were not since the hand last passed.
    Clock,
    /// By comings and goings, what was used just now first, but for what is always in use: for loops that are larger than the
    /// card.
    Loops,
}

impl VictimPolicy {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Random, Self::Priority, Self::Profiled, Self::Clock, Self::Loops];

    /// As an operator writes it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::Priority => "priority",
            Self::Profiled => "profiled",
            Self::Clock => "clock",
            Self::Loops => "loops",
        }
    }

    /// The policy itself. What it does at random follows from `seed`.
    #[must_use]
    pub fn build(self, seed: u64) -> Box<dyn Choose> {
        match self {
            Self::Random => Box::new(random::Random::new(seed)),
            Self::Priority => Box::new(priority::Priority),
            Self::Profiled => Box::new(profiled::Profiled),
            Self::Clock => Box::new(clock::Clock),
            Self::Loops => Box::new(loops::Loops),
        }
    }
}

impl Display for VictimPolicy {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for VictimPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|policy| policy.name() == text).ok_or_else(|| {
            format!("`{text}` is no policy for victims: `random`, `priority`, `profiled`, `clock` or `loops`")
        })
    }
}

/// Leaves the `count` candidates with the least keys, the least first; of equals those with the lowest index.
fn keep_least<K: Ord>(candidates: &mut Vec<u32>, count: usize, key: impl Fn(u32) -> K) {
    if count == 0 {
        candidates.clear();
    } else if count < candidates.len() {
        candidates.select_nth_unstable_by_key(count - 1, |&index| (key(index), index));
        candidates.truncate(count);
    }
    candidates.sort_unstable_by_key(|&index| (key(index), index));
}

#[cfg(test)]
mod tests;
