//! Simulates a card, its worker threads and the programs' shims for the state machine.

use super::*;
use cuda_protocol::{Adopted, Chunk, End, FromTenant, Hello, Run, Usage, VERSION, VERSION_VISIBLE_CARDS};
use owner_driver::{FetchTimes, Memory};
use std::collections::VecDeque;

pub(super) const CHUNK: u64 = 2 << 20;
pub(super) const MS: u64 = 1_000_000;
/// UUID of another card that the programs' drivers see.
pub(super) const OTHER: [u8; 16] = [7; 16];
thread_local! {
    /// Seed of the next owner. Real owners use a random seed.
    static SEED: std::cell::Cell<u32> = const { std::cell::Cell::new(7) };
}

/// Contents of memory that was not zeroed.
const STALE_CONTENTS: u64 = u64::MAX;

/// A program that uses the shim.
#[derive(Debug, Default)]
pub(super) struct Program {
    pub(super) tenant: Option<u32>,
    /// The program's chunks, each with the piece that backs it and the value that the program last wrote.
    pub(super) chunks: BTreeMap<ChunkId, (PieceId, u64)>,
    pub(super) run: Option<Run>,
    pub(super) quiet: Option<u32>,
    pub(super) refused: Vec<u32>,
    pub(super) answers: VecDeque<FromTenant>,
    pub(super) ended: Option<End>,
    pub(super) killed: bool,
    /// The program's empty chunks, which it returns on request.
    pub(super) empty: Vec<ChunkId>,
    /// Pieces that the program returned just before it quiesced.
    returned: BTreeSet<PieceId>,
    /// Set if the program does not reply to messages.
    pub(super) mute: bool,
    /// Set if the program does not reply because it is stopped.
    pub(super) stopped: bool,
    /// Kind of orders that the program declines, if any: `false` for orders to quiesce, `true` for orders to redirect
    /// chunks.
    pub(super) declines: Option<bool>,
    /// Set once the program's driver rejects all calls.
    pub(super) ends: bool,
    pub(super) memory: Option<(u64, u64)>,
    pub(super) share: Option<Share>,
    /// Process IDs of the program's tenant, as last reported by the owner.
    pub(super) pids: Vec<u32>,
    /// Time until the program's next turn in microseconds, as last announced.
    pub(super) soon: Option<u32>,
    /// Number of the turn that the program must yield when it waits for a result.
    pub(super) yields: Option<u32>,
    /// Obstacle that the program reports when it must leave the card, if any.
    pub(super) obstacle: Option<cuda_protocol::Obstacle>,
    /// Set once the driver has moved the program to this card.
    pub(super) fetched: bool,
}

impl Program {
    /// Returns the program's empty chunks to the owner.
    fn give_up_empty(&mut self) {
        let empty = std::mem::take(&mut self.empty);
        let pieces = empty.iter().filter_map(|chunk| self.chunks.remove(chunk)).map(|(piece, _)| piece);
        self.returned.extend(pieces);
        if !empty.is_empty() {
            self.answers.push_back(FromTenant::Free { chunks: empty });
        }
    }
}

/// A [`Core`] and the simulated components around it.
pub(super) struct World {
    pub(super) core: Core,
    pub(super) now: u64,
    /// Memory and contents of each existing piece.
    pub(super) pieces: BTreeMap<PieceId, (Memory, u64)>,
    /// Tenant and programs that have used each piece.
    seen: BTreeMap<PieceId, (u32, BTreeSet<SessionId>)>,
    pub(super) programs: BTreeMap<SessionId, Program>,
    /// Tasks for the workers.
    pub(super) work: VecDeque<Action>,
    next: u64,
    value: u64,
    /// Protocol version of programs that connect from now on.
    pub(super) version: u16,
    /// Maximum number of pieces that the driver can allocate on the card.
    pub(super) device_most: usize,
    /// Number of orders to redirect chunks that programs have received.
    pub(super) told: usize,
    /// The driver's result for a suspension, or `None` if the call never returns.
    pub(super) suspends: Option<bool>,
    /// Reasons that the owner gave for closing connections.
    pub(super) ends: BTreeMap<SessionId, End>,
    /// The driver's error when moving a process to this card.
    pub(super) fetch_error: Option<String>,
    /// Set if sending SIGKILL succeeds.
    pub(super) kills: bool,
    /// Set if released pieces stay in use because a process keeps them.
    pub(super) keeps_dropped: bool,
    dropped: usize,
}

