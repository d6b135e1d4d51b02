//! Processes that occupy the card without a turn: their work went past the gate, or was in flight when they ended the
//! turn.
//!
//! NVML's use of the card by each process is looked at every second. It is used for one decision only: if a tenant's
//! turn exceeds its limit, and a process of another tenant occupied the card at two looks since that turn began, that
//! process is given up, and the tenant gets its limit once more. The samples of the second look are all of the time
//! after the first one, in which the process had no turn.

use std::collections::{BTreeMap, VecDeque};

use super::Core;
use super::types::{SessionId, User};
use vram::TenantId;

/// Looks during a turn that prove that a process occupies the card past the gate.
const LOOKS: usize = 2;
/// Looks that are kept of a process.
const KEPT: usize = 8;

/// The last looks, and their consequences.
#[derive(Debug, Default)]
pub(super) struct Occupations {
    /// Times of the last looks in a row at which a process occupied the card and had no turn.
    seen: BTreeMap<u32, VecDeque<u64>>,
    /// Tenants that got their limit once more for their present turn, with its end.
    spared: BTreeMap<TenantId, u64>,
}

impl Core {
    /// Takes in which processes occupied the card.
    pub(super) fn occupied(&mut self, users: &[User]) {
        let mut before = std::mem::take(&mut self.occupations.seen);
        for user in users.iter().filter(|user| user.occupies) {
            let mut of_it = self.sessions.values().filter(|session| session.pid == user.pid);
            if of_it.any(|session| session.run.is_some()) {
                continue;
            }
            let mut times = before.remove(&user.pid).unwrap_or_default();
            times.push_back(self.clock);
            while times.len() > KEPT {
                times.pop_front();
            }
            self.occupations.seen.insert(user.pid, times);
        }
    }

    /// Gives up the processes of other tenants that have occupied the card for all of a tenant's turn, which has lasted
    /// `ran_ns`. Returns true if there are some, and the tenant has not been spared in this turn.
    pub(super) fn spares(&mut self, tenant: TenantId, ran_ns: u64) -> bool {
        if self.occupations.spared.contains_key(&tenant) {
            return false;
        }
        let began = self.clock.saturating_sub(ran_ns);
        let proven = |pid: &u32| {
            let times = self.occupations.seen.get(pid);
            times.is_some_and(|times| times.iter().filter(|time| **time > began).count() >= LOOKS)
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
                "a program occupies the card without a turn and holds another tenant up: it is given up"
            );
            self.give_up(session);
        }
        self.occupations.spared.insert(tenant, self.clock.saturating_add(limit));
        true
    }

    /// A tenant's turn has ended.
    pub(super) fn is_not_spared_any_more(&mut self, tenant: TenantId) {
        self.occupations.spared.remove(&tenant);
    }

    /// Returns the tenants whose second limit is over.
    pub(super) fn spared_too_long(&mut self) -> Vec<TenantId> {
        let clock = self.clock;
        self.occupations.spared.extract_if(.., |_, until| *until <= clock).map(|(tenant, _)| tenant).collect()
    }

    /// Returns the time until the first of these limits.
    pub(super) fn spares_for(&self) -> Option<u64> {
        self.occupations.spared.values().min().map(|until| until.saturating_sub(self.clock))
    }
}
