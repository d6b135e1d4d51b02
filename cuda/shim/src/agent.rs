//! The thread that executes the owner's commands.
//!
//! UNSAFETY: waits for messages, and calls the driver on the library's thread.
#![allow(unsafe_code, reason = "see UNSAFETY")]

mod moves;

use std::ffi::c_int;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cuda_protocol::{
    CardInfo, End, FromOwner, FromTenant, LinkError, RECLAIM_MS, Run, VERSION_CONCURRENT, VERSION_HANDOVER, Welcome,
};

use crate::descriptors::{ChunkDescriptor, Connection};
use crate::driver::{self, SUCCESS};
use crate::link::{self, Answer, Terms, Welcomed};
use crate::log::{self, report};
use crate::memory::Operations;
use crate::pace::{Left, RunAhead};
use crate::shim::{Card, Shim, Start};
use crate::{gate, process, turn_end};
use program_cards::calls::show;
use program_cards::identities;

/// Minimum interval between returns of empty chunks that the owner has not requested.
// TIMEOUT: without this cache, an asynchronous pool that returns all of its memory and allocates it again is 40 times
// slower.
const EMPTY_CHUNK_RETENTION: Duration = Duration::from_secs(1);
/// Poll interval for empty chunks while the owner requests them.
// TIMEOUT: a slice's work completes within a few milliseconds.
const RECLAIM_LOOK: Duration = Duration::from_millis(1);
/// Time that one thread keeps busy-polling after the expected end of work or start of a slice.
// TIMEOUT: estimates of work durations are accurate to a third, and the last work takes no longer than a slice's idle
// limit of 300 us.
const POLL_OVERTIME: Duration = Duration::from_micros(300);
/// Connects to the owners on the first call, and initializes the driver with `init`, which receives the tenant's cards
/// and those to which the program could move. Returns the result of `init`, or the error of an owner's connection.
pub fn start(shim: &'static Shim, init: impl FnOnce(&[CardInfo], &[[u8; 16]]) -> c_int) -> c_int {
    // A child cannot initialize the driver if its parent forked while doing so.
    let Some(mut state) = shim.start.take() else { return driver::NOT_INITIALIZED };
    if *state == Start::Connected {
        let terms = shim.cards().filter_map(|card| card.link.terms());
        let cards: Vec<CardInfo> = terms.flat_map(|terms| terms.cards.iter().cloned()).collect();
        return if shim.has_started() { init(&cards, &[]) } else { driver::SYSTEM_NOT_READY };
    }
    if *state == Start::Refused {
        return driver::SYSTEM_NOT_READY;
    }
    let connected = match connect(shim) {
        Ok(connected) => connected,
        Err(reason) => {
            let line = format!("gpu-mediator: libcuda: {reason}\n");
            // With several sockets, always report the error, because the program itself reports only CUDA error 802.
            if !shim.is_single() || log::wanted() {
                log::write(&line);
            }
            *state = Start::Refused;
            return driver::SYSTEM_NOT_READY;
        }
    };
    let cards: Vec<CardInfo> = connected.iter().flat_map(|(_, welcome, _)| welcome.cards.clone()).collect();
    // A program with several cards, or with an MPS server, cannot move.
    let may_move = shim.is_single() && !shim.settings.mps;
    let others = connected.iter().filter(|_| may_move).flat_map(|(.., others)| others.clone()).collect::<Vec<_>>();
    let result = init(&cards, &others);
    if result != SUCCESS {
        return result;
    }
    let seen = identities::seen();
    if !others.is_empty() {
        // The tenant's cards are the first ones.
        show(seen.iter().take_while(|uuid| cards.iter().any(|card| card.uuid == **uuid)).count());
    }
    *state = Start::Connected;
    let mut ready = Vec::new();
    for (card, (connection, welcome, others)) in shim.cards().zip(connected) {
        let (version, devices) = (welcome.version, devices(&seen, &welcome.cards));
        let seen = if may_move && !others.is_empty() { seen.clone() } else { Vec::new() };
        let terms = Terms { chunk_bytes: welcome.chunk_bytes, cards: welcome.cards, devices, seen };
        moves::tell_seen(&connection, version, &terms);
        card.link.set_terms(terms);
        card.gate.close(gate::NO_SLICE, None);
        let connection = Arc::new(connection);
        card.link.set_connection(Some(&connection));
        tell_concurrency(&connection, version, shim.settings.mps);
        ready.push((card, connection, version));
    }
    // Start threads last, because a thread may need all owners' terms.
    for (card, connection, version) in ready {
        if let Err(error) = process::spawn("gpu-mediator", move || serve(shim, card, connection, version)) {
            report!("no thread could be started: {error}");
            return driver::SYSTEM_NOT_READY;
        }
    }
    shim.started.store(true, Ordering::SeqCst);
    SUCCESS
}

