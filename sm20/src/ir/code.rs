//! Modifiers, which are small enumerations with values that are fields of the encodings.

/// A modifier with its field value and its assembly name.
pub(crate) trait Code: Copy + Default + PartialEq + 'static {
    /// Width of the field in bits.
    const WIDTH: u32;
    /// Every value, with its code and suffix.
    const TABLE: &'static [(Self, u8, &'static str)];
}

macro_rules! codes {
    ($($(#[$meta:meta])* $name:ident: $width:literal { $($(#[$vmeta:meta])* $variant:ident = $code:literal $text:literal,)+ })+) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vmeta])* $variant,)+ }

        impl Code for $name {
            const WIDTH: u32 = $width;
            const TABLE: &'static [(Self, u8, &'static str)] = &[$((Self::$variant, $code, $text),)+];
        }
    )+};
}

codes! {
    /// Treatment of the two operands of an addition.
    AddMode: 2 {
        /// a + b
        #[default] Add = 0 "ADD",
        /// a - b
        SubtractB = 1 "SUB",
        /// b - a
        SubtractA = 2 "SUBR",
        /// a + b + 1
        PlusOne = 3 "PO",
    }

    /// Rounding of floating-point results.
    Rounding: 2 {
        /// To nearest, ties to even.
        #[default] Nearest = 0 "RN",
        /// Towards minus infinity.
        Down = 1 "RM",
        /// Towards plus infinity.
        Up = 2 "RP",
        /// Towards zero.
        Zero = 3 "RZ",
    }

    /// A power of two that scales the product of FMUL.
    Scale: 3 {
        /// 1
        #[default] One = 0 "",
        /// 1/2
        Half = 1 "D2",
        /// 1/4
        Quarter = 2 "D4",
        /// 1/8
        Eighth = 3 "D8",
        /// 8
        Eight = 4 "M8",
        /// 4
        Four = 5 "M4",
        /// 2
        Two = 6 "M2",
    }

    /// Combination of a set instruction's comparison with a predicate.
    PredicateLogic: 2 {
        /// Both the comparison and the predicate are true.
        #[default] And = 0 "AND",
        /// The comparison, the predicate, or both are true.
        Or = 1 "OR",
        /// The comparison or the predicate is true, but not both.
        Xor = 2 "XOR",
    }

    /// A bitwise operation.
    LogicOp: 2 {
        /// a & b
        #[default] And = 0 "AND",
        /// a | b
        Or = 1 "OR",
        /// a ^ b
        Xor = 2 "XOR",
        /// b
        PassB = 3 "PASS_B",
    }

    /// Minimum or maximum of one part of a multi-word number. Each part passes its result to the next in the condition
    /// code.
    Extended: 2 {
        /// A whole 32-bit number.
        #[default] Whole = 0 "",
        /// The lowest word.
        Low = 1 "XLO",
        /// A middle word.
        Middle = 2 "XMED",
        /// The highest word.
        High = 3 "XHI",
    }

    /// Functions of the multi-function unit.
    MultiFunction: 3 {
        /// Cosine of an argument prepared by RRO.SINCOS.
        #[default] Cos = 0 "COS",
        /// Sine of an argument prepared by RRO.SINCOS.
        Sin = 1 "SIN",
        /// 2 to the power of an argument prepared by RRO.EX2.
        Ex2 = 2 "EX2",
        /// Base-2 logarithm.
        Lg2 = 3 "LG2",
        /// Reciprocal.
        Rcp = 4 "RCP",
        /// Reciprocal square root.
        Rsq = 5 "RSQ",
        /// Upper word of an approximate reciprocal of a double, given the double's upper word.
        Rcp64H = 6 "RCP64H",
        /// Upper word of an approximate reciprocal square root of a double, given the double's upper word.
        Rsq64H = 7 "RSQ64H",
    }

    /// Functions whose arguments RRO prepares.
    RangeReduction: 1 {
        /// MUFU.SIN and MUFU.COS.
        #[default] SinCos = 0 "SINCOS",
        /// MUFU.EX2.
        Ex2 = 1 "EX2",
    }

    /// Floating-point types of conversions.
    FloatType: 2 {
        /// Half precision.
        F16 = 1 "F16",
        /// Single precision.
        #[default] F32 = 2 "F32",
        /// Double precision, in a register pair.
        F64 = 3 "F64",
    }

    /// Permutations of PRMT.
    PermuteMode: 3 {
        /// Each nibble of b selects a byte of c:a, or its sign.
        #[default] Index = 0 "",
        /// Four ascending bytes, starting at the byte selected by b.
        Forward4 = 1 "F4E",
        /// Four descending bytes, starting at the byte selected by b.
        Backward4 = 2 "B4E",
        /// One byte, replicated.
        Replicate8 = 3 "RC8",
        /// Edge clamp, left.
        EdgeLeft = 4 "ECL",
        /// Edge clamp, right.
        EdgeRight = 5 "ECR",
        /// One half-word, replicated.
        Replicate16 = 6 "RC16",
    }

    /// Width of a memory access, and the rule for extending a narrow value to the width of a register.
    Width: 3 {
        /// A byte, zero-extended.
        U8 = 0 "U8",
        /// A byte, sign-extended.
        S8 = 1 "S8",
        /// Two bytes, zero-extended.
        U16 = 2 "U16",
        /// Two bytes, sign-extended.
        S16 = 3 "S16",
        /// One register.
        #[default] B32 = 4 "32",
        /// A register pair.
        B64 = 5 "64",
        /// Four registers.
        B128 = 6 "128",
    }

    /// Cache policy of a load.
    LoadCache: 2 {
        /// Cached at all levels.
        #[default] All = 0 "CA",
        /// Cached only in the L2.
        Global = 1 "CG",
        /// Streaming: likely used once (LDL: last use).
        Streaming = 2 "CS",
        /// Not cached, and always fetched again.
        Volatile = 3 "CV",
    }

    /// Cache policy of a store.
    StoreCache: 2 {
        /// Write back.
        #[default] WriteBack = 0 "WB",
        /// Cached only in the L2.
        Global = 1 "CG",
        /// Streaming.
        Streaming = 2 "CS",
        /// Write through.
        WriteThrough = 3 "WT",
    }

    /// Atomic operations, where `m` is the value in memory and `a` is the operand.
    AtomicOp: 4 {
        /// m + a
        #[default] Add = 0 "ADD",
        /// The minimum of m and a.
        Min = 1 "MIN",
        /// The maximum of m and a.
        Max = 2 "MAX",
        /// m >= a ? 0 : m + 1
        Inc = 3 "INC",
        /// m == 0 || m > a ? a : m - 1
        Dec = 4 "DEC",
        /// m & a
        And = 5 "AND",
        /// m | a
        Or = 6 "OR",
        /// m ^ a
        Xor = 7 "XOR",
        /// a
        Exch = 8 "EXCH",
        /// m == a ? c : m
        Cas = 9 "CAS",
    }

    /// Types of atomic operations.
    AtomicType: 2 {
        /// Unsigned 32 bits.
        #[default] U32 = 0 "U32",
        /// Unsigned 64 bits: ADD, EXCH and CAS.
        U64 = 1 "U64",
        /// Signed 32 bits: ADD, MIN and MAX.
        S32 = 2 "S32",
        /// Single precision: ADD.
        F32 = 3 "F32",
    }

    /// Scope in which a memory barrier orders accesses.
    FenceScope: 2 {
        /// Threads of the block.
        #[default] Cta = 0 "CTA",
        /// Threads of the card.
        Gl = 1 "GL",
        /// The whole system.
        Sys = 2 "SYS",
    }

    /// Action of a cache control instruction.
    CacheOp: 5 {
        /// Query.
        #[default] Query1 = 0 "QRY1",
        /// Prefetch.
        Prefetch1 = 1 "PF1",
        /// Prefetch.
        Prefetch15 = 2 "PF1_5",
        /// Prefetch into the L2.
        Prefetch2 = 3 "PF2",
        /// Write back.
        WriteBack = 4 "WB",
        /// Invalidate the line.
        Invalidate = 5 "IV",
        /// Invalidate all.
        InvalidateAll = 6 "IVALL",
        /// Reset.
        Reset = 7 "RS",
    }

    /// Cache selected by CCTL.
    CacheLevel: 2 {
        /// Data cache.
        #[default] Data = 0 "D",
        /// Uniform cache.
        Uniform = 1 "U",
        /// Constant cache.
        Constant = 2 "C",
        /// Instruction cache.
        Instruction = 3 "I",
    }

    /// Votes over the active lanes.
    VoteMode: 2 {
        /// True if the vote of all lanes is true.
        #[default] All = 0 "ALL",
        /// True if the vote of any lane is true.
        Any = 1 "ANY",
        /// True if the votes of all lanes are equal.
        Eq = 2 "EQ",
    }

    /// Action of a barrier instruction. The first three actions wait. POPC without results is BAR.SYNC.
    BarrierOp: 3 {
        /// Waits, and counts the threads for which the predicate is true.
        #[default] Popc = 0 "POPC",
        /// Waits, and tests whether the predicate is true in all threads.
        And = 1 "AND",
        /// Waits, and tests whether the predicate is true in any thread.
        Or = 2 "OR",
        /// Arrives at the barrier without waiting.
        Arrive = 4 "ARV",
    }

    /// Action of BPT.
    BreakKind: 2 {
        /// Drain.
        #[default] Drain = 0 "DRAIN",
        /// Call the trap handler.
        Call = 1 "CAL",
        /// Pause.
        Pause = 2 "PAUSE",
        /// Trap.
        Trap = 3 "TRAP",
    }

    /// Part of a register that a narrow conversion reads. It is a byte or, for 16 bits, the half-word that starts at
    /// that byte.
    Byte: 2 {
        /// Bits 0 to 7 (B0), or the lower half-word.
        #[default] B0 = 0 "B0",
        /// Bits 8 to 15.
        B1 = 1 "B1",
        /// Bits 16 to 23 (B2), or the upper half-word.
        B2 = 2 "B2",
        /// Bits 24 to 31.
        B3 = 3 "B3",
    }

    /// Tests of the condition code. They consist of tests of the sign and zero flags after a comparison of two numbers,
    /// each with an unordered variant, and tests of single flags.
    CcTest: 5 {
        /// Never.
        False = 0 "F",
        /// Less.
        Lt = 1 "LT",
        /// Equal.
        Eq = 2 "EQ",
        /// Less or equal.
        Le = 3 "LE",
        /// Greater.
        Gt = 4 "GT",
        /// Less or greater.
        Ne = 5 "NE",
        /// Greater or equal.
        Ge = 6 "GE",
        /// Ordered.
        Num = 7 "NUM",
        /// Unordered.
        Nan = 8 "NAN",
        /// Less or unordered.
        Ltu = 9 "LTU",
        /// Equal or unordered.
        Equ = 10 "EQU",
        /// Less, equal or unordered.
        Leu = 11 "LEU",
        /// Greater or unordered.
        Gtu = 12 "GTU",
        /// Not equal.
        Neu = 13 "NEU",
        /// Greater, equal or unordered.
        Geu = 14 "GEU",
        /// Always.
        #[default] True = 15 "T",
        /// No overflow.
        Off = 16 "OFF",
        /// No carry: lower.
        Lo = 17 "LO",
        /// No sign.
        Sff = 18 "SFF",
        /// No carry, or zero: lower or same.
        Ls = 19 "LS",
        /// Carry and not zero: higher.
        Hi = 20 "HI",
        /// Sign.
        Sft = 21 "SFT",
        /// Carry: higher or same.
        Hs = 22 "HS",
        /// Overflow.
        Oft = 23 "OFT",
    }
}

