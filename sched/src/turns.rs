//! Turns, which grant the whole card to one tenant at a time. A turn is recalled when another tenant is due.
//!
//! A tenant with a *turn* submits freely, but its shim limits its work in flight. The other tenants wait. A turn is a
//! sequence of *slices*. Each slice is one submission to the [`Scheduler`], which selects the next slice and keeps the
//! accounts. At the end of a slice, a copy of the scheduler selects the next tenant. If this is the same tenant, the
//! copy replaces the scheduler, and no message is sent to the tenant. Otherwise, the turn is recalled, and the slice is
//! charged until the end of its last work, even if that work ends after the slice. A drain is therefore needed only to
//! change to another tenant, and a tenant without competitors gets no message after its grant. The policy's own
//! accounts compensate for overruns.
//!
//! If another tenant is due, a turn that has lasted [`TurnsConfig::yield_ns`] ends as soon as its program waits for a
//! result ([`Order::Yield`]). Such a program has no queued work, so its next submission can wait for its next turn. A
//! program that always has queued work does not wait, so it keeps its slices.
//!
//! A recalled turn that has not ended within [`TurnsConfig::overrun_ns`] *overruns*, for example because of a long
//! kernel or a stopped program. The other tenants no longer wait for its end. They get their turns in the meantime, and
//! the card time-slices the work of all these tenants. Each of these tenants is charged an equal part of that time.
//!
//! A tenant with several cards is *offered* turns, which start only after they have been *reserved* (`reserved`), so
//! that no card starts them on its own.
//!
//! This module performs no I/O and has no threads. Callers pass the time.

mod filling;
mod reserved;
mod saved;

use crate::trace::{MemoryMove, Recording};
use crate::{
    Account, Channel, Config, ConfigError, Decision, Engine, Event, LatencyClass, Nanos, Scheduler, TenantId, Ticket,
    VgpuParams,
};
use filling::Filling;
use reserved::NextSlice;
use std::collections::BTreeMap;

/// Engine whose accounts are used for turns.
const ENGINE: Engine = Engine::Compute;
/// Channel number that every tenant uses.
const CHANNEL: Channel = Channel(0);

/// Number of checks for a due tenant within [`TurnsConfig::yield_ns`].
const COMPARISONS_PER_YIELD: u64 = 8;

/// Settings for turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnsConfig {
    /// Length of a slice, in ns. The next turn is decided at the end of each slice. Slices of two tenants that fill the
    /// card are twice as long.
    pub slice_ns: u64,
    /// Minimum duration of a turn before a tenant of a better latency class can cut it short, in ns.
    pub least_ns: u64,
    /// Maximum time for which other tenants wait for the end of a recalled turn, in ns.
    pub overrun_ns: u64,
    /// Duration after which a turn ends as soon as its tenant waits for a result, in ns. Applies only if another tenant
    /// is due.
    pub yield_ns: u64,
}

impl Default for TurnsConfig {
    /// Returns slices of 15 ms that can be cut short after 1 ms, and a wait of two slices for a recalled turn. A turn
    /// ends after 3.5 ms if its tenant waits for a result. These values assume that a change of turns takes 0.2 ms.
    fn default() -> Self {
        Self { slice_ns: 15_000_000, least_ns: 1_000_000, overrun_ns: 30_000_000, yield_ns: 3_500_000 }
    }
}

/// Returns the scheduler's initial settings for a card with turns: one slice at a time.
#[must_use]
pub fn scheduler_defaults() -> Config {
    Config { pipeline: crate::Pipeline::ONE, ..Config::default() }
}

