//! Turns and memory quanta, which determine when gates open.

use super::Core;
use super::sessions::Session;
use super::types::{Action, SessionId};
use cuda_protocol::{FromOwner, Run, Usage, VERSION_CONCURRENT, VERSION_GANGS, VERSION_HANDOVER};
use gang::GangOrder;
use sched::turns::Order;
use std::collections::BTreeMap;
use tenancy::{Changes, Deadline, Report, Traffic};
use vram::TenantId;

/// Maximum time that the owner polls before the announced end of a turn, in microseconds. This also limits the cost of
/// a program's false announcements.
const ATTENDED_US: u32 = 1000;

/// Minimum limit on work in flight while all other tenants wait for their quantum, in microseconds. A high limit
/// reduces the card time spent on events, and draining the work is cheap compared with a change of quanta.
const RUN_AHEAD_UNDISTURBED_US: u32 = 20_000;

/// Minimum idle time after which a turn ends while all other tenants wait for their quantum, in microseconds. A program
/// with work is rarely idle for this long, but the change of quanta that idleness can cause takes longer.
const IDLE_UNDISTURBED_US: u32 = 10_000;

/// Interval in microseconds at which a group member's program reports its use. It is much shorter than the lead in work
/// that makes a member wait for others.
const REPORT_INTERVAL_US: u32 = 2000;

/// Minimum time between a turn of a program and its next submission after which the next turn ends when the program
/// waits for a result, if tenants of worse latency classes are connected, in ns. A program that reads a result and
/// submits its next work at once pauses for less, and would pay for a change of turns at each result.
const PAUSE_NS: u64 = 1_000_000;

/// Maximum idle time after which a member's turn ends while its group has connected members of a worse latency class,
/// in microseconds. It exceeds the pause of a program that reads a result and submits its next work.
const IDLE_PREFERRED_US: u32 = 150;

impl Core {
    /// Executes the scheduler's orders.
    pub(super) fn carry_out_orders(&mut self) {
        loop {
            let orders = self.turns.take_orders();
            if orders.is_empty() {
                return self.tell_other_cards();
            }
            for order in orders {
                let order = match order {
                    GangOrder::Turn(order) => order,
                    GangOrder::Step(tenant) => {
                        self.step(tenant);
                        continue;
                    }
                };
                match order {
                    Order::Grant(tenant) => self.grant(tenant),
                    Order::Recall(tenant) => self.recall(tenant),
                    Order::Yield(tenant) => self.ask_to_yield(tenant),
                    Order::Overdue { tenant, ran_ns } => {
                        if !self.spares(tenant, ran_ns) {
                            self.overdue(tenant);
                        }
                    }
                    Order::Quarantined(tenant) => self.record_quarantine(tenant),
                }
            }
        }
    }

    fn grant(&mut self, tenant: TenantId) {
        if !self.turns.turns().has_turn(tenant) {
            // The tenant was removed after the order was given.
            return;
        }
        self.machine.residency.worked(tenant, self.clock);
        let sessions: Vec<_> = self.sessions_of(tenant).collect();
        for session in sessions {
            self.run(session);
        }
        self.look_whether_ended(tenant);
    }

    /// Opens the gate of a process, or updates the terms if the gate is open.
    fn run(&mut self, id: SessionId) {
        let Some(tenant) = self.sessions.get(&id).and_then(|session| session.tenant) else { return };
        let (terms, clock) = (self.terms(tenant), self.clock);
        let Some(session) = self.sessions.get_mut(&id).filter(|session| session.can_run()) else { return };
        if session.run.is_none() {
            (session.opened_at, session.run_since) = (clock, clock);
        }
        session.told = (terms.run_ahead_us, terms.idle_us, terms.report_us);
        session.turn += 1;
        (session.run, session.waiting) = (Some(session.turn), false);
        let run = Run { turn: session.turn, ..terms };
        // In a group, the other members would start before its work has ended, and slow down the last part.
        let yields = session.pauses && session.version >= VERSION_CONCURRENT && run.report_us == 0;
        tracing::trace!(session = id.0, ?run, "a turn begins");
        self.send(id, FromOwner::Run(run));
        let class = |id: TenantId| self.tenants.get(&id).map(|known| known.spec.time.class);
        let mut present = self.sessions.values().filter_map(|session| session.tenant);
        if yields && present.any(|other| class(other) > class(tenant)) {
            self.send(id, FromOwner::Yield { card: 0, turn: run.turn });
        }
    }

