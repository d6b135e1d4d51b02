//! Every operation against an independent reference: random instructions with all their modifiers, on registers,
//! predicates and condition codes of edge values and random ones. The whole state of a warp is compared.
//!
//! Instructions are made from one of assembly by changing bits at random as long as it stays that operation, so that
//! whatever can be encoded comes up. References are in `integer`, `float` (with `exact`) and `memory`, and compute one
//! thread at a time; control is in `control`, as programs that a plain evaluation of their source is compared with.

mod control;
mod exact;
mod float;
mod integer;
mod memory;

use super::rig::{DATA, Random, Rig};
use crate::compute::code::registers;
use crate::compute::constants::Constants;
use crate::compute::exec::{Flow, Machine, execute};
use crate::compute::launch::{Failure, Launch};
use crate::compute::locks::Locks;
use crate::compute::memory::{Counts, SharedMemory};
use crate::compute::warp::{ALL, Flags, LANES, Warp, mask_of};
use nvspec::class::compute90c0::{limit, warp_error};
use sm20::{Instruction, Op, Predicate, PredicateLogic, PredicateOperand, Register, Source, SpecialRegister};
use std::collections::{HashMap, HashSet};

/// Each operation that is executed lane by lane, as assembly to begin with; the second form has a long immediate.
const OPERATIONS: [&str; 54] = [
    "IADD R0, R1, R2",
    "IADD32I R0, R1, 0x1",
    "IMUL R0, R1, R2",
    "IMUL32I R0, R1, 0x1",
    "IMAD R0, R1, R2, R3",
    "IMAD32I R0, R1, 0x1, R0",
    "ISCADD R0, R1, R2, 0x1",
    "ISCADD32I R0, R1, 0x1, 0x1",
    "ISAD R0, R1, R2, R3",
    "IMNMX R0, R1, R2, PT",
    "ISET.LT.AND R0, R1, R2",
    "ISETP.LT.AND P0, P1, R1, R2",
    "ICMP.LT R0, R1, R2, R3",
    "LOP.AND R0, R1, R2",
    "LOP32I.AND R0, R1, 0x1",
    "SHL R0, R1, R2",
    "SHR R0, R1, R2",
    "BFE R0, R1, R2",
    "BFI R0, R1, R2, R3",
    "FLO R0, R1",
    "POPC R0, R1, R2",
    "FADD R0, R1, R2",
    "FADD32I R0, R1, 1.0",
    "FMUL R0, R1, R2",
    "FMUL32I R0, R1, 1.0",
    "FFMA R0, R1, R2, R3",
    "FFMA32I R0, R1, 1.0, R0",
    "FMNMX R0, R1, R2, PT",
    "FSET.LT.AND R0, R1, R2",
    "FSETP.LT.AND P0, P1, R1, R2",
    "FCMP.LT R0, R1, R2, R3",
    "MUFU.RCP R0, R1",
    "RRO.SINCOS R0, R1",
    "DADD R0, R2, R4",
    "DMUL R0, R2, R4",
    "DFMA R0, R2, R4, R6",
    "DMNMX R0, R2, R4, PT",
    "DSET.LT.AND R0, R2, R4",
    "DSETP.LT.AND P0, P1, R2, R4",
    "F2F.F32.F32 R0, R1",
    "F2I.S32.F32 R0, R1",
    "I2F.F32.S32 R0, R1",
    "I2I.S32.S32 R0, R1",
    "MOV R0, R1",
    "MOV32I R0, 0x1",
    "SEL R0, R1, R2, P0",
    "PRMT R0, R1, R2, R3",
    "S2R R0, SR_LANEID",
    "P2R R0, PR, R1, 0x7",
    "R2P PR, R1, 0x7",
    "PSET.AND.AND R0, P0, P1",
    "PSETP.AND.AND P2, P3, P0, P1",
    "CSET.LT.AND R0, CC",
    "CSETP.LT.AND P0, P1, CC",
];

/// The same for those whose result does not depend on registers alone.
const OTHERS: [&str; 6] = ["B2R R0, 0x0", "LEPC R0", "VOTE.ALL R0, P0, P1", "NOP", "PMTRIG 0x1", "MEMBAR.CTA"];

/// Random instructions of each form.
const EACH: usize = 200;

/// The condition code of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cc {
    zero: bool,
    sign: bool,
    carry: bool,
    overflow: bool,
}

