//! Gang scheduling. A gang is a tenant with several cards that gets its turns on all of them at the same time.
//!
//! Kernels of a collective operation spin until their peers on the other cards run. If turns were independent, two
//! tenants could deadlock, because each has the turn on one card and waits for the turn on the other card. All gates of
//! a gang therefore open at the same time. Each card has a [`GangTurns`] on top of its [`GroupTurns`], with its own
//! accounts. The *home* of a gang is its card with the lowest number. There, `home` coordinates the gang through
//! messages. Cards share no other state, so a failed or stopped card affects only its own gangs.
//!
//! Procedure:
//! 1. A card whose accounts select a gang *offers* itself to the gang. In the meantime, the next tenant gets the turn
//!    (`turns`).
//! 2. When all cards of a gang have offered themselves, its home *gathers* them. Each card recalls the holder of its
//!    turn, and is *ready* when the holder has returned the card or has overrun.
//! 3. The gates open when all cards are ready. A gather that is rejected or lasts longer than [`GangConfig::gather_ns`]
//!    is *cancelled* on all cards.
//! 4. A card serves one gather at a time. An *older* gang has priority over a younger gang that is still gathering: the
//!    card notifies the younger gang's home, which cancels its gather unless it has already opened the gates. A younger
//!    gang is rejected. A gang's age is the time of its request, and a cancelled gather does not change it.
//! 5. The turn ends on all cards when one card recalls it or the gang has no work. Kernels on one card may wait for
//!    kernels that are blocked by the closed gate of another card. The gang therefore keeps cards that have *drained*,
//!    and these cards admit one more submission at a time (a *step*). When all cards have drained, they are released at
//!    the same time. A card that does not drain within `gather_ns` is *stuck*: other tenants use it in the meantime,
//!    and it is considered ready for the gang's next turn, in which the missing kernels run.
//!
//! No deadlock is possible. A running gang does not wait for another gang, and its turn ends after a slice if another
//! tenant is due. A gathering gang waits at most `overrun_ns` for recalled holders. It does not wait for an older gang,
//! and a younger gang releases the card after one message. The end of a turn waits at most `gather_ns` for the gang's
//! own cards. No gang starves: the oldest gathering gang is never rejected, and each card's accounts eventually make it
//! due. Ages are Lamport timestamps, so the cards need no common clock.
//!
//! A card charges a gang from the moment when the card is ready, so the gang also pays for the time during which its
//! cards wait for each other. [`GangView`] reports this time.
//!
//! Like [`GroupTurns`], this crate does no I/O. Its inputs are calls, messages, and the time, and its outputs are
//! [`Order`]s and messages. Messages between two cards arrive in order until the connection ends ([`GangTurns::lost`]).
//! Start reading at `home`, which implements the phases of a turn. `member` implements the stages of a gang on one
//! card.
//!
//! Sources: D. Feitelson and L. Rudolph, *Gang scheduling performance benefits for fine-grain synchronization* (1992);
//! D. Rosenkrantz et al., *System level concurrency control for distributed database systems* (1978): wound-wait.

#![forbid(unsafe_code)]

mod home;
mod member;
mod messages;

use home::Home;
use member::{Member, Stage};
use sched::groups::GroupTurns;
use sched::turns::Order;
use sched::{Histogram, Nanos, TenantId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub use messages::{Body, CardId, CardState, Command, GangId, Message};

/// Time limits for gangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GangConfig {
    /// Maximum duration of a gather, in ns. Must exceed [`sched::turns::TurnsConfig::overrun_ns`], which is the maximum
    /// wait for a recalled turn.
    pub gather_ns: u64,
    /// Time for which drained cards wait for the gang's other cards at the end of a turn before they admit one more
    /// submission, in ns.
    pub step_ns: u64,
}

impl Default for GangConfig {
    /// Returns a gather limit of 45 ms (1.5 times the limit for a recalled turn), and a step interval of 0.25 ms, which
    /// exceeds the latency of two messages between owners.
    fn default() -> Self {
        Self { gather_ns: 45_000_000, step_ns: 250_000 }
    }
}

