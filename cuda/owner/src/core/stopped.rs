//! Processes that are stopped while their gates are open: by a signal, a debugger, or a freezer such as `docker pause`.
//!
//! A stopped process cannot submit work or reply. Its turn overruns, but the other tenants need not wait for it. The
//! turn ends when the process has no work in flight on the card, that is, when NVML reports no work of the process
//! between two polls after the recall. In a share group, the turn ends when it overruns, because the other members wait
//! for it; the work in flight is charged when the process reports it. Without NVML, the turn ends at the tenant's
//! limit. The process is not abandoned for this reason: it reads the recall when it runs again, and gets its next turn
//! after its reply. `occupation` detects kernels that the process has left in flight. If the process holds memory that
//! another tenant needs, `relocate` treats the process like any unresponsive process.

use super::Core;
use super::given_up::Reason;
use super::types::{Action, SessionId, User};
use std::collections::BTreeSet;
use vram::TenantId;

/// Interval in ns between checks of a share group member whose turn overruns.
const MEMBER_INTERVAL_NS: u64 = 10_000_000;

impl Core {
    /// Requests a check of each running process of a share group member whose turn overruns. Other tenants run during
    /// the overrun, but the other members do not, so the turn of a stopped member ends although its work may still be
    /// in flight.
    pub(super) fn look_at_overrunning_members(&mut self) {
        let (turns, clock) = (self.turns.turns(), self.clock);
        let delays_group = |tenant: TenantId| turns.is_joined(tenant) && turns.overruns(tenant);
        for (&id, session) in self.sessions.iter_mut().filter(|(_, session)| session.run.is_some() && !session.stuck) {
            let is_due = clock.saturating_sub(session.checked_at) >= MEMBER_INTERVAL_NS;
            if is_due && session.tenant.is_some_and(delays_group) {
                session.checked_at = clock;
                self.actions.push(Action::LookAt { session: id, is_overdue: false });
            }
        }
    }

    /// Requests a check of each process whose turn overruns and that had no work on the card since the previous poll.
    pub(super) fn look_at_idle_overruns(&mut self, users: &[User]) {
        let occupants: BTreeSet<u32> = users.iter().filter(|user| user.occupies).map(|user| user.pid).collect();
        let idle = std::mem::take(&mut self.idle_overruns);
        let mut now_idle = BTreeSet::new();
        for (&id, session) in self.sessions.iter().filter(|(_, session)| session.run.is_some() && !session.stuck) {
            let overruns = session.tenant.is_some_and(|tenant| self.turns.turns().overruns(tenant));
            if overruns && !occupants.contains(&session.pid) {
                now_idle.insert(id);
            }
        }
        // The previous poll may precede the overrun.
        self.actions.extend(idle.intersection(&now_idle).map(|&session| Action::LookAt { session, is_overdue: false }));
        self.idle_overruns = now_idle;
    }

    /// Handles the result of checking a process whose turn overruns or has exceeded its limit.
    pub(super) fn looked_at(&mut self, id: SessionId, stopped: bool, is_overdue: bool) {
        let Some(session) = self.sessions.get_mut(&id).filter(|session| !session.stuck) else { return };
        let (Some(turn), Some(tenant)) = (session.run, session.tenant) else { return };
        if stopped {
            tracing::info!(session = ?id, pid = session.pid, "the turn of a stopped program ends");
            (session.run, session.waiting, session.stopped_in) = (None, false, Some(turn));
            return self.look_whether_ended(tenant);
        }
        if is_overdue {
            tracing::warn!(tenant = tenant.0, session = ?id, "the work does not end within the tenant's limit");
            self.stuck(id, Reason::Turn);
        }
    }
}
