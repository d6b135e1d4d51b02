//! Tests the owners of several cards, with programs whose kernels wait for their peers on other cards.
//!
//! A tenant has one process (a *rank*) for each of its cards. All ranks submit the same kernels, and a kernel runs when
//! all ranks have submitted it; until then, it spins. The owners exchange messages with a latency.

use super::*;
use cuda_control::Gang;
use cuda_protocol::{Hello, VERSION, VERSION_CONCURRENT, VERSION_GANGS};
use gang::{GangId, Message};
use owner_host::LinkEvent;

/// Length of a step of the simulation, in ns.
const STEP: u64 = 100_000;
/// Latency of a message between owners, in steps of the simulation.
const TRANSIT: u64 = 1;
/// Maximum number of kernels that a rank has in flight.
const AHEAD: u64 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Closed,
    Open(u32),
    /// The rank reports the end of the given turn after the given number of further submissions.
    Closing(u32, u64),
}

#[derive(Debug)]
struct Rank {
    session: SessionId,
    gate: Gate,
    submitted: u64,
    has_told: bool,
    /// Number of [`FromOwner::Step`] messages that the rank has used to submit.
    steps: u64,
}

/// A tenant's program.
#[derive(Debug)]
struct Program {
    name: &'static str,
    ranks: BTreeMap<usize, Rank>,
    /// Number of completed kernels.
    done: u64,
    left: u64,
    kernel_ns: u64,
}

#[derive(Clone, Copy, Debug)]
enum Packet {
    Gang(Message),
    Probe,
    Reply,
}

struct Host {
    cores: Vec<Core>,
    /// Cards without an owner.
    dead: BTreeSet<usize>,
    /// Cards whose owners are stopped: they handle no events, and messages to them are queued.
    stopped: BTreeSet<usize>,
    /// Messages that the stopped owner has not read.
    unread: Vec<(SessionId, FromTenant)>,
    /// Number of probes that owners have sent.
    probes: u64,
    /// Sessions that an owner has abandoned.
    given_up: Vec<SessionId>,
    programs: Vec<Program>,
    /// Packets in transit, with their arrival step, sender and receiver.
    links: VecDeque<(u64, usize, usize, Packet)>,
    step: u64,
    next: u64,
    version: u16,
}

fn number(card: usize) -> CardId {
    CardId(card as u32)
}

/// Name, cards and weight of each tenant.
type Tenants = &'static [(&'static str, &'static [usize], u32)];

fn gang_of(id: u32, cards: impl Iterator<Item = u32>) -> Gang {
    Gang { number: GangId(id), cards: cards.map(|card| (CardId(card), Default::default())).collect() }
}

fn core(card: usize, seed: u32, tenants: Tenants) -> Core {
    let config = CardConfig { number: number(card), chunk_bytes: CHUNK, ..CardConfig::new(16 * CHUNK) };
    let mut core = Core::new(config, seed).expect("in bounds");
    for (id, (name, cards, weight)) in (1..).zip(tenants) {
        if cards.contains(&card) {
            let gang = gang_of(id, cards.iter().map(|&card| card as u32));
            let gang = Some(gang).filter(|gang| gang.cards.len() > 1);
            let time = sched::VgpuParams::weight(*weight);
            core.add_tenant(TenantSpec { gang, time, ..spec(name, 8, Limits::default()) }).expect("valid");
        }
    }
    core
}

impl Host {
    fn new(cards: usize, tenants: Tenants) -> Self {
        let cores = (0..cards).map(|card| core(card, 1, tenants)).collect();
        let (dead, stopped, links, version) = (BTreeSet::new(), BTreeSet::new(), VecDeque::new(), VERSION);
        let (programs, given_up, unread) = (Vec::new(), Vec::new(), Vec::new());
        let mut host =
            Self { cores, dead, stopped, unread, probes: 0, given_up, programs, links, step: 0, next: 0, version };
        for card in 0..cards {
            host.link(card);
        }
        for (name, cards, _) in tenants {
            host.start(name, cards, 1_000_000);
        }
        host
    }

    /// Connects the owner of a card to the other owners.
    fn link(&mut self, card: usize) {
        let others: Vec<usize> = (0..self.cores.len()).filter(|at| *at != card && !self.dead.contains(at)).collect();
        for other in others {
            self.event(card, Event::Link(LinkEvent::Reached(number(other))));
            self.event(other, Event::Link(LinkEvent::Reached(number(card))));
        }
    }