/// Integer types of conversions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum IntType {
    /// Unsigned 8 bits.
    U8,
    /// Signed 8 bits.
    S8,
    /// Unsigned 16 bits.
    U16,
    /// Signed 16 bits.
    S16,
    /// Unsigned 32 bits.
    U32,
    /// Signed 32 bits.
    #[default]
    S32,
    /// Unsigned 64 bits, in a register pair.
    U64,
    /// Signed 64 bits, in a register pair.
    S64,
}

impl Code for IntType {
    const WIDTH: u32 = 3;
    const TABLE: &'static [(Self, u8, &'static str)] = &[
        (Self::U8, 0, "U8"),
        (Self::S8, 1, "S8"),
        (Self::U16, 2, "U16"),
        (Self::S16, 3, "S16"),
        (Self::U32, 4, "U32"),
        (Self::S32, 5, "S32"),
        (Self::U64, 6, "U64"),
        (Self::S64, 7, "S64"),
    ];
}

impl IntType {
    /// Returns the width in bits, which is 8, 16, 32 or 64.
    pub const fn bits(self) -> u32 {
        match self {
            Self::U8 | Self::S8 => 8,
            Self::U16 | Self::S16 => 16,
            Self::U32 | Self::S32 => 32,
            Self::U64 | Self::S64 => 64,
        }
    }

