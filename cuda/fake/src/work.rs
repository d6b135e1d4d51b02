//! Streams, events, captures and graphs.
//!
//! UNSAFETY: like a card, copies between addresses that the program specifies.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::kernels::{self, Kernel};
use crate::result::{
    CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, CAPTURED_EVENT, INVALID_HANDLE, INVALID_VALUE,
    NOT_READY, SUCCESS,
};
use crate::space::GRANULE;
use crate::{access, card, current, memory, modules, mps, output, registered};

/// `CUhostFn`.
pub type HostFunction = unsafe extern "C" fn(*mut std::ffi::c_void);

/// `CUstreamCallback`.
pub type Callback = unsafe extern "C" fn(u64, i32, *mut std::ffi::c_void);

/// An operation in a stream or graph.
#[derive(Clone)]
pub enum Op {
    /// A kernel launch: kernel and arguments.
    Kernel(Kernel, Vec<u64>),
    /// A copy: destination, source, size in bytes.
    Copy(u64, u64, u64),
    /// Row copies: destination, source, and size in bytes of each row.
    Rows(Vec<[u64; 3]>),
    /// A write of data: destination, data.
    Write(u64, Arc<[u8]>),
    /// A fill: address, size in bytes, value.
    Set(u64, u64, u8),
    /// Records an event with this recording number.
    Record(Arc<Event>, u64),
    /// Waits for this recording of an event.
    Wait(Arc<Event>, u64),
    /// Graph operation: allocates memory (address, size in bytes). The graph owns the memory while it is reserved.
    Alloc(u64, u64),
    /// Graph operation: frees memory.
    Free,
    /// A graph as one operation.
    Graph(Vec<Op>),
    /// A host function of the program and its argument.
    Host(HostFunction, u64),
    /// A callback of the program, its stream and its argument.
    Callback(Callback, u64, u64),
}

/// Number of operations that a stream can queue before further submissions block, as in a card's queues.
const QUEUE: usize = 1024;

/// Card time during which a kernel spins before it checks its peers again.
const SPIN: Duration = Duration::from_micros(200);

impl Op {
    /// `CUgraphNodeType`.
    fn kind(&self) -> i32 {
        match self {
            Self::Kernel(..) => 0,
            Self::Copy(..) | Self::Rows(..) | Self::Write(..) => 1,
            Self::Set(..) => 2,
            Self::Host(..) | Self::Callback(..) => 3,
            Self::Wait(..) => 6,
            Self::Record(..) => 7,
            Self::Alloc(..) => 10,
            Self::Free => 11,
            // `CU_GRAPH_NODE_TYPE_GRAPH`.
            Self::Graph(..) => 4,
        }
    }
}

/// An event with its recording count and its last completed recording.
#[derive(Debug, Default)]
pub struct Event {
    /// Device on which the event was created.
    device: i32,
    recorded: AtomicU64,
    /// Set if the last recording was captured.
    captured: AtomicBool,
    done: Mutex<(u64, Option<Instant>)>,
    changed: Condvar,
}

impl Event {
    fn finish(&self, record: u64) {
        let mut done = guard(&self.done);
        *done = (done.0.max(record), Some(Instant::now()));
        self.changed.notify_all();
    }

