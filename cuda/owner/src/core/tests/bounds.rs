//! Tests how many steps of work one message causes in the serving thread. The card has the maximum size: 192 GiB in
//! chunks of 2 MiB.

use super::*;
use cuda_protocol::{FixedKind, Hello, MAX_CHUNKS, MAX_EXPORTED, MAX_PENDING, Refusal, VERSION};

/// Number of chunks of a card of the maximum size.
const CHUNKS: u64 = (192 << 30) / CHUNK;
/// Maximum number of steps per event: the limit on deferred work, plus the message's own steps (see the table in
/// `cuda-protocol`).
const EVENT_MOST: u64 = WORK_AT_ONCE as u64 + 64;

/// A core without simulated programs. The test decides when pieces are allocated.
struct Bare {
    core: Core,
    answers: Vec<(SessionId, FromOwner)>,
    makes: std::collections::VecDeque<PieceId>,
    /// Largest number of steps that an event has taken so far.
    most: u64,
    next: u64,
}

impl Bare {
    fn new(chunks: u64) -> Self {
        let config = CardConfig {
            host_bytes: 0,
            chunk_bytes: CHUNK,
            host_ready_bytes: 0,
            ..CardConfig::new(2 * chunks * CHUNK)
        };
        let mut core = Core::new(config, 1).expect("the settings are in bounds");
        for name in ["one", "two"] {
            core.add_tenant(spec(name, chunks, Limits::default())).expect("the request is valid");
        }
        let (answers, makes) = Default::default();
        Self { core, answers, makes, most: 0, next: 0 }
    }

    fn event(&mut self, event: Event) -> u64 {
        let before = self.core.steps();
        self.core.handle(0, event);
        let steps = self.core.steps() - before;
        self.most = self.most.max(steps);
        for action in self.core.take_actions() {
            match action {
                Action::Send { session, message, .. } => self.answers.push((session, message)),
                Action::Make { piece, .. } => self.makes.push_back(piece),
                _ => {}
            }
        }
        steps
    }

    fn connect(&mut self, tenant: &str) -> SessionId {
        self.next += 1;
        let session = SessionId(self.next);
        self.event(Event::Connected { session, pid: self.next as u32, uid: 1000, tenant: None });
        let (tenant, program) = (tenant.to_owned(), "test".to_owned());
        let hello = Hello { version: VERSION, pid: 1, instance: 1, tenant, program, adopts: false };
        self.say(session, FromTenant::Hello(hello));
        session
    }

    fn say(&mut self, session: SessionId, message: FromTenant) -> u64 {
        self.event(Event::Said { session, message, pieces: Vec::new() })
    }

    /// Runs all pending events. Returns their number.
    fn settle(&mut self) -> u64 {
        let mut events = 0;
        loop {
            if let Some(piece) = self.makes.pop_front() {
                self.event(Event::Made { piece, memory: Some(Memory::Device) });
            } else if self.core.has_work() {
                self.event(Event::Tick);
            } else {
                return events;
            }
            events += 1;
            assert!(events < 10 * CHUNKS, "the events never end");
        }
    }

    /// Returns a process's chunks, as listed in the replies to it.
    fn chunks(&self, of: SessionId) -> Vec<ChunkId> {
        let granted = self.answers.iter().filter_map(|(session, message)| match message {
            FromOwner::Granted { chunks, .. } if *session == of => Some(chunks.iter().map(|chunk| chunk.id)),
            _ => None,
        });
        granted.flatten().collect()
    }

    fn answered(&self, of: SessionId, is: impl Fn(&FromOwner) -> bool) -> usize {
        self.answers.iter().filter(|(session, message)| *session == of && is(message)).count()
    }
}

