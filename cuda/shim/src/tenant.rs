//! The connection to the owner, and the thread that obeys it.
//!
//! UNSAFETY: binds contexts of the program to the thread, and registers the handlers of a child after `fork`.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::cell::Cell;
use std::collections::HashSet;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use cuda_protocol::{
    CardInfo, EARLY_US, End, FromOwner, FromTenant, Hello, LinkError, RECLAIM_MS, RECONNECT_MS, Run, VERSION,
    VERSION_HANDOVER,
};

use crate::descriptors::{ChunkDescriptor, Connection};
use crate::driver::{self, Object, SUCCESS};
use crate::log::report;
use crate::pace::Left;
use crate::requests::{self, Answer, answer};
use crate::{captures, fences, gate, memory, pace, process, settings};

static TENANT: OnceLock<Tenant> = OnceLock::new();
/// The connection, for requests.
static LINK: RwLock<Option<Arc<Connection>>> = RwLock::new(None);
/// Contexts of the program in which work or memory was seen.
static CONTEXTS: Mutex<Option<HashSet<u64>>> = Mutex::new(None);
static STARTED: AtomicBool = AtomicBool::new(false);
/// Time for which empty chunks are cached, unless the owner requests them.
// TIMEOUT: without it an asynchronous pool that returns all it has and allocates it again is 40 times slower.
const EMPTY_CHUNK_RETENTION: Duration = Duration::from_secs(1);
/// Poll interval for such chunks after the owner has requested them.
// TIMEOUT: work of a slice ends within a few milliseconds.
const RECLAIM_LOOK: Duration = Duration::from_millis(1);
/// Time beyond the expected end for which one thread polls for the end of work, or the start of a slice, without
/// sleeping.
// TIMEOUT: lengths of work are known to within a third, and the last work is at most as long as a slice may idle: 300
// us.
const POLL_OVERTIME: Duration = Duration::from_micros(300);

/// The owner's terms.
#[derive(Debug)]
pub struct Tenant {
    /// Size of a chunk in bytes.
    pub chunk_bytes: u64,
    /// Cards, in the owner's order.
    pub cards: Vec<CardInfo>,
    /// Index in the owner's list of cards, for each device of the driver.
    pub devices: Vec<Option<u8>>,
}

/// The owner's terms, once the connection is there.
pub fn get() -> Option<&'static Tenant> {
    TENANT.get()
}

/// Card in the owner's list of the driver's device.
pub fn card(device: i32) -> Option<u8> {
    get()?.devices.get(usize::try_from(device).ok()?).copied().flatten()
}

/// Connects to the owner, once, and initialises the driver with `init`, which gets the tenant's cards. Returns its
/// result.
pub fn start(init: impl FnOnce(&[CardInfo]) -> std::ffi::c_int) -> std::ffi::c_int {
    /// A process that was refused is not a tenant later.
    static REFUSED: process::Lock<bool> = process::Lock::new(false);
    // A child of a process that was initialising the driver cannot initialise it.
    let Some(mut refused) = REFUSED.take() else { return driver::NOT_INITIALIZED };
    if let Some(tenant) = get() {
        return if STARTED.load(Ordering::SeqCst) { init(&tenant.cards) } else { driver::SYSTEM_NOT_READY };
    }
    if *refused {
        return driver::SYSTEM_NOT_READY;
    }
    match connect(&hello(false)) {
        Ok((link, welcome)) => {
            let result = init(&welcome.cards);
            if result != SUCCESS {
                return result;
            }
            let devices = devices(&welcome.cards);
            let tenant = Tenant { chunk_bytes: welcome.chunk_bytes, cards: welcome.cards, devices };
            let _ = TENANT.set(tenant);
            gate::close(gate::NO_SLICE, None);
            let link = Arc::new(link);
            use_link(&link);
            let version = welcome.version;
            match process::spawn("gpu-mediator", move || serve(link, version)) {
                Ok(()) => STARTED.store(true, Ordering::SeqCst),
                Err(error) => report!("no thread could be started: {error}"),
            }
        }
        Err(error) => {
            report!("the owner cannot be reached: {error}");
            *refused = true;
        }
    }
    if STARTED.load(Ordering::SeqCst) { SUCCESS } else { driver::SYSTEM_NOT_READY }
}