/// An action on a tenant, or a message to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The tenant may submit until its turn is recalled.
    Grant(TenantId),
    /// The tenant must stop submitting, and must report the end of its submitted work.
    Recall(TenantId),
    /// Another tenant is due. The tenant must return its turn as soon as its program waits for a result.
    Yield(TenantId),
    /// The tenant has exceeded its run time limit, and its work blocks the card. The time is measured from the start of
    /// its slice, or from its recall if it shares the turn of its group.
    Overdue {
        /// Tenant that exceeded its limit.
        tenant: TenantId,
        /// Time measured so far, in ns.
        ran_ns: u64,
    },
    /// The tenant was overdue too often. It gets no turns until it is released.
    Quarantined(TenantId),
}

/// A slice in progress.
#[derive(Clone, Copy, Debug)]
struct Slice {
    ticket: Ticket,
    since: Nanos,
    /// Start of the turn that contains the slice.
    turn_since: Nanos,
    /// Time at which the turn was recalled, or `None` if it was not recalled.
    recalled: Option<Nanos>,
    /// Time of the last check for a tenant of a better latency class that would cut the turn short.
    weighed: Option<Nanos>,
    /// True if the turn was reserved, and its gate is not open yet. Such a turn is not cut short.
    waits: bool,
    /// State of the overrun, or `None` if the slice does not overrun.
    overrun: Option<Overrun>,
    /// Time of the last check for another due tenant.
    compared: Option<Nanos>,
    /// True if the tenant was asked to return the turn as soon as its program waits for a result.
    yields: bool,
    filling: Filling,
    /// True if a strike was counted for the slice.
    struck: bool,
}

impl Slice {
    /// Creates the first slice of a turn.
    fn new(ticket: Ticket, now: Nanos) -> Self {
        Self {
            ticket,
            since: now,
            turn_since: now,
            recalled: None,
            weighed: None,
            waits: false,
            overrun: None,
            compared: None,
            yields: false,
            filling: Filling::Unknown,
            struck: false,
        }
    }

    fn is_recalled(&self) -> bool {
        self.recalled.is_some()
    }

    /// Returns true if the turn can still be cut short.
    fn continues(&self) -> bool {
        !self.is_recalled() && !self.waits
    }
}

/// State of a turn for which other tenants no longer wait.
#[derive(Clone, Copy, Debug)]
struct Overrun {
    since: Nanos,
    /// True if the turn was reported for reaching the tenant's run time limit.
    overdue: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Member {
    /// True if the tenant has work that waits for its current or next turn.
    wants: bool,
    /// True if the tenant currently gets no turns, because its memory is being moved or it is waiting for its quantum.
    paused: bool,
    /// True if the tenant's turns are offered, and start only after they have been reserved.
    offers: bool,
    /// True if the tenant fills the card, as determined when it last returned its turn.
    fills: bool,
    /// Time of the last offer. Cleared when the offer is accepted or the tenant's state changes.
    offered: Option<Nanos>,
    /// Time of the last offer that prevents offers to other tenants, if the tenant has not had a turn since then.
    promised: Option<Nanos>,
    /// Ticket of the tenant's slice in the queue.
    queued: Option<Ticket>,
    slice: Option<Slice>,
}

/// Turns of one card.
#[derive(Debug)]
pub struct Turns {
    scheduler: Scheduler,
    config: TurnsConfig,
    members: BTreeMap<TenantId, Member>,
    next_ticket: u64,
    /// Number of granted turns.
    switches: u64,
    /// Time up to which overrunning turns have been charged.
    charged_until: Nanos,
    orders: Vec<Order>,
    /// Tenants that have become due since the last call of `take_offers`.
    offers: Vec<TenantId>,
    /// Tenants that the selection of the next slice has removed from the queue.
    postponed: Vec<TenantId>,
    /// Tenant that gets the next turn as soon as all other turns have ended or overrun.
    reserved: Option<TenantId>,
    recording: Option<Recording>,
}

impl Turns {
    /// Creates the turns of a card without tenants.
    ///
    /// # Errors
    /// Returns an error if a scheduler setting is out of bounds.
    pub fn new(scheduler: Config, config: TurnsConfig, now: Nanos) -> Result<Self, ConfigError> {
        let scheduler = Scheduler::new(gating(scheduler), now)?;
        let members = BTreeMap::new();
        Ok(Self {
            scheduler,
            config,
            members,
            next_ticket: 0,
            switches: 0,
            charged_until: now,
            orders: Vec::new(),
            offers: Vec::new(),
            postponed: Vec::new(),
            reserved: None,
            recording: None,
        })
    }

