//! Decoded instructions.

mod code;
mod op;
mod operand;

pub use code::{
    AddMode, AtomicOp, AtomicType, BarrierOp, BreakKind, Byte, CacheLevel, CacheOp, CcTest, Compare, Extended,
    FenceScope, FloatType, IntType, LoadCache, LogicOp, MultiFunction, PermuteMode, PredicateLogic, RangeReduction,
    Rounding, Scale, StoreCache, VoteMode, Width,
};
pub use op::Op;
pub use operand::{
    Address, BarrierOperand, ConstAddress, FloatOperand, Predicate, PredicateOperand, Register, Source,
    SpecialRegister, Target,
};

pub(crate) use code::Code;

/// An instruction in the form that an interpreter executes.
///
/// The instruction is executed by the lanes for which the guard is true. For control instructions, the condition code
/// test in the operation must also be true.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Instruction {
    /// Predicate of each lane. Lanes for which the predicate is false skip the operation. Always
    /// [`PredicateOperand::TRUE`] for operations that the hardware never guards, such as SSY, PBK and CAL.
    pub guard: PredicateOperand,
    /// `.S`: after the operation, the warp reconverges at the innermost SSY entry of its divergence stack, as if it had
    /// branched there. This depends only on the guard.
    pub join: bool,
    /// Form of the encoding.
    pub form: Form,
    /// The operation.
    pub op: Op,
}

impl Instruction {
    /// Creates an unguarded 64-bit instruction.
    pub const fn new(op: Op) -> Self {
        Self { guard: PredicateOperand::TRUE, join: false, form: Form::Long, op }
    }

    /// Returns the size of the encoding in bytes, which is 4 or 8.
    pub const fn size(&self) -> u32 {
        match self.form {
            Form::Long => 8,
            Form::Short => 4,
        }
    }
}

/// The two encoding sizes. They can be mixed freely, because bit 3 of an instruction's first word distinguishes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Form {
    /// 64 bits.
    #[default]
    Long,
    /// 32 bits, for common cases of some operations.
    Short,
}
