//! Tests control flow. Generates random programs with branches, loops, calls, and jumps out of them, and compiles them
//! to code that uses the divergence stack. Compares each thread with a direct evaluation of the source, and barrier
//! reductions with counts over the block.

use super::super::rig::{DATA, Random, Rig};
use std::fmt::Write;

/// Operations that the generated programs use.
pub(super) const OPERATIONS: [&str; 18] = [
    "BRA", "BRX", "JMP", "JMX", "CAL", "JCAL", "SSY", "PBK", "PCNT", "PRET", "PLONGJMP", "EXIT", "RET", "KIL", "BRK",
    "CONT", "LONGJMP", "BAR",
];

/// A condition: the index of a bit in the thread's number, which is true if the bit is set.
type Bit = u32;

#[derive(Clone, Debug)]
enum Statement {
    /// Mixes a constant into the thread's number.
    Mix(u32),
    If(Bit, Vec<Self>, Vec<Self>),
    /// Selects one of four branches based on two bits.
    Switch(Bit, [Vec<Self>; 4]),
    Loop(u32, Vec<Self>),
    Break(Bit),
    Continue(Bit),
    Call(usize),
    Return(Bit),
    /// Statements that a nested `Throw` (a long jump) can terminate.
    Catch(Vec<Self>),
    Throw(Bit),
    Exit(Bit),
}

/// Control transfer of a thread after a statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    On,
    Break,
    Continue,
    Return,
    Throw,
    Exit,
}

/// Constructs that enclose a statement, which determine the statements permitted in it.
#[derive(Clone, Copy, Debug, Default)]
struct Inside {
    depth: u32,
    in_loop: bool,
    in_catch: bool,
    function: usize,
}

const FUNCTIONS: usize = 4;
/// First register of the loop counters. Each function uses several.
const COUNTERS: usize = 16;
const MAX_DEPTH: u32 = 4;

fn statements(random: &mut Random, inside: Inside) -> Vec<Statement> {
    let count = 1 + random.next() % 4;
    (0..count).map(|_| statement(random, inside)).collect()
}

fn statement(random: &mut Random, inside: Inside) -> Statement {
    let bits = random.next();
    let bit = (bits >> 32) as u32 % 30;
    let deeper = Inside { depth: inside.depth + 1, ..inside };
    match bits % 14 {
        0 | 1 if inside.depth < MAX_DEPTH => Statement::If(bit, statements(random, deeper), statements(random, deeper)),
        2 if inside.depth < MAX_DEPTH => Statement::Switch(bit, std::array::from_fn(|_| statements(random, deeper))),
        3 | 4 if inside.depth < MAX_DEPTH => {
            let body = statements(random, Inside { in_loop: true, ..deeper });
            Statement::Loop((bits >> 40) as u32 % 5, body)
        }
        // A long jump may leave loops: both the evaluation and the divergence stack unwind them.
        5 if inside.depth < MAX_DEPTH => Statement::Catch(statements(random, Inside { in_catch: true, ..deeper })),
        6 if inside.in_loop => Statement::Break(bit),
        7 if inside.in_loop => Statement::Continue(bit),
        8 | 9 if inside.function + 1 < FUNCTIONS => {
            Statement::Call(inside.function + 1 + (bits >> 40) as usize % (FUNCTIONS - inside.function - 1))
        }
        10 if inside.function > 0 => Statement::Return(bit),
        11 if inside.in_catch => Statement::Throw(bit),
        12 if bits >> 40 & 7 == 0 => Statement::Exit(bit),
        _ => Statement::Mix((bits >> 32) as u32),
    }
}

/// Applies the statements to a thread's number.
fn evaluate(body: &[Statement], x: &mut u32, tid: u32, functions: &[Vec<Statement>]) -> Next {
    let set = |x: u32, bit: Bit| x >> bit & 1 != 0;
    for statement in body {
        let next = match statement {
            Statement::Mix(constant) => {
                *x = (*x ^ constant).wrapping_mul(0x41c6_4e6d).wrapping_add(tid);
                Next::On
            }
            Statement::If(bit, yes, no) => evaluate(if set(*x, *bit) { yes } else { no }, x, tid, functions),
            Statement::Switch(bit, arms) => evaluate(&arms[(*x >> bit & 3) as usize], x, tid, functions),
            Statement::Loop(count, body) => {
                let mut leaves = Next::On;
                for _ in 0..*count {
                    match evaluate(body, x, tid, functions) {
                        Next::On | Next::Continue => {}
                        Next::Break => break,
                        other => {
                            leaves = other;
                            break;
                        }
                    }
                }
                leaves
            }
            Statement::Break(bit) => {
                if set(*x, *bit) {
                    Next::Break
                } else {
                    Next::On
                }
            }
            Statement::Continue(bit) => {
                if set(*x, *bit) {
                    Next::Continue
                } else {
                    Next::On
                }
            }
            Statement::Call(function) => match evaluate(&functions[*function], x, tid, functions) {
                Next::Return => Next::On,
                other => other,
            },
            Statement::Return(bit) => {
                if set(*x, *bit) {
                    Next::Return
                } else {
                    Next::On
                }
            }
            Statement::Catch(body) => match evaluate(body, x, tid, functions) {
                Next::Throw => Next::On,
                other => other,
            },
            Statement::Throw(bit) => {
                if set(*x, *bit) {
                    Next::Throw
                } else {
                    Next::On
                }
            }
            Statement::Exit(bit) => {
                if set(*x, *bit) {
                    Next::Exit
                } else {
                    Next::On
                }
            }
        };
        if next != Next::On {
            return next;
        }
    }
    Next::On
}

