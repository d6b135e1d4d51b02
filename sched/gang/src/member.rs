//! State of a gang on one of its cards, and the execution of its home's commands.

use super::{Body, CardId, CardState, Command, GangConfig, GangCounts, GangId, GangOrder, GangTurns};
use sched::turns::Order;
use sched::{Nanos, TenantId};
use std::collections::BTreeSet;

/// Multiple of the gather limit after which a card ends a gather or a drained turn by itself, because the gang's home
/// has probably stopped.
const PATIENCE_FACTOR: u64 = 2;

/// Stage of a gang on one card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The gang does not compete.
    Idle,
    /// The gang's slice is in the card's queue.
    Queued,
    /// The card's accounts have selected the gang.
    Offered,
    /// The gang is waiting for a younger gang to release the card.
    Contending { since: Nanos },
    /// The next turn is reserved for the gang.
    Reserved { since: Nanos },
    /// The card is available for the gang, but not all of the gang's other cards are ready.
    Ready { since: Nanos },
    /// The gang has its turn. Its gate is open, or closed because the gang has no work here.
    Running { open: bool, since: Nanos },
    /// The gate must close, but work is in flight.
    Ending { since: Nanos },
    /// The gate is closed and the work has ended. The gang keeps the card until its other cards have drained.
    Drained { since: Nanos },
    /// The gang's work has taken so long that other tenants no longer wait for it.
    Stuck,
}

/// State of a gang on this card.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) tenant: TenantId,
    pub(super) home: CardId,
    pub(super) cards: BTreeSet<CardId>,
    pub(super) stage: Stage,
    pub(super) counts: GangCounts,
    /// Number of the last numbered command from the home.
    round: u64,
    /// Timestamp of the request that the last gather served.
    age: u64,
    /// True if the home has instructed the gang to compete.
    competes: bool,
    paused: bool,
    /// True if the gang has work on this card.
    pub(super) wants: bool,
    /// True if an older gang is waiting for the card.
    contested: bool,
    /// True if work from an earlier turn is still in flight.
    pub(super) is_stuck: bool,
    /// Time at which the gang started to wait for its turn.
    asked: Option<Nanos>,
    /// Last report sent to the home.
    reported: Option<(u64, CardState, bool)>,
}

impl Member {
    pub(super) fn new(tenant: TenantId, home: CardId, cards: BTreeSet<CardId>) -> Self {
        Self {
            tenant,
            home,
            cards,
            stage: Stage::Idle,
            counts: GangCounts::default(),
            round: 0,
            age: 0,
            competes: false,
            paused: false,
            wants: false,
            contested: false,
            is_stuck: false,
            asked: None,
            reported: None,
        }
    }

    /// Resets the state that is synchronized with the home, because the connection to the home was lost.
    pub(super) fn forget_home(&mut self) {
        (self.round, self.reported) = (0, None);
    }

    /// Returns the time at which [`GangTurns::expire`] ends the current stage, if the stage has a time limit.
    pub(super) fn expires(&self, config: &GangConfig) -> Option<Nanos> {
        match self.stage {
            Stage::Contending { since } | Stage::Reserved { since } | Stage::Ready { since } => {
                Some(since.after(config.gather_ns.saturating_mul(PATIENCE_FACTOR)))
            }
            Stage::Drained { since } => Some(since.after(config.gather_ns.saturating_mul(PATIENCE_FACTOR))),
            Stage::Ending { since } => Some(since.after(config.gather_ns)),
            // The underlying turns have already recalled this turn, and will not recall it again.
            Stage::Running { since, .. } if self.is_stuck => Some(since.after(config.gather_ns)),
            Stage::Idle | Stage::Queued | Stage::Offered | Stage::Running { .. } | Stage::Stuck => None,
        }
    }

    /// Returns true if the card is being gathered for the gang, or is ready and waits for the gang's other cards.
    fn has_card(&self) -> bool {
        matches!(self.stage, Stage::Reserved { .. } | Stage::Ready { .. }) && !self.is_stuck
    }

    fn is_contending(&self) -> bool {
        matches!(self.stage, Stage::Contending { .. })
    }

    pub(super) fn state(&self) -> CardState {
        match self.stage {
            Stage::Idle | Stage::Queued => CardState::Waiting,
            Stage::Offered => CardState::Offered,
            Stage::Reserved { .. } | Stage::Ready { .. } if self.contested => CardState::Contested,
            Stage::Contending { .. } | Stage::Reserved { .. } => CardState::Gathering,
            Stage::Ready { .. } => CardState::Ready,
            Stage::Running { open: true, .. } => CardState::Running,
            Stage::Running { open: false, .. } => CardState::Resting,
            Stage::Ending { .. } => CardState::Ending,
            Stage::Drained { .. } => CardState::Drained,
            Stage::Stuck => CardState::Stuck,
        }
    }
}

