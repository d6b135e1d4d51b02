//! Detects the completion of unmeasured work for drains during captures.
//!
//! A context with a capturing stream must not be synchronized, because this would invalidate the capture, and a program
//! may keep a capture open forever. Instead, a drain waits for a *fence* in each stream: an event after the stream's
//! last work. A capturing stream does not accept events from outside the capture, and other streams may join the
//! capture. Therefore, each stream with unmeasured work gets a fence before a capture begins, and each submission
//! during a capture gets a fence. Some work cannot be fenced, such as work in another thread's per-thread stream. Such
//! work delays the drain until its thread makes another submission or the capture ends. Until then, the slice continues
//! and the tenant's limit applies.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use foldhash::HashSet;

use crate::captures::Captures;
use crate::driver;
use crate::events::{self, Event, UNTIMED};
use crate::streams::Stream;

/// Maximum number of unused events kept for later fences.
const MAX_SPARE_EVENTS: usize = 64;
/// Number of recently noted streams that a thread remembers.
const MAX_REMEMBERED_STREAMS: usize = 4;

#[derive(Debug, Default)]
struct Pending {
    /// Streams with work submitted after their last fence.
    noted: HashSet<(u64, Stream)>,
    /// Pending fences: context, stream, event.
    fences: Vec<(u64, Stream, Event)>,
    spare: Vec<(u64, Event)>,
    /// Set if work was submitted to unknown streams.
    unknown: bool,
}

/// The program's unmeasured work and the fences after it.
#[derive(Debug)]
pub struct Fences {
    /// Incremented whenever the noted streams are cleared.
    generation: AtomicU64,
    pending: Mutex<Pending>,
}

