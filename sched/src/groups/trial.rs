//! Trials, which compare the numbers of submissions that a group's members make in its two modes.
//!
//! A trial counts submissions in the current mode, and then in the other mode. The trial ignores the first quarter of
//! each part, during which gates open and close. It then keeps the mode favoured by the geometric mean of the count
//! ratios of all members that worked in both parts. As a result, a member with short kernels has the same influence as
//! a member with long kernels.

use super::{GroupConfig, Sharing};
use crate::{Nanos, TenantId};
use std::collections::BTreeMap;

/// The first `1 / UNCOUNTED_FRACTION` of each part of a trial is not counted.
const UNCOUNTED_FRACTION: u64 = 4;

/// Number of submissions by each member in one part of a trial.
type Counts = BTreeMap<TenantId, u64>;

#[derive(Debug)]
struct Running {
    since: Nanos,
    counts: Counts,
    counting: bool,
    /// Counts of the first part, which uses the mode from before the trial, or `None` during the first part.
    first: Option<Counts>,
    /// Number of members that have work.
    working: usize,
}

/// Trials of one group.
#[derive(Debug)]
pub(super) struct Trial {
    next: Nanos,
    running: Option<Running>,
}

impl Trial {
    pub(super) fn new(now: Nanos) -> Self {
        Self { next: now, running: None }
    }

    /// Counts a member's submissions.
    pub(super) fn submitted(&mut self, tenant: TenantId, launches: u64) {
        if let Some(running) = self.running.as_mut().filter(|running| running.counting) {
            *running.counts.entry(tenant).or_default() += launches;
        }
    }

    /// Advances the trial of a group in which `working` members have work. Returns the new mode if the mode changes.
    pub(super) fn tick(&mut self, config: &GroupConfig, together: bool, working: usize, now: Nanos) -> Option<bool> {
        let Some(running) = &mut self.running else {
            if now >= self.next && working > 1 {
                self.running = Some(Running::new(None, working, now));
            }
            return None;
        };
        if running.working != working {
            // The two parts are not comparable. Keep the mode from before the trial until the next trial.
            let is_other = running.first.is_some();
            self.running = None;
            self.next = now.after(config.trial_ns);
            return is_other.then_some(!together);
        }
        let lasted = now.since(running.since);
        if !running.counting && lasted >= config.trial_ns / UNCOUNTED_FRACTION {
            running.counting = true;
        }
        if lasted < config.trial_ns {
            return None;
        }
        let counts = std::mem::take(&mut running.counts);
        let Some(first) = running.first.take() else {
            self.running = Some(Running::new(Some(counts), working, now));
            return Some(!together);
        };
        self.running = None;
        self.next = now.after(config.trial_interval_ns);
        (ratio(&first, &counts) < 1.0).then_some(!together)
    }

    /// Returns the time at which the next call of [`Self::tick`] is due.
    pub(super) fn wakeup(&self, config: &GroupConfig, sharing: Sharing) -> Option<Nanos> {
        if sharing != Sharing::Auto {
            return None;
        }
        let Some(running) = &self.running else { return Some(self.next) };
        let uncounted = config.trial_ns / UNCOUNTED_FRACTION;
        Some(running.since.after(if running.counting { config.trial_ns } else { uncounted }))
    }
}

impl Running {
    fn new(first: Option<Counts>, working: usize, since: Nanos) -> Self {
        Self { since, counts: Counts::new(), counting: false, first, working }
    }
}

/// Returns the geometric mean of the members' progress in the second part relative to the first, or 1 if no member
/// worked in both parts.
fn ratio(first: &Counts, second: &Counts) -> f64 {
    let both = first.iter().filter_map(|(tenant, &before)| Some((before, *second.get(tenant)?)));
    let logs: Vec<f64> =
        both.filter(|&(before, after)| before > 0 && after > 0).map(|(b, a)| (a as f64 / b as f64).ln()).collect();
    if logs.is_empty() { 1.0 } else { (logs.iter().sum::<f64>() / logs.len() as f64).exp() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Runs a trial in which two members make the given numbers of submissions per ms in each mode. Returns each new
    /// mode.
    fn changes(turns: [u64; 2], together: [u64; 2]) -> Vec<bool> {
        let config = GroupConfig::default();
        let (mut trial, mut mode, mut changes) = (Trial::new(Nanos(0)), false, Vec::new());
        for ms in 0..2000 {
            let rates = if mode { together } else { turns };
            for (number, rate) in (0..).zip(rates) {
                trial.submitted(TenantId(number), rate);
            }
            if let Some(now) = trial.tick(&config, mode, 2, Nanos(ms * MS)) {
                mode = now;
                changes.push(mode);
            }
        }
        changes
    }

    #[test]
    fn mode_with_more_progress_stays() {
        assert_eq!(changes([10, 10], [14, 13]), [true]);
        assert_eq!(changes([10, 10], [9, 10]), [true, false]);
        // Both members have the same influence, regardless of their numbers of submissions.
        assert_eq!(changes([1000, 10], [1100, 5]), [true, false]);
    }

    #[test]
    fn trial_ends_in_earlier_mode_when_member_stops() {
        let config = GroupConfig::default();
        let mut trial = Trial::new(Nanos(0));
        assert_eq!(trial.tick(&config, true, 2, Nanos(0)), None);
        assert_eq!(trial.tick(&config, true, 2, Nanos(700 * MS)), Some(false));
        assert_eq!(trial.tick(&config, false, 1, Nanos(800 * MS)), Some(true));
        assert_eq!(trial.tick(&config, true, 1, Nanos(9000 * MS)), None, "a single member needs no trial");
        assert_eq!(trial.wakeup(&config, Sharing::Auto), Some(Nanos(1400 * MS)));
        assert_eq!(trial.wakeup(&config, Sharing::Turns), None);
    }
}