impl GangTurns {
    /// Reports a gang's state to its home if it has changed or `always` is true.
    pub(super) fn report(&mut self, gang: GangId, always: bool) {
        let Some(member) = self.members.get_mut(&gang) else { return };
        let report = (member.round, member.state(), member.wants);
        if member.reported.replace(report) == Some(report) && !always {
            return;
        }
        let home = member.home;
        let (round, state, wants) = report;
        self.send(home, gang, Body::Report { round, state, wants });
    }

    /// Reports every gang whose state has changed.
    pub(super) fn report_changes(&mut self) {
        let gangs: Vec<GangId> = self.members.keys().copied().collect();
        for gang in gangs {
            self.report(gang, false);
        }
    }

    /// Records that the card's accounts have selected a tenant, and reports this to the gang's home. Homes thus receive
    /// the offers of a card in the order in which its accounts have selected the gangs.
    pub(super) fn offered(&mut self, tenant: TenantId) {
        let found = self.members.iter_mut().find(|(_, member)| member.tenant == tenant);
        if let Some((&gang, member)) = found.filter(|(_, member)| member.stage == Stage::Queued) {
            member.stage = Stage::Offered;
            self.report(gang, false);
        }
    }

    /// Forwards an order from the underlying turns, or changes the gang's stage if the order is for a gang.
    pub(super) fn pass_on(&mut self, order: Order, now: Nanos) {
        let (Order::Grant(tenant) | Order::Recall(tenant) | Order::Yield(tenant)) = order else {
            return self.order(order);
        };
        let Some((&gang, member)) = self.members.iter_mut().find(|(_, member)| member.tenant == tenant) else {
            return self.order(order);
        };
        match (order, member.stage) {
            (Order::Grant(_), Stage::Reserved { .. }) => member.stage = Stage::Ready { since: now },
            // The gather ended after the turn was granted.
            (Order::Grant(_), _) => self.release(gang, now, now),
            (Order::Recall(_), Stage::Running { open: true, .. }) => {
                member.stage = Stage::Ending { since: now };
                self.order(order);
            }
            (Order::Recall(_), Stage::Ready { .. } | Stage::Running { open: false, .. }) => self.stop(gang, now),
            // Ignore `Yield`, because this card cannot determine whether the gang's program waits for another card.
            _ => {}
        }
    }

    pub(super) fn member_wants(&mut self, gang: GangId, now: Nanos) {
        let Some(member) = self.members.get_mut(&gang) else { return };
        member.wants = true;
        member.asked.get_or_insert(now);
        if let Stage::Running { open: false, since } = member.stage {
            member.counts.rest_ns += now.since(since);
            (member.stage, member.asked) = (Stage::Running { open: true, since: now }, None);
            let tenant = member.tenant;
            self.order(Order::Grant(tenant));
        }
    }

    pub(super) fn member_ended(&mut self, gang: GangId, ended: Nanos, more: bool, now: Nanos) {
        let Some(member) = self.members.get_mut(&gang) else { return };
        let tenant = member.tenant;
        (member.wants, member.asked) = (more, more.then_some(now));
        match member.stage {
            Stage::Running { open: true, .. } if more => {
                member.asked = None;
                self.order(Order::Grant(tenant));
            }
            Stage::Running { open: true, .. } => member.stage = Stage::Running { open: false, since: now },
            Stage::Ending { .. } if !self.reachable.contains(&member.home) => self.release(gang, ended, now),
            Stage::Ending { .. } => member.stage = Stage::Drained { since: now },
            Stage::Stuck => self.release(gang, ended, now),
            Stage::Ready { .. } if member.is_stuck => self.release(gang, ended, now),
            _ => {}
        }
    }

    /// Ends a gang's turn on this card.
    fn release(&mut self, gang: GangId, ended: Nanos, now: Nanos) {
        let Some(member) = self.members.get_mut(&gang) else { return };
        member.is_stuck = false;
        let tenant = member.tenant;
        self.turns.ended(tenant, ended, false, now);
        self.compete(gang, now);
    }

    fn order(&mut self, order: Order) {
        self.orders.push(GangOrder::Turn(order));
    }

    pub(super) fn pause_member(&mut self, gang: GangId, paused: bool, now: Nanos) {
        let Some(member) = self.members.get_mut(&gang).filter(|member| member.paused != paused) else { return };
        member.paused = paused;
        let tenant = member.tenant;
        if paused {
            self.stop(gang, now);
            self.withdraw(gang, now);
        }
        self.turns.pause(tenant, paused, now);
        let Some(member) = self.members.get_mut(&gang).filter(|member| member.stage == Stage::Idle) else { return };
        if paused && member.competes {
            // The end of the pause queues the gang again, without starting new slices of others.
            member.stage = Stage::Queued;
            self.turns.wants(tenant, now);
        } else if !paused {
            self.compete(gang, now);
        }
    }

