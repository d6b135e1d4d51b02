//! Runs the owner's protocol and its control pipe with arbitrary input, for the fuzz targets `owner_protocol` and
//! `owner_control`.

use crate::control::Pipe;
use crate::core::{Action, CardConfig, Core, Event, OnStuck, PieceId, SessionId, TenantSpec};
use cuda_control::{Answer, MemoryShare, Quanta, Request, Rules, Settings, Tenant, TimeShare};
use cuda_protocol::{
    Adopted, ChunkId, End, FixedKind, FromOwner, FromTenant, Hello, MAX_CHUNKS, Obstacle, Place, Share, Usage, VERSION,
};
use owner_driver::{Memory, Model};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::sync::Arc;
use vram::TenantId;

const CHUNK: u64 = 2 << 20;
/// Maximum number of events per input.
const EVENTS_MOST: usize = 2000;
/// Maximum number of concurrent connections.
const CONNECTIONS_MOST: usize = 6;

/// Reads numbers from the input. After the end of the input, all numbers are zero.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::from(self.byte()) % bound.max(1)
    }

    /// Returns a number that is usually small, and sometimes out of bounds.
    fn number(&mut self) -> u64 {
        match self.byte() {
            255 => u64::MAX,
            254 => u64::from(u32::MAX) + 1,
            253 => u64::from(u32::MAX),
            small => u64::from(small),
        }
    }
}

/// A simulated process.
#[derive(Default)]
struct Program {
    tenant: Option<u32>,
    chunks: Vec<ChunkId>,
    order: u32,
    turn: u32,
    ended: bool,
}

/// A [`Core`] with a simulated card and programs.
struct World {
    core: Core,
    now: u64,
    pieces: BTreeMap<PieceId, Memory>,
    seen: BTreeMap<PieceId, u32>,
    programs: BTreeMap<SessionId, Program>,
    shares: Vec<Share>,
    work: VecDeque<Action>,
    next: u64,
    /// Kinds of messages that programs have received.
    heard: BTreeSet<String>,
}

impl World {
    fn new() -> Self {
        let config = CardConfig {
            host_bytes: 24 * CHUNK,
            chunk_bytes: CHUNK,
            host_ready_bytes: 2 * CHUNK,
            connections_most: 4,
            ..CardConfig::new(16 * CHUNK)
        };
        let mut core = Core::new(config, 9).expect("the settings are in bounds");
        for (name, on_full) in
            [("one", vram::OnFull::Swap), ("two", vram::OnFull::Refuse), ("three", vram::OnFull::Queue)]
        {
            core.add_tenant(TenantSpec {
                name: name.into(),
                uid: None,
                memory_bytes: 20 * CHUNK,
                window_bytes: 0,
                limits: vram::Limits { on_full, guarantee: 2, ..vram::Limits::default() },
                time: sched::VgpuParams::default(),
                on_stuck: OnStuck::Kill,
                share_group: None,
                gang: None,
            })
            .expect("the request is valid");
        }
        let (pieces, seen, programs, work, heard) = Default::default();
        let mut world = Self { core, now: 0, pieces, seen, programs, shares: Vec::new(), work, next: 0, heard };
        world.take_actions();
        world
    }

    fn event(&mut self, event: Event) {
        let before = self.core.steps();
        self.core.handle(self.now, event);
        self.core.audit(self.core.steps() - before);
        self.take_actions();
    }

    fn take_actions(&mut self) {
        for action in self.core.take_actions() {
            match action {
                Action::Send { session, message, pieces } => self.hear(session, message, &pieces),
                Action::Close { session } | Action::Kill { session, .. } => {
                    if let Some(program) = self.programs.get_mut(&session) {
                        program.ended = true;
                    }
                }
                other => self.work.push_back(other),
            }
        }
        let ended: Vec<_> = self.programs.iter().filter(|(_, program)| program.ended).map(|(&id, _)| id).collect();
        for session in ended {
            self.programs.remove(&session);
            self.event(Event::Gone { session });
        }
    }

