//! Runs a warp, and the same threads one at a time, on identical state.

use super::{integer, memory};
use crate::compute::code::registers;
use crate::compute::constants::Constants;
use crate::compute::exec::{Flow, Machine, execute};
use crate::compute::launch::{Failure, Launch};
use crate::compute::locks::Locks;
use crate::compute::memory::{Counts, SharedMemory};
use crate::compute::tests::rig::{DATA, Random, Rig};
use crate::compute::warp::{ALL, Flags, LANES, Warp, mask_of};
use nvspec::class::compute90c0::{limit, warp_error};
use sm20::{Instruction, Predicate, PredicateLogic, PredicateOperand, Register, Source};

/// Condition code of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cc {
    pub(super) zero: bool,
    pub(super) sign: bool,
    pub(super) carry: bool,
    pub(super) overflow: bool,
}

/// State of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Thread {
    pub(super) r: [u32; 64],
    pub(super) p: [bool; 8],
    pub(super) cc: Cc,
}

/// Context in which a thread executes an instruction.
pub(super) struct Env<'a> {
    pub(super) constants: &'a [u32],
    pub(super) lane: usize,
    /// Program counter of the next instruction.
    pub(super) pc: u32,
    /// Mask of the voting lanes, and mask of the lanes that vote true.
    pub(super) vote: (u32, u32),
}

impl Thread {
    pub(super) fn register(&self, register: Register) -> u32 {
        self.r[usize::from(register.index())]
    }

    /// Returns a 32-bit source operand, or the warp error from reading it.
    pub(super) fn word(&self, source: Source, env: &Env<'_>) -> Result<u32, u32> {
        match source {
            Source::Register(register) => Ok(self.register(register)),
            Source::Immediate(value) | Source::LongImmediate(value) => Ok(value),
            Source::Constant(at) => constant(at.bank, u32::from(at.offset), env),
        }
    }

    /// Returns a 64-bit source operand. An immediate is the upper word.
    pub(super) fn pair(&self, source: Source, env: &Env<'_>) -> Result<u64, u32> {
        Ok(match source {
            Source::Register(register) if register.is_zero() => 0,
            Source::Register(register) => {
                let index = usize::from(register.index());
                u64::from(self.r[index + 1]) << 32 | u64::from(self.r[index])
            }
            Source::Immediate(value) | Source::LongImmediate(value) => u64::from(value) << 32,
            Source::Constant(at) => {
                let low = constant(at.bank, at.offset.into(), env)?;
                u64::from(constant(at.bank, u32::from(at.offset) + 4, env)?) << 32 | u64::from(low)
            }
        })
    }

    pub(super) fn predicate(&self, operand: PredicateOperand) -> bool {
        self.p[usize::from(operand.predicate.index())] != operand.negate
    }

    pub(super) fn set(&mut self, dst: Register, value: u32, cc: Option<Cc>) {
        if !dst.is_zero() {
            self.r[usize::from(dst.index())] = value;
        }
        self.cc = cc.unwrap_or(self.cc);
    }

    pub(super) fn set_pair(&mut self, dst: Register, value: u64, cc: Option<Cc>) {
        if !dst.is_zero() {
            let index = usize::from(dst.index());
            (self.r[index], self.r[index + 1]) = (value as u32, (value >> 32) as u32);
        }
        self.cc = cc.unwrap_or(self.cc);
    }

    pub(super) fn set_predicate(&mut self, p: Predicate, holds: bool) {
        if !p.is_true() {
            self.p[usize::from(p.index())] = holds;
        }
    }

    /// Stores the two predicates of a comparison. If both are the same predicate register, the first result wins.
    pub(super) fn set_predicates(
        &mut self,
        p: Predicate,
        q: Predicate,
        holds: bool,
        logic: PredicateLogic,
        with: bool,
    ) {
        self.set_predicate(q, integer::join(logic, !holds, with));
        self.set_predicate(p, integer::join(logic, holds, with));
    }
}

