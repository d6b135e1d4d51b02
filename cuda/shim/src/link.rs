//! The link to the owner: the owner's terms, requests from the program's threads, and the program's fixed memory.
//!
//! UNSAFETY: requests random bytes from the kernel.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use cuda_protocol::{
    CardInfo, Chunk, End, FixedKind, FromOwner, FromTenant, Hello, LinkError, MAX_PENDING, RECONNECT_MS, Refusal,
    Share, VERSION, Welcome,
};

use crate::descriptors::{ChunkDescriptor, Connection};
use crate::driver;
use crate::log::report;
use crate::settings::Settings;

/// Maximum time to wait for an absent owner, or for a tenant's move to another card.
// TIMEOUT: a service restarts within seconds; if the owner stays absent, the program must get an error.
const OWNER_TIMEOUT: Duration = Duration::from_secs(20);
/// Chunk size in bytes that is assumed until the owner reports it.
const DEFAULT_CHUNK_BYTES: u64 = 2 << 20;
/// Maximum number of requests in flight from the program's threads; further threads wait. An owner rejects requests
/// beyond [`MAX_PENDING`], and a reconnecting program sends additional requests to report its fixed memory.
const PLACES: usize = MAX_PENDING / 2;

/// The owner's terms.
#[derive(Debug)]
pub struct Terms {
    /// Chunk size in bytes.
    pub chunk_bytes: u64,
    /// Cards, in the owner's order.
    pub cards: Vec<CardInfo>,
    /// For each driver device, the index of its card in the owner's list.
    pub devices: Vec<Option<u8>>,
    /// UUIDs of the cards that the driver sees, if the program could move to one of them.
    pub seen: Vec<[u8; 16]>,
}

/// A reply to a request. Its parts are collected until the last one arrives.
#[derive(Debug)]
pub enum Answer {
    /// The reply is incomplete. Contains the parts received so far.
    Waiting(Vec<(Chunk, ChunkDescriptor)>),
    /// The chunks were granted.
    Granted(Vec<(Chunk, ChunkDescriptor)>),
    /// The fixed memory was accounted for.
    Fixed,
    /// Free and total memory in bytes.
    Memory(u64, u64),
    /// The token for the shared chunks.
    Shared(Share),
    /// The request was rejected. Contains the chunks received so far.
    Refused(Refusal, Vec<(Chunk, ChunkDescriptor)>),
    /// The owner is absent, or exited before it replied.
    Away,
}

/// The link to the owner.
#[derive(Debug)]
pub struct Link {
    terms: OnceLock<Terms>,
    /// Random number that identifies this process to the owner.
    instance: OnceLock<u128>,
    /// The connection, for requests.
    connection: RwLock<Option<Arc<Connection>>>,
    /// Number of the next request.
    next: AtomicU32,
    answers: Mutex<HashMap<u32, Answer>>,
    /// Signalled when a reply arrives or a connection is established.
    answered: Condvar,
    /// The program's fixed memory in bytes, by card and kind. Locked while a change is reported to an owner.
    fixed: Mutex<HashMap<(u8, FixedKind), u64>>,
    in_flight: Mutex<usize>,
    /// UUID of the program's only card, once the program has moved.
    moved_to: Mutex<Option<[u8; 16]>>,
    /// Signalled when a request releases its slot.
    left: Condvar,
}

/// A reserved slot for a request in flight.
struct Place<'a>(&'a Link);

impl<'a> Place<'a> {
    fn take(link: &'a Link) -> Self {
        let mut taken = link.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        while *taken >= PLACES {
            taken = link.left.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
        *taken += 1;
        Self(link)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        *self.0.in_flight.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.left.notify_one();
    }
}

/// A connection, the owner's terms, and the cards to which the program could move.
pub type Welcomed = (Connection, Welcome, Vec<[u8; 16]>);

/// Connects to the owner at `socket`, and sends `hello`.
pub fn connect(socket: &Path, hello: Hello) -> Result<Welcomed, LinkError> {
    let begin = Instant::now();
    loop {
        let connected = Connection::open(socket).and_then(|connection| {
            connection.send(&FromTenant::Hello(hello.clone()), &[])?;
            Ok((connection.receive()?.message, connection))
        });
        match connected {
            Ok((FromOwner::Welcome(welcome), connection)) => return Ok((connection, welcome, Vec::new())),
            Ok((FromOwner::WelcomeAmong { welcome, others }, connection)) => return Ok((connection, welcome, others)),
            // The tenant is moving between two cards, so retry. For a program with memory, the caller retries.
            Ok((FromOwner::Goodbye(End::Moved), _)) if !hello.adopts && begin.elapsed() < OWNER_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(RECONNECT_MS));
            }
            Ok((other, _)) => {
                report!("the owner at {} refuses this process: {other:?}", socket.display());
                return Err(LinkError::Closed);
            }
            Err(error) => return Err(error),
        }
    }
}

