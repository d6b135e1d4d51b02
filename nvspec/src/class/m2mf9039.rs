//! Class 0x9039, M2MF: copies in PGRAPH.
//!
//! Sizes and positions in block-linear surfaces are in bytes, rows and slices.
//!
//! Source: NVIDIA's class header, rnndb `graph/gf100_m2mf.xml`, nouveau, and Mesa.

use crate::Field;

/// No operation.
pub const NOP: u32 = 0x100;
/// Waits for earlier work to complete.
#[doc(alias = "WAIT_FOR_IDLE")]
pub const SERIALIZE: u32 = 0x110;
/// Makes the front end go idle.
pub const SEND_GO_IDLE: u32 = 0x13c;
/// Triggers the performance counters.
pub const PM_TRIGGER: u32 = 0x140;
/// Header of the instrumentation method.
pub const INSTRUMENTATION_HEADER: u32 = 0x150;
/// Data of the instrumentation method.
pub const INSTRUMENTATION_DATA: u32 = 0x154;
/// Source block size. See [`block_size`].
pub const TILING_MODE_IN: u32 = 0x204;
/// Source width in bytes, if block-linear.
pub const TILING_PITCH_IN: u32 = 0x208;
/// Source height in rows.
pub const TILING_HEIGHT_IN: u32 = 0x20c;
/// Source depth in slices.
pub const TILING_DEPTH_IN: u32 = 0x210;
/// Source slice.
pub const TILING_POSITION_IN_Z: u32 = 0x214;
/// Destination block size. See [`block_size`].
pub const TILING_MODE_OUT: u32 = 0x220;
/// Destination width in bytes, if block-linear.
pub const TILING_PITCH_OUT: u32 = 0x224;
/// Destination height in rows.
pub const TILING_HEIGHT_OUT: u32 = 0x228;
/// Destination depth in slices.
pub const TILING_DEPTH_OUT: u32 = 0x22c;
/// Destination slice.
pub const TILING_POSITION_OUT_Z: u32 = 0x230;
/// Destination address, bits 39:32.
pub const OFFSET_OUT_HIGH: u32 = 0x238;
/// Destination address, bits 31:0.
pub const OFFSET_OUT_LOW: u32 = 0x23c;
/// First of the spare and firmware methods, which store a value but do not affect copies.
pub const SPARE_FIRST: u32 = 0x240;
/// Last of the spare and firmware methods.
pub const SPARE_LAST: u32 = 0x2fc;
/// Starts the copy.
#[doc(alias = "LAUNCH_DMA")]
pub const EXEC: u32 = 0x300;
/// Inline source data.
pub const DATA: u32 = 0x304;
/// Overrides the render condition. See [`render_override`].
pub const RENDER_ENABLE_OVERRIDE: u32 = 0x308;
/// Source address, bits 39:32.
pub const OFFSET_IN_HIGH: u32 = 0x30c;
/// Source address, bits 31:0.
pub const OFFSET_IN_LOW: u32 = 0x310;
/// Signed distance in bytes between source lines, if pitch-linear.
pub const PITCH_IN: u32 = 0x314;
/// Signed distance in bytes between destination lines, if pitch-linear.
pub const PITCH_OUT: u32 = 0x318;
/// Line length in bytes.
pub const LINE_LENGTH_IN: u32 = 0x31c;
/// Number of lines.
pub const LINE_COUNT: u32 = 0x320;
/// Completion semaphore address, bits 39:32.
pub const NOTIFY_ADDRESS_HIGH: u32 = 0x32c;
/// Completion semaphore address, bits 31:0.
pub const NOTIFY_ADDRESS_LOW: u32 = 0x330;
/// Completion semaphore payload.
pub const NOTIFY_PAYLOAD: u32 = 0x334;
/// Render condition address, bits 39:32.
pub const COND_ADDRESS_HIGH: u32 = 0x338;
/// Render condition address, bits 31:0.
pub const COND_ADDRESS_LOW: u32 = 0x33c;
/// Render condition mode. See [`cond_mode`].
pub const COND_MODE: u32 = 0x340;
/// Source x in bytes, if block-linear.
pub const TILING_POSITION_IN_X: u32 = 0x344;
/// Source y in rows.
pub const TILING_POSITION_IN_Y: u32 = 0x348;
/// Destination x in bytes, if block-linear.
pub const TILING_POSITION_OUT_X: u32 = 0x34c;
/// Destination y in rows.
pub const TILING_POSITION_OUT_Y: u32 = 0x350;
/// Maximum number of lines per copy.
pub const LINE_COUNT_MAX: u32 = 2047;