    fn wait(&self, record: u64) {
        let mut done = guard(&self.done);
        while done.0 < record {
            done = self.changed.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn pending(&self) -> bool {
        guard(&self.done).0 < self.recorded.load(Ordering::SeqCst)
    }
}

fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Stream {
    /// Context of the stream.
    context: u64,
    queue: SyncSender<Op>,
    /// Number of operations queued so far.
    queued: AtomicU64,
    /// Number of completed operations.
    done: Arc<AtomicU64>,
    last: Arc<Event>,
    capture: Option<Capture>,
    /// Set if the stream and the default stream wait for each other. The default stream must then not be used while
    /// this stream is being captured.
    blocking: bool,
}

struct Capture {
    ops: Vec<Op>,
    broken: bool,
    mode: i32,
}

#[derive(Default)]
struct Work {
    streams: HashMap<u64, Stream>,
    events: HashMap<u64, Arc<Event>>,
    graphs: HashMap<u64, Vec<Op>>,
    /// Memory reserved for graphs: size in bytes and device, keyed by address.
    reserved: BTreeMap<u64, (u64, i32)>,
    /// Peak of reserved bytes per device.
    highest: HashMap<i32, u64>,
    next: u64,
}

static WORK: Mutex<Option<Work>> = Mutex::new(None);

thread_local! {
    /// Capture mode of this thread, which determines whether its calls invalidate open captures: 0 global, 1
    /// thread-local, 2 relaxed.
    static MODE: AtomicI32 = const { AtomicI32::new(0) };
    /// Base number of this thread's per-thread default streams. Programs cannot use it as a handle.
    static THREAD_STREAM: u64 = {
        static NEXT: AtomicU64 = AtomicU64::new(1 << 48);
        // Reserve one number per device.
        NEXT.fetch_add(16, Ordering::SeqCst)
    };
}

fn with<T>(work: impl FnOnce(&mut Work) -> T) -> T {
    work(guard(&WORK).get_or_insert_default())
}

fn run(op: Op, device: i32) {
    match op {
        Op::Kernel(kernel, arguments) => {
            let time = (kernel.time)(&arguments);
            if mps::lost() != SUCCESS {
                return;
            }
            match card::of_device(device).and_then(card::Card::engine) {
                Some(engine) => {
                    while kernels::spins(&kernel, &arguments) {
                        engine.run(SPIN, || ());
                    }
                    engine.run(time, || (kernel.run)(&arguments));
                }
                None => (kernel.run)(&arguments),
            }
        }
        // SAFETY: see UNSAFETY.
        Op::Copy(to, from, bytes) => unsafe {
            std::ptr::copy(from as *const u8, to as *mut u8, bytes as usize);
        },
        // SAFETY: see UNSAFETY.
        Op::Rows(rows) => rows.into_iter().for_each(|[to, from, bytes]| unsafe {
            std::ptr::copy(from as *const u8, to as *mut u8, bytes as usize);
        }),
        // SAFETY: see UNSAFETY.
        Op::Write(to, bytes) => unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) },
        // SAFETY: see UNSAFETY.
        Op::Set(at, bytes, value) => unsafe { std::ptr::write_bytes(at as *mut u8, value, bytes as usize) },
        Op::Record(event, record) => event.finish(record),
        Op::Wait(event, record) => event.wait(record),
        Op::Alloc(..) | Op::Free => {}
        // SAFETY: see UNSAFETY. The program passed the function and its argument.
        Op::Host(function, data) => unsafe { function(data as *mut std::ffi::c_void) },
        // SAFETY: as above.
        Op::Callback(function, stream, data) => unsafe { function(stream, 0, data as *mut std::ffi::c_void) },
        Op::Graph(ops) => ops.into_iter().for_each(|op| run(op, device)),
    }
}

/// Creates a stream on the current device.
fn stream() -> Stream {
    let device = current::current_device();
    let (queue, ops) = sync_channel::<Op>(QUEUE);
    let done = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&done);
    let work = move |op| {
        run(op, device);
        counter.fetch_add(1, Ordering::SeqCst);
    };
    crate::spawn("fake-stream", move || {
        access::runs_on(device);
        ops.into_iter().for_each(work);
    });
    let context = current::CURRENT.get();
    Stream { context, queue, queued: AtomicU64::new(0), done, last: Arc::default(), capture: None, blocking: false }
}

impl Work {
    fn id(&mut self) -> u64 {
        self.next += 1;
        0x10_0000 + 16 * self.next
    }

    fn reserved_on(&self, device: i32) -> u64 {
        self.reserved.values().filter(|(_, of)| *of == device).map(|(bytes, _)| bytes).sum()
    }

    /// Returns the stream of a handle. 0 and 1 are the current device's default stream, and 2 is the per-thread default
    /// stream. While a blocking stream of the device is being captured, handles 0 and 1 are errors.
    fn stream(&mut self, handle: u64) -> Result<&mut Stream, i32> {
        if handle > 2 {
            return self.streams.get_mut(&handle).ok_or(INVALID_HANDLE);
        }
        let device = current::current_device();
        let captures = |stream: &Stream| stream.blocking && stream.capture.is_some() && stream.is_of(device);
        if handle < 2 && self.streams.values().any(captures) {
            return Err(CAPTURE_IMPLICIT);
        }
        let device = device as u64;
        let handle = if handle == 2 { THREAD_STREAM.with(|own| *own) + device } else { device };
        Ok(self.streams.entry(handle).or_insert_with(stream))
    }