    /// Executes a command of the gang's home.
    pub(super) fn obey(&mut self, gang: GangId, round: u64, command: Command, now: Nanos) {
        let Some(member) = self.members.get_mut(&gang) else { return };
        match command {
            Command::Report => self.report(gang, true),
            Command::Compete => {
                member.competes = true;
                member.asked.get_or_insert(now);
                if member.stage == Stage::Idle {
                    self.compete(gang, now);
                }
            }
            Command::Rest => {
                member.competes = false;
                member.asked = member.asked.filter(|_| member.wants);
                self.withdraw(gang, now);
            }
            Command::Gather { age } => {
                (member.round, member.age) = (round, age);
                self.gather(gang, now);
            }
            Command::Run if round == member.round => self.open(gang, now),
            Command::Stop if round == member.round => self.stop(gang, now),
            Command::Step => {
                member.round = round;
                if let Stage::Drained { .. } = member.stage {
                    member.stage = Stage::Ending { since: now };
                    let tenant = member.tenant;
                    self.orders.push(GangOrder::Step(tenant));
                }
            }
            Command::Release => {
                member.round = round;
                if let Stage::Drained { .. } = member.stage {
                    self.release(gang, now, now);
                }
            }
            // The command belongs to another gather.
            Command::Run | Command::Stop => {}
        }
    }

    /// Reserves the next turn for a gang, lets the gang wait for a younger gang to release the card, or rejects the
    /// gather. A rejected gang must wait for its next offer.
    fn gather(&mut self, gang: GangId, now: Nanos) {
        let Some(member) = self.members.get(&gang) else { return };
        let (tenant, request, is_offered) = (member.tenant, (member.age, gang), member.stage == Stage::Offered);
        match member.stage {
            Stage::Offered | Stage::Queued => {}
            // The gang's work is already on the card, in addition to the work of other tenants.
            Stage::Stuck => return self.set_stage(gang, Stage::Ready { since: now }),
            _ => return,
        }
        if let Some(holder) = self.find(Member::has_card) {
            if self.request(holder) < request {
                return self.refuse(gang, now);
            }
            if let Some(other) = self.find(Member::is_contending) {
                if self.request(other) < request {
                    return self.refuse(gang, now);
                }
                self.refuse(other, now);
            }
            self.withdraw(gang, now);
            self.set_stage(gang, Stage::Contending { since: now });
            if let Some(holder) = self.members.get_mut(&holder) {
                holder.contested = true;
            }
        } else if is_offered && self.turns.reserve(tenant, now) {
            self.reserved(gang, now);
        } else {
            self.refuse(gang, now);
        }
    }

    /// Marks the next turn as reserved for a gang. Offers to other gangs become invalid, and these gangs compete again.
    fn reserved(&mut self, gang: GangId, now: Nanos) {
        self.set_stage(gang, Stage::Reserved { since: now });
        let offered = |(_, member): &(&GangId, &Member)| member.stage == Stage::Offered;
        let others: Vec<GangId> = self.members.iter().filter(offered).map(|(&other, _)| other).collect();
        for other in others {
            self.compete(other, now);
        }
    }

    /// Rejects a gather.
    fn refuse(&mut self, gang: GangId, now: Nanos) {
        if let Some(member) = self.members.get_mut(&gang) {
            member.counts.cancelled += 1;
        }
        self.withdraw(gang, now);
        self.compete(gang, now);
    }

    /// Opens a gang's gate.
    fn open(&mut self, gang: GangId, now: Nanos) {
        let Some(member) = self.members.get_mut(&gang) else { return };
        let Stage::Ready { since } = member.stage else { return };
        member.count_gather(now.since(since));
        member.counts.turns += 1;
        let asked = member.asked.take().unwrap_or(now);
        member.counts.waits.add(now.since(asked));
        // Assume that the gang has work here. Processes without work close the gate immediately.
        (member.stage, member.contested, member.wants) = (Stage::Running { open: true, since: now }, false, true);
        let tenant = member.tenant;
        self.turns.open(tenant, now);
        self.order(Order::Grant(tenant));
        if let Some(contender) = self.find(Member::is_contending) {
            self.refuse(contender, now);
        }
    }

