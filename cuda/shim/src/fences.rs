//! Finds the ends of unmeasured work, for drains while a stream captures.
//!
//! A context in which a stream captures must not be synchronised: that would end the capture, which a program may keep
//! open forever. A drain then waits for a *fence* of each stream, an event after the last of its work. A capturing
//! stream accepts no event from outside, and other streams may join the capture. So each stream with unmeasured work
//! gets a fence before a capture begins, and during a capture each submission gets its own fence. Work that cannot be
//! fenced, such as work in another thread's per-thread stream, delays the drain until its thread submits again or the
//! capture ends: the slice continues, and the tenant's limit applies.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use foldhash::HashSet;

use crate::captures;
use crate::driver;
use crate::pace::{self, Event};
use crate::streams::Stream;

/// `CU_EVENT_DISABLE_TIMING`.
const UNTIMED: u32 = 2;
/// Events that are kept for further fences.
const MAX_SPARE_EVENTS: usize = 64;
/// Streams that a thread remembers to have noted.
const MAX_REMEMBERED_STREAMS: usize = 4;

/// Rises whenever noted streams are taken.
static GENERATION: AtomicU64 = AtomicU64::new(1);
static STATE: Mutex<Option<Fences>> = Mutex::new(None);

#[derive(Default)]
struct Fences {
    /// Streams with work after their last fence.
    noted: HashSet<(u64, Stream)>,
    /// Pending fences: context, stream, event.
    fences: Vec<(u64, Stream, Event)>,
    spare: Vec<(u64, Event)>,
    /// Work was submitted to unknown streams.
    unknown: bool,
}

fn lock() -> MutexGuard<'static, Option<Fences>> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Called after an unmeasured submission.
pub fn submitted(stream: Stream) {
    thread_local! {
        static NOTED_STREAMS: Cell<(u64, [Option<Stream>; MAX_REMEMBERED_STREAMS], usize)> =
            const { Cell::new((0, [None; MAX_REMEMBERED_STREAMS], 0)) };
    }
    let generation = GENERATION.load(Ordering::SeqCst);
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
    if known != Ok(true) {
        let context = driver::current_context() as u64;
        lock().get_or_insert_default().noted.insert((context, stream));
    }
    // After that, a new capture sees the note, or this code sees the capture.
    if captures::any() {
        let context = driver::current_context() as u64;
        pace::quietly(|| lock().get_or_insert_default().fence(context, stream));
    }
}

/// Called after a submission to unknown streams.
pub fn submitted_anywhere() {
    lock().get_or_insert_default().unknown = true;
}

/// Before a capture begins, which is counted already: all streams get their fences.
pub fn before_capture() {
    pace::quietly(|| lock().get_or_insert_default().fence_all());
}

/// Before a stream is destroyed: its work continues.
pub fn stream_ends(handle: u64) {
    let mut state = lock();
    let Some(fences) = state.as_mut() else { return };
    let of_it = |(_, stream): &&(u64, Stream)| stream.handle == handle;
    let noted: Vec<_> = fences.noted.iter().filter(of_it).copied().collect();
    pace::quietly(|| noted.into_iter().for_each(|(context, stream)| fences.fence(context, stream)));
    // A stream that took no event no longer exists.
    let before = fences.noted.len();
    fences.noted.retain(|(_, stream)| stream.handle != handle);
    fences.unknown |= fences.noted.len() != before;
}

/// All contexts were synchronised: nothing is in flight.
pub fn all_passed() {
    let mut state = lock();
    if let Some(fences) = state.as_mut() {
        GENERATION.fetch_add(1, Ordering::SeqCst);
        fences.noted.clear();
        fences.unknown = false;
        let passed = std::mem::take(&mut fences.fences);
        passed.into_iter().for_each(|(context, _, event)| fences.keep(context, event));
    }
}

/// Forgets a context that ends, with its work and its events.
pub fn context_ends(context: u64) {
    let mut state = lock();
    let Some(fences) = state.as_mut() else { return };
    GENERATION.fetch_add(1, Ordering::SeqCst);
    fences.noted.retain(|(of, _)| *of != context);
    fences.fences.retain(|(of, ..)| *of != context);
    fences.spare.retain(|(of, _)| *of != context);
}

/// Drops all events, because a context may end together with its events. The work in flight is unknown from here on.
pub fn contexts_may_end() {
    *lock() = Some(Fences { unknown: true, ..Fences::default() });
    GENERATION.fetch_add(1, Ordering::SeqCst);
}

/// Called when a context has ended, together with its work in flight.
pub fn contexts_ended() {
    if let Some(fences) = lock().as_mut() {
        fences.unknown = false;
    }
}

/// Returns true if all unmeasured work has ended. Called with the gate closed and a capture open.
pub fn have_passed() -> bool {
    let mut state = lock();
    let Some(fences) = state.as_mut() else { return true };
    pace::quietly(|| {
        fences.fence_all();
        fences.reap();
    });
    fences.noted.is_empty() && fences.fences.is_empty() && !fences.unknown
}

impl Fences {
    fn fence_all(&mut self) {
        GENERATION.fetch_add(1, Ordering::SeqCst);
        for (context, stream) in self.noted.clone() {
            self.fence(context, stream);
        }
    }

    /// Records a fence after the work of a stream, if the stream takes one.
    fn fence(&mut self, context: u64, stream: Stream) {
        if !stream.is_in_reach() {
            self.noted.insert((context, stream));
            return;
        }
        let recorded = pace::within(context, || {
            if captures::any() && stream.is_capturing() {
                return None;
            }
            let event = self.event(context)?;
            if pace::record(event, stream) {
                return Some(event);
            }
            self.keep(context, event);
            None
        });
        match recorded {
            Some(event) => {
                self.noted.remove(&(context, stream));
                // The last fence of a stream covers the earlier ones.
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
        let passed = |(context, _, event): &(u64, Stream, Event)| pace::within(*context, || event.done());
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
