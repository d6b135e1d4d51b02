//! Children of the process: every call returns 3, as with NVIDIA's driver.
//!
//! UNSAFETY: registers a function with the C library.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::sync::atomic::{AtomicBool, Ordering};

use crate::connection;

/// This process is a child of one that had a worker. Static: read by each exported function.
static CHILD: AtomicBool = AtomicBool::new(false);

/// Returns true in a child of a process that had a worker.
pub fn is_child() -> bool {
    CHILD.load(Ordering::Relaxed)
}

/// Watches forks from now on.
pub fn watch() {
    // SAFETY: the function stores to an atomic and closes descriptors; the library is never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(forked)) };
}

extern "C" fn forked() {
    CHILD.store(true, Ordering::Relaxed);
    connection::close_in_child();
}