    fn hear(&mut self, session: SessionId, message: FromOwner, pieces: &[PieceId]) {
        let Some(program) = self.programs.get_mut(&session) else { return };
        let kind = format!("{message:?}");
        self.heard.extend(kind.split([' ', '(']).next().map(str::to_owned));
        for piece in pieces {
            assert!(self.pieces.contains_key(piece), "{piece:?} is sent, but does not exist");
            let tenant = program.tenant.expect("only tenants get memory");
            assert_eq!(*self.seen.entry(*piece).or_insert(tenant), tenant, "{piece:?} belonged to another tenant");
        }
        match message {
            FromOwner::Welcome(welcome) => program.tenant = Some(welcome.tenant),
            FromOwner::Granted { chunks, .. } => {
                assert_eq!(chunks.len(), pieces.len());
                program.chunks.extend(chunks.iter().map(|chunk| chunk.id));
            }
            FromOwner::Quiesce { order, .. } | FromOwner::Redirect { order, .. } => program.order = order,
            FromOwner::Run(run) => program.turn = run.turn,
            FromOwner::Shared { share, .. } => self.shares.push(share),
            _ => {}
        }
    }

    /// Executes the workers' next task. If `fails` is set, the task fails, unless it releases a piece.
    fn work_on(&mut self, fails: bool) {
        match self.work.pop_front() {
            Some(Action::Make { piece, memory, .. }) => {
                let memory = (!fails).then_some(memory);
                self.pieces.extend(memory.map(|memory| (piece, memory)));
                self.event(Event::Made { piece, memory });
            }
            Some(Action::Import { piece }) => {
                let memory = (!fails).then_some(Memory::Device);
                self.pieces.extend(memory.map(|memory| (piece, memory)));
                self.event(Event::Made { piece, memory });
            }
            Some(Action::Drop { piece }) => drop(self.pieces.remove(&piece)),
            Some(Action::Copy { batch, pieces, to }) => {
                for (from, into) in pieces {
                    assert!(self.pieces.contains_key(&from), "{from:?} is copied, but does not exist");
                    assert_eq!(self.pieces.get(&into), Some(&to));
                }
                self.event(Event::Copied { batch, done: !fails, ns: 1000 });
            }
            Some(Action::Fetch { session, .. }) => {
                let done = if fails { Err("error 1".to_owned()) } else { Ok(Default::default()) };
                self.event(Event::Fetched { session, done });
            }
            Some(Action::Suspend { session }) => self.event(Event::Suspended { session, done: !fails }),
            _ => {}
        }
    }

    fn connect(&mut self, input: &mut Input<'_>) {
        if self.programs.len() >= CONNECTIONS_MOST {
            return;
        }
        self.next += 1;
        let session = SessionId(self.next);
        self.programs.insert(session, Program::default());
        let pid = 100 + input.below(4) as u32;
        self.event(Event::Connected { session, pid, uid: 1000, tenant: None });
        let tenant = ["one", "two", "three", "", "none"][input.below(5)].to_owned();
        let flags = input.byte();
        if flags & 1 == 0 {
            let version = if flags & 2 == 0 { VERSION } else { flags.into() };
            let hello = Hello { version, pid: 1, instance: 1, tenant, program: String::new(), adopts: flags & 4 != 0 };
            self.event(Event::Said { session, message: FromTenant::Hello(hello), pieces: Vec::new() });
        }
    }

    /// Returns the ID of a chunk of this process or of any process, or an unused ID.
    fn chunk(&self, input: &mut Input<'_>, session: SessionId) -> ChunkId {
        let at = input.below(64);
        let any = || self.programs.values().flat_map(|program| &program.chunks);
        let own = self.programs.get(&session).map_or(&[][..], |program| &program.chunks);
        match at {
            60..62 => any().nth(input.below(40)).copied().unwrap_or(ChunkId(5)),
            62.. => ChunkId(input.number()),
            _ => own.get(at % own.len().max(1)).copied().unwrap_or(ChunkId(at as u64)),
        }
    }

