//! Formats of a channel's input: runlist entries, GPFIFO entries, push buffer method headers, host methods.
//!
//! Source: rnndb `fifo/nv_objects.xml`, envytools `hwdocs/fifo`, NVIDIA's class header of 0x906f.

use bitfield_struct::bitfield;

/// Number of channels of a Fermi host.
pub const CHANNELS: u32 = 128;
/// Number of subchannels of a channel.
pub const SUBCHANNELS: u32 = 8;

/// One of the 128 channels of the physical card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ChannelId(pub u8);

/// A channel number in a guest's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct VirtualChannelId(pub u8);

impl VirtualChannelId {
    /// Converts from a number; `None` if it exceeds the maximum.
    #[must_use]
    pub const fn new(number: u32) -> Option<Self> {
        if number < CHANNELS { Some(Self(number as u8)) } else { None }
    }
}

/// Entry of a runlist, which has 8 bytes.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct RunlistEntry {
    /// Channel number.
    #[bits(12)]
    pub channel: u16,
    #[bits(20)]
    __: u32,
    /// Flags; nouveau writes 4.
    pub flags: u32,
}

/// Entry of a GPFIFO ring, which has 8 bytes. The entry refers to a range of a push buffer. An entry without dwords is
/// a control entry, whose opcode (see [`gp_opcode`]) is in the address bits 39:32.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct GpEntry {
    /// The range is fetched conditionally.
    pub conditional: bool,
    /// No switch to another channel happens within the range.
    pub no_context_switch: bool,
    /// Virtual address of the first dword, divided by 4.
    #[bits(38)]
    pub address_dwords: u64,
    /// The range is fetched with kernel privilege.
    pub privileged: bool,
    /// The range is a subroutine, not the main push buffer.
    pub not_main: bool,
    /// Number of dwords in the range.
    #[bits(21)]
    pub dwords: u32,
    /// The host waits for the end of earlier work before fetching the range.
    pub sync: bool,
}

impl GpEntry {
    /// Returns the GPU virtual address of the first dword.
    #[must_use]
    pub const fn address(self) -> u64 {
        self.address_dwords() << 2
    }

    /// Returns a control entry's opcode, which is one of [`gp_opcode`] and is in address bits 39:32.
    #[must_use]
    pub const fn opcode(self) -> u64 {
        self.address_dwords() >> 30
    }
}

/// Opcodes of a control entry. Source: class 0x906f.
pub mod gp_opcode {
    /// Does nothing.
    pub const NOP: u64 = 0;
    /// Invalid by definition.
    pub const ILLEGAL: u64 = 1;
    /// Checks the CRC of the entries so far.
    pub const GP_CRC: u64 = 2;
    /// Checks the CRC of the push buffer so far.
    pub const PB_CRC: u64 = 3;
}

/// Bits 31:29 of a method header, which determine how the header's data is distributed to methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderOp {
    /// The form of older chips, increasing (opcode 0, sub-opcode in bits 17:16).
    OldIncreasing,
    /// Each dword goes to the next method.
    Increasing,
    /// The form of older chips, not increasing.
    OldNonIncreasing,
    /// All dwords go to one method.
    NonIncreasing,
    /// The header itself contains one 13-bit datum.
    Immediate,
    /// The first dword goes to the method, all others to the next method.
    IncreaseOnce,
    /// Undefined opcode.
    Reserved,
    /// End of the push buffer segment.
    EndSegment,
}

impl HeaderOp {
    /// Returns the three-bit code.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self as u8
    }
}

/// Method header, which has one dword.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct MethodHeader {
    /// Method address divided by 4.
    #[bits(12)]
    pub method_dwords: u16,
    #[bits(1)]
    __: u8,
    /// Subchannel.
    #[bits(3)]
    pub subchannel: u8,
    /// Number of dwords of data after the header, or the datum of an immediate header.
    #[bits(13)]
    pub count: u16,
    /// Opcode.
    #[bits(3)]
    pub opcode: u8,
}

impl MethodHeader {
    /// Creates a header with `count` dwords of data (or, for an immediate header, the datum) for the method at byte
    /// address `method`.
    #[must_use]
    pub const fn to(op: HeaderOp, subchannel: u8, method: u32, count: u16) -> Self {
        Self::new()
            .with_opcode(op.bits())
            .with_subchannel(subchannel)
            .with_method_dwords((method >> 2) as u16)
            .with_count(count)
    }