impl Link {
    /// Returns a link without a connection.
    pub fn new() -> Self {
        Self {
            terms: OnceLock::new(),
            instance: OnceLock::new(),
            connection: RwLock::new(None),
            next: AtomicU32::new(1),
            answers: Mutex::default(),
            answered: Condvar::new(),
            fixed: Mutex::default(),
            in_flight: Mutex::new(0),
            moved_to: Mutex::default(),
            left: Condvar::new(),
        }
    }

    /// Returns the owner's terms, once the connection exists.
    pub fn terms(&self) -> Option<&Terms> {
        self.terms.get()
    }

    /// Records the owner's terms. Only the first call has an effect.
    pub fn set_terms(&self, terms: Terms) {
        let _ = self.terms.set(terms);
    }

    /// Returns the chunk size in bytes.
    pub fn chunk_bytes(&self) -> u64 {
        self.terms().map_or(DEFAULT_CHUNK_BYTES, |terms| terms.chunk_bytes)
    }

    /// Returns the index of a device's card in the owner's list.
    pub fn card(&self, device: i32) -> Option<u8> {
        self.terms()?.devices.get(usize::try_from(device).ok()?).copied().flatten()
    }

    /// Returns the current device and its card, if the owner manages that card.
    pub fn current_card(&self) -> Option<(i32, u8)> {
        let device = driver::current_device().ok()?;
        self.card(device).map(|card| (device, card))
    }

    fn instance(&self) -> u128 {
        // No lock is needed: concurrent first calls return the same number.
        self.instance.get().copied().unwrap_or_else(|| {
            let mut bytes = [0; 16];
            // SAFETY: the buffer has the given length.
            unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
            let _ = self.instance.set(u128::from_ne_bytes(bytes));
            self.instance.get().copied().unwrap_or_default()
        })
    }

    /// Returns the first message of this process.
    pub fn hello(&self, settings: &Settings, adopts: bool) -> Hello {
        let program = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
        Hello {
            version: VERSION,
            pid: std::process::id(),
            instance: self.instance(),
            tenant: settings.tenant.clone(),
            program: program.trim().to_owned(),
            adopts,
        }
    }

    /// Sets the connection for later requests, or removes it.
    pub fn set_connection(&self, connection: Option<&Arc<Connection>>) {
        *self.connection.write().unwrap_or_else(PoisonError::into_inner) = connection.map(Arc::clone);
    }

    /// Sends a message, unless the owner is absent. Returns true on success.
    pub fn send(&self, message: &FromTenant) -> bool {
        let connection = self.connection.read().unwrap_or_else(PoisonError::into_inner).clone();
        connection.is_some_and(|connection| connection.send(message, &[]).is_ok())
    }

    /// Stops sending requests to the owner. Returns false, and changes nothing, if a request is waiting for its reply.
    pub fn hold_requests(&self) -> bool {
        let connection = self.connection.write().unwrap_or_else(PoisonError::into_inner).take();
        let is_idle = !self.any_requests();
        if !is_idle && let Some(connection) = &connection {
            self.resume_requests(connection);
        }
        is_idle
    }

    /// Sends later requests over `connection`.
    pub fn resume_requests(&self, connection: &Arc<Connection>) {
        self.set_connection(Some(connection));
        // Acquire the lock once, so that a thread that is about to wait cannot miss the notification.
        drop(self.answers());
        self.answered.notify_all();
    }

