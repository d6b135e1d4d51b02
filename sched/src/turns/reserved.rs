//! Turns that a card does not start on its own, for tenants that need several cards at the same time.
//!
//! If such a tenant is next according to the card's accounts, it does not get a turn. Instead, its slice is removed
//! from the queue, its turn is *offered* ([`Turns::take_offers`]), and the next tenant in the queue gets the card. The
//! card is therefore not idle during an offer, regardless of its length. [`Turns::reserve`] recalls the holder. No
//! other turn starts between the end of the holder's turn and the reserved turn, which is charged from the end of the
//! holder's turn.

use super::{CHANNEL, ENGINE, Order, Slice, Turns, after_slice};
use crate::{Decision, Event, Nanos, PolicyKind, Scheduler, TenantId, Ticket};

/// Minimum time, in slices, between two offers that each prevent offers to other tenants. Applies to offers to one
/// tenant while it gets no turn.
const SLICES_PER_PROMISE: u64 = 8;

/// Next slice of a tenant that keeps its turn.
pub(super) struct NextSlice {
    pub(super) ticket: Ticket,
    /// Copy of the scheduler in which this slice has started.
    pub(super) after: Scheduler,
    /// Events that lead from the current scheduler to `after`, with their decisions.
    pub(super) steps: [(Event, Vec<Decision>); 2],
}

impl Turns {
    /// Sets whether a tenant's turns are offered. The tenant must have no work.
    pub fn set_offered(&mut self, tenant: TenantId, offered: bool) {
        if let Some(member) = self.members.get_mut(&tenant) {
            member.offers = offered;
        }
    }

    /// Returns and clears the tenants that have become due since the last call, in the order in which they became due.
    /// They are no longer in the queue.
    pub fn take_offers(&mut self) -> Vec<TenantId> {
        std::mem::take(&mut self.offers)
    }

    /// Reserves the next turn for a tenant. Recalls the holder, and grants the turn as soon as the holder returns its
    /// turn or overruns. Returns false if the tenant is unknown, is paused, or has a turn, or if the next turn is
    /// already reserved.
    pub fn reserve(&mut self, tenant: TenantId, now: Nanos) -> bool {
        let Some(member) = self.members.get_mut(&tenant).filter(|member| !member.paused && member.slice.is_none())
        else {
            return false;
        };
        if self.reserved.is_some() {
            return false;
        }
        (member.offered, member.promised) = (None, None);
        if let Some(ticket) = member.queued.take() {
            self.event(now, Event::Withdrawn { ticket });
        }
        self.reserved = Some(tenant);
        if self.is_exclusive() {
            let holders: Vec<_> = self.holders().collect();
            for holder in holders {
                self.recall(holder, now);
            }
        }
        self.admit(None, now);
        self.let_overrun(now);
        true
    }

    /// Cancels a reservation if its turn has not started. The recalled holder must still return its turn.
    pub fn unreserve(&mut self, tenant: TenantId) {
        self.reserved = self.reserved.filter(|reserved| *reserved != tenant);
    }

    /// Recalls a tenant's turn, if it has one.
    pub fn give_back(&mut self, tenant: TenantId, now: Nanos) {
        self.recall(tenant, now);
    }

    /// Starts the first slice of a reserved turn that was granted, because the turn's gate opens now.
    pub fn open(&mut self, tenant: TenantId, now: Nanos) {
        let slice = self.members.get_mut(&tenant).and_then(|member| member.slice.as_mut());
        if let Some(slice) = slice.filter(|slice| slice.waits) {
            (slice.waits, slice.since, slice.turn_since) = (false, now, now);
        }
    }

    /// Returns true if the policy grants the card to one tenant at a time.
    fn is_exclusive(&self) -> bool {
        !matches!(self.scheduler.config().policy, PolicyKind::Direct | PolicyKind::Disengaged)
    }

    /// Starts the reserved turn if all other turns overrun, or if the policy permits several turns at a time. `leaving`
    /// is the tenant whose turn is about to end, if any. The reserved turn must be added to the scheduler before that
    /// turn ends. Otherwise, another turn would start.
    pub(super) fn admit(&mut self, leaving: Option<TenantId>, now: Nanos) {
        let Some(tenant) = self.reserved else { return };
        let mut others = self.members.iter().filter(|(id, _)| Some(**id) != leaving).filter_map(|(_, m)| m.slice);
        if self.is_exclusive() && others.any(|slice| slice.overrun.is_none()) {
            return;
        }
        self.reserved = None;
        let ticket = self.ticket();
        let Some(member) = self.members.get_mut(&tenant) else { return };
        member.slice = Some(Slice { waits: true, ..Slice::new(ticket, now) });
        self.switches += 1;
        // An adopted and resumed submission starts regardless of the policy.
        self.event(now, Event::Adopted { vgpu: tenant, channel: CHANNEL, engine: ENGINE, ticket });
        self.event(now, Event::Resumed { ticket });
        self.orders.push(Order::Grant(tenant));
    }

