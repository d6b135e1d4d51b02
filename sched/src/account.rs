//! Accounts of a vGPU's submissions and engine time.

mod saved;

pub(crate) use saved::{SavedAccount, SavedHistory};

use crate::types::{Engine, Nanos};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Number of histogram buckets per power of two. A quantile has a relative error of at most 1/8.
const BUCKETS_PER_OCTAVE: u32 = 8;
/// Log2 of `BUCKETS_PER_OCTAVE`.
const STEPS_LOG2: u32 = 3;
/// Number of buckets of a histogram.
const BUCKETS: usize = (BUCKETS_PER_OCTAVE * (u64::BITS - STEPS_LOG2 + 1)) as usize;

/// Histogram of durations with a fixed number of buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    counts: Box<[u64]>,
    count: u64,
    sum: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS].into(), count: 0, sum: 0, max: 0 }
    }
}

fn bucket(ns: u64) -> usize {
    let shift = (u64::BITS - ns.leading_zeros()).saturating_sub(STEPS_LOG2 + 1);
    ((shift * BUCKETS_PER_OCTAVE) as usize) + (ns >> shift) as usize
}

/// Returns the upper bound of a bucket, in ns.
fn upper(bucket: usize) -> u64 {
    let (step, index) = (BUCKETS_PER_OCTAVE as usize, bucket as u64);
    if bucket < 2 * step {
        return index;
    }
    let shift = bucket / step - 1;
    let mantissa = index - shift as u64 * u64::from(BUCKETS_PER_OCTAVE);
    ((mantissa + 1) << shift).wrapping_sub(1)
}

impl Histogram {
    /// Records a duration in ns.
    pub fn add(&mut self, ns: u64) {
        self.counts[bucket(ns)] += 1;
        self.count += 1;
        self.sum = self.sum.saturating_add(ns);
        self.max = self.max.max(ns);
    }

    /// Returns the number of recorded durations.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Returns the sum of the recorded durations, in ns.
    #[must_use]
    pub const fn sum(&self) -> u64 {
        self.sum
    }

    /// Returns the number of durations that do not exceed `ns`. The result may exclude durations longer than 7/8 of
    /// `ns`.
    #[must_use]
    pub fn at_most(&self, ns: u64) -> u64 {
        self.counts.iter().enumerate().take_while(|(index, _)| upper(*index) <= ns).map(|(_, count)| count).sum()
    }

    /// Returns the mean duration in ns, or 0 if none was recorded.
    #[must_use]
    pub fn mean(&self) -> u64 {
        self.sum.checked_div(self.count).unwrap_or(0)
    }

    /// Returns the longest recorded duration, in ns.
    #[must_use]
    pub const fn max(&self) -> u64 {
        self.max
    }

    /// Returns a quantile in ns: the duration that `permille` thousandths of all durations do not exceed, or 0 if none
    /// was recorded. It may be up to 1/8 too large.
    #[must_use]
    pub fn quantile(&self, permille: u32) -> u64 {
        let wanted = (u128::from(self.count) * u128::from(permille)).div_ceil(1000);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += u128::from(*count);
            if seen >= wanted && *count > 0 {
                return upper(index).min(self.max);
            }
        }
        self.max
    }

    /// Adds the durations of another histogram.
    pub fn merge(&mut self, other: &Self) {
        for (to, from) in self.counts.iter_mut().zip(&other.counts) {
            *to += from;
        }
        self.count += other.count;
        self.sum = self.sum.saturating_add(other.sum);
        self.max = self.max.max(other.max);
    }
}

/// Account of a vGPU's submissions to one engine, and of the engine time that they used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "SavedAccount", try_from = "SavedAccount")]
pub struct Account {
    /// Number of submissions that have arrived.
    pub arrived: u64,
    /// Number of started submissions.
    pub started: u64,
    /// Number of completed submissions.
    pub completed: u64,
    /// Number of submissions that were withdrawn or removed with their channel.
    pub dropped: u64,
    /// Number of channels killed because they exceeded the run time limit.
    pub killed: u64,
    /// Engine time used, in ns.
    pub used: u64,
    /// Engine time of the longest submission, in ns.
    pub longest: u64,
    /// Wait times from arrival to start, in ns.
    pub waits: Histogram,
}

