//! Determines the order in which a VM's chunks are evicted or returned.
//!
//! Each policy is a file in this folder and a variant of [`VictimPolicy`]. The policy selects among candidates, and the
//! [`Balancer`](crate::Balancer) determines the number of chunks to evict from each VM. Information about chunks
//! ([`Hints`]) is stored outside the policies, so that it is not lost if the policy changes at run time.

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

/// A policy that selects chunks to evict and to return.
pub trait Choose: Debug + Send {
    /// Reduces `candidates` (guest chunks in ascending order) to the `count` best chunks to evict, best first. Keeps
    /// all candidates if there are fewer.
    fn victims(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize);

    /// Like [`Self::victims`], but selects the best chunks to return to the card.
    fn returns(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize);

    /// Returns the state of the random generator. A policy created with it as the seed continues the same sequence.
    fn phase(&self) -> u64 {
        0
    }
}

/// The policies, by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum VictimPolicy {
    /// Selects chunks at random, as GPUswap does, because a GPU has no reference bits.
    #[default]
    Random,
    /// Selects chunks by the priorities of their owner's buffers, lowest first.
    Priority,
    /// Selects chunks by their accesses in a profile, fewest first.
    Profiled,
    /// Selects chunks that have not been used since the clock hand last passed them. The mediator observes the uses.
    Clock,
    /// Selects the most recently used chunks first, except for chunks that are always in use. Uses are inferred from
    /// arrivals and evictions. This policy is intended for programs that loop over more memory than the card has.
    Loops,
}

impl VictimPolicy {
    /// All policies.
    pub const ALL: [Self; 5] = [Self::Random, Self::Priority, Self::Profiled, Self::Clock, Self::Loops];

    /// Returns the policy's name in configuration files.
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

    /// Creates the policy with a seed for random selections.
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
            format!("`{text}` is not a policy for victims: `random`, `priority`, `profiled`, `clock` or `loops`")
        })
    }
}

/// Keeps the `count` candidates with the lowest keys, in ascending order of keys. Among equal keys, prefers the lowest
/// index.
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
