//! An event that wakes a waiting thread.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};

/// An event that wakes a server's thread.
#[derive(Debug)]
pub struct Wake(OwnedFd);

impl Wake {
    /// Creates an event that is not set. Fails if no file descriptor is available.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Sets the event, which remains set until the waiting thread clears it.
    pub fn wake(&self) {
        // The write fails only if the counter is full. The event is then already set.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Clears the event.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }

    /// Returns the event's descriptor, which can be polled for reading.
    pub fn fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.0)
    }

    /// Returns the event's descriptor number, for a signal handler.
    #[must_use]
    pub fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
