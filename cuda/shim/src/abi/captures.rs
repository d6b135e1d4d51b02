//! Driver functions that begin or end captures, or destroy streams.
//!
//! UNSAFETY: forwards calls.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};

use super::shim;
use crate::driver::{self, Object, SUCCESS};
use crate::streams::Stream;
use crate::symbols::at;

/// Begins a capture in `stream`. First waits for drains that synchronize contexts, because synchronizing would
/// invalidate the capture.
fn begin(stream: Stream, call: impl FnOnce() -> c_int) -> c_int {
    let shim = shim();
    let card = shim.of_stream(stream);
    let stripe = card.pass();
    // Do this first, so that every later submission is followed by a fence.
    shim.captures.begins();
    // While a capture is open, drains of all cards rely on fences.
    shim.cards().for_each(|card| card.pacing.capture_begins(&shim.captures));
    let result = call();
    shim.captures.begun(driver::current_context() as u64, stream, result == SUCCESS);
    card.gate.done(stripe);
    result
}

fn end(stream: Stream, call: impl FnOnce() -> c_int) -> c_int {
    let result = call();
    // The capture may have ended even if the call returns an error.
    let captures = &shim().captures;
    if captures.any() && !stream.is_capturing() {
        captures.stream_ended(stream);
    }
    result
}

macro_rules! begin {
    ($($name:ident, $per_thread:literal, $real:ident($($arg:ident: $ty:ty),*);)*) => { $(
        unsafe extern "C" fn $name(stream: Object, $($arg: $ty),*) -> c_int {
            // SAFETY: guaranteed by the caller.
            begin(Stream::named(stream as u64, $per_thread), || unsafe { driver::$real(stream, $($arg),*) })
        }
    )* };
}

begin! {
    begin_first, false, stream_begin_capture_first();
    begin_first_per_thread, true, stream_begin_capture_first_per_thread();
    begin_capture, false, stream_begin_capture(mode: c_int);
    begin_capture_per_thread, true, stream_begin_capture_per_thread(mode: c_int);
    begin_to_graph, false, stream_begin_capture_to_graph(
        graph: Object, nodes: *const c_void, data: *const c_void, count: usize, mode: c_int);
    begin_to_graph_per_thread, true, stream_begin_capture_to_graph_per_thread(
        graph: Object, nodes: *const c_void, data: *const c_void, count: usize, mode: c_int);
    begin_again, false, stream_begin_recapture_to_graph(
        mode: c_int, graph: Object, callback: *const c_void, data: *const c_void);
    begin_again_per_thread, true, stream_begin_recapture_to_graph_per_thread(
        mode: c_int, graph: Object, callback: *const c_void, data: *const c_void);
    begin_to_cig, false, stream_begin_capture_to_cig(parameters: *const c_void);
    begin_to_cig_per_thread, true, stream_begin_capture_to_cig_per_thread(parameters: *const c_void);
}

unsafe extern "C" fn end_capture(stream: Object, graph: *mut Object) -> c_int {
    // SAFETY: guaranteed by the caller.
    end(Stream::named(stream as u64, false), || unsafe { driver::stream_end_capture(stream, graph) })
}

unsafe extern "C" fn end_capture_per_thread(stream: Object, graph: *mut Object) -> c_int {
    // SAFETY: as above.
    end(Stream::named(stream as u64, true), || unsafe { driver::stream_end_capture_per_thread(stream, graph) })
}

unsafe extern "C" fn end_to_cig(stream: Object) -> c_int {
    // SAFETY: as above.
    end(Stream::named(stream as u64, false), || unsafe { driver::stream_end_capture_to_cig(stream) })
}

unsafe extern "C" fn end_to_cig_per_thread(stream: Object) -> c_int {
    // SAFETY: as above.
    end(Stream::named(stream as u64, true), || unsafe { driver::stream_end_capture_to_cig_per_thread(stream) })
}

/// Destroys a stream. Its pending work still completes, but the stream's capture ends.
fn destroy(stream: Object, call: impl FnOnce() -> c_int) -> c_int {
    let shim = shim();
    let named = Stream::named(stream as u64, false);
    let card = shim.of_stream(named);
    card.pacing.stream_ends(&shim.captures, named.handle);
    shim.memory(card).stream_ends(stream as u64);
    let result = call();
    shim.stream_ends(Some(named.handle));
    if result == SUCCESS && shim.captures.any() {
        shim.captures.stream_ended(named);
    }
    result
}

unsafe extern "C" fn stream_destroy(stream: Object) -> c_int {
    // SAFETY: guaranteed by the caller.
    destroy(stream, || unsafe { driver::stream_destroy(stream) })
}

unsafe extern "C" fn stream_destroy_first(stream: Object) -> c_int {
    // SAFETY: as above.
    destroy(stream, || unsafe { driver::stream_destroy_first(stream) })
}

pub fn ours(index: usize) -> Option<*mut ()> {
    Some(match index {
        at::cuStreamBeginCapture => begin_first as *mut (),
        at::cuStreamBeginCapture_ptsz => begin_first_per_thread as *mut (),
        at::cuStreamBeginCapture_v2 => begin_capture as *mut (),
        at::cuStreamBeginCapture_v2_ptsz => begin_capture_per_thread as *mut (),
        at::cuStreamBeginCaptureToGraph => begin_to_graph as *mut (),
        at::cuStreamBeginCaptureToGraph_ptsz => begin_to_graph_per_thread as *mut (),
        at::cuStreamBeginRecaptureToGraph => begin_again as *mut (),
        at::cuStreamBeginRecaptureToGraph_ptsz => begin_again_per_thread as *mut (),
        at::cuStreamBeginCaptureToCig => begin_to_cig as *mut (),
        at::cuStreamBeginCaptureToCig_ptsz => begin_to_cig_per_thread as *mut (),
        at::cuStreamEndCapture => end_capture as *mut (),
        at::cuStreamEndCapture_ptsz => end_capture_per_thread as *mut (),
        at::cuStreamEndCaptureToCig => end_to_cig as *mut (),
        at::cuStreamEndCaptureToCig_ptsz => end_to_cig_per_thread as *mut (),
        at::cuStreamDestroy_v2 => stream_destroy as *mut (),
        at::cuStreamDestroy => stream_destroy_first as *mut (),
        _ => return None,
    })
}
