//! Groups of tenants whose programs may use the card concurrently.
//!
//! A tenant takes part in its group if all of its programs can run concurrently. These programs are clients of the
//! group's MPS server (`mps`). Programs cannot become clients later, so a tenant with any other program gets exclusive
//! turns until that program exits. Programs that have never requested a turn or memory are ignored.

use super::{Core, Nanos};
use vram::TenantId;

impl Core {
    /// Moves a tenant to the group named in its settings.
    pub(super) fn renew_share_group(&mut self, id: TenantId) {
        let Some(tenant) = self.tenants.get(&id) else { return };
        let group = tenant.spec.share_group.as_ref().map(|group| (group.name.as_str(), group.sharing));
        let now = Nanos(self.clock);
        self.turns.with_turns(now, |turns| turns.set_group(id, group, now));
        self.renew_servers();
        self.renew_clients_of(id);
    }

    /// Records whether all programs of a tenant can run concurrently with other tenants' programs.
    pub(super) fn renew_concurrency(&mut self, tenant: TenantId) {
        let of_it = || self.sessions.values().filter(|session| session.tenant == Some(tenant));
        let concurrent = of_it().any(|session| session.concurrent) && of_it().all(|s| s.concurrent || !s.has_asked);
        let now = self.now();
        self.turns.with_turns(now, |turns| turns.set_concurrent(tenant, concurrent, now));
    }

    /// Returns the process ID and name of each program that prevents a group member from running concurrently with the
    /// others.
    pub(super) fn not_concurrent(&self, tenant: TenantId) -> Vec<(u32, String)> {
        if self.turns.turns().membership(tenant).is_none() {
            return Vec::new();
        }
        let of_it = self.sessions.values().filter(|session| session.tenant == Some(tenant));
        let others = of_it.filter(|session| session.has_asked && !session.concurrent);
        others.map(|session| (session.pid, session.program.clone())).collect()
    }
}
