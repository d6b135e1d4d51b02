//! Compares every operation with an independent reference, using random instructions with all their modifiers.
//! Registers, predicates and condition codes contain edge-case and random values. Compares the complete state of a
//! warp.
//!
//! To cover every encoding, the test assembles a template and flips random bits that leave the operation unchanged. The
//! references in `integer`, `float` (with `exact`) and `memory` compute one thread at a time. `control` generates
//! programs, and compares their execution with a direct evaluation of their source.

mod bench;
mod control;
mod exact;
mod float;
mod integer;
mod memory;

use crate::compute::exec::Flow;
use crate::compute::launch::{Failure, Launch};
use crate::compute::warp::{LANES, mask_of};
use bench::{Bench, CLOCK_NS, Cc, Env, PC, Thread};
use nvspec::class::compute90c0::warp_error;
use sm20::{Instruction, Op, PredicateOperand, SpecialRegister};
use std::collections::{HashMap, HashSet};

/// Assembly templates of all operations that lanes execute independently. Some operations have a second template with a
/// long immediate.
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

/// Operations whose result also depends on state other than registers.
const OTHERS: [&str; 6] = ["B2R R0, 0x0", "LEPC R0", "VOTE.ALL R0, P0, P1", "NOP", "PMTRIG 0x1", "MEMBAR.CTA"];

/// Number of random instructions for each template.
const INSTRUCTIONS_PER_FORM: usize = 200;

/// Returns a special register's value in the test's block of 5 * 3 * 4 threads.
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
        0x50 => CLOCK_NS as u32,
        0x51 => (CLOCK_NS >> 32) as u32,
        _ => 0,
    }
}

/// Computes the reference result of one thread.
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

/// Replaces combinations of flags that no program can produce.
fn made_possible(op: &Op, threads: &mut [Thread]) {
    if let Op::ISet { carry_in: true, .. } | Op::ISetP { carry_in: true, .. } = op {
        // A subtraction whose result is zero does not borrow.
        threads.iter_mut().for_each(|thread| thread.cc.carry |= thread.cc.zero);
    }
}

/// Returns true for shifts with carry, which the model rejects because their behaviour is unknown.
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
        // A warp error requires a participating lane.
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

/// Modifiers that must occur, as printed by the disassembler.
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
fn every_operation_and_modifier_matches_its_definition() {
    let mut bench = Bench::new(0x5eed_0001);
    let mut texts: HashMap<&str, String> = HashMap::new();
    for assembly in OPERATIONS.iter().chain(&OTHERS) {
        for instruction in bench.instructions(assembly, INSTRUCTIONS_PER_FORM) {
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

/// Control instructions in assembly, with near targets.
const CONTROL: [&str; 16] = [
    "BRA pc+0x8",
    "BRA pc-0x20",
    "BRX R3, pc+0x0",
    "JMP 0x40",
    "CAL pc+0x10",
    "SSY pc+0x18",
    "PBK pc+0x20",
    "PCNT pc+0x8",
    "PRET pc+0x10",
    "PLONGJMP pc+0x18",
    "RET",
    "BRK",
    "CONT",
    "LONGJMP",
    "EXIT",
    "BAR.SYNC 0x0",
];

/// Returns random instruction words for each operation, in two sets: the first contains no memory accesses and only
/// near targets, the second is unrestricted.
pub(super) fn random_words(each: usize) -> [Vec<u64>; 2] {
    let mut bench = Bench::new(0x5eed_0005);
    let mut of = |lists: &[&[&'static str]], each: usize| -> Vec<u64> {
        let instructions = lists.concat().into_iter().flat_map(|assembly| bench.instructions(assembly, each));
        instructions.map(|instruction| sm20::encode(&instruction).expect("an encoding")).collect()
    };
    let calm = of(&[&OPERATIONS, &OTHERS], each);
    let near = CONTROL.iter().map(|text| sm20::assemble(text).expect("good").words);
    let near = near.map(|words| u64::from(words[1]) << 32 | u64::from(words[0])).collect::<Vec<_>>().repeat(each * 2);
    [[calm, near].concat(), of(&[&OPERATIONS, &OTHERS, &memory::OPERATIONS, &CONTROL], each)]
}

/// Operations that the hardware supports but the model rejects.
const REFUSED: [&str; 2] = ["RTT", "BPT.TRAP 0x1"];

/// Returns the mnemonics in a list of assembly lines.
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
fn unmodelled_instructions_are_illegal_encodings() {
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
    // Try every instruction, including those for which the tables contain only a name.
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
