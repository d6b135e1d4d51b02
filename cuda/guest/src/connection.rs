//! The connection to the program's worker: starts the worker, sends messages, and receives replies.
//!
//! UNSAFETY: wraps blobs mapped by the transport, and dereferences a pointer to a value that is never freed.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cuda_calls::CALLS;
use cuda_calls::own::{self, Route, flags};
use cuda_ring::{
    BlobKind, Full, Geometry, Header, Producer, Shared, Transport, Words as _, control, sleep, slots, state,
};

use crate::result::{LAUNCH_FAILED, NO_DEVICE, NOT_INITIALIZED, NOT_SUPPORTED};
use crate::thread::{self, Thread};
use crate::{addresses, report, transport};

/// Time after which a thread that waits for a reply sleeps instead of spinning.
const SPIN: Duration = Duration::from_micros(30);

/// Connection to this process's worker.
pub struct Connection {
    pub transport: Box<dyn Transport>,
    pub control: Shared,
    ring: Mutex<Producer<Shared, Shared>>,
    /// Bit mask of unused reply areas.
    areas: AtomicU64,
    /// Set if each call waits for its reply, for programs that check for errors immediately.
    synchronous: bool,
}

/// Environment variable that makes each call wait for its reply if set to `1`.
const SYNCHRONOUS_VARIABLE: &str = "GPU_MEDIATOR_CUDA_SYNC";

/// The connection to the worker, or the error that every call returns. Static, because the exported functions have no
/// other state. The value is never freed; in a child process, the pointer is null again.
static CONNECTION: AtomicPtr<Result<Connection, i32>> = AtomicPtr::new(std::ptr::null_mut());
/// Function to call when the worker starts. Static, because it is set when the library is loaded.
static ON_START: OnceLock<fn()> = OnceLock::new();
/// Set while a thread starts the worker. Not a lock, because a child could inherit it locked.
static STARTING: AtomicBool = AtomicBool::new(false);

/// Returns the connection to the worker. The first call starts the worker.
///
/// # Errors
/// Returns error 100 and prints a message to standard error if no suitable worker can be started, or returns the
/// worker's error for the first message.
pub fn connect() -> Result<&'static Connection, i32> {
    loop {
        if let Some(found) = known() {
            return found.as_ref().map_err(|code| *code);
        }
        if STARTING.swap(true, Ordering::AcqRel) {
            std::thread::yield_now();
            continue;
        }
        // Another thread may have started the worker meanwhile.
        if known().is_none() {
            CONNECTION.store(Box::into_raw(Box::new(start())), Ordering::Release);
        }
        STARTING.store(false, Ordering::Release);
    }
}

/// Returns the connection or the startup error, or `None` if the worker has not been started.
fn known() -> Option<&'static Result<Connection, i32>> {
    // SAFETY: the pointer is null, or points to a value that is never freed.
    unsafe { CONNECTION.load(Ordering::Acquire).as_ref() }
}

/// Sets a function to call when the worker starts.
pub fn on_start(function: fn()) {
    let _ = ON_START.set(function);
}

/// Returns the connection to the worker if the worker has been started.
///
/// # Errors
/// Returns error 3 if the worker has not been started, and otherwise the error of its startup.
pub fn get() -> Result<&'static Connection, i32> {
    known().map_or(Err(NOT_INITIALIZED), |found| found.as_ref().map_err(|code| *code))
}

/// Closes the connection's descriptors in a child, which starts its own worker on demand.
pub fn leave_in_child() {
    if let Some(Ok(connection)) = known() {
        connection.transport.close_in_child();
    }
    CONNECTION.store(std::ptr::null_mut(), Ordering::Release);
    STARTING.store(false, Ordering::Release);
}

fn start() -> Result<Connection, i32> {
    let connection = open().map_err(|error| {
        report!("no CUDA device: {error}");
        NO_DEVICE
    })?;
    if let Some(on_start) = ON_START.get() {
        on_start();
    }
    let answer = thread::with(|thread| {
        let words = [cuda_ring::VERSION, CALLS.len() as u64, u64::from(std::process::id())];
        connection.ask(thread, own::START, None, |message| message.extend(words))
    })?;
    match answer.code {
        0 => Ok(connection),
        NOT_SUPPORTED => {
            let theirs = answer.inline(&connection, 1).first().copied().unwrap_or_default();
            let older = if theirs < cuda_ring::VERSION { "the host's daemon" } else { "this guest's libcuda" };
            report!("guest and host have different versions: update {older}");
            Err(NO_DEVICE)
        }
        code => Err(code),
    }
}

