//! Memory shared by a guest's CUDA library and its worker, and the rings in it.
//!
//! - [`BlobKind`], [`control`], [`ring`], [`staging`]: the layout of the blobs in the window.
//! - [`Words`]: access to shared words. [`Shared`] is mapped memory; tests use a model with store buffers.
//! - [`Producer`] and [`Consumer`]: messages in a ring. [`slots`]: replies to messages.
//! - [`sleep`]: the protocol for sleeping and waking on both sides.
//! - [`Transport`]: the guest library's connection to its worker.
//!
//! The worker does not trust this memory: it copies each message before checking it. The crate does not depend on CUDA.

#[cfg(test)]
mod interleavings;
mod layout;
mod rings;
pub mod sleep;
pub mod slots;
mod transport;
mod words;

pub use layout::{ADDRESSES, BLOB_GRANULE, BlobKind, PINNED_ADDRESSES, control, ring, staging, state};
pub use rings::{Broken, Consumer, Full, Geometry, Header, MAX_WORDS, PAD, Producer};
pub use transport::{Blob, Transport};
pub use words::{Shared, Words};

/// Version of the layout and of the messages.
pub const VERSION: u64 = 2;
