//! Measures the program's work in flight and its card time, and limits the work in flight.
//!
//! Submissions to one stream form *groups*. Each group ends with an event. The duration of the work in flight is
//! estimated from earlier runs of the same work. When the estimate reaches the limit, submissions wait for events. None
//! of this happens while the tenant is alone.
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cuda_protocol::Usage;
use foldhash::{HashMap, HashSet};

use crate::captures::Captures;
use crate::driver;
use crate::events::{self, Event};
use crate::gate::Gate;
use crate::streams::Stream;

/// Minimum assumed duration of previously unseen work, in ns.
const UNKNOWN_NS: f64 = 200_000.0;
/// Maximum number of submissions in a group.
const LONGEST_GROUP: u32 = 256;
/// Minimum duration, in ns, of a submission that ends its group. The event costs less than one percent of this time. If
/// the next submission were in the same group, the group's time would include the program's pause between the two.
const LONG_NS: f64 = 500_000.0;
/// Number of groups into which the limit is divided. An event occupies the card exclusively for 2 to 4 us, so groups
/// should be large. Two groups are sufficient to determine the amount of work in flight.
const GROUPS_OF_BOUND: f64 = 2.0;
/// Time before the expected end of all work at which polling begins, in ns.
const NEAR_NS: f64 = 300_000.0;
/// Time without a submission after which polling for the completion of work begins. Without this delay, a program with
/// little work in flight would be polled constantly, and each poll costs an event.
const IDLE_BEFORE_POLL: Duration = Duration::from_micros(100);
/// Maximum number of kinds of work with a known duration.
const MOST_KEYS: usize = 4096;
/// Number of consecutive groups that must confirm a duration before it is trusted.
const MIN_CONFIRMING_GROUPS: u8 = 2;
/// Maximum value of the count of consecutive confirming groups.
const STEADY_MOST: u8 = 4 * MIN_CONFIRMING_GROUPS;
/// Ratios of measured to expected time that confirm a duration.
const CONFIRMING_RATIOS: std::ops::RangeInclusive<f64> = 0.75..=1.33;
/// Ratios of measured to expected time that can be outliers, for example because a delayed program has left the card
/// idle.
const DISTURBED: std::ops::RangeInclusive<f64> = 0.4..=3.0;
/// Maximum time between the base event and another event, in ms. For longer times, single precision cannot represent
/// microseconds.
const REBASE_MS: f64 = 1000.0;

#[derive(Debug)]
struct Group {
    context: u64,
    stream: Stream,
    /// Event recorded before the group's first work, if the stream had no work in flight.
    start: Option<Event>,
    end: Option<Event>,
    keys: Vec<u64>,
    copies: u32,
    estimate: f64,
    /// Assumed duration of each previously unseen kind of work in the group, in ns.
    unknown_ns: f64,
    /// Set if all kinds of work in the group have a steady duration.
    sure: bool,
    opened: Instant,
}

impl Group {
    fn new(context: u64, stream: Stream, start: Option<Event>) -> Self {
        let opened = Instant::now();
        let (estimate, unknown_ns) = (0.0, UNKNOWN_NS);
        Self {
            context,
            stream,
            start,
            end: None,
            keys: Vec::new(),
            copies: 0,
            estimate,
            unknown_ns,
            sure: true,
            opened,
        }
    }
}

/// Timing state of one context. Times are in ms after the first base event.
#[derive(Debug)]
struct Clock {
    base: Event,
    offset: f64,
    busy_until: f64,
    spare: Vec<Event>,
}

/// Estimated duration of a kind of work.
#[derive(Clone, Copy, Debug)]
struct Length {
    ns: f64,
    /// Number of consecutive groups that took the expected time.
    steady: u8,
}

/// Remaining work in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// No measured work is in flight.
    Nothing,
    /// Work with this remaining time, estimated from earlier runs of the same work.
    About(Duration),
    /// Work of unknown duration.
    Unknown,
}