    /// Starts a record of at most `limit` bytes. `names` are the tenants' names. Returns false if a record is already
    /// in progress, or if the scheduler's state does not fit.
    pub fn start_record(&mut self, names: &BTreeMap<TenantId, String>, limit: usize, now: Nanos) -> bool {
        if self.recording.is_some() {
            return false;
        }
        self.recording = Recording::new(&self.scheduler, true, now, names, limit).ok();
        self.recording.is_some()
    }

    /// Ends the record and returns it, or `None` if no record is in progress.
    pub fn end_record(&mut self) -> Option<Vec<u8>> {
        self.recording.take().map(Recording::end)
    }

    /// Adds a memory move of a tenant to the record.
    pub fn note_move(&mut self, moved: MemoryMove) {
        if let Some(recording) = &mut self.recording {
            recording.note_move(moved);
        }
    }

    /// Returns the scheduler, for queries of its accounts and settings.
    #[must_use]
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Returns the number of granted turns.
    #[must_use]
    pub fn switches(&self) -> u64 {
        self.switches
    }

    /// Returns a tenant's own settings.
    #[must_use]
    pub fn params(&self, tenant: TenantId) -> Option<&VgpuParams> {
        self.scheduler.params(tenant)
    }

    /// Returns a tenant's account.
    #[must_use]
    pub fn account(&self, tenant: TenantId) -> Option<&Account> {
        self.scheduler.account(tenant, ENGINE)
    }

    /// Returns the tenants that have a turn. These are all tenants whose turns overrun, and at most one other tenant if
    /// the policy limits submissions in flight.
    pub fn holders(&self) -> impl Iterator<Item = TenantId> + '_ {
        self.members.iter().filter(|(_, member)| member.slice.is_some()).map(|(&tenant, _)| tenant)
    }

    /// Returns true if a tenant has a turn.
    #[must_use]
    pub fn has_turn(&self, tenant: TenantId) -> bool {
        self.members.get(&tenant).is_some_and(|member| member.slice.is_some())
    }

    /// Returns true if a tenant's turn has been recalled.
    #[must_use]
    pub fn is_recalled(&self, tenant: TenantId) -> bool {
        self.members.get(&tenant).and_then(|member| member.slice).is_some_and(|slice| slice.is_recalled())
    }

    /// Returns true if a tenant was asked to return its turn as soon as its program waits for a result.
    #[must_use]
    pub fn yields(&self, tenant: TenantId) -> bool {
        self.members.get(&tenant).and_then(|member| member.slice).is_some_and(|slice| slice.yields)
    }

    /// Returns true if a tenant's turn overruns.
    #[must_use]
    pub fn overruns(&self, tenant: TenantId) -> bool {
        self.members.get(&tenant).and_then(|member| member.slice).is_some_and(|slice| slice.overrun.is_some())
    }

    /// Returns the time in ns by which a tenant's turn has overrun, or 0 if it does not overrun.
    #[must_use]
    pub fn overrun_ns(&self, tenant: TenantId, now: Nanos) -> u64 {
        let overrun = self.members.get(&tenant).and_then(|member| member.slice?.overrun);
        overrun.map_or(0, |overrun| now.since(overrun.since))
    }

    /// Returns true if a tenant has queued or running work.
    #[must_use]
    pub fn is_busy(&self, tenant: TenantId) -> bool {
        self.members.get(&tenant).is_some_and(|member| member.slice.is_some() || member.wants)
    }