    /// Returns the current terms of a tenant's turns. The work of the only connected tenant is not measured if all of
    /// its memory is on the card. Otherwise, the tenant's work in flight is limited, because moving memory to the card
    /// waits for this work.
    pub(super) fn terms(&self, tenant: TenantId) -> Run {
        let present = || self.sessions.values().filter_map(|session| session.tenant);
        let away = self.table.vms().any(|(vm, account)| vm == tenant && account.host > 0);
        let alone = present().all(|other| other == tenant) && !away;
        let class = |id: &TenantId| self.tenants.get(id).map(|known| known.spec.time.class);
        let urgent = present().any(|other| class(&other) < class(&tenant));
        let (most, urgently) = (self.config.run_ahead_us, self.config.run_ahead_urgent_us);
        let ahead = if urgent { most.min(urgently) } else { most };
        let unless_alone = |us| if alone { 0 } else { us };
        let mut others = present().filter(|other| *other != tenant);
        let waits = |id: TenantId| self.machine.residency.is_held(id);
        // No other tenant can use the card, so ending the turn in each pause would only add the cost of starting the
        // next one.
        let undisturbed = self.machine.residency.turn().is_some() && others.all(waits);
        let idle = if undisturbed { self.config.idle_us.max(IDLE_UNDISTURBED_US) } else { self.config.idle_us };
        let ahead = if undisturbed { ahead.max(RUN_AHEAD_UNDISTURBED_US) } else { ahead };
        // Limit a member that is ahead of its share of the group's work, so that the others get the card sooner.
        let ahead = if self.turns.turns().is_ahead(tenant) { ahead.min(urgently) } else { ahead };
        let group = |id| self.turns.turns().membership(id).filter(|of_it| of_it.joined).map(|of_it| of_it.group);
        let own = group(tenant);
        let waits_for_it = |other: TenantId| class(&other) > class(&tenant) && group(other) == own;
        let preferred = own.is_some() && present().any(waits_for_it);
        let idle = if preferred { idle.min(IDLE_PREFERRED_US) } else { idle };
        // A member of a better class waits for these reports while it is ahead.
        let interval_us = if urgent { REPORT_INTERVAL_US / 4 } else { REPORT_INTERVAL_US };
        // Another member may join the group's turns at any time.
        let in_group = |id| self.turns.turns().membership(id).map(|of_it| of_it.group) == own;
        let is_member = own.is_some() && present().any(|other| other != tenant && in_group(other));
        let report_us = if is_member { unless_alone(interval_us) } else { 0 };
        let (run_ahead_us, idle_us) = (unless_alone(ahead), unless_alone(idle));
        Run { card: 0, turn: 0, length_us: 0, run_ahead_us, idle_us, report_us }
    }

    /// Updates the terms of processes with open gates, because a process was added or removed, or a tenant's class has
    /// changed.
    pub(super) fn renew_terms(&mut self) {
        let tenants: Vec<TenantId> = self.tenants.keys().copied().collect();
        self.renew_terms_of(&tenants);
    }

    /// Updates the terms of the processes of the given tenants.
    fn renew_terms_of(&mut self, tenants: &[TenantId]) {
        // Computing a tenant's terms visits all of its processes, so do it once per tenant.
        let mut by_tenant: BTreeMap<TenantId, Run> = BTreeMap::new();
        let mut concerned = Vec::new();
        for (&id, session) in self.sessions.iter().filter(|(_, session)| session.run.is_some()) {
            let Some(tenant) = session.tenant.filter(|tenant| tenants.contains(tenant)) else { continue };
            if !self.turns.continues(tenant) {
                continue;
            }
            let terms = by_tenant.entry(tenant).or_insert_with(|| self.terms(tenant));
            if session.told != (terms.run_ahead_us, terms.idle_us, terms.report_us) {
                concerned.push(id);
            }
        }
        for session in concerned {
            self.run(session);
        }
    }

    fn recall(&mut self, tenant: TenantId) {
        let sessions: Vec<_> = self.sessions_of(tenant).collect();
        for id in sessions {
            let open = self.sessions.get(&id).and_then(|session| Some((session.run?, session.version)));
            if let Some((turn, version)) = open {
                tracing::trace!(session = id.0, turn, "a turn is recalled");
                let drains = version >= VERSION_GANGS && self.turns.gang_of(tenant).is_some();
                let (stop, drain) = (FromOwner::Stop { card: 0, turn }, FromOwner::Drain { card: 0, turn });
                self.send(id, if drains { drain } else { stop });
            }
        }
        self.look_whether_ended(tenant);
    }