fn open() -> std::io::Result<Connection> {
    addresses::reserve()?;
    let transport = transport::open()?;
    let blob = transport.create(BlobKind::Control, control::BYTES, None)?;
    // SAFETY: the transport has mapped the blob, which remains mapped until the process exits.
    let control = unsafe { Shared::new(blob.address, blob.bytes) };
    control.store(control::VERSION, cuda_ring::VERSION);
    let blob = transport.create(BlobKind::Ring, cuda_ring::ring::BYTES, None)?;
    // SAFETY: as above.
    let ring = unsafe { Shared::new(blob.address, blob.bytes) };
    let ring = Mutex::new(Producer::new(control, ring, Geometry::ORDERED));
    let areas = AtomicU64::new((1 << control::AREA_COUNT) - 1);
    let synchronous = std::env::var_os(SYNCHRONOUS_VARIABLE).is_some_and(|value| value == "1");
    Ok(Connection { transport, control, ring, areas, synchronous })
}

/// A reply from the worker.
#[derive(Debug)]
pub struct Answer {
    /// Result of the call.
    pub code: i32,
    slot: u16,
    area: Option<u16>,
}

impl Answer {
    /// Returns the first `words` words of the reply's data, which are in the slot.
    pub fn inline(&self, connection: &Connection, words: usize) -> [u64; slots::INLINE_WORDS] {
        let mut data = [0; slots::INLINE_WORDS];
        connection.control.read(slots::data(self.slot), data.get_mut(..words).unwrap_or_default());
        data
    }

    /// Returns the size of the reply's data in words.
    pub fn words(&self, connection: &Connection) -> usize {
        (connection.control.load(slots::result(self.slot)) >> 32) as usize
    }

    /// Reads the reply's data from the slot, or from the area if the data does not fit into the slot.
    pub fn read(&self, connection: &Connection, into: &mut [u64]) {
        match self.area {
            Some(area) if into.len() > slots::INLINE_WORDS => connection.control.read(slots::area(area), into),
            _ => connection.control.read(slots::data(self.slot), into),
        }
    }
}