    /// Like [`Self::stream`], for submitting work. Work that is not permitted during a capture invalidates the capture.
    fn stream_to_use(&mut self, handle: u64) -> Result<&mut Stream, i32> {
        if self.stream(handle).err() == Some(CAPTURE_IMPLICIT) {
            let blocking = self.streams.values_mut().filter(|stream| stream.blocking);
            blocking.filter_map(|stream| stream.capture.as_mut()).for_each(|capture| capture.broken = true);
        }
        self.stream(handle)
    }
}

/// Work for a stream's queue. The sender must not hold locks, because sending blocks while the queue is full.
struct Sent(SyncSender<Op>, Op);

impl Sent {
    fn send(self) {
        let _ = self.0.send(self.1);
    }
}

impl Stream {
    /// Returns true if the stream belongs to a device.
    fn is_of(&self, device: i32) -> bool {
        current::device_of(self.context).unwrap_or(0) == device
    }

    /// Accepts work: adds it to the capture, or returns it for the stream's queue.
    fn push(&mut self, op: Op) -> Option<Sent> {
        match (&mut self.capture, op) {
            (Some(capture), Op::Graph(ops)) => capture.ops.extend(ops),
            (Some(capture), op) => capture.ops.push(op),
            (None, op) => {
                self.queued.fetch_add(1, Ordering::SeqCst);
                return Some(Sent(self.queue.clone(), op));
            }
        }
        None
    }

    /// Returns an event recording that follows the stream's current work. The caller must send it.
    fn end(&self) -> (Sent, Arc<Event>, u64) {
        let record = self.last.recorded.fetch_add(1, Ordering::SeqCst) + 1;
        self.queued.fetch_add(1, Ordering::SeqCst);
        (Sent(self.queue.clone(), Op::Record(self.last.clone(), record)), self.last.clone(), record)
    }
}

/// Unless the calling thread's mode is relaxed, invalidates all captures in global mode. Returns
/// [`CAPTURE_UNSUPPORTED`] if there are any.
pub fn unsafe_call() -> i32 {
    let relaxed = MODE.with(|mode| mode.load(Ordering::SeqCst)) == 2;
    with(|work| {
        let mut result = SUCCESS;
        for capture in work.streams.values_mut().filter_map(|s| s.capture.as_mut()).filter(|c| c.mode == 0) {
            if !relaxed {
                capture.broken = true;
                result = CAPTURE_UNSUPPORTED;
            }
        }
        result
    })
}

/// Sets the calling thread's capture mode and returns the previous one.
pub fn exchange(mode: i32) -> i32 {
    MODE.with(|mine| mine.swap(mode, Ordering::SeqCst))
}

/// Creates a stream.
pub fn create(blocking: bool) -> u64 {
    with(|work| {
        let id = work.id();
        work.streams.insert(id, Stream { blocking, ..stream() });
        id
    })
}

/// Destroys a stream. Its pending work still completes.
pub fn destroy(handle: u64) -> i32 {
    with(|work| if work.streams.remove(&handle).is_some() { SUCCESS } else { INVALID_HANDLE })
}

/// Returns true if an address is in host memory that the card cannot access.
fn is_pageable(at: u64) -> bool {
    memory::find(at).is_none() && !registered::is_registered(at) && !modules::contains(at)
}

/// Submits work. As in NVIDIA's driver, pageable memory is read immediately, except during a capture.
pub fn submit(handle: u64, op: Op) -> i32 {
    let write = |to, from, bytes: u64| {
        // SAFETY: see UNSAFETY.
        Op::Write(to, unsafe { std::slice::from_raw_parts(from as *const u8, bytes as usize) }.into())
    };
    let is_captured = capturing(handle) != Ok(0);
    if matches!(op, Op::Kernel(..) | Op::Graph(..)) {
        output::write();
    }
    let op = match op {
        Op::Copy(to, from, bytes) if !is_captured && is_pageable(from) => write(to, from, bytes),
        Op::Rows(rows) if !is_captured && rows.first().is_some_and(|row| is_pageable(row[1])) => {
            Op::Graph(rows.into_iter().map(|[to, from, bytes]| write(to, from, bytes)).collect())
        }
        op => op,
    };
    match with(|work| Ok(work.stream_to_use(handle)?.push(op))) {
        Ok(sent) => {
            sent.into_iter().for_each(Sent::send);
            SUCCESS
        }
        Err(error) => error,
    }
}

