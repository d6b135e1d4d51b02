//! The operations.

#![expect(missing_docs, reason = "the enumeration's documentation describes the fields common to its variants")]

use super::*;

macro_rules! ops {
    ($($(#[$meta:meta])* $variant:ident $mnemonic:literal { $($field:ident: $type:ty),* $(,)? })*) => {
        /// Operation of an instruction.
        ///
        /// Fields common to several operations:
        /// - `dst`: the result register; `p`, `q`: the result predicates (`q` receives the opposite, combined with the
        ///   same predicate); PT and RZ discard the result;
        /// - `a`, `b`, `c`: operands, in assembly order; `accumulate`: the predicate with which `logic` combines a
        ///   comparison;
        /// - `write_cc`: `.CC`, also sets the condition code (zero, sign, carry, overflow) from the result;
        /// - `carry_in`: `.X`, processes the next word of a multi-word number, and uses the condition code of the
        ///   previous word;
        /// - `signed`, `a_signed`, `b_signed`: signedness of the operands;
        /// - `saturate`: `.SAT`, clamps integers to the signed range, and floats to 0 to 1 (a NaN becomes 0);
        /// - `ftz`: flushes denormal operands and results to zero of the same sign; `fmz`: like `ftz`, and zero times
        ///   anything is zero;
        /// - `negate_*`: floating-point or arithmetic negation; `invert_*`: bitwise inversion;
        /// - `test`: lanes in which the test of the condition code fails skip a control instruction;
        /// - `width`, `address`, `cache`: parameters of a memory access.
        ///
        /// An operation that is named after a mnemonic has the semantics of NVIDIA's instruction with that name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Op {
            $($(#[$meta])* $variant { $($field: $type),* },)*
            /// An instruction that exists but is not modelled (texture, surface, graphics, video). The interpreter must
            /// reject it with a fault.
            Unsupported {
                /// NVIDIA's mnemonic, or the name of a group of instructions.
                name: &'static str,
                /// The whole instruction word.
                word: u64,
            },
        }

        impl Op {
            /// Returns the mnemonic without suffixes.
            pub const fn mnemonic(&self) -> &'static str {
                match self {
                    $(Self::$variant { .. } => $mnemonic,)*
                    Self::Unsupported { name, .. } => name,
                }
            }

            /// Returns the mnemonics of all modelled operations.
            pub fn mnemonics() -> impl Iterator<Item = &'static str> {
                Self::TEMPLATES.iter().map(|(name, _)| *name)
            }

            /// Every modelled operation with default operands, by mnemonic.
            pub(crate) const TEMPLATES: &'static [(&'static str, fn() -> Self)] = &[
                $(($mnemonic, || Self::$variant { $($field: Default::default()),* }),)*
            ];
        }
    };
}

