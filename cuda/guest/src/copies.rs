//! Copies. Pageable memory of the program travels in messages or through the staging blob; addresses of the card and of
//! pinned memory are passed on.
//!
//! UNSAFETY: reads and writes the program's memory, as the copies demand.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use cuda_calls::own;
use cuda_ring::{Blob, BlobKind, control, staging};

use crate::addresses::{Place, place};
use crate::call::{code, index, invoke, resolve_stream};
use crate::connection::{self, Connection};
use crate::frame::{Frame, Handler};
use crate::result::OUT_OF_MEMORY;
use crate::streams;
use crate::thread::{self, Thread};

pub const HANDLERS: &[(&str, Handler)] = &[
    ("cuMemcpy", copy),
    ("cuMemcpyAsync", copy_async),
    ("cuMemcpyHtoD_v2", copy),
    ("cuMemcpyHtoDAsync_v2", copy_async),
    ("cuMemcpyDtoH_v2", copy),
    ("cuMemcpyDtoHAsync_v2", copy_async),
];

/// Maximum number of copies to the program in flight, for one call.
const DEPTH: usize = 8;

/// The staging blob and the uses of its pieces.
struct Staging {
    blob: Blob,
    /// Number of started uses of each piece.
    begun: [AtomicU64; staging::PIECE_COUNT as usize],
    /// Next piece for copies to the card. Copies from the card use the second half, one call at a time.
    next: AtomicU64,
    reading: Mutex<()>,
}

/// Number of pieces for copies to the card; the other pieces are for copies from it.
const IN_PIECES: u64 = staging::PIECE_COUNT - DEPTH as u64;

/// Static: the exported functions have no other state.
static STAGING: OnceLock<Staging> = OnceLock::new();
/// Held while the blob is created. Static: as above.
static CREATING: Mutex<()> = Mutex::new(());

/// Returns the staging blob, which the first large copy creates.
fn staging_blob(connection: &Connection, thread: &Thread) -> Result<&'static Staging, i32> {
    if let Some(known) = STAGING.get() {
        return Ok(known);
    }
    let _creating = CREATING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = STAGING.get() {
        return Ok(known);
    }
    connection.check(thread.slot()?)?;
    let blob = connection.transport.create(BlobKind::Staging, staging::BYTES, None).map_err(|_| OUT_OF_MEMORY)?;
    let answer = connection.ask(thread, own::STAGING, None, |message| message.push(u64::from(blob.id)))?;
    if answer.code != 0 {
        let _ = connection.transport.remove(blob, false);
        return Err(answer.code);
    }
    Ok(STAGING.get_or_init(|| Staging {
        blob,
        begun: [const { AtomicU64::new(0) }; staging::PIECE_COUNT as usize],
        next: AtomicU64::new(0),
        reading: Mutex::new(()),
    }))
}

/// Appends bytes of the program as words.
///
/// # Safety
/// `from` names that many bytes of the program.
unsafe fn append(message: &mut Vec<u64>, from: u64, bytes: usize) {
    let words = bytes.div_ceil(8);
    message.reserve(words);
    let first = message.len();
    message.resize(first + words, 0);
    if let Some(room) = message.get_mut(first..) {
        // SAFETY: the room has that many bytes, and the caller promises the source.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, room.as_mut_ptr().cast(), bytes) };
    }
}

fn to_card(connection: &Connection, to: u64, from: u64, bytes: u64, stream: u64, wait: bool) -> Result<(), i32> {
    thread::with(|thread| {
        if bytes <= own::MAX_INLINE_BYTES as u64 {
            let write = |message: &mut Vec<u64>| {
                message.extend([to, bytes, stream]);
                // SAFETY: the program's copy reads these bytes.
                unsafe { append(message, from, bytes as usize) };
                Ok(())
            };
            return finish(connection, thread, own::COPY_INLINE, wait, write);
        }
        let staging = staging_blob(connection, thread)?;
        let mut done = 0;
        while done < bytes {
            let part = (bytes - done).min(staging::PIECE_BYTES);
            let piece = staging.next.fetch_add(1, Ordering::Relaxed) % IN_PIECES;
            let uses = staging.begun.get(piece as usize).map_or(0, |begun| begun.fetch_add(1, Ordering::AcqRel));
            connection.wait(control::PIECES + 8 * piece, uses)?;
            let memory = staging.blob.address + piece * staging::PIECE_BYTES;
            // SAFETY: the piece is this call's alone until the worker counts its use; the source is the program's.
            unsafe {
                std::ptr::copy_nonoverlapping((from + done) as *const u8, memory as *mut u8, part as usize);
            }
            let words = [piece, to + done, part, stream];
            done += part;
            finish(connection, thread, own::COPY_IN, wait && done == bytes, |message| {
                message.extend(words);
                Ok(())
            })?;
        }
        Ok(())
    })
}