impl Account {
    /// Adds another account to this one.
    pub(crate) fn add(&mut self, other: &Self) {
        let Self { arrived, started, completed, dropped, killed, used, longest, waits } = other;
        self.arrived += arrived;
        self.started += started;
        self.completed += completed;
        self.dropped += dropped;
        self.killed += killed;
        self.used = self.used.saturating_add(*used);
        self.longest = self.longest.max(*longest);
        self.waits.merge(waits);
    }
}

/// Engine time charged to a vGPU in one interval of its [`History`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Start of the interval.
    pub from: Nanos,
    /// Time charged in the interval for each engine, in ns. A submission is usually charged when it ends.
    pub used: [u64; Engine::COUNT],
}

/// Recent engine time of a vGPU, by interval. Contains the last [`Self::MAX_INTERVALS`] intervals with charges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    samples: VecDeque<Sample>,
}

impl History {
    /// Length of an interval, in ns.
    pub const INTERVAL_NS: u64 = 100_000_000;
    /// Maximum number of stored intervals.
    pub const MAX_INTERVALS: usize = 600;

    pub(crate) fn add(&mut self, at: Nanos, engine: Engine, used: u64) {
        let from = Nanos(at.0 - at.0 % Self::INTERVAL_NS);
        if self.samples.back().is_none_or(|last| last.from < from) {
            if self.samples.len() == Self::MAX_INTERVALS {
                self.samples.pop_front();
            }
            self.samples.push_back(Sample { from, used: [0; Engine::COUNT] });
        }
        if let Some(last) = self.samples.back_mut() {
            last.used[engine.index()] += used;
        }
    }

    /// Returns the intervals that start at or after `since`, in order.
    pub fn since(&self, since: Nanos) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(move |sample| sample.from >= since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_upper_end_exceeds_value_by_at_most_an_eighth() {
        for ns in (0..200).chain([1000, 4095, 4096, 1 << 40, u64::MAX]) {
            let upper = upper(bucket(ns));
            assert!(ns <= upper && upper - ns <= ns / 8, "{ns} {upper}");
        }
    }

    #[test]
    fn histogram_quantiles_match_counted_values() {
        let mut histogram = Histogram::default();
        (1..=100).for_each(|ns| histogram.add(ns * 1000));
        assert!((50_000..=56_250).contains(&histogram.quantile(500)));
        assert!((99_000..=100_000).contains(&histogram.quantile(990)));
        assert_eq!((histogram.quantile(1000), histogram.mean(), histogram.count()), (100_000, 50_500, 100));
        assert_eq!(Histogram::default().quantile(990), 0);
    }

    #[test]
    fn durations_up_to_a_bound_are_counted() {
        let mut histogram = Histogram::default();
        (1..=100).for_each(|ns| histogram.add(ns * 1000));
        assert!((44..=50).contains(&histogram.at_most(50_000)));
        assert_eq!([0, 999, 113_000, u64::MAX].map(|ns| histogram.at_most(ns)), [0, 0, 100, 100]);
        assert_eq!(histogram.sum(), 5_050_000);
    }

    #[test]
    fn history_is_bounded_and_skips_idle_intervals() {
        let mut history = History::default();
        for interval in 0..2000 {
            history.add(Nanos(interval * 2 * History::INTERVAL_NS + 5), Engine::Copy0, 7);
        }
        assert_eq!(history.since(Nanos(0)).count(), History::MAX_INTERVALS);
        let last = Sample { from: Nanos(1999 * 2 * History::INTERVAL_NS), used: [0, 7, 0] };
        assert_eq!(history.since(last.from).collect::<Vec<_>>(), [&last]);
    }
}
