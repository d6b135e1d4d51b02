//! Formats of a channel's input: runlist entries, GPFIFO entries, push buffer method headers, and host methods.
//!
//! Source: rnndb `fifo/nv_objects.xml`, envytools `hwdocs/fifo`, NVIDIA's class header of 0x906f.

use bitfield_struct::bitfield;

/// Number of channels of a Fermi card.
pub const CHANNELS: u32 = 128;
/// Number of subchannels per channel.
pub const SUBCHANNELS: u32 = 8;

/// Channel number on the physical card, less than 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ChannelId(pub u8);

/// A channel number in a guest's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct VirtualChannelId(pub u8);

impl VirtualChannelId {
    /// Converts a number. Returns `None` unless it is less than [`CHANNELS`].
    #[must_use]
    pub const fn new(number: u32) -> Option<Self> {
        if number < CHANNELS { Some(Self(number as u8)) } else { None }
    }
}

/// An 8-byte runlist entry.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct RunlistEntry {
    /// Channel number.
    #[bits(12)]
    pub channel: u16,
    #[bits(20)]
    __: u32,
    /// Flags. nouveau writes 4.
    pub flags: u32,
}

/// An 8-byte GPFIFO ring entry, which refers to a push buffer range. An entry without dwords is a control entry, whose
/// opcode (see [`gp_opcode`]) is in address bits 39:32.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct GpEntry {
    /// Set to fetch the range conditionally.
    pub conditional: bool,
    /// Set to prevent channel switches within the range.
    pub no_context_switch: bool,
    /// GPU virtual address of the first dword, divided by 4.
    #[bits(38)]
    pub address_dwords: u64,
    /// Set to fetch the range with kernel privilege.
    pub privileged: bool,
    /// Set if the range is a subroutine instead of the main push buffer.
    pub not_main: bool,
    /// Number of dwords in the range.
    #[bits(21)]
    pub dwords: u32,
    /// Set if the host unit waits for earlier work to complete before it fetches the range.
    pub sync: bool,
}

impl GpEntry {
    /// Returns the GPU virtual address of the first dword.
    #[must_use]
    pub const fn address(self) -> u64 {
        self.address_dwords() << 2
    }

    /// Returns a control entry's opcode in address bits 39:32, one of [`gp_opcode`].
    #[must_use]
    pub const fn opcode(self) -> u64 {
        self.address_dwords() >> 30
    }
}

/// Control entry opcodes. Source: class 0x906f.
pub mod gp_opcode {
    /// No operation.
    pub const NOP: u64 = 0;
    /// Invalid by definition.
    pub const ILLEGAL: u64 = 1;
    /// Checks the CRC of the previous entries.
    pub const GP_CRC: u64 = 2;
    /// Checks the CRC of the push buffer up to this point.
    pub const PB_CRC: u64 = 3;
}

/// Bits 31:29 of a method header, which determine how the header's data is distributed over methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderOp {
    /// Increasing, in the format of older chips (opcode 0, sub-opcode in bits 17:16).
    OldIncreasing,
    /// Each dword goes to the next method.
    Increasing,
    /// Non-increasing, in the format of older chips.
    OldNonIncreasing,
    /// All dwords go to the same method.
    NonIncreasing,
    /// The header itself contains 13 bits of data.
    Immediate,
    /// The first dword goes to the method, and all others to the next method.
    IncreaseOnce,
    /// Undefined opcode.
    Reserved,
    /// End of the push buffer segment.
    EndSegment,
}

impl HeaderOp {
    /// Returns the three-bit encoding.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self as u8
    }
}

/// A one-dword method header.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct MethodHeader {
    /// Byte address of the method divided by 4.
    #[bits(12)]
    pub method_dwords: u16,
    #[bits(1)]
    __: u8,
    /// Subchannel.
    #[bits(3)]
    pub subchannel: u8,
    /// Number of data dwords after the header, or the data of an immediate header.
    #[bits(13)]
    pub count: u16,
    /// Opcode.
    #[bits(3)]
    pub opcode: u8,
}

impl MethodHeader {
    /// Creates a header with `count` data dwords (in an immediate header, with the data `count`) for the method at byte
    /// address `method`.
    #[must_use]
    pub const fn to(op: HeaderOp, subchannel: u8, method: u32, count: u16) -> Self {
        Self::new()
            .with_opcode(op.bits())
            .with_subchannel(subchannel)
            .with_method_dwords((method >> 2) as u16)
            .with_count(count)
    }

    /// Returns the byte address of the method, or of the first method.
    #[must_use]
    pub const fn method(self) -> u32 {
        (self.method_dwords() as u32) << 2
    }

    /// Decodes the opcode.
    #[must_use]
    pub const fn op(self) -> HeaderOp {
        match self.opcode() {
            0 => HeaderOp::OldIncreasing,
            1 => HeaderOp::Increasing,
            2 => HeaderOp::OldNonIncreasing,
            3 => HeaderOp::NonIncreasing,
            4 => HeaderOp::Immediate,
            5 => HeaderOp::IncreaseOnce,
            6 => HeaderOp::Reserved,
            _ => HeaderOp::EndSegment,
        }
    }
}