impl Fences {
    /// Creates a record without work or fences for the program's card number `card`.
    pub fn new(card: usize) -> Self {
        // A thread that has not noted any streams is in generation 0. Cards use different generations, because a thread
        // remembers streams of only one generation.
        Self { generation: AtomicU64::new(((card as u64) << 48) + 1), pending: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_generation(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
    }

    /// Records a successful unmeasured submission.
    #[inline]
    pub fn submitted(&self, captures: &Captures, stream: Stream) {
        if !self.remembers(stream) {
            self.note(stream);
        }
        // From here on, either a new capture detects the noted stream, or this code detects the capture.
        if captures.any() {
            self.fence_now(captures, stream);
        }
    }

    /// Returns true if this thread remembers the stream. Otherwise, adds it to the remembered streams.
    #[inline]
    fn remembers(&self, stream: Stream) -> bool {
        thread_local! {
            static NOTED_STREAMS: Cell<(u64, [Option<Stream>; MAX_REMEMBERED_STREAMS], usize)> =
                const { Cell::new((0, [None; MAX_REMEMBERED_STREAMS], 0)) };
        }
        let generation = self.generation.load(Ordering::SeqCst);
        let known = NOTED_STREAMS.try_with(|last| {
            let (of, mut streams, next) = last.get();
            // Each context has its own default streams.
            if of == generation && stream.handle > 2 && streams.contains(&Some(stream)) {
                return true;
            }
            let (mut next, fresh) = (next, of != generation);
            if fresh {
                (streams, next) = ([None; MAX_REMEMBERED_STREAMS], 0);
            }
            streams[next % MAX_REMEMBERED_STREAMS] = Some(stream);
            last.set((generation, streams, next + 1));
            false
        });
        known == Ok(true)
    }

    #[cold]
    fn note(&self, stream: Stream) {
        let context = driver::current_context() as u64;
        self.lock().noted.insert((context, stream));
    }

    #[cold]
    fn fence_now(&self, captures: &Captures, stream: Stream) {
        let context = driver::current_context() as u64;
        captures.quietly(|| self.lock().fence(captures, context, stream));
    }

    /// Records a submission to unknown streams.
    pub fn submitted_anywhere(&self) {
        self.lock().unknown = true;
    }

    /// Records a fence in each stream before a capture begins. The capture must already be counted.
    pub fn before_capture(&self, captures: &Captures) {
        captures.quietly(|| {
            let mut fences = self.lock();
            self.next_generation();
            fences.fence_all(captures);
        });
    }

    /// Records a fence in a stream before it is destroyed, because its pending work still completes.
    pub fn stream_ends(&self, captures: &Captures, handle: u64) {
        let mut fences = self.lock();
        let of_it = |(_, stream): &&(u64, Stream)| stream.handle == handle;
        let noted: Vec<_> = fences.noted.iter().filter(of_it).copied().collect();
        captures.quietly(|| noted.into_iter().for_each(|(context, stream)| fences.fence(captures, context, stream)));
        // If a stream does not accept an event, it no longer exists.
        let before = fences.noted.len();
        fences.noted.retain(|(_, stream)| stream.handle != handle);
        fences.unknown |= fences.noted.len() != before;
    }

    /// Records that all contexts have been synchronized, so that no work is in flight.
    pub fn all_passed(&self) {
        let mut fences = self.lock();
        self.next_generation();
        fences.noted.clear();
        fences.unknown = false;
        let passed = std::mem::take(&mut fences.fences);
        passed.into_iter().for_each(|(context, _, event)| fences.keep(context, event));
    }

    /// Removes a context that is being destroyed, including its work and events.
    pub fn context_ends(&self, context: u64) {
        let mut fences = self.lock();
        self.next_generation();
        fences.noted.retain(|(of, _)| *of != context);
        fences.fences.retain(|(of, ..)| *of != context);
        fences.spare.retain(|(of, _)| *of != context);
    }

    /// Drops all events, because a context may be destroyed together with its events. Afterwards, it is unknown which
    /// work is in flight.
    pub fn contexts_may_end(&self) {
        *self.lock() = Pending { unknown: true, ..Pending::default() };
        self.next_generation();
    }

    /// Records that a context has been destroyed together with its work in flight.
    pub fn contexts_ended(&self) {
        self.lock().unknown = false;
    }

    /// Returns true if all unmeasured work has completed. Must be called while the gate is closed and a capture is
    /// open.
    pub fn have_passed(&self, captures: &Captures) -> bool {
        let mut fences = self.lock();
        captures.quietly(|| {
            self.next_generation();
            fences.fence_all(captures);
            fences.reap();
        });
        fences.noted.is_empty() && fences.fences.is_empty() && !fences.unknown
    }
}

impl Pending {
    fn fence_all(&mut self, captures: &Captures) {
        for (context, stream) in self.noted.clone() {
            self.fence(captures, context, stream);
        }
    }

    /// Records a fence after a stream's work if the stream accepts it.
    fn fence(&mut self, captures: &Captures, context: u64, stream: Stream) {
        if !stream.is_in_reach() {
            self.noted.insert((context, stream));
            return;
        }
        let recorded = events::within(context, || {
            if captures.any() && stream.is_capturing() {
                return None;
            }
            let event = self.event(context)?;
            if events::record(event, stream) {
                return Some(event);
            }
            self.keep(context, event);
            None
        });
        match recorded {
            Some(event) => {
                self.noted.remove(&(context, stream));
                // A stream's last fence supersedes its earlier fences.
                if let Some(at) = self.fences.iter().position(|(of, other, _)| (*of, *other) == (context, stream)) {
                    let (_, _, earlier) = self.fences.swap_remove(at);
                    self.keep(context, earlier);
                }
                self.fences.push((context, stream, event));
            }
            None => drop(self.noted.insert((context, stream))),
        }
        if self.fences.len() >= MAX_SPARE_EVENTS {
            self.reap();
        }
    }

    fn reap(&mut self) {
        let passed = |(context, _, event): &(u64, Stream, Event)| events::within(*context, || event.done());
        let (passed, left): (Vec<_>, Vec<_>) = std::mem::take(&mut self.fences).into_iter().partition(passed);
        self.fences = left;
        passed.into_iter().for_each(|(context, _, event)| self.keep(context, event));
    }

    fn event(&mut self, context: u64) -> Option<Event> {
        match self.spare.iter().position(|(of, _)| *of == context) {
            Some(at) => Some(self.spare.swap_remove(at).1),
            None => Event::create(UNTIMED),
        }
    }

    fn keep(&mut self, context: u64, event: Event) {
        if self.spare.len() < MAX_SPARE_EVENTS {
            self.spare.push((context, event));
        }
    }
}

#[cfg(test)]
mod tests;