    fn start(&mut self, name: &'static str, cards: &[usize], kernel_ns: u64) {
        let program = Program { name, ranks: BTreeMap::new(), done: 0, left: kernel_ns, kernel_ns };
        self.programs.push(program);
        for &card in cards {
            self.connect(self.programs.len() - 1, card);
        }
    }

    /// Starts a rank, or reconnects it to the next owner of its card.
    fn connect(&mut self, at: usize, card: usize) {
        self.next += 1;
        let (session, name) = (SessionId(self.next), self.programs[at].name);
        let submitted = self.programs[at].ranks.get(&card).map_or(0, |rank| rank.submitted);
        let rank = Rank { session, gate: Gate::Closed, submitted, has_told: false, steps: 0 };
        self.programs[at].ranks.insert(card, rank);
        let (pid, version) = (self.next as u32, self.version);
        self.event(card, Event::Connected { session, pid, uid: 0, tenant: None });
        let hello = Hello { version, pid, instance: 1, tenant: name.into(), program: name.into(), adopts: false };
        self.say(card, session, FromTenant::Hello(hello));
    }

    fn say(&mut self, card: usize, session: SessionId, message: FromTenant) {
        if self.stopped.contains(&card) {
            return self.unread.push((session, message));
        }
        self.event(card, Event::Said { session, message, pieces: Vec::new() });
    }

    fn event(&mut self, card: usize, event: Event) {
        if self.dead.contains(&card) {
            return;
        }
        self.cores[card].handle(self.step * STEP, event);
        for action in self.cores[card].take_actions() {
            match action {
                Action::Tell { card: to, message } => {
                    self.links.push_back((self.step + TRANSIT, card, to.0 as usize, Packet::Gang(message)));
                }
                Action::Probe { card: to } => {
                    self.probes += 1;
                    self.links.push_back((self.step + TRANSIT, card, to.0 as usize, Packet::Probe));
                }
                Action::LookAt { session, is_overdue } => {
                    self.event(card, Event::Looked { session, stopped: false, is_overdue });
                    if is_overdue {
                        self.given_up.push(session);
                        let has_session = |rank: &Rank| rank.session == session;
                        for program in &mut self.programs {
                            program.ranks.retain(|_, rank| !has_session(rank));
                        }
                        self.event(card, Event::Gone { session });
                    }
                }
                Action::Send { session, message, .. } => self.hear(card, session, &message),
                _ => {}
            }
        }
    }

    fn hear(&mut self, card: usize, session: SessionId, message: &FromOwner) {
        let ranks = self.programs.iter_mut().filter_map(|program| program.ranks.get_mut(&card));
        let Some(rank) = ranks.into_iter().find(|rank| rank.session == session) else { return };
        match message {
            FromOwner::Run(run) => (rank.gate, rank.has_told) = (Gate::Open(run.turn), false),
            FromOwner::Stop { turn, .. } | FromOwner::Drain { turn, .. } => rank.gate = Gate::Closing(*turn, 0),
            FromOwner::Step(run) => {
                assert!(self.version > VERSION_CONCURRENT, "the library knows no steps");
                assert_eq!(rank.gate, Gate::Closed, "a step at an open gate");
                (rank.gate, rank.has_told) = (Gate::Closing(run.turn, 1), false);
            }
            _ => {}
        }
    }

    /// Lets a rank submit, report or request a turn once. Returns false if it is idle.
    fn act(&mut self, at: usize, card: usize) -> bool {
        let program = &mut self.programs[at];
        let done = program.done;
        let Some(rank) = program.ranks.get_mut(&card) else { return false };
        let session = rank.session;
        let may = rank.submitted < done + AHEAD;
        match rank.gate {
            Gate::Open(_) if may => rank.submitted += 1,
            Gate::Closing(turn, left @ 1..) if may => {
                (rank.gate, rank.submitted, rank.steps) =
                    (Gate::Closing(turn, left - 1), rank.submitted + 1, rank.steps + 1);
            }
            Gate::Closing(turn, _) if rank.submitted <= done => {
                (rank.gate, rank.has_told) = (Gate::Closed, true);
                let usage = Usage::default();
                self.say(card, session, FromTenant::Stopped { card: 0, turn, usage, waiting: true });
            }
            Gate::Closed if !rank.has_told => {
                rank.has_told = true;
                self.say(card, session, FromTenant::Waiting { card: 0 });
            }
            _ => return false,
        }
        true
    }

