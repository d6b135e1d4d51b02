//! Processes that occupy the card without a turn. Their work bypassed the gate, or was still in flight when their turn
//! ended.
//!
//! Every second, the owner reads which processes use the card according to NVML, and applies three rules:
//!
//! - If a tenant's turn exceeds its limit, and a process of another tenant occupied the card at two polls during that
//!   turn, that process is abandoned. The tenant then gets its full limit once more. All samples of the second poll are
//!   later than the first poll, when the process had no turn.
//! - If a process without a turn has occupied the card at all polls for as long as its tenant's limit, it is abandoned
//!   once another tenant has a turn. The limit thus also applies to work without a turn.
//! - If a member of a share group exceeds its limit, it may be waiting for another member's work. It gets its full
//!   limit once more if the other member has a turn and, at the last poll, occupied the card while this member did not.

use std::collections::BTreeSet;

use tenancy::Deadline;

use super::Core;
use super::given_up::Reason;
use super::types::{SessionId, User};
use vram::TenantId;

impl Core {
    /// Records the processes that occupied the card.
    pub(super) fn occupied(&mut self, users: &[User]) {
        let sessions = |pid: u32| self.sessions.values().filter(move |session| session.pid == pid);
        self.occupants = users.iter().filter(|user| user.occupies).map(|user| user.pid).collect();
        let pids = self.occupants.iter().copied();
        let without_turn = pids.filter(|pid| sessions(*pid).all(|session| session.run.is_none()));
        let turns = |pid| sessions(pid).map(|session| u64::from(session.turn)).sum();
        self.occupations.polled(self.clock, without_turn.map(|pid| (pid, turns(pid))));
        self.give_up_occupants();
    }

    /// If another tenant has a turn, abandons processes that have occupied the card without a turn for as long as their
    /// tenant's limit on a turn. For a process that is being suspended, the driver's time limit applies instead.
    fn give_up_occupants(&mut self) {
        let is_culprit = |pid: u32, tenant: TenantId| {
            let limit = self.tenants.get(&tenant).and_then(|known| known.spec.time.max_run_ns);
            limit.is_some_and(|limit| self.occupations.exceeds(pid, limit, self.clock))
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
    /// `ran_ns`. Restarts the tenant's limit, at most once per turn, if such processes exist or if the tenant's work
    /// waits for another member of its share group. Returns true if the limit was restarted.
    pub(super) fn spares(&mut self, tenant: TenantId, ran_ns: u64) -> bool {
        if self.deadlines.is_set(Deadline::SecondLimit(tenant)) {
            return false;
        }
        let began = self.clock.saturating_sub(ran_ns);
        let others = self.sessions.iter().filter(|(_, session)| session.tenant.is_some_and(|other| other != tenant));
        let culprits: Vec<(SessionId, u32)> = others
            .map(|(&id, session)| (id, session.pid))
            .filter(|(_, pid)| self.occupations.is_since(*pid, began))
            .collect();
        let limit = self.tenants.get(&tenant).and_then(|known| known.spec.time.max_run_ns);
        let is_delayed = !culprits.is_empty() || self.waits_for_member(tenant);
        let Some(limit) = limit.filter(|_| is_delayed) else { return false };
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

    /// Returns true if the work of a member of a share group waits for the work of another member.
    fn waits_for_member(&self, tenant: TenantId) -> bool {
        let group =
            |tenant| self.turns.turns().membership(tenant).filter(|of_it| of_it.joined).map(|of_it| of_it.group);
        let Some(own) = group(tenant) else { return false };
        let occupants = self
            .sessions
            .values()
            .filter(|session| session.run.is_some() && !session.stuck && self.occupants.contains(&session.pid));
        let members: BTreeSet<TenantId> =
            occupants.filter_map(|session| session.tenant).filter(|member| group(*member) == Some(own)).collect();
        !members.is_empty() && !members.contains(&tenant)
    }

    /// Cancels a tenant's restarted limit and its probes at the end of its turn.
    pub(super) fn is_not_spared_any_more(&mut self, tenant: TenantId) {
        self.deadlines.cancel(Deadline::SecondLimit(tenant));
        self.probes.forget(tenant);
    }
}
