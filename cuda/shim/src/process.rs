//! Rules for running inside the program's process.
//!
//! Locks: a forked child never waits for a lock that a thread of its parent held.
//!
//! Signals: the library's threads block all signals except `SIGSYS`.
//!
//! UNSAFETY: calls C library functions for signal masks.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// An action that runs once. A child never waits for a thread of its parent that was running the action.
#[derive(Debug)]
pub struct Once {
    once: std::sync::Once,
    /// ID of the process whose threads may run the action or wait for it, or 0 before the first run.
    process: AtomicU32,
    done: AtomicBool,
}

impl Once {
    pub const fn new() -> Self {
        Self { once: std::sync::Once::new(), process: AtomicU32::new(0), done: AtomicBool::new(false) }
    }

    /// Runs the action, or waits for the thread that runs it. Returns false in a child if its parent forked during the
    /// action.
    pub fn run(&self, work: impl FnOnce()) -> bool {
        if self.done.load(Ordering::SeqCst) {
            return true;
        }
        let own = std::process::id();
        let begun = self.process.compare_exchange(0, own, Ordering::SeqCst, Ordering::SeqCst);
        if begun.is_err_and(|process| process != own) {
            return self.done.load(Ordering::SeqCst);
        }
        self.once.call_once(|| {
            work();
            self.done.store(true, Ordering::SeqCst);
        });
        true
    }
}

/// A lock that a child does not wait for if a thread of its parent held it during the fork.
#[derive(Debug)]
pub struct Lock<T> {
    value: Mutex<T>,
    /// ID of the process whose threads may wait for the lock, or 0 before its first use.
    process: AtomicU32,
}

impl<T> Lock<T> {
    pub const fn new(value: T) -> Self {
        Self { value: Mutex::new(value), process: AtomicU32::new(0) }
    }

    /// Acquires the lock. Returns `None` in a child whose parent held the lock during the fork.
    pub fn take(&self) -> Option<MutexGuard<'_, T>> {
        let own = std::process::id();
        let before = self.process.compare_exchange(0, own, Ordering::SeqCst, Ordering::SeqCst);
        if before.is_ok() || before == Err(own) {
            return Some(self.value.lock().unwrap_or_else(PoisonError::into_inner));
        }
        match self.value.try_lock() {
            Ok(guard) => {
                self.process.store(own, Ordering::SeqCst);
                Some(guard)
            }
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            // Another thread of the child may have just acquired the lock.
            Err(TryLockError::WouldBlock) if self.process.load(Ordering::SeqCst) == own => {
                Some(self.value.lock().unwrap_or_else(PoisonError::into_inner))
            }
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// Blocks all signals except `SIGSYS` for this thread until dropped. A sandbox around the program may intercept this
/// thread's own system calls with `SIGSYS`.
pub struct Blocked(libc::sigset_t);

impl Blocked {
    pub fn new() -> Self {
        // SAFETY: both sets are local variables, and the first is filled before it is read.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::sigdelset(&raw mut all, libc::SIGSYS);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self(before)
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the set is the thread's previous signal mask.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}

/// Starts a thread that does not receive the program's signals.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // A new thread inherits the signal mask of its creator.
    let _blocked = Blocked::new();
    std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_does_not_wait_for_a_lock_that_its_parent_held() {
        let lock = Lock::new(1);
        let held = lock.take().expect("free");
        // Simulate the state in a child: another process acquired the lock, and never releases it here.
        lock.process.store(std::process::id() + 1, Ordering::SeqCst);
        assert!(lock.take().is_none());
        drop(held);
        // Simulate a lock that was free at the fork.
        assert_eq!(lock.take().map(|value| *value), Some(1));
        assert_eq!(lock.process.load(Ordering::SeqCst), std::process::id());
    }

    #[test]
    fn library_thread_blocks_signals_and_caller_mask_is_unchanged() {
        let mask = || {
            // SAFETY: the set is a local variable, and the call does not change the signal mask.
            unsafe {
                let mut set: libc::sigset_t = std::mem::zeroed();
                libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut set);
                [libc::SIGTERM, libc::SIGINT, libc::SIGPROF, libc::SIGSYS]
                    .map(|signal| libc::sigismember(&raw const set, signal))
            }
        };
        let before = mask();
        let (sender, receiver) = std::sync::mpsc::channel();
        spawn("test", move || sender.send(mask()).expect("heard")).expect("started");
        assert_eq!(receiver.recv(), Ok([1, 1, 1, 0]));
        assert_eq!(mask(), before);
    }
}
