//! The simulation's clock, pending events, and their effects.

use super::outcome::Outcome;
use super::uses::Uses;
use super::workload::{Change, Scenario};
use super::{Length, Random};
use crate::{Channel, ConfigError, Decision, Engine, Event, Histogram, Nanos, Scheduler, TenantId, Ticket};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

/// Length of the intervals in which use is recorded, in ns.
const USE_INTERVAL_NS: u64 = 10_000_000;

/// A kind of simulated event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// The operator makes the change with the given index.
    Operator(usize),
    /// The VMM of the guest with the given index dies.
    Death(usize),
    /// A guest rings the doorbell for a step of a round.
    Doorbell(Round),
    /// The card has received a submission.
    Given(Ticket),
    /// An engine has completed a submission. Ignored if the submission is no longer running.
    Done(Engine, Ticket),
    /// The scheduler observes that a submission ended at the given time.
    Seen(Ticket, Nanos),
    /// A killed channel has been removed from the card.
    Killed(TenantId, Channel, Engine),
    /// The wakeup with the given number is due. Ignored if a newer one was requested.
    Wakeup(u64),
}

/// Current step in a round of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Round {
    guest: usize,
    stream: usize,
    step: usize,
}

/// A submission, from its doorbell to its end.
#[derive(Clone, Copy, Debug)]
struct Submission {
    round: Round,
    engine: Engine,
    /// Engine time in ns, or `None` if the submission does not end.
    length: Option<u64>,
    arrived: Nanos,
    began: Option<Nanos>,
}

struct World<'a> {
    scenario: &'a Scenario,
    random: Random,
    scheduler: Scheduler,
    observe: &'a mut dyn FnMut(Nanos, Event, &[Decision]),
    now: Nanos,
    heap: BinaryHeap<Reverse<(Nanos, u64, Happening)>>,
    order: u64,
    tickets: u64,
    submissions: HashMap<Ticket, Submission>,
    /// Submissions on each engine. The first one is running.
    engines: [VecDeque<Ticket>; Engine::COUNT],
    wakeup: (u64, Option<Nanos>),
    dead: Vec<bool>,
    /// True for each stream whose channel was killed, by guest and stream. The guest does not open a new channel.
    closed: Vec<Vec<bool>>,
    outcome: Tally,
}

/// Statistics of the simulation.
struct Tally {
    waits: Vec<Histogram>,
    rounds: Vec<u64>,
    uses: Uses,
    busy: [u64; Engine::COUNT],
    completed: u64,
    killed: u64,
    events: u64,
    ticks: u64,
}

/// Runs a scenario.
///
/// # Errors
/// Returns an error if a scheduler setting is out of bounds.
pub fn run(scenario: &Scenario, seed: u64) -> Result<Outcome, ConfigError> {
    run_with(scenario, seed, &mut |_, _, _| {})
}

/// Runs a scenario, and calls `observe` with each event and the scheduler's decisions.
///
/// # Errors
/// Returns an error if a scheduler setting is out of bounds.
pub fn run_with(
    scenario: &Scenario,
    seed: u64,
    observe: &mut dyn FnMut(Nanos, Event, &[Decision]),
) -> Result<Outcome, ConfigError> {
    let guests = scenario.guests.len();
    let mut world = World {
        scenario,
        random: Random::new(seed),
        scheduler: Scheduler::new(scenario.config, Nanos(0))?,
        observe,
        now: Nanos(0),
        heap: BinaryHeap::new(),
        order: 0,
        tickets: 0,
        submissions: HashMap::new(),
        engines: Default::default(),
        wakeup: (0, None),
        dead: vec![false; guests],
        closed: scenario.guests.iter().map(|guest| vec![false; guest.streams.len()]).collect(),
        outcome: Tally {
            waits: vec![Histogram::default(); guests],
            rounds: vec![0; guests],
            uses: Uses::new(guests, USE_INTERVAL_NS, scenario.length),
            busy: [0; Engine::COUNT],
            completed: 0,
            killed: 0,
            events: 0,
            ticks: 0,
        },
    };
    world.begin();
    while let Some(Reverse((at, _, happening))) = world.heap.pop() {
        if at.0 > scenario.length {
            break;
        }
        world.now = at;
        world.happen(happening);
    }
    let World { scheduler, outcome, .. } = world;
    let Tally { waits, rounds, uses, busy, completed, killed, events, ticks } = outcome;
    Ok(Outcome { scheduler, waits, rounds, completed, killed, events, ticks, uses, busy, length: scenario.length })
}

