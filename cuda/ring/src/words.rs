//! Words of shared memory.
//!
//! UNSAFETY: wraps memory that another process may change at any time. Every access is atomic, so its behaviour is
//! defined regardless of the other side.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// 64-bit words that both sides share. Offsets are in bytes and multiples of 8.
pub trait Words {
    /// Reads a word; later accesses of this thread happen after it.
    fn load(&self, offset: u64) -> u64;
    /// Writes a word; earlier accesses of this thread happen before it.
    fn store(&self, offset: u64, value: u64);
    /// Adds to a word, wrapping, with a full fence. Returns the sum.
    fn add(&self, offset: u64, value: u64) -> u64;
    /// Orders earlier stores before later loads.
    fn fence(&self);
}

/// A mapped blob, or a part of it.
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
    /// The memory must stay mapped, readable and writable, until the last use of the value. `address` must be a
    /// multiple of 8, and this process must access the memory only through values of this type.
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

    /// Reads words from `offset` on. The other side may change the words in the meantime.
    pub fn read(&self, offset: u64, into: &mut [u64]) {
        for (at, word) in (offset..).step_by(8).zip(into) {
            *word = self.word(at).load(Ordering::Relaxed);
        }
    }

    /// Writes words from `offset` on.
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
