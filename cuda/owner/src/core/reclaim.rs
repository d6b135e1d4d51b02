//! Empty chunks that programs keep. If memory is short, the owner reclaims them before it rejects a request or moves
//! memory.

use super::types::SessionId;
use super::{Core, Session};
use cuda_protocol::{FromOwner, RECLAIM_MS, VERSION_RECLAIM};
use tenancy::Deadline;
use vram::TenantId;

/// Maximum time to wait for replies, in ns.
// TIMEOUT: twice the time within which a library replies.
const ANSWER_NS: u64 = 2 * RECLAIM_MS * 1_000_000;
/// Minimum interval between two reclaim orders to a process, in ns. Until then, the process may keep empty chunks,
/// which make its next allocations faster.
const INTERVAL_NS: u64 = 200_000_000;

/// Reclaim orders to one process.
#[derive(Debug, Default)]
pub(super) struct Reclaims {
    order: u32,
    /// Time of the latest order, in ns.
    since: Option<u64>,
    /// Set if the process has not replied to that order.
    is_owed: bool,
}

impl Core {
    /// Orders the processes of one tenant or of all tenants, except `asking`, to return their empty chunks, unless they
    /// received such an order recently. Returns true if replies are outstanding and have not timed out.
    pub(super) fn reclaim(&mut self, of: Option<TenantId>, asking: Option<SessionId>) -> bool {
        let clock = self.clock;
        let concerned = |(id, session): &(&SessionId, &mut Session)| {
            let is_one = session.tenant.is_some() && of.is_none_or(|of| session.tenant == Some(of));
            let answers = session.version >= VERSION_RECLAIM && session.takes_orders();
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

    /// Records that a process has replied to a reclaim order by returning its empty chunks.
    pub(super) fn reclaimed(&mut self, id: SessionId, order: u32) {
        let Some(session) = self.sessions.get_mut(&id).filter(|session| session.reclaims.order == order) else {
            return;
        };
        session.reclaims.is_owed = false;
        self.needs_plan = true;
    }
}