    /// Returns and clears the pending orders, in the order of their creation.
    pub fn take_orders(&mut self) -> Vec<Order> {
        std::mem::take(&mut self.orders)
    }

    /// Adds a tenant. Does not change an existing tenant.
    pub fn add(&mut self, tenant: TenantId, params: VgpuParams, now: Nanos) {
        if self.members.contains_key(&tenant) {
            return;
        }
        self.members.insert(tenant, Member::default());
        // The tenant may have an account from an earlier owner.
        let is_known = self.scheduler.params(tenant).is_some();
        let added = Event::Added { vgpu: tenant, params };
        self.event(now, if is_known { Event::Changed { vgpu: tenant, params } } else { added });
    }

    /// Removes a tenant and its work.
    pub fn remove(&mut self, tenant: TenantId, now: Nanos) {
        self.unreserve(tenant);
        if self.members.contains_key(&tenant) {
            self.admit(Some(tenant), now);
            self.members.remove(&tenant);
            self.event(now, Event::Removed { vgpu: tenant });
        }
    }

    /// Changes a tenant's parameters.
    pub fn change(&mut self, tenant: TenantId, params: VgpuParams, now: Nanos) {
        self.event(now, Event::Changed { vgpu: tenant, params });
    }

    /// Replaces the parameters that determine a tenant's share of the card with `params`, or restores the tenant's own
    /// parameters if `params` is `None`.
    pub fn compete(&mut self, tenant: TenantId, params: Option<VgpuParams>, now: Nanos) {
        if self.scheduler.competing(tenant) != params.as_ref() {
            self.event(now, Event::Competes { vgpu: tenant, params });
        }
    }

    /// Changes the card's settings.
    ///
    /// # Errors
    /// Returns an error if a setting is out of bounds. No setting is then changed.
    pub fn configure(&mut self, scheduler: Config, config: TurnsConfig, now: Nanos) -> Result<(), ConfigError> {
        let scheduler = gating(scheduler);
        scheduler.check()?;
        self.config = config;
        self.event(now, Event::Configured(scheduler));
        Ok(())
    }

    /// Counts a strike against a tenant, because one of its programs was abandoned after exceeding the run time limit.
    /// Several programs in one slice count as one strike.
    pub fn strike(&mut self, tenant: TenantId, now: Nanos) {
        if let Some(slice) = self.members.get_mut(&tenant).and_then(|member| member.slice.as_mut())
            && std::mem::replace(&mut slice.struck, true)
        {
            return;
        }
        self.event(now, Event::Struck { vgpu: tenant, engine: ENGINE });
    }

    /// Releases a tenant from quarantine.
    pub fn release(&mut self, tenant: TenantId, now: Nanos) {
        self.event(now, Event::Released { vgpu: tenant });
    }

    /// Records that a tenant has work.
    pub fn wants(&mut self, tenant: TenantId, now: Nanos) {
        let Some(member) = self.members.get_mut(&tenant) else { return };
        member.wants = true;
        if member.paused || member.queued.is_some() || member.slice.is_some() {
            return;
        }
        // Charge earlier use first, because the tenant did not compete until now.
        self.roll_all(now);
        self.queue(tenant, now);
        self.cut_short(tenant, now);
        self.let_overrun(now);
    }

    /// Records that a tenant has returned its turn because its work has ended. `ended` is the end of the last work
    /// according to the tenant, clamped to `now`. `more` is true if the tenant has more work. If the tenant has no
    /// turn, only `more` is recorded.
    pub fn ended(&mut self, tenant: TenantId, ended: Nanos, more: bool, now: Nanos) {
        self.charge_overruns(now);
        let Some(member) = self.members.get_mut(&tenant) else { return };
        (member.wants, member.offered) = (more, None);
        let slice = member.slice.take();
        let before = member.fills;
        let fills = more && slice.is_some_and(|slice| self.fills(&slice, before, now));
        let Some(member) = self.members.get_mut(&tenant) else { return };
        member.fills = fills;
        match (slice, member.queued) {
            (None, Some(ticket)) if !more => {
                member.queued = None;
                self.event(now, Event::Withdrawn { ticket });
            }
            (Some(slice), _) => {
                let again = more && !member.paused;
                if again {
                    self.queue(tenant, now);
                }
                self.admit(Some(tenant), now);
                self.event(now, Event::Completed { ticket: slice.ticket, ended: Some(ended.max(slice.since)) });
            }
            (None, _) if more => self.wants(tenant, now),
            (None, _) => {}
        }
    }