/// The state of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Thread {
    r: [u32; 64],
    p: [bool; 8],
    cc: Cc,
}

/// What surrounds a thread.
struct Env<'a> {
    constants: &'a [u32],
    lane: usize,
    /// Of the next instruction.
    pc: u32,
    /// Lanes that vote, and those that vote yes.
    vote: (u32, u32),
}

impl Thread {
    fn register(&self, register: Register) -> u32 {
        self.r[usize::from(register.index())]
    }

    /// A source of 32 bits, or the warp error that reading it is.
    fn word(&self, source: Source, env: &Env<'_>) -> Result<u32, u32> {
        match source {
            Source::Register(register) => Ok(self.register(register)),
            Source::Immediate(value) | Source::LongImmediate(value) => Ok(value),
            Source::Constant(at) => constant(at.bank, u32::from(at.offset), env),
        }
    }

    /// A source of 64 bits; an immediate is the upper word.
    fn pair(&self, source: Source, env: &Env<'_>) -> Result<u64, u32> {
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

    fn predicate(&self, operand: PredicateOperand) -> bool {
        self.p[usize::from(operand.predicate.index())] != operand.negate
    }

    fn set(&mut self, dst: Register, value: u32, cc: Option<Cc>) {
        if !dst.is_zero() {
            self.r[usize::from(dst.index())] = value;
        }
        self.cc = cc.unwrap_or(self.cc);
    }

    fn set_pair(&mut self, dst: Register, value: u64, cc: Option<Cc>) {
        if !dst.is_zero() {
            let index = usize::from(dst.index());
            (self.r[index], self.r[index + 1]) = (value as u32, (value >> 32) as u32);
        }
        self.cc = cc.unwrap_or(self.cc);
    }

    fn set_predicate(&mut self, p: Predicate, holds: bool) {
        if !p.is_true() {
            self.p[usize::from(p.index())] = holds;
        }
    }

    /// A comparison's two predicates; where both are the same one, the first counts.
    fn set_predicates(&mut self, p: Predicate, q: Predicate, holds: bool, logic: PredicateLogic, with: bool) {
        self.set_predicate(q, integer::join(logic, !holds, with));
        self.set_predicate(p, integer::join(logic, holds, with));
    }
}

/// Bank n begins n words further than the one before.
fn constant(bank: u8, offset: u32, env: &Env<'_>) -> Result<u32, u32> {
    if u32::from(bank) >= limit::CONSTANT_BANKS || offset >= limit::CONSTANT_BYTES {
        return Err(warp_error::CONSTANT_ADDRESS);
    }
    Ok(env.constants[usize::from(bank) + offset as usize / 4])
}

const BANKS: u64 = DATA + 0x10_0000;
const PC: u32 = 0x1238;
const CLOCK: u64 = 0x12_3456_789a;

/// A warp, the second of a block, and the same as threads.
struct Bench {
    rig: Rig,
    launch: Launch,
    locks: Locks,
    constants: Constants,
    table: Vec<u32>,
    shared: SharedMemory,
    warp: Warp,
    random: Random,
}

impl Bench {
    fn new(seed: u64) -> Self {
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
        shared.start(launch.shared_bytes);
        Self { rig, launch, locks: Locks::default(), constants, table, shared, warp: Warp::new(), random }
    }

    /// A word that is often an edge value of some type.
    fn value(&mut self) -> u32 {
        value(&mut self.random)
    }

    /// Threads of any state.
    fn threads(&mut self) -> Vec<Thread> {
        (0..LANES).map(|_| self.thread()).collect()
    }

    fn thread(&mut self) -> Thread {
        let mut r: [u32; 64] = std::array::from_fn(|_| self.value());
        // Doubles of about the same size, now and then.
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

    /// The warp in the state of the threads.
    fn load(&mut self, threads: &[Thread]) {
        let warp = &mut self.warp;
        warp.start(1, ALL, PC, limit::REGISTERS);
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

    /// The threads as the warp has them.
    fn stored(&self) -> Vec<Thread> {
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
    fn execute(&mut self, instruction: &Instruction) -> Result<Flow, Failure> {
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
                clock: CLOCK,
            };
            execute(warp, instruction, &mut machine)
        })
    }

