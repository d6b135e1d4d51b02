//! Accesses client memory with `DMA_READ` and `DMA_WRITE` messages, for regions without a file.
//!
//! Any thread can queue a request. The server's thread sends it after replying to the client's own messages. The client
//! replies at any later time: QEMU replies in its main loop, which must not be waiting for this server. A handler of
//! [`crate::Device`] must therefore not wait for a request, and [`Pending::wait`] fails on that thread.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

use crate::counters::{Counters, add};
use crate::protocol::{Command, DmaAccess, FLAG_ERROR, HEADER_SIZE, Header};
use vmm_memory::wake::Wake;

/// Maximum size of a request, in bytes.
pub const MAX_REQUEST: usize = 16 << 20;
/// Maximum number of requests that are queued or in flight.
pub const MAX_REQUESTS: usize = 256;
/// Maximum total size of all requests that are queued or in flight, in bytes.
pub const MAX_BYTES: usize = 64 << 20;
/// Minimum size of the data in one message that a client must accept to receive requests, in bytes.
pub const MIN_TRANSFER: usize = 512;
/// Maximum number of unanswered messages.
const MAX_IN_FLIGHT: usize = 16;

/// Reasons for a failed access to client memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "the messages document the variants")]
pub enum DmaError {
    #[error("no client is connected")]
    NotConnected,
    #[error("the client does not accept requests from its device")]
    Unsupported,
    #[error("a request of {0} bytes; it must have 1 to {MAX_REQUEST} bytes")]
    Length(usize),
    #[error("{MAX_REQUESTS} requests or {MAX_BYTES} bytes are already in flight")]
    Busy,
    #[error("the client rejected the access at {gpa:#x} (errno {errno}; 19 while the guest has bus mastering off)")]
    Refused { gpa: u64, errno: u32 },
    #[error("the client replied with {got} bytes instead of {expected}")]
    BadReply { got: usize, expected: usize },
    #[error("the client did not reply in time")]
    TimedOut,
    #[error("waiting on the server's own thread would deadlock")]
    WouldDeadlock,
}

/// State of one request, shared with its waiter.
#[derive(Debug)]
struct Job {
    len: usize,
    state: Mutex<JobState>,
    done: Condvar,
}

#[derive(Debug)]
struct JobState {
    /// Bytes read or to be written.
    data: Vec<u8>,
    /// Number of chunks without a reply, whether sent or not.
    open: usize,
    error: Option<DmaError>,
}

/// A chunk of a request, sent as one message.
#[derive(Debug)]
struct Piece {
    job: Arc<Job>,
    write: bool,
    gpa: u64,
    /// Start offset in the request's data.
    start: usize,
    len: usize,
}

/// A request with messages left to send.
#[derive(Debug)]
struct Waiting {
    job: Arc<Job>,
    write: bool,
    gpa: u64,
    len: usize,
    /// Number of bytes already sent.
    sent: usize,
}

impl Waiting {
    /// Returns the next chunk of at most `step` bytes, and a flag that is true if it is the last one.
    fn next_piece(&mut self, step: usize) -> (Piece, bool) {
        let len = step.min(self.len.saturating_sub(self.sent));
        let gpa = self.gpa.wrapping_add(u64::try_from(self.sent).unwrap_or(0));
        let piece = Piece { job: Arc::clone(&self.job), write: self.write, gpa, start: self.sent, len };
        self.sent = self.sent.saturating_add(len);
        (piece, self.sent >= self.len)
    }
}

#[derive(Debug, Default)]
struct Shared {
    /// Maximum size of the data in one message in bytes, or 0 if no connected client accepts requests.
    max_transfer: usize,
    connected: bool,
    server_thread: Option<ThreadId>,
    queue: VecDeque<Waiting>,
    in_flight: HashMap<u16, Piece>,
    /// IDs of an earlier process's messages to which the client has not replied.
    forgotten: HashSet<u16>,
    next_id: u16,
    /// Number of queued and in-flight requests.
    requests: usize,
    /// Total size of the queued and in-flight requests in bytes.
    bytes: usize,
}

/// Handle for accessing client memory. Its clones access the same client.
#[derive(Clone, Debug)]
pub struct DmaClient {
    shared: Arc<Mutex<Shared>>,
    wake: Arc<Wake>,
    counters: Arc<Counters>,
}

/// A request in flight. Dropping it does not cancel the request.
#[derive(Debug)]
pub struct Pending {
    job: Arc<Job>,
    shared: Arc<Mutex<Shared>>,
}

