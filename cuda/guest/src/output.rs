//! Prints the output of the program's kernels (`printf`), which the worker has collected.
//!
//! UNSAFETY: writes to the C library's standard output.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use cuda_calls::own;
use cuda_ring::{Words as _, control};

use crate::connection::{self, Connection};
use crate::thread::{self, Thread};

unsafe extern "C" {
    static stdout: *mut libc::FILE;
}

/// Prints the output that the worker has at the moment, in the order in which the kernels' output and the program's
/// own output were written.
pub fn print() {
    let Ok(connection) = connection::get() else { return };
    // Output that arrives meanwhile is printed at the next call, so that this loop ends.
    let mut left = connection.control.load(control::OUTPUT);
    while left > 0 {
        let Ok(text) = thread::with(|thread| take(connection, thread)) else { return };
        if text.is_empty() {
            return;
        }
        left = left.saturating_sub(text.len() as u64);
        // SAFETY: the stream exists until the process exits. The text has this length.
        unsafe { libc::fwrite(text.as_ptr().cast(), 1, text.len(), stdout) };
    }
}

/// Takes the next part of the output from the worker. Returns no bytes if another thread has taken everything.
fn take(connection: &'static Connection, thread: &Thread) -> Result<Vec<u8>, i32> {
    let area = connection.area();
    let expected = connection.begin_always(thread, own::OUTPUT, &area, |_| Ok(()))?;
    let answer = connection.end(expected, Some(&area))?;
    if answer.code != 0 {
        return Err(answer.code);
    }
    let mut words = vec![0; answer.words(connection).min(control::AREA_BYTES as usize / 8)];
    answer.read(connection, &mut words);
    let [_, bytes, words @ ..] = &words[..] else { return Ok(Vec::new()) };
    let mut text: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    text.truncate(*bytes as usize);
    Ok(text)
}
