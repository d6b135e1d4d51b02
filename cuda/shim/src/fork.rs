//! Children of the process.
//!
//! After `fork` NVIDIA's driver answers 3 (`CUDA_ERROR_NOT_INITIALIZED`) to everything that needs an initialised
//! driver, and so does this library, regardless of how a function was found. Each exported function and each function
//! that `cuGetProcAddress` answers first checks [`PAGE`], which the kernel clears in every child, however it was
//! created (decision 121). If the kernel does not support this, `fork` empties the page. A child whose parent had not
//! initialised the driver is a process like any other.
//!
//! UNSAFETY: calls the C library for memory and for `fork`.
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

/// The page that each exported function checks. Static: the stubs name its address, and the kernel clears exactly this
/// page.
pub static PAGE: Page = Page { filled: AtomicU32::new(0), _rest: [0; _] };

/// Set once the driver has been initialised, in this process or its parent. Static: a child reads it before taking any
/// lock.
static INITIALISED: AtomicBool = AtomicBool::new(false);

/// Returns true unless this process is a child of a process that had initialised the driver.
pub fn is_own() -> bool {
    let filled = || PAGE.filled.load(Ordering::SeqCst) != 0;
    if filled() {
        return true;
    }
    if INITIALISED.load(Ordering::SeqCst) {
        // Another thread of this process may have filled the page in the meantime, as its first step.
        return filled();
    }
    watch_forks();
    PAGE.filled.store(1, Ordering::SeqCst);
    true
}

/// Makes the kernel clear the page in children.
fn watch_forks() {
    /// Static: the C library keeps the handler for all further children, so it is registered once.
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    // SAFETY: the page is a whole static; the kernel does not change it in this process.
    let emptied = unsafe { libc::madvise((&raw const PAGE).cast_mut().cast(), PAGE_BYTES, libc::MADV_WIPEONFORK) };
    if emptied != 0 {
        report!("children that are made past fork are not noticed: {}", io::Error::last_os_error());
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

/// Records that the driver is about to be initialised.
pub fn initialises() {
    INITIALISED.store(true, Ordering::SeqCst);
}

/// Records that the driver could not be initialised: children may try.
pub fn is_not_initialised() {
    INITIALISED.store(false, Ordering::SeqCst);
}