    /// Pauses or resumes a tenant's turns. A pause recalls the tenant's turn and removes its slice from the queue. The
    /// tenant's pending work remains recorded.
    pub fn pause(&mut self, tenant: TenantId, paused: bool, now: Nanos) {
        let Some(member) = self.members.get_mut(&tenant).filter(|member| member.paused != paused) else { return };
        member.paused = paused;
        if !paused {
            if member.wants && member.queued.is_none() && member.slice.is_none() {
                // Do not start new slices of the holders. Otherwise, a tenant that is paused more often than slices end
                // would never get a turn.
                self.queue(tenant, now);
            }
            return;
        }
        if let Some(ticket) = member.queued.take() {
            self.event(now, Event::Withdrawn { ticket });
        }
        self.recall(tenant, now);
    }

    /// Returns the tenant that would get the next turn if a tenant that was asked to return its turn did so now.
    #[must_use]
    pub fn next_after(&self, tenant: TenantId, now: Nanos) -> Option<TenantId> {
        let is_asked = |slice: &Slice| (slice.is_recalled() || slice.yields) && slice.overrun.is_none();
        let slice = self.members.get(&tenant)?.slice.filter(is_asked)?;
        if self.reserved.is_some() {
            return self.reserved;
        }
        let mut decisions = Vec::new();
        let completed = Event::Completed { ticket: slice.ticket, ended: Some(now) };
        self.scheduler.clone().event(now, completed, &mut decisions);
        let started = |ticket: &Ticket| decisions.contains(&Decision::Start(*ticket));
        let mut queued = self.members.iter().filter_map(|(&tenant, member)| Some((tenant, member.queued?)));
        queued.find(|(_, ticket)| started(ticket)).map(|(tenant, _)| tenant)
    }

    /// Advances time to `now`. The caller must call this at [`Self::next_wakeup`].
    pub fn tick(&mut self, now: Nanos) {
        self.charge_overruns(now);
        self.ask_near_end(now);
        let over = |holder: TenantId, slice: &Slice| slice.continues() && self.slice_end(holder, slice) <= now;
        let due: Vec<_> = self
            .members
            .iter()
            .filter(|&(&holder, m)| m.slice.as_ref().is_some_and(|slice| over(holder, slice)))
            .map(|(&tenant, _)| tenant)
            .collect();
        for tenant in due {
            if !self.roll(tenant, now) {
                self.recall(tenant, now);
            }
        }
        self.weigh(now);
        self.ask_to_yield(now);
        self.let_overrun(now);
        self.event(now, Event::Tick);
        self.report_overdue(now);
    }

    /// Asks the holder to return its turn as soon as its program waits for a result, if another tenant is due. A
    /// program with short submissions thus gets short turns, and a program that always has queued work keeps its
    /// slices.
    fn ask_to_yield(&mut self, now: Nanos) {
        let due: Vec<(TenantId, Slice)> = self
            .members
            .iter()
            .filter_map(|(&tenant, member)| Some((tenant, member.slice?)))
            .filter(|(_, slice)| self.comparison(slice).is_some_and(|at| at <= now))
            .collect();
        for (tenant, slice) in due {
            let ticket = self.ticket();
            let mut after = self.scheduler.clone();
            let (decisions, again) =
                (after_slice(&mut after, tenant, slice.ticket, ticket, now), Decision::Start(ticket));
            let next = decisions.iter().flat_map(|(_, decisions)| decisions);
            // If the next tenant's turns are offered, its turn would not start now.
            let yields = !next.clone().eq([&again]) && self.first_offer(next).is_none();
            if let Some(slice) = self.members.get_mut(&tenant).and_then(|member| member.slice.as_mut()) {
                (slice.compared, slice.yields) = (Some(now), yields);
            }
            if yields {
                self.orders.push(Order::Yield(tenant));
            }
        }
    }

