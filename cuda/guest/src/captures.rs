//! Tracks open captures. While none is open, no stream is being captured, and the worker need not be queried.
//!
//! PyTorch queries a stream's capture state dozens of times per step, and each reply from the worker would wait for all
//! earlier messages.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::call::{PER_THREAD, described, index, invoke, resolve_stream, stream_context, to};
use crate::devices::ready;
use crate::frame::{Frame, Handler};
use crate::result::{INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, SUCCESS};
use crate::thread;

pub const HANDLERS: &[(&str, Handler)] = &[
    ("cuStreamBeginCapture", begin),
    ("cuStreamBeginCapture_v2", begin),
    ("cuStreamEndCapture", end),
    ("cuStreamIsCapturing", is_capturing),
    ("cuStreamGetCaptureInfo_v2", information),
    ("cuStreamGetCaptureInfo_v3", information),
];

/// Streams in which open captures began. Other streams may join a capture through events, so the worker is queried
/// about every stream while a capture is open. Static, because exported functions cannot receive state as an argument.
static OPEN: Mutex<Vec<u64>> = Mutex::new(Vec::new());
/// Number of streams in [`OPEN`], for readers that do not lock it.
static OPEN_COUNT: AtomicUsize = AtomicUsize::new(0);

fn change(work: impl FnOnce(&mut Vec<u64>)) {
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    work(&mut open);
    OPEN_COUNT.store(open.len(), Ordering::Release);
}

fn begin(frame: &Frame) -> i32 {
    let result = described(frame);
    if result == SUCCESS
        && let Ok(stream) = resolve_stream(frame.arg(0), frame.per_thread)
    {
        change(|open| open.push(stream));
    }
    result
}

fn end(frame: &Frame) -> i32 {
    let result = described(frame);
    let Ok(stream) = resolve_stream(frame.arg(0), frame.per_thread) else { return result };
    // If ending a capture fails, only the driver knows whether the capture is still open.
    if result == SUCCESS || state(stream) == Ok((0, 0)) {
        change(|open| open.retain(|of| *of != stream));
    }
    result
}

/// Queries the worker for the state and ID of a stream's capture.
fn state(stream: u64) -> Result<(i32, u64), i32> {
    let (mut status, mut id) = (0i32, 0u64);
    invoke(index!("cuStreamGetCaptureInfo_v2+"), &[stream, to(&mut status), to(&mut id)])?;
    Ok((status, if status == 0 { 0 } else { id }))
}

/// Returns true if no capture is open, so that the stream is not being captured. Fails if the stream does not exist.
fn is_idle(stream: u64) -> Result<bool, i32> {
    ready()?;
    if OPEN_COUNT.load(Ordering::Acquire) > 0 {
        return Ok(false);
    }
    if stream <= PER_THREAD {
        return if thread::current() == 0 { Err(INVALID_CONTEXT) } else { Ok(true) };
    }
    if stream_context(stream).is_some() { Ok(true) } else { Err(INVALID_HANDLE) }
}

fn is_capturing(frame: &Frame) -> i32 {
    if frame.arg(1) == 0 {
        return INVALID_VALUE;
    }
    match is_idle(frame.arg(0)) {
        Ok(true) => frame.put(1, 0i32),
        Ok(false) => described(frame),
        Err(error) => error,
    }
}

/// Returns the state and ID of a stream's capture. Rejects requests for the graph and nodes of an active capture, which
/// are available only in the worker.
fn information(frame: &Frame) -> i32 {
    if frame.arg(1) == 0 {
        return INVALID_VALUE;
    }
    let found = is_idle(frame.arg(0)).and_then(|is_idle| match is_idle {
        true => Ok((0, 0)),
        false => resolve_stream(frame.arg(0), frame.per_thread).and_then(state),
    });
    let (status, id) = match found {
        Ok(found) => found,
        Err(error) => return error,
    };
    let wants_graph = (3..=5).any(|at| frame.arg(at) != 0);
    if status == 1 && wants_graph {
        return NOT_SUPPORTED;
    }
    frame.put_optional(2, id);
    frame.put(1, status)
}
