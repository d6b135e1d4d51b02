//! Determines why a tenant waits.

use super::Core;
use tenancy::{Standing, Wait};
use vram::TenantId;

impl Core {
    /// Returns the reason why a tenant waits, or `None` if it has the card or has no work.
    pub(super) fn wait(&self, id: TenantId) -> Option<Wait> {
        let tenant = self.tenants.get(&id)?;
        let mut sessions = self.sessions.values().filter(|session| session.tenant == Some(id));
        let strikes = self.turns.turns().scheduler().strikes(id);
        let standing = Standing {
            is_quarantined: strikes.is_some_and(|(_, state)| state != sched::Quarantine::Free),
            has_work: self.turns.is_busy(id),
            runs: self.runs(id),
            lacks_memory: self.waits_for_memory(id),
            missing_bytes: Some(tenant.wanted.saturating_mul(self.config.chunk_bytes)),
            holder: self.turns.turns().holders().find(|holder| *holder != id),
            is_stopped: sessions.any(|session| session.stopped_in.is_some()),
        };
        self.machine.wait_reason(id, self.clock, &standing)
    }
}
