//! Saved form of accounts.

use super::{Account, BUCKETS, Histogram, History, Sample};
use crate::checks::COUNT_MAX;
use crate::types::{Engine, Nanos};
use saved_state::{Invalid, ascend};
use serde::{Deserialize, Serialize};

/// Maximum time charged to a vGPU within an interval, in ns. It exceeds any realistic time.
const USED_MAX: u64 = 1 << 62;

/// Saved account of a vGPU on one engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedAccount {
    arrived: u64,
    started: u64,
    completed: u64,
    dropped: u64,
    killed: u64,
    used: u64,
    longest: u64,
    /// Index and count of each non-empty bucket, in order.
    waits: Vec<(u16, u64)>,
    waits_sum: u64,
    waits_max: u64,
}

/// Start of each saved interval, and the time charged in it for each engine, in ns.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedHistory(Vec<(Nanos, [u64; Engine::COUNT])>);

impl Account {
    pub(crate) fn save(&self) -> SavedAccount {
        let Self { arrived, started, completed, dropped, killed, used, longest, waits } = self;
        // `count` is the sum of the buckets, so it is not saved.
        let Histogram { counts, count: _, sum, max } = waits;
        let held = (0u16..).zip(counts).filter(|(_, count)| **count > 0);
        SavedAccount {
            arrived: *arrived,
            started: *started,
            completed: *completed,
            dropped: *dropped,
            killed: *killed,
            used: *used,
            longest: *longest,
            waits: held.map(|(bucket, count)| (bucket, *count)).collect(),
            waits_sum: *sum,
            waits_max: *max,
        }
    }
}

impl From<Account> for SavedAccount {
    fn from(account: Account) -> Self {
        account.save()
    }
}

impl TryFrom<SavedAccount> for Account {
    type Error = Invalid;

    fn try_from(saved: SavedAccount) -> Result<Self, Invalid> {
        let SavedAccount { arrived, started, completed, dropped, killed, used, longest, waits, waits_sum, waits_max } =
            saved;
        let events = [arrived, started, completed, dropped, killed];
        let buckets = ascend(waits.iter().map(|(bucket, _)| bucket))
            && waits.iter().all(|(bucket, count)| usize::from(*bucket) < BUCKETS && *count <= COUNT_MAX);
        let count = waits.iter().fold(0u64, |sum, (_, count)| sum.saturating_add(*count));
        let sound = buckets && count <= COUNT_MAX && events.into_iter().all(|count| count <= COUNT_MAX);
        Invalid::unless(sound, || "the counts of an account are too large".into())?;
        let mut histogram = Histogram { count, sum: waits_sum, max: waits_max, ..Histogram::default() };
        for (bucket, count) in waits {
            histogram.counts[usize::from(bucket)] = count;
        }
        Ok(Self { arrived, started, completed, dropped, killed, used, longest, waits: histogram })
    }
}

impl History {
    pub(crate) fn save(&self) -> SavedHistory {
        let Self { samples } = self;
        SavedHistory(samples.iter().map(|Sample { from, used }| (*from, *used)).collect())
    }
}

impl TryFrom<SavedHistory> for History {
    type Error = Invalid;

    fn try_from(SavedHistory(samples): SavedHistory) -> Result<Self, Invalid> {
        let sound = samples.len() <= Self::MAX_INTERVALS
            && ascend(samples.iter().map(|(from, _)| from))
            && samples.iter().all(|(_, used)| used.iter().all(|used| *used <= USED_MAX));
        Invalid::unless(sound, || "the recent uses of a vGPU are too many or not in order".into())?;
        Ok(Self { samples: samples.into_iter().map(|(from, used)| Sample { from, used }).collect() })
    }
}

#[cfg(test)]
impl SavedAccount {
    /// Makes the account invalid, for tests.
    pub(crate) fn edit(&mut self) {
        self.waits.push((u16::MAX, 1));
    }
}