    /// Returns the time of the next check for another due tenant, or `None` if no check is needed.
    fn comparison(&self, slice: &Slice) -> Option<Nanos> {
        let may_yield = slice.continues() && !slice.yields && self.scheduler.queued() > 0;
        let TurnsConfig { yield_ns, .. } = self.config;
        let again = slice.compared.map(|at| at.after(yield_ns / COMPARISONS_PER_YIELD));
        may_yield.then(|| slice.turn_since.after(yield_ns).max(again.unwrap_or_default()))
    }

    /// Marks turns that were recalled too long ago as overrunning, if other tenants wait for the card.
    fn let_overrun(&mut self, now: Nanos) {
        if self.scheduler.queued() == 0 && self.reserved.is_none() {
            return;
        }
        self.charge_overruns(now);
        let mut late = Vec::new();
        for slice in self.members.values_mut().filter_map(|member| member.slice.as_mut()) {
            let recalled = slice.recalled.filter(|_| slice.overrun.is_none());
            if recalled.is_some_and(|since| now.since(since) >= self.config.overrun_ns) {
                slice.overrun = Some(Overrun { since: now, overdue: false });
                late.push(slice.ticket);
            }
        }
        self.admit(None, now);
        for ticket in late {
            self.event(now, Event::Waiting { ticket });
        }
    }

    /// Charges the overrunning turns and the turn that shares the card with them.
    fn charge_overruns(&mut self, now: Nanos) {
        let since = std::mem::replace(&mut self.charged_until, now);
        let mut overruns = self.members.values().filter_map(|member| member.slice?.overrun);
        if overruns.any(|overrun| overrun.since <= since) {
            self.event(now, Event::Shared { engine: ENGINE, since });
        }
    }

    /// Reports the overrunning turns that have exceeded their run time limits.
    fn report_overdue(&mut self, now: Nanos) {
        let late: Vec<TenantId> =
            self.deadlines().filter(|(_, deadline)| *deadline <= now).map(|(tenant, _)| tenant).collect();
        for tenant in late {
            let Some(slice) = self.members.get_mut(&tenant).and_then(|member| member.slice.as_mut()) else { continue };
            if let Some(overrun) = slice.overrun.as_mut() {
                overrun.overdue = true;
            }
            self.orders.push(Order::Overdue { tenant, ran_ns: now.since(slice.since) });
        }
    }