impl World<'_> {
    fn begin(&mut self) {
        let scenario = self.scenario;
        for (index, (at, _)) in scenario.changes.iter().enumerate() {
            self.at(*at, Happening::Operator(index));
        }
        for (guest, of) in scenario.guests.iter().enumerate() {
            self.feed(Event::Added { vgpu: vgpu(guest), params: of.params });
            if let Some(gone) = of.gone {
                self.at(gone, Happening::Death(guest));
            }
            for (stream, of) in of.streams.iter().enumerate() {
                for _ in 0..of.depth {
                    // Let guests start at different times.
                    let at = of.next_start(Nanos(self.random.below(100_000)));
                    at.into_iter().for_each(|at| self.at(at, Happening::Doorbell(Round { guest, stream, step: 0 })));
                }
            }
        }
    }

    fn at(&mut self, at: Nanos, happening: Happening) {
        self.order += 1;
        self.heap.push(Reverse((at, self.order, happening)));
    }

    fn later(&mut self, length: Length, happening: Happening) {
        if let Some(ns) = length.draw(&mut self.random) {
            self.at(self.now.after(ns), happening);
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Operator(index) => match self.scenario.changes[index].1 {
                Change::Config(config) => self.feed(Event::Configured(config)),
                Change::Vgpu(vgpu, params) => self.feed(Event::Changed { vgpu, params }),
            },
            Happening::Death(guest) => self.die(guest),
            Happening::Doorbell(round) => self.ring(round),
            Happening::Given(ticket) => self.give(ticket),
            Happening::Done(engine, ticket) => self.done(engine, ticket),
            Happening::Seen(ticket, ended) => self.seen(ticket, ended),
            Happening::Killed(vgpu, channel, engine) => {
                self.end_channel(vgpu, channel);
                self.feed(Event::Struck { vgpu, engine });
            }
            Happening::Wakeup(number) if number == self.wakeup.0 => {
                self.wakeup.1 = None;
                self.outcome.ticks += 1;
                self.feed(Event::Tick);
            }
            Happening::Wakeup(_) => {}
        }
    }

    /// Sends an event to the scheduler, and executes its decisions.
    fn feed(&mut self, event: Event) {
        let mut decisions = Vec::new();
        self.scheduler.event(self.now, event, &mut decisions);
        (self.observe)(self.now, event, &decisions);
        self.outcome.events += 1;
        for decision in decisions {
            match decision {
                Decision::Start(ticket) => self.later(self.scenario.card.submit, Happening::Given(ticket)),
                Decision::Kill { vgpu, channel, engine, .. } => {
                    self.outcome.killed += 1;
                    self.later(self.scenario.card.submit, Happening::Killed(vgpu, channel, engine));
                }
                Decision::Quarantined { .. } | Decision::Released { .. } => {}
            }
        }
        let wanted = self.scheduler.next_wakeup();
        if wanted != self.wakeup.1 {
            self.wakeup = (self.wakeup.0 + 1, wanted);
            if let Some(at) = wanted {
                // Even a wakeup in the past must advance the clock.
                self.at(at.max(self.now.after(1)), Happening::Wakeup(self.wakeup.0));
            }
        }
    }

    fn ring(&mut self, round: Round) {
        let Round { guest, stream, step } = round;
        if self.dead[guest] || self.closed[guest][stream] {
            return;
        }
        let Some(of) = self.scenario.guests[guest].streams[stream].steps.get(step) else { return };
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        let length = of.length.draw(&mut self.random);
        let submission = Submission { round, engine: of.engine, length, arrived: self.now, began: None };
        self.submissions.insert(ticket, submission);
        self.feed(Event::Arrival { vgpu: vgpu(guest), channel: channel(stream), engine: of.engine, ticket });
    }

    fn give(&mut self, ticket: Ticket) {
        let Some(submission) = self.submissions.get(&ticket) else { return };
        let queue = &mut self.engines[submission.engine.index()];
        queue.push_back(ticket);
        let first = queue.len() == 1;
        let engine = submission.engine;
        self.feed(Event::Started { ticket });
        if first {
            self.work(engine);
        }
    }

    /// Starts an engine's next submission.
    fn work(&mut self, engine: Engine) {
        let compute = !self.engines[Engine::Compute.index()].is_empty();
        let Some(ticket) = self.engines[engine.index()].front().copied() else { return };
        let Some(submission) = self.submissions.get_mut(&ticket) else { return };
        submission.began = Some(self.now);
        self.outcome.waits[submission.round.guest].add(self.now.since(submission.arrived));
        let slowdown = if engine != Engine::Compute && compute { self.scenario.card.copy_slowdown_permille } else { 0 };
        if let Some(length) = submission.length {
            let length = length + length * u64::from(slowdown) / 1000;
            self.at(self.now.after(length), Happening::Done(engine, ticket));
        }
    }

    fn done(&mut self, engine: Engine, ticket: Ticket) {
        if self.engines[engine.index()].front() != Some(&ticket) {
            return;
        }
        self.engines[engine.index()].pop_front();
        self.count(ticket);
        self.later(self.scenario.card.interrupt, Happening::Seen(ticket, self.now));
        self.work(engine);
    }

    /// Adds the engine time of a running submission to its VM's use and to the engine's busy time.
    fn count(&mut self, ticket: Ticket) {
        let Some((submission, began)) = self.submissions.get(&ticket).and_then(|s| Some((s, s.began?))) else { return };
        let engine = submission.engine;
        self.outcome.busy[engine.index()] += self.now.since(began);
        self.outcome.uses.add(submission.round.guest, engine, began.0, self.now.0);
    }

    fn seen(&mut self, ticket: Ticket, ended: Nanos) {
        let Some(Submission { round: Round { guest, stream, step }, .. }) = self.submissions.remove(&ticket) else {
            return;
        };
        self.outcome.completed += 1;
        let of = &self.scenario.guests[guest];
        let claimed = Nanos(ended.0.saturating_sub(of.lie));
        self.feed(Event::Completed { ticket, ended: Some(claimed) });
        let of = &of.streams[stream];
        let step = (step + 1) % of.steps.len();
        self.outcome.rounds[guest] += u64::from(step == 0);
        let thought = of.think.draw(&mut self.random).map(|ns| self.now.after(ns));
        // A round that has started is always completed.
        let at = thought.and_then(|at| if step == 0 { of.next_start(at) } else { Some(at) });
        at.into_iter().for_each(|at| self.at(at, Happening::Doorbell(Round { guest, stream, step })));
    }

    /// Removes the submissions of the rounds that satisfy `gone`, and counts the engine time of those that are running.
    fn take_off(&mut self, gone: impl Fn(&Round) -> bool) {
        for engine in Engine::ALL {
            let first = self.engines[engine.index()].front().copied();
            if let Some(first) = first.filter(|ticket| self.submissions.get(ticket).is_some_and(|s| gone(&s.round))) {
                self.count(first);
            }
            let submissions = &self.submissions;
            self.engines[engine.index()]
                .retain(|ticket| !submissions.get(ticket).is_some_and(|submission| gone(&submission.round)));
            if self.engines[engine.index()].front().copied() != first {
                self.work(engine);
            }
        }
        self.submissions.retain(|_, submission| !gone(&submission.round));
    }

    fn end_channel(&mut self, vgpu: TenantId, channel: Channel) {
        let (guest, stream) = (vgpu.0 as usize, channel.0 as usize);
        self.closed[guest][stream] = true;
        self.take_off(|round| (round.guest, round.stream) == (guest, stream));
        self.feed(Event::ChannelEnded { vgpu, channel });
    }

    fn die(&mut self, guest: usize) {
        self.dead[guest] = true;
        self.take_off(|round| round.guest == guest);
        self.feed(Event::Removed { vgpu: vgpu(guest) });
    }
}

fn vgpu(guest: usize) -> TenantId {
    TenantId(u32::try_from(guest).unwrap_or(u32::MAX))
}

fn channel(stream: usize) -> Channel {
    Channel(u32::try_from(stream).unwrap_or(u32::MAX))
}