    /// Delivers the packets that are due, except those to stopped owners.
    fn deliver(&mut self) {
        let (now, stopped) = (self.step, self.stopped.clone());
        let is_due = |(at, _, to, _): &(u64, usize, usize, Packet)| *at <= now && !stopped.contains(to);
        let (due, rest) = std::mem::take(&mut self.links).into_iter().partition(is_due);
        self.links = rest;
        let due: VecDeque<_> = due;
        for (_, from, to, packet) in due {
            match packet {
                Packet::Gang(message) => self.event(to, Event::Link(LinkEvent::Said(number(from), message))),
                Packet::Probe => self.links.push_back((self.step + TRANSIT, to, from, Packet::Reply)),
                Packet::Reply => self.event(to, Event::Link(LinkEvent::Replied(number(from)))),
            }
        }
    }

    /// Runs the simulation for `ms` milliseconds.
    fn run(&mut self, ms: u64) {
        self.run_steps(ms * MS / STEP);
    }

    fn run_steps(&mut self, steps: u64) {
        let until = self.step + steps;
        while self.step < until {
            self.deliver();
            for card in (0..self.cores.len()).filter(|card| !self.stopped.contains(card)).collect::<Vec<_>>() {
                self.event(card, Event::Tick);
            }
            for at in 0..self.programs.len() {
                let cards: Vec<usize> = self.programs[at].ranks.keys().copied().collect();
                for card in cards {
                    // Each rank acts in two of three steps.
                    while !(card + at + self.step as usize).is_multiple_of(3) && self.act(at, card) {}
                }
                let program = &mut self.programs[at];
                if !program.ranks.is_empty() && program.ranks.values().all(|rank| rank.submitted > program.done) {
                    program.left = program.left.saturating_sub(STEP);
                    if program.left == 0 {
                        (program.done, program.left) = (program.done + 1, program.kernel_ns);
                    }
                }
            }
            self.check();
            self.step += 1;
        }
    }

    /// Checks that at most one tenant uses each card, not counting tenants whose turns overrun.
    fn check(&self) {
        for (card, core) in self.cores.iter().enumerate().filter(|(card, _)| !self.dead.contains(card)) {
            let open = self.programs.iter().filter(|program| {
                let is_open = program.ranks.get(&card).is_some_and(|rank| rank.gate != Gate::Closed);
                is_open && core.tenant(program.name).is_some_and(|id| !core.turns.turns().overruns(id))
            });
            let open: Vec<_> = open.map(|program| program.name).collect();
            assert!(open.len() <= 1, "{open:?} use card {card} at once");
        }
    }

    /// Kills the owner of a card. Its peers lose their connections to it, and programs on the card run without an
    /// owner.
    fn kill_owner(&mut self, card: usize) {
        self.dead.insert(card);
        self.links.retain(|(_, from, to, _)| *from != card && *to != card);
        for other in 0..self.cores.len() {
            self.event(other, Event::Link(LinkEvent::Lost(number(card))));
        }
        for rank in self.programs.iter_mut().filter_map(|program| program.ranks.get_mut(&card)) {
            rank.gate = Gate::Open(0);
        }
    }

    /// Starts a new owner for a card.
    fn start_owner(&mut self, card: usize, tenants: Tenants) {
        self.cores[card] = core(card, 2, tenants);
        self.dead.remove(&card);
        self.link(card);
        for at in 0..self.programs.len() {
            if self.programs[at].ranks.contains_key(&card) {
                self.connect(at, card);
            }
        }
    }

    /// Stops the owner of card 1 while a kernel on card 0 waits for its peer at the closed gate of card 1.
    fn stop_owner_while_kernel_waits(&mut self) {
        let waits = |program: &Program| {
            let (first, second) = (program.ranks.get(&0), program.ranks.get(&1));
            let pair = first.zip(second);
            pair.is_some_and(|(first, second)| second.gate == Gate::Closed && first.submitted > second.submitted)
        };
        for _ in 0..20_000 {
            if self.programs.iter().any(waits) {
                self.stopped.insert(1);
                return;
            }
            self.run_steps(1);
        }
        panic!("no kernel waits for its peer");
    }