#[test]
fn whole_card_allocation_is_split_and_neighbour_waits_one_part() {
    let mut bare = Bare::new(CHUNKS);
    let (one, two) = (bare.connect("one"), bare.connect("two"));
    bare.say(one, FromTenant::Allocate { request: 1, card: 0, chunks: CHUNKS as u32 });
    assert!(
        bare.makes.len() <= memory::MAKING_MOST as usize,
        "{} pieces before those of other tenants",
        bare.makes.len()
    );
    bare.say(two, FromTenant::Allocate { request: 1, card: 0, chunks: 4 });
    // The neighbour's four chunks arrive after one batch of the other tenant's chunks.
    let ahead = bare.makes.len();
    for _ in 0..ahead {
        let piece = bare.makes.pop_front().expect("counted");
        bare.event(Event::Made { piece, memory: Some(Memory::Device) });
    }
    assert_eq!(bare.chunks(two).len(), 4);
    bare.settle();
    assert_eq!(bare.chunks(one).len() as u64, CHUNKS);
    assert_eq!(bare.answered(one, |m| matches!(m, FromOwner::Granted { more: false, .. })), 1);
    // The process's memory is released over several events.
    let before = bare.event(Event::Gone { session: one });
    assert!(before <= EVENT_MOST, "{before}");
    bare.say(two, FromTenant::Allocate { request: 2, card: 0, chunks: 1 });
    let piece = bare.makes.pop_front().expect("a neighbour's request does not wait for the release");
    bare.event(Event::Made { piece, memory: Some(Memory::Device) });
    assert_eq!(bare.chunks(two).len(), 5);
    bare.settle();
    assert_eq!(u64::from(bare.core.view(0).memory.summary.free), 2 * CHUNKS - 5);
    assert!(bare.most <= EVENT_MOST, "{} steps", bare.most);
}

#[test]
fn all_of_the_card_as_fixed_memory_takes_linear_work_in_parts() {
    let mut bare = Bare::new(CHUNKS);
    let one = bare.connect("one");
    let bytes = CHUNKS * CHUNK;
    let (card, kind) = (0, FixedKind::Driver);
    let begin = bare.core.steps();
    bare.say(one, FromTenant::Fix { request: 1, card, kind, bytes });
    // Requests that arrive while the first request is in progress get their replies afterwards, in order.
    bare.say(one, FromTenant::Fix { request: 2, card, kind, bytes: 1 });
    bare.say(one, FromTenant::Fix { request: 3, card, kind: FixedKind::Host, bytes });
    bare.settle();
    let answers = bare.answers.iter().map(|(_, message)| message);
    let answers: Vec<_> = answers.skip_while(|m| matches!(m, FromOwner::Welcome(_))).collect();
    assert!(
        matches!(
            answers[..],
            [
                FromOwner::Fixed { request: 1 },
                FromOwner::Refused { request: 2, reason: Refusal::Quota },
                FromOwner::Fixed { request: 3 }
            ]
        ),
        "{answers:?}"
    );
    let placed = bare.core.steps() - begin;
    assert!(placed < 2 * CHUNKS, "{placed} steps for {CHUNKS} chunks");
    // A request for chunks that were just freed succeeds although their release is in progress.
    bare.say(one, FromTenant::Unfix { card, kind, bytes });
    bare.say(one, FromTenant::Fix { request: 4, card, kind, bytes });
    bare.say(one, FromTenant::Unfix { card, kind, bytes });
    bare.say(one, FromTenant::Allocate { request: 5, card: 0, chunks: 1 });
    bare.settle();
    assert_eq!(bare.answered(one, |m| matches!(m, FromOwner::Fixed { request: 4 })), 1);
    assert_eq!(u64::from(bare.core.view(0).memory.summary.free), 2 * CHUNKS - 1);
    assert!(bare.most <= EVENT_MOST, "{} steps", bare.most);
}

