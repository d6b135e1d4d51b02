//! Who had what, and when.

use crate::{Engine, Histogram, Scheduler};

/// Length of the intervals in which use is kept, in ns. Windows are multiples of it.
pub(super) const BIN: u64 = 10_000_000;

/// How far shares in windows were from what they should have been, in parts of 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ShareError {
    /// Mean over all windows, of the vGPU for which that is largest.
    pub mean: f64,
    /// The largest of any vGPU in any window.
    pub worst: f64,
}

/// What a run came to.
#[derive(Debug)]
pub struct Outcome {
    /// The scheduler at the end, with its accounts.
    pub scheduler: Scheduler,
    /// Of each VM: from doorbell to the engine's beginning with the work.
    pub waits: Vec<Histogram>,
    /// Of each VM: rounds of its streams that came to their end.
    pub rounds: Vec<u64>,
    /// Submissions that ended.
    pub completed: u64,
    /// Channels that were killed.
    pub killed: u64,
    /// Events that the scheduler was told.
    pub events: u64,
    /// Ticks among them.
    pub ticks: u64,
    pub(super) used: Vec<[Vec<u64>; Engine::COUNT]>,
    pub(super) busy: [u64; Engine::COUNT],
    pub(super) length: u64,
}

impl Outcome {
    /// Time in ns that an engine was truly busy.
    #[must_use]
    pub fn busy(&self, engine: Engine) -> u64 {
        self.busy[engine.index()]
    }

    /// Part of the whole time that an engine was busy.
    #[must_use]
    pub fn utilisation(&self, engine: Engine) -> f64 {
        self.busy(engine) as f64 / self.length as f64
    }

    /// Time in ns that a VM truly used of an engine from `from` until `until` ns.
    #[must_use]
    pub fn used(&self, vm: usize, engine: Engine, from: u64, until: u64) -> u64 {
        let bins = &self.used[vm][engine.index()];
        let first = usize::try_from(from / BIN).unwrap_or(usize::MAX);
        let end = usize::try_from(until / BIN).unwrap_or(usize::MAX);
        bins.iter().take(end).skip(first).sum()
    }

    /// Parts of what was used of an engine from `from` until `until` ns, by VM.
    #[must_use]
    pub fn shares(&self, engine: Engine, from: u64, until: u64) -> Vec<f64> {
        let used: Vec<u64> = (0..self.used.len()).map(|vm| self.used(vm, engine, from, until)).collect();
        let sum: u64 = used.iter().sum();
        used.iter().map(|used| if sum == 0 { 0.0 } else { *used as f64 / sum as f64 }).collect()
    }

    /// Shares in windows of `window` ns, one behind the other, of what lies from `from` until `until` ns.
    pub fn windows(&self, engine: Engine, window: u64, from: u64, until: u64) -> impl Iterator<Item = Vec<f64>> {
        let ends = (from + window..=until).step_by(usize::try_from(window).unwrap_or(usize::MAX));
        ends.map(move |end| self.shares(engine, end - window, end))
    }

    /// How far the shares in those windows are from `wanted`, one for each VM.
    #[must_use]
    pub fn share_error(&self, engine: Engine, window: u64, from: u64, wanted: &[f64]) -> ShareError {
        let mut sums = vec![0.0; wanted.len()];
        let (mut worst, mut count) = (0.0f64, 0.0);
        for shares in self.windows(engine, window, from, self.length) {
            count += 1.0;
            for ((sum, share), wanted) in sums.iter_mut().zip(&shares).zip(wanted) {
                let error = (share - wanted).abs();
                *sum += error;
                worst = worst.max(error);
            }
        }
        let mean = sums.iter().fold(0.0f64, |most, sum| most.max(sum / f64::max(count, 1.0)));
        ShareError { mean, worst }
    }
}

/// Jain's index of what each has over what it should have: 1 when all have alike, 1/n when one has all.
#[must_use]
pub fn jain(shares: &[f64], wanted: &[f64]) -> f64 {
    let parts: Vec<f64> = shares.iter().zip(wanted).map(|(share, wanted)| share / wanted).collect();
    let sum: f64 = parts.iter().sum();
    let squares: f64 = parts.iter().map(|part| part * part).sum();
    if squares == 0.0 { 1.0 } else { sum * sum / (parts.len() as f64 * squares) }
}
