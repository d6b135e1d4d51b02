//! Kinds and sizes of blobs, and offsets in them.

/// Kind of a blob. A guest passes it as `blob_id` when it creates a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlobKind {
    /// Status, ring positions, slots, and areas for replies. Each program has one such blob and creates it first.
    Control,
    /// The rings' messages. Each program has one such blob.
    Ring,
    /// Buffer for copies between pageable memory and the card. Each program has at most one such blob.
    Staging,
    /// Pinned memory. A program can have any number of such blobs.
    Pinned,
}

impl BlobKind {
    /// Returns the kind's number in messages.
    pub const fn number(self) -> u32 {
        match self {
            Self::Control => 1,
            Self::Ring => 2,
            Self::Staging => 3,
            Self::Pinned => 4,
        }
    }

    /// Returns the kind with the given number.
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Control),
            2 => Some(Self::Ring),
            3 => Some(Self::Staging),
            4 => Some(Self::Pinned),
            _ => None,
        }
    }

    /// Returns the minimum size in bytes, or `None` if any size is permitted.
    pub const fn bytes(self) -> Option<u64> {
        match self {
            Self::Control => Some(control::BYTES),
            Self::Ring => Some(ring::BYTES),
            Self::Staging => Some(staging::BYTES),
            Self::Pinned => None,
        }
    }
}

/// Granularity of blob sizes, in bytes.
pub const BLOB_GRANULE: u64 = 64 << 10;

/// Range of addresses that are identical in the guest and the worker.
pub const ADDRESSES: std::ops::Range<u64> = 0x2000_0000_0000..0x4000_0000_0000;
/// First address of pinned memory. Device memory is below it.
pub const PINNED_ADDRESSES: u64 = 0x3000_0000_0000;

/// The control blob: byte offsets of its 64-bit words. Words written by different sides are on separate cache lines.
pub mod control {
    /// Version of the layout and messages. The guest writes it before it creates another blob.
    pub const VERSION: u64 = 0x00;
    /// State of the worker: one of [`state`](super::state). Written by the worker, or by the device after the worker
    /// has exited.
    pub const STATE: u64 = 0x40;
    /// Number of the worker's `Reason`, if the state is `LOST`.
    pub const REASON: u64 = 0x48;
    /// CUDA error code that all later calls return, or 0.
    pub const STICKY: u64 = 0x50;
    /// Write position of the guest in the ordered ring.
    pub const HEAD: u64 = 0x80;
    /// Read position of the worker in the ordered ring.
    pub const TAIL: u64 = 0xc0;
    /// Nonzero while the worker sleeps and waits for a doorbell.
    pub const ASLEEP: u64 = 0x100;
    /// Number of guest threads that have announced a wait.
    pub const WAITING: u64 = 0x140;
    /// Number of notifications sent by the worker. The low half is the futex of the loopback transport.
    pub const EVENTS: u64 = 0x180;
    /// Write position of the guest in the side ring.
    pub const SIDE_HEAD: u64 = 0x1c0;
    /// Read position of the worker in the side ring.
    pub const SIDE_TAIL: u64 = 0x200;
    /// Number of callbacks posted by the worker.
    pub const CALLBACKS_POSTED: u64 = 0x240;
    /// Number of callbacks completed by the guest.
    pub const CALLBACKS_DONE: u64 = 0x280;
    /// Number of bytes of kernels' output that the guest has not taken. Written by the worker.
    pub const OUTPUT: u64 = 0x2c0;
    /// Ring of callback identifiers, with [`CALLBACK_COUNT`] words.
    pub const CALLBACKS: u64 = 0x400;
    /// Maximum number of posted callbacks that have not completed. A power of two.
    pub const CALLBACK_COUNT: u64 = 64;
    /// Counters of completed uses, one word per staging buffer.
    pub const PIECES: u64 = 0x800;
    /// Offset of the first slot.
    pub const SLOTS: u64 = 0x1000;
    /// Number of slots.
    pub const SLOT_COUNT: u64 = 1024;
    /// Size of a slot in bytes. A slot contains a sequence number, a result, and six words.
    pub const SLOT_BYTES: u64 = 64;
    /// Offset of the first area.
    pub const AREAS: u64 = 0x20000;
    /// Number of areas.
    pub const AREA_COUNT: u64 = 16;
    /// Size of an area in bytes.
    pub const AREA_BYTES: u64 = 64 << 10;
    /// Size of the blob in bytes.
    pub const BYTES: u64 = AREAS + AREA_COUNT * AREA_BYTES;
}

/// Values of the word [`control::STATE`].
pub mod state {
    /// The worker has not started.
    pub const STARTING: u64 = 0;
    /// The worker serves the rings.
    pub const READY: u64 = 1;
    /// The worker has exited. All calls return an error.
    pub const LOST: u64 = 2;
}

/// The ring blob: both rings.
pub mod ring {
    /// Offset of the ordered ring.
    pub const ORDERED: u64 = 0;
    /// Size of the ordered ring in bytes. A power of two.
    pub const ORDERED_BYTES: u64 = 4 << 20;
    /// Offset of the side ring.
    pub const SIDE: u64 = ORDERED + ORDERED_BYTES;
    /// Size of the side ring in bytes. A power of two.
    pub const SIDE_BYTES: u64 = 256 << 10;
    /// Size of the blob in bytes.
    pub const BYTES: u64 = SIDE + SIDE_BYTES;
}

/// The staging blob: buffers for copies.
pub mod staging {
    /// Size of a buffer in bytes.
    pub const PIECE_BYTES: u64 = 1 << 20;
    /// Number of buffers.
    pub const PIECE_COUNT: u64 = 32;
    /// Size of the blob in bytes.
    pub const BYTES: u64 = PIECE_BYTES * PIECE_COUNT;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_granules_and_parts_do_not_overlap() {
        let kinds = [BlobKind::Control, BlobKind::Ring, BlobKind::Staging, BlobKind::Pinned];
        for kind in kinds {
            assert_eq!(BlobKind::from_number(kind.number()), Some(kind));
            assert!(kind.bytes().is_none_or(|bytes| bytes.is_multiple_of(BLOB_GRANULE)), "{kind:?}");
        }
        assert_eq!(BlobKind::from_number(0), None);
        const {
            assert!(control::CALLBACKS_DONE < control::OUTPUT && control::OUTPUT < control::CALLBACKS);
            assert!(control::CALLBACKS + 8 * control::CALLBACK_COUNT <= control::PIECES);
            assert!(control::PIECES + 8 * staging::PIECE_COUNT <= control::SLOTS);
            assert!(control::SLOTS + control::SLOT_COUNT * control::SLOT_BYTES <= control::AREAS);
        }
    }
}
