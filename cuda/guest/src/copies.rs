//! Copies. Pageable memory is transferred in messages or through the staging blob; addresses of card memory and pinned
//! memory are sent unchanged.
//!
//! UNSAFETY: reads and writes the program's memory for the copies.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use cuda_calls::own;
use cuda_ring::{Blob, BlobKind, Words as _, control, staging};

use crate::addresses::{Place, place};
use crate::call::{code, index, invoke, resolve_stream};
use crate::connection::{self, Connection};
use crate::frame::{Frame, Handler};
use crate::result::{INVALID_VALUE, OUT_OF_MEMORY};
use crate::thread::{self, Thread};
use crate::{copy_threads, streaming, streams};

pub const HANDLERS: &[(&str, Handler)] = &[
    ("cuMemcpy", copy),
    ("cuMemcpyAsync", copy_async),
    ("cuMemcpyHtoD_v2", copy),
    ("cuMemcpyHtoDAsync_v2", copy_async),
    ("cuMemcpyDtoH_v2", copy),
    ("cuMemcpyDtoHAsync_v2", copy_async),
    ("cuMemcpyBatchAsync", batch_with_failure),
    ("cuMemcpyBatchAsync_v2", batch),
    ("cuMemcpyWithAttributesAsync", copy_with_attributes),
];

/// Maximum number of parts in flight per copy from the card.
const DEPTH: usize = 8;

/// The staging blob, and the uses of its buffers.
struct Staging {
    blob: Blob,
    /// Number of uses started for each buffer.
    begun: [AtomicU64; staging::PIECE_COUNT as usize],
    /// Next buffer for copies to the card. Copies from the card use the remaining buffers, one call at a time.
    next: AtomicU64,
    reading: Mutex<()>,
}

/// Number of buffers for copies to the card. The others are for copies from the card.
const IN_PIECES: u64 = staging::PIECE_COUNT - DEPTH as u64;

/// The staging blob, once it exists. Static, because exported functions cannot receive state as an argument.
static STAGING: OnceLock<Staging> = OnceLock::new();
/// Lock held while the staging blob is created. Static, because exported functions cannot receive state as an argument.
static CREATING: Mutex<()> = Mutex::new(());

/// Returns the staging blob. The first copy that needs it creates it.
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

/// Appends the program's bytes as words.
///
/// # Safety
/// `from` must be readable for `bytes` bytes.
unsafe fn append(message: &mut Vec<u64>, from: u64, bytes: usize) {
    let words = bytes.div_ceil(8);
    message.reserve(words);
    let first = message.len();
    message.resize(first + words, 0);
    if let Some(room) = message.get_mut(first..) {
        // SAFETY: the buffer has this size, and the source is guaranteed by the caller.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, room.as_mut_ptr().cast(), bytes) };
    }
}

/// Copies `bytes` bytes, which are part of a copy of `all` bytes. Large copies bypass the caches.
///
/// # Safety
/// Both addresses must be valid for `bytes` bytes, and the ranges must not overlap.
unsafe fn copy_part(all: u64, from: u64, to: u64, bytes: u64) {
    let (from, to, bytes) = (from as *const u8, to as *mut u8, bytes as usize);
    // SAFETY: guaranteed by the caller.
    unsafe {
        if all >= streaming::MIN_BYTES {
            streaming::copy(from, to, bytes);
        } else {
            std::ptr::copy_nonoverlapping(from, to, bytes);
        }
    }
}

fn to_card(connection: &Connection, to: u64, from: u64, bytes: u64, stream: u64, wait: bool) -> Result<(), i32> {
    thread::with(|thread| {
        if bytes <= own::MAX_INLINE_BYTES as u64 {
            connection.check(thread.slot()?)?;
            let write = |message: &mut Vec<u64>| {
                message.extend([to, bytes, stream]);
                // SAFETY: the program's copy reads these bytes.
                unsafe { append(message, from, bytes as usize) };
                Ok(())
            };
            return finish(connection, thread, own::COPY_INLINE, wait, write);
        }
        let part_bytes = |done: u64| (bytes - done).min(staging::PIECE_BYTES);
        let parts = (0..bytes).step_by(staging::PIECE_BYTES as usize);
        let write = |done: &u64, piece: u64, message: &mut Vec<u64>| {
            message.extend([piece, to + done, part_bytes(*done), stream]);
        };
        let fill = |done: &u64, memory: u64| {
            // SAFETY: only this call uses the buffer until the worker completes its use. The source belongs to the
            // program.
            unsafe { copy_part(bytes, from + done, memory, part_bytes(*done)) };
        };
        send(connection, thread, Sending { op: own::COPY_IN, bytes, wait }, parts, write, fill)
    })
}

/// A copy to the card through the staging blob.
pub struct Sending {
    /// Message for each part.
    pub op: u16,
    /// Size of the copy in bytes.
    pub bytes: u64,
    /// True if the call returns when the copy is complete.
    pub wait: bool,
}