pub(super) fn spec(name: &str, chunks: u64, limits: vram::Limits) -> TenantSpec {
    TenantSpec {
        name: name.into(),
        uid: None,
        memory_bytes: chunks * CHUNK,
        window_bytes: 0,
        limits,
        time: sched::VgpuParams::default(),
        on_stuck: OnStuck::Kill,
        share_group: None,
        gang: None,
    }
}

impl World {
    /// Creates a world whose card has `card` chunks and `host` host slots.
    pub(super) fn new(card: u64, host: u64) -> Self {
        Self::with_number(gang::CardId(0), card, host)
    }

    /// Creates a world whose card has the given number.
    pub(super) fn with_number(number: gang::CardId, card: u64, host: u64) -> Self {
        let config = CardConfig {
            number,
            host_bytes: host * CHUNK,
            chunk_bytes: CHUNK,
            host_ready_bytes: 2 * CHUNK,
            ..CardConfig::new(card * CHUNK)
        };
        // Each owner assigns different numbers, as real owners do.
        let seed = SEED.with(|seed| seed.replace(seed.get() + (1 << 10)));
        let core = Core::new(config, seed).expect("the settings are in bounds");
        let (pieces, seen, programs, work) = Default::default();
        let (device_most, told, suspends) = (usize::MAX, 0, Some(false));
        let version = VERSION;
        let mut world = Self {
            core,
            now: 0,
            pieces,
            seen,
            programs,
            work,
            next: 0,
            value: 0,
            version,
            device_most,
            told,
            suspends,
            kills: true,
            ends: BTreeMap::new(),
            fetch_error: None,
            keeps_dropped: false,
            dropped: 0,
        };
        world.settle();
        world
    }

    /// Connects a program of a tenant, and executes steps until none is possible.
    pub(super) fn connect(&mut self, tenant: &str) -> SessionId {
        let session = self.connect_as(tenant, 1000, false);
        self.settle();
        session
    }

    pub(super) fn connect_as(&mut self, tenant: &str, uid: u32, adopts: bool) -> SessionId {
        self.next += 1;
        let session = SessionId(self.next);
        self.programs.insert(session, Program::default());
        self.event(Event::Connected { session, pid: 100 + self.next as u32, uid, tenant: None });
        let (tenant, program) = (tenant.to_owned(), "test".to_owned());
        let version = self.version;
        self.say(session, FromTenant::Hello(Hello { version, pid: 1, instance: 1, tenant, program, adopts }));
        if version >= VERSION_VISIBLE_CARDS {
            self.say(session, FromTenant::Sees { uuids: vec![[0; 16], OTHER] });
        }
        session
    }

    pub(super) fn event(&mut self, event: Event) {
        self.core.handle(self.now, event);
        self.take_actions();
    }

    pub(super) fn say(&mut self, session: SessionId, message: FromTenant) {
        self.event(Event::Said { session, message, pieces: Vec::new() });
    }

    pub(super) fn ask(&mut self, session: SessionId, request: u32, chunks: u32) {
        self.say(session, FromTenant::Allocate { request, card: 0, chunks });
        self.settle();
    }

    /// Makes a program write to all of its chunks.
    pub(super) fn write(&mut self, session: SessionId) {
        let Some(program) = self.programs.get_mut(&session) else { return };
        assert_eq!(program.quiet, None, "a quiesced program does not run");
        for (piece, value) in program.chunks.values_mut() {
            self.value += 1;
            *value = self.value;
            self.pieces.get_mut(piece).expect("a piece that is mapped exists").1 = self.value;
        }
    }

