//! Tests the time for moving memory between tenants, on a simulated clock. The workers, the link and the programs have
//! the latencies of a real card.

use super::*;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

const US: u64 = 1_000;
const MS: u64 = 1_000 * US;
/// Chunk size in bytes. The following times are for chunks of this size.
const CHUNK: u64 = 16 << 20;
/// Time to allocate a piece on the card, in ns, like all times here.
const MAKE: u64 = 130 * US;
/// Time to zero a piece, including the wait for a time slice of the card while other programs are working.
const ZERO: u64 = MS;
/// Number of pieces zeroed per wait.
const ZEROED_PER_WAIT: u64 = 16;
/// Time to pin host memory for a piece.
const PIN: u64 = 3_200 * US;
/// Time to release a piece.
const DROP: u64 = 73 * US;
/// Time to copy a chunk over the link while both directions are in use.
const COPY: u64 = 350 * US;
/// Time to start a batch of copies and to wait until it completes.
const COPY_BATCH: u64 = 60 * US;
/// Time to unmap a chunk in a program.
const UNMAP: u64 = 35 * US;
/// Time to map a relocated chunk on the card in a program, at the chunk's old addresses.
const MAP: u64 = 70 * US;
/// Time to receive a message from the owner and to reply to it.
const WORD: u64 = 50 * US;
/// Time to quiesce a program and end its turn.
const DRAIN: u64 = 2 * MS;
/// Time to use new memory for the first time, and to send the next request.
const USE: u64 = 100 * US;

/// An event or message that is scheduled for the state machine.
#[derive(Debug)]
enum Next {
    Tell(Event),
    Say(SessionId, FromTenant),
}

/// An actor that performs one task at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Hand {
    Card,
    Host,
    Out,
    In,
    Program(SessionId),
}

/// A program that requests its memory in parts. It requests the next part as soon as its work on the previous one can
/// run.
#[derive(Debug)]
struct Fill {
    left: u32,
    has: bool,
}

struct Timed {
    core: Core,
    now: u64,
    order: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    what: BTreeMap<u64, Next>,
    /// Time when each actor becomes idle, in ns.
    busy: BTreeMap<Hand, u64>,
    memory: BTreeMap<PieceId, Memory>,
    /// Start of each program's current turn, and the total duration of its earlier turns, in ns.
    runs: BTreeMap<SessionId, (Option<u64>, u64)>,
    copies: BTreeMap<Memory, u64>,
    fills: BTreeMap<SessionId, Fill>,
}

impl Timed {
    fn new(config: CardConfig) -> Self {
        let core = Core::new(config, 7).expect("in bounds");
        let (what, busy, memory, runs, copies, fills) = Default::default();
        let queue = BinaryHeap::new();
        let mut timed = Self { core, now: 0, order: 0, queue, what, busy, memory, runs, copies, fills };
        timed.take_actions();
        timed
    }

    fn connect(&mut self, name: &str) -> SessionId {
        let session = SessionId(self.runs.len() as u64 + 1);
        self.runs.insert(session, (None, 0));
        self.tell(Event::Connected { session, pid: 100 + session.0 as u32, uid: 0, tenant: None });
        let (tenant, program) = (name.to_owned(), String::new());
        let version = cuda_protocol::VERSION;
        let hello = cuda_protocol::Hello { version, pid: 1, instance: 1, tenant, program, adopts: false };
        self.say(session, FromTenant::Hello(hello));
        session
    }

    fn tell(&mut self, event: Event) {
        if let Event::Made { piece, memory: Some(memory) } = event {
            self.memory.insert(piece, memory);
        }
        self.core.handle(self.now, event);
        self.take_actions();
    }

    fn say(&mut self, session: SessionId, message: FromTenant) {
        self.tell(Event::Said { session, message, pieces: Vec::new() });
    }

    /// Adds `ns` nanoseconds of work for `hand`, and schedules `next` for its completion.
    fn after(&mut self, hand: Hand, ns: u64, next: Option<Next>) {
        let busy = self.busy.entry(hand).or_default();
        *busy = (*busy).max(self.now) + ns;
        self.order += 1;
        if let Some(next) = next {
            self.queue.push(Reverse((*busy, self.order)));
            self.what.insert(self.order, next);
        }
    }

    fn take_actions(&mut self) {
        for action in self.core.take_actions() {
            match action {
                Action::Make { piece, memory, zeroed } => {
                    let made = Next::Tell(Event::Made { piece, memory: Some(memory) });
                    let (hand, ns) = match memory {
                        Memory::Device => (Hand::Card, MAKE + if zeroed { ZERO / ZEROED_PER_WAIT } else { 0 }),
                        Memory::Host => (Hand::Host, PIN),
                    };
                    self.after(hand, ns, Some(made));
                }
                Action::Drop { piece } => {
                    let host = self.memory.remove(&piece) == Some(Memory::Host);
                    self.after(if host { Hand::Host } else { Hand::Card }, DROP, None);
                }
                Action::Copy { batch, pieces, to } => {
                    *self.copies.entry(to).or_default() += pieces.len() as u64;
                    let ns = COPY_BATCH + pieces.len() as u64 * COPY;
                    let done = Next::Tell(Event::Copied { batch, done: true, ns });
                    self.after(if to == Memory::Host { Hand::Out } else { Hand::In }, ns, Some(done));
                }
                Action::Send { session, message, .. } => self.hear(session, message),
                other => panic!("{other:?}"),
            }
        }
    }