/// Submits work to the default stream, and waits for it.
pub fn synchronous(op: Op) -> i32 {
    match submit(0, op) {
        SUCCESS => finish(0),
        error => error,
    }
}

/// Waits for a stream's work. Invalidates the stream's capture, if one is open.
pub fn finish(handle: u64) -> i32 {
    let end = with(|work| {
        let stream = work.stream_to_use(handle)?;
        if let Some(capture) = &mut stream.capture {
            capture.broken = true;
            return Err(CAPTURE_UNSUPPORTED);
        }
        Ok(stream.end())
    });
    match end {
        Ok((sent, event, record)) => {
            sent.send();
            event.wait(record);
            output::write();
            SUCCESS
        }
        Err(error) => error,
    }
}

/// Returns true if all work in a stream has completed.
pub fn is_done(handle: u64) -> Result<bool, i32> {
    with(|work| match work.stream(handle)? {
        stream if stream.capture.is_some() => Err(CAPTURE_UNSUPPORTED),
        stream => Ok(stream.done.load(Ordering::SeqCst) >= stream.queued.load(Ordering::SeqCst)),
    })
}

/// Waits for all streams of the current device. Invalidates captures in any mode.
pub fn finish_all() -> i32 {
    let device = current::current_device();
    finish_streams(|stream| stream.is_of(device))
}

/// Waits for all streams of the process.
pub fn finish_everything() -> i32 {
    finish_streams(|_| true)
}

fn finish_streams(which: impl Fn(&Stream) -> bool) -> i32 {
    let ends = with(|work| {
        let mut broken = false;
        for capture in work.streams.values_mut().filter(|s| which(s)).filter_map(|s| s.capture.as_mut()) {
            capture.broken = true;
            broken = true;
        }
        let all = || work.streams.values().filter(|s| which(s)).map(Stream::end).collect::<Vec<_>>();
        if broken { None } else { Some(all()) }
    });
    let Some(ends) = ends else { return CAPTURE_UNSUPPORTED };
    for (sent, event, record) in ends {
        sent.send();
        event.wait(record);
    }
    output::write();
    SUCCESS
}

/// Returns the context of a stream.
pub fn context_of(handle: u64) -> Result<u64, i32> {
    with(|work| work.stream(handle).map(|stream| stream.context))
}

/// Returns the state of a stream's capture: 0 none, 1 active, 2 invalidated.
pub fn capturing(handle: u64) -> Result<i32, i32> {
    with(|work| work.stream(handle).map(|s| s.capture.as_ref().map_or(0, |c| if c.broken { 2 } else { 1 })))
}

/// Begins a capture.
pub fn begin(handle: u64, mode: i32) -> i32 {
    with(|work| match work.stream(handle) {
        Ok(stream) if stream.capture.is_none() && handle > 2 => {
            stream.capture = Some(Capture { ops: Vec::new(), broken: false, mode });
            SUCCESS
        }
        Ok(_) => CAPTURE_UNSUPPORTED,
        Err(error) => error,
    })
}

/// Ends a capture and returns the graph.
pub fn end(handle: u64) -> Result<u64, i32> {
    with(|work| {
        let capture = work.stream(handle)?.capture.take().ok_or(INVALID_VALUE)?;
        if capture.broken {
            return Err(CAPTURE_INVALIDATED);
        }
        let id = work.id();
        work.graphs.insert(id, capture.ops);
        Ok(id)
    })
}

/// Creates an empty graph.
pub fn create_graph() -> u64 {
    with(|work| {
        let id = work.id();
        work.graphs.insert(id, Vec::new());
        id
    })
}

/// Returns the operations of a graph.
pub fn operations(graph: u64) -> Result<Vec<Op>, i32> {
    with(|work| work.graphs.get(&graph).cloned().ok_or(INVALID_HANDLE))
}

/// Adds an operation to a graph. Returns the number of its node.
pub fn add_node(graph: u64, op: Op) -> Result<u64, i32> {
    with(|work| {
        let ops = work.graphs.get_mut(&graph).ok_or(INVALID_HANDLE)?;
        ops.push(op);
        Ok(graph << 16 | (ops.len() as u64 - 1))
    })
}

/// Replaces the operation of a node in an executable graph instantiated from the node's graph.
pub fn replace_node(made: u64, node: u64, op: Op) -> Result<(), i32> {
    with(|work| {
        let ops = work.graphs.get_mut(&made).ok_or(INVALID_HANDLE)?;
        *ops.get_mut((node & 0xffff) as usize).ok_or(INVALID_VALUE)? = op;
        Ok(())
    })
}