/// Sends requests over this connection.
fn use_link(link: &Arc<Connection>) {
    *LINK.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(link));
}

fn instance() -> u128 {
    static INSTANCE: OnceLock<u128> = OnceLock::new();
    // A lock without waits: two threads that are first at once agree on one number.
    INSTANCE.get().copied().unwrap_or_else(|| {
        let mut bytes = [0; 16];
        // SAFETY: the buffer has the given length.
        unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        let _ = INSTANCE.set(u128::from_ne_bytes(bytes));
        INSTANCE.get().copied().unwrap_or_default()
    })
}

/// Returns the first message of this process.
pub fn hello(adopts: bool) -> Hello {
    let program = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let tenant = settings::get().tenant.clone();
    Hello {
        version: VERSION,
        pid: std::process::id(),
        instance: instance(),
        tenant,
        program: program.trim().to_owned(),
        adopts,
    }
}

fn connect(hello: &Hello) -> Result<(Connection, cuda_protocol::Welcome), LinkError> {
    let path = settings::get().socket.as_deref().unwrap_or(Path::new(""));
    let link = Connection::open(path)?;
    link.send(&FromTenant::Hello(hello.clone()), &[])?;
    match link.receive()?.message {
        FromOwner::Welcome(welcome) => Ok((link, welcome)),
        other => {
            report!("the owner refuses this process: {other:?}");
            Err(LinkError::Closed)
        }
    }
}

/// Index in the owner's list of cards, for each device that the driver shows.
fn devices(cards: &[CardInfo]) -> Vec<Option<u8>> {
    let mut count = 0;
    // SAFETY: the pointer is valid, and the driver has been initialised.
    unsafe { driver::device_get_count(&raw mut count) };
    let uuid = |ordinal| {
        let (mut device, mut uuid) = (0, [0; 16]);
        // SAFETY: the pointers are valid.
        let result = unsafe {
            driver::device_get(&raw mut device, ordinal);
            driver::device_get_uuid(&raw mut uuid, device)
        };
        (result == SUCCESS).then_some(uuid)
    };
    let find = |uuid| cards.iter().position(|card| card.uuid == uuid).and_then(|at| u8::try_from(at).ok());
    (0..count).map(|ordinal| uuid(ordinal).and_then(find)).collect()
}

/// Remembers the context that is current to this thread, for drains.
pub fn note_context() {
    thread_local! {
        /// The context that this thread has noted last. A thread that creates a context also records it, so that no
        /// context is missed when a destroyed one's handle is reused.
        static LAST_NOTED_CONTEXT: Cell<u64> = const { Cell::new(0) };
    }
    let context = driver::current_context() as u64;
    if LAST_NOTED_CONTEXT.try_with(|noted| noted.replace(context) == context) != Ok(true) {
        note(context);
    }
}

/// Remembers a context, for drains.
pub fn note(context: u64) {
    if context != 0 {
        CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(context);
    }
}

/// Forgets a context that ends.
pub fn forget(context: u64) {
    CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().remove(&context);
}

/// Sends a message; has no effect while the owner is absent.
pub fn send(message: &FromTenant) -> bool {
    let link = LINK.read().unwrap_or_else(PoisonError::into_inner).clone();
    link.is_some_and(|link| link.send(message, &[]).is_ok())
}

/// Returns true if an owner is there.
pub fn connected() -> bool {
    LINK.read().unwrap_or_else(PoisonError::into_inner).is_some()
}

/// Notifies the owner that a submission waits.
pub fn waiting() {
    for card in 0..get().map_or(0, |t| t.cards.len()) {
        send(&FromTenant::Waiting { card: u8::try_from(card).unwrap_or(u8::MAX) });
    }
}

