//! Processes that occupy the card without a turn. Their work bypassed the gate, or was still in flight when their turn
//! ended.
//!
//! The owner reads NVML's report of each process's use of the card every second. Two rules depend on it:
//!
//! - If a tenant's turn exceeds its limit and another tenant's process occupied the card at two polls during that turn,
//!   that process is abandoned, and the tenant gets its full limit once more. All samples of the second poll are later
//!   than the first poll, when the process had no turn.
//! - If a process occupied the card at all polls for as long as its own tenant's limit, without a turn, it is abandoned
//!   while another tenant has a turn, because the limit also applies to work without a turn.

use std::collections::{BTreeMap, VecDeque};
use tenancy::Deadline;

use super::Core;
use super::given_up::Reason;
use super::types::{SessionId, User};
use vram::TenantId;

/// Number of polls during a turn at which a process must occupy the card to prove that it bypasses the gate.
const MIN_LOOKS: usize = 2;

/// Processes seen on the card without a turn.
#[derive(Debug, Default)]
pub(super) struct Occupations {
    /// Processes that occupied the card at the last poll and had no turn.
    seen: BTreeMap<u32, Occupation>,
}

/// A sequence of polls at which a process occupied the card, without a turn at or between them.
#[derive(Debug)]
struct Occupation {
    /// Time of the first poll, in ns.
    since: u64,
    /// Times of the last polls in ns, at most [`MIN_LOOKS`].
    last: VecDeque<u64>,
    /// Number of turns of the process, for detecting turns between two polls.
    turns: u64,
}

impl Core {
    /// Records the processes that occupied the card.
    pub(super) fn occupied(&mut self, users: &[User]) {
        let mut before = std::mem::take(&mut self.occupations.seen);
        for user in users.iter().filter(|user| user.occupies) {
            let sessions = || self.sessions.values().filter(|session| session.pid == user.pid);
            if sessions().any(|session| session.run.is_some()) {
                continue;
            }
            let turns = sessions().map(|session| u64::from(session.turn)).sum();
            let new = || Occupation { since: self.clock, last: VecDeque::new(), turns };
            let mut occupation = before.remove(&user.pid).filter(|row| row.turns == turns).unwrap_or_else(new);
            occupation.last.push_back(self.clock);
            if occupation.last.len() > MIN_LOOKS {
                occupation.last.pop_front();
            }
            self.occupations.seen.insert(user.pid, occupation);
        }
        self.give_up_occupants();
    }

    /// Abandons processes that have occupied the card without a turn for as long as their tenants' limit on a turn, if
    /// another tenant has a turn. A process that the driver is suspending has the driver's time limit instead.
    fn give_up_occupants(&mut self) {
        let exceeds = |pid: u32, limit: u64| {
            let row = self.occupations.seen.get(&pid).filter(|row| row.last.len() == MIN_LOOKS);
            row.is_some_and(|row| self.clock.saturating_sub(row.since) > limit)
        };
        let is_culprit = |pid: u32, tenant: TenantId| {
            let limit = self.tenants.get(&tenant).and_then(|known| known.spec.time.max_run_ns);
            limit.is_some_and(|limit| exceeds(pid, limit))
                && self.turns.turns().holders().any(|holder| holder != tenant)
        };
        let culprits: Vec<(SessionId, u32)> = self
            .sessions
            .iter()
            .filter(|(_, session)| !session.stuck)
            .filter(|(_, session)| session.tenant.is_some_and(|tenant| is_culprit(session.pid, tenant)))
            .map(|(&id, session)| (id, session.pid))
            .collect();
        for (session, pid) in culprits {
            tracing::warn!(pid, "giving up a program that occupies the card without a turn for longer than its limit");
            self.give_up(session, Reason::Occupied);
        }
    }

    /// Abandons processes of other tenants that have occupied the card throughout a tenant's turn, which has lasted
    /// `ran_ns`. Returns true if such processes exist and the tenant's limit has not been restarted in this turn yet.
    pub(super) fn spares(&mut self, tenant: TenantId, ran_ns: u64) -> bool {
        if self.deadlines.is_set(Deadline::SecondLimit(tenant)) {
            return false;
        }
        let began = self.clock.saturating_sub(ran_ns);
        let proven = |pid: &u32| {
            let row = self.occupations.seen.get(pid);
            row.is_some_and(|row| row.last.len() == MIN_LOOKS && row.last.iter().all(|time| *time > began))
        };
        let others = self.sessions.iter().filter(|(_, session)| session.tenant.is_some_and(|other| other != tenant));
        let culprits: Vec<(SessionId, u32)> =
            others.map(|(&id, session)| (id, session.pid)).filter(|(_, pid)| proven(pid)).collect();
        let limit = self.tenants.get(&tenant).and_then(|known| known.spec.time.max_run_ns);
        let Some(limit) = limit.filter(|_| !culprits.is_empty()) else { return false };
        for (session, pid) in culprits {
            tracing::warn!(
                pid,
                held_up = tenant.0,
                "giving up a program that occupies the card without a turn and delays another tenant"
            );
            self.give_up(session, Reason::HeldUp);
        }
        self.deadlines.set(Deadline::SecondLimit(tenant), self.clock.saturating_add(limit));
        true
    }

    /// Records the end of a tenant's turn.
    pub(super) fn is_not_spared_any_more(&mut self, tenant: TenantId) {
        self.deadlines.cancel(Deadline::SecondLimit(tenant));
        self.probes.forget(tenant);
    }
}
