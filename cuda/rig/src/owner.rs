//! A scripted owner. It grants all requests within a quota, moves random chunks, and ends turns.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use cuda_protocol::{
    CardInfo, Chunk, ChunkId, FromOwner, FromTenant, Link, LinkError, MAX_CHUNKS, Place, Received, Refusal, Run, Usage,
    VERSION, Welcome,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;

use crate::Cuda;

/// Settings of a scripted owner.
#[derive(Clone, Debug)]
pub struct Script {
    /// Path of the driver's library.
    pub driver: PathBuf,
    /// Size of a chunk in bytes.
    pub chunk_bytes: u64,
    /// Maximum card memory per process in bytes. Further chunks are in host memory.
    pub device_bytes: u64,
    /// Maximum total memory per process in bytes. Requests beyond it are rejected.
    pub quota_bytes: u64,
    /// Interval between relocations, or `None` to disable them.
    pub relocate: Option<Duration>,
    /// Maximum number of chunks per relocation.
    pub batch: usize,
    /// Limit on work in flight, in microseconds; 0 disables the limit and the measurement of work.
    pub run_ahead_us: u32,
    /// Length of turns and of the pauses between them in microseconds; 0 means one endless turn.
    pub turn_us: u32,
    /// Time limit for a tenant to quiesce.
    pub patience: Duration,
}

/// Counters of an owner's actions.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Counts {
    /// Number of processes that sent `Hello`.
    pub processes: u64,
    /// Number of granted chunks.
    pub granted: u64,
    /// Number of returned chunks.
    pub freed: u64,
    /// Number of rejected requests.
    pub refused: u64,
    /// Current amount of fixed memory, in bytes.
    pub fixed_bytes: u64,
    /// Number of completed relocations for which at least one chunk was copied.
    pub relocations: u64,
    /// Number of moved chunks.
    pub moved: u64,
    /// Number of orders that tenants declined.
    pub busy: u64,
    /// Number of ended turns.
    pub turns: u64,
    /// Card time reported by the tenants, in nanoseconds.
    pub busy_ns: u64,
    /// Number of submissions reported by the tenants.
    pub launches: u64,
    /// Total time that tenants took to quiesce, in microseconds.
    pub quiet_us: u64,
    /// Maximum time that a tenant took to quiesce, in microseconds.
    pub quiet_longest_us: u64,
    /// Total duration of completed relocations, in microseconds.
    pub pause_us: u64,
    /// Maximum duration of a completed relocation, in microseconds.
    pub pause_longest_us: u64,
    /// Number of chunks that processes kept across a restart of the owner.
    pub adopted: u64,
    /// Number of adopted chunks with a descriptor.
    pub adopted_with_descriptor: u64,
}

/// An owner that runs until it is dropped.
#[derive(Debug)]
pub struct Owner {
    counts: Arc<Mutex<Counts>>,
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    socket: PathBuf,
}

impl Owner {
    /// Starts serving `socket` according to the script.
    pub fn start(socket: &Path, script: Script) -> Result<Self> {
        let driver = script.driver.to_str().context("the driver's path is not valid text")?.to_owned();
        let cuda = Cuda::open(&driver)?;
        let listener = Link::listen(socket)?;
        let counts = Arc::new(Mutex::new(Counts::default()));
        let end = Arc::new(AtomicBool::new(false));
        let (shared, stop) = (counts.clone(), end.clone());
        let thread = std::thread::spawn(move || accept(&listener, cuda, &script, &shared, &stop));
        Ok(Self { counts, end, thread: Some(thread), socket: socket.to_owned() })
    }

