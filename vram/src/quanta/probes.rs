//! Probes, which are short trial quanta that determine whether quanta help.
//!
//! A submission does not list the host memory that its work accesses through pointers, and real cards do not count
//! these accesses. However, the accesses lengthen the work's engine time. A probe therefore compares the engine time of
//! a VM's submissions before and during the VM's quantum, in which all of the VM's memory is on the card. The probe
//! only assumes that the work does not change.

use crate::TenantId;
use std::collections::{BTreeMap, BTreeSet};

/// Minimum number of submissions for a meaningful mean.
const MIN_SUBMISSIONS: u64 = 8;
/// Number of windows in which the work of VMs is observed before a probe.
const WINDOWS: u64 = 2;
/// Length of the pause after a failed probe, as a multiple of the probe's length. Each consecutive failure doubles the
/// pause.
const PAUSE_FACTOR: u32 = 32;
/// Maximum length of a pause, in ns.
const LONGEST_REST_NS: u64 = 3_600_000_000_000;
/// Number of quanta after which the result of a probe expires.
const RESULT_VALID_QUANTA: u32 = 64;
/// Maximum speed-up factor counted for one VM. The factor is limited because a VM controls its own submissions.
const MAX_SPEEDUP: f64 = 8.0;

/// Total work completed for a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Engine time, in ns.
    pub used_ns: u64,
    /// Number of completed submissions.
    pub ended: u64,
}

impl Done {
    /// Returns the difference from an earlier value.
    fn since(self, before: Self) -> Self {
        let used_ns = self.used_ns.saturating_sub(before.used_ns);
        Self { used_ns, ended: self.ended.saturating_sub(before.ended) }
    }

    /// Returns the mean engine time of a submission in ns, if enough submissions have completed.
    fn length(self) -> Option<f64> {
        (self.ended >= MIN_SUBMISSIONS && self.used_ns > 0).then(|| self.used_ns as f64 / self.ended as f64)
    }
}

/// Phase of the probes of VMs whose thrashing cannot be measured.
#[derive(Clone, Debug, Default)]
enum State {
    /// No work has been observed yet.
    #[default]
    Begins,
    /// No probe starts before this time.
    Resting { until_ns: u64 },
    /// The VMs' work is being observed.
    Watching { since_ns: u64, then: BTreeMap<TenantId, Done> },
    /// A probe is running.
    Trying(Trial),
    /// Quanta help. This result expires after `left` quanta.
    Found { left: u32 },
}

/// A running probe.
#[derive(Clone, Debug, Default)]
struct Trial {
    began_ns: u64,
    /// Mean engine time per submission before the probe in ns, for the VMs that decide the result.
    before: BTreeMap<TenantId, f64>,
    /// Mean engine time per submission during a VM's quantum in ns, for the VMs with a known mean.
    within: BTreeMap<TenantId, f64>,
    /// VMs that have had their quantum.
    had: BTreeSet<TenantId>,
    /// VM that has the current quantum, and its completed work at the start of the quantum.
    turn: Option<(TenantId, Done)>,
}

impl Trial {
    /// Returns the factor by which quanta shorten the engine time of submissions, if it is known for at least two VMs.
    fn gain(&self) -> Option<f64> {
        let of = |(vm, before): (&TenantId, &f64)| {
            Some((before / self.within.get(vm)?).clamp(1.0 / MAX_SPEEDUP, MAX_SPEEDUP).ln())
        };
        let gains: Vec<f64> = self.before.iter().filter_map(of).collect();
        (gains.len() >= 2).then(|| (gains.iter().sum::<f64>() / gains.len() as f64).exp())
    }
}

/// Decision at the end of a quantum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Quanta continue.
    GoOn,
    /// Quanta do not help, or the result has expired.
    End,
}

/// State of the probes.
#[derive(Clone, Debug, Default)]
pub(super) struct Probes {
    state: State,
    done: BTreeMap<TenantId, Done>,
    /// Number of consecutive failed probes.
    failures: u32,
}

impl Probes {
    /// Creates the state after a successful probe, for quanta that were running in the previous daemon.
    pub(super) fn found() -> Self {
        Self { state: State::Found { left: RESULT_VALID_QUANTA }, ..Self::default() }
    }

    /// Sets the total work completed for each VM.
    pub(super) fn set_done(&mut self, done: BTreeMap<TenantId, Done>) {
        self.done = done;
    }