/// Fields of [`EXEC`].
pub mod exec {
    use super::Field;
    /// Set if source data is inline, through [`super::DATA`].
    pub const INLINE: Field = Field::new(0, 0);
    /// Set if the source is pitch-linear.
    pub const LINEAR_IN: Field = Field::new(4, 4);
    /// Set if the destination is pitch-linear.
    pub const LINEAR_OUT: Field = Field::new(8, 8);
    /// Completion action, one of the following values.
    pub const COMPLETION: Field = Field::new(13, 12);
    /// No completion action.
    pub const COMPLETION_NONE: u32 = 0;
    /// Flush writes.
    pub const COMPLETION_FLUSH: u32 = 1;
    /// Flush writes, then release the semaphore.
    pub const COMPLETION_SEMAPHORE: u32 = 2;
    /// Interrupt to raise: 0 for none, or 1 for a non-stall interrupt.
    pub const INTERRUPT: Field = Field::new(17, 16);
    /// No interrupt.
    pub const INTERRUPT_NONE: u32 = 0;
    /// Interrupt at completion.
    pub const INTERRUPT_NON_STALL: u32 = 1;
    /// Set if the semaphore is one dword instead of four.
    pub const SEMAPHORE_ONE_WORD: Field = Field::new(20, 20);
    /// Mask of all defined bits.
    pub const MASK: u32 = INLINE.mask()
        | LINEAR_IN.mask()
        | LINEAR_OUT.mask()
        | COMPLETION.mask()
        | INTERRUPT.mask()
        | SEMAPHORE_ONE_WORD.mask();
}

/// Fields of [`TILING_MODE_IN`] and [`TILING_MODE_OUT`].
pub mod block_size {
    use super::Field;
    /// Block depth: log2 of the number of slices.
    pub const DEPTH: Field = Field::new(11, 8);
    /// Block height: log2 of the number of GOBs (8 rows each).
    pub const HEIGHT: Field = Field::new(7, 4);
    /// Block width: log2 of the number of GOBs (64 bytes each). Must be 0.
    pub const WIDTH: Field = Field::new(3, 0);
    /// Maximum value of [`HEIGHT`] and [`DEPTH`].
    pub const LOG2_MAX: u32 = 5;
}

/// Values of [`COND_MODE`].
pub mod cond_mode {
    /// Skip copies.
    pub const NEVER: u32 = 0;
    /// Execute copies.
    pub const ALWAYS: u32 = 1;
    /// Execute copies if the result in memory is nonzero.
    pub const IF_NOT_ZERO: u32 = 2;
    /// Execute copies if the two results in memory are equal.
    pub const IF_EQUAL: u32 = 3;
    /// Execute copies if the two results in memory differ.
    pub const IF_NOT_EQUAL: u32 = 4;
}

/// Values of [`RENDER_ENABLE_OVERRIDE`].
pub mod render_override {
    /// The condition determines whether copies are executed.
    pub const NONE: u32 = 0;
    /// Execute copies.
    pub const ALWAYS: u32 = 1;
    /// Skip copies.
    pub const NEVER: u32 = 2;
}

/// Returns the mask of valid data bits of a method, or `None` if the method does not exist or is not declared.
#[must_use]
pub const fn method_mask(method: u32) -> Option<u32> {
    Some(match method {
        TILING_MODE_IN | TILING_MODE_OUT => 0xfff,
        OFFSET_OUT_HIGH | OFFSET_IN_HIGH | NOTIFY_ADDRESS_HIGH | COND_ADDRESS_HIGH => 0xff,
        EXEC => exec::MASK,
        RENDER_ENABLE_OVERRIDE => 0x3,
        COND_MODE => 0x7,
        TILING_POSITION_IN_X | TILING_POSITION_OUT_X => 0xf_ffff,
        TILING_POSITION_IN_Y | TILING_POSITION_OUT_Y => 0xffff,
        NOP | SERIALIZE | SEND_GO_IDLE | PM_TRIGGER | INSTRUMENTATION_HEADER | INSTRUMENTATION_DATA => u32::MAX,
        TILING_PITCH_IN | TILING_HEIGHT_IN | TILING_DEPTH_IN | TILING_POSITION_IN_Z => u32::MAX,
        TILING_PITCH_OUT | TILING_HEIGHT_OUT | TILING_DEPTH_OUT | TILING_POSITION_OUT_Z => u32::MAX,
        OFFSET_OUT_LOW | OFFSET_IN_LOW | PITCH_IN | PITCH_OUT | LINE_LENGTH_IN | LINE_COUNT | DATA => u32::MAX,
        NOTIFY_ADDRESS_LOW | NOTIFY_PAYLOAD | COND_ADDRESS_LOW => u32::MAX,
        SPARE_FIRST..=SPARE_LAST if method.is_multiple_of(4) => u32::MAX,
        _ => return None,
    })
}
