//! Handles forked children of the process.
//!
//! After `fork`, NVIDIA's driver returns 3 (`CUDA_ERROR_NOT_INITIALIZED`) from each function that needs an initialized
//! driver. This library does the same, regardless of how the program obtained the function. Each exported function, and
//! each function returned by `cuGetProcAddress`, first checks [`PAGE`], which the kernel zeroes in every child,
//! regardless of how the child was created (decision 121). If the kernel does not support this, a `fork` handler zeroes
//! the page. A child whose parent had not initialized the driver is treated like any other process.
//!
//! UNSAFETY: calls `madvise` and `pthread_atfork`.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::descriptors;
use crate::log::report;

/// Size of a page in bytes.
const PAGE_BYTES: usize = 4096;

/// A page whose first word is 1 in the process that filled it, and 0 in its children.
#[repr(C, align(4096))]
pub struct Page {
    filled: AtomicU32,
    _rest: [u8; PAGE_BYTES - size_of::<AtomicU32>()],
}

/// The page that each exported function checks. A static variable, because the stubs refer to its address.
pub static PAGE: Page = Page { filled: AtomicU32::new(0), _rest: [0; _] };

/// Set once this process or its parent has begun to initialize the driver. A static variable, because a child reads it
/// before it acquires any lock.
static INITIALISED: AtomicBool = AtomicBool::new(false);

/// Returns false if this process is a child of a process that had initialized the driver.
pub fn is_own() -> bool {
    let filled = || PAGE.filled.load(Ordering::SeqCst) != 0;
    if filled() {
        return true;
    }
    if INITIALISED.load(Ordering::SeqCst) {
        // Another thread of this process may have filled the page meanwhile.
        return filled();
    }
    watch_forks();
    PAGE.filled.store(1, Ordering::SeqCst);
    true
}

/// Makes the kernel zero the page in children, and registers the `fork` handler.
fn watch_forks() {
    /// Set once the handler is registered. A static variable, because the C library keeps the handler.
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    // SAFETY: the static occupies the whole page, and the call does not change it in this process.
    let emptied = unsafe { libc::madvise((&raw const PAGE).cast_mut().cast(), PAGE_BYTES, libc::MADV_WIPEONFORK) };
    if emptied != 0 {
        report!("children created without fork are not detected: {}", io::Error::last_os_error());
    }
    if !REGISTERED.swap(true, Ordering::SeqCst) {
        // SAFETY: the function only stores to atomics and closes descriptors. The library is never unloaded.
        unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    }
}

extern "C" fn forked() {
    PAGE.filled.store(0, Ordering::SeqCst);
    descriptors::forked();
}

/// Records that the driver is about to be initialized.
pub fn initialises() {
    INITIALISED.store(true, Ordering::SeqCst);
}

/// Records that the initialization has failed, so that children may initialize the driver.
pub fn is_not_initialised() {
    INITIALISED.store(false, Ordering::SeqCst);
}
