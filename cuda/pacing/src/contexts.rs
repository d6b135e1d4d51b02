//! Tracks the program's contexts, because a drain must wait for the work in all contexts.
//!
//! UNSAFETY: binds the program's contexts to the thread.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::driver::{self, Object, SUCCESS};

/// The program's contexts that may have work or memory.
#[derive(Debug, Default)]
pub struct Contexts {
    known: Mutex<HashSet<u64>>,
}

impl Contexts {
    fn known(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records this thread's current context.
    pub fn note_current(&self) {
        thread_local! {
            /// The last context that this thread has noted. Threads also note contexts that they create, so that
            /// contexts with reused handles are noted.
            static LAST_NOTED_CONTEXT: Cell<u64> = const { Cell::new(0) };
        }
        let context = driver::current_context() as u64;
        if LAST_NOTED_CONTEXT.try_with(|noted| noted.replace(context) == context) != Ok(true) {
            self.note(context);
        }
    }

    /// Records a context.
    pub fn note(&self, context: u64) {
        if context != 0 {
            self.known().insert(context);
        }
    }

    /// Returns true if a context is recorded.
    pub fn knows(&self, context: u64) -> bool {
        self.known().contains(&context)
    }

    /// Returns the recorded contexts.
    pub fn all(&self) -> Vec<u64> {
        self.known().iter().copied().collect()
    }

    /// Removes a context before it is destroyed.
    pub fn forget(&self, context: u64) {
        self.known().remove(&context);
    }

    /// Makes one of the program's contexts current in this thread.
    pub fn bind(&self) {
        if let Some(context) = self.known().iter().next() {
            // SAFETY: the context belongs to the program, and the driver rejects destroyed contexts.
            unsafe { driver::ctx_set_current(*context as Object) };
        }
    }

    /// Waits for all work in the contexts. Returns false if a context has a capture unknown to the library.
    pub fn synchronize(&self) -> bool {
        let contexts = self.known().clone();
        for context in contexts {
            // SAFETY: as in `bind`.
            let result = unsafe {
                if driver::ctx_set_current(context as Object) == SUCCESS { driver::ctx_synchronize() } else { SUCCESS }
            };
            if driver::CAPTURE_FORBIDS.contains(&result) {
                return false;
            }
        }
        true
    }
}