/// Reads a constant. Bank n starts at index n of `constants`.
pub(super) fn constant(bank: u8, offset: u32, env: &Env<'_>) -> Result<u32, u32> {
    if u32::from(bank) >= limit::CONSTANT_BANKS || offset >= limit::CONSTANT_BYTES {
        return Err(warp_error::CONSTANT_ADDRESS);
    }
    Ok(env.constants[usize::from(bank) + offset as usize / 4])
}

pub(super) const BANKS: u64 = DATA + 0x10_0000;
pub(super) const PC: u32 = 0x1238;
pub(super) const CLOCK_NS: u64 = 0x12_3456_789a;

/// A warp (the second of a block), and the memories and constants that it accesses.
pub(super) struct Bench {
    pub(super) rig: Rig,
    pub(super) launch: Launch,
    pub(super) locks: Locks,
    pub(super) constants: Constants,
    pub(super) table: Vec<u32>,
    pub(super) shared: SharedMemory,
    pub(super) warp: Warp,
    pub(super) random: Random,
}

impl Bench {
    pub(super) fn new(seed: u64) -> Self {
        let (mut rig, mut random) = (Rig::new(0), Random(seed));
        let words = limit::CONSTANT_BYTES as usize / 4 + limit::CONSTANT_BANKS as usize;
        let table: Vec<u32> = (0..words).map(|_| value(&mut random)).collect();
        rig.write(BANKS, &table);
        for (bank, at) in (BANKS..).step_by(4).enumerate().take(limit::CONSTANT_BANKS as usize) {
            rig.bind(bank as u32, at, limit::CONSTANT_BYTES);
        }
        let launch = Launch { shared_bytes: memory::SHARED_BYTES, local_low: memory::LOCAL_BYTES, ..rig.described() };
        let mut constants = Constants::new();
        constants.begin(&launch.banks);
        let mut shared = SharedMemory::default();
        shared.start(launch.shared_bytes, &[]);
        Self { rig, launch, locks: Locks::default(), constants, table, shared, warp: Warp::new(), random }
    }

    /// Returns a random word, often an edge value of some type.
    pub(super) fn value(&mut self) -> u32 {
        value(&mut self.random)
    }

    /// Returns threads with random state.
    pub(super) fn threads(&mut self) -> Vec<Thread> {
        (0..LANES).map(|_| self.thread()).collect()
    }

    pub(super) fn thread(&mut self) -> Thread {
        let mut r: [u32; 64] = std::array::from_fn(|_| self.value());
        // Sometimes, use doubles with similar magnitudes.
        if self.random.next() & 1 != 0 {
            for pair in r.chunks_exact_mut(2) {
                let bits = self.random.next();
                pair[1] =
                    bits as u32 & 0x800f_ffff | ((0x3ff0_0000 - 0x20_0000) + ((bits >> 32) as u32 & 3) * 0x10_0000);
                pair[0] = if bits >> 40 & 1 != 0 { 0 } else { pair[0] };
            }
        }
        r[63] = 0;
        let bits = self.random.next();
        let p = std::array::from_fn(|index| index == 7 || bits >> index & 1 != 0);
        let flag = |index: u32| bits >> (10 + index) & 1 != 0;
        Thread { r, p, cc: Cc { zero: flag(0), sign: flag(1), carry: flag(2), overflow: flag(3) } }
    }

    /// Copies the threads' state to the warp.
    pub(super) fn load(&mut self, threads: &[Thread]) {
        let warp = &mut self.warp;
        warp.start(1, ALL, PC, limit::REGISTERS, &[]);
        for index in 0..63u8 {
            let values = std::array::from_fn(|lane| threads[lane].r[usize::from(index)]);
            warp.set(Register::new(index).expect("a register"), &values, ALL);
        }
        for index in 0..7u8 {
            let lanes = mask_of(|lane| threads[lane].p[usize::from(index)]);
            warp.set_predicate(Predicate::new(index).expect("a predicate"), lanes, ALL);
        }
        warp.flags = Flags {
            zero: mask_of(|lane| threads[lane].cc.zero),
            sign: mask_of(|lane| threads[lane].cc.sign),
            carry: mask_of(|lane| threads[lane].cc.carry),
            overflow: mask_of(|lane| threads[lane].cc.overflow),
        };
    }