    /// Random instructions like the one that the assembly says.
    fn instructions(&mut self, assembly: &str, count: usize) -> Vec<Instruction> {
        let program = sm20::assemble(assembly).unwrap_or_else(|errors| panic!("{errors:?}"));
        let first = u64::from(program.words[1]) << 32 | u64::from(program.words[0]);
        let begin = sm20::decode(first).expect("an instruction");
        let mnemonic = begin.op.mnemonic();
        let mut found = Vec::new();
        while found.len() < count {
            // Each from the same beginning: from an immediate of many bits there is hardly a way back to a register.
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
            // Registers that the hardware would refuse are refused before.
            if registers(&last.op).is_ok() {
                found.push(Instruction { join: false, ..last });
            }
        }
        found
    }
}

/// A word that is often an edge value of some type.
fn value(random: &mut Random) -> u32 {
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
        // Singles close to each other, and angles.
        3 | 4 => word & 0x80ff_ffff | 0x3f00_0000,
        5 => word & 0x8fff_ffff | 0x3800_0000,
        _ => word,
    }
}

/// What special registers say in the bench's block of 5 * 3 * 4 threads.
fn special(which: SpecialRegister, lane: usize, launch: &Launch) -> u32 {
    let thread = 32 + lane as u32;
    let (x, y, z) = (thread % 5, thread / 5 % 3, thread / 15);
    let bits = |range: std::ops::Range<usize>| range.fold(0u32, |mask, lane| mask | 1 << lane);
    match which.0 {
        0x00 => lane as u32,
        0x02 => 48 << 8 | launch.sms << 20,
        0x03 => 1 << 8,
        0x20 => x | y << 16 | z << 26,
        0x21 => x,
        0x22 => y,
        0x23 => z,
        0x24 => launch.cta_param,
        0x25..=0x27 => u32::from(which.0) - 0x24,
        0x28 => 5 | 3 << 16 | 4 << 26,
        0x29 => 5,
        0x2a => 3,
        0x2b => 4,
        0x2c => launch.grid_param,
        0x2d => 9,
        0x2e => 8,
        0x2f => 7,
        0x30 => 0xfe00_0000,
        0x31 | 0x35 => 1 << 24,
        0x32 => memory::SHARED_BYTES,
        0x33 => 32,
        0x34 => 0xff00_0000,
        0x36 => memory::LOCAL_BYTES,
        0x37 => 1 << 24,
        0x38 => 1 << lane,
        0x39 => bits(0..lane),
        0x3a => bits(0..lane + 1),
        0x3b => bits(lane + 1..32),
        0x3c => bits(lane..32),
        0x50 => CLOCK as u32,
        0x51 => (CLOCK >> 32) as u32,
        _ => 0,
    }
}

/// The reference's word for one thread.
fn reference(op: &Op, thread: &mut Thread, env: &Env<'_>, launch: &Launch) -> Result<(), u32> {
    match op {
        Op::S2R { dst, special: which } => {
            thread.set(*dst, special(*which, env.lane, launch), None);
            Ok(())
        }
        Op::FAdd { .. }
        | Op::FMul { .. }
        | Op::FFma { .. }
        | Op::FMnMx { .. }
        | Op::FSet { .. }
        | Op::FSetP { .. }
        | Op::FCmp { .. }
        | Op::Rro { .. }
        | Op::DAdd { .. }
        | Op::DMul { .. }
        | Op::DFma { .. }
        | Op::DMnMx { .. }
        | Op::DSet { .. }
        | Op::DSetP { .. }
        | Op::F2F { .. }
        | Op::F2I { .. }
        | Op::I2F { .. } => float::execute(op, thread, env),
        _ => integer::execute(op, thread, env),
    }
}

/// Changes what no program could have left.
fn made_possible(op: &Op, threads: &mut [Thread]) {
    if let Op::ISet { carry_in: true, .. } | Op::ISetP { carry_in: true, .. } = op {
        // A difference that is zero does not borrow.
        threads.iter_mut().for_each(|thread| thread.cc.carry |= thread.cc.zero);
    }
}

/// Shifts with carry are refused: nothing says what they do.
fn refused(op: &Op) -> bool {
    matches!(op, Op::Shl { carry_in: true, .. } | Op::Shr { carry_in: true, .. })
}