    fn say(&mut self, input: &mut Input<'_>) {
        let sessions: Vec<_> = self.programs.keys().copied().collect();
        let Some(&session) = sessions.get(input.below(sessions.len())) else { return };
        let (request, card) = (u32::from(input.byte()), u8::from(input.byte() == 255));
        let (order, turn) = self.programs.get(&session).map_or((0, 0), |program| (program.order, program.turn));
        let usage = Usage { busy_ns: u64::MAX, copy_ns: 5, launches: 3 };
        let kinds = [FixedKind::Array, FixedKind::Managed, FixedKind::Shared, FixedKind::Driver, FixedKind::Host];
        let mut pieces = Vec::new();
        let message = match input.below(20) {
            0..4 => FromTenant::Allocate { request, card, chunks: input.number() as u32 },
            4..6 => {
                let chunks: Vec<_> = (0..input.below(6)).map(|_| self.chunk(input, session)).collect();
                if let Some(program) = self.programs.get_mut(&session) {
                    program.chunks.retain(|chunk| !chunks.contains(chunk));
                }
                FromTenant::Free { chunks }
            }
            6 => {
                let bytes = input.number().saturating_mul(CHUNK / 2);
                FromTenant::Fix { request, card, kind: kinds[input.below(5)], bytes }
            }
            7 => {
                let bytes = input.number().saturating_mul(CHUNK / 2);
                FromTenant::Unfix { card, kind: kinds[input.below(5)], bytes }
            }
            8 => FromTenant::AskMemory { request, card },
            9 => FromTenant::AskProcesses { request, card },
            10 => FromTenant::Quiet { order },
            11 => FromTenant::Busy { order },
            12 => FromTenant::Redirected { order, moved: input.number() as u32 },
            13 => FromTenant::Waiting { card },
            14 => FromTenant::Stopped { card, turn, usage, waiting: input.byte() & 1 == 0 },
            15 => FromTenant::Ending { card, turn, in_us: input.number() as u32 },
            16 => {
                let chunks = (0..input.below(5)).map(|_| self.chunk(input, session)).collect();
                FromTenant::Export { request, chunks }
            }
            17 => {
                let share = self.shares.get(input.below(self.shares.len())).copied().unwrap_or(Share([7; 32]));
                FromTenant::Open { request, share }
            }
            18 => {
                let chunks: Vec<_> = (0..input.below(MAX_CHUNKS.min(8)))
                    .map(|_| {
                        // Sometimes, use a possibly unassigned number from this owner's range.
                        let given = self.core.last_number();
                        let id = match input.byte() {
                            near @ 200.. => ChunkId(given + 8 - u64::from(near % 16)),
                            _ => ChunkId(input.number()),
                        };
                        let descriptor = input.byte() & 1 == 0;
                        if descriptor {
                            let piece = self.core.piece_number();
                            pieces.push(piece);
                        }
                        Adopted { card, id, place: Place::Device, descriptor }
                    })
                    .collect();
                FromTenant::Adopt { chunks, more: input.byte() & 1 == 0 }
            }
            _ => match input.below(7) {
                0 => FromTenant::Goodbye(End::Leaving),
                1 => FromTenant::Used { card, turn, usage },
                2 => FromTenant::Elsewhere { uuid: [input.byte(); 16] },
                4 => FromTenant::Sees { uuids: vec![[input.byte(); 16]; input.below(3)] },
                5 => FromTenant::Unusable { code: 3 },
                3 => {
                    FromTenant::Left { obstacle: [None, Some(Obstacle::Busy), Some(Obstacle::Shared)][input.below(3)] }
                }
                _ => FromTenant::Hello(Hello {
                    version: VERSION,
                    pid: 1,
                    instance: 1,
                    tenant: "one".into(),
                    program: String::new(),
                    adopts: false,
                }),
            },
        };
        self.event(Event::Said { session, message, pieces });
    }

    /// Disconnects all programs, and checks that no state remains.
    fn end(&mut self) {
        for session in self.programs.keys().copied().collect::<Vec<_>>() {
            self.programs.remove(&session);
            self.event(Event::Gone { session });
        }
        for _ in 0..10_000 {
            if !self.work.is_empty() {
                self.work_on(false);
            } else if self.core.is_working() {
                self.now += 1_000_000;
                self.event(Event::Tick);
            } else {
                break;
            }
        }
        self.core.audit_empty();
        let left: Vec<_> = self.pieces.iter().filter(|(_, memory)| **memory == Memory::Device).collect();
        assert!(left.is_empty(), "card pieces without an owner are left: {left:?}");
    }
}

/// Runs valid and invalid messages of several tenants' processes, with workers that sometimes fail. Checks the accounts
/// against each other after each event, and that no state remains at the end.
///
/// # Panics
/// Panics if the accounts disagree.
pub fn protocol(data: &[u8]) {
    play(data);
}