/// Generates assembly. R10 contains the thread's number, R0 the thread index, and R9 the address of the result.
struct Compiler {
    text: String,
    labels: usize,
}

impl Compiler {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.text, "{line}").expect("a string");
    }

    fn label(&mut self) -> usize {
        self.labels += 1;
        self.labels
    }

    /// Sets P0 to the value of a bit.
    fn condition(&mut self, bit: Bit) {
        self.line(format_args!("LOP32I.AND R11, R10, {:#x}\nISETP.NE.AND P0, PT, R11, RZ", 1u32 << bit));
    }

    /// Chooses one of two equivalent forms by the number of labels generated so far, so that both are tested.
    fn either<'a>(&self, one: &'a str, other: &'a str) -> &'a str {
        if self.labels.is_multiple_of(2) { one } else { other }
    }

    fn body(&mut self, body: &[Statement], function: usize, depth: usize) {
        for statement in body {
            self.statement(statement, function, depth);
        }
    }

    fn statement(&mut self, statement: &Statement, function: usize, depth: usize) {
        match statement {
            Statement::Mix(constant) => {
                self.line(format_args!("LOP32I.XOR R10, R10, {constant:#x}\nIMAD.U32.U32 R10, R10, R5, R0"))
            }
            Statement::If(bit, yes, no) => {
                let at = self.label();
                self.condition(*bit);
                let go = self.either("BRA", "JMP");
                self.line(format_args!("SSY join{at}\n@!P0 {go} else{at}"));
                self.body(yes, function, depth + 1);
                self.line(format_args!("NOP.S\nelse{at}:"));
                self.body(no, function, depth + 1);
                self.line(format_args!("NOP.S\njoin{at}:"));
            }
            Statement::Switch(bit, arms) => {
                let at = self.label();
                let go = self.either("BRX", "JMX");
                self.line(format_args!("SSY join{at}\nSHR.U32 R11, R10, {bit:#x}\nLOP.AND R11, R11, 0x3"));
                self.line(format_args!("SHL R11, R11, 0x3\n{go} R11, table{at}\ntable{at}:"));
                (0..4).for_each(|arm| self.line(format_args!("BRA arm{at}_{arm}")));
                for (arm, body) in arms.iter().enumerate() {
                    self.line(format_args!("arm{at}_{arm}:"));
                    self.body(body, function, depth + 1);
                    self.line(format_args!("NOP.S"));
                }
                self.line(format_args!("join{at}:"));
            }
            Statement::Loop(count, body) => {
                let (at, counter) = (self.label(), COUNTERS + 8 * function + depth);
                self.line(format_args!("MOV R{counter}, RZ\nPBK out{at}\ntop{at}: PCNT next{at}"));
                self.line(format_args!("ISETP.GE.AND P0, PT, R{counter}, {count:#x}\n@P0 BRK"));
                self.line(format_args!("IADD R{counter}, R{counter}, 0x1"));
                self.body(body, function, depth + 1);
                self.line(format_args!("CONT\nnext{at}: BRA top{at}\nout{at}:"));
            }
            Statement::Break(bit) => self.when(*bit, "BRK"),
            Statement::Continue(bit) => self.when(*bit, "CONT"),
            Statement::Return(bit) => self.when(*bit, "RET"),
            Statement::Throw(bit) => self.when(*bit, "LONGJMP"),
            Statement::Exit(bit) => {
                let end = self.either("EXIT", "KIL");
                self.when(*bit, "ST [R9], R10");
                self.line(format_args!("@P0 {end}"));
            }
            Statement::Call(function) => {
                let at = self.label();
                match at % 3 {
                    0 => self.line(format_args!("CAL function{function}")),
                    1 => self.line(format_args!("JCAL function{function}")),
                    _ => self.line(format_args!("PRET after{at}\nBRA function{function}\nafter{at}:")),
                }
            }
            Statement::Catch(body) => {
                let at = self.label();
                self.line(format_args!("PLONGJMP catch{at}"));
                self.body(body, function, depth + 1);
                self.line(format_args!("LONGJMP\ncatch{at}:"));
            }
        }
    }

    fn when(&mut self, bit: Bit, what: &str) {
        self.condition(bit);
        self.line(format_args!("@P0 {what}"));
    }
}