    /// Discards observations and results because quanta have ended or the settings have changed. A pause after a failed
    /// probe continues.
    pub(super) fn end(&mut self) {
        if !matches!(self.state, State::Resting { .. }) {
            self.state = State::Begins;
        }
    }

    /// Returns true if a probe is running.
    pub(super) fn tries(&self) -> bool {
        matches!(self.state, State::Trying(_))
    }

    /// Observes the work of VMs whose memory does not fit together. Returns true if a probe is due. This is the case if
    /// these VMs used the card for at least half of the last two windows, and the engine time per submission is known
    /// for at least two of them.
    pub(super) fn should_probe(&mut self, now_ns: u64, members: &[TenantId], window_ns: u64) -> bool {
        let of_members = || members.iter().map(|vm| (*vm, self.done.get(vm).copied().unwrap_or_default())).collect();
        let (since_ns, then): (_, &BTreeMap<TenantId, Done>) = match &self.state {
            State::Resting { until_ns } if now_ns < *until_ns => return false,
            State::Watching { since_ns, then } if then.keys().eq(members) => (*since_ns, then),
            _ => {
                self.state = State::Watching { since_ns: now_ns, then: of_members() };
                return false;
            }
        };
        let elapsed = now_ns.saturating_sub(since_ns);
        if elapsed < window_ns.saturating_mul(WINDOWS) {
            return false;
        }
        let since = |(vm, then): (&TenantId, &Done)| Some((*vm, self.done.get(vm)?.since(*then)));
        let done: BTreeMap<TenantId, Done> = then.iter().filter_map(since).collect();
        let busy: u64 = done.values().fold(0, |sum, done| sum.saturating_add(done.used_ns));
        let before: BTreeMap<TenantId, f64> =
            done.into_iter().filter_map(|(vm, done)| Some((vm, done.length()?))).collect();
        if before.len() < 2 || busy < elapsed / 2 {
            self.state = State::Watching { since_ns: now_ns, then: of_members() };
            return false;
        }
        self.state = State::Trying(Trial { began_ns: now_ns, before, ..Trial::default() });
        true
    }

    /// Records that a VM's quantum starts with all of its memory on the card.
    pub(super) fn begins(&mut self, holder: TenantId) {
        if let State::Trying(trial) = &mut self.state {
            trial.turn = self.done.get(&holder).map(|done| (holder, *done));
        }
    }

    /// Returns true if enough of the holder's work has completed during its quantum, or if no probe is running.
    pub(super) fn has_seen_enough(&self, holder: TenantId) -> bool {
        let State::Trying(Trial { turn: Some((of, then)), .. }) = &self.state else { return true };
        *of != holder || self.done.get(&holder).is_none_or(|done| done.since(*then).ended >= MIN_SUBMISSIONS)
    }

    /// Records that the quantum of a VM in `members` has ended, and decides whether quanta continue. Quanta help if
    /// they shorten the engine time of submissions by at least `on_permille`.
    pub(super) fn ends(&mut self, now_ns: u64, holder: TenantId, members: &[TenantId], on_permille: u32) -> Verdict {
        match &mut self.state {
            State::Found { left } if *left > 0 => {
                *left -= 1;
                Verdict::GoOn
            }
            State::Found { .. } => Verdict::End,
            State::Trying(trial) => {
                trial.had.insert(holder);
                if let Some((_, then)) = trial.turn.take_if(|(of, _)| *of == holder)
                    && let Some(length) = self.done.get(&holder).and_then(|done| done.since(then).length())
                {
                    trial.within.insert(holder, length);
                }
                if members.iter().any(|vm| trial.before.contains_key(vm) && !trial.had.contains(vm)) {
                    return Verdict::GoOn;
                }
                let enough = 1000.0 / f64::from(1000u32.saturating_sub(on_permille).max(1));
                if trial.gain().is_some_and(|gain| gain >= enough) {
                    (self.state, self.failures) = (State::Found { left: RESULT_VALID_QUANTA }, 0);
                    return Verdict::GoOn;
                }
                let took_ns = now_ns.saturating_sub(trial.began_ns);
                let rest_ns =
                    took_ns.saturating_mul(u64::from(PAUSE_FACTOR) << self.failures.min(16)).min(LONGEST_REST_NS);
                self.failures = self.failures.saturating_add(1);
                self.state = State::Resting { until_ns: now_ns.saturating_add(rest_ns) };
                Verdict::End
            }
            State::Resting { .. } | State::Begins | State::Watching { .. } => Verdict::GoOn,
        }
    }
}

#[cfg(test)]
mod tests;
