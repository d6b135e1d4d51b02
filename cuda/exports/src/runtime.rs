//! Functions that the runtime calls during its initialization.
//!
//! UNSAFETY: writes through the pointers that the runtime passes.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::cell::UnsafeCell;
use std::ffi::c_void;

use crate::driver;
use crate::result::{INVALID_VALUE, SUCCESS};

/// Zeros in place of the entries that tools would write. Before each call, the runtime reads an entry, and calls a tool
/// if the entry is not zero.
struct Zeros<const WORDS: usize>(UnsafeCell<[u64; WORDS]>);

// SAFETY: this crate never reads or writes the words. Like NVIDIA's driver, it only passes their address.
unsafe impl<const WORDS: usize> Sync for Zeros<WORDS> {}

/// Size of the first hook buffer, as reported to the runtime. Runtimes read beyond this number of bytes, so it must be
/// the number of entries. Eight bytes per entry suffice.
const HOOKS_SIZE: usize = 1024;
/// Size of the second hook buffer, as reported to the runtime.
const FURTHER_HOOKS_SIZE: usize = 14;

static HOOKS: Zeros<HOOKS_SIZE> = Zeros(UnsafeCell::new([0; HOOKS_SIZE]));
static FURTHER_HOOKS: Zeros<FURTHER_HOOKS_SIZE> = Zeros(UnsafeCell::new([0; FURTHER_HOOKS_SIZE]));

/// Slot 2 of the hooks: the buffer for tools' callbacks before and after calls. The buffer always contains zeros.
///
/// # Safety
///
/// Both pointers must be null or writable.
pub unsafe extern "C" fn hooks(to: *mut *mut c_void, bytes: *mut usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { buffer(to, bytes, HOOKS.0.get().cast(), HOOKS_SIZE) }
}

/// Slot 6 of the hooks: another buffer for tools' callbacks.
///
/// # Safety
///
/// Same as for [`hooks`].
pub unsafe extern "C" fn further_hooks(to: *mut *mut c_void, bytes: *mut usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { buffer(to, bytes, FURTHER_HOOKS.0.get().cast(), FURTHER_HOOKS_SIZE) }
}

/// Stores the address and the size of a buffer.
///
/// # Safety
///
/// Same as for [`hooks`].
unsafe fn buffer(to: *mut *mut c_void, bytes: *mut usize, buffer: *mut c_void, size: usize) {
    if to.is_null() || bytes.is_null() {
        return;
    }
    // SAFETY: neither pointer is null, so the caller guarantees that both are writable.
    unsafe {
        *to = buffer;
        *bytes = size;
    }
}

/// Slot 2 of the runtime's table: the handle of a device's primary context.
///
/// # Safety
///
/// `to` must be null or writable.
pub unsafe extern "C" fn primary_context(to: *mut u64, device: i32) -> i32 {
    // SAFETY: guaranteed by the caller.
    unsafe { put(to, driver().and_then(|driver| driver.primary_context(device))) }
}

/// Slot 6 of the runtime's table: loads a module, like `cuModuleLoadData`. The CUDA 11 runtime passes zeros for the
/// other arguments. Other values are rejected, because their meaning is unknown.
///
/// # Safety
///
/// `to` must be null or writable. `image` must be null, a fat binary, or the wrapper of a fat binary.
pub unsafe extern "C" fn load_module(to: *mut u64, image: *const c_void, a: u64, b: u64, c: u32) -> i32 {
    if (a, b, c) != (0, 0, 0) || image.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { put(to, driver().and_then(|driver| driver.load_module(image))) }
}

/// Slot 1 of the runtime's table: loads a module for older runtimes. It does not return a result code, and stores null
/// if the image cannot be loaded.
///
/// # Safety
///
/// Same as for [`load_module`].
pub unsafe extern "C" fn load_module_silently(to: *mut u64, image: *const c_void) {
    if to.is_null() {
        return;
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        *to = 0;
        load_module(to, image, 0, 0, 0);
    }
}

/// Slot 7 of the runtime's table: called when the runtime shuts down. Does nothing.
pub extern "C" fn end(_: usize) -> i32 {
    SUCCESS
}

/// Slot 12 of the runtime's table: loads the compilers. Does nothing, because the worker's driver has its own compilers
/// and loads them on demand.
pub extern "C" fn load_compilers() -> i32 {
    SUCCESS
}

/// Slot 2 of the tools' table: stores the calling thread's current context, or 0 if the thread has none.
///
/// # Safety
///
/// `to` must be null or writable.
pub unsafe extern "C" fn current_context(to: *mut u64) -> i32 {
    let context = driver().and_then(|driver| driver.ready().map(|()| driver.current_context().unwrap_or(0)));
    // SAFETY: guaranteed by the caller.
    unsafe { put(to, context) }
}

/// Slot 4 of the context ID table: stores the result of `cuCtxGetId`, or 0 for a null context. cuBLASLt calls this
/// function before each matrix product.
///
/// # Safety
///
/// `to` must be null or writable.
pub unsafe extern "C" fn context_id(context: u64, to: *mut u64) -> i32 {
    let id = driver().and_then(|driver| if context == 0 { Ok(0) } else { driver.context_id(context) });
    // SAFETY: guaranteed by the caller.
    unsafe { put(to, id) }
}

/// Slot 2 of the launch checks: reports that no check is active.
///
/// # Safety
///
/// `to` must be null or writable.
pub unsafe extern "C" fn active_checks(_context: u64, to: *mut u32, _: *mut *mut c_void) -> i32 {
    // SAFETY: guaranteed by the caller.
    unsafe { put(to, Ok(0)) }
}

/// Slot 3 of the launch checks: reports that the driver does not need any checks.
pub extern "C" fn needed_checks() -> i32 {
    SUCCESS
}

/// Writes a value and returns success, or returns an error.
///
/// # Safety
///
/// `to` must be null or writable.
pub unsafe fn put<T>(to: *mut T, value: Result<T, i32>) -> i32 {
    match value {
        _ if to.is_null() => INVALID_VALUE,
        Ok(value) => {
            // SAFETY: `to` is not null, so the caller guarantees that it is writable.
            unsafe { to.write(value) };
            SUCCESS
        }
        Err(error) => error,
    }
}
