//! Trials of the two modes of a group: its members' own submissions are counted in each.
//!
//! A trial counts in the present mode, and then in the other one. The first quarter of each part is not counted: gates
//! change then. Members that worked in both parts are compared, each by the ratio of its counts; the mode with the
//! larger mean ratio stays. So a member with small kernels counts as much as one with long kernels.

use super::{GroupConfig, Sharing};
use crate::{Nanos, TenantId};
use std::collections::BTreeMap;

/// Part of a trial whose submissions are not counted, as a fraction of its length.
const UNCOUNTED_FRACTION: u64 = 4;

/// Submissions of each member in one part.
type Counts = BTreeMap<TenantId, u64>;

#[derive(Debug)]
struct Running {
    since: Nanos,
    counts: Counts,
    counting: bool,
    /// Counts of the first part, in the mode before the trial.
    first: Option<Counts>,
    /// Number of members that work.
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

    /// Counts submissions of a member.
    pub(super) fn submitted(&mut self, tenant: TenantId, launches: u64) {
        if let Some(running) = self.running.as_mut().filter(|running| running.counting) {
            *running.counts.entry(tenant).or_default() += launches;
        }
    }

    /// Advances the trial of a group with this number of working members. Returns the mode from now on if it changes.
    pub(super) fn tick(&mut self, config: &GroupConfig, together: bool, working: usize, now: Nanos) -> Option<bool> {
        let Some(running) = &mut self.running else {
            if now >= self.next && working > 1 {
                self.running = Some(Running::new(None, working, now));
            }
            return None;
        };
        if running.working != working {
            // The parts cannot be compared. The mode before the trial stays until the next one.
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

    /// Returns the time of the next step.
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

/// Returns the geometric mean of the members' progress in the second part, relative to the first; 1 if no member
/// worked in both.
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

    /// Runs a trial in which two members submit this often per ms in turns, and together. Returns the changes of mode.
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
        // Both members count the same, whatever the number of their submissions.
        assert_eq!(changes([1000, 10], [1100, 5]), [true, false]);
    }

    #[test]
    fn trial_ends_in_earlier_mode_when_member_stops() {
        let config = GroupConfig::default();
        let mut trial = Trial::new(Nanos(0));
        assert_eq!(trial.tick(&config, true, 2, Nanos(0)), None);
        assert_eq!(trial.tick(&config, true, 2, Nanos(700 * MS)), Some(false));
        assert_eq!(trial.tick(&config, false, 1, Nanos(800 * MS)), Some(true));
        assert_eq!(trial.tick(&config, true, 1, Nanos(9000 * MS)), None, "one member has nothing to compare with");
        assert_eq!(trial.wakeup(&config, Sharing::Auto), Some(Nanos(1400 * MS)));
        assert_eq!(trial.wakeup(&config, Sharing::Turns), None);
    }
}
