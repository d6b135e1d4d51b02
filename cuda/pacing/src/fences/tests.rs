//! Tests fences during captures.
//!
//! UNSAFETY: replaces driver functions.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use super::*;
use crate::driver::SUCCESS;

const STREAM: Stream = Stream::made(7);

unsafe extern "C" fn made(event: *mut u64, _: u32) -> i32 {
    // SAFETY: the caller's pointer is valid.
    unsafe { *event = 9 };
    SUCCESS
}

extern "C" fn recorded(_: u64, _: u64) -> i32 {
    SUCCESS
}

unsafe extern "C" fn captures_not(_: u64, status: *mut i32) -> i32 {
    // SAFETY: as above.
    unsafe { *status = 0 };
    SUCCESS
}

#[test]
fn submission_during_open_capture_gets_fence_at_once() {
    use crate::symbols::{REAL, at};
    for (index, function) in [
        (at::cuEventCreate, made as *mut ()),
        (at::cuEventRecord, recorded as *mut ()),
        (at::cuStreamIsCapturing, captures_not as *mut ()),
    ] {
        REAL[index].store(function, Ordering::SeqCst);
    }
    let (captures, fences) = (Captures::default(), Fences::new(0));
    let state = || {
        let pending = fences.lock();
        (pending.noted.len(), pending.fences.len())
    };
    fences.submitted(&captures, STREAM);
    assert_eq!(state(), (1, 0), "no fence without a capture");
    captures.begins();
    fences.before_capture(&captures);
    assert_eq!(state(), (0, 1));
    fences.submitted(&captures, Stream::made(8));
    assert_eq!(state(), (0, 2), "a submission during a capture is fenced immediately");
    captures.begun(1, STREAM, false);
    fences.all_passed();
    assert_eq!(state(), (0, 0));
}