#[test]
fn memory_that_is_being_released_is_waited_for_not_refused() {
    let mut bare = Bare::new(CHUNKS);
    let one = bare.connect("one");
    bare.say(one, FromTenant::Allocate { request: 1, card: 0, chunks: CHUNKS as u32 });
    bare.settle();
    let again = bare.connect("one");
    bare.event(Event::Gone { session: one });
    bare.say(again, FromTenant::Allocate { request: 1, card: 0, chunks: CHUNKS as u32 });
    bare.settle();
    assert_eq!(bare.chunks(again).len() as u64, CHUNKS);
}

#[test]
fn opened_chunks_are_counted_and_their_end_is_linear() {
    let mut bare = Bare::new(MAX_EXPORTED as u64);
    let (one, two) = (bare.connect("one"), bare.connect("one"));
    bare.say(one, FromTenant::Allocate { request: 1, card: 0, chunks: MAX_EXPORTED as u32 });
    bare.settle();
    let chunks = bare.chunks(one);
    let repeated = vec![chunks[0]; MAX_EXPORTED];
    bare.say(one, FromTenant::Export { request: 2, chunks: repeated });
    assert_eq!(bare.answered(one, |m| matches!(m, FromOwner::Refused { request: 2, reason: Refusal::Invalid })), 1);
    bare.say(one, FromTenant::Export { request: 3, chunks });
    let share = bare.answers.iter().find_map(|(_, message)| match message {
        FromOwner::Shared { share, .. } => Some(*share),
        _ => None,
    });
    let share = share.expect("a token");
    let mut opened = 0;
    for request in 0..1000 {
        let steps = bare.say(two, FromTenant::Open { request, share });
        assert!(steps <= EVENT_MOST + 2 * MAX_EXPORTED as u64, "{steps}");
        opened = bare.chunks(two).len();
    }
    assert!(bare.answered(two, |m| matches!(m, FromOwner::Refused { reason: Refusal::Exhausted, .. })) > 900);
    assert!(opened > 32 * MAX_EXPORTED, "an honest tenant's processes may each open all of it: {opened}");
    bare.most = 0;
    let begin = bare.core.steps();
    bare.event(Event::Gone { session: two });
    bare.settle();
    assert!(bare.core.steps() - begin < 3 * opened as u64, "the end of a process is linear in what it had");
    assert!(bare.most <= EVENT_MOST, "{} steps", bare.most);
    assert!(bare.core.may_use(bare.core.tenant("one").expect("there"), 1000));
}

#[test]
fn a_token_opens_nothing_once_one_of_its_chunks_is_another() {
    let mut bare = Bare::new(8);
    let (one, two) = (bare.connect("one"), bare.connect("one"));
    bare.say(one, FromTenant::Allocate { request: 1, card: 0, chunks: 2 });
    bare.settle();
    let chunks = bare.chunks(one);
    bare.say(one, FromTenant::Export { request: 2, chunks: chunks.clone() });
    let share = bare.answers.iter().find_map(|(_, message)| match message {
        FromOwner::Shared { share, .. } => Some(*share),
        _ => None,
    });
    let share = share.expect("a token");
    bare.say(one, FromTenant::Free { chunks: vec![chunks[1]] });
    let refused =
        |bare: &Bare| bare.answered(two, |m| matches!(m, FromOwner::Refused { reason: Refusal::Invalid, .. }));
    bare.say(two, FromTenant::Open { request: 1, share });
    assert_eq!(refused(&bare), 1);
    // The index now belongs to another chunk.
    bare.say(one, FromTenant::Allocate { request: 3, card: 0, chunks: 1 });
    bare.settle();
    bare.say(two, FromTenant::Open { request: 2, share });
    assert_eq!((refused(&bare), bare.chunks(two).len()), (2, 0));
}

