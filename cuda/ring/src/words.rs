//! Access to 64-bit words in shared memory.
//!
//! UNSAFETY: wraps memory that another process can change at any time. All accesses are atomic, so their behaviour is
//! defined regardless of the other side's accesses.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// 64-bit words shared by both sides. Offsets are in bytes and must be multiples of 8.
pub trait Words {
    /// Reads a word with acquire ordering.
    fn load(&self, offset: u64) -> u64;
    /// Writes a word with release ordering.
    fn store(&self, offset: u64, value: u64);
    /// Adds to a word with wrap-around and a full fence. Returns the sum.
    fn add(&self, offset: u64, value: u64) -> u64;
    /// Orders earlier stores before later loads.
    fn fence(&self);
}

/// A mapped blob, or part of one.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    base: *const AtomicU64,
    words: usize,
}

// SAFETY: all accesses are atomic.
unsafe impl Send for Shared {}
// SAFETY: all accesses are atomic.
unsafe impl Sync for Shared {}

impl Shared {
    /// Wraps `bytes` bytes at `address`.
    ///
    /// # Safety
    /// The memory must remain mapped, readable and writable until the last use of the value. `address` must be a
    /// multiple of 8. This process must access the memory only through values of this type.
    pub const unsafe fn new(address: u64, bytes: u64) -> Self {
        Self { base: address as *const AtomicU64, words: (bytes / 8) as usize }
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        let index = (offset / 8) as usize;
        // PANIC: offsets come from this crate's layout and from checked positions, never from the other side.
        assert!(index < self.words, "an offset within the blob");
        // SAFETY: the index is within the mapped memory.
        unsafe { &*self.base.add(index) }
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.words as u64 * 8
    }

    /// Reads words starting at `offset`. The other side may change them during the read.
    pub fn read(&self, offset: u64, into: &mut [u64]) {
        for (at, word) in (offset..).step_by(8).zip(into) {
            *word = self.word(at).load(Ordering::Relaxed);
        }
    }

    /// Writes words starting at `offset`.
    pub fn write(&self, offset: u64, from: &[u64]) {
        for (at, word) in (offset..).step_by(8).zip(from) {
            self.word(at).store(*word, Ordering::Relaxed);
        }
    }

    /// Returns the address of a word, for system calls.
    pub fn address(&self, offset: u64) -> *const u64 {
        self.word(offset).as_ptr().cast_const()
    }
}

impl Words for Shared {
    fn load(&self, offset: u64) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    fn store(&self, offset: u64, value: u64) {
        self.word(offset).store(value, Ordering::Release);
    }

    fn add(&self, offset: u64, value: u64) -> u64 {
        self.word(offset).fetch_add(value, Ordering::SeqCst).wrapping_add(value)
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}
