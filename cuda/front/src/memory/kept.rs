//! Descriptors of chunks, kept for the next owner: the driver exports no handle that was imported.
//!
//! UNSAFETY: copies and closes descriptors by number.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// Lowest number of a kept descriptor: programs that use `select` need the numbers below for their own.
const LOWEST: i32 = 1024;
/// Words of a bit for each descriptor.
const WORDS: usize = 1 << 14;

/// Numbers that are kept, for the child after `fork`.
static KEPT: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

/// A descriptor with a high number, which no child of the program keeps.
#[derive(Debug)]
pub struct Kept(OwnedFd);

impl Kept {
    /// Keeps a copy of `descriptor`, if the process may have one more.
    pub fn new(descriptor: &OwnedFd) -> Option<Self> {
        // SAFETY: the descriptor is open and only copied.
        let copy = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_DUPFD_CLOEXEC, LOWEST) };
        if copy < 0 {
            return None;
        }
        // SAFETY: the copy is new and nobody else's.
        let copy = unsafe { OwnedFd::from_raw_fd(copy) };
        let (word, bit) = place(copy.as_raw_fd())?;
        word.fetch_or(bit, Ordering::SeqCst);
        Some(Self(copy))
    }
}

impl AsFd for Kept {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some((word, bit)) = place(self.0.as_raw_fd()) {
            word.fetch_and(!bit, Ordering::SeqCst);
        }
    }
}

fn place(descriptor: i32) -> Option<(&'static AtomicU64, u64)> {
    let number = usize::try_from(descriptor).ok()?;
    Some((KEPT.get(number / 64)?, 1 << (number % 64)))
}

/// Closes them all in a child after `fork`: memory that the program gives up would live on with them.
pub fn forked() {
    for (at, word) in KEPT.iter().enumerate() {
        let mut bits = word.swap(0, Ordering::SeqCst);
        while bits != 0 {
            let number = at * 64 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            // SAFETY: the child's own copy of a descriptor that only this module uses.
            unsafe { libc::close(number as i32) };
        }
    }
}

/// Lets the process have as many descriptors as the system allows it.
pub fn raise_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a local.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_descriptor_has_a_high_number_and_is_forgotten_when_it_is_dropped() {
        raise_limit();
        let (one, _other) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let kept = Kept::new(&OwnedFd::from(one)).expect("kept");
        let number = kept.as_fd().as_raw_fd();
        let (word, bit) = place(number).expect("a place");
        assert!(number >= LOWEST && word.load(Ordering::SeqCst) & bit != 0);
        drop(kept);
        assert_eq!(word.load(Ordering::SeqCst) & bit, 0);
    }
}
