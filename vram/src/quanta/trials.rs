//! Trials: turns that are taken for a moment to find out whether they help.
//!
//! What work reaches in host memory by pointers is named nowhere, and no real card counts it. But it shows in how long work takes: the
//! engine time of a VM's submissions is compared with what it is while all of the VM's memory is on the card, which a turn brings
//! about. Nothing is assumed of the card, the bus or the work, but that it goes on as it was.

use crate::VmId;
use std::collections::{BTreeMap, BTreeSet};

/// Submissions from which on their mean length says something.
const ENOUGH: u64 = 8;
/// Windows in which VMs' work is looked at before turns are tried.
const WINDOWS: u64 = 2;
/// A trial that was in vain is followed by a rest of so many times its length, and each in vain after it by one twice as long.
const REST: u32 = 32;
/// The longest rest, in ns.
const LONGEST_REST_NS: u64 = 3_600_000_000_000;
/// Turns after which what a trial has found is to be found again.
const LASTS: u32 = 64;
/// By how much the change of one VM's submissions counts at most, as a factor: it is the VM that decides what it submits.
const MOST: f64 = 8.0;

/// Work that a VM has had done since it came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Engine time, in ns.
    pub used_ns: u64,
    /// Submissions that have ended.
    pub ended: u64,
}

impl Done {
    /// Returns the difference between the two.
    fn since(self, before: Self) -> Self {
        let used_ns = self.used_ns.saturating_sub(before.used_ns);
        Self { used_ns, ended: self.ended.saturating_sub(before.ended) }
    }

    /// Mean engine time of a submission, in ns, if there were enough.
    fn length(self) -> Option<f64> {
        (self.ended >= ENOUGH && self.used_ns > 0).then(|| self.used_ns as f64 / self.ended as f64)
    }
}

/// State of what is found out about VMs that nobody can tell of whether they thrash.
#[derive(Clone, Debug, Default)]
enum State {
    /// Nothing yet.
    #[default]
    Begins,
    /// Nothing, until then.
    Resting { until_ns: u64 },
    /// Their work is looked at: since when, and what they had had done then.
    Watching { since_ns: u64, then: BTreeMap<VmId, Done> },
    /// They take turns.
    Trying(Trial),
    /// Turns help; how many are left until that is to be found again.
    Found { left: u32 },
}

/// A trial.
#[derive(Clone, Debug, Default)]
struct Trial {
    began_ns: u64,
    /// Lengths of submissions before it, in ns, of those whose turns decide.
    before: BTreeMap<VmId, f64>,
    /// The same within their turns, of those of which it is known.
    within: BTreeMap<VmId, f64>,
    /// Those that have had their turn.
    had: BTreeSet<VmId>,
    /// The VM that has its turn, and what it had had done when that began.
    turn: Option<(VmId, Done)>,
}

impl Trial {
    /// By how much submissions are shorter within turns, if that is known of two VMs or more.
    fn gain(&self) -> Option<f64> {
        let of = |(vm, before): (&VmId, &f64)| Some((before / self.within.get(vm)?).clamp(1.0 / MOST, MOST).ln());
        let gains: Vec<f64> = self.before.iter().filter_map(of).collect();
        (gains.len() >= 2).then(|| (gains.iter().sum::<f64>() / gains.len() as f64).exp())
    }
}

/// Outcome of a turn's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Turns go on.
    GoOn,
    /// They are of no use, or it is to be seen whether they still are.
    End,
}

/// The trials.
#[derive(Clone, Debug, Default)]
pub(super) struct Trials {
    state: State,
    done: BTreeMap<VmId, Done>,
    /// Trials in vain, one behind the other.
    vain: u32,
}

impl Trials {
    /// Trials of turns that were found to help by a process before this one.
    pub(super) fn found() -> Self {
        Self { state: State::Found { left: LASTS }, ..Self::default() }
    }

    /// Work that VMs have had done until now.
    pub(super) fn set_done(&mut self, done: BTreeMap<VmId, Done>) {
        self.done = done;
    }

    /// VMs take turns no more, or for another reason.
    pub(super) fn end(&mut self) {
        if !matches!(self.state, State::Resting { .. }) {
            self.state = State::Begins;
        }
    }

    /// Returns whether a trial runs.
    pub(super) fn tries(&self) -> bool {
        matches!(self.state, State::Trying(_))
    }

    /// Looks at the work of VMs whose memory does not fit together. Returns whether turns are worth a trial: the card has been busy for
    /// them for half of two windows, and how long their submissions are is known of two or more.
    pub(super) fn is_worth_it(&mut self, now_ns: u64, members: &[VmId], window_ns: u64) -> bool {
        let of_members = || members.iter().map(|vm| (*vm, self.done.get(vm).copied().unwrap_or_default())).collect();
        let (since_ns, then): (_, &BTreeMap<VmId, Done>) = match &self.state {
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
        let since = |(vm, then): (&VmId, &Done)| Some((*vm, self.done.get(vm)?.since(*then)));
        let done: BTreeMap<VmId, Done> = then.iter().filter_map(since).collect();
        let busy: u64 = done.values().fold(0, |sum, done| sum.saturating_add(done.used_ns));
        let before: BTreeMap<VmId, f64> =
            done.into_iter().filter_map(|(vm, done)| Some((vm, done.length()?))).collect();
        if before.len() < 2 || busy < elapsed / 2 {
            self.state = State::Watching { since_ns: now_ns, then: of_members() };
            return false;
        }
        self.state = State::Trying(Trial { began_ns: now_ns, before, ..Trial::default() });
        true
    }

    /// A VM's turn begins: its memory is on the card.
    pub(super) fn begins(&mut self, holder: VmId) {
        if let State::Trying(trial) = &mut self.state {
            trial.turn = self.done.get(&holder).map(|done| (holder, *done));
        }
    }

    /// Returns whether enough of a holder's work has ended in its turn to tell. Always so when nothing is tried.
    pub(super) fn has_seen_enough(&self, holder: VmId) -> bool {
        let State::Trying(Trial { turn: Some((of, then)), .. }) = &self.state else { return true };
        *of != holder || self.done.get(&holder).is_none_or(|done| done.since(*then).ended >= ENOUGH)
    }

    /// A VM's turn has ended, of those of `members`. `on_permille`: the part of the time that work must lose without turns.
    pub(super) fn ends(&mut self, now_ns: u64, holder: VmId, members: &[VmId], on_permille: u32) -> Verdict {
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
                    (self.state, self.vain) = (State::Found { left: LASTS }, 0);
                    return Verdict::GoOn;
                }
                let took_ns = now_ns.saturating_sub(trial.began_ns);
                let rest_ns = took_ns.saturating_mul(u64::from(REST) << self.vain.min(16)).min(LONGEST_REST_NS);
                self.vain = self.vain.saturating_add(1);
                self.state = State::Resting { until_ns: now_ns.saturating_add(rest_ns) };
                Verdict::End
            }
            State::Resting { .. } | State::Begins | State::Watching { .. } => Verdict::GoOn,
        }
    }
}

#[cfg(test)]
#[path = "../tests/trials.rs"]
mod tests;