    /// Returns the byte address of the (first) method.
    #[must_use]
    pub const fn method(self) -> u32 {
        (self.method_dwords() as u32) << 2
    }

    /// Returns the opcode's meaning.
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

/// Method header of the older form, which has one dword and opcode 0 or 2.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct OldMethodHeader {
    #[bits(2)]
    __: u8,
    /// Method address divided by 4.
    #[bits(11)]
    pub method_dwords: u16,
    /// Subchannel.
    #[bits(3)]
    pub subchannel: u8,
    /// See [`sub_op`].
    #[bits(2)]
    pub sub_op: u8,
    /// Number of dwords of data after the header (11 bits), or the subdevice mask in bits 15:4 of the header.
    #[bits(11)]
    pub count: u16,
    /// Opcode.
    #[bits(3)]
    pub opcode: u8,
}

impl OldMethodHeader {
    /// Returns the byte address of the (first) method.
    #[must_use]
    pub const fn method(self) -> u32 {
        (self.method_dwords() as u32) << 2
    }
}

/// Sub-opcodes of a header of the older form. Opcode 2 has only [`sub_op::METHODS`].
pub mod sub_op {
    /// Data for methods follows.
    pub const METHODS: u8 = 0;
    /// Sets the subdevice mask.
    pub const SET_MASK: u8 = 1;
    /// Stores the subdevice mask for later use.
    pub const STORE_MASK: u8 = 2;
    /// Uses the stored subdevice mask.
    pub const USE_MASK: u8 = 3;
}

/// Methods that the host itself executes, on any subchannel. Source: class 0x906f.
pub mod host_method {
    /// Binds an object class to the subchannel; the class is in bits 15:0, and the engine in bits 20:16.
    pub const SET_OBJECT: u32 = 0x00;
    /// Invalid by definition.
    pub const ILLEGAL: u32 = 0x04;
    /// Does nothing.
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
    /// Memory operation, first word.
    pub const MEM_OP_A: u32 = 0x28;
    /// Memory operation, second word.
    pub const MEM_OP_B: u32 = 0x2c;
    /// Sets the reference counter.
    pub const SET_REFERENCE: u32 = 0x50;
    /// Decompression or CRC check.
    pub const CRC_CHECK: u32 = 0x7c;
    /// Ends the timeslice early.
    pub const YIELD: u32 = 0x80;
    /// First method that goes to the engine to which the subchannel is bound.
    pub const ENGINE_FIRST: u32 = 0x100;

    /// Fields of [`SEMAPHORE_D`].
    pub mod semaphore_d {
        use crate::Field;
        /// Operation of the semaphore.
        pub const OPERATION: Field = Field::new(4, 0);
        /// Permits other channels to use the engine while an acquire waits.
        pub const ACQUIRE_SWITCH: Field = Field::new(12, 12);
        /// Releases without waiting until the engine is idle.
        pub const RELEASE_WFI_DISABLE: Field = Field::new(20, 20);
        /// A release writes 4 bytes instead of 16.
        pub const RELEASE_SIZE_4: Field = Field::new(24, 24);

        /// Waits until payload and memory are equal.
        pub const ACQUIRE: u32 = 1;
        /// Writes the payload.
        pub const RELEASE: u32 = 2;
        /// Waits until memory is greater than or equal to the payload (as signed difference).
        pub const ACQUIRE_GEQ: u32 = 4;
        /// Waits until payload and memory have a common bit.
        pub const ACQUIRE_AND: u32 = 8;
    }

    /// Fields of [`SET_OBJECT`].
    pub mod set_object {
        use crate::Field;
        /// Object class.
        pub const CLASS: Field = Field::new(15, 0);
        /// Engine.
        pub const ENGINE: Field = Field::new(20, 16);
    }
}

/// Error codes of the scheduler in its reason register. Source: nouveau.
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
    /// Number of engines that the host schedules.
    pub const COUNT: u32 = 6;
}

const _: () = assert!(size_of::<RunlistEntry>() == 8 && size_of::<GpEntry>() == 8 && size_of::<MethodHeader>() == 4);
