//! Classes 0x90b5 and 0x90b8, the copy engine, with the methods of nouveau's own microcode. A Fermi copy engine is a
//! microcontroller whose uploaded program defines its methods. NVIDIA's driver uses a different method set (with the
//! launch also at 0x300, but the addresses at 0x400), which is not declared here.
//!
//! A surface is pitch-linear or block-linear. Sizes and positions in block-linear surfaces are in elements. An element
//! is a byte unless [`exec::FORMAT`] is set.
//!
//! Source: rnndb `fifo/pcopy.xml`, and the behaviour of nouveau's copy engine program and of `nouveau_bo90b5.c`.

use crate::Field;

/// Object name, which the engine stores but does not use.
pub const NAME: u32 = 0x000;
/// No operation.
pub const NOP: u32 = 0x100;
/// Triggers the performance counters.
pub const PM_TRIGGER: u32 = 0x140;
/// Source block size. See [`tile_mode`].
pub const SRC_TILE_MODE: u32 = 0x200;
/// Source width in elements, if block-linear.
pub const SRC_WIDTH: u32 = 0x204;
/// Source height in rows.
pub const SRC_HEIGHT: u32 = 0x208;
/// Source depth in slices.
pub const SRC_DEPTH: u32 = 0x20c;
/// Source slice.
pub const SRC_Z: u32 = 0x210;
/// Source x in elements, if block-linear.
pub const SRC_X: u32 = 0x214;
/// Source y in rows.
pub const SRC_Y: u32 = 0x218;
/// Destination block size. See [`tile_mode`].
pub const DST_TILE_MODE: u32 = 0x220;
/// Destination width in elements, if block-linear.
pub const DST_WIDTH: u32 = 0x224;
/// Destination height in rows.
pub const DST_HEIGHT: u32 = 0x228;
/// Destination depth in slices.
pub const DST_DEPTH: u32 = 0x22c;
/// Destination slice.
pub const DST_Z: u32 = 0x230;
/// Destination x in elements, if block-linear.
pub const DST_X: u32 = 0x234;
/// Destination y in rows.
pub const DST_Y: u32 = 0x238;
/// Starts the copy.
pub const EXEC: u32 = 0x300;
/// Flushes the engine's write cache.
pub const WRCACHE_FLUSH: u32 = 0x304;
/// Source address, bits 39:32.
pub const SRC_ADDRESS_HIGH: u32 = 0x30c;
/// Source address, bits 31:0.
pub const SRC_ADDRESS_LOW: u32 = 0x310;
/// Destination address, bits 39:32.
pub const DST_ADDRESS_HIGH: u32 = 0x314;
/// Destination address, bits 31:0.
pub const DST_ADDRESS_LOW: u32 = 0x318;
/// Distance in bytes between source lines, if pitch-linear.
pub const SRC_PITCH: u32 = 0x31c;
/// Distance in bytes between destination lines, if pitch-linear.
pub const DST_PITCH: u32 = 0x320;
/// Number of elements per line.
pub const X_COUNT: u32 = 0x324;
/// Number of lines.
pub const Y_COUNT: u32 = 0x328;
/// Element conversion. See [`format`].
pub const FORMAT: u32 = 0x32c;
/// First constant that can be selected as a component.
pub const SWIZZLE_CONST0: u32 = 0x330;
/// Second constant that can be selected as a component.
pub const SWIZZLE_CONST1: u32 = 0x334;
/// Query address, bits 39:32.
pub const QUERY_ADDRESS_HIGH: u32 = 0x338;
/// Query address, bits 31:0.
pub const QUERY_ADDRESS_LOW: u32 = 0x33c;
/// Value written by the query.
pub const QUERY_COUNTER: u32 = 0x340;
/// Maximum number of lines per copy.
pub const Y_COUNT_MAX: u32 = 0x1fff;

/// Fields of [`EXEC`]. Other bits are ignored.
pub mod exec {
    use super::Field;
    /// Set to convert elements according to [`super::FORMAT`].
    pub const FORMAT: Field = Field::new(0, 0);
    /// Set if the source is pitch-linear.
    pub const SRC_LINEAR: Field = Field::new(4, 4);
    /// Set if the destination is pitch-linear.
    pub const DST_LINEAR: Field = Field::new(8, 8);
    /// Set to write the query after the copy.
    pub const QUERY: Field = Field::new(12, 12);
    /// Set if the query writes only the counter (4 bytes) instead of 16 bytes with a timestamp.
    pub const QUERY_SHORT: Field = Field::new(13, 13);
}

