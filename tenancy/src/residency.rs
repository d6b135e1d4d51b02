//! Divides a card's memory among tenants: plans moves, and grants quanta to tenants whose memory does not fit on the
//! card together.

use sched::VgpuParams;
use std::collections::{BTreeMap, BTreeSet};
use vram::balance::{ActiveVms, By, Config, Request};
use vram::{Balancer, Change, ChunkTable, Done, Lead, OnFull, Quanta, QuantaConfig, Step, TenantId, Turn, VmSummary};

/// Tenants to hold (true) or to release (false) because of another tenant's quantum.
pub type Holds = Vec<(TenantId, bool)>;

/// Memory that tenants and the operator currently lack.
#[derive(Clone, Debug, Default)]
pub struct Demand {
    /// Number of card chunks denied to each tenant since the last plan.
    pub unmet: BTreeMap<TenantId, u32>,
    /// Number of chunks to free for a guarantee. If set, no memory is returned to the card, because it would take these
    /// chunks.
    pub guarantee: Option<u32>,
    /// True if moves may be planned only for denied requests and the guarantee, because the executor has more urgent
    /// moves.
    pub only_requests: bool,
    /// True if moves do not delay other tenants, so that evicted memory may return immediately.
    pub is_undisturbed: bool,
}

/// Moves that are due.
#[derive(Clone, Debug, Default)]
pub struct Planned {
    /// The moves, in order.
    pub steps: Vec<Step>,
    /// Tenants whose denied requests the moves serve.
    pub served: BTreeSet<TenantId>,
}

/// Divides a card's memory among tenants.
#[derive(Debug)]
pub struct Residency {
    balancer: Balancer,
    quanta: Quanta,
    /// Held tenants, and the start time of each hold in ns.
    held: BTreeMap<TenantId, u64>,
    /// Total time of each tenant's earlier holds, in ns.
    held_ns: BTreeMap<TenantId, u64>,
    /// True while memory is moved for a quantum that is about to start. During this time, the holder of the quantum is
    /// also held. Otherwise, its work would use chunks in host memory, and their return would have to wait for the
    /// work.
    is_loading: bool,
    /// Time since which no memory has moved for that quantum, in ns.
    still_since: Option<u64>,
    /// Number of quanta that have begun.
    begun: u64,
}

impl Residency {
    /// Creates the state of an unused card.
    #[must_use]
    pub fn new(balance: Config, quanta: QuantaConfig) -> Self {
        Self::restored(Balancer::new(balance), Quanta::new(quanta), 0, BTreeMap::new())
    }

    /// Restores the state from its parts. `held` contains the held tenants and the start of each hold.
    #[must_use]
    pub fn restored(balancer: Balancer, quanta: Quanta, begun: u64, held: BTreeMap<TenantId, u64>) -> Self {
        // The holder is held only while memory is moved for its quantum.
        let is_loading = quanta.turn().is_some_and(|turn| held.contains_key(&turn.holder));
        Self { balancer, quanta, held, held_ns: BTreeMap::new(), is_loading, still_since: None, begun }
    }

    /// Continues with an earlier owner's measured bandwidth and results of probes, and with the current settings. The
    /// quantum of that owner has ended.
    pub fn continue_from(&mut self, quanta: Quanta, begun: u64) {
        (self.quanta, self.begun) = (quanta.at_rest(*self.quanta.config()), begun);
    }

    /// Replaces the operator's settings.
    pub fn configure(&mut self, balance: Config, quanta: QuantaConfig) {
        self.balancer.set_config(balance);
        self.quanta.set_config(quanta);
    }

    /// Returns the balancer, which computes the tenants' entitlements.
    #[must_use]
    pub fn balancer(&self) -> &Balancer {
        &self.balancer
    }

    /// Returns the balancer, for reporting uses and arrivals of chunks and hints about them.
    pub fn balancer_mut(&mut self) -> &mut Balancer {
        &mut self.balancer
    }

    /// Returns the quanta and the thrashing detector.
    #[must_use]
    pub fn quanta(&self) -> &Quanta {
        &self.quanta
    }

    /// Returns the current quantum, if tenants take turns.
    #[must_use]
    pub fn turn(&self) -> Option<&Turn> {
        self.quanta.turn()
    }

    /// Returns the number of quanta that have begun.
    #[must_use]
    pub fn begun(&self) -> u64 {
        self.begun
    }

    /// Returns true while memory is being moved for a quantum that is about to start.
    #[must_use]
    pub fn is_loading(&self) -> bool {
        self.is_loading
    }

    /// Returns true if a tenant is held.
    #[must_use]
    pub fn is_held(&self, tenant: TenantId) -> bool {
        self.held.contains_key(&tenant)
    }

    /// Returns the holder of the quantum for which a tenant is held. Also returns the remaining time of the quantum in
    /// ns, or `None` while memory is moved for the quantum.
    #[must_use]
    pub fn wait(&self, tenant: TenantId, now: u64) -> Option<(TenantId, Option<u64>)> {
        let turn = self.quanta.turn().filter(|_| self.is_held(tenant))?;
        Some((turn.holder, self.quanta.left_ns(now)))
    }