/// Returns an operation that records an event.
pub fn record_operation(event: u64) -> Result<Op, i32> {
    let found = find(event)?;
    let record = found.recorded.fetch_add(1, Ordering::SeqCst) + 1;
    Ok(Op::Record(found, record))
}

/// Copies a graph into an executable graph.
pub fn instantiate(graph: u64) -> Result<u64, i32> {
    with(|work| {
        let ops = work.graphs.get(&graph).cloned().ok_or(INVALID_HANDLE)?;
        let id = work.id();
        work.graphs.insert(id, ops);
        Ok(id)
    })
}

/// Destroys a graph, executable or not.
pub fn destroy_graph(graph: u64) -> i32 {
    with(|work| if work.graphs.remove(&graph).is_some() { SUCCESS } else { INVALID_HANDLE })
}

/// Reserves the parts of a graph's memory that are not reserved yet.
pub fn upload(graph: u64) -> i32 {
    let wanted = with(|work| {
        let ops = work.graphs.get(&graph).ok_or(INVALID_HANDLE)?;
        let wanted = ops.iter().filter_map(|op| if let Op::Alloc(at, bytes) = op { Some((*at, *bytes)) } else { None });
        Ok(wanted.filter(|(at, _)| !work.reserved.contains_key(at)).collect::<Vec<_>>())
    });
    let wanted = match wanted {
        Ok(wanted) => wanted,
        Err(error) => return error,
    };
    for (at, bytes) in wanted {
        // As with NVIDIA's driver, memory reserved before a failure remains reserved.
        if let Err(error) = memory::back(at, bytes) {
            return error;
        }
        with(|work| {
            let device = current::current_device();
            work.reserved.insert(at, (bytes, device));
            let all = work.reserved_on(device);
            let highest = work.highest.entry(device).or_default();
            *highest = all.max(*highest);
        });
    }
    SUCCESS
}

/// Returns the number of bytes reserved for graphs on a device: the current value, or the peak if `highest` is set.
pub fn reserved(device: i32, highest: bool) -> u64 {
    with(|work| if highest { work.highest.get(&device).copied().unwrap_or(0) } else { work.reserved_on(device) })
}

/// Waits for all work of the process, and then releases a device's memory reserved for graphs.
pub fn trim(device: i32) -> i32 {
    match finish_everything() {
        SUCCESS => {}
        error => return error,
    }
    let all: Vec<_> = with(|work| work.reserved.extract_if(.., |_, (_, of)| *of == device).collect());
    for (at, (bytes, _)) in all {
        if let Err(error) = memory::unmap(at, bytes) {
            return error;
        }
    }
    SUCCESS
}

/// Adds an allocation to a stream's capture. Returns its address.
pub fn capture_alloc(stream: u64, bytes: u64) -> Result<u64, i32> {
    let bytes = bytes.max(1).checked_next_multiple_of(GRANULE).ok_or(INVALID_VALUE)?;
    let at = memory::reserve(bytes, 0, 0)?;
    match submit(stream, Op::Alloc(at, bytes)) {
        SUCCESS => Ok(at),
        error => Err(error),
    }
}

/// Returns the numbers of a graph's nodes.
pub fn nodes(graph: u64) -> Result<Vec<u64>, i32> {
    let count = with(|work| work.graphs.get(&graph).map(Vec::len).ok_or(INVALID_HANDLE))?;
    Ok((0..count as u64).map(|at| graph << 16 | at).collect())
}

/// Returns the `CUgraphNodeType` of a node, and the size in bytes if it allocates memory.
pub fn node(number: u64) -> Result<(i32, u64), i32> {
    with(|work| {
        let ops = work.graphs.get(&(number >> 16)).ok_or(INVALID_HANDLE)?;
        let op = ops.get((number & 0xffff) as usize).ok_or(INVALID_HANDLE)?;
        Ok((op.kind(), if let Op::Alloc(_, bytes) = op { *bytes } else { 0 }))
    })
}

/// Launches a graph.
pub fn launch(graph: u64, handle: u64) -> i32 {
    match upload(graph) {
        SUCCESS => {}
        error => return error,
    }
    match with(|work| work.graphs.get(&graph).cloned()) {
        Some(ops) => submit(handle, Op::Graph(ops)),
        None => INVALID_HANDLE,
    }
}

