//! Messages on standard error, if enabled.
//!
//! UNSAFETY: writes to a descriptor by number.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::sync::atomic::{AtomicU8, Ordering};

/// Returns true if messages are enabled.
pub fn wanted() -> bool {
    const UNKNOWN: u8 = 2;
    /// 1 if messages are enabled, 0 if not, or `UNKNOWN`. A static variable, because messages may be written before the
    /// shim exists.
    static WANTED: AtomicU8 = AtomicU8::new(UNKNOWN);
    // Do not acquire a lock, because a child forked meanwhile would wait for it forever.
    match WANTED.load(Ordering::Relaxed) {
        UNKNOWN => {
            let wanted = std::env::var_os(cuda_protocol::LOG_VARIABLE).is_some_and(|value| value == "1");
            WANTED.store(u8::from(wanted), Ordering::Relaxed);
            wanted
        }
        known => known == 1,
    }
}

/// Writes a line immediately. Avoids the lock of `eprintln`, which a thread of the parent may have held during a fork.
pub fn write(line: &str) {
    // SAFETY: the buffer is valid. Write errors are ignored.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

/// Writes a line if messages are enabled.
macro_rules! report {
    ($($part:tt)*) => {
        if $crate::log::wanted() {
            $crate::log::write(&format!("gpu-mediator: libcuda: {}\n", format_args!($($part)*)));
        }
    };
}
pub(crate) use report;