impl Pending {
    /// Waits for the request to complete. Returns the bytes read or written.
    pub fn wait(self, timeout: Duration) -> Result<Vec<u8>, DmaError> {
        if self.shared.lock().server_thread == Some(std::thread::current().id()) {
            return self.poll().unwrap_or(Err(DmaError::WouldDeadlock));
        }
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.job.state.lock();
        while state.open != 0 {
            match deadline {
                None => self.job.done.wait(&mut state),
                Some(deadline) => {
                    if self.job.done.wait_until(&mut state, deadline).timed_out() && state.open != 0 {
                        return Err(DmaError::TimedOut);
                    }
                }
            }
        }
        state.result()
    }

    /// Returns the result if the request has completed. Later calls return the same error, or no data.
    pub fn poll(&self) -> Option<Result<Vec<u8>, DmaError>> {
        let mut state = self.job.state.lock();
        (state.open == 0).then(|| state.result())
    }
}

impl JobState {
    fn result(&mut self) -> Result<Vec<u8>, DmaError> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(std::mem::take(&mut self.data)),
        }
    }
}

impl DmaClient {
    pub(crate) fn new(wake: Arc<Wake>, counters: Arc<Counters>) -> Self {
        Self { shared: Arc::default(), wake, counters }
    }

    /// Returns true if the connected client replies to requests. QEMU does, but cloud-hypervisor does not.
    pub fn is_available(&self) -> bool {
        self.shared.lock().max_transfer != 0
    }

    /// Starts a read of `len` bytes at guest physical address `gpa`.
    pub fn read(&self, gpa: u64, len: usize) -> Result<Pending, DmaError> {
        check_len(len)?;
        self.start(gpa, vec![0; len], false)
    }

    /// Starts a write of `data` at guest physical address `gpa`. If the request fails, any part may have been written.
    pub fn write(&self, gpa: u64, data: Vec<u8>) -> Result<Pending, DmaError> {
        check_len(data.len())?;
        self.start(gpa, data, true)
    }

    fn start(&self, gpa: u64, data: Vec<u8>, write: bool) -> Result<Pending, DmaError> {
        let mut shared = self.shared.lock();
        if !shared.connected {
            return Err(DmaError::NotConnected);
        }
        if shared.max_transfer == 0 {
            return Err(DmaError::Unsupported);
        }
        let len = data.len();
        let bytes = shared.bytes.saturating_add(len);
        if shared.requests >= MAX_REQUESTS || bytes > MAX_BYTES {
            return Err(DmaError::Busy);
        }
        shared.requests = shared.requests.saturating_add(1);
        shared.bytes = bytes;
        let state = JobState { data, open: len.div_ceil(shared.max_transfer), error: None };
        let job = Arc::new(Job { len, state: Mutex::new(state), done: Condvar::new() });
        shared.queue.push_back(Waiting { job: Arc::clone(&job), write, gpa, len, sent: 0 });
        drop(shared);
        self.wake.wake();
        Ok(Pending { job, shared: Arc::clone(&self.shared) })
    }

    /// Records that a client is connected. `max_transfer` is 0 if the client does not accept requests.
    pub(crate) fn connect(&self, max_transfer: usize) {
        let mut shared = self.shared.lock();
        shared.connected = true;
        shared.max_transfer = if max_transfer < MIN_TRANSFER { 0 } else { max_transfer };
        shared.server_thread = Some(std::thread::current().id());
    }

    /// Returns the IDs of all messages to which the client may still reply.
    pub(crate) fn unanswered(&self) -> Vec<u16> {
        let shared = self.shared.lock();
        let mut numbers: Vec<u16> = shared.in_flight.keys().chain(&shared.forgotten).copied().collect();
        numbers.sort_unstable();
        numbers
    }

    /// Returns the ID of the next message.
    pub(crate) fn next_id(&self) -> u64 {
        self.shared.lock().next_id.into()
    }

    /// Sets the ID of the next message to `next_id`.
    pub(crate) fn go_on_from(&self, next_id: u64) {
        self.shared.lock().next_id = u16::try_from(next_id & 0xffff).unwrap_or(0);
    }

    /// Sets the IDs of the messages to which the client may still reply although no thread waits for the replies.
    pub(crate) fn forget(&self, numbers: Vec<u16>) {
        self.shared.lock().forgotten = numbers.into_iter().collect();
    }

