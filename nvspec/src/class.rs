//! Object classes and their methods (byte addresses within the class).

pub mod ce90b5;
pub mod compute90c0;
pub mod m2mf9039;

/// Class numbers. Source: NVIDIA's class headers and rnndb `fifo/nv_object.xml`.
pub mod id {
    /// Host GPFIFO channel of Fermi.
    pub const GF100_CHANNEL_GPFIFO: u32 = 0x906f;
    /// 2D engine.
    pub const FERMI_TWOD_A: u32 = 0x902d;
    /// Memory-to-memory copies (M2MF).
    #[doc(alias = "M2MF")]
    pub const FERMI_MEMORY_TO_MEMORY_FORMAT_A: u32 = 0x9039;
    /// 3D engine.
    pub const FERMI_A: u32 = 0x9097;
    /// Compute engine.
    pub const FERMI_COMPUTE_A: u32 = 0x90c0;
    /// Copy engine.
    #[doc(alias = "PCOPY")]
    pub const FERMI_DMA: u32 = 0x90b5;
    /// Decompressing copy engine.
    pub const FERMI_DECOMPRESS: u32 = 0x90b8;
    /// Low bits of the class numbers of software objects, whose methods the driver executes.
    pub const SOFTWARE_LOW: u32 = 0x6e;
}

/// Error codes in PGRAPH's data error register, which are reasons for rejecting a method's data. Source: nouveau's
/// table of data errors.
pub mod data_error {
    /// The operation is invalid in the current state.
    pub const INVALID_OPERATION: u32 = 0x03;
    /// A value is out of range.
    pub const INVALID_VALUE: u32 = 0x04;
    /// A value is not a defined enumerator.
    pub const INVALID_ENUM: u32 = 0x05;
    /// An address is not aligned.
    pub const INVALID_ADDRESS_ALIGNMENT: u32 = 0x0b;
    /// Reserved bits were set.
    pub const INVALID_BITFIELD: u32 = 0x0c;
    /// A slice is outside the surface.
    pub const Z_OUT_OF_BOUNDS: u32 = 0x21;
    /// A rectangle is outside the surface.
    pub const XY_OUT_OF_BOUNDS: u32 = 0x23;
}