/// Copies parts to the card through the staging blob. `fill` copies a part to the buffer at the given address, possibly
/// on another thread. `write` encodes the message for the part and its buffer.
pub fn send<P: Copy + Send>(
    connection: &Connection,
    thread: &Thread,
    sending: Sending,
    parts: impl Iterator<Item = P>,
    write: impl Fn(&P, u64, &mut Vec<u64>),
    fill: impl Fn(&P, u64) + Sync,
) -> Result<(), i32> {
    let Sending { op, bytes, wait } = sending;
    let fill = |(part, address): &(P, u64)| fill(part, *address);
    copy_threads::with(bytes, &fill, |threads| {
        let (mut parts, mut pending) = (parts.peekable(), VecDeque::new());
        let mut state = connection.check(thread.slot()?);
        loop {
            while state.is_ok()
                && pending.len() <= 2 * threads.helpers()
                && let Some(&part) = parts.peek()
            {
                // A thread that has a buffer must not wait for another one, because the other threads may do the same.
                let piece = match pending.is_empty() {
                    true => take_piece(connection, thread).map(Some),
                    false => take_free_piece(connection, thread),
                };
                match piece {
                    Ok(Some(piece)) => pending.push_back((threads.add((part, piece.address)), piece.number, part)),
                    Ok(None) => break,
                    Err(code) => {
                        state = Err(code);
                        break;
                    }
                }
                parts.next();
            }
            let Some((job, number, part)) = pending.pop_front() else { return state };
            threads.wait(job);
            let is_last = pending.is_empty() && (parts.peek().is_none() || state.is_err());
            // The message must be sent even after a failure, because its completion frees the buffer.
            let sent = finish(connection, thread, op, wait && is_last, |message| {
                write(&part, number, message);
                Ok(())
            });
            state = state.and(sent).and(connection.check(thread.slot()?));
        }
    })
}

/// An acquired staging buffer.
struct Piece {
    /// Number of the buffer, for messages.
    number: u64,
    address: u64,
}

/// Acquires the next buffer for a copy to the card. Waits until the buffer's last use has completed. The caller must
/// send a message that uses the buffer, even if the copy fails.
fn take_piece(connection: &Connection, thread: &Thread) -> Result<Piece, i32> {
    let staging = staging_blob(connection, thread)?;
    let number = staging.next.fetch_add(1, Ordering::Relaxed) % IN_PIECES;
    let uses = staging.begun.get(number as usize).map_or(0, |begun| begun.fetch_add(1, Ordering::AcqRel));
    connection.wait(control::PIECES + 8 * number, uses)?;
    Ok(Piece { number, address: staging.blob.address + number * staging::PIECE_BYTES })
}

/// Like [`take_piece`], but returns `None` if the next buffer is in use.
fn take_free_piece(connection: &Connection, thread: &Thread) -> Result<Option<Piece>, i32> {
    let staging = staging_blob(connection, thread)?;
    let number = staging.next.load(Ordering::Relaxed) % IN_PIECES;
    let Some(begun) = staging.begun.get(number as usize) else { return Ok(None) };
    let uses = begun.load(Ordering::Acquire);
    let is_free = connection.control.load(control::PIECES + 8 * number) >= uses;
    // If another thread has acquired the buffer in the meantime, it is in use.
    if !is_free || begun.compare_exchange(uses, uses + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        return Ok(None);
    }
    staging.next.fetch_add(1, Ordering::Relaxed);
    Ok(Some(Piece { number, address: staging.blob.address + number * staging::PIECE_BYTES }))
}

/// Sends a copy message, even if an earlier call of the thread has failed. If `wait` is set, returns when the copy is
/// complete.
pub fn finish(
    connection: &Connection,
    thread: &Thread,
    op: u16,
    wait: bool,
    write: impl FnOnce(&mut Vec<u64>) -> Result<(), i32>,
) -> Result<(), i32> {
    match connection.post_always(thread, op, wait, write)? {
        Some(answer) if answer.code != 0 => Err(answer.code),
        _ => Ok(()),
    }
}

/// Copies parts of a copy of `bytes` bytes from the card through the staging blob. `write` encodes the message for a
/// part and its buffer. `take` copies a part from the given address, possibly on another thread.
pub fn receive<P: Copy + Send>(
    connection: &Connection,
    thread: &Thread,
    op: u16,
    bytes: u64,
    mut parts: impl Iterator<Item = P>,
    write: impl Fn(&P, u64, &mut Vec<u64>),
    take: impl Fn(&P, u64) + Sync,
) -> Result<(), i32> {
    let staging = staging_blob(connection, thread)?;
    let _reading = staging.reading.lock().unwrap_or_else(PoisonError::into_inner);
    let (mut begun, mut failed) = (0, Ok(()));
    let take = |(part, address): &(P, u64)| take(part, *address);
    copy_threads::with(bytes, &take, |threads| {
        let (mut pending, mut copying) = (VecDeque::new(), VecDeque::new());
        loop {
            // Let the worker fill the next buffers while others are copied out. The oldest ones are free first.
            while failed.is_ok() && pending.len() + copying.len() < DEPTH {
                let Some(part) = parts.next() else { break };
                let piece = IN_PIECES + begun % DEPTH as u64;
                begun += 1;
                let expected = connection.begin(thread, op, None, |message| {
                    write(&part, piece, message);
                    Ok(())
                });
                match expected {
                    Ok(expected) => pending.push_back((expected, piece, part)),
                    Err(code) => failed = Err(code),
                }
            }
            let next = pending.pop_front();
            let is_last = next.is_none();
            if let Some((expected, piece, part)) = next {
                // After a failure, still wait for the remaining buffers, because the next copy reuses them.
                let code = connection.end(expected, None)?.code;
                if code != 0 {
                    failed = Err(code);
                }
                if failed.is_ok() {
                    copying.push_back(threads.add((part, staging.blob.address + piece * staging::PIECE_BYTES)));
                }
            }
            while copying.len() > if is_last { 0 } else { threads.helpers() } {
                copying.pop_front().into_iter().for_each(|job| threads.wait(job));
            }
            if is_last {
                break;
            }
        }
        // A later reply may have overwritten a buffer's error, so also check the deferred error.
        let replaced = connection.check(thread.slot()?);
        failed.and(replaced)
    })
}