/// A reply area in use by a call.
pub struct Area(u16, &'static AtomicU64);

impl Drop for Area {
    fn drop(&mut self) {
        self.1.fetch_or(1 << self.0, Ordering::Release);
    }
}

impl Area {
    /// Returns the area's number for messages.
    pub fn number(&self) -> u16 {
        self.0
    }
}

impl Connection {
    /// Returns an error if the worker or the context was lost, or if one of the thread's earlier calls without a reply
    /// has failed.
    pub fn check(&self, slot: u16) -> Result<(), i32> {
        if self.control.load(control::STATE) == state::LOST {
            return Err(LAUNCH_FAILED);
        }
        let sticky = self.control.load(control::STICKY);
        if sticky != 0 {
            return Err(sticky as i32);
        }
        let deferred = self.control.load(slots::deferred(slot));
        if deferred != 0 {
            self.control.store(slots::deferred(slot), 0);
            return Err(deferred as i32);
        }
        Ok(())
    }

    /// Acquires a reply area. Waits while all areas are in use.
    pub fn area(&'static self) -> Area {
        loop {
            let free = self.areas.load(Ordering::Acquire);
            let Some(number) = (free != 0).then(|| free.trailing_zeros()) else {
                std::thread::yield_now();
                continue;
            };
            if self
                .areas
                .compare_exchange_weak(free, free & !(1 << number), Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
            {
                return Area(number as u16, &self.areas);
            }
        }
    }

    fn publish(&self, message: &[u64]) -> Result<(), i32> {
        loop {
            let full = {
                let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
                match ring.publish(message) {
                    Ok(false) => return Ok(()),
                    Ok(true) => {
                        drop(ring);
                        return self.transport.doorbell().map_err(|_| LAUNCH_FAILED);
                    }
                    Err(Full(position)) => position,
                }
            };
            self.wait(control::TAIL, full)?;
        }
    }

    /// Waits until a word in the control blob is at least `value`.
    pub fn wait(&self, offset: u64, value: u64) -> Result<(), i32> {
        let begin = Instant::now();
        let mut polls = 0u32;
        loop {
            if self.control.load(offset) >= value {
                return Ok(());
            }
            std::hint::spin_loop();
            polls += 1;
            if polls.is_multiple_of(64) && begin.elapsed() > SPIN {
                break;
            }
        }
        let mut lost = false;
        sleep::wait(&self.control, offset, value, || {
            lost = self.control.load(control::STATE) == state::LOST || self.transport.wait(offset, value).is_err();
            !lost
        });
        if lost && self.control.load(offset) < value { Err(LAUNCH_FAILED) } else { Ok(()) }
    }

    /// Publishes a message that `write` fills, unless an earlier call has failed.
    fn send(
        &self,
        thread: &Thread,
        op: u16,
        flags: u16,
        write: impl FnOnce(&mut Vec<u64>) -> Result<(), i32>,
    ) -> Result<(), i32> {
        self.check(thread.slot()?)?;
        self.write(thread, op, flags, write)
    }

    /// Publishes a message that `write` fills, even if earlier calls have failed.
    fn write(
        &self,
        thread: &Thread,
        op: u16,
        flags: u16,
        write: impl FnOnce(&mut Vec<u64>) -> Result<(), i32>,
    ) -> Result<(), i32> {
        let slot = thread.slot()?;
        let mut message = thread.message.try_borrow_mut().map_err(|_| NOT_SUPPORTED)?;
        message.clear();
        let route = Route { context: thread.current.get(), slot, capture_mode: thread.capture_mode.get() };
        message.extend([0, route.word()]);
        write(&mut message)?;
        let words = u32::try_from(message.len()).map_err(|_| NOT_SUPPORTED)?;
        if message.len() > cuda_ring::MAX_WORDS {
            return Err(crate::result::INVALID_VALUE);
        }
        if let Some(first) = message.first_mut() {
            *first = Header { op, flags, words }.word();
        }
        self.publish(&message)
    }

    /// Sends a message without requesting a reply, unless each call of the program must wait for its reply.
    pub fn post(
        &self,
        thread: &Thread,
        op: u16,
        write: impl FnOnce(&mut Vec<u64>) -> Result<(), i32>,
    ) -> Result<(), i32> {
        if !self.synchronous {
            return self.send(thread, op, 0, write);
        }
        let expected = self.begin(thread, op, None, write)?;
        match self.end(expected, None)?.code {
            0 => Ok(()),
            code => Err(code),
        }
    }

    /// Sends a message, even if an earlier call has failed. If `wait` is set or each call of the program must wait for
    /// its reply, waits for the reply and returns it.
    pub fn post_always(
        &self,
        thread: &Thread,
        op: u16,
        wait: bool,
        write: impl FnOnce(&mut Vec<u64>) -> Result<(), i32>,
    ) -> Result<Option<Answer>, i32> {
        let wait = wait || self.synchronous;
        self.write(thread, op, if wait { flags::ANSWER } else { 0 }, write)?;
        if !wait {
            return Ok(None);
        }
        let expected = (thread.slot()?, thread.expect_answer());
        self.end(expected, None).map(Some)
    }

    /// Sends a message that requests a reply. Returns the reply's slot and sequence number.
    pub fn begin(
        &self,
        thread: &Thread,
        op: u16,
        area: Option<&Area>,
        write: impl FnOnce(&mut Vec<u64>) -> Result<(), i32>,
    ) -> Result<(u16, u64), i32> {
        let flags = flags::ANSWER | area.map_or(0, |area| flags::AREA | area.number());
        self.send(thread, op, flags, write)?;
        Ok((thread.slot()?, thread.expect_answer()))
    }

    /// Like [`Self::begin`], but succeeds even if an earlier call has failed or the context was lost.
    pub fn begin_always(
        &self,
        thread: &Thread,
        op: u16,
        area: &Area,
        write: impl FnOnce(&mut Vec<u64>) -> Result<(), i32>,
    ) -> Result<(u16, u64), i32> {
        if self.control.load(control::STATE) == state::LOST {
            return Err(LAUNCH_FAILED);
        }
        self.write(thread, op, flags::ANSWER | flags::AREA | area.number(), write)?;
        Ok((thread.slot()?, thread.expect_answer()))
    }

    /// Waits for the reply to a message.
    pub fn end(&self, (slot, count): (u16, u64), area: Option<&Area>) -> Result<Answer, i32> {
        self.wait(slots::sequence(slot), count)?;
        let code = self.control.load(slots::result(slot)) as i32;
        Ok(Answer { code, slot, area: area.map(Area::number) })
    }

    /// Sends a message and waits for its reply.
    pub fn ask(
        &self,
        thread: &Thread,
        op: u16,
        area: Option<&Area>,
        write: impl FnOnce(&mut Vec<u64>),
    ) -> Result<Answer, i32> {
        let expected = self.begin(thread, op, area, |message| {
            write(message);
            Ok(())
        })?;
        self.end(expected, area)
    }
}
