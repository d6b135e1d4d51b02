//! Sizes and offsets in an instance block.

use nvspec::instance::{INSTANCE_BYTES, context};

/// Size of an instance block in bytes, for array lengths.
pub(crate) const BLOCK: usize = 4096;
const _: () = assert!(INSTANCE_BYTES == BLOCK as u64);

/// Offsets of the supported engine context pointers: PGRAPH, CE0, CE1.
pub(crate) const CONTEXTS: [u64; 3] = [context::GR, context::CE0, context::CE1];
