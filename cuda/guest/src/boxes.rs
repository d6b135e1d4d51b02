//! Copies in two and three dimensions, and array copies. Rows of pageable memory are packed into messages or staging
//! buffers. Copies without pageable memory are forwarded to the worker.
//!
//! UNSAFETY: reads and writes the program's memory for the copies.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::sync::atomic::{AtomicBool, Ordering};

use cuda_calls::boxes::{ARRAY, BoxCopy, DEVICE, End, HOST, UNIFIED, WORDS_2D, WORDS_3D};
use cuda_calls::own;
use cuda_ring::staging::PIECE_BYTES;

use crate::addresses::{Place, place};
use crate::call::{code, index, invoke, resolve_stream};
use crate::connection::{self, Connection};
use crate::copies::{self, Sending};
use crate::frame::{Frame, Handler};
use crate::result::{INVALID_CONTEXT, INVALID_VALUE};
use crate::{streams, thread};

pub const HANDLERS: &[(&str, Handler)] = &[
    ("cuMemcpy2D_v2", copy_2d),
    ("cuMemcpy2DUnaligned_v2", copy_2d_unaligned),
    ("cuMemcpy2DAsync_v2", copy_2d_async),
    ("cuMemcpy3D_v2", copy_3d),
    ("cuMemcpy3DAsync_v2", copy_3d_async),
    ("cuMemcpyAtoA_v2", array_to_array),
    ("cuMemcpyAtoD_v2", array_to_card),
    ("cuMemcpyAtoH_v2", array_to_host),
    ("cuMemcpyAtoHAsync_v2", array_to_host_async),
    ("cuMemcpyDtoA_v2", card_to_array),
    ("cuMemcpyHtoA_v2", host_to_array),
    ("cuMemcpyHtoAAsync_v2", host_to_array_async),
];

/// Driver function for copies without pageable memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    TwoDimensions,
    Unaligned,
    ThreeDimensions,
}

/// Stream of a copy, and a flag that is set if the call waits for the copy.
#[derive(Clone, Copy, Debug)]
struct Order {
    stream: u64,
    wait: bool,
}

/// Returns the type of memory at one end of a copy, or `None` for an array.
fn place_of(copy: &BoxCopy, end: End) -> Result<Option<Place>, i32> {
    if end.kind == ARRAY {
        return Ok(None);
    }
    let found = place(copy.touched(end).ok_or(INVALID_VALUE)?.start);
    if end.kind == DEVICE && found == Place::Pageable { Err(INVALID_VALUE) } else { Ok(Some(found)) }
}

fn perform(copy: BoxCopy, form: Form, order: Order) -> Result<(), i32> {
    let connection = connection::get()?;
    if thread::current() == 0 {
        return Err(INVALID_CONTEXT);
    }
    let copy = copy.spread().ok_or(INVALID_VALUE)?;
    if copy.is_empty() {
        return Ok(());
    }
    copy.bytes().ok_or(INVALID_VALUE)?;
    match (place_of(&copy, copy.from)?, place_of(&copy, copy.to)?) {
        (Some(Place::Pageable), Some(Place::Pageable)) => {
            // SAFETY: both addresses are in the program's memory.
            unsafe { for_each_row(&copy, |row| std::ptr::copy(row.from as *const u8, row.to as *mut u8, row.bytes)) }
        }
        (Some(Place::Pageable), _) => to_card(connection, copy, order),
        (_, Some(Place::Pageable)) => from_card(connection, copy, order.stream),
        (from, to) => {
            let is_local = !matches!(from, Some(Place::Pinned)) && !matches!(to, Some(Place::Pinned));
            pass_on(copy, form, is_local, order)
        }
    }
}

/// Forwards a copy between the card, pinned memory and arrays.
fn pass_on(copy: BoxCopy, form: Form, is_local: bool, order: Order) -> Result<(), i32> {
    let (two, three) = (copy.to_2d(), copy.to_3d());
    let (two, three) = (two.as_ptr().addr() as u64, three.as_ptr().addr() as u64);
    let Order { stream, wait } = order;
    match (form, wait) {
        // `cuMemcpy2DUnaligned` has no asynchronous variant, and does not wait for copies without pinned memory.
        (Form::Unaligned, _) if is_local && stream == 0 => return invoke(index!("cuMemcpy2DUnaligned_v2+"), &[two]),
        (Form::ThreeDimensions, true) => invoke(index!("cuMemcpy3DAsync_v2+"), &[three, stream])?,
        (Form::ThreeDimensions, false) => return invoke(index!("cuMemcpy3DAsync_v2-"), &[three, stream]),
        (_, true) => invoke(index!("cuMemcpy2DAsync_v2+"), &[two, stream])?,
        (_, false) => return invoke(index!("cuMemcpy2DAsync_v2-"), &[two, stream]),
    }
    streams::wait(own::WAIT_STREAM, stream)
}

/// A row of a copy: addresses and size.
struct Row {
    from: u64,
    to: u64,
    bytes: usize,
}

