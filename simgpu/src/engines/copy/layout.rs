//! Layout of a surface's bytes.
//!
//! A pitch-linear surface consists of lines at a constant distance. A block-linear surface consists of blocks, in order
//! of x, then y, then z; a block consists of stacked GOBs (64 bytes by 8 rows), slice after slice; in a GOB, rows are
//! contiguous. The MMU hides the lower level of reordering, which depends on a page's storage kind.

use nvspec::addr::{GpuVa, VA_BITS};

/// Log2 of the rows of a GOB.
pub const GOB_ROWS_LOG2: u32 = 3;
/// Log2 of the bytes in a row of a GOB.
pub const GOB_WIDTH_LOG2: u32 = 6;

/// A block-linear surface and the origin of its coordinates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// First byte.
    pub base: GpuVa,
    /// Log2 of the bytes in a row of a block.
    pub width_log2: u32,
    /// Log2 of the rows of a block.
    pub rows_log2: u32,
    /// Log2 of the slices of a block.
    pub slices_log2: u32,
    /// Distance between rows of blocks, in blocks.
    pub blocks_x: u64,
    /// Distance between layers of blocks, in rows of blocks.
    pub blocks_y: u64,
    /// Origin of x, in bytes.
    pub x: u64,
    /// Origin of y, in rows.
    pub y: u64,
    /// The slice.
    pub z: u64,
}

/// A surface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Surface {
    /// Pitch linear.
    Pitch {
        /// First byte of the first line.
        base: GpuVa,
        /// Bytes from one line to the next.
        pitch: i64,
    },
    /// Block linear.
    Blocks(Blocks),
}

/// Addresses have 40 bits and wrap.
/// GUESS: the engines' adders are as wide as an address.
const fn wrap(address: u64) -> GpuVa {
    GpuVa(address & ((1 << VA_BITS) - 1))
}

impl Surface {
    /// Returns the address of byte `x` of line `y`, and the number of contiguous bytes of the line from there
    /// (`u64::MAX` means all).
    #[must_use]
    pub const fn locate(&self, x: u64, y: u64) -> (GpuVa, u64) {
        match self {
            Self::Pitch { base, pitch } => {
                let line = base.0.wrapping_add_signed((y as i64).wrapping_mul(*pitch));
                (wrap(line.wrapping_add(x)), u64::MAX)
            }
            Self::Blocks(blocks) => blocks.locate(x, y),
        }
    }
}

impl Blocks {
    const fn locate(&self, x: u64, y: u64) -> (GpuVa, u64) {
        let (x, y, z) = (self.x.wrapping_add(x), self.y.wrapping_add(y), self.z);
        let (width, rows, slices) = (self.width_log2, self.rows_log2, self.slices_log2);
        let block = (z >> slices)
            .wrapping_mul(self.blocks_y)
            .wrapping_add(y >> rows)
            .wrapping_mul(self.blocks_x)
            .wrapping_add(x >> width);
        let within = (((low_bits(z, slices) << rows) + low_bits(y, rows)) << width) + low_bits(x, width);
        let address = self.base.0.wrapping_add(block << (width + rows + slices)).wrapping_add(within);
        (wrap(address), (1 << width) - low_bits(x, width))
    }
}

const fn low_bits(value: u64, bits: u32) -> u64 {
    value & ((1 << bits) - 1)
}
