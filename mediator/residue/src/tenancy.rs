//! State machine that tracks PGRAPH's tenant.

use std::collections::VecDeque;
use tenant::TenantId;

/// Minimum time in ns that a busy tenant keeps PGRAPH while another tenant waits.
// TIMEOUT: one hundred times the duration of clearing. A scheduler that assigns the engines to one VM at a time
// switches earlier.
const TERM_NS: u64 = 4_000_000;
/// Delay in ns before a retry of failed clearing.
// TIMEOUT: the mediator's own channel has hung or faulted, and its recovery takes seconds.
const AGAIN_NS: u64 = 100_000_000;

/// Maximum time in ns until a tenant that switched to a copy engine with unfinished work returns to PGRAPH.
// TIMEOUT: twenty-five terms. Each return requires clearing PGRAPH twice, although the work may complete immediately.
const RETURN_NS: u64 = 100_000_000;

/// Next action of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Wait for an event or a timeout.
    Wait,
    /// Block new work of this tenant on PGRAPH, and remove its work from PGRAPH.
    Close(TenantId),
    /// Clear residual data.
    Clear,
    /// Admit this tenant.
    Admit(TenantId),
}

/// Statistics on tenant switches of PGRAPH.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of successful clears.
    pub cleared: u64,
    /// Total duration of the switches in ns, including the time until the previous tenant has left.
    pub ns: u64,
    /// Number of failed clears.
    pub failed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No switch is in progress.
    Settled,
    /// The tenant must leave PGRAPH.
    Leaving,
    /// PGRAPH is being cleared.
    Clearing,
    /// Clearing failed at time `at`.
    Failed { at: u64 },
}

/// PGRAPH's tenant, the waiting tenants, and the state of a switch.
#[derive(Debug)]
pub struct Tenancy {
    tenant: Option<TenantId>,
    /// True if PGRAPH may contain residual data.
    dirty: bool,
    wanted: VecDeque<TenantId>,
    /// Tenants whose unfinished work may need PGRAPH again, each with the start time of its wait.
    returning: VecDeque<(TenantId, u64)>,
    phase: Phase,
    /// Time at which the tenant was admitted.
    since: u64,
    /// Time at which the tenant was last seen using PGRAPH.
    worked: u64,
    /// Start time of the current or last switch.
    began: u64,
    counts: Counts,
}

impl Default for Tenancy {
    /// Creates a state without a tenant. PGRAPH may contain residual data.
    fn default() -> Self {
        let (wanted, returning, counts) = Default::default();
        Self {
            tenant: None,
            dirty: true,
            wanted,
            returning,
            phase: Phase::Settled,
            since: 0,
            worked: 0,
            began: 0,
            counts,
        }
    }
}

impl Tenancy {
    /// Queues a tenant that has work for PGRAPH.
    pub fn want(&mut self, tenant: TenantId) {
        let has_it = self.tenant == Some(tenant) && self.phase == Phase::Settled;
        if !has_it && !self.wanted.contains(&tenant) {
            self.wanted.push_back(tenant);
        }
        self.returning.retain(|(other, _)| *other != tenant);
    }

    /// Queues a tenant whose unfinished work left PGRAPH at `now` (in ns) and may need it again.
    pub fn want_again(&mut self, tenant: TenantId, now: u64) {
        if !self.is_wanted_by(tenant) {
            self.returning.push_back((tenant, now));
        }
    }

    /// Returns true if the tenant waits for PGRAPH.
    #[must_use]
    pub fn is_wanted_by(&self, tenant: TenantId) -> bool {
        self.wanted.contains(&tenant) || self.returning.iter().any(|(other, _)| *other == tenant)
    }

    /// Removes a tenant that has left the card, because its number may be reused.
    pub fn forget(&mut self, tenant: TenantId) {
        self.wanted.retain(|other| *other != tenant);
        self.returning.retain(|(other, _)| *other != tenant);
        if self.tenant == Some(tenant) {
            self.tenant = None;
            if self.phase == Phase::Leaving {
                self.phase = Phase::Settled;
            }
        }
    }

    /// Returns true if a switch is in progress or requested. In this case, [`Self::next`] must be called again soon.
    #[must_use]
    pub fn is_changing(&self) -> bool {
        self.phase != Phase::Settled || !self.wanted.is_empty() || !self.returning.is_empty()
    }

    /// Returns the switch statistics.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the current tenant, and true if it must leave.
    #[must_use]
    pub fn tenant(&self) -> Option<(TenantId, bool)> {
        self.tenant.map(|tenant| (tenant, self.phase == Phase::Leaving))
    }

