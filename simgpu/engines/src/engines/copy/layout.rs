//! Computes the addresses of a surface's bytes.
//!
//! A pitch-linear surface consists of lines at a constant stride. A block-linear surface consists of blocks, ordered by
//! x, then y, then z. A block consists of slices of stacked GOBs (64 bytes by 8 rows each), and each row of a GOB is
//! contiguous. The MMU hides a further permutation within a page, which depends on the page's storage kind.

use nvspec::addr::{GpuVa, VA_BITS};

/// Log2 of the number of rows per GOB.
pub const GOB_ROWS_LOG2: u32 = 3;
/// Log2 of the row length of a GOB in bytes.
pub const GOB_WIDTH_LOG2: u32 = 6;

/// A block-linear surface and the origin of its coordinates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Address of the surface's first byte.
    pub base: GpuVa,
    /// Log2 of the row length of a block in bytes.
    pub width_log2: u32,
    /// Log2 of the number of rows per block.
    pub rows_log2: u32,
    /// Log2 of the number of slices per block.
    pub slices_log2: u32,
    /// Number of blocks per row of blocks.
    pub blocks_x: u64,
    /// Number of rows of blocks per layer.
    pub blocks_y: u64,
    /// X origin in bytes.
    pub x: u64,
    /// Y origin in rows.
    pub y: u64,
    /// Z origin in slices.
    pub z: u64,
}

/// A surface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Surface {
    /// Pitch-linear.
    Pitch {
        /// Address of the first byte of the first line.
        base: GpuVa,
        /// Distance between lines in bytes.
        pitch: i64,
    },
    /// Block-linear.
    Blocks(Blocks),
}

/// Wraps an address to 40 bits. GUESS: the engines' adders are as wide as an address.
const fn wrap(address: u64) -> GpuVa {
    GpuVa(address & ((1 << VA_BITS) - 1))
}

impl Surface {
    /// Returns the address of byte `x` of line `y`, and the number of bytes of the line that are contiguous from there
    /// (`u64::MAX` if the whole line is contiguous).
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
