//! Classes 0x90b5 and 0x90b8, the copy engine. Source: rnndb `fifo/gt212_pcopy.xml` and what nouveau emits.

use crate::Field;

/// Does nothing.
pub const NOP: u32 = 0x100;
/// Starts the copy.
pub const EXEC: u32 = 0x300;
/// Source address, bits 39:32.
pub const SRC_ADDRESS_HIGH: u32 = 0x30c;
/// Source address, bits 31:0.
pub const SRC_ADDRESS_LOW: u32 = 0x310;
/// Destination address, bits 39:32.
pub const DST_ADDRESS_HIGH: u32 = 0x314;
/// Destination address, bits 31:0.
pub const DST_ADDRESS_LOW: u32 = 0x318;
/// Bytes from one source line to the next, when pitch linear.
pub const SRC_PITCH: u32 = 0x31c;
/// Bytes from one destination line to the next, when pitch linear.
pub const DST_PITCH: u32 = 0x320;
/// Elements (bytes, without swizzle) of a line.
pub const X_COUNT: u32 = 0x324;
/// Lines.
pub const Y_COUNT: u32 = 0x328;

/// Fields of [`EXEC`].
pub mod exec {
    use super::Field;
    /// Source is pitch linear.
    pub const SRC_LINEAR: Field = Field::new(4, 4);
    /// Destination is pitch linear.
    pub const DST_LINEAR: Field = Field::new(8, 8);
}