    /// Returns the total time in ns for which a tenant has been held. Excludes holds that ended before the tenant was
    /// added or the state was restored.
    #[must_use]
    pub fn held_ns(&self, tenant: TenantId, now: u64) -> u64 {
        let current = self.held.get(&tenant).map_or(0, |since| now.saturating_sub(*since));
        self.held_ns.get(&tenant).map_or(current, |before| before.saturating_add(current))
    }

    /// Records that a tenant has work.
    pub fn worked(&mut self, tenant: TenantId, now: u64) {
        self.balancer.active(tenant, now);
    }

    /// Records that tenants' work has transferred `bytes` over the bus by accessing host memory.
    pub fn accessed(&mut self, now: u64, bytes: u64) {
        self.quanta.accessed(now, bytes);
    }

    /// Records a copy between the card and host memory.
    pub fn moved(&mut self, now: u64, bytes: u64, took_ns: u64) {
        self.quanta.relocated(now, bytes, took_ns);
    }

    /// Follows the other cards of tenants with several cards. `leads` contains the tenants for which another card
    /// decides on quanta, and `unready` contains the tenants whose memory is not ready on another card.
    pub fn follow(&mut self, leads: BTreeMap<TenantId, Lead>, unready: BTreeSet<TenantId>) {
        self.quanta.set_leads(leads);
        self.quanta.set_unready(unready);
    }

    /// Discards the state of a removed tenant.
    pub fn forget(&mut self, tenant: TenantId) {
        self.balancer.forget_vm(tenant);
        self.held.remove(&tenant);
        self.held_ns.remove(&tenant);
    }

    /// Starts, changes or ends quanta, depending on whether the active tenants' memory fits together. `weight` returns
    /// a tenant's time weight, and `done` returns a tenant's completed work if the executor knows it.
    pub fn tick(
        &mut self,
        table: &ChunkTable,
        now: u64,
        weight: impl Fn(TenantId) -> u32,
        done: Option<&dyn Fn(TenantId) -> Done>,
    ) -> Holds {
        let ActiveVms { sets, idle } = self.balancer.active_vms(table, now, weight);
        if let Some(done) = done {
            self.quanta.set_done(sets.keys().map(|tenant| (*tenant, done(*tenant))).collect());
        }
        self.quanta.set_working_sets(u64::from(table.for_vms()) * table.chunk_bytes(), sets);
        self.quanta.set_idle(idle);
        let before = self.quanta.turn().map(|turn| turn.holder);
        let probed = self.quanta.tries();
        let turn = match self.quanta.tick(now) {
            None => return Holds::new(),
            Some(Change::Off) => {
                tracing::info!(probed, "memory quanta end: the tenants' memory fits together, or quanta do not help");
                None
            }
            Some(Change::On(turn)) => {
                tracing::info!(?turn, "memory quanta begin: the tenants' memory does not fit together");
                Some(turn)
            }
            Some(Change::Next(turn)) => Some(turn),
        };
        let holder = turn.as_ref().map(|turn| turn.holder);
        let begins = holder.is_some() && holder != before;
        self.begun += u64::from(begins);
        self.is_loading = holder.is_some() && (begins || self.is_loading);
        self.balancer.set_turn(turn);
        self.renew_holds(now)
    }

    /// Records that memory is moving.
    pub fn moves(&mut self) {
        self.still_since = None;
    }

    /// Records that no memory is moving. The quantum for which memory was moved starts, unless a program that is ending
    /// will soon release memory to which more of the holder's memory can return. The quantum then starts, at the
    /// latest, after a time equal to the maximum cost of a change of quanta. The quantum of a tenant with several cards
    /// also waits for its memory on the other cards ([`Quanta::waits_for_cards`]). `fixed` returns the number of a
    /// tenant's chunks that never move, and is `None` if no such program is ending.
    pub fn is_still(&mut self, table: &ChunkTable, now: u64, fixed: Option<&dyn Fn(TenantId) -> u32>) -> Holds {
        let Some(turn) = self.quanta.turn().filter(|_| self.is_loading) else { return Holds::new() };
        let since = *self.still_since.get_or_insert(now);
        let patience = turn.quantum_ns / u64::from(self.quanta.config().factor.max(1));
        let may_grow = fixed.is_some_and(|fixed| could_return(table, turn.holder, fixed));
        if may_grow && now.saturating_sub(since) < patience || self.quanta.waits_for_cards(now) {
            return Holds::new();
        }
        (self.is_loading, self.still_since) = (false, None);
        self.quanta.copies_done(now);
        self.renew_holds(now)
    }

