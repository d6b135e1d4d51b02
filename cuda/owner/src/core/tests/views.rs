//! Short queries of a card's view, for tests.

use super::CardView;
use sched::Engine;

impl CardView {
    /// Returns the memory summary of the tenant at position `at`.
    pub(crate) fn memory_of(&self, at: usize) -> vram::VmSummary {
        self.memory.summary.vms[&self.tenants[at].id]
    }

    /// Returns the time account of the tenant at position `at`.
    pub(crate) fn time_of(&self, at: usize) -> &tenancy::TenantTime {
        &self.time.tenants[&self.tenants[at].id]
    }

    /// Returns true if the tenant at position `at` has the turn.
    pub(crate) fn runs(&self, at: usize) -> bool {
        self.time_of(at).in_flight > 0
    }

    /// Returns the time charged to the tenant at position `at`, in ns.
    pub(crate) fn charged_ns(&self, at: usize) -> u64 {
        self.time_of(at).engines[&Engine::Compute].account.used
    }

    /// Returns the number of strikes of the tenant at position `at`, and true if the tenant is quarantined.
    pub(crate) fn strikes(&self, at: usize) -> (u32, bool) {
        let time = self.time_of(at);
        (time.strikes, time.quarantine != sched::Quarantine::Free)
    }
}