fn compare(bench: &mut Bench, instruction: &Instruction) {
    let op = &instruction.op;
    let mut before = bench.threads();
    made_possible(op, &mut before);
    bench.load(&before);
    let outcome = bench.execute(instruction);
    if refused(op) {
        // Unless no lane takes part.
        let guarded = before.iter().any(|thread| thread.predicate(instruction.guard));
        assert_eq!(outcome.is_err(), guarded, "{instruction}");
        return;
    }
    let lanes = mask_of(|lane| before[lane].predicate(instruction.guard));
    let yes = match op {
        Op::Vote { a, .. } => mask_of(|lane| lanes >> lane & 1 != 0 && before[lane].predicate(*a)),
        _ => 0,
    };
    let after = bench.stored();
    for lane in 0..LANES {
        let mut expected = before[lane].clone();
        if lanes >> lane & 1 != 0 {
            let env = Env { constants: &bench.table, lane, pc: PC, vote: (lanes, yes) };
            if let Op::Mufu { dst, a, function, saturate } = *op {
                let argument = before[lane].word(a.source, &env).expect("a register");
                let argument = if a.absolute { argument & !(1 << 31) } else { argument };
                let argument = u64::from(if a.negate { argument ^ 1 << 31 } else { argument });
                let result = after[lane].register(dst);
                let checked = !dst.is_zero() && float::mufu_is_checked(function, argument);
                let good = !checked || float::mufu_agrees(function, argument, saturate, result);
                assert!(good, "{instruction} of {argument:#x} is {result:#x}");
                expected.set(dst, result, None);
            } else if let Err(error) = reference(op, &mut expected, &env, &bench.launch) {
                assert_eq!(outcome, Err(Failure::Warp(error)), "{instruction}");
                return;
            }
        }
        if expected != after[lane] {
            let changed = (0..64).filter(|index| expected.r[*index] != after[lane].r[*index]);
            let registers: Vec<_> =
                changed.map(|i| format!("R{i}: {:#x} not {:#x}", after[lane].r[i], expected.r[i])).collect();
            let flags = (&after[lane].p, after[lane].cc, &expected.p, expected.cc);
            let mut inputs = Vec::new();
            op.registers(|register, count| {
                for index in register.index()..(register.index() + count).min(64) {
                    inputs.push(format!("R{index} = {:#x}", before[lane].r[usize::from(index)]));
                }
            });
            panic!("{instruction}, lane {lane}: {registers:?} {flags:?} of {inputs:?} {:?}\n{op:?}", before[lane].cc);
        }
    }
    assert_eq!(outcome, Ok(Flow::Next), "{instruction}");
}

/// Modifiers that must have come up, as the disassembler writes them.
const MODIFIERS: [(&str, &[&str]); 20] = [
    ("IADD", &["SAT", "X", "CC", "PO", "-R", "c["]),
    ("IMUL", &["HI", "U32", "CC", "c["]),
    ("IMAD", &["HI", "U32", "SAT", "X", "CC", "PO", "-R", "c["]),
    ("ISCADD", &["CC", "PO", "-R", "c["]),
    ("IMNMX", &["XLO", "XMED", "XHI", "U32", "CC", "!P"]),
    ("ISETP", &["LT", "EQ", "LE", "GT", "NE", "GE", "U32", "X", "AND", "OR", "XOR"]),
    ("LOP", &["AND", "OR", "XOR", "PASS_B", "~R", "X", "CC"]),
    ("SHR", &["W", "U32", "BREV", "CC"]),
    ("BFE", &["U32", "BREV", "CC"]),
    ("FADD", &["RM", "RP", "RZ", "FTZ", "SAT", "CC", "-R", "|R", "-|", "c["]),
    ("FMUL", &["RM", "RP", "RZ", "FTZ", "FMZ", "SAT", "CC", "-R", "D2", "D4", "D8", "M2", "M4", "M8"]),
    ("FFMA", &["RM", "RP", "RZ", "FTZ", "FMZ", "SAT", "CC", "-R", "c["]),
    ("FSETP", &["LTU", "NAN", "NUM", "GEU", "FTZ", "-R", "|R"]),
    ("MUFU", &["COS", "SIN", "EX2", "LG2", "RCP", "RSQ", "RCP64H", "RSQ64H", "SAT", "-R", "|R"]),
    ("DADD", &["RM", "RP", "RZ", "CC", "-R", "|R", "c["]),
    ("DMUL", &["RM", "RP", "RZ", "CC", "-R"]),
    ("DFMA", &["RM", "RP", "RZ", "CC", "-R"]),
    ("F2F", &["F16", "F64", "RM", "RP", "RZ", "FLOOR", "CEIL", "TRUNC", "ROUND", "FTZ", "SAT", "H1", "CC", "-R", "|R"]),
    ("F2I", &["F16", "F64", "U16", "S16", "U32", "U64", "S64", "FLOOR", "CEIL", "TRUNC", "FTZ", "CC", "-R", "|R"]),
    ("I2F", &["F16", "F64", "U8", "S8", "U16", "U64", "S64", "RM", "RP", "RZ", "B1", "B2", "B3", "CC", "-R", "|R"]),
];

