//! State of the program's threads.

use std::cell::{Cell, RefCell};
use std::sync::{Mutex, PoisonError};

use cuda_ring::control;

/// Unused slots, each with its number of replies so far, and the number of slots allocated so far. Static, because
/// threads may exit at any time.
static FREE_SLOTS: Mutex<(Vec<(u16, u64)>, u16)> = Mutex::new((Vec::new(), 0));

/// A thread's slot, if it has one, and the slot's number of expected replies so far.
#[derive(Debug)]
struct Slot(Cell<Option<u16>>, Cell<u64>);

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(slot) = self.0.get() {
            FREE_SLOTS.lock().unwrap_or_else(PoisonError::into_inner).0.push((slot, self.1.get()));
        }
    }
}

/// State of a thread.
#[derive(Debug)]
pub struct Thread {
    slot: Slot,
    /// Number of the current context, or 0 for none.
    pub current: Cell<u32>,
    /// Contexts below the current one on the context stack.
    pub stack: RefCell<Vec<u32>>,
    /// The thread's capture mode.
    pub capture_mode: Cell<u16>,
    /// Buffer of the message being written.
    pub message: RefCell<Vec<u64>>,
    /// The per-thread default streams, each with its context.
    pub streams: RefCell<Vec<(u32, u64)>>,
}

thread_local! {
    static THREAD: Thread = const {
        Thread {
            slot: Slot(Cell::new(None), Cell::new(0)),
            current: Cell::new(0),
            stack: RefCell::new(Vec::new()),
            capture_mode: Cell::new(0),
            message: RefCell::new(Vec::new()),
            streams: RefCell::new(Vec::new()),
        }
    };
}

/// Runs `work` with the thread's state. Returns error 4 in a thread that is exiting.
pub fn with<T>(work: impl FnOnce(&Thread) -> Result<T, i32>) -> Result<T, i32> {
    THREAD.try_with(work).unwrap_or(Err(crate::result::DEINITIALIZED))
}

/// Drops all slots in a child. The child's worker has not sent any replies yet, and the calling thread is the child's
/// only thread.
pub fn leave_in_child() {
    // A thread that held the lock during the fork does not exist in the child, so the lock may never be released.
    if let Ok(mut free) = FREE_SLOTS.try_lock() {
        *free = (Vec::new(), 0);
    }
    let _ = THREAD.try_with(|thread| {
        thread.slot.0.set(None);
        thread.slot.1.set(0);
    });
}

/// Returns the number of the thread's current context, or 0 for none.
pub fn current() -> u32 {
    THREAD.try_with(|thread| thread.current.get()).unwrap_or(0)
}

impl Thread {
    /// Returns the thread's slot. The first call of a thread allocates it.
    ///
    /// # Errors
    /// Returns an error if all slots are in use.
    pub fn slot(&self) -> Result<u16, i32> {
        if let Some(slot) = self.slot.0.get() {
            return Ok(slot);
        }
        let mut free = FREE_SLOTS.lock().unwrap_or_else(PoisonError::into_inner);
        let (slot, count) = match free.0.pop() {
            Some(found) => found,
            None if u64::from(free.1) < control::SLOT_COUNT => {
                free.1 += 1;
                (free.1 - 1, 0)
            }
            None => return Err(crate::result::OUT_OF_MEMORY),
        };
        self.slot.0.set(Some(slot));
        self.slot.1.set(count);
        Ok(slot)
    }

    /// Counts a call with a reply. Returns the sequence number that the slot will have after the reply.
    pub fn expect_answer(&self) -> u64 {
        self.slot.1.set(self.slot.1.get() + 1);
        self.slot.1.get()
    }
}
