//! Driver events, which mark positions in streams.
//!
//! UNSAFETY: records and queries driver events.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use crate::driver::{self, Object, SUCCESS};
use crate::streams::Stream;

/// `CU_EVENT_DISABLE_TIMING`.
pub const UNTIMED: u32 = 2;

/// Handle of an event. It can be sent to other threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(u64);

impl Event {
    /// Returns an event with the given number.
    #[cfg(test)]
    pub const fn of_test(number: u64) -> Self {
        Self(number)
    }

    fn raw(self) -> Object {
        self.0 as Object
    }

    /// Creates an event in this thread's current context.
    pub fn create(flags: u32) -> Option<Self> {
        let mut event = std::ptr::null_mut();
        // SAFETY: the pointer is valid.
        let result = unsafe { driver::event_create(&raw mut event, flags) };
        (result == SUCCESS).then_some(Self(event as u64))
    }

    /// Returns true if the work before the event has completed.
    pub fn done(self) -> bool {
        // SAFETY: the library never destroys its events. All results except "not ready" mean that there is no work to
        // wait for.
        unsafe { driver::event_query(self.raw()) != driver::NOT_READY }
    }

    /// Returns the time between two completed events in ms.
    pub fn since(self, base: Event) -> Option<f64> {
        let mut milliseconds = 0f32;
        // SAFETY: both events belong to this library, have timing enabled, and are complete.
        let result = unsafe { driver::event_elapsed(&raw mut milliseconds, base.raw(), self.raw()) };
        (result == SUCCESS).then(|| f64::from(milliseconds))
    }
}

/// Records an event after the work in a stream. Returns true on success.
pub fn record(event: Event, stream: Stream) -> bool {
    // SAFETY: the event belongs to this library; the program has submitted to the stream and has not destroyed it.
    stream.is_in_reach() && unsafe { driver::event_record(event.raw(), stream.object()) == SUCCESS }
}

/// Runs `work` with `context` current in this thread.
pub fn within<T>(context: u64, work: impl FnOnce() -> T) -> T {
    let before = driver::current_context();
    if before as u64 == context {
        return work();
    }
    // SAFETY: the program has submitted work in this context.
    unsafe { driver::ctx_set_current(context as Object) };
    let result = work();
    // SAFETY: the context was current before.
    unsafe { driver::ctx_set_current(before) };
    result
}
