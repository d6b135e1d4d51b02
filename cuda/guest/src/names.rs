//! Names of functions and kernels. Each name is queried from the worker only once.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Mutex, PoisonError};

use cuda_calls::own::{self, MAX_NAME_BYTES};
use cuda_calls::{Kind, index_of};

use crate::frame::{Frame, Handler};
use crate::result::{INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED};
use crate::{connection, thread};

pub const HANDLERS: &[(&str, Handler)] = &[("cuFuncGetName", function_name), ("cuKernelGetName", kernel_name)];

/// Names, keyed by handle and a flag for library kernels. They must not move, because the program receives their
/// addresses. Static, because exported functions cannot receive state as an argument.
static NAMES: Mutex<Option<HashMap<(u64, bool), CString>>> = Mutex::new(None);

fn function_name(frame: &Frame) -> i32 {
    name(frame, false)
}

fn kernel_name(frame: &Frame) -> i32 {
    name(frame, true)
}

fn name(frame: &Frame, is_kernel: bool) -> i32 {
    let handle = frame.arg(1);
    if frame.arg(0) == 0 {
        return INVALID_VALUE;
    }
    if index_of(Kind::Function, handle).is_none() {
        return INVALID_HANDLE;
    }
    let known = |address: Option<&CString>| address.map(|name| name.as_ptr().addr() as u64);
    let found =
        known(NAMES.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().get(&(handle, is_kernel)));
    if let Some(address) = found {
        return frame.put(0, address);
    }
    match read(handle, is_kernel) {
        Ok(name) => {
            let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
            // If another thread was faster, use its string.
            let name = names.get_or_insert_default().entry((handle, is_kernel)).or_insert(name);
            frame.put(0, name.as_ptr().addr() as u64)
        }
        Err(code) => code,
    }
}

fn read(handle: u64, is_kernel: bool) -> Result<CString, i32> {
    let connection = connection::get()?;
    let area = connection.area();
    thread::with(|thread| {
        let answer = connection.ask(thread, own::FUNCTION_NAME, Some(&area), |message| {
            message.extend([handle, u64::from(is_kernel)]);
        })?;
        if answer.code != 0 {
            return Err(answer.code);
        }
        let mut words = vec![0; answer.words(connection).min(1 + MAX_NAME_BYTES / 8)];
        answer.read(connection, &mut words);
        let (bytes, name) = words.split_first().ok_or(NOT_SUPPORTED)?;
        let mut name: Vec<u8> = name.iter().flat_map(|word| word.to_le_bytes()).collect();
        name.truncate(usize::try_from(*bytes).unwrap_or(usize::MAX));
        CString::new(name).map_err(|_| NOT_SUPPORTED)
    })
}