    /// Returns the warp's state as threads.
    pub(super) fn stored(&self) -> Vec<Thread> {
        let warp = &self.warp;
        let predicate = |index: u8| {
            warp.predicate(PredicateOperand { predicate: Predicate::new(index).expect("a predicate"), negate: false })
        };
        let Flags { zero, sign, carry, overflow } = warp.flags;
        (0..LANES)
            .map(|lane| Thread {
                r: std::array::from_fn(|index| warp.register(Register::new(index as u8).expect("a register"))[lane]),
                p: std::array::from_fn(|index| predicate(index as u8) >> lane & 1 != 0),
                cc: Cc {
                    zero: zero >> lane & 1 != 0,
                    sign: sign >> lane & 1 != 0,
                    carry: carry >> lane & 1 != 0,
                    overflow: overflow >> lane & 1 != 0,
                },
            })
            .collect()
    }

    /// Executes an instruction on the warp.
    pub(super) fn execute(&mut self, instruction: &Instruction) -> Result<Flow, Failure> {
        let Self { rig, launch, locks, constants, shared, warp, .. } = self;
        rig.with_session(|session| {
            let mut counts = Counts::default();
            let mut machine = Machine {
                launch,
                locks,
                session,
                constants,
                counts: &mut counts,
                shared,
                block: 0,
                position: [1, 2, 3],
                slot: 0,
                clock: CLOCK_NS,
            };
            execute(warp, instruction, &mut machine)
        })
    }

    /// Returns random instructions with the same operation as the assembly line.
    pub(super) fn instructions(&mut self, assembly: &str, count: usize) -> Vec<Instruction> {
        let program = sm20::assemble(assembly).unwrap_or_else(|errors| panic!("{errors:?}"));
        let first = u64::from(program.words[1]) << 32 | u64::from(program.words[0]);
        let begin = sm20::decode(first).expect("an instruction");
        let mnemonic = begin.op.mnemonic();
        let mut found = Vec::new();
        while found.len() < count {
            // Start each sequence from the original word, because flipping bits rarely turns a long immediate back into
            // a register.
            let (mut word, mut last, mut changes) = (first, begin, 0);
            let wanted = self.random.next() % 24;
            while changes < wanted {
                let flips = (0..=self.random.next() % 3).fold(0, |flips, _| flips | 1 << (self.random.next() % 64));
                let Ok(other) = sm20::decode(word ^ flips) else { continue };
                if other.op.mnemonic() == mnemonic && other.form == last.form {
                    (word, last) = (word ^ flips, other);
                    changes += 1;
                }
            }
            // Skip instructions whose registers the hardware would reject.
            if registers(&last.op).is_ok() {
                found.push(Instruction { join: false, ..last });
            }
        }
        found
    }
}

/// Returns a random word, often an edge value of some type.
pub(super) fn value(random: &mut Random) -> u32 {
    const EDGES: [u32; 32] = [
        0,
        1,
        2,
        3,
        31,
        32,
        33,
        0x7f,
        0x80,
        0xff,
        0x7fff,
        0x8000,
        0xffff,
        0x7fff_ffff,
        0x8000_0000,
        0x8000_0001,
        0xffff_fffe,
        0xffff_ffff,
        0x007f_ffff,
        0x0080_0000,
        0x3f7f_ffff,
        0x3f80_0000,
        0xbf80_0000,
        0x4b80_0000,
        0x4f00_0000,
        0x7f7f_ffff,
        0x7f80_0000,
        0xff80_0000,
        0x7fc0_0000,
        0x7ff0_0000,
        0x3ff0_0000,
        0x0000_7c00,
    ];
    let bits = random.next();
    let word = (bits >> 32) as u32;
    match bits % 8 {
        0 | 1 => EDGES[(word % 32) as usize],
        2 => word >> (bits >> 8 & 31),
        // Favour singles of similar magnitude, and angles.
        3 | 4 => word & 0x80ff_ffff | 0x3f00_0000,
        5 => word & 0x8fff_ffff | 0x3800_0000,
        _ => word,
    }
}
