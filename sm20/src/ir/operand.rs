//! Operands.

/// A general-purpose register: R0 to R62, or RZ. RZ reads as zero and discards writes.
///
/// Instructions refer to a register pair or quad (for doubles, 64-bit addresses and wide loads) by its lowest register,
/// which must be aligned. The interpreter checks the alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Register(u8);

impl Register {
    /// The zero register, with index 63.
    pub const ZERO: Self = Self(63);

    /// Returns register `index`, where 63 is RZ. Returns `None` above 63.
    pub const fn new(index: u8) -> Option<Self> {
        if index <= 63 { Some(Self(index)) } else { None }
    }

    /// Returns the index, from 0 to 63.
    pub const fn index(self) -> u8 {
        self.0
    }

    /// Returns true if this is RZ.
    pub const fn is_zero(self) -> bool {
        self.0 == 63
    }
}

impl Default for Register {
    fn default() -> Self {
        Self::ZERO
    }
}

/// A predicate register: P0 to P6, or PT. PT reads as true and discards writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Predicate(u8);

impl Predicate {
    /// The true predicate, with index 7.
    pub const TRUE: Self = Self(7);

    /// Returns predicate `index`, where 7 is PT. Returns `None` above 7.
    pub const fn new(index: u8) -> Option<Self> {
        if index <= 7 { Some(Self(index)) } else { None }
    }

    /// Returns the index, from 0 to 7.
    pub const fn index(self) -> u8 {
        self.0
    }

    /// Returns true if this is PT.
    pub const fn is_true(self) -> bool {
        self.0 == 7
    }
}

impl Default for Predicate {
    fn default() -> Self {
        Self::TRUE
    }
}

/// A predicate operand, optionally negated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PredicateOperand {
    /// Predicate register.
    pub predicate: Predicate,
    /// True for `!`, which negates the predicate.
    pub negate: bool,
}

impl PredicateOperand {
    /// The operand that is always true.
    pub const TRUE: Self = Self { predicate: Predicate::TRUE, negate: false };
}

/// A 32-bit operand (64-bit in double-precision operations).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// A register, or the first register of a pair.
    Register(Register),
    /// A constant bank word, or the two words that start there.
    Constant(ConstAddress),
    /// A 20-bit immediate. For integers, it is sign-extended. For single precision, it is the upper 20 bits of the
    /// word. For double precision, it is the upper 20 bits of the upper word, and the lower word is zero.
    Immediate(u32),
    /// A 32-bit immediate of the `32I` forms.
    LongImmediate(u32),
}

impl Default for Source {
    fn default() -> Self {
        Self::Register(Register::ZERO)
    }
}

/// A word in a constant bank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ConstAddress {
    /// Bank number, from 0 to 31. On this hardware, banks 16 and above belong to the driver and the compiler.
    pub bank: u8,
    /// Offset in bytes. It is a multiple of 4, except in branch targets, which keep the low bits of the word.
    pub offset: u16,
}

/// A floating-point operand with its modifiers. The absolute value is taken before the negation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FloatOperand {
    /// The value. In most operations, the first operand must be a register.
    pub source: Source,
    /// True for `-`.
    pub negate: bool,
    /// True for `|x|`.
    pub absolute: bool,
}

/// A memory address in the operation's address space. It consists of a register and a signed displacement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Address {
    /// Base register, or RZ if the displacement is the whole address.
    pub base: Register,
    /// Displacement in bytes.
    pub offset: i32,
    /// True for `.E`: the address is 64 bits wide, and `base` is a register pair. Valid only for global and generic
    /// accesses.
    pub wide: bool,
}

/// Target of a control instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Offset in bytes from the end of the instruction.
    Relative(i32),
    /// Offset in bytes from the start of the code segment.
    Absolute(u32),
    /// The target is in a constant bank word. Relative instructions (BRA, BRX, CAL and the stack pushes) treat the word
    /// as a displacement from the end of the instruction. Other instructions treat it as an absolute address.
    Constant(ConstAddress),
}

impl Default for Target {
    fn default() -> Self {
        Self::Relative(0)
    }
}

/// A barrier number or thread count, in a register or constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BarrierOperand {
    /// A value in a register. A count in RZ means all threads of the block.
    Register(Register),
    /// A constant: a barrier number from 0 to 15, or a count of up to 4095 threads.
    Immediate(u16),
}

impl Default for BarrierOperand {
    fn default() -> Self {
        Self::Register(Register::ZERO)
    }
}

/// A special register, identified by its number in S2R.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SpecialRegister(pub u8);