/// An action on a tenant, or a message to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GangOrder {
    /// An order that also exists for single-card turns.
    Turn(Order),
    /// Open the gang's gate for one submission of each process. The processes then report the end of their work, as
    /// after a recall. Processes without work report immediately.
    Step(TenantId),
}

/// Statistics of a gang on one card.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GangCounts {
    /// Number of turns for which the card was successfully gathered.
    pub turns: u64,
    /// Number of gathers of this card that were cancelled or rejected.
    pub cancelled: u64,
    /// Total time for which the card was ready and waited for the gang's other cards, in ns.
    pub gather_ns: u64,
    /// Longest time for which the card was ready and waited for the other cards, in ns.
    pub longest_gather_ns: u64,
    /// Time during the gang's turns for which its gate on this card was closed because the gang had no work here, in
    /// ns.
    pub rest_ns: u64,
    /// Delays from the command to compete or the first work on this card, whichever is earlier, to the start of the
    /// gang's turn.
    pub waits: Histogram,
}

/// State of a gang on one card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GangView {
    /// The gang's cards.
    pub cards: BTreeSet<CardId>,
    /// The gang's cards that are unreachable from this card. The gang gets a turn only if its home can reach all cards.
    pub missing: BTreeSet<CardId>,
    /// True if the gang has work on this card.
    pub wants: bool,
    /// True if the gang's gate on this card is open.
    pub runs: bool,
    /// True if work from an earlier turn of the gang is still in flight.
    pub is_stuck: bool,
    /// True if this card's accounts have selected the gang, and the gang is waiting for its other cards.
    pub is_offered: bool,
    /// The gang's statistics on this card.
    pub counts: GangCounts,
}

/// Turns of one card, shared by single-card tenants and gangs.
#[derive(Debug)]
pub struct GangTurns {
    card: CardId,
    turns: GroupTurns,
    config: GangConfig,
    members: BTreeMap<GangId, Member>,
    /// Gangs with this card as their home.
    homes: BTreeMap<GangId, Home>,
    /// Reachable cards, which always include this card.
    reachable: BTreeSet<CardId>,
    /// Lamport clock of this card.
    clock: u64,
    orders: Vec<GangOrder>,
    messages: Vec<(CardId, Message)>,
    /// Queue of messages from this card to itself.
    own: VecDeque<Message>,
}

impl GangTurns {
    /// Creates the turns of a card without gangs. `turns` is for single tenants and groups.
    #[must_use]
    pub fn new(card: CardId, turns: GroupTurns, config: GangConfig) -> Self {
        Self {
            card,
            turns,
            config,
            members: BTreeMap::new(),
            homes: BTreeMap::new(),
            reachable: BTreeSet::from([card]),
            clock: 0,
            orders: Vec::new(),
            messages: Vec::new(),
            own: VecDeque::new(),
        }
    }

    /// Returns the underlying turns, for queries.
    #[must_use]
    pub fn turns(&self) -> &GroupTurns {
        &self.turns
    }

    /// Applies a change to the underlying turns that does not affect the gangs' work, such as adding a tenant or
    /// changing settings.
    pub fn with_turns<T>(&mut self, now: Nanos, change: impl FnOnce(&mut GroupTurns) -> T) -> T {
        let result = change(&mut self.turns);
        self.pump(now);
        result
    }

    /// Makes a tenant of the underlying turns the gang's member on this card. The tenant must not have work or a group.
    /// All cards must use the same gang number and set of cards. Returns false if `cards` does not include this card,
    /// if the gang or the tenant is already a member, or if the tenant is unknown or in a group.
    pub fn join(&mut self, gang: GangId, tenant: TenantId, cards: &BTreeSet<CardId>, now: Nanos) -> bool {
        let taken = self.members.contains_key(&gang) || self.gang_of(tenant).is_some();
        let Some(&home) = cards.first().filter(|_| cards.contains(&self.card) && !taken) else { return false };
        if !self.turns.set_offered(tenant, true) {
            return false;
        }
        self.members.insert(gang, Member::new(tenant, home, cards.clone()));
        if home == self.card {
            self.homes.insert(gang, Home::new(cards));
            self.greet(|id, _| id == gang, None);
        }
        self.report(gang, true);
        self.pump(now);
        true
    }

