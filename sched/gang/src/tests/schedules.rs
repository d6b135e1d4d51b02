//! Tests gangs with random sets of cards under random schedules. Cards share no memory, so a schedule is an order of
//! messages, submissions, kernel completions, ticks, and failures. Half of the schedules select each step at random.
//! The other half use priorities that change at a few points (probabilistic concurrency testing, PCT), which can delay
//! a message by any number of steps.

use super::super::*;
use super::world::{Gate, MS, Tenant, World, gang};
use sched::sim::Random;

/// Number of schedules per run. The full-scale test uses [`ALL_SCHEDULES`].
const SCHEDULES: u64 = 2_000;
const ALL_SCHEDULES: u64 = 100_000;
/// Number of steps after which a schedule is considered endless. The longest schedule takes a tenth of this number.
const MAX_STEPS: u64 = 50_000;
/// Number of priority changes in a schedule.
const CHANGES: usize = 5;
/// Number of first steps of a schedule among which the priority changes are selected.
const CHANGES_AMONG: u64 = 2_000;
/// Maximum number of failures in a schedule.
const MAX_FAILURES: u32 = 3;

/// A step of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Action {
    /// The first message on a link is delivered.
    Deliver(u32, u32),
    /// A rank submits, requests a turn, or ends its turn.
    Advance(TenantId, u32),
    /// A tenant's kernel completes.
    Finish(TenantId),
    /// A card's timer expires.
    Tick(u32),
    /// Time advances until the next timer expires.
    Wait,
    /// The connection between two cards is cut or re-established.
    Cut(u32, u32),
    Connect(u32, u32),
    /// A card's process is stopped or resumed.
    Stop(u32),
    Continue(u32),
}

/// Strategy for selecting the next step.
enum Choice {
    Random,
    Priorities { of: BTreeMap<Action, u64>, changes: Vec<u64> },
}

struct Checker {
    world: World,
    random: Random,
    choice: Choice,
    cut: BTreeSet<(u32, u32)>,
    failures: u32,
    /// True if time may advance to the next timer while other steps are possible.
    is_hasty: bool,
    steps: u64,
}

