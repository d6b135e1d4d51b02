//! The guest library's way to its worker.

use std::io;

use crate::layout::BlobKind;

/// A blob of the window that is mapped in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blob {
    /// Its identifier in messages to the worker.
    pub id: u32,
    /// Its address in this process.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
}

/// Creates shared memory, wakes the worker, and waits for it. Any thread may call any function.
pub trait Transport: Send + Sync {
    /// Creates a blob and maps it, readable and writable, and not in children (`MADV_DONTFORK`): at `address` if given,
    /// in place of the pages that are mapped there, otherwise at an address that the kernel chooses. The worker learns
    /// of the blob before a doorbell that is rung later.
    ///
    /// # Errors
    /// If the window or the limit of memory is exhausted.
    fn create(&self, kind: BlobKind, bytes: u64, address: Option<u64>) -> io::Result<Blob>;

    /// Gives a blob back. With `keep_range`, its addresses stay reserved, inaccessible; otherwise they are free.
    ///
    /// # Errors
    /// If the blob cannot be unmapped.
    fn remove(&self, blob: Blob, keep_range: bool) -> io::Result<()>;

    /// Wakes the worker, which has announced that it sleeps.
    ///
    /// # Errors
    /// If the worker or the device has gone.
    fn doorbell(&self) -> io::Result<()>;

    /// Waits until the word at `offset` in the control blob is at least `value`, or the worker has gone; may return
    /// earlier. The caller has announced the wait ([`crate::control::WAITING`]).
    ///
    /// # Errors
    /// If the worker or the device has gone.
    fn wait(&self, offset: u64, value: u64) -> io::Result<()>;

    /// Closes the descriptors in a child of the process.
    fn close_in_child(&self);
}