impl SpecialRegister {
    /// Lane index of the thread in its warp.
    pub const LANE_ID: Self = Self(0x00);
    /// Number of warps in bits 8 to 14, and number of multiprocessors in bits 20 to 28.
    pub const VIRT_CFG: Self = Self(0x02);
    /// Number of this warp in bits 8 to 12, and number of this multiprocessor in bits 20 to 28.
    pub const VIRT_ID: Self = Self(0x03);
    /// Thread index in the block: x, y and z, packed.
    pub const TID: Self = Self(0x20);
    /// Thread index, x.
    pub const TID_X: Self = Self(0x21);
    /// Thread index, y.
    pub const TID_Y: Self = Self(0x22);
    /// Thread index, z.
    pub const TID_Z: Self = Self(0x23);
    /// Data of the method that launched the grid.
    pub const CTA_PARAM: Self = Self(0x24);
    /// Block index, x.
    pub const CTAID_X: Self = Self(0x25);
    /// Block index, y.
    pub const CTAID_Y: Self = Self(0x26);
    /// Block index, z.
    pub const CTAID_Z: Self = Self(0x27);
    /// Block dimensions, packed.
    pub const NTID: Self = Self(0x28);
    /// Block dimension, x.
    pub const NTID_X: Self = Self(0x29);
    /// Block dimension, y.
    pub const NTID_Y: Self = Self(0x2a);
    /// Block dimension, z.
    pub const NTID_Z: Self = Self(0x2b);
    /// Grid parameter, which a method sets before the launch.
    pub const GRID_PARAM: Self = Self(0x2c);
    /// Grid dimension, x.
    pub const NCTAID_X: Self = Self(0x2d);
    /// Grid dimension, y.
    pub const NCTAID_Y: Self = Self(0x2e);
    /// Grid dimension, z.
    pub const NCTAID_Z: Self = Self(0x2f);
    /// Generic address of the shared memory window.
    pub const SWIN_LO: Self = Self(0x30);
    /// Size of the shared memory window in bytes.
    pub const SWIN_SZ: Self = Self(0x31);
    /// Size of shared memory in bytes.
    pub const SMEM_SZ: Self = Self(0x32);
    /// Number of shared memory banks.
    pub const SMEM_BANKS: Self = Self(0x33);
    /// Generic address of the local memory window.
    pub const LWIN_LO: Self = Self(0x34);
    /// Size of the local memory window in bytes.
    pub const LWIN_SZ: Self = Self(0x35);
    /// Size in bytes of the part of local memory at positive addresses.
    pub const LMEM_LO_SZ: Self = Self(0x36);
    /// First valid address of the part of local memory at negative addresses.
    pub const LMEM_HI_OFF: Self = Self(0x37);
    /// Mask of the lane itself.
    pub const EQ_MASK: Self = Self(0x38);
    /// Mask of all lower lanes.
    pub const LT_MASK: Self = Self(0x39);
    /// Mask of all lower lanes and the lane itself.
    pub const LE_MASK: Self = Self(0x3a);
    /// Mask of all higher lanes.
    pub const GT_MASK: Self = Self(0x3b);
    /// Mask of all higher lanes and the lane itself.
    pub const GE_MASK: Self = Self(0x3c);
    /// Clock, low word.
    pub const CLOCK_LO: Self = Self(0x50);
    /// Clock, high word.
    pub const CLOCK_HI: Self = Self(0x51);

    /// Names in assembly text. Other registers are written as `SR_0x..`.
    pub const NAMES: [(Self, &'static str); 36] = [
        (Self::LANE_ID, "SR_LANEID"),
        (Self::VIRT_CFG, "SR_VIRTCFG"),
        (Self::VIRT_ID, "SR_VIRTID"),
        (Self::TID, "SR_TID"),
        (Self::TID_X, "SR_TID.X"),
        (Self::TID_Y, "SR_TID.Y"),
        (Self::TID_Z, "SR_TID.Z"),
        (Self::CTA_PARAM, "SR_CTAPARAM"),
        (Self::CTAID_X, "SR_CTAID.X"),
        (Self::CTAID_Y, "SR_CTAID.Y"),
        (Self::CTAID_Z, "SR_CTAID.Z"),
        (Self::NTID, "SR_NTID"),
        (Self::NTID_X, "SR_NTID.X"),
        (Self::NTID_Y, "SR_NTID.Y"),
        (Self::NTID_Z, "SR_NTID.Z"),
        (Self::GRID_PARAM, "SR_GRIDPARAM"),
        (Self::NCTAID_X, "SR_NCTAID.X"),
        (Self::NCTAID_Y, "SR_NCTAID.Y"),
        (Self::NCTAID_Z, "SR_NCTAID.Z"),
        (Self::SWIN_LO, "SR_SWINLO"),
        (Self::SWIN_SZ, "SR_SWINSZ"),
        (Self::SMEM_SZ, "SR_SMEMSZ"),
        (Self::SMEM_BANKS, "SR_SMEMBANKS"),
        (Self::LWIN_LO, "SR_LWINLO"),
        (Self::LWIN_SZ, "SR_LWINSZ"),
        (Self::LMEM_LO_SZ, "SR_LMEMLOSZ"),
        (Self::LMEM_HI_OFF, "SR_LMEMHIOFF"),
        (Self::EQ_MASK, "SR_EQMASK"),
        (Self::LT_MASK, "SR_LTMASK"),
        (Self::LE_MASK, "SR_LEMASK"),
        (Self::GT_MASK, "SR_GTMASK"),
        (Self::GE_MASK, "SR_GEMASK"),
        (Self::CLOCK_LO, "SR_CLOCKLO"),
        (Self::CLOCK_HI, "SR_CLOCKHI"),
        (Self(0x04), "SR_PM0"),
        (Self(0x05), "SR_PM1"),
    ];
}