    /// Returns the time at which the tenant was requested to leave, if it has not left yet.
    #[must_use]
    pub fn leaves_since(&self) -> Option<u64> {
        (self.phase == Phase::Leaving).then_some(self.began)
    }

    /// Returns the next step at `now` (in ns). `works` is true if the tenant has work on PGRAPH, and `left` is true if
    /// none of its work remains there. The caller must repeat the call until it returns [`Step::Wait`].
    pub fn next(&mut self, now: u64, works: bool, left: bool) -> Step {
        match self.phase {
            Phase::Settled => self.begin(now, works),
            Phase::Leaving if !left => Step::Wait,
            Phase::Leaving => self.clear(),
            Phase::Clearing => Step::Wait,
            Phase::Failed { at } if now.saturating_sub(at) < AGAIN_NS => Step::Wait,
            Phase::Failed { .. } => self.clear(),
        }
    }

    fn begin(&mut self, now: u64, works: bool) -> Step {
        if works {
            self.worked = now;
        }
        // A gap between two submissions does not mean that the tenant has finished.
        let unused = |since: u64| self.wanted.is_empty() && now.saturating_sub(self.worked.max(since)) >= TERM_NS;
        let due = |(_, since): &mut (TenantId, u64)| unused(*since) || now.saturating_sub(*since) >= RETURN_NS;
        if let Some((tenant, _)) = self.returning.pop_front_if(due) {
            self.want(tenant);
        }
        let Some(next) = self.wanted.front().copied() else { return Step::Wait };
        if self.tenant == Some(next) {
            self.wanted.pop_front();
            return Step::Wait;
        }
        match self.tenant {
            Some(_) if works && now.saturating_sub(self.since) < TERM_NS => Step::Wait,
            Some(tenant) => {
                (self.phase, self.began) = (Phase::Leaving, now);
                Step::Close(tenant)
            }
            None if self.dirty => {
                self.began = now;
                self.clear()
            }
            None => self.admit(now),
        }
    }

    fn clear(&mut self) -> Step {
        (self.phase, self.dirty) = (Phase::Clearing, true);
        Step::Clear
    }

    /// Handles the completion of [`Step::Clear`], and returns the next step. `done` is true if clearing succeeded.
    pub fn cleared(&mut self, now: u64, done: bool) -> Step {
        if self.phase != Phase::Clearing {
            return Step::Wait;
        }
        if !done {
            self.phase = Phase::Failed { at: now };
            self.counts.failed += 1;
            return Step::Wait;
        }
        self.counts.cleared += 1;
        self.counts.ns += now.saturating_sub(self.began);
        (self.phase, self.tenant, self.dirty) = (Phase::Settled, None, false);
        self.admit(now)
    }

