//! Children of the process: after `cuInit`, every call of CUDA returns 3 in them, as with NVIDIA's driver. A child of a
//! process that used only NVML, or asked for the version, may use CUDA; and NVML works in each child. So a child has no
//! worker at first, and starts a worker on demand.
//!
//! UNSAFETY: registers a function with the C library.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{connection, devices, thread};

/// Set if this process is a child of a process that had called `cuInit`. Static: read by each exported function.
static CHILD: AtomicBool = AtomicBool::new(false);

/// Returns true in a child of a process that had called `cuInit`.
pub fn is_child() -> bool {
    CHILD.load(Ordering::Relaxed)
}

/// Watches forks from now on.
pub fn watch() {
    /// Static: children inherit the registration.
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if WATCHED.swap(true, Ordering::Relaxed) {
        return;
    }
    // SAFETY: the function stores to an atomic and closes descriptors; the library is never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(forked)) };
}

extern "C" fn forked() {
    if devices::ready().is_ok() {
        CHILD.store(true, Ordering::Relaxed);
    }
    connection::leave_in_child();
    thread::leave_in_child();
}
