//! Sizes and places in an instance block.

use nvspec::instance::{INSTANCE_BYTES, context};

/// Size of the instance block in bytes, as an array's length.
pub(crate) const BLOCK: usize = 4096;
const _: () = assert!(INSTANCE_BYTES == BLOCK as u64);

/// Engine context pointers that are used: PGRAPH, CE0, CE1.
pub(crate) const CONTEXTS: [u64; 3] = [context::GR, context::CE0, context::CE1];
