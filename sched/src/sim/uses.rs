//! Engine use in intervals of equal length, from a simulated run or from the accounts of a real run.

use crate::Engine;

/// Deviation of shares from the intended shares over all windows, as fractions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ShareError {
    /// Mean deviation over all windows, of the vGPU with the largest mean.
    pub mean: f64,
    /// Maximum deviation over all vGPUs and windows.
    pub worst: f64,
}

/// Time for which each VM used each engine, per interval of fixed length, in ns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uses {
    interval: u64,
    of: Vec<[Vec<u64>; Engine::COUNT]>,
}

impl Uses {
    /// Creates an empty record for `vms` VMs. The record covers `length` ns in intervals of `interval` ns, which must
    /// be positive. The length of a window must be a multiple of `interval`.
    #[must_use]
    pub fn new(vms: usize, interval: u64, length: u64) -> Self {
        let count = usize::try_from(length.div_ceil(interval)).unwrap_or(0);
        Self { interval, of: (0..vms).map(|_| Engine::ALL.map(|_| vec![0; count])).collect() }
    }

    /// Adds a VM's use of an engine from `from` until `until`, in ns. Time after the last interval is ignored.
    pub fn add(&mut self, vm: usize, engine: Engine, from: u64, until: u64) {
        let mut from = from;
        while from < until {
            let end = (from - from % self.interval + self.interval).min(until);
            self.add_at(vm, engine, from, end - from);
            from = end;
        }
    }

    /// Adds `used` ns to the interval that contains the time `at`, in ns. Ignores times after the last interval.
    pub fn add_at(&mut self, vm: usize, engine: Engine, at: u64, used: u64) {
        let of = self.of.get_mut(vm).map(|of| &mut of[engine.index()]);
        let index = usize::try_from(at / self.interval).unwrap_or(usize::MAX);
        if let Some(interval) = of.and_then(|of| of.get_mut(index)) {
            *interval += used;
        }
    }

    /// Returns the use of an engine by a VM between `from` and `until`, in ns. Both times are rounded down to the start
    /// of an interval.
    #[must_use]
    pub fn used(&self, vm: usize, engine: Engine, from: u64, until: u64) -> u64 {
        let intervals = &self.of[vm][engine.index()];
        let first = usize::try_from(from / self.interval).unwrap_or(usize::MAX);
        let end = usize::try_from(until / self.interval).unwrap_or(usize::MAX);
        intervals.iter().take(end).skip(first).sum()
    }

    /// Returns each VM's fraction of the total use of an engine between the times `from` and `until`.
    #[must_use]
    pub fn shares(&self, engine: Engine, from: u64, until: u64) -> Vec<f64> {
        let used: Vec<u64> = (0..self.of.len()).map(|vm| self.used(vm, engine, from, until)).collect();
        let sum: u64 = used.iter().sum();
        used.iter().map(|used| if sum == 0 { 0.0 } else { *used as f64 / sum as f64 }).collect()
    }

    /// Returns the shares in consecutive windows of `window` ns between `from` and `until`.
    pub fn windows(&self, engine: Engine, window: u64, from: u64, until: u64) -> impl Iterator<Item = Vec<f64>> {
        let ends = (from + window..=until).step_by(usize::try_from(window).unwrap_or(usize::MAX));
        ends.map(move |end| self.shares(engine, end - window, end))
    }

    /// Compares the shares in consecutive windows between `from` and `until` with `wanted`, which contains one share
    /// per VM.
    #[must_use]
    pub fn share_error(&self, engine: Engine, window: u64, from: u64, until: u64, wanted: &[f64]) -> ShareError {
        let mut sums = vec![0.0; wanted.len()];
        let (mut worst, mut count) = (0.0f64, 0.0);
        for shares in self.windows(engine, window, from, until) {
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

/// Returns Jain's fairness index of the ratios of shares to wanted shares. The index is 1 if all ratios are equal, or
/// 1/n if one of n vGPUs uses all the time.
#[must_use]
pub fn jain(shares: &[f64], wanted: &[f64]) -> f64 {
    let parts: Vec<f64> = shares.iter().zip(wanted).map(|(share, wanted)| share / wanted).collect();
    let sum: f64 = parts.iter().sum();
    let squares: f64 = parts.iter().map(|part| part * part).sum();
    if squares == 0.0 { 1.0 } else { sum * sum / (parts.len() as f64 * squares) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uses_are_split_over_the_intervals_that_they_lie_in() {
        let mut uses = Uses::new(2, 10, 40);
        uses.add(0, Engine::Copy0, 5, 28);
        uses.add(1, Engine::Copy0, 38, 70);
        let used = |vm| [0, 10, 20, 30].map(|at| uses.used(vm, Engine::Copy0, at, at + 10));
        assert_eq!([used(0), used(1)], [[5, 10, 8, 0], [0, 0, 0, 2]]);
    }

    #[test]
    fn error_is_the_mean_of_windows_and_the_worst_of_them() {
        let mut uses = Uses::new(2, 10, 40);
        // The ratio of uses changes from 3:1 to 1:1.
        for (vm, at, used) in [(0, 0, 15), (1, 0, 5), (0, 20, 7), (1, 30, 7)] {
            uses.add_at(vm, Engine::Compute, at, used);
        }
        let error = uses.share_error(Engine::Compute, 20, 0, 40, &[0.5; 2]);
        assert_eq!(error, ShareError { mean: 0.125, worst: 0.25 });
    }
}