    /// Returns true if the type is signed.
    pub const fn signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }
}

/// A comparison. It is represented as the set of relations between two numbers for which the comparison is true. All
/// sixteen sets can be encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Compare(u8);

impl Compare {
    /// Less.
    pub const LT: Self = Self(1);
    /// Equal.
    pub const EQ: Self = Self(2);
    /// Less or equal.
    pub const LE: Self = Self(3);
    /// Greater.
    pub const GT: Self = Self(4);
    /// Less or greater.
    pub const NE: Self = Self(5);
    /// Greater or equal.
    pub const GE: Self = Self(6);
    /// Neither number is a NaN.
    pub const NUM: Self = Self(7);
    /// At least one number is a NaN.
    pub const NAN: Self = Self(8);
    /// Never.
    pub const FALSE: Self = Self(0);
    /// Always.
    pub const TRUE: Self = Self(15);

    /// Creates a comparison from its four bits: less, equal, greater, unordered. Ignores higher bits.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits & 15)
    }

    /// Returns the four bits.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Returns true if the comparison is true for numbers in this relation. `None` means unordered. Integers are always
    /// ordered.
    pub const fn holds(self, order: Option<core::cmp::Ordering>) -> bool {
        let bit = match order {
            Some(core::cmp::Ordering::Less) => 1,
            Some(core::cmp::Ordering::Equal) => 2,
            Some(core::cmp::Ordering::Greater) => 4,
            None => 8,
        };
        self.0 & bit != 0
    }
}

impl Code for Compare {
    const WIDTH: u32 = 4;
    const TABLE: &'static [(Self, u8, &'static str)] = &[
        (Self(0), 0, "F"),
        (Self(1), 1, "LT"),
        (Self(2), 2, "EQ"),
        (Self(3), 3, "LE"),
        (Self(4), 4, "GT"),
        (Self(5), 5, "NE"),
        (Self(6), 6, "GE"),
        (Self(7), 7, "NUM"),
        (Self(8), 8, "NAN"),
        (Self(9), 9, "LTU"),
        (Self(10), 10, "EQU"),
        (Self(11), 11, "LEU"),
        (Self(12), 12, "GTU"),
        (Self(13), 13, "NEU"),
        (Self(14), 14, "GEU"),
        (Self(15), 15, "T"),
    ];
}

impl FloatType {
    /// Returns the width in bits, which is 16, 32 or 64.
    pub const fn bits(self) -> u32 {
        match self {
            Self::F16 => 16,
            Self::F32 => 32,
            Self::F64 => 64,
        }
    }
}