/// Creates an event.
pub fn event() -> u64 {
    with(|work| {
        let id = work.id();
        work.events.insert(id, Arc::new(Event { device: current::current_device(), ..Event::default() }));
        id
    })
}

/// Destroys an event.
pub fn destroy_event(event: u64) -> i32 {
    with(|work| if work.events.remove(&event).is_some() { SUCCESS } else { INVALID_HANDLE })
}

fn find(event: u64) -> Result<Arc<Event>, i32> {
    with(|work| work.events.get(&event).cloned().ok_or(INVALID_HANDLE))
}

/// Records an event in a stream.
pub fn record(event: u64, stream: u64) -> i32 {
    match find(event) {
        // As with NVIDIA's driver, an event and the stream that records it must belong to the same device.
        Ok(found) if context_of(stream).ok().and_then(current::device_of).is_some_and(|of| of != found.device) => {
            INVALID_HANDLE
        }
        Ok(found) => {
            let captured = capturing(stream).is_ok_and(|status| status != 0);
            found.captured.store(captured, Ordering::SeqCst);
            let record = found.recorded.fetch_add(1, Ordering::SeqCst) + 1;
            submit(stream, Op::Record(found, record))
        }
        Err(error) => error,
    }
}

/// Makes a stream wait for an event.
pub fn wait(stream: u64, event: u64) -> i32 {
    match find(event) {
        Ok(found) => {
            let record = found.recorded.load(Ordering::SeqCst);
            submit(stream, Op::Wait(found, record))
        }
        Err(error) => error,
    }
}

/// Returns [`SUCCESS`] if an event's last recording has completed.
pub fn query(event: u64) -> i32 {
    match find(event) {
        Ok(found) if found.captured.load(Ordering::SeqCst) => {
            // A captured event has no state, and a query invalidates all captures.
            with(|work| work.streams.values_mut().filter_map(|s| s.capture.as_mut()).for_each(|c| c.broken = true));
            CAPTURED_EVENT
        }
        Ok(found) if found.pending() => NOT_READY,
        Ok(_) => SUCCESS,
        Err(error) => error,
    }
}

/// Waits for an event's last recording.
pub fn synchronize(event: u64) -> i32 {
    match find(event) {
        Ok(found) => {
            found.wait(found.recorded.load(Ordering::SeqCst));
            output::write();
            SUCCESS
        }
        Err(error) => error,
    }
}

/// Returns the time between two events in ms.
pub fn elapsed(from: u64, to: u64) -> Result<f32, i32> {
    let (from, to) = (find(from)?, find(to)?);
    if from.pending() || to.pending() {
        return Err(NOT_READY);
    }
    let (from, to) = (guard(&from.done).1.ok_or(INVALID_HANDLE)?, guard(&to.done).1.ok_or(INVALID_HANDLE)?);
    Ok(match to.checked_duration_since(from) {
        Some(after) => after.as_secs_f32() * 1e3,
        None => -from.duration_since(to).as_secs_f32() * 1e3,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn submitter_blocks_when_queue_is_full() {
        let (stream, gate) = (create(false), event());
        // The event has not been recorded yet, so the stream waits at its first operation.
        let held = find(gate).expect("there");
        let record = held.recorded.fetch_add(1, Ordering::SeqCst) + 1;
        assert_eq!(wait(stream, gate), SUCCESS);
        let count = Arc::new(AtomicU64::new(0));
        let many = 3 * QUEUE as u64;
        let submitting = std::thread::spawn({
            let count = count.clone();
            move || {
                for _ in 0..many {
                    assert_eq!(submit(stream, Op::Free), SUCCESS);
                    count.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        while count.load(Ordering::SeqCst) < QUEUE as u64 {
            std::thread::yield_now();
        }
        // TIMEOUT: without a limit, all work is submitted in far less time. With a limit, the count stays the same no
        // matter how long the test waits.
        std::thread::sleep(std::time::Duration::from_millis(200));
        // One operation has left the queue and is waiting.
        assert!(count.load(Ordering::SeqCst) <= QUEUE as u64 + 1, "{count:?} are in a queue of {QUEUE}");
        assert_eq!(query(event()), SUCCESS, "other calls are not blocked");
        held.finish(record);
        submitting.join().expect("submits the rest");
        assert_eq!((finish(stream), count.load(Ordering::SeqCst)), (SUCCESS, many));
    }
}