    /// Fails all requests, because the client has disconnected.
    pub(crate) fn disconnect(&self) {
        let Shared { queue, in_flight, .. } = {
            let mut shared = self.shared.lock();
            let next_id = shared.next_id;
            std::mem::replace(&mut *shared, Shared { next_id, ..Shared::default() })
        };
        let waiting = queue.into_iter().map(|waiting| waiting.job);
        for job in waiting.chain(in_flight.into_values().map(|piece| piece.job)) {
            job.abort(DmaError::NotConnected);
        }
    }

    /// Appends messages to `out` until no request is queued, `out` has `limit` bytes, or [`MAX_IN_FLIGHT`] messages are
    /// unanswered.
    pub(crate) fn send(&self, out: &mut Vec<u8>, limit: usize) {
        let mut shared = self.shared.lock();
        while shared.in_flight.len() < MAX_IN_FLIGHT && out.len() < limit {
            let step = shared.max_transfer;
            let Some(waiting) = shared.queue.front_mut() else { return };
            let (piece, last) = waiting.next_piece(step);
            if last {
                shared.queue.pop_front();
            }
            let command = if piece.write { Command::DMA_WRITE } else { Command::DMA_READ };
            let body = DmaAccess { address: piece.gpa, count: u64::try_from(piece.len).unwrap_or(0) };
            let state = piece.job.state.lock();
            let data = match piece.write {
                true => state.data.get(piece.start..piece.start.saturating_add(piece.len)).unwrap_or(&[]),
                false => &[],
            };
            while shared.in_flight.contains_key(&shared.next_id) || shared.forgotten.contains(&shared.next_id) {
                shared.next_id = shared.next_id.wrapping_add(1);
            }
            let id = shared.next_id;
            shared.next_id = id.wrapping_add(1);
            let size = HEADER_SIZE.saturating_add(size_of::<DmaAccess>()).saturating_add(data.len());
            let header = Header::request(id, command, u32::try_from(size).unwrap_or(u32::MAX), 0);
            out.extend_from_slice(header.as_bytes());
            out.extend_from_slice(body.as_bytes());
            out.extend_from_slice(data);
            drop(state);
            shared.in_flight.insert(id, piece);
            add(&self.counters.dma_requests, 1);
        }
    }

    /// Completes the chunk to which a client's reply belongs. Returns false if the reply does not match any request.
    pub(crate) fn reply(&self, header: &Header, body: &[u8]) -> bool {
        let mut shared = self.shared.lock();
        let Some(piece) = shared.in_flight.remove(&header.id) else { return shared.forgotten.remove(&header.id) };
        let outcome = if header.flags & FLAG_ERROR != 0 {
            add(&self.counters.dma_request_errors, 1);
            Err(DmaError::Refused { gpa: piece.gpa, errno: header.error })
        } else if piece.write {
            Ok(None)
        } else {
            match DmaAccess::read_from_prefix(body) {
                Ok((_, data)) if data.len() == piece.len => Ok(Some((piece.start, data))),
                Ok((_, data)) => Err(DmaError::BadReply { got: data.len(), expected: piece.len }),
                Err(_) => Err(DmaError::BadReply { got: 0, expected: piece.len }),
            }
        };
        if piece.job.finish(outcome) {
            shared.requests = shared.requests.saturating_sub(1);
            shared.bytes = shared.bytes.saturating_sub(piece.job.len);
        }
        true
    }
}

impl Job {
    /// Completes all chunks with an error.
    fn abort(&self, error: DmaError) {
        let mut state = self.state.lock();
        state.open = 0;
        state.error = state.error.or(Some(error));
        self.done.notify_all();
    }

    /// Completes one chunk. Returns true if it was the last one.
    fn finish(&self, outcome: Result<Option<(usize, &[u8])>, DmaError>) -> bool {
        let mut state = self.state.lock();
        state.open = state.open.saturating_sub(1);
        match outcome {
            Ok(None) => (),
            Ok(Some((start, data))) => {
                let end = start.saturating_add(data.len());
                if let Some(place) = state.data.get_mut(start..end) {
                    place.copy_from_slice(data);
                }
            }
            Err(error) => state.error = state.error.or(Some(error)),
        }
        if state.open == 0 {
            self.done.notify_all();
        }
        state.open == 0
    }
}

fn check_len(len: usize) -> Result<(), DmaError> {
    if len == 0 || len > MAX_REQUEST { Err(DmaError::Length(len)) } else { Ok(()) }
}