/// Calls `work` with each row of a copy in linear memory.
fn for_each_row(copy: &BoxCopy, mut work: impl FnMut(Row)) -> Result<(), i32> {
    let bytes = usize::try_from(copy.width).map_err(|_| INVALID_VALUE)?;
    for layer in 0..copy.depth {
        for row in 0..copy.height {
            let (from, to) = copy.from.row(layer, row).zip(copy.to.row(layer, row)).ok_or(INVALID_VALUE)?;
            work(Row { from, to, bytes });
        }
    }
    Ok(())
}

/// Splits a copy into parts of at most `limit` bytes, each consisting of whole layers, rows of one layer, or bytes of
/// one row.
fn parts(copy: BoxCopy, limit: u64) -> impl Iterator<Item = BoxCopy> {
    let width = copy.width.min(limit);
    let height = if width < copy.width { 1 } else { (limit / width).min(copy.height) };
    let depth = if height < copy.height { 1 } else { (limit / (width * height)).min(copy.depth) };
    let steps = |end: u64, step: u64| (0..end).step_by(step as usize);
    steps(copy.depth, depth).flat_map(move |z| {
        steps(copy.height, height).flat_map(move |y| {
            steps(copy.width, width).map(move |x| {
                let size = [width.min(copy.width - x), height.min(copy.height - y), depth.min(copy.depth - z)];
                copy.part([x, y, z], size)
            })
        })
    })
}

/// Returns a copy end for rows that are contiguous in memory.
fn packed(address: u64, part: &BoxCopy) -> End {
    End { kind: HOST, address, pitch: part.width, rows: part.height, ..End::default() }
}

/// Encodes the words of a box copy's message, in which packed data replaces the pageable end of the copy.
fn words(piece: u64, stream: u64, part: &BoxCopy, is_out: bool) -> Vec<u64> {
    let mut copy = *part;
    *(if is_out { &mut copy.to } else { &mut copy.from }) = packed(0, part);
    [&[piece, stream, u64::from(is_out)][..], &copy.to_3d()].concat()
}

fn to_card(connection: &Connection, copy: BoxCopy, order: Order) -> Result<(), i32> {
    let Order { stream, wait } = order;
    let bytes = copy.bytes().ok_or(INVALID_VALUE)?;
    if bytes <= own::MAX_INLINE_BYTES as u64 {
        return thread::with(|thread| {
            connection.check(thread.slot()?)?;
            copies::finish(connection, thread, own::COPY_BOX, wait, |message| {
                message.extend(words(own::INLINE, stream, &copy, false));
                let first = message.len();
                message.resize(first + bytes.div_ceil(8) as usize, 0);
                let room = message.get_mut(first..).unwrap_or_default().as_mut_ptr().addr() as u64;
                pack(&copy, room)
            })
        });
    }
    let is_valid = AtomicBool::new(true);
    let write = |part: &BoxCopy, piece: u64, message: &mut Vec<u64>| {
        message.extend(words(piece, stream, part, false));
    };
    let fill = |part: &BoxCopy, memory: u64| {
        is_valid.fetch_and(pack(part, memory).is_ok(), Ordering::Relaxed);
    };
    let sending = Sending { op: own::COPY_BOX, bytes, wait };
    thread::with(|thread| copies::send(connection, thread, sending, parts(copy, PIECE_BYTES), write, fill))?;
    if is_valid.into_inner() { Ok(()) } else { Err(INVALID_VALUE) }
}

/// Copies the rows of a part contiguously to `address`.
fn pack(part: &BoxCopy, address: u64) -> Result<(), i32> {
    let copy = BoxCopy { to: packed(address, part), ..*part };
    // SAFETY: the program's copy reads these rows, and the buffer has space for them.
    for_each_row(&copy, |row| unsafe {
        std::ptr::copy_nonoverlapping(row.from as *const u8, row.to as *mut u8, row.bytes)
    })
}

fn from_card(connection: &Connection, copy: BoxCopy, stream: u64) -> Result<(), i32> {
    let bytes = copy.bytes().ok_or(INVALID_VALUE)?;
    let is_valid = AtomicBool::new(true);
    let write = |part: &BoxCopy, piece: u64, message: &mut Vec<u64>| {
        message.extend(words(piece, stream, part, true));
    };
    let take = |part: &BoxCopy, memory: u64| {
        let copy = BoxCopy { from: packed(memory, part), ..*part };
        // SAFETY: the worker has filled the staging buffer, which only this call uses. The destination belongs to the
        // program.
        let result = for_each_row(&copy, |row| unsafe {
            std::ptr::copy_nonoverlapping(row.from as *const u8, row.to as *mut u8, row.bytes)
        });
        is_valid.fetch_and(result.is_ok(), Ordering::Relaxed);
    };
    let parts = parts(copy, PIECE_BYTES);
    thread::with(|thread| copies::receive(connection, thread, own::COPY_BOX, bytes, parts, write, take))?;
    if is_valid.into_inner() { Ok(()) } else { Err(INVALID_VALUE) }
}

/// Reads a structure from the program's memory.
fn structure<const N: usize>(address: u64) -> Result<[u64; N], i32> {
    if address == 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the program passes a pointer to a structure of this size.
    Ok(unsafe { (address as *const [u64; N]).read_unaligned() })
}