    /// Admits the next tenant to PGRAPH, which has been cleared.
    fn admit(&mut self, now: u64) -> Step {
        let Some(next) = self.wanted.pop_front() else { return Step::Wait };
        (self.tenant, self.since, self.dirty) = (Some(next), now, true);
        Step::Admit(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: TenantId = TenantId(1);
    const B: TenantId = TenantId(2);

    /// Returns the next step. `works` is true if the tenant has work on PGRAPH, and `left` is true if it has left
    /// PGRAPH.
    fn step(tenancy: &mut Tenancy, now: u64, works: bool, left: bool) -> Step {
        tenancy.next(now, works, left)
    }

    /// Creates a state with this tenant.
    fn with(tenant: TenantId, now: u64) -> Tenancy {
        let mut tenancy = Tenancy::default();
        tenancy.want(tenant);
        assert_eq!(step(&mut tenancy, now, false, true), Step::Clear, "PGRAPH may contain residual data");
        assert_eq!(tenancy.cleared(now, true), Step::Admit(tenant));
        tenancy
    }

    #[test]
    fn tenant_is_admitted_only_after_predecessor_is_cleared() {
        let mut tenancy = with(A, 0);
        tenancy.want(A);
        assert!(!tenancy.is_changing(), "the tenant already has PGRAPH");
        tenancy.want(B);
        assert_eq!(step(&mut tenancy, 1, false, false), Step::Close(A));
        assert_eq!((step(&mut tenancy, 2, false, false), tenancy.leaves_since()), (Step::Wait, Some(1)));
        assert_eq!((step(&mut tenancy, 3, false, true), tenancy.leaves_since()), (Step::Clear, None));
        assert_eq!(step(&mut tenancy, 4, false, true), Step::Wait);
        assert_eq!(tenancy.cleared(11, true), Step::Admit(B));
        assert_eq!(tenancy.counts(), Counts { cleared: 2, ns: 10, failed: 0 });
    }

    #[test]
    fn working_tenant_keeps_engine_for_term_then_queues_last() {
        let mut tenancy = with(A, 0);
        tenancy.want(B);
        assert_eq!(step(&mut tenancy, TERM_NS - 1, true, true), Step::Wait);
        assert_eq!(step(&mut tenancy, TERM_NS, true, true), Step::Close(A));
        tenancy.want(A);
        assert!(tenancy.is_wanted_by(A) && !tenancy.is_wanted_by(TenantId(3)));
        assert_eq!(step(&mut tenancy, TERM_NS, true, true), Step::Clear);
        assert_eq!(tenancy.cleared(TERM_NS, true), Step::Admit(B));
        assert_eq!(step(&mut tenancy, TERM_NS + 1, false, true), Step::Close(B), "the tenant is idle");
    }

    #[test]
    fn returning_tenant_with_begun_work_waits_while_others_work() {
        let mut tenancy = with(A, 0);
        tenancy.want_again(B, 10);
        assert!(tenancy.is_changing() && tenancy.is_wanted_by(B));
        assert_eq!(step(&mut tenancy, RETURN_NS, true, true), Step::Wait);
        assert_eq!(step(&mut tenancy, 10 + RETURN_NS, true, true), Step::Close(A));
        // The switch happens earlier if the current tenant has no work.
        let mut tenancy = with(A, 0);
        tenancy.want_again(B, 10);
        assert_eq!(step(&mut tenancy, 9 + TERM_NS, false, true), Step::Wait);
        assert_eq!(step(&mut tenancy, 10 + TERM_NS, true, true), Step::Wait);
        assert_eq!(step(&mut tenancy, 9 + 2 * TERM_NS, false, true), Step::Wait);
        assert_eq!(step(&mut tenancy, 10 + 2 * TERM_NS, false, true), Step::Close(A));
        // The switch happens once, after the other waiting tenants have used PGRAPH.
        let mut tenancy = with(A, 0);
        let c = TenantId(3);
        tenancy.want_again(B, 10);
        tenancy.want_again(B, 11);
        tenancy.want(c);
        assert_eq!(step(&mut tenancy, 12, false, true), Step::Close(A));
        assert_eq!(step(&mut tenancy, 12, false, true), Step::Clear);
        assert_eq!(tenancy.cleared(13, true), Step::Admit(c));
        assert_eq!(step(&mut tenancy, 14, true, true), Step::Wait);
        tenancy.want(B);
        assert_eq!(step(&mut tenancy, 13 + TERM_NS, true, true), Step::Close(c), "`c` must have its own term");
        tenancy.forget(B);
        assert_eq!((tenancy.is_wanted_by(B), step(&mut tenancy, 20, false, true)), (false, Step::Clear));
    }

    #[test]
    fn failed_clearing_is_retried_and_admits_no_tenant() {
        let mut tenancy = with(A, 0);
        tenancy.want(B);
        step(&mut tenancy, 1, false, true);
        assert_eq!(step(&mut tenancy, 1, false, true), Step::Clear);
        assert_eq!(tenancy.cleared(5, false), Step::Wait);
        assert_eq!(step(&mut tenancy, 5, false, true), Step::Wait);
        assert_eq!(step(&mut tenancy, 5 + AGAIN_NS, false, true), Step::Clear);
        assert_eq!((tenancy.cleared(9, true), tenancy.counts().failed), (Step::Admit(B), 1));
    }

    #[test]
    fn residue_of_removed_tenant_is_cleared_for_reused_id() {
        let mut tenancy = with(A, 0);
        tenancy.forget(A);
        assert!(!tenancy.is_changing());
        tenancy.want(A);
        assert_eq!(step(&mut tenancy, 1, false, true), Step::Clear);
        // Both the current and the next tenant leave the card during the switch.
        tenancy.want(B);
        tenancy.forget(A);
        tenancy.forget(B);
        assert_eq!((tenancy.cleared(2, true), tenancy.is_changing()), (Step::Wait, false));
        tenancy.want(B);
        assert_eq!(step(&mut tenancy, 3, false, true), Step::Admit(B), "PGRAPH has already been cleared");
    }

    #[test]
    fn tenant_removed_while_leaving_is_cleared_before_next_one() {
        let mut tenancy = with(A, 0);
        tenancy.want(B);
        assert_eq!(step(&mut tenancy, 1, false, false), Step::Close(A));
        tenancy.forget(A);
        assert_eq!(step(&mut tenancy, 2, false, false), Step::Clear);
        assert_eq!(tenancy.cleared(3, true), Step::Admit(B));
    }
}