/// Returns true if cards may be hidden from the program. Before `cuInit`, asks the owner.
pub fn may_hide_cards(shim: &Shim) -> bool {
    let (first, [socket], false) = (shim.first(), &shim.settings.sockets[..], shim.settings.mps) else { return false };
    if let Some(terms) = first.link.terms() {
        return !terms.seen.is_empty();
    }
    let Ok((connection, _, others)) = link::connect(socket, first.link.hello(&shim.settings, false)) else {
        return false;
    };
    let _ = connection.send(&FromTenant::Goodbye(End::Leaving), &[]);
    !others.is_empty()
}

/// Connects to the owner of each card. Returns the connections and the owners' terms, or the reason why the program
/// cannot start.
fn connect(shim: &Shim) -> Result<Vec<Welcomed>, String> {
    if let Some(fault) = shim.settings.fault() {
        return Err(fault);
    }
    let mut connected: Vec<Welcomed> = Vec::new();
    for (card, socket) in shim.cards().zip(&shim.settings.sockets) {
        let hello = card.link.hello(&shim.settings, false);
        let (connection, welcome, others) = link::connect(socket, hello).map_err(|error| match shim.is_single() {
            true => format!("the owner cannot be reached: {error}"),
            false => format!("the owner at {} cannot be reached: {error}", socket.display()),
        })?;
        let same = |known: &Welcomed| welcome.cards.iter().any(|new| names(&known.1, new));
        if let Some(at) = connected.iter().position(same) {
            let other = shim.settings.sockets[at].display();
            let what = "expected the sockets of different cards";
            return Err(format!("the owners at {other} and {} have the same card, {what}", socket.display()));
        }
        connected.push((connection, welcome, others));
    }
    Ok(connected)
}

/// Returns true if the owner manages a card.
fn names(welcome: &Welcome, card: &CardInfo) -> bool {
    welcome.cards.iter().any(|known| known.uuid == card.uuid)
}

/// Notifies the owner that this process is a client of an MPS server, so its work can run concurrently with other
/// processes' work.
fn tell_concurrency(connection: &Connection, version: u16, is_client: bool) {
    if is_client && version >= VERSION_CONCURRENT {
        // Ignore errors: without this message, the process merely gets separate slices.
        let _ = connection.send(&FromTenant::Concurrent { card: 0 }, &[]);
    }
}

/// Returns the index in the owner's list of cards for each device that the driver enumerates.
fn devices(seen: &[[u8; 16]], cards: &[CardInfo]) -> Vec<Option<u8>> {
    let find = |uuid: &[u8; 16]| cards.iter().position(|card| card.uuid == *uuid).and_then(|at| u8::try_from(at).ok());
    seen.iter().map(find).collect()
}

/// Time limit for a waiting thread to submit its work during a step.
// TIMEOUT: the thread only needs CPU time. On a busy host, it submits in the next step.
const STEP_TIMEOUT: Duration = Duration::from_millis(20);