/// Runs the events in `data`. Returns the kinds of messages that programs have received.
fn play(data: &[u8]) -> BTreeSet<String> {
    let (mut world, mut input) = (World::new(), Input(data));
    for _ in 0..EVENTS_MOST {
        if input.0.is_empty() {
            break;
        }
        match input.below(16) {
            0 => world.connect(&mut input),
            1 => {
                let sessions: Vec<_> = world.programs.keys().copied().collect();
                // In two of three cases, no program disconnects.
                if let Some(&session) = sessions.get(input.below(3 * sessions.len())) {
                    world.programs.remove(&session);
                    world.event(Event::Gone { session });
                }
            }
            2..7 => {
                let fails = input.byte() == 255;
                world.work_on(fails);
            }
            7 => {
                let byte = input.byte();
                let tenant = TenantId(u32::from(byte % 4));
                match byte {
                    240..248 => drop(world.core.leave(tenant)),
                    248..252 => world.core.stay(tenant),
                    252.. => drop(world.core.arrivals(tenant)),
                    _ => {}
                }
                world.now += u64::from(byte) * 2_000_000;
                world.event(Event::Tick);
            }
            _ => world.say(&mut input),
        }
    }
    world.end();
    world.heard
}

fn settings(folder: &Path) -> Settings {
    Settings {
        driver: "none".into(),
        device: "0".into(),
        card_bytes: 32 * CHUNK,
        host_bytes: 16 * CHUNK,
        host_ready_bytes: 0,
        chunk_bytes: CHUNK,
        slice_ns: 1_000_000,
        run_ahead_us: 4000,
        kills_strangers: false,
        margin_bytes: 0,
        rules: rules(&mut Input(&[])),
        mps: None,
        gangs: None,
        others: Vec::new(),
        journal: folder.join("journal"),
    }
}

fn rules(input: &mut Input<'_>) -> Rules {
    Rules {
        scheduler: sched::turns::scheduler_defaults(),
        host_bytes: input.number().saturating_mul(CHUNK),
        low_water_bytes: input.number().saturating_mul(CHUNK),
        victims: ["clock", "random", "loops", "nonsense", ""][input.below(5)].into(),
        return_ns: input.number(),
        settle_ns: input.number(),
        idle_ns: input.number(),
        quanta: Quanta {
            mode: ["auto", "off", "forced", "none"][input.below(4)].into(),
            window_ns: input.number(),
            on_permille: input.number() as u32,
            margin_permille: input.number() as u32,
            factor: input.number() as u32,
            min_ns: input.number(),
            max_ns: input.number(),
        },
    }
}

fn tenant(input: &mut Input<'_>, folder: &Path) -> Tenant {
    let name = ["a", "b", "c", ""][input.below(4)];
    let chunks = input.number();
    Tenant {
        name: name.into(),
        memory_bytes: chunks.saturating_mul(CHUNK),
        // Most tenants do not have a window.
        window_bytes: if chunks % 16 == 15 { chunks.saturating_mul(CHUNK) } else { 0 },
        memory: MemoryShare {
            quota: (input.byte() & 1 == 0).then(|| input.number().saturating_mul(CHUNK)),
            guarantee: input.number().saturating_mul(CHUNK),
            swap_cap: (input.byte() & 1 == 0).then(|| input.number().saturating_mul(CHUNK)),
            weight: input.number() as u32,
            on_full: ["swap", "queue", "refuse", "?"][input.below(4)].into(),
        },
        time: TimeShare {
            weight: input.number() as u32,
            guarantee_permille: input.number() as u32,
            cap_permille: input.number() as u32,
            class: ["interactive", "normal", "background", "?"][input.below(4)].into(),
            max_run_ns: (input.byte() & 1 == 0).then(|| input.number()),
        },
        suspends: input.byte() & 1 == 0,
        // Sometimes, use a path that cannot be bound.
        socket: folder.join(if input.byte() == 255 { "none/socket".into() } else { format!("socket-{name}") }),
        mode: 0o600,
        uid: None,
        gid: None,
        share_group: None,
        gang: None,
        arrives: input.byte() == 255,
        sharing: sched::groups::Sharing::Auto,
    }
}

