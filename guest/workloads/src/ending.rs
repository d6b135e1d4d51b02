//! Ends continuous work when its time limit expires, or when the host sends SIGTERM.
//!
//! UNSAFETY: installs a signal handler that only stores to an atomic.

#![expect(unsafe_code, reason = "signal")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

static ASKED: AtomicBool = AtomicBool::new(false);

extern "C" fn asked(_signal: libc::c_int) {
    ASKED.store(true, Ordering::Relaxed);
}

/// From now on, records SIGTERM instead of terminating, so that work in progress is still checked.
pub fn take_note() {
    // SAFETY: the handler only stores to an atomic, which is async-signal-safe.
    unsafe { libc::signal(libc::SIGTERM, asked as *const () as libc::sighandler_t) };
}

/// A time limit that SIGTERM ends early.
#[derive(Debug, Clone, Copy)]
pub struct Ending {
    began: Instant,
    duration: Duration,
}

impl Ending {
    /// Creates a limit that expires after `duration`, and notifies the host of the start.
    pub fn after(duration: Duration) -> Self {
        println!("LOOPING");
        Self { began: Instant::now(), duration }
    }

    /// Returns true if the time has expired or the host has sent SIGTERM.
    pub fn is_over(&self) -> bool {
        ASKED.load(Ordering::Relaxed) || self.began.elapsed() >= self.duration
    }

    /// Returns the time since the start.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }
}