    /// Removes a gang from this card. The gang must have no work left. Its tenant remains, but its turns are no longer
    /// offered.
    pub fn leave(&mut self, gang: GangId, now: Nanos) {
        let Some(member) = self.members.get(&gang) else { return };
        let (tenant, home) = (member.tenant, member.home);
        self.abandon(gang, now);
        self.send(home, gang, Body::Report { round: 0, state: CardState::Absent, wants: false });
        self.members.remove(&gang);
        self.homes.remove(&gang);
        self.turns.set_offered(tenant, false);
        self.pump(now);
    }

    /// Records that another card is reachable. Must be called on both sides of a connection before they exchange
    /// messages.
    pub fn reached(&mut self, card: CardId, now: Nanos) {
        self.reachable.insert(card);
        self.greet(|_, home| home.has(card), Some(card));
        let gangs: Vec<GangId> = self.gangs_at(card);
        for gang in gangs {
            self.report(gang, true);
        }
        self.pump(now);
    }

    /// Records that the connection to another card has ended. Messages in transit from that card are lost.
    pub fn lost(&mut self, card: CardId, now: Nanos) {
        if card == self.card || !self.reachable.remove(&card) {
            return;
        }
        for gang in self.gangs_at(card) {
            self.abandon(gang, now);
            if let Some(member) = self.members.get_mut(&gang) {
                member.forget_home();
            }
        }
        let gangs: Vec<GangId> = self.homes.iter().filter(|(_, home)| home.has(card)).map(|(&gang, _)| gang).collect();
        for gang in gangs {
            self.at_home(gang, now, |home| home.lose(card, now));
        }
        self.pump(now);
    }

    /// Records that a tenant has work.
    pub fn wants(&mut self, tenant: TenantId, now: Nanos) {
        match self.gang_of(tenant) {
            Some(gang) => self.member_wants(gang, now),
            None => self.turns.wants(tenant, now),
        }
        self.pump(now);
    }

    /// Records that a tenant has returned the card. See [`GroupTurns::ended`].
    pub fn ended(&mut self, tenant: TenantId, ended: Nanos, more: bool, now: Nanos) {
        match self.gang_of(tenant) {
            Some(gang) => self.member_ended(gang, ended, more, now),
            None => self.turns.ended(tenant, ended, more, now),
        }
        self.pump(now);
    }

    /// Pauses or resumes a tenant on this card. A gang with a paused tenant gets no turn on its other cards either.
    pub fn pause(&mut self, tenant: TenantId, paused: bool, now: Nanos) {
        match self.gang_of(tenant) {
            Some(gang) => self.pause_member(gang, paused, now),
            None => self.turns.pause(tenant, paused, now),
        }
        self.pump(now);
    }

    /// Processes a message from another card. Ignores messages about gangs without a member on this card, and messages
    /// from the wrong card.
    pub fn receive(&mut self, from: CardId, message: Message, now: Nanos) {
        self.handle(from, message, now);
        self.pump(now);
    }

    /// Advances time. The caller must call this at [`Self::next_wakeup`].
    pub fn tick(&mut self, now: Nanos) {
        self.turns.tick(now);
        self.expire(now);
        let gangs: Vec<GangId> = self.homes.keys().copied().collect();
        for gang in gangs {
            self.at_home(gang, now, |_| ());
        }
        self.pump(now);
    }

