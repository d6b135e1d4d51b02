//! Properties of devices, contexts, streams and errors.
//!
//! UNSAFETY: reads and writes through the program's pointers, like the real driver.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of the driver API")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "see UNSAFETY; the promise is the caller's everywhere")]

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int};

use crate::api::{any, api, context, initialised, named, put};
use crate::card::Card;
use crate::current::{CONTEXT, CURRENT, current_device, device_of};
use crate::result::*;
use crate::work::{self, Op};

thread_local! {
    /// Contexts below the current context on the stack.
    static STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Names and descriptions of result codes.
const RESULTS: [(i32, &CStr, &CStr); 10] = [
    (SUCCESS, c"CUDA_SUCCESS", c"no error"),
    (INVALID_VALUE, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (OUT_OF_MEMORY, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (NOT_INITIALIZED, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (INVALID_DEVICE, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (INVALID_CONTEXT, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (INVALID_HANDLE, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (NOT_FOUND, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (NOT_READY, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (NOT_SUPPORTED, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
];

/// Returns the value of a `CUdevice_attribute`: that of an H100 if programs depend on it, and otherwise 0.
fn attribute(which: c_int, card: &Card) -> c_int {
    match which {
        // Maximum number of threads per block, and maximum block dimensions.
        1..=3 => 1024,
        4 => 64,
        // Maximum grid dimensions.
        5 => i32::MAX,
        6 | 7 => 65_535,
        // Shared memory per block, constant memory, warp size, and registers.
        8 => 49_152,
        9 => 65_536,
        10 => 32,
        12 => 65_536,
        // Number of multiprocessors and of threads per multiprocessor.
        16 => 132,
        39 => 2048,
        // PCI bus number.
        33 => card.number() as c_int + 1,
        // Concurrent kernels, unified addressing, stream priorities, the major compute capability, and the maximum
        // shared memory per multiprocessor and (opt-in) per block.
        31 | 41 | 78 => 1,
        75 => 9,
        81 => 233_472,
        97 => 232_448,
        // Virtual memory management and memory pools.
        102 | 103 | 115 => 1,
        _ => 0,
    }
}

api! {
    any cuGetErrorName(result: c_int, text: *mut *const c_char) { describe(result, text, |(_, name, _)| name) }
    any cuGetErrorString(result: c_int, text: *mut *const c_char) { describe(result, text, |(.., text)| text) }

    initialised cuDeviceGetAttribute(value: *mut c_int, which: c_int, device: c_int) {
        put(value, named(device).map(|card| attribute(which, card)))
    }
    initialised cuDeviceGetDefaultMemPool(pool: *mut u64, device: c_int) {
        put(pool, named(device).map(|_| crate::further::POOL))
    }
    initialised cuDevicePrimaryCtxGetState(device: c_int, flags: *mut u32, is_active: *mut c_int) {
        if named(device).is_err() {
            return INVALID_DEVICE;
        }
        put(flags, Ok(0));
        put(is_active, Ok(1))
    }
    initialised cuDevicePrimaryCtxSetFlags_v2(device: c_int, _flags: u32) {
        named(device).map_or(INVALID_DEVICE, |_| SUCCESS)
    }
    // NVIDIA's runtime looks up both versions of each of these functions.
    initialised cuDevicePrimaryCtxRelease(device: c_int) { named(device).map_or(INVALID_DEVICE, |_| SUCCESS) }
    initialised cuDevicePrimaryCtxReset(device: c_int) { reset(device) }
    initialised cuDevicePrimaryCtxReset_v2(device: c_int) { reset(device) }
    initialised cuCtxPushCurrent_v2(context: u64) {
        if device_of(context).is_none() {
            return INVALID_CONTEXT;
        }
        STACK.with_borrow_mut(|stack| stack.push(CURRENT.replace(context)));
        SUCCESS
    }
    context cuCtxPopCurrent_v2(to: *mut u64) {
        let below = STACK.with_borrow_mut(Vec::pop).unwrap_or(0);
        let popped = CURRENT.replace(below);
        if !to.is_null() {
            *to = popped;
        }
        SUCCESS
    }
    initialised cuCtxGetDevice_v2(device: *mut c_int, of: u64) {
        let device_of_named = if of == 0 { device_of(CURRENT.get()) } else { device_of(of) };
        put(device, device_of_named.ok_or(INVALID_CONTEXT))
    }
    initialised cuCtxSynchronize_v2(_of: u64) { work::finish_all() }
    context cuCtxGetFlags(flags: *mut u32) { put(flags, Ok(0)) }
    initialised cuCtxGetId(of: u64, id: *mut u64) {
        let named = if of == 0 { CURRENT.get() } else { of };
        put(id, device_of(named).map(|_| named - CONTEXT + 1).ok_or(INVALID_CONTEXT))
    }
    context cuCtxGetApiVersion(_of: u64, version: *mut u32) { put(version, Ok(3020)) }
    context cuCtxGetLimit(bytes: *mut usize, limit: c_int) {
        let default = match limit {
            0 => Ok(1024),
            1 => Ok(1 << 20),
            2 => Ok(8 << 20),
            _ => Err(INVALID_VALUE),
        };
        put(bytes, default)
    }
    context cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        put(least, Ok(0));
        put(greatest, Ok(-5))
    }
    context cuStreamCreateWithPriority(stream: *mut u64, flags: u32, _priority: c_int) {
        put(stream, Ok(work::create(flags & 1 == 0)))
    }
    context cuStreamGetPriority(_stream: u64, priority: *mut c_int) { put(priority, Ok(0)) }
    context cuStreamGetFlags(_stream: u64, flags: *mut u32) { put(flags, Ok(0)) }
    context cuStreamGetDevice(_stream: u64, device: *mut c_int) { put(device, Ok(current_device())) }
    context cuEventRecordWithFlags(event: u64, stream: u64, _flags: u32) { work::record(event, stream) }
    context cuEventElapsedTime_v2(milliseconds: *mut f32, from: u64, to: u64) {
        put(milliseconds, work::elapsed(from, to))
    }

    context cuMemcpy(to: u64, from: u64, bytes: usize) { work::synchronous(Op::Copy(to, from, bytes as u64)) }
    context cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) { copy(to, from, bytes, stream) }
    context cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) { copy(to, from, bytes, stream) }
    context cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) { copy(to, from, bytes, stream) }
    context cuGraphInstantiate_v2(
        made: *mut u64, graph: u64, _node: *mut u64, _log: *mut c_char, _bytes: usize
    ) { put(made, work::instantiate(graph)) }
}

/// Drops the values that libraries have stored for a device's primary context. The context's memory is freed only when
/// the process exits.
fn reset(device: c_int) -> i32 {
    if named(device).is_err() {
        return INVALID_DEVICE;
    }
    cuda_exports::forget_context(CONTEXT + device as u64);
    crate::output::write();
    SUCCESS
}

/// Submits a copy between any kinds of memory.
fn copy(to: u64, from: u64, bytes: usize, stream: u64) -> i32 {
    work::submit(stream, Op::Copy(to, from, bytes as u64))
}

/// Stores the name or the description of a result code.
unsafe fn describe(
    result: c_int,
    text: *mut *const c_char,
    which: impl Fn(&'static (i32, &'static CStr, &'static CStr)) -> &'static CStr,
) -> c_int {
    let found = RESULTS.iter().find(|(known, ..)| *known == result);
    unsafe { put(text, found.map(|known| which(known).as_ptr()).ok_or(INVALID_VALUE)) }
}
