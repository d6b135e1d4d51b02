//! Simulates cards that grant turns, the messages between the cards, and programs whose kernels wait for peer kernels
//! on other cards.
//!
//! A tenant has one program (a *rank*) on each of its cards, and all ranks submit the same kernels. A kernel makes
//! progress only once all ranks have submitted it. Until then, it spins on the cards to which it was submitted, so the
//! turns on these cards cannot end.

use super::super::*;
use sched::groups::GroupConfig;
use sched::sim::Random;
use sched::turns::{TurnsConfig, scheduler_defaults};
use sched::{Engine, VgpuParams};

pub(super) const MS: u64 = 1_000_000;

/// A tenant and its program.
#[derive(Clone, Debug)]
pub(super) struct Tenant {
    pub(super) cards: Vec<u32>,
    pub(super) params: VgpuParams,
    /// Length of a kernel, in ns.
    pub(super) kernel_ns: u64,
    /// Maximum number of kernels that a rank has in flight.
    pub(super) ahead: u64,
    /// Number of kernels after which the program exits.
    pub(super) kernels: u64,
    /// Number of kernels in a burst, and the pause after the burst in ns.
    pub(super) burst: Option<(u64, u64)>,
}

impl Tenant {
    /// Creates a tenant whose program always has work.
    pub(super) fn flood(cards: &[u32], weight: u32, kernel_ns: u64) -> Self {
        let (cards, params) = (cards.to_vec(), VgpuParams::weight(weight));
        Self { cards, params, kernel_ns, ahead: 2, kernels: u64::MAX, burst: None }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gate {
    Closed,
    Open,
    /// The gate closes after this number of further submissions.
    Closing(u64),
}

/// A tenant's program on one card.
#[derive(Clone, Debug)]
pub(super) struct Rank {
    pub(super) gate: Gate,
    /// Number of kernels submitted by this rank.
    pub(super) submitted: u64,
    /// True if the card's owner was notified that the rank has work.
    asked: bool,
    /// Last time at which the gate was open or the rank had no work, in ns.
    last_ran: u64,
    /// Longest time that the gate stayed closed while the rank had work, in ns.
    pub(super) longest_gap: u64,
}

pub(super) struct Program {
    pub(super) tenant: Tenant,
    pub(super) ranks: BTreeMap<u32, Rank>,
    /// Number of completed kernels.
    pub(super) done: u64,
    /// Remaining time of the running kernel, in ns.
    left: u64,
    /// Time at which the program next has work, in ns.
    wakes: u64,
}

impl Program {
    /// Returns the number of kernels that the program should have submitted by `now`.
    fn goal(&self, now: u64) -> u64 {
        match self.tenant.burst {
            _ if now < self.wakes => self.done,
            Some((burst, _)) => (self.done / burst + 1) * burst,
            None => self.tenant.kernels,
        }
    }

    /// Returns true if all ranks have submitted the next kernel, so that it runs.
    pub(super) fn runs(&self) -> bool {
        self.ranks.values().all(|rank| rank.submitted > self.done)
    }
}

pub(super) struct World {
    pub(super) cards: BTreeMap<u32, GangTurns>,
    pub(super) programs: BTreeMap<TenantId, Program>,
    /// Messages in transit on each link, with their arrival times in ns.
    pub(super) links: BTreeMap<(u32, u32), VecDeque<(u64, Message)>>,
    pub(super) now: u64,
    pub(super) random: Random,
    /// Cards whose owners are stopped.
    pub(super) stopped: BTreeSet<u32>,
    /// Minimum and maximum latency of a message, in ns.
    pub(super) transit_ns: (u64, u64),
    /// Tenants that were reported for exceeding their run time limit.
    pub(super) overdue: BTreeSet<TenantId>,
}

pub(super) fn id(number: usize) -> TenantId {
    TenantId(number as u32 + 1)
}

pub(super) fn gang(tenant: TenantId) -> GangId {
    GangId(tenant.0)
}

pub(super) fn cards_of(tenant: &Tenant) -> BTreeSet<CardId> {
    tenant.cards.iter().map(|&card| CardId(card)).collect()
}

impl World {
    pub(super) fn new(cards: u32, tenants: &[Tenant], seed: u64) -> Self {
        let turns = || {
            let turns = GroupTurns::new(scheduler_defaults(), TurnsConfig::default(), GroupConfig::default(), Nanos(0));
            turns.expect("the defaults are valid")
        };
        let made = |card: u32| (card, GangTurns::new(CardId(card), turns(), GangConfig::default()));
        let mut world = Self {
            cards: (0..cards).map(made).collect(),
            programs: BTreeMap::new(),
            links: BTreeMap::new(),
            now: 0,
            random: Random::new(seed),
            stopped: BTreeSet::new(),
            transit_ns: (20_000, 200_000),
            overdue: BTreeSet::new(),
        };
        for from in 0..cards {
            for to in (0..cards).filter(|to| *to != from) {
                world.card(from).reached(CardId(to), Nanos(0));
                world.links.insert((from, to), VecDeque::new());
            }
        }
        for (number, tenant) in tenants.iter().enumerate() {
            let rank = Rank { gate: Gate::Closed, submitted: 0, asked: false, last_ran: 0, longest_gap: 0 };
            for &card in &tenant.cards {
                world.card(card).with_turns(Nanos(0), |turns| turns.add(id(number), tenant.params, Nanos(0)));
                if tenant.cards.len() > 1 {
                    assert!(world.card(card).join(gang(id(number)), id(number), &cards_of(tenant), Nanos(0)));
                }
            }
            let ranks = tenant.cards.iter().map(|&card| (card, rank.clone())).collect();
            let program = Program { tenant: tenant.clone(), ranks, done: 0, left: tenant.kernel_ns, wakes: 0 };
            world.programs.insert(id(number), program);
        }
        (0..cards).for_each(|card| world.follow(card));
        world
    }

    pub(super) fn card(&mut self, card: u32) -> &mut GangTurns {
        self.cards.get_mut(&card).expect("the card exists")
    }

    /// Executes the orders of a card and sends its messages.
    pub(super) fn follow(&mut self, card: u32) {
        let now = self.now;
        for (to, message) in self.card(card).take_messages() {
            let (least, most) = self.transit_ns;
            let arrives = now + least + self.random.below(most - least + 1);
            let link = self.links.get_mut(&(card, to.0)).expect("the cards are connected");
            let arrives = link.back().map_or(arrives, |(last, _)| arrives.max(*last));
            link.push_back((arrives, message));
        }
        for order in self.card(card).take_orders() {
            let (GangOrder::Step(of)
            | GangOrder::Turn(
                Order::Grant(of)
                | Order::Recall(of)
                | Order::Yield(of)
                | Order::Quarantined(of)
                | Order::Overdue { tenant: of, .. },
            )) = order;
            let rank =
                self.programs.get_mut(&of).and_then(|program| program.ranks.get_mut(&card)).expect("the rank exists");
            match order {
                GangOrder::Turn(Order::Grant(_)) => (rank.gate, rank.asked) = (Gate::Open, true),
                GangOrder::Turn(Order::Recall(_)) => {
                    assert_eq!(rank.gate, Gate::Open, "{of:?} on card {card} is recalled, but its gate is not open");
                    rank.gate = Gate::Closing(0);
                }
                GangOrder::Step(_) => {
                    assert_eq!(rank.gate, Gate::Closed, "{of:?} on card {card} gets a step, but its gate is open");
                    (rank.gate, rank.asked) = (Gate::Closing(1), true);
                }
                GangOrder::Turn(Order::Yield(_)) => {}
                GangOrder::Turn(Order::Overdue { .. }) => drop(self.overdue.insert(of)),
                GangOrder::Turn(Order::Quarantined(_)) => panic!("no tenant is quarantined here"),
            }
        }
        self.check(card);
    }

    /// Checks that at most one tenant has an open gate on a card, ignoring tenants whose turns overrun.
    fn check(&self, card: u32) {
        let turns = &self.cards[&card];
        let open = self.programs.iter().filter(|(tenant, program)| {
            let is_open = program.ranks.get(&card).is_some_and(|rank| rank.gate != Gate::Closed);
            is_open && !turns.turns().overruns(**tenant)
        });
        let open: Vec<_> = open.map(|(tenant, _)| tenant).collect();
        assert!(open.len() <= 1, "{open:?} use card {card} at the same time");
    }

    /// Makes a rank submit, end its turn, or request a turn. Returns false if no such action is possible.
    pub(super) fn advance(&mut self, tenant: TenantId, card: u32) -> bool {
        let is_stopped = self.stopped.contains(&card);
        let now = self.now;
        let Some(program) = self.programs.get_mut(&tenant) else { return false };
        let (goal, done, ahead) = (program.goal(now), program.done, program.tenant.ahead);
        let Some(rank) = program.ranks.get_mut(&card) else { return false };
        let (may, has_work) = (rank.submitted < goal.min(done + ahead), rank.submitted < goal);
        let is_idle = rank.submitted == done;
        match &mut rank.gate {
            Gate::Open if may => rank.submitted += 1,
            Gate::Closing(left @ 1..) if may => (*left, rank.submitted) = (*left - 1, rank.submitted + 1),
            // The program runs, but the card's stopped owner processes no messages.
            _ if is_stopped => return false,
            Gate::Open if is_idle && !has_work => {
                (rank.gate, rank.asked) = (Gate::Closed, false);
                self.card(card).ended(tenant, Nanos(now), false, Nanos(now));
            }
            Gate::Closing(_) if is_idle => {
                (rank.gate, rank.asked) = (Gate::Closed, has_work);
                self.card(card).ended(tenant, Nanos(now), has_work, Nanos(now));
            }
            Gate::Closed if has_work && !rank.asked => {
                rank.asked = true;
                self.card(card).wants(tenant, Nanos(now));
            }
            _ => return false,
        }
        self.follow(card);
        true
    }

    /// Completes a tenant's running kernel.
    pub(super) fn finish(&mut self, tenant: TenantId) {
        let now = self.now;
        let program = self.programs.get_mut(&tenant).expect("the program exists");
        (program.done, program.left) = (program.done + 1, program.tenant.kernel_ns);
        if let Some((burst, pause)) = program.tenant.burst
            && program.done.is_multiple_of(burst)
        {
            program.wakes = now + pause;
        }
    }

    /// Delivers the first message on a link.
    pub(super) fn deliver(&mut self, (from, to): (u32, u32)) {
        let message = self.links.get_mut(&(from, to)).and_then(VecDeque::pop_front);
        if let Some((_, message)) = message {
            let now = Nanos(self.now);
            self.card(to).receive(CardId(from), message, now);
            self.follow(to);
        }
    }

    pub(super) fn tick(&mut self, card: u32) {
        let now = Nanos(self.now);
        self.card(card).tick(now);
        self.follow(card);
    }

    /// Closes the connection between two cards. Messages in transit are lost.
    pub(super) fn cut(&mut self, one: u32, two: u32) {
        for (from, to) in [(one, two), (two, one)] {
            self.links.get_mut(&(from, to)).expect("the cards are connected").clear();
            let now = Nanos(self.now);
            self.card(to).lost(CardId(from), now);
        }
        // Carry out the cards' orders, and send their messages to other cards.
        for card in [one, two] {
            self.follow(card);
        }
    }

    pub(super) fn connect(&mut self, one: u32, two: u32) {
        for (from, to) in [(one, two), (two, one)] {
            let now = Nanos(self.now);
            self.card(to).reached(CardId(from), now);
        }
        for card in [one, two] {
            self.follow(card);
        }
    }

    /// Runs the simulation for `ns` ns, in steps of `step` ns.
    pub(super) fn run(&mut self, ns: u64, step: u64) {
        let until = self.now + ns;
        while self.now < until {
            let due: Vec<_> = self
                .links
                .iter()
                .filter(|((_, to), link)| {
                    !self.stopped.contains(to) && link.front().is_some_and(|(at, _)| *at <= self.now)
                })
                .map(|(&link, _)| link)
                .collect();
            for link in due {
                while self.links[&link].front().is_some_and(|(at, _)| *at <= self.now) {
                    self.deliver(link);
                }
            }
            for card in 0..self.cards.len() as u32 {
                let due = self.cards[&card].next_wakeup().is_some_and(|at| at.0 <= self.now);
                if due && !self.stopped.contains(&card) {
                    self.tick(card);
                }
            }
            let tenants: Vec<TenantId> = self.programs.keys().copied().collect();
            for tenant in tenants {
                self.run_program(tenant, step);
            }
            self.now += step;
        }
    }

    fn run_program(&mut self, tenant: TenantId, step: u64) {
        let cards = self.programs[&tenant].tenant.cards.clone();
        for &card in &cards {
            // Delay ranks at random to simulate their different speeds.
            if self.random.below(4) > 0 {
                while self.advance(tenant, card) {}
            }
        }
        let now = self.now;
        let program = self.programs.get_mut(&tenant).expect("the program exists");
        let (goal, runs) = (program.goal(now), program.runs());
        for rank in program.ranks.values_mut() {
            if rank.gate == Gate::Open || rank.submitted >= goal {
                rank.last_ran = now;
            }
            rank.longest_gap = rank.longest_gap.max(now - rank.last_ran);
        }
        if runs {
            program.left = program.left.saturating_sub(step);
            if program.left == 0 {
                self.finish(tenant);
            }
        }
    }

    /// Returns the total run time of a tenant's completed kernels, in ns.
    pub(super) fn work(&self, number: usize) -> f64 {
        let program = &self.programs[&id(number)];
        (program.done * program.tenant.kernel_ns) as f64
    }

    pub(super) fn used(&self, card: u32, number: usize) -> u64 {
        self.cards[&card].turns().account(id(number)).map_or(0, |account| account.used)
    }

    pub(super) fn busy(&self, card: u32) -> u64 {
        self.cards[&card].turns().scheduler().busy(Engine::Compute)
    }

    pub(super) fn counts(&self, card: u32, number: usize) -> GangCounts {
        self.cards[&card].view(gang(id(number))).expect("the gang exists").counts
    }

    pub(super) fn gap(&self, number: usize) -> u64 {
        self.programs[&id(number)].ranks.values().map(|rank| rank.longest_gap).max().unwrap_or(0)
    }
}
