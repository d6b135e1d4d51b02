//! The guest library's connection to its worker.

use std::io;

use crate::layout::BlobKind;

/// A blob in the window, mapped in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blob {
    /// The blob's identifier in messages to the worker.
    pub id: u32,
    /// The blob's address in this process.
    pub address: u64,
    /// The blob's size in bytes.
    pub bytes: u64,
}

/// Creates shared memory, wakes the worker, and waits for it. All functions can be called from any thread.
pub trait Transport: Send + Sync {
    /// Creates a blob and maps it as readable, writable, and not inherited by children (`MADV_DONTFORK`). If `address`
    /// is given, the mapping replaces the pages there. Otherwise, the kernel chooses the address. The worker is
    /// notified of the blob before any later doorbell.
    ///
    /// # Errors
    /// Returns an error if the window or the memory limit is exhausted.
    fn create(&self, kind: BlobKind, bytes: u64, address: Option<u64>) -> io::Result<Blob>;

    /// Removes a blob. If `keep_range` is true, the blob's addresses remain reserved and become inaccessible.
    /// Otherwise, they become free.
    ///
    /// # Errors
    /// Returns an error if the blob cannot be unmapped.
    fn remove(&self, blob: Blob, keep_range: bool) -> io::Result<()>;

    /// Wakes the worker, which must have announced that it sleeps.
    ///
    /// # Errors
    /// Returns an error if the worker has exited or the device no longer exists.
    fn doorbell(&self) -> io::Result<()>;

    /// Waits until the word at `offset` in the control blob is at least `value` or the worker has exited. May return
    /// earlier. The caller must have announced the wait ([`crate::control::WAITING`]).
    ///
    /// # Errors
    /// Returns an error if the worker has exited or the device no longer exists.
    fn wait(&self, offset: u64, value: u64) -> io::Result<()>;

    /// Closes the transport's descriptors in a forked child.
    fn close_in_child(&self);
}
