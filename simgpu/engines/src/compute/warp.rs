//! The state of a warp: 32 threads that execute in lockstep.

use super::stack::Stack;
use sm20::{CcTest, Predicate, PredicateOperand, Register};

/// Number of lanes per warp.
pub(crate) const LANES: usize = 32;
/// Mask of all lanes.
pub(crate) const ALL: u32 = u32::MAX;

/// One dword per lane.
pub(crate) type Lanes = [u32; LANES];
/// Two dwords per lane.
pub(crate) type Pairs = [u64; LANES];

/// Condition codes of all lanes, as one mask per flag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flags {
    pub(crate) zero: u32,
    pub(crate) sign: u32,
    pub(crate) carry: u32,
    pub(crate) overflow: u32,
}

impl Flags {
    /// Returns the lanes in which the test is true. A NaN sets both the zero and the sign flag.
    pub(crate) const fn test(self, test: CcTest) -> u32 {
        let Self { zero: z, sign: s, carry: c, overflow: o } = self;
        match test {
            CcTest::False => 0,
            CcTest::Lt => (s & !z) ^ o,
            CcTest::Eq => z & !s,
            CcTest::Le => s ^ (z | o),
            CcTest::Gt => !z & !(s ^ o),
            CcTest::Ne => !z,
            CcTest::Ge => !(s ^ o),
            CcTest::Num => !z | !s,
            CcTest::Nan => z & s,
            CcTest::Ltu => s ^ o,
            CcTest::Equ => z,
            CcTest::Leu => z | (s ^ o),
            CcTest::Gtu => !s ^ (z | o),
            CcTest::Neu => !z | s,
            CcTest::Geu => (!s | z) ^ o,
            CcTest::True => ALL,
            CcTest::Off => !o,
            CcTest::Lo => !c,
            CcTest::Sff => !s,
            CcTest::Ls => z | !c,
            CcTest::Hi => !z & c,
            CcTest::Sft => s,
            CcTest::Hs => c,
            CcTest::Oft => o,
        }
    }
}

/// Execution state of a warp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    /// The warp can run.
    Ready,
    /// The warp waits for other warps at this barrier.
    Barrier(u8),
    /// All lanes have exited.
    Ended,
}

#[derive(Clone, Debug)]
pub(crate) struct Warp {
    /// R0 to R62. The last row is RZ, which remains zero.
    registers: Box<[Lanes; 64]>,
    /// Mask of the lanes in which each predicate is true. The last predicate is PT.
    predicates: [u32; 8],
    pub(crate) flags: Flags,
    pub(crate) stack: Stack,
    /// Byte offset of the next instruction in the code segment.
    pub(crate) pc: u32,
    /// Lanes that execute the next instruction.
    pub(crate) active: u32,
    /// Lanes that have not exited.
    pub(crate) alive: u32,
    pub(crate) condition: Condition,
    /// Index of the warp within its block.
    pub(crate) index: u32,
}

impl Warp {
    pub(crate) fn new() -> Self {
        Self {
            registers: Box::new([[0; LANES]; 64]),
            predicates: [0, 0, 0, 0, 0, 0, 0, ALL],
            flags: Flags::default(),
            stack: Stack::default(),
            pc: 0,
            active: 0,
            alive: 0,
            condition: Condition::Ended,
            index: 0,
        }
    }

    /// Sets the initial state for a program with `registers` registers. The registers are initialized from the register
    /// file rows in `left`. Registers without a row are zero.
    pub(crate) fn start(&mut self, index: u32, lanes: u32, pc: u32, registers: u32, left: &[Lanes]) {
        let Self { registers: rows, predicates, flags, stack, pc: at, active, alive, condition, index: number } = self;
        for (number, row) in rows.iter_mut().take(63.min(registers as usize)).enumerate() {
            *row = left.get(number).copied().unwrap_or([0; LANES]);
        }
        predicates[..7].fill(0);
        *flags = Flags::default();
        stack.clear();
        (*at, *active, *alive, *condition, *number) = (pc, lanes, lanes, Condition::Ready, index);
    }