fn finish(
    connection: &Connection,
    thread: &Thread,
    op: u16,
    wait: bool,
    write: impl FnOnce(&mut Vec<u64>) -> Result<(), i32>,
) -> Result<(), i32> {
    if !wait {
        return connection.post(thread, op, write);
    }
    let expected = connection.begin(thread, op, None, write)?;
    match connection.end(expected, None)?.code {
        0 => Ok(()),
        code => Err(code),
    }
}

fn from_card(connection: &Connection, to: u64, from: u64, bytes: u64, stream: u64) -> Result<(), i32> {
    thread::with(|thread| {
        let staging = staging_blob(connection, thread)?;
        let _reading = staging.reading.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut begun, mut done, mut failed) = (0, 0, Ok(()));
        let mut pending = VecDeque::new();
        loop {
            // The next pieces are filled while one is copied out.
            while failed.is_ok() && begun < bytes && pending.len() < DEPTH {
                let part = (bytes - begun).min(staging::PIECE_BYTES);
                let piece = IN_PIECES + (begun / staging::PIECE_BYTES) % DEPTH as u64;
                let words = [piece, from + begun, part, stream];
                let expected = connection.begin(thread, own::COPY_OUT, None, |message| {
                    message.extend(words);
                    Ok(())
                });
                match expected {
                    Ok(expected) => pending.push_back((expected, piece, part)),
                    Err(code) => failed = Err(code),
                }
                begun += part;
            }
            let Some((expected, piece, part)) = pending.pop_front() else { break };
            // After a failure, only waits for the other pieces, because the next copy uses them.
            let code = connection.end(expected, None)?.code;
            if code != 0 {
                failed = Err(code);
            }
            if failed.is_ok() {
                let memory = staging.blob.address + piece * staging::PIECE_BYTES;
                // SAFETY: the worker has filled the piece, which is this call's alone; the room is the program's.
                unsafe { std::ptr::copy_nonoverlapping(memory as *const u8, (to + done) as *mut u8, part as usize) };
            }
            done += part;
        }
        failed
    })
}

fn perform(to: u64, from: u64, bytes: u64, stream: u64, wait: bool) -> Result<(), i32> {
    let connection = connection::get()?;
    if thread::current() == 0 {
        return Err(crate::result::INVALID_CONTEXT);
    }
    match (place(to), place(from)) {
        _ if bytes == 0 => Ok(()),
        (Place::Pageable, Place::Pageable) => {
            // SAFETY: both are the program's memory.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes as usize) };
            Ok(())
        }
        (Place::Pageable, _) => from_card(connection, to, from, bytes, stream),
        (_, Place::Pageable) => to_card(connection, to, from, bytes, stream, wait),
        _ if wait => {
            invoke(index!("cuMemcpyAsync+"), &[to, from, bytes, stream])?;
            streams::wait(own::WAIT_STREAM, stream)
        }
        _ => invoke(index!("cuMemcpyAsync-"), &[to, from, bytes, stream]),
    }
}

fn copy(frame: &Frame) -> i32 {
    let stream = resolve_stream(0, frame.per_thread);
    code(stream.and_then(|stream| perform(frame.arg(0), frame.arg(1), frame.arg(2), stream, true)))
}

fn copy_async(frame: &Frame) -> i32 {
    let stream = resolve_stream(frame.arg(3), frame.per_thread);
    code(stream.and_then(|stream| perform(frame.arg(0), frame.arg(1), frame.arg(2), stream, false)))
}