    /// Ends a gang's turn or its gather.
    fn stop(&mut self, gang: GangId, now: Nanos) {
        let Some(member) = self.members.get_mut(&gang) else { return };
        let tenant = member.tenant;
        match member.stage {
            Stage::Idle
            | Stage::Queued
            | Stage::Offered
            | Stage::Ending { .. }
            | Stage::Drained { .. }
            | Stage::Stuck => {}
            Stage::Running { open: true, .. } => {
                // Order the recall here, because `give_back` has no effect on a stuck turn, which was recalled earlier.
                member.stage = Stage::Ending { since: now };
                self.turns.give_back(tenant, now);
                self.order(Order::Recall(tenant));
            }
            Stage::Running { open: false, since } => {
                member.counts.rest_ns += now.since(since);
                member.stage = Stage::Drained { since: now };
            }
            Stage::Ready { since } if member.is_stuck => {
                member.count_gather(now.since(since));
                member.stage = Stage::Stuck;
            }
            Stage::Contending { .. } => {
                member.counts.cancelled += 1;
                self.compete(gang, now);
            }
            Stage::Reserved { .. } => {
                member.counts.cancelled += 1;
                self.turns.unreserve(tenant);
                self.admit_contender(now);
                self.compete(gang, now);
            }
            Stage::Ready { since } => {
                member.counts.cancelled += 1;
                member.count_gather(now.since(since));
                // Reserve the next turn for the contending gang before this turn ends.
                self.admit_contender(now);
                self.release(gang, now, now);
            }
        }
    }

    /// Reserves the next turn for the gang that is waiting for a younger gang to release the card, or rejects that
    /// gang.
    fn admit_contender(&mut self, now: Nanos) {
        let Some(gang) = self.find(Member::is_contending) else { return };
        let Some(tenant) = self.members.get(&gang).map(|member| member.tenant) else { return };
        if self.turns.reserve(tenant, now) {
            self.reserved(gang, now);
        } else {
            self.refuse(gang, now);
        }
    }

    /// Makes a gang idle on this card, and then queues it if its home requires this and the gang is not paused.
    fn compete(&mut self, gang: GangId, now: Nanos) {
        let Some(member) = self.members.get_mut(&gang) else { return };
        (member.stage, member.contested) = (Stage::Idle, false);
        if member.competes && !member.paused {
            member.stage = Stage::Queued;
            let tenant = member.tenant;
            self.turns.wants(tenant, now);
        }
    }

    /// Removes a gang from the card's queue, and invalidates its offer.
    fn withdraw(&mut self, gang: GangId, now: Nanos) {
        let Some(member) = self.members.get_mut(&gang) else { return };
        if matches!(member.stage, Stage::Queued | Stage::Offered | Stage::Contending { .. }) {
            member.stage = Stage::Idle;
            let tenant = member.tenant;
            self.turns.ended(tenant, now, false, now);
        }
    }

    /// Stops all activity of a gang on this card, because its home is unreachable.
    pub(super) fn abandon(&mut self, gang: GangId, now: Nanos) {
        if let Some(member) = self.members.get_mut(&gang) {
            member.competes = false;
        }
        self.stop(gang, now);
        self.withdraw(gang, now);
        if let Some(Stage::Drained { .. }) = self.members.get(&gang).map(|member| member.stage) {
            self.release(gang, now, now);
        }
    }

    /// Ends gathers and drained turns whose homes do not respond, and stops waiting for work that does not end.
    pub(super) fn expire(&mut self, now: Nanos) {
        let late = |member: &Member| member.expires(&self.config).is_some_and(|at| at <= now);
        let gangs: Vec<GangId> = self.members.iter().filter(|(_, m)| late(m)).map(|(&gang, _)| gang).collect();
        for gang in gangs {
            match self.members.get_mut(&gang) {
                Some(Member { stage: stage @ Stage::Ending { .. }, is_stuck, .. }) => {
                    (*stage, *is_stuck) = (Stage::Stuck, true);
                }
                Some(Member { stage: Stage::Drained { .. }, .. }) => self.release(gang, now, now),
                _ => self.stop(gang, now),
            }
        }
    }

    fn find(&self, wanted: impl Fn(&Member) -> bool) -> Option<GangId> {
        self.members.iter().find(|(_, member)| wanted(member)).map(|(&gang, _)| gang)
    }

    /// Returns a key for a gang's request that sorts the oldest request first.
    fn request(&self, gang: GangId) -> (u64, GangId) {
        (self.members.get(&gang).map_or(u64::MAX, |member| member.age), gang)
    }

    fn set_stage(&mut self, gang: GangId, stage: Stage) {
        if let Some(member) = self.members.get_mut(&gang) {
            (member.stage, member.contested) = (stage, false);
        }
    }
}

impl Member {
    fn count_gather(&mut self, ns: u64) {
        self.counts.gather_ns += ns;
        self.counts.longest_gather_ns = self.counts.longest_gather_ns.max(ns);
    }
}