/// A slice granted by the owner.
struct Turn {
    run: Run,
    began: Instant,
    reported: Instant,
}

impl Turn {
    /// Returns the time until the turn may end by itself.
    fn next_look(&self) -> Duration {
        // TIMEOUT: finer than any slice's length, and a thousandth of a processor.
        const MAX_POLL_INTERVAL: Duration = Duration::from_millis(1);
        // TIMEOUT: a fiftieth of a processor for a program of short kernels.
        const MIN_POLL_INTERVAL: Duration = Duration::from_micros(200);
        if self.run.idle_us == 0 {
            return MAX_POLL_INTERVAL;
        }
        let idle = Duration::from_micros(self.run.idle_us.into());
        let left = || idle.saturating_sub(self.began.elapsed().min(pace::idle())).max(MIN_POLL_INTERVAL / 4);
        pace::next_end().map_or_else(left, |end| end.max(MIN_POLL_INTERVAL)).min(MAX_POLL_INTERVAL)
    }
}

/// A request of the owner for empty chunks.
struct Reclaim {
    since: Instant,
    /// The order, until it is answered.
    order: Option<u32>,
    /// Time at which it was looked for them last.
    looked: Instant,
}

struct Agent {
    link: Arc<Connection>,
    /// Time at which empty chunks were last returned.
    tidied: Instant,
    reclaim: Option<Reclaim>,
    /// Version of the messages.
    version: u16,
    /// Time until which a slice is expected to begin.
    soon: Option<Instant>,
    turn: Option<Turn>,
    order: Option<u32>,
}

/// Obeys the owner until the process ends.
fn serve(link: Arc<Connection>, version: u16) {
    // A capture's restrictions on other threads do not apply to this one.
    let mut mode = 2;
    // SAFETY: the pointer is valid. The other call has this thread's waits end on time, not up to 50 us later.
    unsafe {
        driver::exchange_capture_mode(&raw mut mode);
        libc::prctl(libc::PR_SET_TIMERSLACK, 1);
    }
    let mut agent = Agent { link, tidied: Instant::now(), reclaim: None, version, soon: None, turn: None, order: None };
    loop {
        if let Err(error) = agent.run() {
            report!("the connection to the owner ended: {error}");
        }
        agent.alone();
        agent.reconnect();
    }
}

impl Agent {
    fn run(&mut self) -> Result<(), LinkError> {
        loop {
            if self.ready()? {
                let expects = self.order.is_some() || requests::any();
                let (message, descriptors) = self.link.receive_with_descriptors(expects)?;
                self.obey(message, descriptors)?;
            }
            self.tidy();
            self.reclaim()?;
            self.look()?;
        }
    }

    /// Returns chunks that are kept for the next allocation, after a while. Prefers the time between slices: the owner
    /// may want a slice to end.
    fn tidy(&mut self) {
        let is_measured = self.turn.as_ref().is_some_and(|turn| turn.run.run_ahead_us > 0);
        if self.tidied.elapsed() >= if is_measured { 2 * EMPTY_CHUNK_RETENTION } else { EMPTY_CHUNK_RETENTION } {
            self.tidied = Instant::now();
            bind();
            memory::tidy();
        }
    }

    /// Returns empty chunks, if the owner has requested them. Chunks still in use by earlier work follow later.
    fn reclaim(&mut self) -> Result<(), LinkError> {
        let Some(reclaim) = self.reclaim.as_mut().filter(|reclaim| reclaim.looked.elapsed() >= RECLAIM_LOOK) else {
            return Ok(());
        };
        bind();
        let is_all = memory::give_up_empty();
        reclaim.looked = Instant::now();
        let waited = reclaim.since.elapsed();
        let is_late = waited >= Duration::from_millis(RECLAIM_MS);
        let answer = reclaim.order.take_if(|_| is_all || is_late);
        if is_all || waited >= EMPTY_CHUNK_RETENTION {
            self.reclaim = None;
        }
        answer.map_or(Ok(()), |order| self.link.send(&FromTenant::Reclaimed { order }, &[]))
    }

