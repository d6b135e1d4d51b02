//! Run-time linking. Inputs are sent like module images, and the result is read when the link completes.
//!
//! UNSAFETY: reads inputs and stores results through the program's pointers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::HashMap;
use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt as _;
use std::sync::{Mutex, PoisonError};

use cuda_calls::own;
use cuda_ring::control;

use crate::call::{code, index, invoke};
use crate::code::{options, with_bytes};
use crate::connection;
use crate::frame::{Frame, Handler};
use crate::result::{FILE_NOT_FOUND, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS};
use crate::thread;

pub const HANDLERS: &[(&str, Handler)] = &[
    ("cuLinkCreate", create),
    ("cuLinkCreate_v2", create),
    ("cuLinkAddData", add_data),
    ("cuLinkAddData_v2", add_data),
    ("cuLinkAddFile", add_file),
    ("cuLinkAddFile_v2", add_file),
    ("cuLinkComplete", complete),
    ("cuLinkDestroy", destroy),
];

/// Results, keyed by link. They must not move, because the program receives their addresses. Static, because exported
/// functions cannot receive state as an argument.
static RESULTS: Mutex<Option<HashMap<u64, Box<[u64]>>>> = Mutex::new(None);

fn create(frame: &Frame) -> i32 {
    // SAFETY: the program passes valid arguments.
    let options = unsafe { options(frame.int(0), frame.arg(1), frame.arg(2)) };
    code(options.and_then(|options| {
        let [count, kinds, values] = options.arguments();
        invoke(index!("cuLinkCreate_v2+"), &[count, kinds, values, frame.arg(3)])
    }))
}

/// Adds an input. `name` is the address of a string, or 0.
fn add(frame: &Frame, data: &[u8], name: u64, first_option: usize) -> Result<(), i32> {
    if data.is_empty() {
        return Err(INVALID_VALUE);
    }
    let (count, kinds, values) = (frame.int(first_option), frame.arg(first_option + 1), frame.arg(first_option + 2));
    // SAFETY: the program passes valid arguments.
    let options = unsafe { options(count, kinds, values)? };
    let [count, kinds, values] = options.arguments();
    let name = if name == 0 { c"".as_ptr().addr() as u64 } else { name };
    let (link, kind) = (frame.arg(0), u64::from(frame.int(1)));
    with_bytes(data, || invoke(index!("cuLinkAddData_v2+"), &[link, kind, 1, 0, name, count, kinds, values]))
}

fn add_data(frame: &Frame) -> i32 {
    if frame.arg(2) == 0 || frame.arg(3) > own::MAX_IMAGE_BYTES as u64 {
        return INVALID_VALUE;
    }
    // SAFETY: the program passes a buffer of this size.
    let data = unsafe { std::slice::from_raw_parts(frame.arg(2) as *const u8, frame.arg(3) as usize) };
    code(add(frame, data, frame.arg(4), 5))
}

fn add_file(frame: &Frame) -> i32 {
    if frame.arg(2) == 0 {
        return INVALID_VALUE;
    }
    // SAFETY: the program passes a valid path.
    let path = unsafe { CStr::from_ptr(frame.arg(2) as *const c_char) };
    match std::fs::read(OsStr::from_bytes(path.to_bytes())) {
        Ok(data) => code(add(frame, &data, frame.arg(2), 3)),
        Err(_) => FILE_NOT_FOUND,
    }
}

/// Completes a link and reads its result. Only one thread at a time can complete a link.
fn read(link: u64) -> Result<(Box<[u64]>, u64), i32> {
    let connection = connection::get()?;
    let area = connection.area();
    thread::with(|thread| {
        let answer = connection.ask(thread, own::LINK_COMPLETE, None, |message| message.push(link))?;
        if answer.code != 0 {
            return Err(answer.code);
        }
        let bytes = answer.inline(connection, 1).first().copied().unwrap_or_default();
        if bytes > own::MAX_IMAGE_BYTES as u64 {
            return Err(OUT_OF_MEMORY);
        }
        let mut words = vec![0u64; bytes.div_ceil(8) as usize].into_boxed_slice();
        let mut first = 0;
        for part in words.chunks_mut(control::AREA_BYTES as usize / 8) {
            let answer =
                connection.ask(thread, own::LINK_READ, Some(&area), |message| message.extend([link, first]))?;
            if answer.code != 0 {
                return Err(answer.code);
            }
            answer.read(connection, part);
            first += 8 * part.len() as u64;
        }
        Ok((words, bytes))
    })
}

fn complete(frame: &Frame) -> i32 {
    if frame.arg(1) == 0 {
        return INVALID_VALUE;
    }
    let mut results = RESULTS.lock().unwrap_or_else(PoisonError::into_inner);
    match read(frame.arg(0)) {
        Ok((words, bytes)) => {
            let address = words.as_ptr().addr() as u64;
            results.get_or_insert_default().insert(frame.arg(0), words);
            frame.put_optional(2, bytes);
            frame.put(1, address)
        }
        Err(error) => error,
    }
}

fn destroy(frame: &Frame) -> i32 {
    let result = code(invoke(index!("cuLinkDestroy+"), &[frame.arg(0)]));
    if result == SUCCESS
        && let Some(results) = RESULTS.lock().unwrap_or_else(PoisonError::into_inner).as_mut()
    {
        results.remove(&frame.arg(0));
    }
    result
}