    /// Checks that every chunk contains the value that its program last wrote to it.
    pub(super) fn check(&self) {
        for (session, program) in &self.programs {
            for (chunk, (piece, value)) in &program.chunks {
                let found = self.pieces.get(piece).unwrap_or_else(|| panic!("{piece:?} of {chunk:?} is gone"));
                assert_eq!(found.1, *value, "{session:?} {chunk:?} {piece:?}");
            }
        }
        // Skip programs that have not replied to an order to stop yet.
        let told =
            |program: &Program| program.answers.iter().any(|answer| matches!(answer, FromTenant::Stopped { .. }));
        let open = self.programs.values().filter(|program| program.run.is_some() && !told(program));
        let party = |tenant: u32| {
            let group = self.core.turns.turns().membership(TenantId(tenant)).filter(|state| state.joined);
            (group.map(|state| state.group), if group.is_some() { 0 } else { tenant })
        };
        let parties: BTreeSet<_> = open.map(|program| program.tenant.map(party)).collect();
        assert!(parties.len() <= 1, "gates of several parties are open: {parties:?}");
    }

    fn take_actions(&mut self) {
        for action in self.core.take_actions() {
            match action {
                Action::Send { session, message, pieces } => self.hear(session, message, &pieces),
                Action::Close { session } => self.leave(session),
                Action::Kill { session, tenant, is_client } => {
                    if let Some(program) = self.programs.get_mut(&session) {
                        program.killed = true;
                    }
                    self.work.push_back(Action::Kill { session, tenant, is_client });
                }
                Action::LookAt { session, is_overdue } => {
                    let stopped = self.programs.get(&session).is_some_and(|program| program.stopped);
                    self.event(Event::Looked { session, stopped, is_overdue });
                }
                Action::Suspend { session } => {
                    // Other programs may use the program's memory from now on, even before the program is suspended.
                    self.programs.get_mut(&session).expect("there").chunks.clear();
                    self.work.push_back(Action::Suspend { session });
                }
                other => self.work.push_back(other),
            }
        }
    }

    /// Closes a program's connection.
    pub(super) fn leave(&mut self, session: SessionId) {
        if self.programs.remove(&session).is_some() {
            self.event(Event::Gone { session });
        }
    }

    fn hear(&mut self, session: SessionId, message: FromOwner, pieces: &[PieceId]) {
        let Some(program) = self.programs.get_mut(&session) else { return };
        let tenant = program.tenant;
        for piece in pieces {
            let (first, by) = self.seen.entry(*piece).or_insert((tenant.expect("a tenant"), BTreeSet::new()));
            assert_eq!(Some(*first), tenant, "{piece:?} belonged to another tenant");
            by.insert(session);
            let has = |other: &Program| other.chunks.values().any(|(held, _)| held == piece);
            let shared = || self.programs.iter().any(|(other, program)| *other != session && has(program));
            assert!(by.len() == 1 || shared(), "{piece:?} belonged to another program");
        }
        let Some(program) = self.programs.get_mut(&session) else { return };
        match message {
            FromOwner::Welcome(welcome) | FromOwner::WelcomeAmong { welcome, .. } => {
                program.tenant = Some(welcome.tenant)
            }
            FromOwner::Granted { chunks, .. } => {
                for (Chunk { id, place }, &piece) in chunks.iter().zip(pieces) {
                    let (memory, value) = self.pieces[&piece];
                    assert_eq!(*place, said_place(memory));
                    assert_ne!(value, STALE_CONTENTS, "a new chunk is zeroed");
                    program.chunks.insert(*id, (piece, value));
                }
            }
            FromOwner::Refused { request, .. } => program.refused.push(request),
            FromOwner::Fixed { .. } => {}
            FromOwner::Processes { pids, .. } => program.pids = pids,
            FromOwner::Memory { free_bytes, total_bytes, .. } => program.memory = Some((free_bytes, total_bytes)),
            FromOwner::Quiesce { order, .. } => {
                if program.declines == Some(false) {
                    return program.answers.push_back(FromTenant::Busy { order });
                }
                program.quiet = Some(order);
                program.returned.clear();
                program.give_up_empty();
                program.answers.push_back(FromTenant::Quiet { order });
            }
            FromOwner::Redirect { order, moves } => {
                assert_eq!(program.quiet, Some(order), "redirected while it runs");
                for (Chunk { id, .. }, &piece) in moves.iter().zip(pieces) {
                    assert_ne!(self.pieces[&piece].1, STALE_CONTENTS, "the piece was the target of a copy");
                    // The message may contain a chunk that the program has freed meanwhile.
                    if let Some(chunk) =
                        program.chunks.get_mut(id).filter(|_| !program.ends && program.declines.is_none())
                    {
                        chunk.0 = piece;
                    }
                }
                self.told += 1;
                let moved = if program.ends || program.declines.is_some() { 0 } else { moves.len() as u32 };
                program.answers.push_back(FromTenant::Redirected { order, moved });
            }
            FromOwner::Resume { order } => {
                assert_eq!(program.quiet.take(), Some(order));
            }
            // No tenant has several cards in these tests.
            FromOwner::Step(_) | FromOwner::Drain { .. } => {}
            FromOwner::Run(run) => program.run = Some(run),
            FromOwner::Stop { card, turn } => {
                let usage = Usage { busy_ns: u64::MAX, copy_ns: 5, launches: 3 };
                program.answers.push_back(FromTenant::Stopped { card, turn, usage, waiting: true });
            }
            FromOwner::Shared { share, .. } => program.share = Some(share),
            FromOwner::Soon { in_us, .. } => program.soon = Some(in_us),
            FromOwner::Yield { turn, .. } => program.yields = Some(turn),
            FromOwner::Reclaim { order } => {
                program.give_up_empty();
                program.returned.clear();
                program.answers.push_back(FromTenant::Reclaimed { order });
            }
            FromOwner::Leave { .. } => program.answers.push_back(FromTenant::Left { obstacle: program.obstacle }),
            FromOwner::Fetched => program.fetched = true,
            FromOwner::Goodbye(why) => {
                program.ended = Some(why);
                self.ends.insert(session, why);
            }
        }
    }

