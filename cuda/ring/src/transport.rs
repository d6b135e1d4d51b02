//! The guest library's connection to its worker.

use std::io;

use crate::layout::BlobKind;

/// A blob of the window that is mapped in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blob {
    /// The blob's identifier in messages to the worker.
    pub id: u32,
    /// The blob's address in this process.
    pub address: u64,
    /// The blob's size in bytes.
    pub bytes: u64,
}

/// Creates shared memory, wakes the worker, and waits for it. Any thread may call any of these functions.
pub trait Transport: Send + Sync {
    /// Creates a blob, and maps it readable, writable, and not inherited by children (`MADV_DONTFORK`). The mapping
    /// replaces the pages at `address` if an address is given; otherwise, the kernel chooses the address. The worker is
    /// notified of the blob before any later doorbell.
    ///
    /// # Errors
    /// Returns an error if the window or the memory limit is exhausted.
    fn create(&self, kind: BlobKind, bytes: u64, address: Option<u64>) -> io::Result<Blob>;

    /// Returns a blob. With `keep_range`, the blob's addresses stay reserved and inaccessible; otherwise, they become
    /// free.
    ///
    /// # Errors
    /// Returns an error if the blob cannot be unmapped.
    fn remove(&self, blob: Blob, keep_range: bool) -> io::Result<()>;

    /// Wakes the worker, which has announced that it sleeps.
    ///
    /// # Errors
    /// Returns an error if the worker or the device has ended.
    fn doorbell(&self) -> io::Result<()>;

    /// Waits until the word at `offset` in the control blob is at least `value`, or the worker has ended. May return
    /// earlier. The caller must already have announced the wait ([`crate::control::WAITING`]).
    ///
    /// # Errors
    /// Returns an error if the worker or the device has ended.
    fn wait(&self, offset: u64, value: u64) -> io::Result<()>;

    /// Closes the descriptors in a child of this process.
    fn close_in_child(&self);
}