    /// Returns the time at which [`Self::tick`] is due if no event occurs earlier.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Nanos> {
        let homes = self.homes.values().filter_map(|home| home.deadline(&self.config));
        let members = self.members.values().filter_map(|member| member.expires(&self.config));
        homes.chain(members).chain(self.turns.next_wakeup()).min()
    }

    /// Returns and clears the pending orders, in the order of their creation.
    pub fn take_orders(&mut self) -> Vec<GangOrder> {
        std::mem::take(&mut self.orders)
    }

    /// Returns and clears the pending messages to other cards, in the order of their creation.
    pub fn take_messages(&mut self) -> Vec<(CardId, Message)> {
        std::mem::take(&mut self.messages)
    }

    /// Returns true if a tenant may open more gates. See [`GroupTurns::continues`].
    #[must_use]
    pub fn continues(&self, tenant: TenantId) -> bool {
        match self.member_of(tenant) {
            Some(member) => matches!(member.stage, Stage::Running { open: true, .. }),
            None => self.turns.continues(tenant),
        }
    }

    /// Returns true if a tenant has queued or running work on this card.
    #[must_use]
    pub fn is_busy(&self, tenant: TenantId) -> bool {
        match self.member_of(tenant) {
            Some(member) => member.wants || matches!(member.stage, Stage::Ending { .. } | Stage::Stuck),
            None => self.turns.is_busy(tenant),
        }
    }

    fn member_of(&self, tenant: TenantId) -> Option<&Member> {
        self.members.values().find(|member| member.tenant == tenant)
    }

    /// Returns the gang that a tenant is a member of, if any.
    #[must_use]
    pub fn gang_of(&self, tenant: TenantId) -> Option<GangId> {
        self.members.iter().find(|(_, member)| member.tenant == tenant).map(|(&gang, _)| gang)
    }

    /// Returns the state of a gang on this card.
    #[must_use]
    pub fn view(&self, gang: GangId) -> Option<GangView> {
        let member = self.members.get(&gang)?;
        let missing = member.cards.difference(&self.reachable).copied().collect();
        Some(GangView {
            cards: member.cards.clone(),
            missing,
            wants: member.wants,
            runs: matches!(member.stage, Stage::Running { open: true, .. }),
            is_stuck: member.is_stuck,
            is_offered: member.stage == Stage::Offered,
            counts: member.counts.clone(),
        })
    }

    fn gangs_at(&self, home: CardId) -> Vec<GangId> {
        self.members.iter().filter(|(_, member)| member.home == home).map(|(&gang, _)| gang).collect()
    }

    /// Requests reports from one card, or from all cards, to the homes on this card, for the gangs selected by
    /// `concerned`.
    fn greet(&mut self, concerned: impl Fn(GangId, &Home) -> bool, card: Option<CardId>) {
        let mut greetings = Vec::new();
        for (&gang, home) in self.homes.iter().filter(|(gang, home)| concerned(**gang, home)) {
            let cards = home.cards().filter(|to| card.is_none_or(|card| card == *to));
            greetings.extend(cards.map(|to| (to, gang)));
        }
        for (to, gang) in greetings {
            self.send(to, gang, Body::Command { round: 0, command: Command::Report });
        }
    }

    fn send(&mut self, to: CardId, gang: GangId, body: Body) {
        self.clock = self.clock.saturating_add(1);
        let message = Message { gang, clock: self.clock, body };
        if to == self.card {
            self.own.push_back(message);
        } else if self.reachable.contains(&to) {
            self.messages.push((to, message));
        }
    }

    /// Processes the underlying turns' decisions and this card's messages to itself, and reports all changes.
    fn pump(&mut self, now: Nanos) {
        loop {
            for tenant in self.turns.take_offers() {
                self.offered(tenant);
            }
            let orders = self.turns.take_orders();
            if !orders.is_empty() {
                orders.into_iter().for_each(|order| self.pass_on(order, now));
                continue;
            }
            if let Some(message) = self.own.pop_front() {
                self.handle(self.card, message, now);
                continue;
            }
            self.report_changes();
            if self.own.is_empty() {
                return;
            }
        }
    }

    fn handle(&mut self, from: CardId, message: Message, now: Nanos) {
        self.clock = self.clock.max(message.clock);
        let Message { gang, body, .. } = message;
        match body {
            Body::Report { round, state, wants } => {
                self.at_home(gang, now, |home| home.reported(from, (round, state, wants), now));
            }
            Body::Command { round, command } => {
                if self.members.get(&gang).is_some_and(|member| member.home == from) {
                    self.obey(gang, round, command, now);
                }
            }
        }
    }

    /// Changes the state of a gang at its home, and sends the resulting commands.
    fn at_home(&mut self, gang: GangId, now: Nanos, change: impl FnOnce(&mut Home)) {
        let Some(home) = self.homes.get_mut(&gang) else { return };
        change(home);
        self.clock = self.clock.saturating_add(1);
        let commands = home.commands(&self.config, self.clock, now);
        for (to, round, command) in commands {
            self.send(to, gang, Body::Command { round, command });
        }
    }
}

#[cfg(test)]
mod tests;
