//! Tracks the program's open captures.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use foldhash::HashSet;

use crate::driver;
use crate::streams::Stream;

/// The program's open stream captures.
#[derive(Debug, Default)]
pub struct Captures {
    /// Number of captures that are open or about to begin.
    open: AtomicU32,
    /// Context and stream in which each open capture began.
    origins: Mutex<HashSet<(u64, Stream)>>,
}

impl Captures {
    fn origins(&self) -> MutexGuard<'_, HashSet<(u64, Stream)>> {
        self.origins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if a capture is open or about to begin.
    #[inline]
    pub fn any(&self) -> bool {
        self.open.load(Ordering::SeqCst) > 0
    }

    /// Counts a capture as about to begin.
    pub fn begins(&self) {
        self.open.fetch_add(1, Ordering::SeqCst);
    }

    /// Records that a counted capture has begun in a stream of a context, or has failed to begin.
    pub fn begun(&self, context: u64, stream: Stream, succeeded: bool) {
        if !succeeded || !self.origins().insert((context, stream)) {
            self.open.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn over(&self, which: impl Fn(&(u64, Stream)) -> bool) {
        let mut origins = self.origins();
        let before = origins.len();
        origins.retain(|origin| !which(origin));
        self.open.fetch_sub(u32::try_from(before - origins.len()).unwrap_or(0), Ordering::SeqCst);
    }

    /// Records that a stream's capture has ended or the stream has been destroyed.
    pub fn stream_ended(&self, stream: Stream) {
        self.over(|(_, origin)| *origin == stream);
    }

    /// Records that a context has been destroyed together with its captures. `None` stands for all contexts.
    pub fn context_ended(&self, context: Option<u64>) {
        self.over(|(of, _)| context.is_none_or(|context| context == *of));
    }

    /// Runs `work` without disturbing a capture in another stream.
    pub fn quietly<T>(&self, work: impl FnOnce() -> T) -> T {
        if self.any() { driver::relaxed(work) } else { work() }
    }
}
