//! Threads that copy parts of a large copy concurrently. One processor copies memory much slower than the link to the
//! card.
//!
//! The threads exist during one call. So no thread of the library is idle, and a program that forks is not affected.

use std::collections::{BTreeSet, VecDeque};
use std::num::NonZero;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::available_parallelism;

use crate::signals;

/// Minimum size in bytes of a copy for which threads are started. For smaller copies, starting the threads would take a
/// considerable part of the time.
const MIN_BYTES: u64 = 8 << 20;
/// Maximum number of threads in addition to the calling thread. Three threads already exceed the driver's own copies
/// by far, and the program may need its processors for other work.
const MAX_HELPERS: usize = 2;

/// Number of processors that this process may use. Static, because exported functions cannot receive state as an
/// argument, and the query reads files.
static PROCESSORS: OnceLock<usize> = OnceLock::new();

/// Number of a part, in the order of [`CopyThreads::add`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Job(u64);

struct State<P> {
    parts: VecDeque<(Job, P)>,
    added: u64,
    /// Completed parts for which the calling thread has not waited yet.
    done: BTreeSet<Job>,
    has_ended: bool,
}

/// Parts of a copy, and the threads that copy them.
pub struct CopyThreads<'a, P> {
    copy: &'a (dyn Fn(&P) + Sync),
    state: Mutex<State<P>>,
    changed: Condvar,
    helpers: usize,
}

/// Returns the number of additional threads for a copy of `bytes` bytes.
fn helpers(bytes: u64) -> usize {
    if bytes < MIN_BYTES {
        return 0;
    }
    let processors = *PROCESSORS.get_or_init(|| available_parallelism().map_or(1, NonZero::get));
    (processors / 2).min(MAX_HELPERS)
}

/// Starts the threads for a copy of `bytes` bytes, calls `work`, and ends the threads. `copy` copies a part.
pub fn with<P: Send, T>(bytes: u64, copy: &(dyn Fn(&P) + Sync), work: impl FnOnce(&CopyThreads<'_, P>) -> T) -> T {
    with_helpers(helpers(bytes), copy, work)
}

fn with_helpers<P: Send, T>(
    helpers: usize,
    copy: &(dyn Fn(&P) + Sync),
    work: impl FnOnce(&CopyThreads<'_, P>) -> T,
) -> T {
    let (parts, done) = Default::default();
    let state = Mutex::new(State { parts, added: 0, done, has_ended: false });
    let threads = CopyThreads { copy, state, changed: Condvar::new(), helpers };
    if helpers == 0 {
        return work(&threads);
    }
    std::thread::scope(|scope| {
        // Without a helper, the calling thread copies all parts, so errors can be ignored.
        signals::blocked(|| {
            for _ in 0..helpers {
                let _ = std::thread::Builder::new().name("cuda-copy".into()).spawn_scoped(scope, || threads.help());
            }
        });
        let _end = End(&threads);
        work(&threads)
    })
}

/// Ends the threads when it is dropped.
struct End<'a, 'b, P>(&'a CopyThreads<'b, P>);

impl<P> Drop for End<'_, '_, P> {
    fn drop(&mut self) {
        self.0.lock().has_ended = true;
        self.0.changed.notify_all();
    }
}

impl<P> CopyThreads<'_, P> {
    fn lock(&self) -> MutexGuard<'_, State<P>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of threads in addition to the calling one.
    pub fn helpers(&self) -> usize {
        self.helpers
    }

    /// Adds a part. The caller must wait for it before it uses the copied data.
    pub fn add(&self, part: P) -> Job {
        let mut state = self.lock();
        state.added += 1;
        let job = Job(state.added);
        state.parts.push_back((job, part));
        drop(state);
        self.changed.notify_one();
        job
    }

    /// Waits until a part is copied. Copies parts in the meantime.
    pub fn wait(&self, job: Job) {
        let mut state = self.lock();
        while !state.done.remove(&job) {
            state = match state.parts.pop_front() {
                Some(next) => self.perform(state, next),
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn help(&self) {
        let mut state = self.lock();
        while !state.has_ended {
            state = match state.parts.pop_front() {
                Some(next) => self.perform(state, next),
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn perform<'a>(&'a self, state: MutexGuard<'a, State<P>>, (job, part): (Job, P)) -> MutexGuard<'a, State<P>> {
        drop(state);
        (self.copy)(&part);
        let mut state = self.lock();
        state.done.insert(job);
        self.changed.notify_all();
        state
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn parts_are_copied_once_before_the_wait_for_them_returns() {
        for helpers in 0..4 {
            let copied: Vec<AtomicU64> = (0..500).map(|_| AtomicU64::new(0)).collect();
            let copy = |at: &usize| {
                copied[*at].fetch_add(1, Ordering::SeqCst);
            };
            with_helpers(helpers, &copy, |threads| {
                let mut pending = VecDeque::new();
                for at in 0..copied.len() {
                    pending.push_back((at, threads.add(at)));
                    if pending.len() > 7 {
                        let (first, job) = pending.pop_front().expect("eight");
                        threads.wait(job);
                        assert_eq!(copied[first].load(Ordering::SeqCst), 1);
                    }
                }
                pending.drain(..).for_each(|(_, job)| threads.wait(job));
            });
            assert!(copied.iter().all(|times| times.load(Ordering::SeqCst) == 1), "{helpers} helpers");
        }
    }

    #[test]
    fn threads_end_although_parts_are_left() {
        let copied = AtomicU64::new(0);
        let copy = |_: &u64| {
            copied.fetch_add(1, Ordering::SeqCst);
        };
        with_helpers(2, &copy, |threads| (0..100).for_each(|part| _ = threads.add(part)));
        assert!(copied.load(Ordering::SeqCst) <= 100);
    }

    #[test]
    fn small_copies_start_no_threads() {
        assert_eq!(helpers(MIN_BYTES - 1), 0);
        assert!(helpers(u64::MAX) <= MAX_HELPERS);
    }
}
