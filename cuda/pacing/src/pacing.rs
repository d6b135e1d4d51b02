//! Tracks the program's measured and unmeasured work in flight, and its completion.

use std::time::{Duration, Instant};

use crate::captures::Captures;
use crate::contexts::Contexts;
use crate::fences::Fences;
use crate::gate::Gate;
use crate::pace::{Left, RunAhead};
use crate::solo_backlog::SoloBacklog;
use crate::streams::Stream;

/// Limits on the program's work in flight.
#[derive(Debug)]
pub struct Pacing {
    /// Limits the work in flight while other tenants have work.
    pub run_ahead: RunAhead,
    /// Limits the work in flight while the program is alone.
    pub solo_backlog: SoloBacklog,
    /// Detects the completion of unmeasured work during captures.
    pub fences: Fences,
}

impl Pacing {
    /// Creates the limits for the program's card number `card`. No work of the program may be in flight there.
    pub fn new(card: usize) -> Self {
        Self { run_ahead: RunAhead::default(), solo_backlog: SoloBacklog::new(), fences: Fences::new(card) }
    }

    /// Waits before a submission until the work in flight is within the limit or the gate is closed. Returns true if
    /// work is measured.
    #[inline]
    pub fn wait(&self, captures: &Captures, gate: &Gate, stream: impl FnOnce() -> Stream) -> bool {
        let measured = self.run_ahead.is_active();
        if measured {
            self.run_ahead.wait(captures, gate, stream());
        } else {
            self.solo_backlog.wait(captures, gate, &self.run_ahead, stream);
        }
        measured
    }

    /// Records an unmeasured submission and its stream, if known.
    #[inline]
    pub fn submitted_unmeasured(&self, captures: &Captures, stream: Stream, is_known: bool) {
        if is_known {
            self.fences.submitted(captures, stream);
        } else {
            self.fences.submitted_anywhere();
        }
        self.solo_backlog.submitted(captures, || stream);
    }

    /// Records a measured submission to an unknown stream.
    pub fn submitted_anywhere(&self) {
        self.run_ahead.unmeasured();
        self.fences.submitted_anywhere();
    }

    /// Prepares for a capture, which must already be counted. A fence follows each later submission.
    pub fn capture_begins(&self, captures: &Captures) {
        self.run_ahead.finish_groups(captures);
        self.fences.before_capture(captures);
    }

    /// Removes a stream before it is destroyed.
    pub fn stream_ends(&self, captures: &Captures, handle: u64) {
        self.run_ahead.forget(captures, handle);
        self.fences.stream_ends(captures, handle);
    }

    /// Waits until no work is in flight or until the deadline, and returns false in the latter case. The gate must be
    /// closed.
    pub fn drain(&self, captures: &Captures, contexts: &Contexts, deadline: Option<Instant>) -> bool {
        while self.run_ahead.left(captures) != Left::Nothing {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return false;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
        // A context with a capturing stream must not be synchronized.
        while !(!captures.any() && self.synchronize(contexts) || self.fences.have_passed(captures)) {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return false;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        self.run_ahead.all_measured();
        true
    }

    fn synchronize(&self, contexts: &Contexts) -> bool {
        let passed = contexts.synchronize();
        if passed {
            self.fences.all_passed();
        }
        passed
    }

    /// Polls without sleeping until the remaining work takes at most `rest`, for at most `time`. Returns true on
    /// success.
    pub fn sees_end(&self, captures: &Captures, time: Duration, rest: Duration) -> bool {
        let since = Instant::now();
        loop {
            match self.run_ahead.left(captures) {
                Left::Nothing => return true,
                Left::About(left) if left <= rest && !rest.is_zero() => return true,
                Left::About(_) | Left::Unknown if since.elapsed() > time => return false,
                Left::About(_) | Left::Unknown => std::thread::yield_now(),
            }
        }
    }
}
