//! Memory that a guest's CUDA library and its worker share, and the rings in it.
//!
//! The memory is in *blobs* of one window ([`BlobKind`]). [`layout`] has the offsets in the control blob.

mod layout;
mod transport;

pub use layout::{ADDRESSES, BLOB_GRANULE, BlobKind, PINNED_ADDRESSES, control, ring, staging, state};
pub use transport::{Blob, Transport};