    /// Returns the current counters.
    pub fn counts(&self) -> Counts {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Owner {
    /// Stops the owner after it has received all messages. Returns its counters.
    pub fn finish(mut self) -> Counts {
        self.join();
        self.counts()
    }

    fn join(&mut self) {
        self.end.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.join();
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn readable(socket: impl std::os::fd::AsFd, timeout: Duration) -> bool {
    let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(timeout.subsec_nanos()) };
    poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&timeout)).is_ok_and(|count| count > 0)
}

fn accept(listener: &OwnedFd, cuda: Cuda, script: &Script, counts: &Arc<Mutex<Counts>>, end: &Arc<AtomicBool>) {
    let mut sessions = Vec::new();
    while !end.load(Ordering::SeqCst) {
        if !readable(listener, Duration::from_millis(10)) {
            continue;
        }
        let Ok(socket) = rustix::net::accept(listener) else { continue };
        let (script, counts, end) = (script.clone(), counts.clone(), end.clone());
        sessions.push(std::thread::spawn(move || {
            let mut session = Session::new(Link::new(socket), cuda, script, counts);
            if let Err(error) = session.serve(&end) {
                session.report(&error);
            }
            session.clear();
        }));
    }
    for session in sessions {
        let _ = session.join();
    }
}

/// A chunk and the owner's mapping of it.
#[derive(Clone, Copy, Debug)]
struct MappedChunk {
    handle: u64,
    at: u64,
    place: Place,
}

/// A relocation in progress.
#[derive(Debug)]
struct Order {
    began: Instant,
    /// Chunks to move, each with its new memory, in the order of the messages.
    moves: Vec<(ChunkId, MappedChunk)>,
    /// Number of chunks that the tenant's replies cover so far.
    answered: usize,
}

struct Session {
    link: Link,
    cuda: Cuda,
    script: Script,
    counts: Arc<Mutex<Counts>>,
    chunks: BTreeMap<ChunkId, MappedChunk>,
    /// Amount of fixed memory, in bytes.
    fixed: u64,
    order: Option<Order>,
    orders: u32,
    turn: u32,
    running: bool,
    next_relocation: Instant,
    next_turn: Instant,
    random: fastrand::Rng,
}

static NEXT_CHUNK: AtomicU64 = AtomicU64::new(1);

impl Session {
    fn new(link: Link, cuda: Cuda, script: Script, counts: Arc<Mutex<Counts>>) -> Self {
        let now = Instant::now();
        let next_relocation = now + script.relocate.unwrap_or_default();
        Self {
            link,
            cuda,
            script,
            counts,
            chunks: BTreeMap::new(),
            fixed: 0,
            order: None,
            orders: 0,
            turn: 0,
            running: false,
            next_relocation,
            next_turn: now,
            random: fastrand::Rng::with_seed(1),
        }
    }