impl Checker {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let cards = 2 + random.below(3) as u32;
        let count = 2 + random.below(5) as usize;
        let tenants: Vec<Tenant> = (0..count).map(|_| any_tenant(cards, &mut random)).collect();
        let choice = if seed.is_multiple_of(2) {
            Choice::Random
        } else {
            let changes = (0..CHANGES).map(|_| random.below(CHANGES_AMONG)).collect();
            Choice::Priorities { of: BTreeMap::new(), changes }
        };
        let failures = if random.below(2) == 0 { 0 } else { MAX_FAILURES };
        let is_hasty = random.below(2) == 0;
        let world = World::new(cards, &tenants, seed);
        Self { world, random, choice, cut: BTreeSet::new(), failures, is_hasty, steps: 0 }
    }

    /// Returns the candidate steps, excluding failures and waits.
    fn actions(&self) -> Vec<Action> {
        let world = &self.world;
        let mut actions = Vec::new();
        let runs = |card: &u32| !world.stopped.contains(card);
        let links = world.links.iter().filter(|((_, to), link)| runs(to) && !link.is_empty());
        actions.extend(links.map(|(&(from, to), _)| Action::Deliver(from, to)));
        for (&tenant, program) in &world.programs {
            actions.extend(program.ranks.keys().map(|&card| Action::Advance(tenant, card)));
            actions.extend(program.runs().then_some(Action::Finish(tenant)));
        }
        let due = |turns: &GangTurns| turns.next_wakeup().is_some_and(|at| at.0 <= world.now);
        let due = world.cards.iter().filter(|(card, turns)| runs(card) && due(turns));
        actions.extend(due.map(|(&card, _)| Action::Tick(card)));
        actions.extend(self.cut.iter().map(|&(one, two)| Action::Connect(one, two)));
        actions.extend(world.stopped.iter().map(|&card| Action::Continue(card)));
        actions
    }

    /// Returns a failure to inject as the next step, with a probability of at most 1/60.
    fn failure(&mut self) -> Option<Action> {
        if self.failures == 0 || self.random.below(60) > 0 {
            return None;
        }
        self.failures -= 1;
        let cards = self.world.cards.len() as u64;
        let one = self.random.below(cards) as u32;
        let two = self.random.below(cards) as u32;
        let pair = (one.min(two), one.max(two));
        if one == two {
            return (!self.world.stopped.contains(&one)).then_some(Action::Stop(one));
        }
        (!self.cut.contains(&pair)).then_some(Action::Cut(pair.0, pair.1))
    }

    /// Selects an action, and removes it from the list.
    fn choose(&mut self, actions: &mut Vec<Action>) -> Option<Action> {
        let at = match &mut self.choice {
            Choice::Random => self.random.below(actions.len() as u64) as usize,
            Choice::Priorities { of, .. } => {
                for action in actions.iter() {
                    of.entry(*action).or_insert_with(|| self.random.number() | 1 << 63);
                }
                actions.iter().enumerate().max_by_key(|(_, action)| of[action]).map_or(0, |(at, _)| at)
            }
        };
        (at < actions.len()).then(|| actions.swap_remove(at))
    }

    /// Executes an action. Returns false if it was not possible.
    fn execute(&mut self, action: Action) -> bool {
        let world = &mut self.world;
        match action {
            Action::Deliver(from, to) => world.deliver((from, to)),
            Action::Advance(tenant, card) => return world.advance(tenant, card),
            Action::Finish(tenant) => {
                world.now += world.programs[&tenant].tenant.kernel_ns;
                world.finish(tenant);
            }
            Action::Tick(card) => world.tick(card),
            Action::Wait => {
                let running = world.cards.iter().filter(|(card, _)| !world.stopped.contains(card));
                let Some(next) = running.filter_map(|(_, turns)| turns.next_wakeup()).min() else { return false };
                // Always advance the time, even if a timer's deadline does not change. Otherwise, this loop could be
                // infinite.
                world.now = next.0.max(world.now + 1);
            }
            Action::Cut(one, two) => {
                world.cut(one, two);
                self.cut.insert((one, two));
            }
            Action::Connect(one, two) => {
                world.connect(one, two);
                self.cut.remove(&(one, two));
            }
            Action::Stop(card) => drop(world.stopped.insert(card)),
            Action::Continue(card) => drop(world.stopped.remove(&card)),
        }
        if let Choice::Priorities { of, changes } = &mut self.choice
            && changes.contains(&self.steps)
        {
            // Assign the lowest priority to the executed action.
            let least = of.values().min().copied().unwrap_or(1);
            of.insert(action, least.saturating_sub(1));
        }
        true
    }

    /// Executes one step. Returns false if no step is possible.
    fn step(&mut self) -> bool {
        self.steps += 1;
        if let Some(failure) = self.failure() {
            return self.execute(failure);
        }
        if self.is_hasty && self.random.below(20) == 0 && self.execute(Action::Wait) {
            return true;
        }
        let mut actions = self.actions();
        while let Some(action) = self.choose(&mut actions) {
            if self.execute(action) {
                return true;
            }
        }
        self.execute(Action::Wait)
    }

    fn has_ended(&self) -> bool {
        self.world.programs.values().all(|program| {
            let closed = program.ranks.values().all(|rank| rank.gate == Gate::Closed);
            program.done == program.tenant.kernels && closed
        })
    }

    /// Runs the schedule to its end. Returns the number of steps and the number of gang turns.
    fn run(mut self, seed: u64) -> (u64, u64) {
        while !self.has_ended() {
            assert!(self.steps < MAX_STEPS, "schedule {seed} does not end: {}", self.state());
            assert!(self.step(), "schedule {seed} is a deadlock: {}", self.state());
        }
        // A hasty schedule may delay messages beyond any limit.
        let in_time = self.is_hasty || self.world.overdue.is_empty();
        assert!(in_time, "schedule {seed}: work exceeded its limit at {} us", self.world.now / 1000);
        let views = self.world.cards.values().flat_map(|turns| turns.members.values());
        (self.steps, views.map(|member| member.counts.turns).sum())
    }

    fn state(&self) -> String {
        let mut text = format!("{} us, stopped {:?}, cut {:?}", self.world.now / 1000, self.world.stopped, self.cut);
        for (tenant, program) in &self.world.programs {
            let ranks: Vec<_> = program.ranks.iter().map(|(card, r)| (card, r.gate, r.submitted)).collect();
            text += &format!("\n{tenant:?}: {} of {} kernels, {ranks:?}", program.done, program.tenant.kernels);
            for (card, turns) in self.world.cards.iter().filter(|(card, _)| program.ranks.contains_key(card)) {
                let home = turns.homes.get(&gang(*tenant));
                let stage = turns.members.get(&gang(*tenant)).map(|member| (member.stage, member.state()));
                text += &format!("\n  card {card}: {stage:?} {home:?}");
            }
        }
        text
    }
}

/// Returns a tenant on a random set of cards.
fn any_tenant(cards: u32, random: &mut Random) -> Tenant {
    let set: Vec<u32> = loop {
        let bits = random.below(1 << cards);
        let set: Vec<u32> = (0..cards).filter(|card| bits & (1 << card) != 0).collect();
        if !set.is_empty() {
            break set;
        }
    };
    let weight = 1 + random.below(1000) as u32;
    let flood = Tenant::flood(&set, weight, (1 + random.below(8)) * MS);
    Tenant { kernels: 2 + random.below(6), ahead: 1 + random.below(3), ..flood }
}

/// Runs the schedules with the given seeds. Returns the total number of steps and the total number of gang turns.
fn check(seeds: std::ops::Range<u64>) -> (u64, u64) {
    let outcomes = seeds.map(|seed| Checker::new(seed).run(seed));
    outcomes.fold((0, 0), |(steps, turns), (more_steps, more_turns)| (steps + more_steps, turns + more_turns))
}

#[test]
fn random_card_sets_end_under_every_schedule_tried() {
    let (steps, turns) = check(0..SCHEDULES);
    println!("{SCHEDULES} schedules: {steps} steps, {turns} gang turns");
    assert!(turns > 4 * SCHEDULES, "{turns} gang turns");
}

mod full {
    use super::*;

    #[test]
    fn random_card_sets_end_under_a_hundred_thousand_schedules() {
        let (steps, turns) = check(0..ALL_SCHEDULES);
        println!("{ALL_SCHEDULES} schedules: {steps} steps, {turns} gang turns");
    }
}