    /// Returns the moves that are due now.
    pub fn plan(&mut self, table: &ChunkTable, now: u64, demand: Demand) -> Planned {
        let mut planned = Planned::default();
        for (tenant, chunks) in demand.unmet {
            let steps = self.balancer.plan(table, now, Some(Request { by: By::Vm(tenant), chunks }));
            if !steps.is_empty() {
                planned.served.insert(tenant);
            }
            planned.steps.extend(steps);
        }
        if planned.steps.is_empty()
            && let Some(chunks) = demand.guarantee
        {
            planned.steps = self.plan_guarantee(table, now, chunks);
        }
        if demand.only_requests {
            return planned;
        }
        if planned.steps.is_empty() && self.quanta.wants_bandwidth() {
            // Evict and return memory once, to measure the bandwidth.
            planned.steps = self.plan_guarantee(table, now, table.spare() + 1);
        }
        if planned.steps.is_empty() && demand.guarantee.is_none() {
            if self.is_loading || demand.is_undisturbed {
                self.balancer.hurry();
            }
            planned.steps = self.balancer.plan(table, now, None);
        }
        planned
    }

    /// Returns the moves that free enough card chunks to guarantee `chunks` more chunks.
    pub fn plan_guarantee(&mut self, table: &ChunkTable, now: u64, chunks: u32) -> Vec<Step> {
        self.balancer.plan(table, now, Some(Request { by: By::Guarantee, chunks }))
    }

    /// Returns true if new memory of the holder of a quantum should wait for the eviction of other members' memory. If
    /// it were placed in host memory, the holder would access it over the link, and it would be moved immediately.
    #[must_use]
    pub fn should_wait_for_room(&self, table: &ChunkTable, tenant: TenantId) -> bool {
        let Some(turn) = self.quanta.turn().filter(|turn| turn.holder == tenant) else { return false };
        let Some(own) = account_of(table, tenant) else { return false };
        let swaps = own.limits.on_full == OnFull::Swap && own.placed < own.limits.quota;
        let has_room = table.spare() > 0 || own.placed < own.guarantee;
        let others = turn.members.iter().filter(|&&member| member != tenant);
        let mut others = others.filter_map(|&member| account_of(table, member));
        swaps && !has_room && table.host_room() > 0 && others.any(|other| other.placed > other.guarantee)
    }

    /// Returns true if a tenant's next chunk goes to host memory although the tenant may have it on the card.
    #[must_use]
    pub fn swaps_next(table: &ChunkTable, tenant: TenantId) -> bool {
        let swaps = |own: VmSummary| {
            let may = own.placed < own.limits.quota && own.placed >= own.guarantee;
            may && own.limits.on_full == OnFull::Swap
        };
        table.spare() == 0 && account_of(table, tenant).is_some_and(swaps)
    }

    /// Returns the settings that determine a tenant's share of the time in place of its own. The holder of a quantum
    /// competes on behalf of all members: each member uses its share of the time in its own quanta, so that tenants
    /// that are not members keep their shares. `own` returns the operator's settings of a tenant.
    pub fn competing(&self, tenant: TenantId, own: impl Fn(TenantId) -> Option<VgpuParams>) -> Option<VgpuParams> {
        let turn = self.quanta.turn().filter(|turn| turn.holder == tenant)?;
        let members = turn.members.iter().filter_map(|member| own(*member));
        let (mine, group) = (own(tenant)?, own(tenant)?.on_behalf_of(members));
        (group != mine).then_some(group)
    }

    /// Updates the set of held tenants, and returns the changes.
    fn renew_holds(&mut self, now: u64) -> Holds {
        let held: BTreeSet<TenantId> = self.quanta.turn().map_or_else(BTreeSet::new, |turn| {
            let is_held = |tenant: &TenantId| self.is_loading || turn.holder != *tenant;
            turn.members.iter().copied().filter(is_held).collect()
        });
        let mut holds = Holds::new();
        let released: Vec<TenantId> = self.held.keys().copied().filter(|tenant| !held.contains(tenant)).collect();
        for tenant in released {
            if let Some(since) = self.held.remove(&tenant) {
                let sum = self.held_ns.entry(tenant).or_default();
                *sum = sum.saturating_add(now.saturating_sub(since));
            }
            holds.push((tenant, false));
        }
        for tenant in held {
            if let std::collections::btree_map::Entry::Vacant(new) = self.held.entry(tenant) {
                new.insert(now);
                holds.push((tenant, true));
            }
        }
        holds
    }
}

/// Returns a tenant's account.
fn account_of(table: &ChunkTable, tenant: TenantId) -> Option<VmSummary> {
    table.vms().find(|(vm, _)| *vm == tenant).map(|(_, account)| account)
}

/// Returns true if a tenant has evicted memory for which the card has space, or would have space if the movable chunks
/// of other tenants were evicted.
fn could_return(table: &ChunkTable, tenant: TenantId, fixed: &dyn Fn(TenantId) -> u32) -> bool {
    let is_evicted = table.vms().any(|(vm, account)| vm == tenant && account.host > 0);
    is_evicted && (table.spare() > 0 || table.vms().any(|(vm, account)| vm != tenant && account.placed > fixed(vm)))
}

#[cfg(test)]
mod tests;
