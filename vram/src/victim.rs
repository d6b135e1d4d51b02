//! Chooses the chunk of a VM to evict, and the chunk to return first.
//!
//! A policy is one file in this folder and a variant of [`VictimPolicy`]. The policy chooses among candidates; the
//! [`Balancer`](crate::Balancer) decides how many chunks each VM gives up. Information about chunks ([`Hints`]) is
//! stored separately from the policies, so that the policy can change while VMs run without losing hints.

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
    /// Reduces `candidates`, which are guest chunks in ascending order, to the `count` best ones to evict, best first.
    /// Keeps all if there are fewer.
    fn victims(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize);

    /// Same as [`Self::victims`], for the chunks that are best to return to the card.
    fn returns(&mut self, hints: &mut Hints, candidates: &mut Vec<u32>, count: usize);

    /// Returns the state of the random generator. A policy built with it as its seed continues the same sequence.
    fn phase(&self) -> u64 {
        0
    }
}

/// The policies, by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum VictimPolicy {
    /// Chooses chunks at random, as in GPUswap, because a GPU has no reference bits.
    #[default]
    Random,
    /// Chooses by the owner's buffer priorities, lowest first.
    Priority,
    /// Chooses by the accesses in a profile, fewest first.
    Profiled,
    /// Chooses by the uses that the mediator observes: takes chunks that were not used since the hand last passed.
    Clock,
    /// Chooses by arrivals and evictions: takes the most recently used chunks first, except chunks that are always in
    /// use. Intended for loops over more memory than the card has.
    Loops,
}

impl VictimPolicy {
    /// All policies.
    pub const ALL: [Self; 5] = [Self::Random, Self::Priority, Self::Profiled, Self::Clock, Self::Loops];

    /// Returns the name used in configuration files.
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

    /// Creates the policy. `seed` determines its random choices.
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

/// Keeps the `count` candidates with the lowest keys, in ascending order. Among equal keys, the lowest index wins.
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