#[test]
fn costliest_message_of_each_kind_is_bounded_on_largest_card() {
    let mut bare = Bare::new(CHUNKS);
    let one = bare.connect("one");
    bare.say(one, FromTenant::Allocate { request: 1, card: 0, chunks: CHUNKS as u32 - 100 });
    bare.settle();
    let chunks = bare.chunks(one);
    // Create tokens with the maximum number of chunks until a limit on tokens is reached.
    for start in 0..400 {
        let chunks = chunks[start..start + MAX_EXPORTED].to_vec();
        bare.say(one, FromTenant::Export { request: 2, chunks });
    }
    let (tokens, named) = bare.core.shares.count(bare.core.tenant("one").expect("there"));
    assert!(tokens >= 100 && named <= 1 << 18, "{tokens} {named}");
    let last = chunks[chunks.len() - MAX_CHUNKS..].to_vec();
    let (card, kind) = (0, FixedKind::Array);
    let token = Share([9; 32]);
    let messages = [
        FromTenant::Free { chunks: chunks[..MAX_CHUNKS].to_vec() },
        FromTenant::Allocate { request: 3, card, chunks: 90 },
        FromTenant::Allocate { request: 3, card, chunks: u32::MAX },
        FromTenant::Fix { request: 3, card, kind, bytes: u64::MAX },
        FromTenant::Fix { request: 3, card, kind, bytes: 90 * CHUNK },
        FromTenant::Unfix { card, kind, bytes: u64::MAX },
        FromTenant::AskMemory { request: 3, card },
        FromTenant::AskProcesses { request: 3, card },
        FromTenant::Quiet { order: 1 },
        FromTenant::Busy { order: 1 },
        FromTenant::Redirected { order: 1, moved: u32::MAX },
        FromTenant::Waiting { card },
        FromTenant::Stopped { card, turn: 1, usage: Usage::default(), waiting: true },
        FromTenant::Ending { card, turn: 1, in_us: u32::MAX },
        FromTenant::Used { card, turn: 1, usage: Usage::default() },
        FromTenant::Export { request: 3, chunks: chunks[1000..1000 + MAX_EXPORTED].to_vec() },
        FromTenant::Open { request: 3, share: token },
        FromTenant::Free { chunks: last },
        FromTenant::Goodbye(End::Leaving),
    ];
    bare.settle();
    for message in messages {
        let name = format!("{message:?}");
        let steps = bare.say(one, message);
        let name = &name[..name.len().min(40)];
        // An export visits its own chunks and the chunks of a few tokens.
        let most = EVENT_MOST + if name.starts_with("Export") { 6 * MAX_EXPORTED as u64 } else { 0 };
        assert!(steps <= most, "{name}: {steps} steps");
        bare.settle();
    }
}

#[test]
fn requests_beyond_pending_limit_are_rejected_connection_stays() {
    let mut bare = Bare::new(200);
    let limits = Limits { on_full: OnFull::Queue, ..Limits::default() };
    bare.core.add_tenant(spec("waits", 200, limits)).expect("the request is valid");
    for tenant in ["one", "two"] {
        let session = bare.connect(tenant);
        bare.say(session, FromTenant::Allocate { request: 0, card: 0, chunks: 200 });
    }
    bare.settle();
    let one = bare.connect("waits");
    for request in 1..=MAX_PENDING as u32 + 3 {
        bare.say(one, FromTenant::Allocate { request, card: 0, chunks: 1 });
    }
    assert_eq!(bare.answered(one, |m| matches!(m, FromOwner::Refused { reason: Refusal::Crowded, .. })), 3);
    assert_eq!(bare.answered(one, |m| matches!(m, FromOwner::Refused { .. })), 3);
    assert_eq!(bare.answered(one, |m| matches!(m, FromOwner::Goodbye(_))), 0, "its connection stays");
    bare.say(one, FromTenant::AskMemory { request: 99, card: 0 });
    assert_eq!(bare.answered(one, |m| matches!(m, FromOwner::Memory { request: 99, .. })), 1);
}

#[test]
fn requests_of_a_connection_that_ended_leave_the_queue() {
    let mut bare = Bare::new(1000);
    for request in 0..100 {
        let one = bare.connect("one");
        bare.say(one, FromTenant::Allocate { request, card: 0, chunks: 1000 });
        bare.event(Event::Gone { session: one });
    }
    assert!(bare.core.making.is_empty() && bare.core.hungry.is_empty(), "no request waits");
    let tenant = bare.core.tenant("one").expect("there");
    assert_eq!((bare.core.tenants[&tenant].making, bare.core.tenants[&tenant].wanted), (0, 0));
}

