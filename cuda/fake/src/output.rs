//! Output of kernels. Like NVIDIA's driver, the fake driver stores output and writes it only in certain calls: those
//! that wait for work or launch a kernel, and those that end a context or a module.
//!
//! UNSAFETY: writes to the C library's standard output.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

/// Size of the card's buffer in bytes (the default of `CU_LIMIT_PRINTF_FIFO_SIZE`). Newer output overwrites older one.
const MAX_BYTES: usize = 1 << 20;

/// Output that has not been written. Static, because kernels run on threads without any other state.
static STORED: Mutex<VecDeque<u8>> = Mutex::new(VecDeque::new());

unsafe extern "C" {
    static stdout: *mut libc::FILE;
}

/// Stores `count` lines of a kernel.
pub fn store(value: u64, count: u64) {
    let mut line = String::new();
    let mut stored = STORED.lock().unwrap_or_else(PoisonError::into_inner);
    for number in 0..count {
        line.clear();
        let _ = writeln!(line, "kernel {value}: line {number}");
        stored.extend(line.as_bytes());
        let surplus = stored.len().saturating_sub(MAX_BYTES);
        stored.drain(..surplus);
    }
}

/// Writes the stored output.
pub fn write() {
    let stored = std::mem::take(&mut *STORED.lock().unwrap_or_else(PoisonError::into_inner));
    let (first, second) = stored.as_slices();
    for part in [first, second].into_iter().filter(|part| !part.is_empty()) {
        // SAFETY: the stream exists until the process exits. The part has this length.
        unsafe { libc::fwrite(part.as_ptr().cast(), 1, part.len(), stdout) };
    }
}