/// Sends valid and invalid lines of the daemon's control protocol to the owner. Checks that each line has one reply,
/// that the card lists the tenants that were added, and that failed requests have no effect.
///
/// # Panics
/// Panics if a reply or the card differs from the expected one.
pub fn control(data: &[u8]) {
    let folder = std::env::temp_dir().join(format!("gpu-mediator-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let mut input = Input(data);
    let text = serde_json::to_string(&settings(&folder)).expect("it is JSON");
    let (mut pipe, ready) = Pipe::open(&text, |_| Ok(Arc::new(Model::new(64 * CHUNK))), false).expect("it starts");
    assert!(matches!(ready, Answer::Ready { .. }));
    let mut known = BTreeSet::new();
    for _ in 0..64 {
        if input.0.is_empty() {
            break;
        }
        let before = seen(&mut pipe);
        let request = match input.below(8) {
            0..3 => Request::Add(tenant(&mut input, &folder)),
            3 => Request::Change(tenant(&mut input, &folder)),
            4 => Request::Remove { name: ["a", "b", "c", "d"][input.below(4)].into(), kills: input.byte() & 1 == 0 },
            5 => Request::Tune(Box::new(rules(&mut input))),
            6 => {
                let byte = input.byte();
                let name = ["a", "b", "c", "d"][usize::from(byte % 4)].to_owned();
                match byte {
                    ..200 => Request::Release(name),
                    200..210 => Request::MayLeave { name, to: "GPU-00".to_owned() },
                    210..220 => Request::Leave(name),
                    220..232 => Request::Stay(name),
                    232..244 => Request::Arrivals(name),
                    _ => Request::Arrive { name, pids: Vec::new() },
                }
            }
            _ => {
                let length = input.below(64).min(input.0.len());
                let (line, rest) = input.0.split_at(length);
                input.0 = rest;
                let line = String::from_utf8_lossy(line);
                if serde_json::from_str::<Request>(&line).is_err() {
                    assert!(matches!(pipe.answer(&line), Answer::Failed(_)), "{line}");
                    assert_eq!(seen(&mut pipe), before, "{line}");
                }
                continue;
            }
        };
        let line = serde_json::to_string(&request).expect("it is JSON");
        let answer = pipe.answer(&line);
        match (&request, &answer) {
            (_, Answer::Failed(_) | Answer::Moving(_)) => assert_eq!(seen(&mut pipe), before, "{line}: {answer:?}"),
            (Request::Add(tenant), Answer::Done) => assert!(known.insert(tenant.name.clone()), "{line}: twice"),
            (Request::Remove { name, .. }, Answer::Done) => drop(known.remove(name)),
            (_, Answer::Done)
            | (Request::Leave(_), Answer::Left(_))
            | (Request::Arrivals(_), Answer::Arrived { .. }) => {}
            _ => panic!("{line}: {answer:?}"),
        }
        let names: BTreeSet<_> = seen(&mut pipe).into_iter().map(|(name, ..)| name).collect();
        assert_eq!(names, known, "{line}");
    }
    drop(pipe);
    let _ = std::fs::remove_dir_all(&folder);
}

/// Returns the card's list of tenants: name, number of unbacked chunks, and entitled share of the time.
fn seen(pipe: &mut Pipe) -> Vec<(String, u32, u32)> {
    let line = serde_json::to_string(&Request::View { since_ns: 0 }).expect("it is JSON");
    let Answer::View(card) = pipe.answer(&line) else { panic!("no view") };
    let text = serde_json::to_string(&card).expect("it is JSON");
    assert_eq!(serde_json::from_str::<cuda_control::Card>(&text).expect("the reply describes a card"), *card);
    let of = |(id, tenant): (TenantId, cuda_control::TenantView)| {
        (tenant.name, card.memory.summary.vms[&id].unbacked, card.time.tenants[&id].entitled.compute)
    };
    card.tenants.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn corpus(target: &str, mut run: impl FnMut(&[u8])) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/corpus").join(target);
        let mut seeds = 0;
        for entry in std::fs::read_dir(folder).expect("the corpus exists") {
            run(&std::fs::read(entry.expect("readable").path()).expect("readable"));
            seeds += 1;
        }
        assert!(seeds > 0);
    }

    #[test]
    fn the_corpus_of_both_targets_passes() {
        let mut heard = BTreeSet::new();
        corpus("owner_protocol", |data| heard.extend(play(data)));
        corpus("owner_control", control);
        // A corpus that does not reach this code cannot find its bugs.
        for kind in [
            "Welcome",
            "Granted",
            "Refused",
            "Fixed",
            "Memory",
            "Processes",
            "Quiesce",
            "Redirect",
            "Resume",
            "Run",
            "Stop",
            "Shared",
            "Goodbye",
        ] {
            assert!(heard.contains(kind), "no seed makes the owner send {kind}: {heard:?}");
        }
    }

    proptest! {
        #[test]
        fn accounts_agree_after_any_messages(data in proptest::collection::vec(any::<u8>(), 0..2000)) {
            protocol(&data);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn the_control_pipe_answers_any_lines(data in proptest::collection::vec(any::<u8>(), 0..400)) {
            control(&data);
        }
    }
}