/// A slice granted by the owner.
struct Turn {
    run: Run,
    began: Instant,
    reported: Instant,
    /// Set if the slice ends as soon as the program waits for a result.
    yields: bool,
}

impl Turn {
    /// Returns the time until the next check of whether the slice must end.
    fn next_look(&self, run_ahead: &RunAhead) -> Duration {
        // TIMEOUT: shorter than any slice; polling at this rate costs 0.1 % of a CPU.
        const MAX_POLL_INTERVAL: Duration = Duration::from_millis(1);
        // TIMEOUT: for programs with short kernels, polling at this rate costs 2 % of a CPU.
        const MIN_POLL_INTERVAL: Duration = Duration::from_micros(200);
        // TIMEOUT: this interval applies for a few milliseconds, until the next time that the program waits. The end of
        // the work must be detected before it is announced.
        const MIN_YIELDING_INTERVAL: Duration = Duration::from_micros(50);
        if self.run.idle_us == 0 {
            return MAX_POLL_INTERVAL;
        }
        let idle = Duration::from_micros(self.run.idle_us.into());
        let left = || idle.saturating_sub(self.began.elapsed().min(run_ahead.idle())).max(MIN_YIELDING_INTERVAL);
        // A yielding slice ends shortly before its last work completes.
        let (lead, least) = match self.yields {
            true => (turn_end::announcement_lead(&self.run), MIN_YIELDING_INTERVAL),
            false => (Duration::ZERO, MIN_POLL_INTERVAL),
        };
        let end = run_ahead.next_end().map(|end| end.saturating_sub(lead).max(least));
        end.unwrap_or_else(left).min(MAX_POLL_INTERVAL)
    }
}

/// A request from the owner for empty chunks.
struct Reclaim {
    since: Instant,
    /// Number of the owner's command, until it has been acknowledged.
    order: Option<u32>,
    /// Time of the last poll for empty chunks.
    looked: Instant,
}

/// A relocation in progress.
struct Order {
    number: u32,
    /// Set if the program is quiesced on all its cards, not only on the card of the relocation.
    all: bool,
}

struct Agent {
    shim: &'static Shim,
    card: &'static Card,
    connection: Arc<Connection>,
    /// Time of the last attempt to return empty chunks.
    tidied: Instant,
    reclaim: Option<Reclaim>,
    /// Protocol version.
    version: u16,
    /// Time until which this thread busy-polls for the next slice.
    soon: Option<Instant>,
    turn: Option<Turn>,
    order: Option<Order>,
    departure: moves::Departure,
}