fn compiled(functions: &[Vec<Statement>]) -> String {
    let mut compiler = Compiler { text: String::new(), labels: 0 };
    compiler.line(format_args!(
        ".kernel k
         S2R R0, SR_TID.X
         S2R R1, SR_CTAID.X
         S2R R2, SR_NTID.X
         IMAD R0, R1, R2, R0
         ISCADD R9, R0, c[0][0x20], 0x2
         MOV32I R5, 0x41c64e6d
         IMAD.U32.U32 R10, R0, R5, c[0][0x24]"
    ));
    compiler.body(&functions[0], 0, 0);
    compiler.line(format_args!("ST [R9], R10\nEXIT"));
    for (index, body) in functions.iter().enumerate().skip(1) {
        compiler.line(format_args!("function{index}:"));
        compiler.body(body, index, 0);
        compiler.line(format_args!("RET"));
    }
    compiler.text
}

#[test]
fn random_programs_follow_their_source() {
    let mut random = Random(0x5eed_0004);
    let (mut rig, mut all) = (Rig::new(0), String::new());
    for round in 0..250u32 {
        let functions: Vec<Vec<Statement>> =
            (0..FUNCTIONS).map(|function| statements(&mut random, Inside { function, ..Inside::default() })).collect();
        let source = compiled(&functions);
        rig.write(DATA, &[0; 96]);
        rig.params(&[DATA as u32, round]);
        rig.run(&source, 2, 48).unwrap_or_else(|error| panic!("{error} in\n{source}\n{functions:?}"));
        let expected: Vec<u32> = (0..96u32)
            .map(|tid| {
                let mut x = tid.wrapping_mul(0x41c6_4e6d).wrapping_add(round);
                evaluate(&functions[0], &mut x, tid, &functions);
                x
            })
            .collect();
        assert_eq!(rig.read(DATA, 96), expected, "{functions:?}\n{source}");
        all += &source;
    }
    // Each operation must be used at least once. Labels do not match, because they end with a colon.
    let used = |name: &&str| all.split_whitespace().any(|word| word.trim_end_matches(".S") == *name);
    let unused: Vec<_> = OPERATIONS.iter().filter(|name| **name != "BAR" && !used(name)).collect();
    assert!(unused.is_empty(), "{unused:?}");
}

#[test]
fn barriers_reduce_over_all_threads_of_a_block() {
    const ROUNDS: u32 = 9;
    for (threads, barrier) in [(1u32, 0), (32, 3), (70, 15), (256, 7)] {
        for operation in ["POPC", "AND", "OR"] {
            // Test a condition that is rarely true for OR, and one that is usually true for AND, so that both results
            // occur.
            let mask = if operation == "POPC" { 0x100u32 } else { 0xff00 };
            let compare = if operation == "AND" { "NE" } else { "EQ" };
            let source = format!(
                ".kernel k
                 S2R R0, SR_TID.X
                 ISCADD R9, R0, c[0][0x20], 0x2
                 MOV32I R5, 0x41c64e6d
                 IADD32I R10, R0, 0x3039
                 MOV R3, RZ
                 round: IMAD.U32.U32 R10, R10, R5, R0
                 LOP32I.AND R11, R10, {mask:#x}
                 ISETP.{compare}.AND P0, PT, R11, RZ
                 BAR.RED.{operation} P1, R12, {barrier:#x}, RZ, P0
                 IADD R10, R10, R12
                 @P1 IADD R10, R10, 0x11
                 IADD R3, R3, 0x1
                 ISETP.LT.AND P2, PT, R3, {ROUNDS:#x}
                 @P2 BRA round
                 ST [R9], R10
                 EXIT"
            );
            let mut rig = Rig::new(0);
            rig.params(&[DATA as u32]);
            rig.run(&source, 1, threads).expect("good");
            let mut numbers: Vec<u32> = (0..threads).map(|tid| tid + 0x3039).collect();
            for _ in 0..ROUNDS {
                for (tid, x) in (0..).zip(&mut numbers) {
                    *x = x.wrapping_mul(0x41c6_4e6d).wrapping_add(tid);
                }
                let mut votes = numbers.iter().map(|x| (x & mask == 0) == (compare == "EQ"));
                let result = match operation {
                    "POPC" => votes.filter(|vote| *vote).count() as u32,
                    "AND" => {
                        if votes.all(|vote| vote) {
                            u32::MAX
                        } else {
                            0
                        }
                    }
                    _ => {
                        if votes.any(|vote| vote) {
                            u32::MAX
                        } else {
                            0
                        }
                    }
                };
                let more = if result != 0 { 0x11 } else { 0 };
                numbers.iter_mut().for_each(|x| *x = x.wrapping_add(result).wrapping_add(more));
            }
            assert_eq!(rig.read(DATA, threads as usize), numbers, "{operation} of {threads}");
        }
    }
}