#[test]
fn every_operation_with_every_modifier_agrees_with_its_definition() {
    let mut bench = Bench::new(0x5eed_0001);
    let mut texts: HashMap<&str, String> = HashMap::new();
    for assembly in OPERATIONS.iter().chain(&OTHERS) {
        for instruction in bench.instructions(assembly, EACH) {
            *texts.entry(instruction.op.mnemonic()).or_default() += &format!("{instruction} ");
            compare(&mut bench, &instruction);
        }
    }
    for (name, modifiers) in MODIFIERS {
        let text = &texts[name];
        let words: HashSet<&str> = text.split([' ', '.', ',']).collect();
        let came_up = |modifier: &&&str| words.contains(**modifier) || words.iter().any(|w| w.starts_with(**modifier));
        let missing: Vec<_> = modifiers.iter().filter(|modifier| !came_up(modifier)).collect();
        assert!(missing.is_empty(), "{name} without {missing:?}");
    }
}

/// Operations that exist and are refused.
const REFUSED: [&str; 2] = ["RTT", "BPT.TRAP 0x1"];

/// Names of the operations of a list of assembly.
fn mnemonics(list: &[&'static str]) -> Vec<&'static str> {
    list.iter().map(|text| text.trim_start_matches("@P0 ").split([' ', '.']).next().unwrap_or("")).collect()
}

#[test]
fn no_operation_is_without_a_reference() {
    let mut tested: Vec<&str> =
        [&OPERATIONS[..], &OTHERS, &memory::OPERATIONS, &REFUSED].into_iter().flat_map(mnemonics).collect();
    tested.iter_mut().for_each(|name| *name = name.trim_end_matches("32I"));
    tested.extend(control::OPERATIONS);
    let missing: Vec<_> = Op::mnemonics().filter(|name| !tested.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    let unknown: Vec<_> = tested.iter().filter(|name| Op::mnemonics().all(|known| known != **name)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

#[test]
fn what_is_not_modelled_is_an_illegal_encoding() {
    let mut bench = Bench::new(0x5eed_0002);
    let mut names = HashSet::new();
    let mut refuse = |bench: &mut Bench, instruction: Instruction| {
        names.insert(instruction.op.mnemonic());
        let threads = bench.threads();
        bench.load(&threads);
        let outcome = bench.execute(&Instruction { guard: PredicateOperand::TRUE, ..instruction });
        assert_eq!(outcome, Err(Failure::Warp(warp_error::ILLEGAL_ENCODING)), "{instruction:?}");
        assert_eq!(bench.stored(), threads, "{instruction:?}");
    };
    for assembly in REFUSED.iter().chain(&["SHL.X R0, R1, R2", "SHR.X R0, R1, R2"]) {
        for instruction in bench.instructions(assembly, 50) {
            let shift = matches!(instruction.op, Op::Shl { .. } | Op::Shr { .. });
            if !shift || refused(&instruction.op) {
                refuse(&mut bench, instruction);
            }
        }
    }
    // Every kind of instruction that the tables only know by name.
    for _ in 0..200_000 {
        let word = bench.random.next() & !8;
        for word in [word, word & 0xffff_ffff | 8] {
            if let Ok(instruction @ Instruction { op: Op::Unsupported { .. }, .. }) = sm20::decode(word) {
                refuse(&mut bench, instruction);
            }
        }
    }
    let expected = [
        "TEX", "SULD", "SUST", "VADD", "VMAD", "IPA", "ALD", "PIXLD", "QUADON", "LD_LDU", "LDS_LDU", "FSWZ", "RTT",
        "BPT", "SHL", "SHR",
    ];
    let missing: Vec<_> = expected.iter().filter(|name| !names.contains(**name)).collect();
    assert!(missing.is_empty(), "{missing:?} of {names:?}");
}
