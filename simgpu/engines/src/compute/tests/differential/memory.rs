//! Memory instructions on byte arrays with the same contents as the warp's memory, executed one thread at a time.

use super::exact::{self, SINGLE};
use super::{Bench, Thread};
use crate::compute::exec::Flow;
use crate::compute::tests::rig::{DATA, LOCAL};
use crate::compute::warp::{LANES, mask_of};
use nvspec::class::compute90c0::limit;
use sm20::{Address, AtomicOp, AtomicType, Instruction, Op, Register, Rounding, Width};
use std::collections::HashSet;

pub(super) const OPERATIONS: [&str; 27] = [
    "LD R0, [R1]",
    "LD.E R0, [R2]",
    "LD.128 R0, [R4]",
    "LDU R0, [R1]",
    "ST [R1], R0",
    "ST.E [R2], R0",
    "ST.U8 [R1], R0",
    "LDL R0, [R1]",
    "STL [R1], R0",
    "LDS R0, [R1]",
    "STS [R1], R0",
    "LDLK P0, R0, [R1]",
    "STUL [R1], R0",
    "LDSLK P0, R0, [R1]",
    "STSUL [R1], R0",
    "LDC R0, c[0][R1]",
    "ATOM.ADD R0, [R1], R2",
    "ATOM.EXCH R0, [R1], R2",
    "ATOM.CAS R0, [R1], R2, R3",
    "ATOM.ADD.U64 R0, [R2], R4",
    "ATOM.CAS.U64 R0, [R2], R4, R6",
    "ATOM.ADD.F32 R0, [R1], R2",
    "ATOM.MAX.S32 R0, [R1], R2",
    "RED.ADD [R1], R2",
    "RED.ADD.F32 [R1], R2",
    "CCTL.QRY1 R0, [R2]",
    "CCTLL.QRY1 R0, [R1]",
];

pub(super) const SHARED_BYTES: u32 = 512;
pub(super) const LOCAL_BYTES: u32 = 64;
const GLOBAL_BYTES: usize = 4096;
/// Size of the lockable range in bytes. It is small, so that lanes often find a word locked.
const LOCKED_BYTES: u64 = 64;

/// Target of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    Global,
    Shared,
    Local,
    Constant,
}

/// Contents of global, shared, and local memory.
struct Bytes {
    global: Vec<u8>,
    shared: Vec<u8>,
    local: Vec<Vec<u8>>,
    /// Locked words. The first field is true for shared memory.
    locks: HashSet<(bool, u64)>,
}

impl Bytes {
    fn slice(&mut self, space: Space, lane: usize, at: u64, len: usize) -> &mut [u8] {
        let (bytes, start) = match space {
            Space::Global => (&mut self.global, at - DATA),
            Space::Shared => (&mut self.shared, at & 0xff_ffff),
            Space::Local => (&mut self.local[lane], at & 0xff_ffff),
            Space::Constant => unreachable!("nobody stores there"),
        };
        &mut bytes[start as usize..start as usize + len]
    }
}

/// Returns an instruction's address and access width, and its space if the instruction can access only one space.
fn access(op: &Op) -> Option<(Address, u64, Option<Space>)> {
    let bytes = |width: Width| match width {
        Width::U8 | Width::S8 => 1,
        Width::U16 | Width::S16 => 2,
        Width::B32 => 4,
        Width::B64 => 8,
        Width::B128 => 16,
    };
    let atomic = |kind: AtomicType| if kind == AtomicType::U64 { 8 } else { 4 };
    Some(match *op {
        Op::Ld { address, width, .. } | Op::Ldu { address, width, .. } | Op::St { address, width, .. } => {
            (address, bytes(width), None)
        }
        Op::Ldlk { address, width, .. } | Op::Stul { address, width, .. } => {
            (address, bytes(width), Some(Space::Global))
        }
        Op::Ldl { address, width, .. } | Op::Stl { address, width, .. } => (address, bytes(width), Some(Space::Local)),
        Op::Lds { address, width, .. }
        | Op::Sts { address, width, .. }
        | Op::Ldslk { address, width, .. }
        | Op::Stsul { address, width, .. } => (address, bytes(width), Some(Space::Shared)),
        Op::Ldc { base, offset, width, .. } => {
            let address = Address { base, offset: offset.into(), wide: false };
            (address, bytes(width), Some(Space::Constant))
        }
        Op::Atom { address, kind, .. } | Op::Red { address, kind, .. } => (address, atomic(kind), Some(Space::Global)),
        _ => return None,
    })
}