    fn hear(&mut self, session: SessionId, message: FromOwner) {
        let hand = Hand::Program(session);
        let now = self.now;
        let run = self.runs.get_mut(&session).expect("connected");
        match message {
            FromOwner::Quiesce { order, .. } => {
                self.after(hand, DRAIN, Some(Next::Say(session, FromTenant::Quiet { order })));
            }
            FromOwner::Redirect { order, moves } => {
                let moved = moves.len() as u32;
                let said = Next::Say(session, FromTenant::Redirected { order, moved });
                let each = moves.iter().map(|chunk| if chunk.place == Place::Host { UNMAP } else { MAP });
                self.after(hand, WORD + each.sum::<u64>(), Some(said));
            }
            FromOwner::Reclaim { order } => {
                self.after(hand, WORD, Some(Next::Say(session, FromTenant::Reclaimed { order })));
            }
            FromOwner::Run(_) => run.0 = run.0.or(Some(now)),
            FromOwner::Stop { card, turn } => {
                if let Some(since) = run.0.take() {
                    run.1 += now - since;
                }
                let usage = Usage::default();
                let stopped = FromTenant::Stopped { card, turn, usage, waiting: true };
                self.after(hand, DRAIN, Some(Next::Say(session, stopped)));
            }
            FromOwner::Granted { more: false, .. } => {
                if let Some(fill) = self.fills.get_mut(&session) {
                    fill.has = true;
                }
            }
            FromOwner::Refused { .. } => panic!("{message:?}"),
            _ => {}
        }
        self.fill(session);
    }

    fn fill(&mut self, session: SessionId) {
        let runs = self.runs[&session].0.is_some();
        let Some(fill) = self.fills.get_mut(&session).filter(|fill| runs && fill.has && fill.left > 0) else { return };
        (fill.has, fill.left) = (false, fill.left - 1);
        let ask = FromTenant::Allocate { request: fill.left, card: 0, chunks: 16 };
        self.after(Hand::Program(session), USE, Some(Next::Say(session, ask)));
    }

    /// Returns true if a program has received all memory that it requested.
    fn is_full(&self, session: SessionId) -> bool {
        self.fills.get(&session).is_some_and(|fill| fill.has && fill.left == 0)
    }

    /// Runs all events up to the time `until`.
    fn run(&mut self, until: u64) {
        while self.now < until {
            let tick = self.core.next_wakeup().map_or(u64::MAX, |ns| self.now + ns);
            let next = self.queue.peek().map_or(u64::MAX, |Reverse((at, _))| *at);
            self.now = tick.min(next).min(until);
            if next == self.now {
                let Reverse((_, order)) = self.queue.pop().expect("the action exists");
                match self.what.remove(&order).expect("kept") {
                    Next::Tell(event) => self.tell(event),
                    Next::Say(session, message) => self.say(session, message),
                }
            } else {
                self.tell(Event::Tick);
            }
        }
    }

    /// Returns the total duration of all turns, in ns.
    fn ran(&self) -> u64 {
        self.runs.values().map(|(since, sum)| sum + since.map_or(0, |since| self.now - since)).sum()
    }
}

/// Creates two tenants whose programs have work, and memory quanta of one second. `ready` is the number of host pieces
/// pinned in advance.
fn two_at_once(ready: u64) -> (Timed, [SessionId; 2]) {
    let mut config = CardConfig::new(640 * CHUNK);
    (config.host_bytes, config.host_ready_bytes) = (1024 * CHUNK, ready * CHUNK);
    config.quanta.mode = vram::Mode::Forced;
    (config.quanta.min_ns, config.quanta.max_ns) = (1_000 * MS, 1_000 * MS);
    let mut timed = Timed::new(config);
    for name in ["one", "two"] {
        let spec = TenantSpec { memory_bytes: 640 * CHUNK, ..world::spec(name, 0, Limits::default()) };
        timed.core.add_tenant(spec).expect("the request is valid");
    }
    // After this time, the stock is full.
    timed.run(5_000 * MS);
    let sessions = ["one", "two"].map(|name| timed.connect(name));
    for session in sessions {
        timed.say(session, FromTenant::Waiting { card: 0 });
    }
    (timed, sessions)
}

/// Creates the programs of [`two_at_once`], each of which fills four fifths of the card.
fn two_that_do_not_fit(ready: u64) -> Timed {
    let (mut timed, sessions) = two_at_once(ready);
    for request in 0..32 {
        for session in sessions {
            timed.say(session, FromTenant::Allocate { request, card: 0, chunks: 16 });
        }
        timed.run(timed.now + 5 * MS);
    }
    timed
}

