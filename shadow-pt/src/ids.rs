//! Address space identifiers, and ranges of guest memory.

use nvspec::addr::{Gpa, GuestVramAddr};

/// Maximum number of address spaces per VM: one per channel of the chip, and one per aperture.
pub const MAX_SPACES: usize = 130;
/// Number of index bits in a [`SpaceId`]. The remaining bits distinguish successive spaces with the same index.
const INDEX_BITS: u32 = 8;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;
const _: () = assert!(MAX_SPACES <= 1 << INDEX_BITS);

/// A range of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestRange {
    /// Guest VRAM: start address and length in bytes.
    Vram(GuestVramAddr, u64),
    /// Guest RAM: start address and length in bytes.
    Ram(Gpa, u64),
}

impl GuestRange {
    /// Returns a flag that is true for RAM, the start address, and the length in bytes.
    pub(crate) const fn parts(self) -> (bool, u64, u64) {
        match self {
            Self::Vram(start, len) => (false, start.0, len),
            Self::Ram(start, len) => (true, start.0, len),
        }
    }
}

/// Identifies an address space of a VM. The identifier becomes invalid when the address space is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpaceId(u32);

impl SpaceId {
    /// Creates an identifier from a [generation](Self::generation_of) and an index less than [`MAX_SPACES`].
    pub(crate) const fn new(generation: u32, index: u32) -> Self {
        Self(generation | index)
    }

    /// Returns the generation of the `count`-th address space.
    pub(crate) const fn generation_of(count: u32) -> u32 {
        count.wrapping_shl(INDEX_BITS)
    }

    /// Returns the generation, which distinguishes the address space from previous ones with the same index.
    pub(crate) const fn generation(self) -> u32 {
        self.0 & !INDEX_MASK
    }

    pub(crate) fn index(self) -> usize {
        (self.0 & INDEX_MASK) as usize
    }
}