    /// Requests that a tenant's programs yield when they wait for a result.
    fn ask_to_yield(&mut self, tenant: TenantId) {
        let understands = |id: &SessionId| self.sessions.get(id).is_some_and(|s| s.version >= VERSION_CONCURRENT);
        let sessions: Vec<_> = self.sessions_of(tenant).filter(understands).collect();
        for id in sessions {
            if let Some(turn) = self.sessions.get(&id).and_then(|session| session.run) {
                self.send(id, FromOwner::Yield { card: 0, turn });
            }
        }
    }

    pub(super) fn overdue(&mut self, tenant: TenantId) {
        let since = |id: SessionId| {
            let session = self.sessions.get(&id).filter(|session| session.run.is_some())?;
            Some((id, session.opened_at))
        };
        let mut sessions: Vec<_> = self.sessions_of(tenant).filter_map(since).collect();
        if self.turns.gang_of(tenant).is_some() {
            // An overrunning turn of a gang can include further turns, so the limit applies to each process's work.
            let limit = self.tenants.get(&tenant).and_then(|known| known.spec.time.max_run_ns).unwrap_or(u64::MAX);
            let later = sessions.extract_if(.., |(_, at)| self.clock.saturating_sub(*at) < limit);
            if let Some(next) = later.map(|(_, at)| at.saturating_add(limit)).min() {
                self.deadlines.set(Deadline::SecondLimit(tenant), next);
            }
            if sessions.is_empty() || !self.other_owners_respond(tenant) {
                return;
            }
        }
        for (session, _) in sessions {
            // A stopped process cannot reply, so it is not abandoned.
            self.actions.push(Action::LookAt { session, is_overdue: true });
        }
    }

    pub(super) fn waiting(&mut self, id: SessionId, tenant: TenantId) {
        self.machine.residency.worked(tenant, self.clock);
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.waiting = true;
        let pause = session.idle_since.take().map(|since| self.clock.saturating_sub(since));
        session.pauses = pause.map_or(session.pauses, |ns| ns >= PAUSE_NS);
        if !std::mem::replace(&mut session.has_asked, true) {
            self.renew_concurrency(tenant);
        }
        if !self.sessions.get(&id).is_some_and(Session::can_run) {
            return;
        }
        if self.turns.continues(tenant) {
            return self.run(id);
        }
        if self.turns.gang_of(tenant).is_some() || !self.turns.turns().has_turn(tenant) {
            self.turns.wants(tenant, self.now());
        }
    }

    pub(super) fn stopped(&mut self, id: SessionId, tenant: TenantId, turn: u32, usage: Usage, waiting: bool) {
        self.used(id, tenant, usage);
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if session.stopped_in == Some(turn) {
            // Do not charge later use against the time for which the process was stopped.
            (session.stopped_in, session.unused_ns) = (None, 0);
            if waiting || session.waiting {
                self.waiting(id, tenant);
            }
            return;
        }
        if session.run != Some(turn) {
            // The process stopped on its own while new terms were in transit. The new terms apply.
            session.opened_at = self.clock;
            return;
        }
        (session.run, session.waiting) = (None, waiting);
        (session.idle_since, session.pauses) = ((!waiting).then_some(self.clock), session.pauses && !waiting);
        tracing::trace!(session = id.0, turn, waiting, "a turn has ended");
        if waiting && self.turns.continues(tenant) {
            return self.run(id);
        }
        self.look_whether_ended(tenant);
    }

    /// Handles the notice that a turn that must be returned is about to end: notifies the next tenant, to minimize the
    /// card's idle time. The next tenant's work must not start before the turn ends, or the hardware would time-slice
    /// between both tenants. Only the first notice of a turn counts, because each costs processor time.
    pub(super) fn ending(&mut self, id: SessionId, tenant: TenantId, turn: u32, in_us: u32) {
        let is_it = self.sessions.get(&id).is_some_and(|it| it.run == Some(turn) && it.announced != Some(turn));
        let open = self.sessions_of(tenant).filter(|id| self.sessions.get(id).is_some_and(|s| s.run.is_some())).count();
        if !is_it || open > 1 {
            return;
        }
        let next = self.turns.turns().next_after(tenant, self.now());
        if next.is_empty() {
            return;
        }
        if let Some(session) = self.sessions.get_mut(&id) {
            session.announced = Some(turn);
        }
        tracing::trace!(session = id.0, turn, in_us, "a turn is about to end");
        let in_us = in_us.min(ATTENDED_US);
        let waits = |id: &SessionId| {
            let waiting = |session: &super::Session| session.waiting && session.version >= VERSION_HANDOVER;
            self.sessions.get(id).is_some_and(waiting)
        };
        let sessions: Vec<_> = next.into_iter().flat_map(|next| self.sessions_of(next)).filter(waits).collect();
        for session in sessions {
            self.send(session, FromOwner::Soon { card: 0, in_us });
        }
        self.actions.push(Action::Attend { ns: u64::from(in_us + ATTENDED_US / 2) * 1000 });
    }