#[derive(Debug, Default)]
struct Pace {
    groups: VecDeque<Group>,
    /// End of each stream's last group, in ms after the context's first base event.
    ends: HashMap<(u64, Stream), f64>,
    clocks: HashMap<u64, Clock>,
    lengths: HashMap<u64, Length>,
    /// Recent duration of previously unseen work, in ns.
    unknown_ns: Option<f64>,
    usage: Usage,
    last: Option<Instant>,
    /// Time when the completion of the last group was detected.
    seen: Option<Instant>,
    /// Set if all work in flight was submitted while measuring was enabled.
    all_measured: bool,
}

/// Measures and limits the program's work in flight while other tenants also have work.
#[derive(Debug, Default)]
pub struct RunAhead {
    active: AtomicBool,
    bound_ns: AtomicU64,
    pace: Mutex<Pace>,
}

impl RunAhead {
    fn lock(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bound_ns(&self) -> f64 {
        self.bound_ns.load(Ordering::Relaxed) as f64
    }

    /// Returns true if submissions are limited and measured.
    #[inline]
    pub fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    /// Limits the work in flight to `run_ahead_us`. 0 disables limiting and measuring.
    pub fn bound(&self, run_ahead_us: u32) {
        self.bound_ns.store(u64::from(run_ahead_us) * 1000, Ordering::Relaxed);
        if !self.active.swap(run_ahead_us > 0, Ordering::SeqCst) {
            self.unmeasured();
        }
    }

    /// Records that unmeasured work may be in flight.
    pub fn unmeasured(&self) {
        self.lock().all_measured = false;
    }

    /// Records that no unmeasured work is in flight.
    pub fn all_measured(&self) {
        self.lock().all_measured = self.is_active();
    }

    /// Returns true if all work that may be in flight is measured.
    pub fn is_measured(&self) -> bool {
        self.is_active() && self.lock().all_measured
    }

    /// Waits before a submission to `stream` until the work in flight is below the limit or the gate is closed.
    pub fn wait(&self, captures: &Captures, gate: &Gate, stream: Stream) {
        loop {
            let ahead = {
                let mut pace = self.lock();
                captures.quietly(|| pace.reap());
                let bound = self.bound_ns();
                // If a kernel takes longer than the limit, submit the next kernel when the first is about to complete.
                // The card then always has work, and the end of a slice is delayed by only one kernel.
                let ahead = pace.left_ns(Instant::now());
                if ahead <= bound || pace.is_free_for(stream) {
                    return;
                }
                if pace.groups.iter().all(|g| g.end.is_none()) {
                    captures.quietly(|| pace.close_groups(captures, |_| true));
                    if pace.groups.iter().all(|g| g.end.is_none()) {
                        // No work in flight has an end event to wait for.
                        return;
                    }
                }
                ahead - bound
            };
            if gate.is_closed() || !self.is_active() {
                return;
            }
            if ahead > 100_000.0 {
                std::thread::sleep(Duration::from_micros(25));
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// Starts a group before a submission to a stream without work in flight, so that the card's idle time is not
    /// counted. If the gate has `held` the submission, first removes the groups that have completed.
    pub fn begin(&self, captures: &Captures, stream: Stream, held: bool) {
        let context = driver::current_context() as u64;
        let mut pace = self.lock();
        if held {
            captures.quietly(|| pace.reap());
        }
        if pace.groups.iter().any(|g| g.stream == stream && g.context == context) {
            return;
        }
        let start = captures.quietly(|| pace.event(context).filter(|event| events::record(*event, stream)));
        pace.groups.push_back(Group::new(context, stream, start));
    }

    /// Reverts [`Self::begin`] after a failed submission.
    pub fn failed(&self, stream: Stream) {
        self.lock().groups.retain(|g| g.stream != stream || !g.keys.is_empty());
    }

    /// Records a submission by this thread to `stream`.
    pub fn submitted(&self, captures: &Captures, stream: Stream, key: u64, copy: bool) {
        let context = driver::current_context() as u64;
        let mut pace = self.lock();
        pace.last = Some(Instant::now());
        let known = pace.lengths.get(&key).copied();
        let unknown = pace.unknown_ns_of(key, self.bound_ns());
        let estimate = known.map_or(unknown, |length| length.ns);
        let mine = |g: &Group| g.end.is_none() && g.stream == stream && g.context == context;
        if !pace.groups.iter().any(mine) {
            pace.groups.push_back(Group::new(context, stream, None));
        }
        let Some(group) = pace.groups.iter_mut().find(|g| mine(g)) else { return };
        group.keys.push(key);
        group.copies += u32::from(copy);
        group.estimate += estimate;
        group.unknown_ns = unknown;
        group.sure &= known.is_some_and(|length| length.steady >= MIN_CONFIRMING_GROUPS);
        // Record the end of work immediately for streams that may join a capture, and for per-thread streams, which
        // other threads cannot access.
        let full = known.is_none()
            || estimate >= LONG_NS
            || captures.any()
            || stream.is_threads_own()
            || group.keys.len() as u32 >= LONGEST_GROUP
            || group.estimate * GROUPS_OF_BOUND >= self.bound_ns();
        if full {
            captures.quietly(|| pace.close_groups(captures, |g| g.stream == stream && g.context == context));
        }
    }

    /// Ends the groups of a stream that the program is about to destroy.
    pub fn forget(&self, captures: &Captures, stream: u64) {
        if self.is_active() {
            let mut pace = self.lock();
            captures.quietly(|| pace.close_groups(captures, |g| g.stream.handle == stream));
        }
    }

    /// Ends all groups. Must be called before a capture begins in one of their streams.
    pub fn finish_groups(&self, captures: &Captures) {
        let mut pace = self.lock();
        if self.is_active() {
            captures.quietly(|| pace.close_groups(captures, |_| true));
        }
    }

    /// If all work is about to complete and the program has stopped submitting, ends the groups so that the completion
    /// is detected. Returns true if no work is in flight.
    pub fn is_quiet(&self, captures: &Captures) -> bool {
        let mut pace = self.lock();
        pace.look_for_end(captures, Instant::now());
        pace.groups.iter().all(|g| g.keys.is_empty())
    }

    /// Returns true if the program waits for a result, that is, if it has submitted something since `since` but nothing
    /// for a while, and all its work completes within `lead`. Returns false while unmeasured work is in flight, because
    /// its end is unknown.
    pub fn awaits_result(&self, captures: &Captures, lead: Duration, since: Instant) -> bool {
        let (mut pace, now) = (self.lock(), Instant::now());
        pace.look_for_end(captures, now);
        let has_paused = |last: Instant| last >= since && now.saturating_duration_since(last) >= IDLE_BEFORE_POLL;
        let pauses = pace.last.is_some_and(has_paused);
        pace.all_measured && pauses && pace.left_ns(now) <= lead.as_nanos() as f64
    }

    /// Ends all groups, and removes the completed ones. Returns the remaining time of the work in flight.
    pub fn left(&self, captures: &Captures) -> Left {
        let mut pace = self.lock();
        pace.close_groups(captures, |_| true);
        pace.reap();
        pace.left(Instant::now())
    }

    /// Returns the time since the last submission or the last detected completion of work.
    pub fn idle(&self) -> Duration {
        let pace = self.lock();
        pace.last.max(pace.seen).map_or(Duration::MAX, |last| last.elapsed())
    }

    /// Returns the estimated time until all work in flight completes, or `None` if no work is in flight.
    pub fn next_end(&self) -> Option<Duration> {
        let pace = self.lock();
        let any = pace.groups.iter().any(|g| !g.keys.is_empty());
        any.then(|| Duration::from_nanos(pace.left_ns(Instant::now()) as u64))
    }

    /// Returns the number of groups in flight.
    pub fn groups(&self) -> usize {
        self.lock().groups.len()
    }

    /// Returns the usage since the last call.
    pub fn take_usage(&self) -> Usage {
        std::mem::take(&mut self.lock().usage)
    }
}

impl Pace {
    fn look_for_end(&mut self, captures: &Captures, now: Instant) {
        self.reap();
        let pauses = self.last.is_none_or(|last| now.saturating_duration_since(last) >= IDLE_BEFORE_POLL);
        if pauses && self.left_ns(now) < NEAR_NS {
            self.close_groups(captures, |_| true);
            self.reap();
        }
    }

    /// Returns the assumed duration of previously unseen work, in ns. The initial value is half the `bound`, so that
    /// only a few long submissions are in flight before the first one has completed. Later values are the recent
    /// duration of such work.
    fn unknown_ns(&self, bound: f64) -> f64 {
        self.unknown_ns.unwrap_or(bound / 2.0).max(UNKNOWN_NS)
    }

    /// Returns the assumed duration of previously unseen work of one kind, in ns. Recent work of other kinds may have
    /// been much shorter, such as copies compared to kernels. Therefore, if work of this kind is in flight and none has
    /// completed, the result is at least the initial value.
    fn unknown_ns_of(&self, key: u64, bound: f64) -> f64 {
        let flies = self.groups.iter().any(|group| group.keys.contains(&key));
        self.unknown_ns(bound).max(if flies { bound / 2.0 } else { 0.0 })
    }

    /// Returns the remaining time of the work in flight, in ns, estimated from earlier runs of the same work.
    fn left_ns(&self, now: Instant) -> f64 {
        let Some(first) = self.groups.front() else { return 0.0 };
        // The work has been running since its submission or since the end of the previous group.
        let since = self.seen.map_or(first.opened, |seen| seen.max(first.opened));
        let ran = now.saturating_duration_since(since).as_nanos() as f64;
        self.groups.iter().map(|g| g.estimate).sum::<f64>() - ran.min(first.estimate)
    }

    /// Returns true if an idle stream may get work while other streams have work, such as a copy during a long kernel.
    fn is_free_for(&self, stream: Stream) -> bool {
        self.groups.len() < 2 && self.groups.iter().all(|g| g.stream != stream)
    }

    fn left(&self, now: Instant) -> Left {
        if self.groups.iter().all(|g| g.keys.is_empty()) {
            return Left::Nothing;
        }
        let sure = |g: &Group| g.sure && g.end.is_some();
        if !self.all_measured || !self.groups.iter().all(sure) {
            return Left::Unknown;
        }
        Left::About(Duration::from_nanos(self.left_ns(now) as u64))
    }

    fn event(&mut self, context: u64) -> Option<Event> {
        if let Some(event) = self.clocks.get_mut(&context).and_then(|clock| clock.spare.pop()) {
            return Some(event);
        }
        Event::create(0)
    }

    /// Records an event at the end of each open group selected by `which`.
    fn close_groups(&mut self, captures: &Captures, which: impl Fn(&Group) -> bool) {
        for at in 0..self.groups.len() {
            let group = &self.groups[at];
            if group.end.is_some() || group.keys.is_empty() || !which(group) {
                continue;
            }
            let (context, stream) = (group.context, group.stream);
            // The stream's own thread has ended the group or is about to.
            if !stream.is_in_reach() {
                continue;
            }
            // The event would become part of the capture. The group ends after the capture.
            if captures.any() && stream.is_capturing() {
                continue;
            }
            let end = events::within(context, || self.event(context).filter(|event| events::record(*event, stream)));
            // If a stream does not accept an event, the end of its work is unknown. The next drain then waits for all
            // work in its context.
            match end {
                Some(end) => self.groups[at].end = Some(end),
                None => {
                    self.all_measured = false;
                    self.groups[at].estimate = f64::NAN;
                }
            }
        }
        self.groups.retain(|group| !group.estimate.is_nan());
    }

    /// Removes and evaluates the groups whose work has completed.
    fn reap(&mut self) {
        // The driver rejects calls from threads without a context, such as the library's message thread.
        let done = |g: &Group| g.end.is_some_and(|end| events::within(g.context, || end.done()));
        while let Some(at) = self.groups.iter().position(done) {
            let Some(group) = self.groups.remove(at) else { return };
            let Some(end) = group.end else { return };
            self.seen = Some(Instant::now());
            events::within(group.context, || self.account(&group, end));
        }
    }

    fn account(&mut self, group: &Group, end: Event) {
        let at = (group.context, group.stream);
        let Some(clock) = self.clocks.get_mut(&group.context) else {
            // The first event of a context is its base.
            let clock = Clock { base: end, offset: 0.0, busy_until: 0.0, spare: group.start.into_iter().collect() };
            self.clocks.insert(group.context, clock);
            self.ends.insert(at, 0.0);
            return;
        };
        let Some(since) = end.since(clock.base) else { return };
        let ended = clock.offset + since;
        // Work without a start event began when the stream's previous work completed.
        let first = group.start.and_then(|start| Some(clock.offset + start.since(clock.base)?));
        let known = first.or(self.ends.get(&at).copied());
        let began = known.unwrap_or(ended).min(ended);
        // Count submissions together with their time, so that each report implies the mean duration of its submissions.
        self.usage.launches = self.usage.launches.saturating_add(group.keys.len() as u32);
        let busy = ended - began.max(clock.busy_until);
        if busy > 0.0 {
            let ns = (busy * 1e6) as u64;
            self.usage.busy_ns += ns;
            if group.copies as usize == group.keys.len() {
                self.usage.copy_ns += ns;
            }
            clock.busy_until = ended;
        }
        self.ends.insert(at, ended);
        if since > REBASE_MS {
            clock.spare.push(clock.base);
            clock.base = end;
            clock.offset = ended;
        } else {
            clock.spare.push(end);
        }
        clock.spare.extend(group.start);
        // Work submitted before measuring started may have begun at any time.
        if known.is_some() {
            self.learn(group, (ended - began) * 1e6);
        }
    }

    /// Updates the estimated durations of the group's work from its measured duration.
    fn learn(&mut self, group: &Group, took_ns: f64) {
        // Use the current estimates, because other groups may have updated the same estimates since this group was
        // submitted.
        let length = |key: &u64| self.lengths.get(key).map_or(group.unknown_ns, |length| length.ns);
        let off = took_ns / group.keys.iter().map(length).sum::<f64>().max(1.0);
        if self.lengths.len() > MOST_KEYS {
            self.lengths.clear();
        }
        // Count each kind once, regardless of how often it occurs in the group.
        let kinds: HashSet<u64> = group.keys.iter().copied().collect();
        let trust = match (group.keys.len(), kinds.len()) {
            (1, _) => 1.0,
            (_, 1) => 0.7,
            _ => 0.3,
        };
        for key in kinds {
            let Some(length) = self.lengths.get_mut(&key) else {
                let ns = (group.unknown_ns * off).max(500.0);
                self.unknown_ns = Some(self.unknown_ns.map_or(ns, |before| ns.max((before + ns) / 2.0)));
                self.lengths.insert(key, Length { ns, steady: 0 });
                continue;
            };
            let met = CONFIRMING_RATIOS.contains(&off);
            if !met && length.steady >= 2 * MIN_CONFIRMING_GROUPS && DISTURBED.contains(&off) {
                // The third consecutive deviation, at the latest, changes the duration.
                length.steady /= 2;
                continue;
            }
            length.ns += trust * length.ns * (off.clamp(0.01, 1000.0) - 1.0);
            length.ns = length.ns.max(500.0);
            length.steady = if met { (length.steady + 1).min(STEADY_MOST) } else { 0 };
        }
    }
}

#[cfg(test)]
mod tests;