/// A one-dword method header of the older format, with opcode 0 or 2.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct OldMethodHeader {
    #[bits(2)]
    __: u8,
    /// Byte address of the method divided by 4.
    #[bits(11)]
    pub method_dwords: u16,
    /// Subchannel.
    #[bits(3)]
    pub subchannel: u8,
    /// See [`sub_op`].
    #[bits(2)]
    pub sub_op: u8,
    /// Number of data dwords after the header. A header that sets the subdevice mask contains the mask in bits 15:4
    /// instead.
    #[bits(11)]
    pub count: u16,
    /// Opcode.
    #[bits(3)]
    pub opcode: u8,
}

impl OldMethodHeader {
    /// Returns the byte address of the method, or of the first method.
    #[must_use]
    pub const fn method(self) -> u32 {
        (self.method_dwords() as u32) << 2
    }
}

/// Sub-opcodes of an older-format header. Opcode 2 has only [`sub_op::METHODS`].
pub mod sub_op {
    /// Method data follows.
    pub const METHODS: u8 = 0;
    /// Sets the subdevice mask.
    pub const SET_MASK: u8 = 1;
    /// Stores the subdevice mask for later use.
    pub const STORE_MASK: u8 = 2;
    /// Uses the stored subdevice mask.
    pub const USE_MASK: u8 = 3;
}

/// Methods that the host unit executes itself, on any subchannel. Source: class 0x906f.
pub mod host_method {
    /// Binds an object class to the subchannel. The class is in bits 15:0 and the engine in bits 20:16.
    pub const SET_OBJECT: u32 = 0x00;
    /// Invalid by definition.
    pub const ILLEGAL: u32 = 0x04;
    /// No operation.
    pub const NOP: u32 = 0x08;
    /// Semaphore address, bits 39:32.
    pub const SEMAPHORE_A: u32 = 0x10;
    /// Semaphore address, bits 31:2.
    pub const SEMAPHORE_B: u32 = 0x14;
    /// Semaphore payload.
    pub const SEMAPHORE_C: u32 = 0x18;
    /// Semaphore operation.
    pub const SEMAPHORE_D: u32 = 0x1c;
    /// Raises the engine's non-stall interrupt.
    pub const NON_STALL_INTERRUPT: u32 = 0x20;
    /// Flushes writes to memory.
    pub const FB_FLUSH: u32 = 0x24;
    /// Memory operation, first dword.
    pub const MEM_OP_A: u32 = 0x28;
    /// Memory operation, second dword.
    pub const MEM_OP_B: u32 = 0x2c;
    /// Sets the reference counter.
    pub const SET_REFERENCE: u32 = 0x50;
    /// Decompression or CRC check.
    pub const CRC_CHECK: u32 = 0x7c;
    /// Yields the rest of the timeslice.
    pub const YIELD: u32 = 0x80;
    /// First method that is passed to the subchannel's engine.
    pub const ENGINE_FIRST: u32 = 0x100;

    /// Fields of [`SEMAPHORE_D`].
    pub mod semaphore_d {
        use crate::Field;
        /// Semaphore operation.
        pub const OPERATION: Field = Field::new(4, 0);
        /// Permits other channels to use the engine while an acquire waits.
        pub const ACQUIRE_SWITCH: Field = Field::new(12, 12);
        /// Releases without waiting for the engine to become idle.
        pub const RELEASE_WFI_DISABLE: Field = Field::new(20, 20);
        /// A release writes 4 bytes instead of 16.
        pub const RELEASE_SIZE_4: Field = Field::new(24, 24);

        /// Acquires once the value in memory equals the payload.
        pub const ACQUIRE: u32 = 1;
        /// Writes the payload.
        pub const RELEASE: u32 = 2;
        /// Acquires once the value in memory is greater than or equal to the payload (by signed difference).
        pub const ACQUIRE_GEQ: u32 = 4;
        /// Acquires once the value in memory and the payload have a set bit in common.
        pub const ACQUIRE_AND: u32 = 8;
    }

    /// Fields of [`SET_OBJECT`].
    pub mod set_object {
        use crate::Field;
        /// Object class.
        pub const CLASS: Field = Field::new(15, 0);
        /// Engine number.
        pub const ENGINE: Field = Field::new(20, 16);
    }
}

/// Scheduler error codes in the reason register. Source: nouveau.
pub mod sched_error {
    /// An engine did not complete a context switch before the timeout.
    pub const CTXSW_TIMEOUT: u32 = 0x0a;
}

/// Engine numbers in [`host_method::SET_OBJECT`] and the runlist registers.
pub mod engine {
    /// PGRAPH.
    pub const GR: u32 = 0;
    /// Video decoder (MSPDEC).
    pub const MSPDEC: u32 = 1;
    /// Video post-processing (MSPPP).
    pub const MSPPP: u32 = 2;
    /// Video bitstream (MSVLD).
    pub const MSVLD: u32 = 3;
    /// Copy engine 0.
    #[doc(alias = "PCOPY0")]
    pub const CE0: u32 = 4;
    /// Copy engine 1.
    #[doc(alias = "PCOPY1")]
    pub const CE1: u32 = 5;
    /// Software engine, whose methods the driver executes.
    pub const SOFTWARE: u32 = 0x1f;
    /// Number of engines that the host unit schedules.
    pub const COUNT: u32 = 6;
}

const _: () = assert!(size_of::<RunlistEntry>() == 8 && size_of::<GpEntry>() == 8 && size_of::<MethodHeader>() == 4);