    /// Returns the UUID of the program's card, if the program has moved.
    pub fn moved_to(&self) -> Option<[u8; 16]> {
        *self.moved_to.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the card that the program has moved to.
    pub fn set_moved_to(&self, uuid: [u8; 16]) {
        *self.moved_to.lock().unwrap_or_else(PoisonError::into_inner) = Some(uuid);
    }

    /// Returns true if requests can be sent to an owner.
    pub fn is_connected(&self) -> bool {
        self.connection.read().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Notifies the owner that a submission is waiting.
    pub fn notify_waiting(&self) {
        for card in 0..self.terms().map_or(0, |terms| terms.cards.len()) {
            self.send(&FromTenant::Waiting { card: u8::try_from(card).unwrap_or(u8::MAX) });
        }
    }

    fn answers(&self) -> MutexGuard<'_, HashMap<u32, Answer>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the request that `make` creates, and waits for the reply.
    pub fn request(&self, make: impl FnOnce(u32) -> FromTenant) -> Answer {
        let _place = Place::take(self);
        self.begin(make).map_or(Answer::Away, |number| self.wait(number))
    }

    /// Sends a request. Returns its number, or `None` if the owner is absent.
    fn begin(&self, make: impl FnOnce(u32) -> FromTenant) -> Option<u32> {
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        self.answers().insert(number, Answer::Waiting(Vec::new()));
        if self.send(&make(number)) {
            return Some(number);
        }
        self.answers().remove(&number);
        None
    }

    fn wait(&self, number: u32) -> Answer {
        let mut answers = self.answers();
        loop {
            match answers.remove(&number) {
                Some(Answer::Waiting(parts)) => {
                    answers.insert(number, Answer::Waiting(parts));
                    answers = self.answered.wait(answers).unwrap_or_else(PoisonError::into_inner);
                }
                Some(answer) => return answer,
                None => return Answer::Away,
            }
        }
    }

    /// Waits for an absent owner for up to [`OWNER_TIMEOUT`]. Returns true if the owner is present.
    pub fn wait_for_owner(&self) -> bool {
        let limit = Instant::now() + OWNER_TIMEOUT;
        let mut answers = self.answers();
        while !self.is_connected() {
            let left = limit.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            answers = self.answered.wait_timeout(answers, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Returns true if requests are in flight.
    pub fn any_requests(&self) -> bool {
        !self.answers().is_empty()
    }

    /// Processes a part of a reply. Drops replies without a matching request.
    pub fn answer(&self, request: u32, change: impl FnOnce(Vec<(Chunk, ChunkDescriptor)>) -> Answer) {
        let mut answers = self.answers();
        if let Some(Answer::Waiting(parts)) = answers.remove(&request) {
            answers.insert(request, change(parts));
        }
        self.answered.notify_all();
    }

    /// Aborts all waits for replies, because the connection has been closed.
    pub fn abandon_requests(&self) {
        for answer in self.answers().values_mut() {
            if let Answer::Waiting(_) = answer {
                *answer = Answer::Away;
            }
        }
        self.answered.notify_all();
    }

    fn fixed(&self) -> MutexGuard<'_, HashMap<(u8, FixedKind), u64>> {
        self.fixed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the amount of fixed memory, and calls `tell` to notify the owner before any other thread can change it
    /// again.
    fn change<T>(&self, card: u8, kind: FixedKind, by: impl FnOnce(u64) -> u64, tell: impl FnOnce() -> T) -> T {
        let mut fixed = self.fixed();
        let bytes = fixed.entry((card, kind)).or_default();
        *bytes = by(*bytes);
        tell()
    }

    /// Requests fixed memory from the owner. Returns true if the owner permits it or is absent.
    pub fn fix(&self, card: u8, kind: FixedKind, bytes: u64) -> bool {
        // Reserve the slot before locking, because a thread that waits for memory must not block threads that return
        // memory.
        let _place = Place::take(self);
        let add = |sum: u64| sum.saturating_add(bytes);
        let ask = || self.begin(|request| FromTenant::Fix { request, card, kind, bytes });
        let number = self.change(card, kind, add, ask);
        // Without an owner, the memory is permitted, and reported to the next owner later.
        let may = matches!(number.map_or(Answer::Away, |number| self.wait(number)), Answer::Fixed | Answer::Away);
        if !may {
            self.change(card, kind, |sum| sum.saturating_sub(bytes), || ());
        }
        may
    }

    /// Returns fixed memory to the owner.
    pub fn unfix(&self, card: u8, kind: FixedKind, bytes: u64) {
        let tell = || self.send(&FromTenant::Unfix { card, kind, bytes });
        self.change(card, kind, |sum| sum.saturating_sub(bytes), tell);
    }

    /// Switches to a new owner, and reports all fixed memory to it.
    pub fn reconnect(&self, connection: &Arc<Connection>) {
        let fixed = self.fixed();
        self.set_connection(Some(connection));
        for (&(card, kind), &bytes) in fixed.iter().filter(|(_, bytes)| **bytes > 0) {
            // The program already has the memory, so no thread waits for the reply.
            self.send(&FromTenant::Fix { request: 0, card, kind, bytes });
        }
        drop(fixed);
        self.resume_requests(connection);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_without_owner_fails_and_memory_is_still_counted() {
        let link = Link::new();
        assert!(matches!(link.request(|request| FromTenant::AskMemory { request, card: 0 }), Answer::Away));
        assert!(link.fix(7, FixedKind::Array, 100), "an absent owner does not reject requests");
        link.unfix(7, FixedKind::Array, 30);
        assert_eq!(link.fixed().get(&(7, FixedKind::Array)), Some(&70));
    }

    #[test]
    fn concurrent_requests_stay_within_owner_limit() {
        use std::sync::atomic::AtomicUsize;
        let (link, now, most) = (Link::new(), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 * PLACES {
                scope.spawn(|| {
                    let _place = Place::take(&link);
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    // Give all other threads time to arrive.
                    std::thread::sleep(Duration::from_millis(5));
                    now.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        assert_eq!(most.load(Ordering::SeqCst), PLACES);
    }

    #[test]
    fn pending_request_is_abandoned_when_connection_ends() {
        let link = Link::new();
        link.answers().insert(u32::MAX, Answer::Waiting(Vec::new()));
        link.abandon_requests();
        assert!(matches!(link.wait(u32::MAX), Answer::Away));
    }
}
