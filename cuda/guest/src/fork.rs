//! Handles forked children. If the parent has called `cuInit`, every CUDA call in a child returns 3, as with NVIDIA's
//! driver. Children of a process that has only used NVML or queried the version may use CUDA, and NVML works in any
//! child. Therefore, a child initially has no worker, and starts one on demand.
//!
//! UNSAFETY: registers a function with the C library.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{connection, devices, thread};

/// Set in a child of a process that had called `cuInit`. Static, because each exported function reads it.
static CHILD: AtomicBool = AtomicBool::new(false);

/// Returns true in a child of a process that had called `cuInit`.
pub fn is_child() -> bool {
    CHILD.load(Ordering::Relaxed)
}

/// Starts handling forks of this process.
pub fn watch() {
    /// Static, because children inherit the registration.
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if WATCHED.swap(true, Ordering::Relaxed) {
        return;
    }
    // SAFETY: the handler only writes atomics and closes descriptors. The library is never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(forked)) };
}

extern "C" fn forked() {
    if devices::ready().is_ok() {
        CHILD.store(true, Ordering::Relaxed);
    }
    connection::leave_in_child();
    thread::leave_in_child();
}