/// Chooses addresses and stores them in the registers. Returns each lane's space and address, or `None` if the
/// instruction permits no valid address.
fn aim(bench: &mut Bench, op: &Op, threads: &mut [Thread]) -> Option<Vec<(Space, u64)>> {
    let Some((address, bytes, only)) = access(op) else { return Some(vec![(Space::Global, 0); LANES]) };
    if address.base.is_zero() {
        return None;
    }
    let locks = matches!(op, Op::Ldlk { .. } | Op::Stul { .. } | Op::Ldslk { .. } | Op::Stsul { .. });
    let (pattern, near) = (bench.random.next(), bench.random.next());
    let windows = [bench.launch.shared_window, bench.launch.local_window];
    let mut targets = Vec::new();
    for (lane, thread) in threads.iter_mut().enumerate() {
        let random = bench.random.next();
        let space = only.unwrap_or(match random % 8 {
            _ if pattern % 2 == 0 => Space::Global,
            0 => Space::Shared,
            1 => Space::Local,
            _ => Space::Global,
        });
        let size = match space {
            _ if locks => LOCKED_BYTES,
            Space::Global => GLOBAL_BYTES as u64,
            Space::Shared => SHARED_BYTES.into(),
            Space::Local => LOCAL_BYTES.into(),
            Space::Constant => limit::CONSTANT_BYTES.into(),
        };
        // The lanes' addresses are contiguous, identical or random.
        let place = match pattern >> 8 & 3 {
            0 => near % 16 + lane as u64,
            1 => near,
            _ => random >> 16,
        };
        let offset = place % (size / bytes) * bytes;
        let at = match (space, only) {
            (Space::Global, _) => DATA + offset,
            (Space::Shared, None) => windows[0] + offset,
            (Space::Local, None) => windows[1] + offset,
            _ => offset,
        };
        let base = at.wrapping_sub(i64::from(address.offset).cast_unsigned());
        let index = usize::from(address.base.index());
        thread.r[index] = base as u32;
        if address.wide {
            thread.r[index + 1] = (base >> 32) as u32;
        }
        targets.push((space, at));
    }
    Some(targets)
}

fn words(width: u64) -> usize {
    (width as usize).div_ceil(4)
}

/// Returns the contents of a load's destination registers.
fn extended(bytes: &[u8], width: Width) -> Vec<u32> {
    match width {
        Width::U8 => vec![bytes[0].into()],
        Width::S8 => vec![i32::from(bytes[0] as i8) as u32],
        Width::U16 => vec![u16::from_le_bytes([bytes[0], bytes[1]]).into()],
        Width::S16 => vec![i32::from(i16::from_le_bytes([bytes[0], bytes[1]])) as u32],
        _ => bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().expect("four"))).collect(),
    }
}

fn put(thread: &mut Thread, dst: Register, values: &[u32]) {
    if !dst.is_zero() {
        let index = usize::from(dst.index());
        thread.r[index..index + values.len()].copy_from_slice(values);
    }
}

/// Returns the bytes of consecutive registers, starting with `register`.
fn bytes_of(thread: &Thread, register: Register, len: u64) -> Vec<u8> {
    let index = usize::from(register.index());
    let get = |word: usize| if register.is_zero() { 0 } else { thread.r[index + word] };
    let bytes: Vec<u8> = (0..words(len)).flat_map(|word| get(word).to_le_bytes()).collect();
    bytes[..len as usize].to_vec()
}

