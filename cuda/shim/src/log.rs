//! Messages on standard error, if enabled.
//!
//! UNSAFETY: writes to a descriptor by its number.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::sync::atomic::{AtomicU8, Ordering};

/// Returns true if messages are enabled.
pub fn wanted() -> bool {
    const UNKNOWN: u8 = 2;
    /// This value is static, because threads write messages without a reference to the shim, and before it exists.
    static WANTED: AtomicU8 = AtomicU8::new(UNKNOWN);
    // Take no lock, because a child that is forked in the meantime would wait for it.
    match WANTED.load(Ordering::Relaxed) {
        UNKNOWN => {
            let wanted = std::env::var_os(cuda_protocol::LOG_VARIABLE).is_some_and(|value| value == "1");
            WANTED.store(u8::from(wanted), Ordering::Relaxed);
            wanted
        }
        known => known == 1,
    }
}

/// Writes a line immediately and without the lock of `eprintln`, which a thread of the parent may hold.
pub fn write(line: &str) {
    // SAFETY: the bytes are valid. A line that cannot be written is lost.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

/// Writes one line if messages are enabled.
macro_rules! report {
    ($($part:tt)*) => {
        if $crate::log::wanted() {
            $crate::log::write(&format!("gpu-mediator: libcuda: {}\n", format_args!($($part)*)));
        }
    };
}
pub(crate) use report;