    /// Executes one step: a worker completes an order, or a program replies. Returns false if no such step is possible.
    pub(super) fn step(&mut self, choice: u64) -> bool {
        let speakers: Vec<_> = self
            .programs
            .iter()
            .filter(|(_, p)| !p.mute && !p.stopped && !p.answers.is_empty())
            .map(|(&id, _)| id)
            .collect();
        let all = speakers.len() as u64 + u64::from(!self.work.is_empty());
        if all == 0 {
            return false;
        }
        match speakers.get((choice % all) as usize) {
            Some(&session) => {
                let program = self.programs.get_mut(&session).expect("it speaks");
                let message = program.answers.pop_front().expect("the request has a reply");
                if let FromTenant::Stopped { turn, .. } = message
                    && program.run.is_some_and(|run| run.turn == turn)
                {
                    program.run = None;
                }
                self.say(session, message);
            }
            None => {
                let action = self.work.pop_front().expect("there is work");
                self.work_on(action);
            }
        }
        true
    }

    fn work_on(&mut self, action: Action) {
        match action {
            Action::Make { piece, memory, zeroed } => {
                let made = self.pieces.values().filter(|(of, _)| *of == Memory::Device).count() + self.dropped;
                let memory = Some(memory).filter(|memory| *memory == Memory::Host || made < self.device_most);
                if let Some(memory) = memory {
                    self.pieces.insert(piece, (memory, if zeroed { 0 } else { STALE_CONTENTS }));
                }
                self.event(Event::Made { piece, memory });
            }
            Action::Import { piece } => {
                let memory = self.pieces.get(&piece).map(|(memory, _)| *memory);
                self.event(Event::Made { piece, memory });
            }
            Action::Drop { piece } => {
                let of_card = self.pieces.remove(&piece).is_some_and(|(of, _)| of == Memory::Device);
                self.dropped += usize::from(of_card && self.keeps_dropped);
            }
            Action::Copy { batch, pieces, to } => {
                for (from, into) in pieces {
                    let is_empty = self.programs.values().any(|program| program.returned.contains(&from));
                    assert!(!is_empty, "{from:?} is copied although it is empty");
                    let value = self.pieces.get(&from).expect("the source of the copy exists").1;
                    let target = self.pieces.get_mut(&into).expect("the target of the copy exists");
                    assert_eq!(target.0, to);
                    target.1 = value;
                }
                self.event(Event::Copied { batch, done: true, ns: MS });
            }
            Action::Suspend { session } => {
                if let Some(done) = self.suspends {
                    self.event(Event::Suspended { session, done });
                }
            }
            Action::Fetch { session, .. } => {
                let done = self.fetch_error.clone().map_or(Ok(FetchTimes::default()), Err);
                self.event(Event::Fetched { session, done });
            }
            Action::Kill { session, tenant, .. } => {
                self.event(Event::Signalled { tenant, done: self.kills });
                if self.kills {
                    self.event(Event::Ended { pid: 100 + session.0 as u32 });
                }
            }
            Action::Send { .. }
            | Action::Close { .. }
            | Action::Attend { .. }
            | Action::LookAt { .. }
            | Action::StartServer { .. }
            | Action::RetireServer { .. }
            | Action::PollServer { .. }
            | Action::Probe { .. }
            | Action::Tell { .. }
            | Action::TellQuantum(_) => {}
            Action::KillStranger { .. } | Action::Adopted { .. } => {}
        }
    }