    /// Applies an event and returns the scheduler's decisions. A turn that would start for a tenant with offered turns
    /// is offered instead, as if the tenant's slice had not been queued. Returns `None` if the event is the arrival of
    /// such a slice.
    pub(super) fn decide(&mut self, now: Nanos, event: Event) -> Option<Vec<Decision>> {
        let mut decisions = Vec::new();
        if !self.members.values().any(|member| member.offers && member.queued.is_some()) {
            self.scheduler.event(now, event, &mut decisions);
            return Some(decisions);
        }
        // Each iteration removes one slice from the queue.
        loop {
            let mut after = self.scheduler.clone();
            decisions.clear();
            after.event(now, event, &mut decisions);
            let Some((tenant, ticket)) = self.first_offer(&decisions) else {
                self.scheduler = after;
                return Some(decisions);
            };
            if matches!(event, Event::Arrival { ticket: arrives, .. } if arrives == ticket) {
                self.offer(tenant, now);
                return None;
            }
            self.offer_queued(tenant, ticket, now);
        }
    }

    /// Removes a slice from the queue and offers its turn.
    fn offer_queued(&mut self, tenant: TenantId, ticket: Ticket, now: Nanos) {
        self.offer(tenant, now);
        self.take_out(ticket, now);
    }

    /// Removes a slice from the queue. Charges the holder first, while the tenant still competes. Otherwise, the tenant
    /// might not be credited with its share of that time.
    fn take_out(&mut self, ticket: Ticket, now: Nanos) {
        if let Some(since) = self.scheduler.charged_from(ENGINE) {
            self.event(now, Event::Shared { engine: ENGINE, since });
        }
        self.event(now, Event::Withdrawn { ticket });
    }

    fn offer(&mut self, tenant: TenantId, now: Nanos) {
        let pause = self.config.slice_ns * SLICES_PER_PROMISE;
        if let Some(member) = self.members.get_mut(&tenant) {
            (member.queued, member.wants, member.offered) = (None, false, Some(now));
            if member.promised.is_none_or(|at| now.since(at) >= pause) {
                member.promised = Some(now);
            }
            self.offers.push(tenant);
        }
    }

    /// Returns the first tenant with offered turns among the tenants that would start, and the tenant's ticket.
    pub(super) fn first_offer<'a>(
        &self,
        decisions: impl IntoIterator<Item = &'a Decision>,
    ) -> Option<(TenantId, Ticket)> {
        let starts = decisions.into_iter().filter_map(|decision| match decision {
            Decision::Start(ticket) => Some(*ticket),
            Decision::Kill { .. } | Decision::Quarantined { .. } | Decision::Released { .. } => None,
        });
        let offered = |ticket: Ticket| {
            let mut members = self.members.iter().filter(|(_, member)| member.offers);
            members.find(|(_, member)| member.queued == Some(ticket)).map(|(&tenant, _)| (tenant, ticket))
        };
        starts.into_iter().find_map(offered)
    }

    /// Returns true if a tenant was offered the next turn less than a slice ago. For this time, no other tenant gets an
    /// offer while the holder can continue. Otherwise, tenants with few cards would always get turns before tenants
    /// with many cards. If a tenant's other cards are busy, only some of its offers cause this delay.
    fn is_promised(&self, now: Nanos) -> bool {
        let recent = |at: Nanos| now.since(at) < self.config.slice_ns;
        self.members.values().any(|member| member.offered.is_some() && member.promised.is_some_and(recent))
    }

    /// Ends a tenant's slice in a copy of the scheduler. Returns the next slice if the tenant is selected again. Skips
    /// tenants with offered turns, which get an offer now or later.
    pub(super) fn pick_again(&mut self, tenant: TenantId, ends: Ticket, now: Nanos) -> Option<NextSlice> {
        let mut postponed = Vec::new();
        // Each iteration removes one slice from the queue.
        let next = loop {
            let begins = self.ticket();
            let mut after = self.scheduler.clone();
            let steps = after_slice(&mut after, tenant, ends, begins, now);
            let all = steps.iter().flat_map(|(_, decisions)| decisions);
            if all.clone().eq([&Decision::Start(begins)]) {
                break Some(NextSlice { ticket: begins, after, steps });
            }
            let Some((chosen, ticket)) = self.first_offer(all) else { break None };
            if self.is_promised(now) {
                postponed.push(chosen);
                if let Some(member) = self.members.get_mut(&chosen) {
                    member.queued = None;
                }
                self.take_out(ticket, now);
            } else {
                self.offer_queued(chosen, ticket, now);
            }
        };
        self.postponed.extend(postponed);
        next
    }

    /// Requeues the tenants that a selection skipped.
    pub(super) fn requeue_postponed(&mut self, now: Nanos) {
        for tenant in std::mem::take(&mut self.postponed) {
            if self.members.get(&tenant).is_some_and(|member| member.queued.is_none() && !member.paused) {
                self.queue(tenant, now);
            }
        }
    }
}
