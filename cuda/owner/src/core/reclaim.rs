//! Empty chunks that programs keep: requested back before a request fails, or memory moves, because memory is short.

use super::types::SessionId;
use super::{Core, Session};
use cuda_protocol::{FromOwner, RECLAIM_MS, VERSION_RECLAIM};
use tenancy::Deadline;
use vram::TenantId;

/// Maximum wait for answers, in ns.
// TIMEOUT: a library answers within `RECLAIM_MS`. The owner no longer waits for a process that missed it.
const ANSWER_NS: u64 = 2 * RECLAIM_MS * 1_000_000;
/// Minimum time between two such orders to a process, in ns: its next allocations are faster with kept chunks.
const INTERVAL_NS: u64 = 200_000_000;

/// Orders to one process.
#[derive(Debug, Default)]
pub(super) struct Reclaims {
    order: u32,
    /// Time of the last order.
    since: Option<u64>,
    /// Set if the process has not answered that order.
    is_owed: bool,
}

impl Core {
    /// Requests empty chunks from processes of one tenant or of all, except `asking` itself. Returns true while answers
    /// may arrive.
    pub(super) fn reclaim(&mut self, of: Option<TenantId>, asking: Option<SessionId>) -> bool {
        let clock = self.clock;
        let concerned = |(id, session): &(&SessionId, &mut Session)| {
            let is_one = session.tenant.is_some() && of.is_none_or(|of| session.tenant == Some(of));
            let answers = session.version >= VERSION_RECLAIM && !session.stuck;
            is_one && answers && !session.chunks.is_empty() && asking != Some(**id)
        };
        let mut orders = Vec::new();
        let mut last = None;
        for (&id, session) in self.sessions.iter_mut().filter(concerned) {
            let reclaims = &mut session.reclaims;
            if !reclaims.is_owed && reclaims.since.is_none_or(|since| clock.saturating_sub(since) >= INTERVAL_NS) {
                reclaims.order += 1;
                (reclaims.since, reclaims.is_owed) = (Some(clock), true);
                orders.push((id, reclaims.order));
            }
            if reclaims.is_owed {
                last = last.max(reclaims.since);
            }
        }
        for (id, order) in orders {
            self.send(id, FromOwner::Reclaim { order });
        }
        let until = last.map(|since| since + ANSWER_NS).filter(|until| *until > clock);
        if let Some(until) = until {
            self.deadlines.postpone(Deadline::Reclaims, until);
        }
        until.is_some()
    }

    /// Handles the answer of a process: it has returned its empty chunks.
    pub(super) fn reclaimed(&mut self, id: SessionId, order: u32) {
        let Some(session) = self.sessions.get_mut(&id).filter(|session| session.reclaims.order == order) else {
            return;
        };
        session.reclaims.is_owed = false;
        self.needs_plan = true;
    }

    /// Retries requests whose answers have not come in time.
    pub(super) fn end_reclaims(&mut self) {
        self.needs_plan |= self.deadlines.take(Deadline::Reclaims, self.clock);
    }
}