fn updated(operation: AtomicOp, kind: AtomicType, old: u64, a: u64, c: u64) -> u64 {
    if kind == AtomicType::F32 {
        return exact::add(old, a, SINGLE, Rounding::Nearest);
    }
    let number = |value: u64| match kind {
        AtomicType::S32 => i128::from(value as i32),
        _ => i128::from(value),
    };
    match operation {
        AtomicOp::Add => old.wrapping_add(a),
        AtomicOp::Min => {
            if number(a) < number(old) {
                a
            } else {
                old
            }
        }
        AtomicOp::Max => {
            if number(a) > number(old) {
                a
            } else {
                old
            }
        }
        AtomicOp::Inc => {
            if old < a {
                old + 1
            } else {
                0
            }
        }
        AtomicOp::Dec => {
            if old != 0 && old <= a {
                old - 1
            } else {
                a
            }
        }
        AtomicOp::And => old & a,
        AtomicOp::Or => old | a,
        AtomicOp::Xor => old ^ a,
        AtomicOp::Exch => a,
        AtomicOp::Cas => {
            if old == a {
                c
            } else {
                old
            }
        }
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Executes the access of one thread.
fn access_once(op: &Op, lane: usize, thread: &mut Thread, target: (Space, u64), memory: &mut Bytes, table: &[u32]) {
    let (space, at) = target;
    let bytes = access(op).map_or(0, |(_, bytes, _)| bytes);
    let load = |space: Space, memory: &mut Bytes| memory.slice(space, lane, at, bytes as usize).to_vec();
    match *op {
        Op::Ld { dst, width, .. }
        | Op::Ldu { dst, width, .. }
        | Op::Ldl { dst, width, .. }
        | Op::Lds { dst, width, .. } => {
            put(thread, dst, &extended(&load(space, memory), width));
        }
        Op::Ldlk { p, dst, width, .. } | Op::Ldslk { p, dst, width, .. } => {
            put(thread, dst, &extended(&load(space, memory), width));
            thread.set_predicate(p, memory.locks.insert((space == Space::Shared, at / 4)));
        }
        Op::St { value, .. } | Op::Stl { value, .. } | Op::Sts { value, .. } => {
            let value = bytes_of(thread, value, bytes);
            memory.slice(space, lane, at, bytes as usize).copy_from_slice(&value);
        }
        Op::Stul { value, .. } | Op::Stsul { value, .. } => {
            let value = bytes_of(thread, value, bytes);
            memory.slice(space, lane, at, bytes as usize).copy_from_slice(&value);
            memory.locks.remove(&(space == Space::Shared, at / 4));
        }
        Op::Ldc { dst, bank, width, .. } => {
            let all: Vec<u8> = (0..4)
                .map(|word| at as usize / 4 + word + usize::from(bank))
                .flat_map(|index| table.get(index).copied().unwrap_or(0).to_le_bytes())
                .collect();
            let start = at as usize % 4;
            put(thread, dst, &extended(&all[start..start + bytes as usize], width));
        }
        Op::Atom { dst, a, c, operation, kind, .. } => {
            let old = exchange(thread, a, c, operation, kind, memory.slice(space, lane, at, bytes as usize));
            let values = [old as u32, (old >> 32) as u32];
            put(thread, dst, &values[..words(bytes)]);
        }
        Op::Red { a, operation, kind, .. } => {
            exchange(thread, a, Register::ZERO, operation, kind, memory.slice(space, lane, at, bytes as usize));
        }
        Op::Cctl { dst, .. } | Op::Cctll { dst, .. } => put(thread, dst, &[0]),
        _ => panic!("{op:?} has no reference"),
    }
}

/// Executes an atomic operation on bytes and returns their old value.
fn exchange(thread: &Thread, a: Register, c: Register, operation: AtomicOp, kind: AtomicType, bytes: &mut [u8]) -> u64 {
    let len = bytes.len() as u64;
    let old = number(bytes);
    let value = |register| number(&bytes_of(thread, register, len));
    let new = updated(operation, kind, old, value(a), value(c));
    bytes.copy_from_slice(&new.to_le_bytes()[..len as usize]);
    old
}

/// Replaces the bank of an LDC instruction with a valid one.
fn possible(instruction: Instruction) -> Instruction {
    let op = match instruction.op {
        Op::Ldc { dst, bank, base, offset, width } => {
            Op::Ldc { dst, bank: bank % limit::CONSTANT_BANKS as u8, base, offset, width }
        }
        op => op,
    };
    Instruction { op, ..instruction }
}

#[test]
fn memory_instructions_agree_with_arrays_of_bytes() {
    let mut bench = Bench::new(0x5eed_0003);
    let mut memory = Bytes {
        global: (0..GLOBAL_BYTES).map(|index| (index * 7) as u8).collect(),
        shared: vec![0; SHARED_BYTES as usize],
        local: vec![vec![0; LOCAL_BYTES as usize]; LANES],
        locks: HashSet::new(),
    };
    let initial: Vec<u32> = memory.global.chunks(4).map(|bytes| number(bytes) as u32).collect();
    bench.rig.write(DATA, &initial);
    bench.rig.write(LOCAL, &vec![0; 0x1000]);
    let mut instructions: Vec<Instruction> = Vec::new();
    for assembly in OPERATIONS {
        instructions.extend(bench.instructions(assembly, 200).into_iter().map(possible));
    }
    // Shuffle the instructions, so that loads read data stored by other instructions.
    for index in (1..instructions.len()).rev() {
        let other = (bench.random.next() % (index as u64 + 1)) as usize;
        instructions.swap(index, other);
    }
    let mut done = 0;
    for instruction in instructions {
        let mut before = bench.threads();
        let Some(targets) = aim(&mut bench, &instruction.op, &mut before) else { continue };
        bench.load(&before);
        assert_eq!(bench.execute(&instruction), Ok(Flow::Next), "{instruction}");
        let lanes = mask_of(|lane| before[lane].predicate(instruction.guard));
        let after = bench.stored();
        for lane in 0..LANES {
            let mut expected = before[lane].clone();
            if lanes >> lane & 1 != 0 {
                access_once(&instruction.op, lane, &mut expected, targets[lane], &mut memory, &bench.table);
            }
            assert_eq!(after[lane], expected, "{instruction}, lane {lane} at {:x?}", targets[lane]);
        }
        let words = bench.rig.read(DATA, GLOBAL_BYTES / 4);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert!(bytes == memory.global, "{instruction} changes other global memory");
        for (index, byte) in memory.shared.iter().enumerate() {
            assert_eq!(bench.shared.read::<1>(index as u32), Ok([*byte]), "{instruction} changes other shared memory");
        }
        done += 1;
    }
    assert!(done > 4000, "only {done}");
}