    /// Simulates the exit of the process that keeps the released pieces.
    pub(super) fn dropped_are_free(&mut self) {
        self.dropped = 0;
    }

    /// Executes steps until none is possible.
    pub(super) fn settle(&mut self) {
        for _ in 0..100_000 {
            if !self.step(0) {
                return;
            }
        }
        panic!("the events never end");
    }

    /// Advances the time in steps, and runs the events of each step.
    pub(super) fn pass(&mut self, ns: u64) {
        let until = self.now + ns;
        while self.now < until {
            self.now = (self.now + 5 * MS).min(until);
            self.event(Event::Tick);
            self.settle();
        }
    }

    /// Returns the numbers of a program's chunks on the card and in host memory.
    pub(super) fn places(&self, session: SessionId) -> (usize, usize) {
        let memories = self.programs[&session].chunks.values().map(|(piece, _)| self.pieces[piece].0);
        let (card, host): (Vec<_>, Vec<_>) = memories.partition(|memory| *memory == Memory::Device);
        (card.len(), host.len())
    }

    /// Replaces the owner. The new owner adopts the programs with their memory.
    pub(super) fn restart(&mut self, core: Core) -> Vec<SessionId> {
        self.restart_and(core, |_, _| ())
    }

    /// Like [`Self::restart`], but runs `at_once` for each program before the new owner maps the program's chunks.
    pub(super) fn restart_and(&mut self, core: Core, at_once: impl Fn(&mut Self, SessionId)) -> Vec<SessionId> {
        let old = std::mem::take(&mut self.programs);
        let kept: BTreeSet<PieceId> = old.values().flat_map(|p| p.chunks.values().map(|(piece, _)| *piece)).collect();
        let contents: BTreeMap<_, _> =
            self.pieces.iter().filter(|(id, _)| kept.contains(id)).map(|(i, p)| (*i, *p)).collect();
        (self.core, self.work) = (core, VecDeque::new());
        self.pieces.clear();
        self.seen.clear();
        self.take_actions();
        let mut sessions = Vec::new();
        for program in old.into_values() {
            let name = if program.tenant == Some(1) { "one" } else { "two" };
            let session = self.connect_as(name, 1000, true);
            let (mut chunks, mut pieces) = (Vec::new(), Vec::new());
            for (id, (piece, value)) in program.chunks {
                let number = self.core.piece_number();
                let (memory, content) = contents[&piece];
                self.pieces.insert(number, (memory, content));
                let place = said_place(memory);
                chunks.push(Adopted { card: 0, id, place, descriptor: true });
                pieces.push(number);
                self.programs.get_mut(&session).expect("there").chunks.insert(id, (number, value));
            }
            self.event(Event::Said { session, message: FromTenant::Adopt { chunks, more: false }, pieces });
            at_once(self, session);
            sessions.push(session);
        }
        self.settle();
        sessions
    }
}