    /// Waits for a message, at most until the slice needs attention.
    fn ready(&mut self) -> Result<bool, LinkError> {
        while self.soon.is_some_and(|until| Instant::now() < until) {
            if self.poll(Duration::ZERO) {
                return Ok(true);
            }
            std::thread::yield_now();
        }
        self.soon = None;
        let timeout = match &self.turn {
            Some(turn) if turn.run.run_ahead_us > 0 => turn.next_look(),
            _ => EMPTY_CHUNK_RETENTION,
        };
        let timeout = if self.reclaim.is_some() { timeout.min(RECLAIM_LOOK) } else { timeout };
        Ok(self.poll(timeout))
    }

    /// Returns true if a message comes within `timeout`.
    fn poll(&self, timeout: Duration) -> bool {
        let timeout = libc::timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        let mut poll = libc::pollfd { fd: self.link.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry, a valid time, and no signals.
        let count = unsafe { libc::ppoll(&raw mut poll, 1, &raw const timeout, std::ptr::null()) };
        count > 0
    }

    fn obey(&mut self, message: FromOwner, descriptors: Vec<ChunkDescriptor>) -> Result<(), LinkError> {
        match message {
            FromOwner::Granted { request, chunks, more } => answer(request, |mut parts| {
                parts.extend(chunks.into_iter().zip(descriptors));
                if more {
                    Answer::Waiting(parts)
                } else {
                    memory::arriving();
                    Answer::Granted(parts)
                }
            }),
            FromOwner::Fixed { request } => answer(request, |_| Answer::Fixed),
            FromOwner::Refused { request, reason } => answer(request, |parts| Answer::Refused(reason, parts)),
            FromOwner::Memory { request, free_bytes, total_bytes } => {
                answer(request, |_| Answer::Memory(free_bytes, total_bytes));
            }
            FromOwner::Quiesce { order, patience_us } => self.quiesce(order, patience_us)?,
            FromOwner::Redirect { order, moves } => {
                bind();
                let moved = memory::redirect(moves.into_iter().zip(descriptors).collect());
                self.link.send(&FromTenant::Redirected { order, moved }, &[])?;
            }
            FromOwner::Resume { .. } => {
                self.order = None;
                open(gate::ORDER);
            }
            FromOwner::Run(run) => {
                let now = Instant::now();
                pace::bound(run.run_ahead_us);
                self.turn = Some(Turn { run, began: now, reported: now });
                self.soon = None;
                open(gate::NO_SLICE);
            }
            FromOwner::Stop { card, turn } => {
                if self.turn.as_ref().is_some_and(|t| t.run.turn == turn && t.run.card == card) {
                    self.stop()?;
                }
            }
            FromOwner::Soon { in_us, .. } => {
                let time = Duration::from_micros(in_us.into()) + POLL_OVERTIME;
                self.soon = Some(Instant::now() + time);
                gate::soon(time);
            }
            FromOwner::Reclaim { order } => {
                bind();
                memory::begin_to_empty();
                let since = Instant::now();
                self.reclaim = Some(Reclaim { since, order: Some(order), looked: since - RECLAIM_LOOK });
            }
            FromOwner::Shared { request, share } => answer(request, |_| Answer::Shared(share)),
            // Requested over separate connections.
            FromOwner::Welcome(_) | FromOwner::Processes { .. } => {}
            FromOwner::Goodbye(end) => {
                report!("the owner says goodbye: {end:?}");
                return Err(LinkError::Closed);
            }
        }
        Ok(())
    }

    /// Ends the slice or reports its use, when it is time.
    fn look(&mut self) -> Result<(), LinkError> {
        let Some(turn) = &mut self.turn else { return Ok(()) };
        if turn.run.run_ahead_us == 0 {
            return Ok(());
        }
        let run = turn.run;
        let now = Instant::now();
        let passed = |since: Instant, us: u32| us > 0 && now.duration_since(since) >= Duration::from_micros(us.into());
        if passed(turn.began, run.length_us) {
            return self.stop();
        }
        let idle = u64::from(run.idle_us);
        if pace::quiet() && idle > 0 && now.duration_since(turn.began).min(pace::idle()) >= Duration::from_micros(idle)
        {
            return self.stop();
        }
        if passed(turn.reported, run.report_us) {
            turn.reported = now;
            let usage = pace::take_usage();
            self.link.send(&FromTenant::Used { card: run.card, turn: run.turn, usage }, &[])?;
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<(), LinkError> {
        let Some(turn) = self.turn.take() else { return Ok(()) };
        // Waking all threads that wait for the end takes about as long as the tolerated idle time.
        let lead = Duration::from_micros(turn.run.idle_us.into());
        gate::close(gate::NO_SLICE, None);
        // The driver knows of no work after the measured work.
        if !self.approach_end(&turn.run, lead) || !pace::is_measured() {
            drain(None);
        }
        let usage = pace::take_usage();
        let (card, waiting) = (turn.run.card, gate::held());
        self.link.send(&FromTenant::Stopped { card, turn: turn.run.turn, usage, waiting }, &[])?;
        // Work that ends slightly later is checked before the next slice: its length does not include the other
        // tenants' slices.
        let _ = sees_end(POLL_OVERTIME, Duration::ZERO);
        if !waiting && gate::told() {
            // A thread's own message may have been sent before `Stopped`; the owner ignores it then.
            self.link.send(&FromTenant::Waiting { card }, &[])?;
        }
        Ok(())
    }

    fn quiesce(&mut self, order: u32, patience_us: u32) -> Result<(), LinkError> {
        let deadline = Instant::now() + Duration::from_micros(patience_us.into());
        if gate::close(gate::ORDER, Some(deadline)) && drain(Some(deadline)) {
            // Empty chunks are returned, not copied. All work has ended.
            bind();
            memory::begin_to_empty();
            memory::give_up_empty();
            self.order = Some(order);
            return self.link.send(&FromTenant::Quiet { order }, &[]);
        }
        open(gate::ORDER);
        self.link.send(&FromTenant::Busy { order }, &[])
    }

    /// Announces the end of a slice's last work. Returns true if the owner was notified.
    fn announce(&self, run: &Run, left: Duration) -> bool {
        let in_us = u32::try_from(left.as_micros()).unwrap_or(u32::MAX);
        let ending = FromTenant::Ending { card: run.card, turn: run.turn, in_us };
        self.version >= VERSION_HANDOVER && self.link.send(&ending, &[]).is_ok()
    }

    /// Waits for the last work of a slice, if its end is predictable, and announces it `lead` before. Returns true if
    /// it has ended or ends within [`EARLY_US`]. The gate is closed.
    fn approach_end(&self, run: &Run, lead: Duration) -> bool {
        if lead.is_zero() {
            return false;
        }
        loop {
            match pace::left() {
                Left::About(_) | Left::Nothing if captures::any() => return false,
                Left::Nothing => return pace::is_measured(),
                Left::About(left) if left <= lead => {
                    return self.announce(run, left)
                        && sees_end(left + POLL_OVERTIME, Duration::from_micros(EARLY_US.into()));
                }
                Left::About(left) => std::thread::sleep((left - lead).min(Duration::from_micros(100))),
                Left::Unknown => return false,
            }
        }
    }

    /// Lets the program run without an owner.
    fn alone(&mut self) {
        *LINK.write().unwrap_or_else(PoisonError::into_inner) = None;
        // Messages that threads send now fail without a wait. SAFETY: our own open descriptor.
        unsafe { libc::shutdown(self.link.as_fd().as_raw_fd(), libc::SHUT_RDWR) };
        (self.turn, self.order, self.soon, self.reclaim) = (None, None, None, None);
        pace::bound(0);
        requests::abandon();
        open(gate::NO_SLICE | gate::ORDER);
    }

    /// Connects to the owner again, and reports the chunks of this process.
    fn reconnect(&mut self) {
        loop {
            std::thread::sleep(Duration::from_millis(RECONNECT_MS));
            let Ok((link, welcome)) = connect(&hello(true)) else { continue };
            if get().is_none_or(|t| t.chunk_bytes != welcome.chunk_bytes || t.cards.len() != welcome.cards.len()) {
                let _ = link.send(&FromTenant::Goodbye(End::Violation), &[]);
                continue;
            }
            let link = Arc::new(link);
            bind();
            let told = memory::adopted(
                |chunks, descriptors, more| {
                    let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(|d| d.as_fd()).collect();
                    link.send_many(&FromTenant::Adopt { chunks, more }, &borrowed).is_ok()
                },
                || requests::recount(|| use_link(&link)),
            );
            if told {
                // Not earlier: a submission that meets the closed gate notifies the owner once, over this connection.
                gate::close(gate::NO_SLICE, None);
                (self.link, self.version) = (link, welcome.version);
                return;
            }
        }
    }
}

/// Opens the gate. Maps evicted chunks first if the program's work may run then.
fn open(reason: u32) {
    // TIMEOUT: the driver may have no memory for a page table while other tenants' memory moves; the program then runs
    // anyway, and faults if it needs evicted chunks.
    const MAX_RETURN_ATTEMPTS: u32 = 1000;
    if gate::opens_without(reason) {
        let mut tries = 0;
        bind();
        while !memory::bring() && tries < MAX_RETURN_ATTEMPTS {
            tries += 1;
            std::thread::sleep(Duration::from_millis(5));
        }
        if tries == MAX_RETURN_ATTEMPTS {
            report!("memory that is away cannot be mapped");
        }
    }
    gate::open(reason);
}

/// Waits until no work is in flight. Returns false at the deadline. The gate is closed.
fn drain(deadline: Option<Instant>) -> bool {
    while pace::left() != Left::Nothing {
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return false;
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    // A context in which a stream captures must not be synchronised.
    while !(!captures::any() && synchronize() || fences::have_passed()) {
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return false;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    pace::all_measured();
    true
}

/// Waits for all work of the program's contexts. Returns false if a context has a capture unknown to the library.
fn synchronize() -> bool {
    let contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default();
    for context in contexts {
        // SAFETY: the program's context; the driver refuses a destroyed one.
        let result = unsafe {
            if driver::ctx_set_current(context as Object) == SUCCESS { driver::ctx_synchronize() } else { SUCCESS }
        };
        if driver::CAPTURE_FORBIDS.contains(&result) {
            return false;
        }
    }
    fences::all_passed();
    true
}

/// Makes a context of the program current to this thread.
fn bind() {
    let contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(context) = contexts.iter().flatten().next() {
        // SAFETY: as in `drain`.
        unsafe { driver::ctx_set_current(*context as Object) };
    }
}

/// Runs `work` on a thread of the program while none of its work is in flight, with one of its contexts current.
pub fn drained(work: impl FnOnce() -> std::ffi::c_int) -> std::ffi::c_int {
    let before = driver::current_context();
    gate::close(gate::EXPORT, None);
    let result = if captures::any() {
        // Work that is captured must not be waited for.
        driver::CAPTURE_UNSUPPORTED
    } else {
        drain(None);
        if before.is_null() {
            bind();
        } else {
            // SAFETY: the context that was current.
            unsafe { driver::ctx_set_current(before) };
        }
        driver::relaxed(work)
    };
    gate::open(gate::EXPORT);
    // SAFETY: as above.
    unsafe { driver::ctx_set_current(before) };
    result
}

/// Polls without sleeping, for `time` at most, until at most `rest` is in flight. Returns true if so.
fn sees_end(time: Duration, rest: Duration) -> bool {
    let since = Instant::now();
    loop {
        match pace::left() {
            Left::Nothing => return true,
            Left::About(left) if left <= rest && !rest.is_zero() => return true,
            Left::About(_) | Left::Unknown if since.elapsed() > time => return false,
            Left::About(_) | Left::Unknown => std::thread::yield_now(),
        }
    }
}
