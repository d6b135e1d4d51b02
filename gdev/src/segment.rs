//! Memory shared by several contexts: keyed segments, and references within a process.

use std::any::Any;
use std::sync::Arc;

/// A shared segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    /// ID of the segment, valid in all contexts of the machine.
    pub id: u32,
    /// Size in bytes.
    pub bytes: u64,
}

/// A request for a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentRequest {
    /// Key of the segment, or 0 for a segment without a key.
    pub key: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// True to create the segment if the key is unused.
    pub create: bool,
    /// True to share the segment with the group's other machines.
    pub group: bool,
    /// File-style permissions in this machine: 0o600 for the owner, 0o006 for others.
    pub mode: u32,
    /// True to give the group's other machines write access. Otherwise, they have read-only access.
    pub group_writes: bool,
}

impl SegmentRequest {
    /// Returns a request for an existing segment.
    #[must_use]
    pub const fn find(key: u64, bytes: u64) -> Self {
        Self { key, bytes, create: false, group: false, mode: 0o600, group_writes: false }
    }

    /// Returns a request that finds a segment, or creates one that only its owner can access.
    #[must_use]
    pub const fn create(key: u64, bytes: u64) -> Self {
        Self { create: true, ..Self::find(key, bytes) }
    }
}

/// Memory exported for [`crate::Context::reference`]. This value keeps the memory alive.
#[derive(Clone, Debug)]
pub struct Shared {
    /// Size in bytes.
    pub(crate) bytes: u64,
    /// The backend's reference, opaque to other backend types.
    source: Arc<dyn Any + Send + Sync>,
}

impl Shared {
    /// Creates a value from a backend's reference.
    pub fn new(bytes: u64, source: impl Any + Send + Sync) -> Self {
        Self { bytes, source: Arc::new(source) }
    }

    /// Returns the reference if it has type `T`.
    #[must_use]
    pub fn source<T: Any>(&self) -> Option<&T> {
        self.source.downcast_ref()
    }
}