    /// Resumes the owner of a card. The owner then reads the queued packets and messages.
    fn continue_owner(&mut self, card: usize) {
        self.stopped.remove(&card);
        for (session, message) in std::mem::take(&mut self.unread) {
            self.say(card, session, message);
        }
    }

    /// Kills the processes of a program.
    fn kill_program(&mut self, at: usize) {
        for (card, rank) in std::mem::take(&mut self.programs[at].ranks) {
            self.event(card, Event::Gone { session: rank.session });
        }
    }

    /// Runs for `ms` milliseconds, and returns the number of kernels that each program has completed in this time.
    fn progress(&mut self, ms: u64) -> Vec<u64> {
        let before: Vec<u64> = self.programs.iter().map(|program| program.done).collect();
        self.run(ms);
        self.programs.iter().zip(before).map(|(program, before)| program.done - before).collect()
    }

    fn view(&self, card: usize, name: &str) -> gang::GangView {
        let tenants = self.cores[card].view(u64::MAX).tenants;
        tenants.into_iter().find(|tenant| tenant.spec.name == name).and_then(|tenant| tenant.gang).expect("a gang")
    }
}

const PAIR: Tenants = &[("a", &[0, 1], 300), ("b", &[0, 1], 100), ("c", &[0], 200), ("d", &[1], 200)];
const FOUR: Tenants =
    &[("a", &[0, 1], 100), ("b", &[1, 2, 3], 100), ("c", &[0, 3], 100), ("d", &[0, 1, 2, 3], 100), ("e", &[2], 100)];

#[test]
fn gangs_and_single_tenants_of_two_cards_get_their_weights() {
    let mut host = Host::new(2, PAIR);
    host.run(100);
    let done = host.progress(3000);
    let part = |at: usize, of: &[usize]| done[at] as f64 / of.iter().map(|&at| done[at]).sum::<u64>() as f64;
    assert!((part(0, &[0, 1]) - 0.75).abs() < 0.08, "{done:?}");
    assert!((part(2, &[2, 3]) - 0.5).abs() < 0.05, "{done:?}");
    // The tenant with one card gets a third of the card, and gangs lose part of their time.
    assert!(done[2] > 900 && done[0] + done[1] > 1200, "{done:?}");
    for card in 0..2 {
        let view = host.view(card, "a");
        assert!(view.counts.turns > 20 && view.missing.is_empty(), "{view:?}");
    }
}

#[test]
fn gangs_of_four_cards_all_make_progress() {
    let mut host = Host::new(4, FOUR);
    host.run(200);
    for _ in 0..4 {
        let done = host.progress(1000);
        assert!(done.iter().all(|&kernels| kernels > 60), "{done:?}");
    }
    let steps: u64 = host.programs.iter().flat_map(|program| program.ranks.values()).map(|rank| rank.steps).sum();
    assert!(steps > 0, "no kernel was behind a closed gate");
}

#[test]
fn dead_owner_stops_only_its_gangs_until_the_next_one() {
    let mut host = Host::new(4, FOUR);
    host.run(500);
    host.kill_owner(0);
    host.run(200);
    let done = host.progress(1000);
    assert!(done[0] == 0 && done[2] == 0 && done[3] == 0, "{done:?}");
    assert!(done[1] > 350 && done[4] > 350, "others use their cards: {done:?}");
    assert_eq!(host.view(1, "a").missing, BTreeSet::from([number(0)]));
    host.start_owner(0, FOUR);
    host.run(500);
    let done = host.progress(1000);
    assert!(done.iter().all(|&kernels| kernels > 60), "{done:?}");
}

#[test]
fn killed_program_leaves_the_cards_to_others() {
    let mut host = Host::new(2, PAIR);
    for ms in [40, 41, 43, 47, 53, 60] {
        host.run(ms);
        host.kill_program(0);
        let done = host.progress(500);
        assert!(done[0] == 0 && done[1] > 100 && done[2] > 150 && done[3] > 150, "{done:?}");
        host.programs[0].done = 0;
        (0..2).for_each(|card| host.connect(0, card));
        let done = host.progress(500);
        assert!(done.iter().all(|&kernels| kernels > 50), "{done:?}");
    }
}

