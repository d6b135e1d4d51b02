//! Limits the work in flight of a program that is alone. Such work is not measured.
//!
//! The next tenant must wait for this backlog, and the program is killed if the backlog exceeds the run limit.
//! Therefore, an event (a *mark*) is recorded in a stream after every few submissions. A stream with
//! `MAX_MARKS_PER_STREAM` marks in flight does not accept submissions until one of them completes. The number of
//! submissions between two marks depends on the duration of the submissions, so that about 0.1 s of work, or at least
//! four submissions, can be in flight. The queue of a real card is also limited, but to a thousand submissions of any
//! length.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::captures::Captures;
use crate::driver;
use crate::events::{self, Event, UNTIMED};
use crate::gate::Gate;
use crate::pace::RunAhead;
use crate::streams::Stream;

/// Initial maximum number of marks in flight per stream.
const MAX_MARKS_PER_STREAM: usize = 4;
/// Initial number of submissions between two marks. An event costs the card 2 to 4 us.
const INITIAL_SUBMISSIONS_PER_MARK: u32 = 4;
/// Minimum number of submissions between two marks.
const MIN_SUBMISSIONS_PER_MARK: u32 = 1;
/// Maximum number of submissions between two marks.
const MAX_SUBMISSIONS_PER_MARK: u32 = 32;
/// A mark that completes in less time than this widens the interval.
const WIDEN_BELOW: Duration = Duration::from_millis(20);
/// A wait for a mark that takes longer than this narrows the interval.
const NARROW_ABOVE: Duration = Duration::from_millis(100);
/// Time without a completed mark after which streams can have twice as many marks.
// TIMEOUT: a stream may wait for the thread that waits here, so the thread must eventually continue. A program with
// longer launches already has enough work in flight to be killed when another program starts.
const MARK_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of unused events kept for later marks.
const MAX_SPARE_EVENTS: usize = 64;

#[derive(Debug)]
struct Mark {
    context: u64,
    stream: Stream,
    event: Event,
    made: Instant,
}

#[derive(Debug)]
struct Marks {
    marks: VecDeque<Mark>,
    spare: Vec<(u64, Event)>,
    /// Number of submissions between two marks.
    every: u32,
    /// Maximum number of marks in flight per stream.
    most: usize,
}

/// Number of submissions until the next mark. It has its own cache line, because each submission writes it.
#[derive(Debug)]
#[repr(align(64))]
struct Countdown(AtomicU32);

/// The work in flight of a program that is alone.
#[derive(Debug)]
pub struct SoloBacklog {
    left: Countdown,
    /// Set if a stream has reached its limit of marks.
    full: AtomicBool,
    marks: Mutex<Marks>,
}

impl Default for SoloBacklog {
    fn default() -> Self {
        Self::new()
    }
}