ops! {
    // Integer arithmetic.

    /// Sum or difference.
    IAdd "IADD" { dst: Register, write_cc: bool, a: Register, b: Source, mode: AddMode, saturate: bool, carry_in: bool }
    /// Low word of the product, or high word if `high` is true.
    IMul "IMUL" { dst: Register, write_cc: bool, a: Register, b: Source, a_signed: bool, b_signed: bool, high: bool }
    /// Low or high word of a * b, combined with c. The first operand of `mode` is the product.
    IMad "IMAD" {
        dst: Register, write_cc: bool, a: Register, b: Source, c: Source, mode: AddMode, a_signed: bool, b_signed: bool,
        high: bool, saturate: bool, carry_in: bool,
    }
    /// (a << shift), combined with b. The first operand of `mode` is the shifted value.
    IScAdd "ISCADD" { dst: Register, write_cc: bool, a: Register, b: Source, shift: u8, mode: AddMode }
    /// |a - b| + c.
    ISad "ISAD" { dst: Register, write_cc: bool, a: Register, b: Source, c: Source, signed: bool }
    /// The minimum if `select` is true, or the maximum otherwise.
    IMnMx "IMNMX" {
        dst: Register, write_cc: bool, a: Register, b: Source, select: PredicateOperand, signed: bool, extended: Extended,
    }
    /// All ones (or 1.0 if `float_result` is true) if the comparison is true, or zero otherwise.
    ISet "ISET" {
        dst: Register, write_cc: bool, a: Register, b: Source, compare: Compare, signed: bool, carry_in: bool,
        float_result: bool, logic: PredicateLogic, accumulate: PredicateOperand,
    }
    /// Comparison with predicate results.
    ISetP "ISETP" {
        p: Predicate, q: Predicate, a: Register, b: Source, compare: Compare, signed: bool, carry_in: bool,
        logic: PredicateLogic, accumulate: PredicateOperand,
    }
    /// a if the comparison of c with zero is true, or b otherwise.
    ICmp "ICMP" { dst: Register, a: Register, b: Source, c: Source, compare: Compare, signed: bool }

    // Logic, shifts, bit fields.

    /// Bitwise logic.
    Lop "LOP" {
        dst: Register, write_cc: bool, a: Register, b: Source, logic: LogicOp, invert_a: bool, invert_b: bool, carry_in: bool,
    }
    /// a << b. Shift counts above 31 result in zero. If `wrap` is true, only the low five bits of the count are used.
    Shl "SHL" { dst: Register, write_cc: bool, a: Register, b: Source, wrap: bool, carry_in: bool }
    /// a >> b. If `reverse` is true, the bits of a are first reversed. Shift counts are treated as in SHL, but if
    /// `signed` is true, counts above 31 result in copies of the sign bit.
    Shr "SHR" {
        dst: Register, write_cc: bool, a: Register, b: Source, signed: bool, wrap: bool, reverse: bool, carry_in: bool,
    }
    /// Bit field of a. If `reverse` is true, the bits of a are first reversed. The position is in bits 0 to 7 of b, and
    /// the length is in bits 8 to 15.
    Bfe "BFE" { dst: Register, write_cc: bool, a: Register, b: Source, signed: bool, reverse: bool }
    /// c with the bit field selected by b (as in BFE) replaced by the low bits of a.
    Bfi "BFI" { dst: Register, write_cc: bool, a: Register, b: Source, c: Source }
    /// Number of the highest set bit (if signed, of the highest bit that differs from the sign), or all ones if there
    /// is none. With `shift_amount`, the left shift that moves this bit to bit 31.
    Flo "FLO" { dst: Register, write_cc: bool, b: Source, signed: bool, invert: bool, shift_amount: bool }
    /// Number of set bits in a & b.
    Popc "POPC" { dst: Register, a: Register, b: Source, invert_a: bool, invert_b: bool }

    // Single precision.

    /// a + b
    FAdd "FADD" {
        dst: Register, write_cc: bool, a: FloatOperand, b: FloatOperand, rounding: Rounding, ftz: bool, saturate: bool,
    }
    /// a * b * scale
    FMul "FMUL" {
        dst: Register, write_cc: bool, a: Register, b: Source, negate: bool, scale: Scale, rounding: Rounding, ftz: bool,
        fmz: bool, saturate: bool,
    }
    /// a * b + c, rounded once.
    FFma "FFMA" {
        dst: Register, write_cc: bool, a: Register, b: Source, c: Source, negate_product: bool, negate_c: bool,
        rounding: Rounding, ftz: bool, fmz: bool, saturate: bool,
    }
    /// The minimum if `select` is true, or the maximum otherwise. If only one operand is a NaN, the result is the other
    /// operand.
    FMnMx "FMNMX" {
        dst: Register, write_cc: bool, a: FloatOperand, b: FloatOperand, select: PredicateOperand, ftz: bool,
    }
    /// Like ISET, for floats.
    FSet "FSET" {
        dst: Register, write_cc: bool, a: FloatOperand, b: FloatOperand, compare: Compare, float_result: bool, ftz: bool,
        logic: PredicateLogic, accumulate: PredicateOperand,
    }
    /// Like ISETP, for floats.
    FSetP "FSETP" {
        p: Predicate, q: Predicate, a: FloatOperand, b: FloatOperand, compare: Compare, ftz: bool, logic: PredicateLogic,
        accumulate: PredicateOperand,
    }
    /// a if the comparison of c with zero is true, or b otherwise.
    FCmp "FCMP" { dst: Register, a: Register, b: Source, c: Source, compare: Compare, ftz: bool }
    /// Function of the multi-function unit.
    Mufu "MUFU" { dst: Register, a: FloatOperand, function: MultiFunction, saturate: bool }
    /// Prepares an argument for MUFU.
    Rro "RRO" { dst: Register, b: FloatOperand, function: RangeReduction }

    // Double precision, in register pairs.

    /// a + b
    DAdd "DADD" { dst: Register, write_cc: bool, a: FloatOperand, b: FloatOperand, rounding: Rounding }
    /// a * b
    DMul "DMUL" { dst: Register, write_cc: bool, a: Register, b: Source, negate: bool, rounding: Rounding }
    /// a * b + c, rounded once.
    DFma "DFMA" {
        dst: Register, write_cc: bool, a: Register, b: Source, c: Source, negate_product: bool, negate_c: bool,
        rounding: Rounding,
    }
    /// Like FMNMX, but in double precision.
    DMnMx "DMNMX" { dst: Register, write_cc: bool, a: FloatOperand, b: FloatOperand, select: PredicateOperand }
    /// Like FSET, but in double precision with a single result register.
    DSet "DSET" {
        dst: Register, write_cc: bool, a: FloatOperand, b: FloatOperand, compare: Compare, float_result: bool,
        logic: PredicateLogic, accumulate: PredicateOperand,
    }
    /// Like FSETP, but in double precision.
    DSetP "DSETP" {
        p: Predicate, q: Predicate, a: FloatOperand, b: FloatOperand, compare: Compare, logic: PredicateLogic,
        accumulate: PredicateOperand,
    }

    // Conversions.

    /// Conversion between float types or, with `integer`, to an integral value of the same type. `upper_half` reads an
    /// F16 from bits 16 to 31.
    F2F "F2F" {
        dst: Register, write_cc: bool, b: FloatOperand, to: FloatType, from: FloatType, rounding: Rounding, integer: bool,
        ftz: bool, saturate: bool, upper_half: bool,
    }
    /// Conversion from float to integer, saturating.
    F2I "F2I" {
        dst: Register, write_cc: bool, b: FloatOperand, to: IntType, from: FloatType, rounding: Rounding, ftz: bool,
        upper_half: bool,
    }
    /// Conversion from integer to float. The modifiers of `b` apply to the integer.
    I2F "I2F" {
        dst: Register, write_cc: bool, b: FloatOperand, to: FloatType, from: IntType, rounding: Rounding, part: Byte,
    }
    /// Conversion between integer types. Without `saturate`, upper bits are dropped.
    I2I "I2I" {
        dst: Register, write_cc: bool, b: FloatOperand, to: IntType, from: IntType, saturate: bool, part: Byte,
    }

    // Moves, selection, predicates.

    /// Copy of b. In each group of four lanes, only lanes with a set bit in `lanes` are written.
    Mov "MOV" { dst: Register, b: Source, lanes: u8 }
    /// a if `select` is true, or b otherwise.
    Sel "SEL" { dst: Register, a: Register, b: Source, select: PredicateOperand }
    /// Bytes of c:a selected by b.
    Prmt "PRMT" { dst: Register, a: Register, b: Source, c: Source, mode: PermuteMode }
    /// Value of a special register.
    S2R "S2R" { dst: Register, special: SpecialRegister }
    /// The predicates selected by the mask b (bit n is Pn), and the other bits of a.
    P2R "P2R" { dst: Register, a: Register, b: Source }
    /// Sets the predicates selected by the mask b from a.
    R2P "R2P" { a: Register, b: Source }
    /// State of a barrier.
    B2R "B2R" { dst: Register, barrier: u8 }
    /// Address of the next instruction.
    Lepc "LEPC" { dst: Register }
    /// (a combine b) logic accumulate, with a result like that of ISET.
    PSet "PSET" {
        dst: Register, write_cc: bool, a: PredicateOperand, b: PredicateOperand, combine: PredicateLogic, float_result: bool,
        logic: PredicateLogic, accumulate: PredicateOperand,
    }
    /// Computes (a combine b) logic accumulate, and writes predicates as ISETP does.
    PSetP "PSETP" {
        p: Predicate, q: Predicate, a: PredicateOperand, b: PredicateOperand, combine: PredicateLogic, logic: PredicateLogic,
        accumulate: PredicateOperand,
    }
    /// Test of the condition code, with a result like that of ISET.
    CSet "CSET" {
        dst: Register, write_cc: bool, test: CcTest, float_result: bool, logic: PredicateLogic, accumulate: PredicateOperand,
    }
    /// Tests the condition code, and writes predicates as ISETP does.
    CSetP "CSETP" { p: Predicate, q: Predicate, test: CcTest, logic: PredicateLogic, accumulate: PredicateOperand }

    // Memory. Values wider than 32 bits are in register pairs and quads.

    /// Generic load.
    Ld "LD" { dst: Register, address: Address, width: Width, cache: LoadCache }
    /// Generic load of a value that is the same for all lanes and is not written during the kernel.
    Ldu "LDU" { dst: Register, address: Address, width: Width }
    /// Generic store.
    St "ST" { address: Address, value: Register, width: Width, cache: StoreCache }
    /// Load that tries to lock the global address. `p` is true if the lock was acquired.
    Ldlk "LDLK" { p: Predicate, dst: Register, address: Address, width: Width }
    /// Store that releases the lock.
    Stul "STUL" { address: Address, value: Register, width: Width }
    /// Load from local memory.
    Ldl "LDL" { dst: Register, address: Address, width: Width, cache: LoadCache }
    /// Store to local memory.
    Stl "STL" { address: Address, value: Register, width: Width, cache: StoreCache }
    /// Load from shared memory.
    Lds "LDS" { dst: Register, address: Address, width: Width }
    /// Store to shared memory.
    Sts "STS" { address: Address, value: Register, width: Width }
    /// Load from shared memory that tries to lock the address. `p` is true if the lock was acquired.
    Ldslk "LDSLK" { p: Predicate, dst: Register, address: Address, width: Width }
    /// Store to shared memory that releases the lock.
    Stsul "STSUL" { address: Address, value: Register, width: Width }
    /// Load from a constant bank, at base + offset.
    Ldc "LDC" { dst: Register, bank: u8, base: Register, offset: i16, width: Width }
    /// Atomic operation on global memory. `dst` receives the old value, and `c` is the new value for CAS.
    Atom "ATOM" { dst: Register, address: Address, a: Register, c: Register, operation: AtomicOp, kind: AtomicType }
    /// Atomic operation without a result.
    Red "RED" { address: Address, a: Register, operation: AtomicOp, kind: AtomicType }
    /// Waits until earlier accesses are visible in the given scope.
    Membar "MEMBAR" { scope: FenceScope }
    /// Cache control, for generic addresses.
    Cctl "CCTL" { dst: Register, address: Address, operation: CacheOp, level: CacheLevel }
    /// Cache control, for local addresses.
    Cctll "CCTLL" { dst: Register, address: Address, operation: CacheOp }

    // Barriers and votes.

    /// Block barrier. `count` is a number of threads, which is a multiple of the warp size. `p` and `dst` receive the
    /// reduction.
    Bar "BAR" {
        operation: BarrierOp, p: Predicate, dst: Register, barrier: BarrierOperand, count: BarrierOperand,
        a: PredicateOperand,
    }
    /// `dst` receives the mask of active lanes for which `a` is true, and `p` receives the result of the vote.
    Vote "VOTE" { dst: Register, p: Predicate, a: PredicateOperand, mode: VoteMode }

    // Control.

    /// No operation. `test` has no effect.
    Nop "NOP" { test: CcTest }
    /// Performance event, selected by a mask.
    Pmtrig "PMTRIG" { test: CcTest, mask: u16 }
    /// Branch. With `uniform`, branches only if all active lanes branch. With `limit`, checks the stack limit.
    Bra "BRA" { target: Target, test: CcTest, uniform: bool, limit: bool }
    /// Branch to the target plus the register. If the target is a constant, the register is added to the constant's
    /// offset.
    Brx "BRX" { target: Target, index: Register, test: CcTest, limit: bool }
    /// BRA with an absolute address.
    Jmp "JMP" { target: Target, test: CcTest, uniform: bool, limit: bool }
    /// BRX with an absolute address.
    Jmx "JMX" { target: Target, index: Register, test: CcTest, limit: bool }
    /// Call.
    Cal "CAL" { target: Target, limit: bool }
    /// Call to an absolute address.
    Jcal "JCAL" { target: Target, limit: bool }
    /// Pushes the target at which diverged lanes reconverge.
    Ssy "SSY" { target: Target }
    /// Pushes the target of BRK.
    Pbk "PBK" { target: Target }
    /// Pushes the target of CONT.
    Pcnt "PCNT" { target: Target }
    /// Pushes the target of RET.
    Pret "PRET" { target: Target, limit: bool }
    /// Pushes the target of LONGJMP.
    Plongjmp "PLONGJMP" { target: Target }
    /// Terminates the lanes.
    Exit "EXIT" { test: CcTest }
    /// Returns from a call.
    Ret "RET" { test: CcTest }
    /// Terminates the lanes, as for a discarded fragment.
    Kil "KIL" { test: CcTest }
    /// Breaks out of a loop.
    Brk "BRK" { test: CcTest }
    /// Continues with the next loop iteration.
    Cont "CONT" { test: CcTest }
    /// Jumps to the innermost PLONGJMP target.
    Longjmp "LONGJMP" { test: CcTest }
    /// Returns from the trap handler.
    Rtt "RTT" { terminate: bool }
    /// Breakpoint or trap, with a number.
    Bpt "BPT" { kind: BreakKind, number: u32 }
}