/// Fields of [`SRC_TILE_MODE`] and [`DST_TILE_MODE`].
pub mod tile_mode {
    use super::Field;
    /// Block depth: log2 of the number of slices.
    pub const DEPTH: Field = Field::new(11, 8);
    /// Block height: log2 of the number of GOBs (8 rows each).
    pub const HEIGHT: Field = Field::new(7, 4);
    /// Block width. [`WIDTH_16`] means 16 bytes, and any other value means 64 bytes.
    pub const WIDTH: Field = Field::new(3, 0);
    /// Blocks are 16 bytes wide.
    pub const WIDTH_16: u32 = 0xe;
}

/// Fields of [`FORMAT`].
pub mod format {
    use super::Field;
    /// Number of components per destination element, minus one.
    pub const DST_COMPONENTS: Field = Field::new(25, 24);
    /// Number of components per source element, minus one.
    pub const SRC_COMPONENTS: Field = Field::new(21, 20);
    /// Size of a component in bytes, minus one.
    pub const COMPONENT_BYTES: Field = Field::new(17, 16);
    /// Source of destination component 3.
    pub const COMPONENT_3: Field = Field::new(15, 12);
    /// Source of destination component 2.
    pub const COMPONENT_2: Field = Field::new(11, 8);
    /// Source of destination component 1.
    pub const COMPONENT_1: Field = Field::new(7, 4);
    /// Source of destination component 0: a source component (0 to 3), or one of the following values.
    pub const COMPONENT_0: Field = Field::new(3, 0);
    /// The component is [`super::SWIZZLE_CONST0`].
    pub const FROM_CONST0: u32 = 4;
    /// The component is [`super::SWIZZLE_CONST1`].
    pub const FROM_CONST1: u32 = 5;
    // Values from 6 on select zero.
}

/// Error report of nouveau's program for an invalid method: a dword in the first scratch register, the method's data in
/// the second, and an interrupt. Source: nouveau's `gt215_ce_intr`.
pub mod error {
    use crate::Field;

    /// The interrupt that the copy engine's falcon raises.
    pub const INTR: u32 = 0x40;
    /// Subchannel of the method.
    pub const SUBCHANNEL: Field = Field::new(29, 27);
    /// Byte address of the method divided by 4.
    pub const METHOD: Field = Field::new(26, 16);
    /// Error code.
    pub const CODE: Field = Field::new(15, 0);

    /// The method does not exist.
    pub const ILLEGAL_METHOD: u32 = 1;
    /// Reserved bits were set.
    pub const INVALID_BITFIELD: u32 = 3;
}

/// Returns the mask of valid data bits of a method, or `None` if the method does not exist.
#[must_use]
pub const fn method_mask(method: u32) -> Option<u32> {
    Some(match method {
        NAME | NOP | PM_TRIGGER | EXEC | WRCACHE_FLUSH => u32::MAX,
        SRC_TILE_MODE | DST_TILE_MODE => 0xfff,
        SRC_WIDTH | DST_WIDTH | SRC_X | DST_X | SRC_PITCH | DST_PITCH => 0x7_ffff,
        SRC_HEIGHT | DST_HEIGHT | SRC_Y | DST_Y | Y_COUNT => Y_COUNT_MAX,
        SRC_DEPTH | DST_DEPTH => 0x7ff,
        SRC_Z | DST_Z => 0xfff,
        SRC_ADDRESS_HIGH | DST_ADDRESS_HIGH | QUERY_ADDRESS_HIGH => 0xff,
        SRC_ADDRESS_LOW | DST_ADDRESS_LOW | QUERY_ADDRESS_LOW | QUERY_COUNTER => u32::MAX,
        X_COUNT => 0xffff,
        FORMAT => 0x0333_ffff,
        SWIZZLE_CONST0 | SWIZZLE_CONST1 => u32::MAX,
        _ => return None,
    })
}