#[test]
fn adopted_duplicate_or_future_number_is_rejected() {
    // Returns the chunk numbers to test, given the last number that the owner has assigned. A program that lost its
    // connection may use numbers that were already assigned.
    type Ids = fn(u64) -> Vec<u64>;
    let cases: [(Ids, usize); 4] =
        [(|_| vec![5, 5], 1), (|last| vec![last + 1], 1), (|last| vec![last + 1000], 1), (|last| vec![last], 0)];
    for (ids, violations) in cases {
        let mut bare = Bare::new(8);
        bare.next += 1;
        let session = SessionId(bare.next);
        bare.event(Event::Connected { session, pid: 1, uid: 1000, tenant: None });
        let (tenant, program) = ("one".to_owned(), "test".to_owned());
        bare.say(
            session,
            FromTenant::Hello(Hello { version: VERSION, pid: 1, instance: 1, tenant, program, adopts: true }),
        );
        let chunk = |id: u64| Adopted { card: 0, id: ChunkId(id), place: Place::Device, descriptor: false };
        let chunks = ids(bare.core.next).into_iter().map(chunk).collect();
        bare.say(session, FromTenant::Adopt { chunks, more: false });
        assert_eq!(bare.answered(session, |m| matches!(m, FromOwner::Goodbye(End::Violation))), violations);
        bare.event(Event::Gone { session });
        assert_eq!(bare.core.view(0).memory.summary.free, 16, "no tokens are left");
    }
}

#[test]
fn adopted_number_of_pending_request_is_rejected() {
    let mut bare = Bare::new(8);
    bare.next += 1;
    let session = SessionId(bare.next);
    bare.event(Event::Connected { session, pid: 1, uid: 1000, tenant: None });
    let (tenant, program) = ("one".to_owned(), "test".to_owned());
    bare.say(
        session,
        FromTenant::Hello(Hello { version: VERSION, pid: 1, instance: 1, tenant, program, adopts: true }),
    );
    let chunk = |id: u64, descriptor| Adopted { card: 0, id: ChunkId(id), place: Place::Device, descriptor };
    // The only descriptor belongs to the second chunk.
    let piece = bare.core.piece_number();
    let message = FromTenant::Adopt { chunks: vec![chunk(5, false), chunk(6, true)], more: true };
    bare.event(Event::Said { session, message, pieces: vec![piece] });
    assert_eq!(bare.core.adopters.get(&piece), Some(&(session, ChunkId(6))));
    bare.say(session, FromTenant::Allocate { request: 1, card: 0, chunks: 1 });
    let given = bare.core.next;
    bare.say(session, FromTenant::Adopt { chunks: vec![chunk(given, false)], more: true });
    assert_eq!(bare.answered(session, |m| matches!(m, FromOwner::Goodbye(End::Violation))), 1);
    bare.event(Event::Gone { session });
    bare.settle();
    assert_eq!(bare.core.view(0).memory.summary.free, 16, "no tokens are left");
}

#[test]
fn connections_are_bounded_per_tenant() {
    let mut bare = Bare::new(8);
    bare.core.config.connections_most = 3;
    let many: Vec<_> = (0..5).map(|_| bare.connect("one")).collect();
    let crowded = |bare: &Bare, id| bare.answered(id, |m| matches!(m, FromOwner::Goodbye(End::Crowded)));
    assert_eq!(many.iter().map(|&id| crowded(&bare, id)).collect::<Vec<_>>(), [0, 0, 0, 1, 1]);
    let two = bare.connect("two");
    assert_eq!(bare.answered(two, |m| matches!(m, FromOwner::Welcome(_))), 1);
}