    fn count(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn report(&self, error: &anyhow::Error) {
        let closed = matches!(error.downcast_ref::<LinkError>(), Some(LinkError::Closed));
        if !closed {
            eprintln!("scripted owner: {error:#}");
        }
    }

    fn serve(&mut self, end: &AtomicBool) -> Result<()> {
        self.cuda.enter()?;
        loop {
            // Read the flag first, so that messages sent before it was set are still received.
            let last = end.load(Ordering::SeqCst);
            // TIMEOUT: the script's intervals are rarely shorter than this.
            if readable(&self.link, Duration::from_micros(500)) {
                let mut closed = false;
                loop {
                    match self.link.try_receive() {
                        Ok(received) => self.obey(received)?,
                        Err(LinkError::WouldBlock) => break,
                        // The socket may report a reset before the program's last message.
                        Err(LinkError::Closed) if !closed => closed = true,
                        Err(error) => return Err(error.into()),
                    }
                }
            }
            if last {
                return Ok(());
            }
            self.tick()?;
        }
    }

    fn say(&self, message: &FromOwner) -> Result<()> {
        self.send(message, &[])
    }

    /// Sends a message. Ignores a closed connection, because the program's earlier messages can still be received.
    fn send(&self, message: &FromOwner, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        match self.link.try_send(message, descriptors) {
            Ok(()) | Err(LinkError::Closed) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn tick(&mut self) -> Result<()> {
        let now = Instant::now();
        if self.turn == 0 {
            return Ok(());
        }
        if self.script.turn_us > 0 && !self.running && now >= self.next_turn {
            self.run()?;
        }
        let relocate = self.script.relocate.is_some() && now >= self.next_relocation;
        if relocate && self.order.is_none() && !self.chunks.is_empty() {
            self.orders += 1;
            self.order = Some(Order { began: now, moves: Vec::new(), answered: 0 });
            let patience_us = u32::try_from(self.script.patience.as_micros()).unwrap_or(u32::MAX);
            self.say(&FromOwner::Quiesce { order: self.orders, patience_us })?;
        }
        Ok(())
    }

    fn run(&mut self) -> Result<()> {
        self.turn += 1;
        self.running = true;
        self.say(&FromOwner::Run(Run {
            card: 0,
            turn: self.turn,
            length_us: self.script.turn_us,
            run_ahead_us: self.script.run_ahead_us,
            idle_us: 0,
            report_us: 0,
        }))
    }

    fn obey(&mut self, received: Received<FromTenant>) -> Result<()> {
        match received.message {
            FromTenant::Hello(hello) => {
                self.count(|c| c.processes += 1);
                let total_bytes = self.script.quota_bytes;
                self.say(&FromOwner::Welcome(Welcome {
                    version: VERSION.min(hello.version),
                    tenant: 1,
                    chunk_bytes: self.script.chunk_bytes,
                    cards: vec![CardInfo { uuid: self.cuda.uuid()?, total_bytes }],
                }))?;
                if !hello.adopts {
                    self.run()?;
                }
            }
            FromTenant::Adopt { chunks, more } => {
                let with = received.descriptors.len() as u64;
                self.count(|c| {
                    c.adopted += chunks.len() as u64;
                    c.adopted_with_descriptor += with;
                });
                if !more {
                    self.run()?;
                }
            }
            FromTenant::Allocate { request, chunks, .. } => self.allocate(request, chunks)?,
            FromTenant::Free { chunks } => {
                for id in chunks {
                    // The new memory of a chunk that is being moved is freed when the tenant replies.
                    let moving = self.order.as_ref().is_some_and(|o| o.moves.iter().any(|m| m.0 == id));
                    if !moving && let Some(held) = self.chunks.remove(&id) {
                        self.discard(held);
                    }
                    if moving && let Some(order) = &mut self.order {
                        for one in order.moves.iter_mut().filter(|m| m.0 == id) {
                            one.0 = ChunkId(0);
                        }
                        if let Some(held) = self.chunks.remove(&id) {
                            self.discard(held);
                        }
                    }
                    self.count(|c| c.freed += 1);
                }
            }
            FromTenant::Fix { request, bytes, .. } => {
                if self.held() + bytes > self.script.quota_bytes {
                    self.count(|c| c.refused += 1);
                    return self.say(&FromOwner::Refused { request, reason: Refusal::Quota });
                }
                self.fixed += bytes;
                self.count(|c| c.fixed_bytes += bytes);
                self.say(&FromOwner::Fixed { request })?;
            }
            FromTenant::Left { .. }
            | FromTenant::Elsewhere { .. }
            | FromTenant::Sees { .. }
            | FromTenant::Unusable { .. } => bail!("this owner moves no programs"),
            FromTenant::Unfix { bytes, .. } => {
                self.fixed = self.fixed.saturating_sub(bytes);
                self.count(|c| c.fixed_bytes = c.fixed_bytes.saturating_sub(bytes));
            }
            FromTenant::AskMemory { request, .. } => {
                let total_bytes = self.script.quota_bytes;
                let free_bytes = total_bytes.saturating_sub(self.held());
                self.say(&FromOwner::Memory { request, free_bytes, total_bytes })?;
            }
            FromTenant::Quiet { order } => self.relocate(order)?,
            FromTenant::Busy { .. } => {
                self.count(|c| c.busy += 1);
                self.ended();
            }
            FromTenant::Redirected { order, moved } => self.redirected(order, moved)?,
            FromTenant::Stopped { usage, .. } => {
                self.used(usage);
                self.running = false;
                self.count(|c| c.turns += 1);
                self.next_turn = Instant::now() + Duration::from_micros(self.script.turn_us.into());
            }
            FromTenant::Used { usage, .. } => self.used(usage),
            FromTenant::Export { request, .. } | FromTenant::Open { request, .. } => {
                self.say(&FromOwner::Refused { request, reason: Refusal::Unsupported })?;
            }
            FromTenant::Waiting { .. }
            | FromTenant::Ending { .. }
            | FromTenant::AskProcesses { .. }
            | FromTenant::Reclaimed { .. }
            | FromTenant::Concurrent { .. }
            | FromTenant::Goodbye(_) => {}
        }
        Ok(())
    }

    /// Returns the total size of the process's chunks and fixed memory, in bytes.
    fn held(&self) -> u64 {
        self.chunks.len() as u64 * self.script.chunk_bytes + self.fixed
    }

    fn used(&self, usage: Usage) {
        self.count(|c| {
            c.busy_ns += usage.busy_ns;
            c.launches += u64::from(usage.launches);
        });
    }

    fn make(&self, place: Place) -> Result<MappedChunk> {
        let handle = self.cuda.create(place == Place::Host, self.script.chunk_bytes)?;
        let at = self.cuda.map(handle, self.script.chunk_bytes)?;
        Ok(MappedChunk { handle, at, place })
    }

    fn discard(&self, held: MappedChunk) {
        let _ = self.cuda.unmap(held.at, self.script.chunk_bytes);
        let _ = self.cuda.release(held.handle);
    }

    fn allocate(&mut self, request: u32, count: u32) -> Result<()> {
        if self.held() + u64::from(count) * self.script.chunk_bytes > self.script.quota_bytes {
            self.count(|c| c.refused += 1);
            return self.say(&FromOwner::Refused { request, reason: Refusal::Quota });
        }
        let mut left = count as usize;
        while left > 0 {
            let part = left.min(MAX_CHUNKS);
            left -= part;
            let (mut chunks, mut descriptors) = (Vec::new(), Vec::new());
            for _ in 0..part {
                let device = self.chunks.values().filter(|c| c.place == Place::Device).count() as u64;
                let fits = (device + 1) * self.script.chunk_bytes <= self.script.device_bytes;
                let held = self.make(if fits { Place::Device } else { Place::Host })?;
                let id = ChunkId(NEXT_CHUNK.fetch_add(1, Ordering::SeqCst));
                descriptors.push(self.cuda.export(held.handle)?);
                chunks.push(Chunk { id, place: held.place });
                self.chunks.insert(id, held);
            }
            self.count(|c| c.granted += part as u64);
            let borrowed: Vec<_> = descriptors.iter().map(|d| d.as_fd()).collect();
            self.send(&FromOwner::Granted { request, chunks, more: left > 0 }, &borrowed)?;
        }
        Ok(())
    }

    /// Copies random chunks to the other memory (card or host), and sends `Redirect` messages for them.
    fn relocate(&mut self, number: u32) -> Result<()> {
        let Some(mut order) = self.order.take() else { bail!("`Quiet` without an order") };
        let quiet = order.began.elapsed().as_micros() as u64;
        self.count(|c| {
            c.quiet_us += quiet;
            c.quiet_longest_us = c.quiet_longest_us.max(quiet);
        });
        let ids: Vec<_> = self.chunks.keys().copied().collect();
        let start = self.random.usize(..ids.len().max(1));
        let mut messages = Vec::new();
        for id in ids.iter().cycle().skip(start).take(ids.len().min(self.script.batch)) {
            let old = self.chunks[id];
            let device = self.chunks.values().filter(|c| c.place == Place::Device).count() as u64;
            let room = (device + 1) * self.script.chunk_bytes <= self.script.device_bytes;
            let place = if old.place == Place::Device || !room { Place::Host } else { Place::Device };
            let Ok(new) = self.make(place) else { break };
            self.cuda.copy(new.at, old.at, self.script.chunk_bytes, 0)?;
            messages.push((Chunk { id: *id, place }, self.cuda.export(new.handle)?));
            order.moves.push((*id, new));
        }
        self.cuda.finish(0)?;
        self.order = Some(order);
        if messages.is_empty() {
            return self.resume(number);
        }
        while !messages.is_empty() {
            let part: Vec<_> = messages.drain(..messages.len().min(MAX_CHUNKS)).collect();
            let borrowed: Vec<_> = part.iter().map(|m| m.1.as_fd()).collect();
            let moves = part.iter().map(|m| m.0).collect();
            self.send(&FromOwner::Redirect { order: number, moves }, &borrowed)?;
        }
        Ok(())
    }

    fn redirected(&mut self, number: u32, moved: u32) -> Result<()> {
        let Some(mut order) = self.order.take() else { bail!("`Redirected` without an order") };
        let part = order.moves.len().saturating_sub(order.answered).min(MAX_CHUNKS);
        for (at, (id, new)) in order.moves.iter().skip(order.answered).take(part).enumerate() {
            // If the tenant has freed a chunk meanwhile, release its new memory.
            let keep = at < moved as usize && self.chunks.contains_key(id);
            let gone = if keep { self.chunks.insert(*id, *new) } else { Some(*new) };
            if let Some(gone) = gone {
                self.discard(gone);
            }
        }
        self.count(|c| c.moved += u64::from(moved));
        order.answered += part;
        let over = order.answered >= order.moves.len();
        let began = order.began;
        self.order = Some(order);
        if over {
            let pause = began.elapsed().as_micros() as u64;
            self.count(|c| {
                c.relocations += 1;
                c.pause_us += pause;
                c.pause_longest_us = c.pause_longest_us.max(pause);
            });
            return self.resume(number);
        }
        Ok(())
    }

    fn resume(&mut self, order: u32) -> Result<()> {
        self.ended();
        self.say(&FromOwner::Resume { order })
    }

    fn ended(&mut self) {
        self.order = None;
        self.next_relocation = Instant::now() + self.script.relocate.unwrap_or_default();
    }

    fn clear(&mut self) {
        let moves = self.order.take().map(|order| order.moves.into_iter().skip(order.answered).collect::<Vec<_>>());
        for (_, held) in moves.into_iter().flatten() {
            self.discard(held);
        }
        for held in std::mem::take(&mut self.chunks).into_values() {
            self.discard(held);
        }
    }
}
