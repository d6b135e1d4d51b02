//! Class 0x9039, M2MF: copies in PGRAPH. Source: rnndb `graph/gf100_m2mf.xml`.

use crate::Field;

/// Does nothing.
pub const NOP: u32 = 0x100;
/// Waits for what was before.
pub const SERIALIZE: u32 = 0x110;
/// Destination block size (log2 GOBs in 11:8 depth, 7:4 height, 3:0 width).
pub const TILING_MODE_OUT: u32 = 0x204;
/// Destination width in bytes, when block linear.
pub const TILING_PITCH_OUT: u32 = 0x208;
/// Destination height in rows.
pub const TILING_HEIGHT_OUT: u32 = 0x20c;
/// Destination depth in slices.
pub const TILING_DEPTH_OUT: u32 = 0x210;
/// Destination slice.
pub const TILING_POSITION_OUT_Z: u32 = 0x214;
/// Source block size.
pub const TILING_MODE_IN: u32 = 0x220;
/// Source width in bytes, when block linear.
pub const TILING_PITCH_IN: u32 = 0x224;
/// Source height in rows.
pub const TILING_HEIGHT_IN: u32 = 0x228;
/// Source depth in slices.
pub const TILING_DEPTH_IN: u32 = 0x22c;
/// Source slice.
pub const TILING_POSITION_IN_Z: u32 = 0x230;
/// Destination address, bits 39:32.
pub const OFFSET_OUT_HIGH: u32 = 0x238;
/// Destination address, bits 31:0.
pub const OFFSET_OUT_LOW: u32 = 0x23c;
/// Starts the copy.
pub const EXEC: u32 = 0x300;
/// Inline source data.
pub const DATA: u32 = 0x304;
/// Source address, bits 39:32.
pub const OFFSET_IN_HIGH: u32 = 0x30c;
/// Source address, bits 31:0.
pub const OFFSET_IN_LOW: u32 = 0x310;
/// Bytes from one source line to the next, when pitch linear.
pub const PITCH_IN: u32 = 0x314;
/// Bytes from one destination line to the next, when pitch linear.
pub const PITCH_OUT: u32 = 0x318;
/// Bytes of a line.
pub const LINE_LENGTH_IN: u32 = 0x31c;
/// Lines.
pub const LINE_COUNT: u32 = 0x320;
/// Completion semaphore address, bits 39:32.
pub const NOTIFY_ADDRESS_HIGH: u32 = 0x32c;
/// Completion semaphore address, bits 31:0.
pub const NOTIFY_ADDRESS_LOW: u32 = 0x330;
/// Completion semaphore payload.
pub const NOTIFY_PAYLOAD: u32 = 0x334;
/// Source x in bytes, when block linear.
pub const TILING_POSITION_IN_X: u32 = 0x344;
/// Source y in rows.
pub const TILING_POSITION_IN_Y: u32 = 0x348;
/// Destination x in bytes, when block linear.
pub const TILING_POSITION_OUT_X: u32 = 0x34c;
/// Destination y in rows.
pub const TILING_POSITION_OUT_Y: u32 = 0x350;
/// Most lines of one copy.
pub const LINE_COUNT_MAX: u32 = 2047;

/// Fields of [`EXEC`].
pub mod exec {
    use super::Field;
    /// Source comes inline through [`super::DATA`].
    pub const INLINE: Field = Field::new(0, 0);
    /// Source is pitch linear.
    pub const LINEAR_IN: Field = Field::new(4, 4);
    /// Destination is pitch linear.
    pub const LINEAR_OUT: Field = Field::new(8, 8);
    /// Completion: 0 none, 1 flush, 2 semaphore.
    pub const COMPLETION: Field = Field::new(13, 12);
    /// Interrupt: 0 none, 1 non-stall.
    pub const INTERRUPT: Field = Field::new(17, 16);
    /// The semaphore is one word, not four.
    pub const SEMAPHORE_ONE_WORD: Field = Field::new(20, 20);
}