#[test]
fn silent_owner_delays_only_its_gangs() {
    let mut host = Host::new(4, FOUR);
    host.run(500);
    // The owner is stopped: it does not read messages, and its connections stay open.
    host.dead.insert(3);
    host.run(200);
    let done = host.progress(1000);
    assert!(done[0] > 200 && done[4] > 300, "{done:?}");
    assert_eq!([done[1], done[2], done[3]], [0; 3]);
}

/// Creates the two cards of `PAIR`, and limits each gang's work to 1 s.
fn limited_pair() -> Host {
    let mut host = Host::new(2, PAIR);
    for core in &mut host.cores {
        for name in ["a", "b"] {
            let id = core.tenant(name).expect("there");
            let mut spec =
                core.view(u64::MAX).tenants.into_iter().find(|tenant| tenant.spec.name == name).unwrap().spec;
            spec.time.max_run_ns = Some(1000 * MS);
            core.change_tenant(id, &spec).expect("valid");
        }
    }
    host
}

#[test]
fn programs_survive_a_stopped_owner_of_another_card() {
    for ms in [100, 300] {
        let mut host = limited_pair();
        host.run(ms);
        host.stop_owner_while_kernel_waits();
        host.run(3000);
        assert!(host.probes > 0, "the owner of the other card is probed");
        host.continue_owner(1);
        // The gang is charged for the time during which its kernel occupied the card, and waits until its budget is
        // positive again.
        let before: Vec<u64> = host.programs.iter().map(|program| program.done).collect();
        let progressed =
            |host: &Host| host.programs.iter().zip(&before).all(|(program, &done)| program.done > done + 20);
        for _ in 0..40 {
            if !progressed(&host) {
                host.run(1000);
            }
        }
        assert_eq!(host.given_up, []);
        assert!(progressed(&host));
    }
}

#[test]
fn owner_that_stays_stopped_protects_no_program_forever() {
    let mut host = limited_pair();
    host.run(100);
    host.stop_owner_while_kernel_waits();
    host.run(20_000);
    assert_eq!(host.given_up, []);
    host.run(15_000);
    assert_eq!(host.given_up.len(), 1, "its kernel occupies the card");
}

#[test]
fn endless_kernel_of_a_gang_is_given_up_at_its_limit() {
    let mut host = limited_pair();
    host.run(100);
    host.programs[0].left = u64::MAX;
    host.run(3000);
    assert!(host.probes > 0 && !host.given_up.is_empty(), "all owners respond");
}

#[test]
fn libraries_of_version_7_get_steps_and_earlier_ones_do_not() {
    for version in [VERSION_CONCURRENT, VERSION_GANGS] {
        let mut host = Host::new(1, &[("c", &[0], 100)]);
        host.version = version;
        host.cores = (0..4).map(|card| core(card, 3, FOUR)).collect();
        host.programs.clear();
        (1..4).for_each(|card| host.link(card));
        for (name, cards, _) in FOUR {
            host.start(name, cards, 1_000_000);
        }
        host.run(500);
        let done = host.progress(1000);
        assert!(done.iter().all(|&kernels| kernels > 50), "{done:?}");
        let steps: u64 = host.programs.iter().flat_map(|program| program.ranks.values()).map(|rank| rank.steps).sum();
        assert_eq!(steps > 0, version == VERSION_GANGS, "{steps} steps with version {version}");
    }
}

#[test]
fn impossible_cards_are_refused() {
    let mut core = core(0, 4, PAIR);
    let gang = |cards: &[u32], id: u32| gang_of(id, cards.iter().copied());
    for gang in [gang(&[0], 9), gang(&[1, 2], 9), gang(&[0, 1], 1)] {
        let refused = core.add_tenant(TenantSpec { gang: Some(gang), ..spec("x", 8, Limits::default()) });
        assert!(matches!(refused, Err(TenantError::Cards(..))), "{refused:?}");
    }
    assert_eq!(core.tenant("x"), None);
    let id = core.tenant("a").expect("there");
    core.remove_tenant(id).expect("it has no programs");
    let again = TenantSpec { gang: Some(gang(&[0, 1], 1)), ..spec("a", 8, Limits::default()) };
    core.add_tenant(again).expect("the number is free again");
}