    /// Copies a program's registers to rows of the register file.
    pub(crate) fn leave_in(&self, rows: &mut [Lanes], registers: u32) {
        let own = self.registers.iter().take(63.min(registers as usize));
        rows.iter_mut().zip(own).for_each(|(row, register)| *row = *register);
    }

    /// Returns a register in all lanes.
    pub(crate) fn register(&self, register: Register) -> &Lanes {
        &self.registers[usize::from(register.index() & 63)]
    }

    /// Returns the register at `offset` after `register`. RZ is always followed by RZ.
    pub(crate) fn following(&self, register: Register, offset: u8) -> &Lanes {
        &self.registers[following(register, offset)]
    }

    pub(crate) fn pair(&self, register: Register) -> Pairs {
        let (low, high) = (self.register(register), self.following(register, 1));
        std::array::from_fn(|lane| u64::from(high[lane]) << 32 | u64::from(low[lane]))
    }

    /// Sets a register in the lanes in `mask`.
    pub(crate) fn set(&mut self, register: Register, values: &Lanes, mask: u32) {
        self.set_following(register, 0, values, mask);
    }

    /// Sets the register at `offset` after `register`.
    pub(crate) fn set_following(&mut self, register: Register, offset: u8, values: &Lanes, mask: u32) {
        let index = following(register, offset);
        if index == 63 {
            return;
        }
        let row = &mut self.registers[index];
        if mask == ALL {
            *row = *values;
            return;
        }
        for (lane, (old, new)) in row.iter_mut().zip(values).enumerate() {
            let keep = (mask >> lane & 1).wrapping_sub(1);
            *old = (*old & keep) | (*new & !keep);
        }
    }

    pub(crate) fn set_pair(&mut self, register: Register, values: &Pairs, mask: u32) {
        self.set(register, &values.map(|value| value as u32), mask);
        self.set_following(register, 1, &values.map(|value| (value >> 32) as u32), mask);
    }

    /// Returns the lanes in which the predicate is true.
    pub(crate) fn predicate(&self, operand: PredicateOperand) -> u32 {
        let lanes = self.predicates[usize::from(operand.predicate.index() & 7)];
        if operand.negate { !lanes } else { lanes }
    }

    /// Sets a predicate in the lanes in `mask`.
    pub(crate) fn set_predicate(&mut self, predicate: Predicate, lanes: u32, mask: u32) {
        if !predicate.is_true() {
            let value = &mut self.predicates[usize::from(predicate.index() & 7)];
            *value = (*value & !mask) | (lanes & mask);
        }
    }

    /// Sets the condition code in the lanes in `mask`.
    pub(crate) fn set_flags(&mut self, flags: Flags, mask: u32) {
        let merge = |old: &mut u32, new: u32| *old = (*old & !mask) | (new & mask);
        merge(&mut self.flags.zero, flags.zero);
        merge(&mut self.flags.sign, flags.sign);
        merge(&mut self.flags.carry, flags.carry);
        merge(&mut self.flags.overflow, flags.overflow);
    }

    /// Removes lanes from the current path. If the path has no lanes left, other lanes resume, or the warp ends.
    pub(crate) fn leave(&mut self, lanes: u32) {
        self.active &= !lanes;
        if self.active == 0 {
            match self.stack.pop() {
                Some((lanes, pc)) => (self.active, self.pc) = (lanes, pc),
                None => self.condition = Condition::Ended,
            }
        }
    }
}

fn following(register: Register, offset: u8) -> usize {
    if register.is_zero() { 63 } else { usize::from(register.index() + offset).min(63) }
}

/// Returns a mask of the lanes for which a test is true.
pub(crate) fn mask_of(test: impl Fn(usize) -> bool) -> u32 {
    (0..LANES).fold(0, |mask, lane| mask | u32::from(test(lane)) << lane)
}

/// Returns the lanes in a mask, in ascending order.
pub(crate) fn lanes_of(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        (rest != 0).then(|| {
            let lane = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            lane
        })
    })
}