    /// Returns the tenants with overrunning turns, and the times at which these turns reach their run time limits.
    fn deadlines(&self) -> impl Iterator<Item = (TenantId, Nanos)> + '_ {
        self.members.iter().filter_map(|(&tenant, member)| {
            let slice = member.slice.filter(|slice| slice.overrun.is_some_and(|overrun| !overrun.overdue))?;
            let limit = self.scheduler.params(tenant)?.max_run_ns?;
            Some((tenant, slice.since.after(limit)))
        })
    }

    /// Returns the earliest of these times: the next charge for overrunning turns, the end of the wait for a recalled
    /// turn, and the run time limits of overrunning turns.
    fn next_overrun(&self) -> Option<Nanos> {
        let waits = self.scheduler.queued() > 0 || self.reserved.is_some();
        let slices = self.members.values().filter_map(|member| member.slice);
        let times = slices.filter_map(|slice| match slice.overrun {
            Some(_) => Some(self.charged_until.after(self.config.slice_ns)),
            None => slice.recalled.filter(|_| waits).map(|since| since.after(self.config.overrun_ns)),
        });
        times.chain(self.deadlines().map(|(_, deadline)| deadline)).min()
    }

    /// Cuts turns short for queued tenants of a better latency class. When such a tenant queued its work, the turn may
    /// have been too short, or the tenant may have been above its share.
    fn weigh(&mut self, now: Nanos) {
        let due: Vec<TenantId> = self.weighings().filter(|(_, at)| *at <= now).map(|(tenant, _)| tenant).collect();
        for tenant in &due {
            if let Some(slice) = self.members.get_mut(tenant).and_then(|member| member.slice.as_mut()) {
                slice.weighed = Some(now);
            }
        }
        if !due.is_empty() {
            let queued: Vec<_> = self.members.iter().filter(|(_, m)| m.queued.is_some()).map(|(&t, _)| t).collect();
            for tenant in queued {
                self.cut_short(tenant, now);
            }
        }
    }

    /// Returns the times of the next checks for cutting turns short, while a tenant of a better class is waiting.
    fn weighings(&self) -> impl Iterator<Item = (TenantId, Nanos)> + '_ {
        let best = self.members.iter().filter(|(_, m)| m.queued.is_some()).map(|(&t, _)| self.class(t)).min();
        let least = self.config.least_ns;
        self.members.iter().filter_map(move |(&tenant, member)| {
            let slice = member.slice.filter(Slice::continues)?;
            let is_worse = self.class(tenant) > best?;
            let again = slice.weighed.map_or(Nanos::default(), |at| at.after(least));
            is_worse.then(|| (tenant, slice.turn_since.after(least).max(again)))
        })
    }

    /// Returns the time at which [`Self::tick`] is due if no event occurs earlier.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Nanos> {
        let slices = || self.members.iter().filter_map(|(&holder, member)| Some((holder, member.slice?)));
        let ends =
            slices().filter(|(_, slice)| slice.continues()).map(|(holder, slice)| self.slice_end(holder, &slice));
        let ends = ends.chain(slices().filter_map(|(holder, slice)| self.asks_at(holder, &slice)));
        let comparisons = self.members.values().filter_map(|member| self.comparison(&member.slice?));
        let ends = ends.chain(comparisons).chain(self.weighings().map(|(_, at)| at));
        ends.chain(self.next_overrun()).chain(self.scheduler.next_wakeup()).min()
    }

    fn recall(&mut self, tenant: TenantId, now: Nanos) {
        let slice = self.members.get_mut(&tenant).and_then(|member| member.slice.as_mut());
        if let Some(slice) = slice.filter(|slice| !slice.is_recalled()) {
            slice.recalled = Some(now);
            self.orders.push(Order::Recall(tenant));
        }
    }

    /// Queues a slice for a tenant.
    fn queue(&mut self, tenant: TenantId, now: Nanos) {
        let ticket = self.ticket();
        if let Some(member) = self.members.get_mut(&tenant) {
            (member.queued, member.offered) = (Some(ticket), None);
        }
        self.event(now, Event::Arrival { vgpu: tenant, channel: CHANNEL, engine: ENGINE, ticket });
    }

    /// If no tenant waits, ends the slices of all holders and starts new ones.
    fn roll_all(&mut self, now: Nanos) {
        if self.scheduler.queued() > 0 {
            return;
        }
        let holders: Vec<_> = self.holders().collect();
        for tenant in holders {
            self.roll(tenant, now);
        }
    }

    /// Immediately starts the next slice of a tenant if the scheduler would select this tenant again. Returns true if
    /// it started the slice.
    fn roll(&mut self, tenant: TenantId, now: Nanos) -> bool {
        let Some(slice) = self.members.get(&tenant).and_then(|member| member.slice).filter(Slice::continues) else {
            return false;
        };
        let Some(NextSlice { ticket, after, steps }) = self.pick_again(tenant, slice.ticket, now) else {
            self.requeue_postponed(now);
            return false;
        };
        self.scheduler = after;
        if let Some(recording) = &mut self.recording {
            steps.into_iter().for_each(|(event, decisions)| recording.note(now, event, &decisions));
        }
        if let Some(member) = self.members.get_mut(&tenant) {
            let filling = Filling::Unknown;
            member.slice = Some(Slice { ticket, since: now, compared: Some(now), yields: false, filling, ..slice });
        }
        self.requeue_postponed(now);
        true
    }

    /// Immediately recalls the holder's turn if the newcomer's latency class is better and the scheduler would select
    /// the newcomer.
    fn cut_short(&mut self, newcomer: TenantId, now: Nanos) {
        if self.members.get(&newcomer).is_none_or(|member| member.queued.is_none()) {
            return;
        }
        let class = self.class(newcomer);
        let lasted = |slice: Slice| slice.continues() && now.since(slice.turn_since) >= self.config.least_ns;
        let worse: Vec<(TenantId, Slice)> = self
            .members
            .iter()
            .filter_map(|(&tenant, member)| Some((tenant, member.slice.filter(|&slice| lasted(slice))?)))
            .filter(|&(tenant, _)| self.class(tenant) > class)
            .collect();
        for (tenant, slice) in worse {
            let again = self.pick_again(tenant, slice.ticket, now).is_some();
            self.requeue_postponed(now);
            if !again {
                self.recall(tenant, now);
            }
        }
    }

    fn class(&self, tenant: TenantId) -> LatencyClass {
        self.scheduler.params(tenant).map_or(LatencyClass::default(), |params| params.class)
    }

    fn ticket(&mut self) -> Ticket {
        self.next_ticket += 1;
        Ticket(self.next_ticket)
    }

    fn event(&mut self, now: Nanos, event: Event) {
        let Some(decisions) = self.decide(now, event) else { return };
        if let Some(recording) = &mut self.recording {
            recording.note(now, event, &decisions);
        }
        for decision in decisions {
            match decision {
                Decision::Start(ticket) => self.begin(ticket, now),
                Decision::Kill { vgpu, ran_ns, .. } => self.orders.push(Order::Overdue { tenant: vgpu, ran_ns }),
                Decision::Quarantined { vgpu, .. } => self.orders.push(Order::Quarantined(vgpu)),
                Decision::Released { .. } => {}
            }
        }
    }

    fn begin(&mut self, ticket: Ticket, now: Nanos) {
        let found = self.members.iter_mut().find(|(_, member)| member.queued == Some(ticket));
        if let Some((&tenant, member)) = found {
            member.queued = None;
            member.wants = false;
            member.slice = Some(Slice::new(ticket, now));
            self.switches += 1;
            self.orders.push(Order::Grant(tenant));
        }
    }
}

/// Queues a tenant's next slice in `scheduler`, and ends its current one. Returns these events and their decisions.
fn after_slice(
    scheduler: &mut Scheduler,
    tenant: TenantId,
    ends: Ticket,
    begins: Ticket,
    now: Nanos,
) -> [(Event, Vec<Decision>); 2] {
    let arrival = Event::Arrival { vgpu: tenant, channel: CHANNEL, engine: ENGINE, ticket: begins };
    [arrival, Event::Completed { ticket: ends, ended: Some(now) }].map(|event| {
        let mut decisions = Vec::new();
        scheduler.event(now, event, &mut decisions);
        (event, decisions)
    })
}

/// Returns `config` with a pipeline of one slice, so that a slice starts only after the previous one has ended.
fn gating(config: Config) -> Config {
    Config { pipeline: crate::Pipeline::ONE, ..config }
}

#[cfg(test)]
mod continued;
#[cfg(test)]
mod offers;
#[cfg(test)]
mod tests;
