//! Functions that workers call to register host memory, run host functions in streams, and query streams.
//!
//! UNSAFETY: exports functions and calls functions that the program passes.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of the driver API")]

use std::ffi::{c_int, c_void};
use std::sync::PoisonError;

use crate::api::context;
use crate::registered::REGISTERED;
use crate::result::{INVALID_VALUE, NOT_READY, SUCCESS};
use crate::work::{self, Op};

/// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`.
const ALREADY_REGISTERED: c_int = 712;
/// `CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED`.
const NOT_REGISTERED: c_int = 713;

/// Registers host memory. Kernels can access all memory of the process even without registration.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostRegister_v2(at: *mut c_void, bytes: usize, _flags: u32) -> c_int {
    let at = at as u64;
    if context() != SUCCESS || bytes == 0 {
        return INVALID_VALUE;
    }
    let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    let end = at.saturating_add(bytes as u64);
    if registered.range(..end).next_back().is_some_and(|(start, length)| start + length > at) {
        return ALREADY_REGISTERED;
    }
    registered.insert(at, bytes as u64);
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostUnregister(at: *mut c_void) -> c_int {
    let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    if registered.remove(&(at as u64)).is_some() { SUCCESS } else { NOT_REGISTERED }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamQuery(stream: u64) -> c_int {
    match context() {
        SUCCESS => work::is_done(stream).map_or_else(|error| error, |done| if done { SUCCESS } else { NOT_READY }),
        error => error,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchHostFunc(stream: u64, function: Option<work::HostFunction>, data: *mut c_void) -> c_int {
    match (context(), function) {
        (SUCCESS, Some(function)) => work::submit(stream, Op::Host(function, data as u64)),
        (SUCCESS, None) => INVALID_VALUE,
        (error, _) => error,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamAddCallback(
    stream: u64,
    function: Option<work::Callback>,
    data: *mut c_void,
    flags: u32,
) -> c_int {
    match (context(), function) {
        (SUCCESS, Some(function)) if flags == 0 => work::submit(stream, Op::Callback(function, stream, data as u64)),
        (SUCCESS, _) => INVALID_VALUE,
        (error, _) => error,
    }
}