/// Executes the commands of a card's owner until the process exits.
fn serve(shim: &'static Shim, card: &'static Card, connection: Arc<Connection>, version: u16) {
    // Captures in other threads must not restrict this thread, so use relaxed mode.
    let mut mode = 2;
    // The `prctl` call reduces this thread's timer slack from 50 us.
    // SAFETY: the pointer is valid.
    unsafe {
        driver::exchange_capture_mode(&raw mut mode);
        libc::prctl(libc::PR_SET_TIMERSLACK, 1);
    }
    let tidied = Instant::now();
    let (reclaim, soon, turn, order, departure) = Default::default();
    let mut agent = Agent { shim, card, connection, tidied, reclaim, version, soon, turn, order, departure };
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
                let expects = self.order.is_some() || self.card.link.any_requests();
                let (message, descriptors) = self.connection.receive_with_descriptors(expects)?;
                self.obey(message, descriptors)?;
            }
            if !self.departure.has_left() {
                self.tidy();
                self.reclaim()?;
            }
            self.look()?;
        }
    }

    /// Returns cached empty chunks after a while, preferably between slices, so that slices end without delay.
    fn tidy(&mut self) {
        let is_measured = self.turn.as_ref().is_some_and(|turn| turn.run.run_ahead_us > 0);
        if self.tidied.elapsed() >= if is_measured { 2 * EMPTY_CHUNK_RETENTION } else { EMPTY_CHUNK_RETENTION } {
            self.tidied = Instant::now();
            self.card.contexts.bind();
            self.memory().tidy();
        }
    }

    /// Returns empty chunks if the owner has requested them. Chunks that are still in use follow later.
    fn reclaim(&mut self) -> Result<(), LinkError> {
        let Some(reclaim) = self.reclaim.as_mut().filter(|reclaim| reclaim.looked.elapsed() >= RECLAIM_LOOK) else {
            return Ok(());
        };
        self.card.contexts.bind();
        let is_all = self.shim.memory(self.card).give_up_empty();
        reclaim.looked = Instant::now();
        let waited = reclaim.since.elapsed();
        let is_late = waited >= Duration::from_millis(RECLAIM_MS);
        let answer = reclaim.order.take_if(|_| is_all || is_late);
        if is_all || waited >= EMPTY_CHUNK_RETENTION {
            self.reclaim = None;
        }
        answer.map_or(Ok(()), |order| self.connection.send(&FromTenant::Reclaimed { order }, &[]))
    }

    /// Waits for a message until the next check of the slice or of requested chunks. Returns true if one arrived.
    fn ready(&mut self) -> Result<bool, LinkError> {
        while self.soon.is_some_and(|until| Instant::now() < until) {
            if self.poll(Duration::ZERO) {
                return Ok(true);
            }
            std::thread::yield_now();
        }
        self.soon = None;
        let timeout = match &self.turn {
            Some(turn) if turn.run.run_ahead_us > 0 => turn.next_look(&self.card.pacing.run_ahead),
            _ => EMPTY_CHUNK_RETENTION,
        };
        let timeout = if self.reclaim.is_some() { timeout.min(RECLAIM_LOOK) } else { timeout };
        Ok(self.poll(timeout))
    }

    /// Returns true if a message arrives within `timeout`.
    fn poll(&self, timeout: Duration) -> bool {
        let timeout = libc::timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        let mut poll = libc::pollfd { fd: self.connection.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the pointers refer to one valid entry and a valid time, and no signals are passed.
        let count = unsafe { libc::ppoll(&raw mut poll, 1, &raw const timeout, std::ptr::null()) };
        count > 0
    }

    fn obey(&mut self, message: FromOwner, descriptors: Vec<ChunkDescriptor>) -> Result<(), LinkError> {
        let link = &self.card.link;
        match message {
            FromOwner::Granted { request, chunks, more } => link.answer(request, |mut parts| {
                parts.extend(chunks.into_iter().zip(descriptors));
                if more {
                    Answer::Waiting(parts)
                } else {
                    self.memory().arriving();
                    Answer::Granted(parts)
                }
            }),
            FromOwner::Fixed { request } => link.answer(request, |_| Answer::Fixed),
            FromOwner::Refused { request, reason } => link.answer(request, |parts| Answer::Refused(reason, parts)),
            FromOwner::Memory { request, free_bytes, total_bytes } => {
                link.answer(request, |_| Answer::Memory(free_bytes, total_bytes));
            }
            FromOwner::Leave { patience_us } => self.leave(patience_us)?,
            // A correct owner does not send these orders to a process that has left.
            FromOwner::Quiesce { order, .. } if self.departure.has_left() => {
                self.connection.send(&FromTenant::Busy { order }, &[])?;
            }
            FromOwner::Reclaim { order } if self.departure.has_left() => {
                self.connection.send(&FromTenant::Reclaimed { order }, &[])?;
            }
            FromOwner::Quiesce { order, patience_us } => self.quiesce(order, patience_us)?,
            FromOwner::Redirect { order, moves } => {
                self.card.contexts.bind();
                let moved = self.memory().redirect(moves.into_iter().zip(descriptors).collect());
                self.connection.send(&FromTenant::Redirected { order, moved }, &[])?;
            }
            FromOwner::Resume { .. } => self.end_order(),
            FromOwner::Run(run) => {
                let now = Instant::now();
                self.card.pacing.run_ahead.bound(run.run_ahead_us);
                // New terms of a turn do not cancel an order to return it.
                let yields = self.turn.as_ref().is_some_and(|turn| turn.yields);
                self.turn = Some(Turn { run, began: now, reported: now, yields });
                self.soon = None;
                self.open(self.card, gate::NO_SLICE);
            }
            FromOwner::Step(run) => {
                let now = Instant::now();
                self.card.pacing.run_ahead.bound(run.run_ahead_us);
                // An idle time of 0 disables the prediction of the work's completion.
                let run = Run { idle_us: 0, ..run };
                self.turn = Some(Turn { run, began: now, reported: now, yields: false });
                self.return_chunks(self.card, gate::NO_SLICE);
                self.card.gate.step(STEP_TIMEOUT);
                self.stop()?;
            }
            FromOwner::Drain { card, turn } => {
                if let Some(known) = self.turn.as_mut().filter(|t| t.run.turn == turn && t.run.card == card) {
                    known.run.idle_us = 0;
                    self.stop()?;
                }
            }
            FromOwner::Stop { card, turn } => {
                if self.turn.as_ref().is_some_and(|t| t.run.turn == turn && t.run.card == card) {
                    self.stop()?;
                }
            }
            FromOwner::Soon { in_us, .. } => {
                let time = Duration::from_micros(in_us.into()) + POLL_OVERTIME;
                self.soon = Some(Instant::now() + time);
                self.card.gate.soon(time);
            }
            FromOwner::Yield { card, turn } => {
                if let Some(known) = self.turn.as_mut().filter(|t| t.run.turn == turn && t.run.card == card) {
                    known.yields = true;
                }
            }
            FromOwner::Reclaim { order } => {
                self.card.contexts.bind();
                self.memory().begin_to_empty();
                let since = Instant::now();
                self.reclaim = Some(Reclaim { since, order: Some(order), looked: since - RECLAIM_LOOK });
            }
            FromOwner::Shared { request, share } => link.answer(request, |_| Answer::Shared(share)),
            // These messages are replies to requests over separate connections.
            FromOwner::Welcome(_)
            | FromOwner::WelcomeAmong { .. }
            | FromOwner::Processes { .. }
            | FromOwner::Fetched => {}
            FromOwner::Goodbye(end) => {
                report!("the owner says goodbye: {end:?}");
                return Err(LinkError::Closed);
            }
        }
        Ok(())
    }

    /// Ends the slice or reports its usage, if due.
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
        let lead = turn_end::announcement_lead(&run);
        if turn.yields && self.card.pacing.run_ahead.awaits_result(&self.shim.captures, lead, turn.began) {
            return self.stop();
        }
        let idle = u64::from(run.idle_us);
        if self.card.pacing.run_ahead.is_quiet(&self.shim.captures)
            && idle > 0
            && now.duration_since(turn.began).min(self.card.pacing.run_ahead.idle()) >= Duration::from_micros(idle)
        {
            return self.stop();
        }
        if passed(turn.reported, run.report_us) {
            turn.reported = now;
            let usage = self.card.pacing.run_ahead.take_usage();
            self.connection.send(&FromTenant::Used { card: run.card, turn: run.turn, usage }, &[])?;
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<(), LinkError> {
        let Some(turn) = self.turn.take() else { return Ok(()) };
        self.card.gate.close(gate::NO_SLICE, None);
        // Drain unless all work is measured and about to complete, because the driver may have other work left.
        if !self.approach_end(&turn.run) || !self.card.pacing.run_ahead.is_measured() {
            self.shim.drain(self.card, None);
        }
        let usage = self.card.pacing.run_ahead.take_usage();
        let (card, waiting) = (turn.run.card, self.card.gate.is_held());
        self.connection.send(&FromTenant::Stopped { card, turn: turn.run.turn, usage, waiting }, &[])?;
        // Observe the completion of work that completes slightly later, so that its measured duration excludes other
        // tenants' slices.
        let _ = self.card.pacing.sees_end(&self.shim.captures, POLL_OVERTIME, Duration::ZERO);
        if !waiting && self.card.gate.is_told() {
            // A thread may have sent `Waiting` before `Stopped`. The owner ignores that message, so send another one.
            self.connection.send(&FromTenant::Waiting { card }, &[])?;
        }
        Ok(())
    }

    fn quiesce(&mut self, order: u32, patience_us: u32) -> Result<(), LinkError> {
        let deadline = Instant::now() + Duration::from_micros(patience_us.into());
        // An incorrect owner may send two commands in a row, so end the first one here.
        self.end_order();
        let all = self.shim.cross.begin(self.card.number);
        self.order = Some(Order { number: order, all });
        let quiet =
            |user: &Card| user.gate.close(self.reason(user), Some(deadline)) && self.shim.drain(user, Some(deadline));
        if self.shim.users(self.card, all).all(quiet) {
            // All work has completed. Return empty chunks so that they need not be copied.
            self.card.contexts.bind();
            self.memory().begin_to_empty();
            self.memory().give_up_empty();
            return self.connection.send(&FromTenant::Quiet { order }, &[]);
        }
        self.end_order();
        self.connection.send(&FromTenant::Busy { order }, &[])
    }

    /// Returns the reason flag that a relocation on this agent's card uses to close the gate of `user`.
    fn reason(&self, user: &Card) -> u32 {
        if user.number == self.card.number { gate::ORDER } else { gate::order_of(self.card.number) }
    }

    /// Opens the gates closed by a relocation.
    fn end_order(&mut self) {
        let Some(Order { number, all }) = self.order.take() else { return };
        // If all cards were quiesced, work on another card may use the memory as soon as that card's gate opens.
        if all && !self.bring(self.card) {
            report!("memory cannot be mapped after relocation {number}");
        }
        for user in self.shim.users(self.card, all) {
            self.open(user, self.reason(user));
        }
        self.shim.cross.end(self.card.number);
    }

    fn memory(&self) -> Operations<'static> {
        self.shim.memory(self.card)
    }

    /// Announces to the owner when a slice's last work will complete. Returns true if the message was sent.
    fn announce(&self, run: &Run, left: Duration) -> bool {
        let in_us = u32::try_from(left.as_micros()).unwrap_or(u32::MAX);
        let ending = FromTenant::Ending { card: run.card, turn: run.turn, in_us };
        self.version >= VERSION_HANDOVER && self.connection.send(&ending, &[]).is_ok()
    }

    /// Waits for a slice's last work if its completion is predictable, and announces the completion in advance. Returns
    /// true if the work has completed or will complete within [`turn_end::earliness`]. The gate must be closed.
    fn approach_end(&self, run: &Run) -> bool {
        if run.idle_us == 0 {
            return false;
        }
        let (early, lead) = (turn_end::earliness(run), turn_end::announcement_lead(run));
        loop {
            match self.card.pacing.run_ahead.left(&self.shim.captures) {
                Left::About(_) | Left::Nothing if self.shim.captures.any() => return false,
                Left::Nothing => return self.card.pacing.run_ahead.is_measured(),
                Left::About(left) if left <= lead => {
                    return self.announce(run, left)
                        && self.card.pacing.sees_end(&self.shim.captures, left + POLL_OVERTIME, early);
                }
                Left::About(left) => std::thread::sleep((left - lead).min(turn_end::ESTIMATE_INTERVAL)),
                Left::Unknown => return false,
            }
        }
    }

    /// Lets the program run without an owner.
    fn alone(&mut self) {
        self.card.link.set_connection(None);
        // From now on, messages from other threads must fail immediately.
        // SAFETY: the connection owns this open descriptor.
        unsafe { libc::shutdown(self.connection.as_fd().as_raw_fd(), libc::SHUT_RDWR) };
        (self.turn, self.soon, self.reclaim) = (None, None, None);
        self.card.pacing.run_ahead.bound(0);
        self.card.link.abandon_requests();
        self.end_order();
        if !self.departure.has_left() {
            self.open(self.card, gate::NO_SLICE | gate::ORDER);
        }
    }

    /// Reconnects to the owner, and reports the chunks of this process.
    fn reconnect(&mut self) {
        let (shim, card) = (self.shim, self.card);
        let Some(socket) = shim.settings.sockets.get(card.number) else { return };
        loop {
            std::thread::sleep(self.departure.retry_interval());
            self.return_late();
            let hello = card.link.hello(&shim.settings, true);
            let Ok((connection, welcome, _)) = link::connect(socket, hello) else { continue };
            let same_cards = |terms: &Terms| terms.cards.iter().all(|card| names(&welcome, card));
            let fits = |terms: &Terms| {
                let same_number = terms.cards.len() == welcome.cards.len();
                terms.chunk_bytes == welcome.chunk_bytes && same_number && (shim.is_single() || same_cards(terms))
            };
            if !card.link.terms().is_some_and(fits) {
                let _ = connection.send(&FromTenant::Goodbye(End::Violation), &[]);
                continue;
            }
            if let Some(terms) = card.link.terms() {
                moves::tell_seen(&connection, welcome.version, terms);
            }
            let Some(journey) = self.set_out(&connection, &welcome) else { continue };
            let connection = Arc::new(connection);
            tell_concurrency(&connection, welcome.version, shim.settings.mps);
            let told = shim.memory(card).adopted(
                |chunks, descriptors, more| {
                    let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(|d| d.as_fd()).collect();
                    // The report of a program that moves ends once the program can use the other card.
                    let more = more || journey.is_some();
                    connection.send_many(&FromTenant::Adopt { chunks, more }, &borrowed).is_ok()
                },
                |sample| {
                    let is_here = journey.is_none_or(|target| {
                        let end = FromTenant::Adopt { chunks: Vec::new(), more: false };
                        self.wait_for_driver(&connection, target, sample) && connection.send(&end, &[]).is_ok()
                    });
                    if is_here {
                        // Do not do this earlier: the driver may have stopped the calls of this process.
                        card.contexts.bind();
                        card.link.reconnect(&connection);
                    }
                    is_here
                },
            );
            if told {
                // Do not close the gate earlier: the first submission that finds it closed notifies the owner, once,
                // over this connection.
                card.gate.close(gate::NO_SLICE, None);
                (self.connection, self.version) = (connection, welcome.version);
                self.arrive();
                return;
            }
        }
    }

    /// Removes a reason for closing a card's gate. If this opens the gate, first maps evicted chunks.
    fn open(&self, card: &Card, reason: u32) {
        self.return_chunks(card, reason);
        card.gate.open(reason);
    }

    /// Maps a card's evicted chunks if `reason` is the only reason why the card's gate is closed.
    fn return_chunks(&self, card: &Card, reason: u32) {
        if card.gate.opens_without(reason) && !self.bring(card) {
            report!("memory that is away cannot be mapped");
        }
    }

    /// Maps a card's evicted chunks. Returns true if all are mapped.
    fn bring(&self, card: &Card) -> bool {
        // TIMEOUT: the driver may lack memory for a page table while other tenants' memory moves. After the last
        // attempt, the program runs anyway, and faults if it accesses evicted chunks.
        const MAX_RETURN_ATTEMPTS: u32 = 1000;
        card.contexts.bind();
        for _ in 0..MAX_RETURN_ATTEMPTS {
            if self.shim.memory(card).bring() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}