fn in_stream(frame: &Frame, stream: Option<usize>) -> Result<Order, i32> {
    let named = stream.map_or(0, |index| frame.arg(index));
    Ok(Order { stream: resolve_stream(named, frame.per_thread)?, wait: stream.is_none() })
}

fn two(frame: &Frame, form: Form, stream: Option<usize>) -> i32 {
    code(structure::<WORDS_2D>(frame.arg(0)).and_then(|words| {
        let order = in_stream(frame, stream)?;
        perform(BoxCopy::from_2d(&words), form, order)
    }))
}

fn copy_2d(frame: &Frame) -> i32 {
    two(frame, Form::TwoDimensions, None)
}

fn copy_2d_unaligned(frame: &Frame) -> i32 {
    two(frame, Form::Unaligned, None)
}

fn copy_2d_async(frame: &Frame) -> i32 {
    two(frame, Form::TwoDimensions, Some(1))
}

fn three(frame: &Frame, stream: Option<usize>) -> i32 {
    code(structure::<WORDS_3D>(frame.arg(0)).and_then(|words| {
        let order = in_stream(frame, stream)?;
        perform(BoxCopy::from_3d(&words), Form::ThreeDimensions, order)
    }))
}

fn copy_3d(frame: &Frame) -> i32 {
    three(frame, None)
}

fn copy_3d_async(frame: &Frame) -> i32 {
    three(frame, Some(1))
}

/// Creates a copy end in a one-row array, at a byte offset.
fn in_array(array: u64, x: u64) -> End {
    End { kind: ARRAY, array, x, ..End::default() }
}

/// Creates a copy end in linear memory.
fn in_memory(address: u64) -> End {
    End { kind: UNIFIED, address, ..End::default() }
}

/// Copies a row. `bytes` is the index of the argument with the row's size.
fn row(frame: &Frame, from: End, to: End, bytes: usize, stream: Option<usize>) -> i32 {
    let copy = BoxCopy { from, to, width: frame.arg(bytes), height: 1, depth: 1 };
    code(in_stream(frame, stream).and_then(|order| perform(copy, Form::ThreeDimensions, order)))
}

fn array_to_array(frame: &Frame) -> i32 {
    row(frame, in_array(frame.arg(2), frame.arg(3)), in_array(frame.arg(0), frame.arg(1)), 4, None)
}

fn array_to_card(frame: &Frame) -> i32 {
    row(frame, in_array(frame.arg(1), frame.arg(2)), in_memory(frame.arg(0)), 3, None)
}

fn array_to_host(frame: &Frame) -> i32 {
    row(frame, in_array(frame.arg(1), frame.arg(2)), in_memory(frame.arg(0)), 3, None)
}

fn array_to_host_async(frame: &Frame) -> i32 {
    row(frame, in_array(frame.arg(1), frame.arg(2)), in_memory(frame.arg(0)), 3, Some(4))
}

fn card_to_array(frame: &Frame) -> i32 {
    row(frame, in_memory(frame.arg(2)), in_array(frame.arg(0), frame.arg(1)), 3, None)
}

fn host_to_array(frame: &Frame) -> i32 {
    row(frame, in_memory(frame.arg(2)), in_array(frame.arg(0), frame.arg(1)), 3, None)
}

fn host_to_array_async(frame: &Frame) -> i32 {
    row(frame, in_memory(frame.arg(2)), in_array(frame.arg(0), frame.arg(1)), 3, Some(4))
}

/// Returns true if a copy node accesses only memory that the card can access at each launch.
pub fn is_reachable(words: &[u64; WORDS_3D]) -> Result<bool, i32> {
    let copy = BoxCopy::from_3d(words).spread().ok_or(INVALID_VALUE)?;
    let places = [place_of(&copy, copy.from)?, place_of(&copy, copy.to)?];
    Ok(places.iter().all(|place| *place != Some(Place::Pageable)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(width: u64, height: u64, depth: u64, limit: u64) -> Vec<[u64; 3]> {
        let copy = BoxCopy { width, height, depth, ..BoxCopy::default() };
        let all: Vec<_> = parts(copy, limit).map(|part| [part.width, part.height, part.depth]).collect();
        let bytes: u64 = all.iter().map(|size| size.iter().product::<u64>()).sum();
        assert_eq!(bytes, width * height * depth, "each byte is in one part");
        assert!(all.iter().all(|size| size.iter().product::<u64>() <= limit));
        all
    }

    #[test]
    fn box_is_split_into_layers_rows_or_bytes() {
        assert_eq!(sizes(10, 10, 10, 1000), [[10, 10, 10]]);
        assert_eq!(sizes(10, 10, 5, 250), [[10, 10, 2], [10, 10, 2], [10, 10, 1]]);
        assert_eq!(sizes(10, 10, 1, 40), [[10, 4, 1], [10, 4, 1], [10, 2, 1]]);
        assert_eq!(sizes(10, 2, 1, 7), [[7, 1, 1], [3, 1, 1], [7, 1, 1], [3, 1, 1]]);
    }
}