fn from_card(connection: &Connection, to: u64, from: u64, bytes: u64, stream: u64) -> Result<(), i32> {
    let part_bytes = |done: u64| (bytes - done).min(staging::PIECE_BYTES);
    thread::with(|thread| {
        let parts = (0..bytes).step_by(staging::PIECE_BYTES as usize);
        let write = |done: &u64, piece: u64, message: &mut Vec<u64>| {
            message.extend([piece, from + done, part_bytes(*done), stream]);
        };
        receive(connection, thread, own::COPY_OUT, bytes, parts, write, |done, memory| {
            // SAFETY: the worker has filled the buffer, which only this call uses. The destination belongs to the
            // program.
            unsafe { copy_part(bytes, memory, to + done, part_bytes(*done)) };
        })
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
            // SAFETY: both addresses are in the program's memory.
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

/// `CUmemcpyAttributes`. Only the first word is relevant; the others are hints.
#[repr(C)]
struct Attributes {
    /// `CUmemcpySrcAccessOrder`.
    order: u32,
    hints: [u32; 5],
}

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`, `.._DURING_API_CALL` and `.._ANY`.
const ORDERS: std::ops::RangeInclusive<u32> = 1..=3;
/// `CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL`: the program may reuse the source when the call returns.
const DURING_CALL: u32 = 2;

/// Copies in stream order, with the given source access order.
fn ordered(to: u64, from: u64, bytes: u64, stream: u64, order: u32) -> Result<(), i32> {
    if !ORDERS.contains(&order) {
        return Err(INVALID_VALUE);
    }
    // Pageable memory is always read before the call returns.
    let wait = order == DURING_CALL && place(from) != Place::Pageable;
    perform(to, from, bytes, stream, wait)
}

fn copy_with_attributes(frame: &Frame) -> i32 {
    let attributes = frame.arg(3) as *const Attributes;
    if attributes.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the program passes valid attributes.
    let order = unsafe { (*attributes).order };
    let stream = resolve_stream(frame.arg(4), frame.per_thread);
    code(stream.and_then(|stream| ordered(frame.arg(0), frame.arg(1), frame.arg(2), stream, order)))
}

/// Executes a batch of copies sequentially. The driver API permits any order.
fn copy_batch(frame: &Frame, stream: usize) -> Result<(), i32> {
    let [to, from, bytes] = [0, 1, 2].map(|index| frame.arg(index) as *const u64);
    let (count, attributes) = (frame.arg(3), frame.arg(4) as *const Attributes);
    let (indices, groups) = (frame.arg(5) as *const u64, frame.arg(6));
    let stream = resolve_stream(frame.arg(stream), frame.per_thread)?;
    let pointers = [to, from, bytes, attributes.cast(), indices];
    // Batches are not permitted in the legacy default stream.
    if pointers.iter().any(|pointer| pointer.is_null()) || count == 0 || groups == 0 || groups > count || stream < 2 {
        return Err(INVALID_VALUE);
    }
    let mut group = 0;
    for at in 0..count as usize {
        // SAFETY: the program passes arrays of these lengths.
        let (to, from, bytes) =
            unsafe { (to.add(at).read_unaligned(), from.add(at).read_unaligned(), bytes.add(at).read_unaligned()) };
        // SAFETY: as above. Each group begins with the copy whose index it contains.
        while group + 1 < groups as usize && unsafe { indices.add(group + 1).read_unaligned() } <= at as u64 {
            group += 1;
        }
        // SAFETY: as above.
        let order = unsafe { (*attributes.add(group)).order };
        ordered(to, from, bytes, stream, order)?;
    }
    Ok(())
}

fn batch(frame: &Frame) -> i32 {
    code(copy_batch(frame, 7))
}

/// Implements the first version of the call, which also returns the index of the failed copy. This index is always
/// `SIZE_MAX`, which means that the failure is not specific to one copy.
fn batch_with_failure(frame: &Frame) -> i32 {
    let result = code(copy_batch(frame, 8));
    if result != 0 {
        frame.put_optional(7, u64::MAX);
    }
    result
}