#[test]
fn quantum_change_moves_memory_at_about_link_speed() {
    let mut timed = two_that_do_not_fit(512);
    timed.run(timed.now + 3_000 * MS);
    let (start, ran) = (timed.now, timed.ran());
    let before = timed.copies.clone();
    timed.run(start + 10_000 * MS);
    let changes = (timed.copies[&Memory::Device] - before[&Memory::Device]) / 384;
    assert!(changes >= 7, "{:?}", timed.copies);
    let lost = (timed.now - start - (timed.ran() - ran)) / changes;
    // A change of quanta takes little longer than the copies in one direction, because both directions of the link are
    // used concurrently. The last batch to the card completes after the last eviction.
    assert!(lost <= 384 * COPY * 11 / 10, "a change takes {} us, and the link {} us", lost / US, 384 * COPY / US);
}

#[test]
fn first_quantum_does_not_wait_for_stock_refill() {
    let mut timed = two_that_do_not_fit(512);
    let (start, ran) = (timed.now, timed.ran());
    timed.run(start + 1_000 * MS);
    let lost = timed.now - start - (timed.ran() - ran);
    // The stock is 120 pieces too small, so these are pinned during the change.
    assert!(lost <= 120 * PIN + 200 * MS, "the first quantum begins after {} ms", lost / MS);
}

#[test]
fn memory_filled_during_quantum_is_on_card() {
    let (mut timed, [one, two]) = two_at_once(512);
    let wait = |timed: &mut Timed, until: &dyn Fn(&Timed) -> bool| {
        let start = timed.now;
        while !until(timed) {
            timed.run(timed.now + MS);
            assert!(timed.now < start + 5_000 * MS, "the change takes too long");
        }
        timed.now - start
    };
    let fill = |timed: &mut Timed, session| {
        timed.fills.insert(session, Fill { left: 32, has: true });
        timed.fill(session);
    };
    fill(&mut timed, one);
    let alone = wait(&mut timed, &|timed: &Timed| timed.is_full(one));
    fill(&mut timed, two);
    let holds = |timed: &Timed| timed.core.memory_turn().is_some_and(|turn| turn.holder.0 == 2);
    wait(&mut timed, &|timed: &Timed| holds(timed) && timed.runs[&two].0.is_some());
    let on_card = |timed: &Timed, tenant: usize| u64::from(timed.core.view(0).memory_of(tenant).placed);
    let (before, missing) = (timed.copies.clone(), 512 - on_card(&timed, 1));
    assert!(missing > 300, "most of it is allocated in its quantum");
    let took = wait(&mut timed, &|timed: &Timed| timed.is_full(two));
    let copied = |memory| timed.copies.get(&memory).unwrap_or(&0) - before.get(&memory).unwrap_or(&0);
    assert_eq!((copied(Memory::Device), on_card(&timed, 1)), (0, 512), "no memory was used over the link at first");
    // Both tenants have 512 chunks, and the card has 640. Evictions run up to 64 chunks ahead of the requests.
    let excess = 2 * 512 - 640;
    assert!((excess - 16..=excess + 80).contains(&copied(Memory::Host)), "{} chunks", copied(Memory::Host));
    assert!(took <= alone + excess * COPY * 4 / 3, "{} ms, {} ms alone", took / MS, alone / MS);
}

#[test]
fn nothing_is_pinned_in_the_gaps_between_moves() {
    let (mut timed, [one, two]) = two_at_once(512);
    timed.say(one, FromTenant::Allocate { request: 1, card: 0, chunks: 640 });
    timed.say(two, FromTenant::Allocate { request: 1, card: 0, chunks: 16 });
    let stocked = |timed: &Timed| timed.core.view(0).pieces.1;
    timed.run(timed.now + 50 * MS);
    let before = stocked(&timed);
    timed.run(timed.now + 100 * MS);
    assert_eq!(stocked(&timed), before, "memory has just moved");
    timed.run(timed.now + 500 * MS);
    assert!(stocked(&timed) > before, "the stock is refilled");
}

#[test]
fn quantum_begins_although_others_keep_fixed_memory() {
    const FIXED: u64 = 32 * CHUNK;
    let (mut timed, sessions) = two_at_once(1024);
    for session in sessions {
        timed.say(session, FromTenant::Fix { request: 1, card: 0, kind: FixedKind::Driver, bytes: FIXED });
    }
    timed.run(timed.now + 5 * MS);
    for request in 2..39 {
        for session in sessions {
            timed.say(session, FromTenant::Allocate { request, card: 0, chunks: 16 });
        }
        timed.run(timed.now + 5 * MS);
    }
    timed.run(timed.now + 4_000 * MS);
    let (start, ran) = (timed.now, timed.ran());
    let before = timed.copies.clone();
    timed.run(start + 10_000 * MS);
    let copied = timed.copies[&Memory::Device] - before[&Memory::Device];
    let lost = timed.now - start - (timed.ran() - ran);
    assert!(copied > 2000, "{copied} chunks have returned");
    // Waiting for the other program's fixed memory would take about as long as all moves together.
    assert!(lost <= copied * COPY * 8 / 7, "moving {copied} chunks takes {} ms", lost / MS);
}