    /// Charges the use that a process reports, up to the time for which its gate was open without reported use.
    pub(super) fn used(&mut self, id: SessionId, tenant: TenantId, usage: Usage) {
        let clock = self.clock;
        let has_run = |session: &&mut Session| session.run.is_some() || session.stopped_in.is_some();
        let Some(session) = self.sessions.get_mut(&id).filter(has_run) else { return };
        session.unused_ns += clock.saturating_sub(std::mem::replace(&mut session.run_since, clock));
        let busy = usage.busy_ns.min(session.unused_ns);
        session.unused_ns -= busy;
        let Some(known) = self.tenants.get_mut(&tenant) else { return };
        known.busy_ns += busy;
        known.copy_ns += usage.copy_ns.min(busy);
        known.launches += u64::from(usage.launches);
        let now = self.now();
        self.turns.with_turns(now, |turns| turns.used(tenant, busy, usage.launches.into(), now));
    }

    /// Handles a report during a turn. The report may change the terms.
    pub(super) fn reports(&mut self, id: SessionId, tenant: TenantId, usage: Usage) {
        self.used(id, tenant, usage);
        if self.turns.turns().is_joined(tenant) {
            self.renew_terms_of(&[tenant]);
        }
    }

    /// Ends a tenant's turn if all of the tenant's gates are closed.
    pub(super) fn look_whether_ended(&mut self, tenant: TenantId) {
        let of_it = || self.sessions.values().filter(|session| session.tenant == Some(tenant));
        if of_it().any(|session| session.run.is_some()) {
            return;
        }
        let more = of_it().any(|session| session.waiting && session.can_run());
        if self.turns.gang_of(tenant).is_some() || self.turns.is_busy(tenant) {
            let now = self.now();
            self.turns.ended(tenant, now, more, now);
            self.is_not_spared_any_more(tenant);
        }
    }

    pub(super) fn tick(&mut self) {
        self.turns.tick(self.now());
        self.look_at_overrunning_members();
        self.machine.relocations.tick(self.clock);
        self.relocate();
        if !self.misplaced.is_empty() || self.machine.next_round_ns(&self.table).is_some() {
            self.needs_plan = true;
        }
    }

    /// Reports the tenants that have work, and starts, changes or ends memory quanta.
    pub(super) fn take_quanta(&mut self) {
        // A program that waits for memory is not idle.
        let is_working = |tenant: &TenantId| self.turns.is_busy(*tenant) || self.waits_for_memory(*tenant);
        let working = self.tenants.keys().copied().filter(is_working).collect();
        // The driver does not count kernels' reads over the link.
        let running = self.tenants.keys().copied().filter(|tenant| self.turns.turns().has_turn(*tenant)).collect();
        let (traffic, scheduler) = (Traffic::Assumed(running), self.turns.turns().scheduler());
        let report = Report { working, traffic, scheduler, counts_work: false };
        self.machine.begin_round(&self.table, self.clock, &report);
        self.carry_out_changes();
    }

    /// Returns true if a program of the tenant waits for memory that it has requested.
    pub(super) fn waits_for_memory(&self, tenant: TenantId) -> bool {
        let mut of_it = self.sessions.values().filter(|session| session.tenant == Some(tenant));
        of_it.any(|session| !session.pending.is_empty())
    }

    /// Stops tenants during another tenant's quantum, and lets them run again afterwards. Makes the holder compete for
    /// time with the settings of all members.
    pub(super) fn carry_out_changes(&mut self) {
        let now = self.now();
        let Changes { holds, competitors } = self.machine.take_changes(self.turns.turns().scheduler());
        holds.into_iter().for_each(|(tenant, _)| self.pause_as_due(tenant));
        for (id, params) in competitors {
            self.turns.with_turns(now, |turns| turns.compete(id, params, now));
        }
    }

    /// Pauses a tenant's turns if its memory is moving or it waits for its quantum, and resumes them otherwise. Does
    /// not pause turns that the tenant's work on another card may wait for.
    pub(super) fn pause_as_due(&mut self, id: TenantId) {
        if !self.tenants.contains_key(&id) {
            return;
        }
        let now = self.now();
        let is_paused = self.machine.is_paused(id) && !self.gang_quanta.is_stuck_elsewhere(id);
        self.turns.pause(id, is_paused, now);
    }
}