impl SoloBacklog {
    /// Returns an empty backlog.
    pub fn new() -> Self {
        Self {
            left: Countdown(AtomicU32::new(INITIAL_SUBMISSIONS_PER_MARK)),
            full: AtomicBool::new(false),
            marks: Mutex::new(Marks::new()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits before a submission to a stream until the stream's work in flight is below the limit, the gate is closed,
    /// or work is measured.
    #[inline]
    pub fn wait(&self, captures: &Captures, gate: &Gate, run_ahead: &RunAhead, stream: impl FnOnce() -> Stream) {
        if self.full.load(Ordering::Relaxed) {
            self.wait_long(captures, gate, run_ahead, stream());
        }
    }

    #[cold]
    fn wait_long(&self, captures: &Captures, gate: &Gate, run_ahead: &RunAhead, stream: Stream) {
        let mut since = None;
        loop {
            let now = Instant::now();
            let age = {
                let mut marks = self.lock();
                if captures.quietly(|| marks.look(now, stream, &mut since, has_passed)) {
                    self.full.store(marks.is_any_full(), Ordering::Relaxed);
                    return;
                }
                marks.age(stream, now)
            };
            if gate.is_closed() || run_ahead.is_active() {
                return;
            }
            // After the awaited work, about three times as much is still in flight.
            if age < Duration::from_micros(200) {
                std::thread::yield_now();
            } else {
                std::thread::sleep((age / 8).min(Duration::from_millis(1)));
            }
        }
    }

    /// Records a submission to a stream.
    #[inline]
    pub fn submitted(&self, captures: &Captures, stream: impl FnOnce() -> Stream) {
        if self.left.0.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.left.0.store(self.mark(captures, stream()), Ordering::Relaxed);
        }
    }

    /// Records a mark. Returns the number of submissions before the next mark.
    #[cold]
    fn mark(&self, captures: &Captures, stream: Stream) -> u32 {
        let mut marks = self.lock();
        // During a capture, the event would be captured.
        if !captures.any() {
            let (context, now) = (driver::current_context() as u64, Instant::now());
            captures.quietly(|| {
                marks.reap(now, false, has_passed);
                let event = marks.event(context).filter(|event| events::record(*event, stream));
                marks.marks.extend(event.map(|event| Mark { context, stream, event, made: now }));
            });
            self.full.store(marks.is_any_full(), Ordering::Relaxed);
        }
        marks.every
    }

    /// Drops all marks, because a context is being destroyed together with its events.
    pub fn forget(&self) {
        let mut marks = self.lock();
        marks.marks.clear();
        marks.spare.clear();
        self.full.store(false, Ordering::Relaxed);
    }
}

fn has_passed(mark: &Mark) -> bool {
    events::within(mark.context, || mark.event.done())
}

impl Marks {
    fn new() -> Self {
        Self {
            marks: VecDeque::new(),
            spare: Vec::new(),
            every: INITIAL_SUBMISSIONS_PER_MARK,
            most: MAX_MARKS_PER_STREAM,
        }
    }

    /// Checks the marks of a waiting stream. `since` is the time from which the mark timeout is measured, or `None` at
    /// the start of the wait. Returns true if the stream can accept submissions.
    fn look(
        &mut self,
        now: Instant,
        stream: Stream,
        since: &mut Option<Instant>,
        passed: impl Fn(&Mark) -> bool,
    ) -> bool {
        let any = self.reap(now, since.is_some(), passed);
        match *since {
            Some(at) if !any && now.duration_since(at) > MARK_TIMEOUT => {
                self.most = self.most.saturating_mul(2);
                *since = Some(now);
            }
            Some(_) if !any => {}
            _ => *since = Some(now),
        }
        !self.is_full(stream)
    }

    /// Removes the completed marks of each stream, up to the first pending mark. Returns true if any were removed.
    fn reap(&mut self, now: Instant, waited: bool, passed: impl Fn(&Mark) -> bool) -> bool {
        let before = self.marks.len();
        for mark in std::mem::take(&mut self.marks) {
            if self.marks.iter().any(|earlier| earlier.stream == mark.stream) || !passed(&mark) {
                self.marks.push_back(mark);
                continue;
            }
            let age = now.duration_since(mark.made);
            if age < WIDEN_BELOW {
                self.every = (self.every * 2).min(MAX_SUBMISSIONS_PER_MARK);
            } else if age > NARROW_ABOVE && waited {
                self.every = (self.every / 2).max(MIN_SUBMISSIONS_PER_MARK);
            }
            if self.spare.len() < MAX_SPARE_EVENTS {
                self.spare.push((mark.context, mark.event));
            }
        }
        self.marks.len() < before
    }

    fn is_full(&self, stream: Stream) -> bool {
        self.marks.iter().filter(|mark| mark.stream == stream).count() >= self.most
    }

    fn is_any_full(&self) -> bool {
        self.marks.iter().any(|mark| self.is_full(mark.stream))
    }

    /// Returns the age of a stream's oldest mark.
    fn age(&self, stream: Stream, now: Instant) -> Duration {
        let first = self.marks.iter().find(|mark| mark.stream == stream);
        first.map_or(Duration::ZERO, |mark| now.duration_since(mark.made))
    }

    fn event(&mut self, context: u64) -> Option<Event> {
        match self.spare.iter().position(|(of, _)| *of == context) {
            Some(at) => Some(self.spare.swap_remove(at).1),
            None => Event::create(UNTIMED),
        }
    }
}

#[cfg(test)]
mod tests;
