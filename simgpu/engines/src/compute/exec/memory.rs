//! Memory instructions.

use super::super::launch::{Failure, ILLEGAL};
use super::super::memory::{self, Place, load, store};
use super::super::warp::{LANES, Lanes, Pairs, Warp, lanes_of};
use super::{Machine, map};
use nvspec::addr::GpuVa;
use nvspec::class::compute90c0::warp_error;
use sm20::{Address, AtomicOp, AtomicType, Op, Predicate, Register, Width};

pub(super) fn execute(warp: &mut Warp, op: &Op, mask: u32, machine: &mut Machine<'_, '_>) -> Result<(), Failure> {
    match *op {
        Op::Ld { dst, address, width, cache: _ } | Op::Ldu { dst, address, width } => {
            generic_load(warp, dst, address, width, mask, machine)
        }
        Op::St { address, value, width, cache: _ } => generic_store(warp, address, value, width, mask, machine),
        Op::Ldl { dst, address, width, cache: _ } => {
            let addresses = narrow(warp, address);
            aligned(&addresses.map(u64::from), mask, width)?;
            local_load(warp, dst, &addresses, width, mask, machine)
        }
        Op::Stl { address, value, width, cache: _ } => {
            let addresses = narrow(warp, address);
            aligned(&addresses.map(u64::from), mask, width)?;
            local_store(warp, &addresses, value, width, mask, machine)
        }
        Op::Lds { dst, address, width } => {
            let addresses = narrow(warp, address);
            aligned(&addresses.map(u64::from), mask, width)?;
            shared_load(warp, dst, &addresses, width, mask, machine)
        }
        Op::Sts { address, value, width } => {
            let addresses = narrow(warp, address);
            aligned(&addresses.map(u64::from), mask, width)?;
            shared_store(warp, &addresses, value, width, mask, machine)
        }
        Op::Ldlk { p, dst, address, width } => locked_global_load(warp, p, dst, address, width, mask, machine),
        Op::Stul { address, value, width } => unlocking_store(warp, address, value, width, mask, machine),
        Op::Ldslk { p, dst, address, width } => locked_load(warp, p, dst, address, width, mask, machine),
        Op::Stsul { address, value, width } => {
            let addresses = narrow(warp, address);
            aligned(&addresses.map(u64::from), mask, width)?;
            shared_store(warp, &addresses, value, width, mask, machine)?;
            lanes_of(mask).for_each(|lane| machine.shared.unlock(addresses[lane]));
            Ok(())
        }
        Op::Ldc { dst, bank, base, offset, width } => {
            constant_load(warp, dst, Constant { bank, base, offset }, width, mask, machine)
        }
        Op::Atom { dst, address, a, c, operation, kind } => {
            atomic(warp, Some(dst), address, Atomic { operation, kind, a, c }, mask, machine)
        }
        Op::Red { address, a, operation, kind } => {
            atomic(warp, None, address, Atomic { operation, kind, a, c: Register::ZERO }, mask, machine)
        }
        // The model executes accesses in order and does not cache data, so barriers and cache control do not affect
        // memory.
        Op::Membar { .. } => Ok(()),
        Op::Cctl { dst, .. } | Op::Cctll { dst, .. } => {
            warp.set(dst, &[0; LANES], mask);
            Ok(())
        }
        _ => Err(ILLEGAL),
    }
}

/// Computes the addresses of global and generic accesses.
fn wide(warp: &Warp, address: Address) -> Pairs {
    if address.wide {
        let offset = i64::from(address.offset);
        warp.pair(address.base).map(|base| base.wrapping_add_signed(offset))
    } else {
        narrow(warp, address).map(u64::from)
    }
}

fn narrow(warp: &Warp, address: Address) -> Lanes {
    let base = warp.register(address.base);
    map(|lane| base[lane].wrapping_add_signed(address.offset))
}

const fn bytes(width: Width) -> u64 {
    match width {
        Width::U8 | Width::S8 => 1,
        Width::U16 | Width::S16 => 2,
        Width::B32 => 4,
        Width::B64 => 8,
        Width::B128 => 16,
    }
}

/// Returns the number of registers for a value of this width.
const fn registers(width: Width) -> u8 {
    match width {
        Width::U8 | Width::S8 | Width::U16 | Width::S16 | Width::B32 => 1,
        Width::B64 => 2,
        Width::B128 => 4,
    }
}

fn aligned(addresses: &Pairs, mask: u32, width: Width) -> Result<(), Failure> {
    let low = bytes(width) - 1;
    let bad = addresses.iter().enumerate().fold(0, |bad, (lane, address)| bad | u32::from(address & low != 0) << lane);
    if bad & mask != 0 { Err(Failure::Warp(warp_error::MISALIGNED_ADDRESS)) } else { Ok(()) }
}

/// Returns a value of one or two bytes, extended to register width.
fn extended(bytes: [u8; 2], width: Width) -> u32 {
    match width {
        Width::U8 => u32::from(bytes[0]),
        Width::S8 => i32::from(bytes[0].cast_signed()).cast_unsigned(),
        Width::S16 => i32::from(i16::from_le_bytes(bytes)).cast_unsigned(),
        _ => u32::from(u16::from_le_bytes(bytes)),
    }
}

const fn is_narrow(width: Width) -> bool {
    bytes(width) < 4
}

/// Lanes of a generic access, grouped by target memory.
struct Places {
    global: (u32, Pairs),
    shared: (u32, Lanes),
    local: (u32, Lanes),
}

fn places(addresses: &Pairs, mask: u32, write: bool, machine: &Machine<'_, '_>) -> Result<Places, Failure> {
    let launch = machine.launch;
    let mut places = Places { global: (0, *addresses), shared: (0, [0; LANES]), local: (0, [0; LANES]) };
    // In most accesses, all addresses are global: below both windows, and not remapped by a global map.
    let lowest_window = launch.shared_window.min(launch.local_window);
    if launch.global_map.is_none() && addresses.iter().fold(true, |all, address| all & (*address < lowest_window)) {
        places.global.0 = mask;
        return Ok(places);
    }
    for lane in lanes_of(mask) {
        let bit = 1 << lane;
        match memory::resolve(launch, addresses[lane], write)? {
            Place::Global(va) => {
                places.global.0 |= bit;
                places.global.1[lane] = va.0;
            }
            Place::Shared(address) => {
                places.shared.0 |= bit;
                places.shared.1[lane] = address;
            }
            Place::Local(address) => {
                places.local.0 |= bit;
                places.local.1[lane] = address;
            }
        }
    }
    Ok(places)
}

fn generic_load(
    warp: &mut Warp,
    dst: Register,
    address: Address,
    width: Width,
    mask: u32,
    machine: &mut Machine<'_, '_>,
) -> Result<(), Failure> {
    let addresses = wide(warp, address);
    aligned(&addresses, mask, width)?;
    let Places { global, shared, local } = places(&addresses, mask, false, machine)?;
    // A load may overwrite the register that contains the address, so resolve all addresses first.
    if global.0 != 0 {
        global_load(warp, dst, &global.1, width, global.0, machine)?;
    }
    if shared.0 != 0 {
        shared_load(warp, dst, &shared.1, width, shared.0, machine)?;
    }
    if local.0 != 0 {
        local_load(warp, dst, &local.1, width, local.0, machine)?;
    }
    Ok(())
}

fn global_load(
    warp: &mut Warp,
    dst: Register,
    addresses: &Pairs,
    width: Width,
    mask: u32,
    machine: &mut Machine<'_, '_>,
) -> Result<(), Failure> {
    match width {
        Width::B32 => set_words(warp, dst, &load::<1>(machine.session, addresses, mask, machine.counts)?, mask),
        Width::B64 => set_words(warp, dst, &load::<2>(machine.session, addresses, mask, machine.counts)?, mask),
        Width::B128 => set_words(warp, dst, &load::<4>(machine.session, addresses, mask, machine.counts)?, mask),
        Width::U8 | Width::S8 | Width::U16 | Width::S16 => {
            let mut values = [0; LANES];
            let mut last = None;
            for lane in lanes_of(mask) {
                let mut buffer = [0; 2];
                let va = addresses[lane];
                machine.session.read(GpuVa(va), &mut buffer[..bytes(width) as usize])?;
                values[lane] = extended(buffer, width);
                count(&mut last, va, false, machine);
            }
            warp.set(dst, &values, mask);
        }
    }
    Ok(())
}

/// Counts a transaction if the address just accessed is in a different line from the previous one.
fn count(last: &mut Option<u64>, va: u64, write: bool, machine: &mut Machine<'_, '_>) {
    let line = Some(va / memory::TRANSACTION_BYTES);
    if *last != line {
        *last = line;
        machine.counts.transactions += 1;
        machine.session.count(write, memory::TRANSACTION_BYTES);
    }
}

fn set_words<const N: usize>(warp: &mut Warp, dst: Register, values: &[Lanes; N], mask: u32) {
    for (offset, values) in (0u8..).zip(values) {
        warp.set_following(dst, offset, values, mask);
    }
}

fn generic_store(
    warp: &mut Warp,
    address: Address,
    value: Register,
    width: Width,
    mask: u32,
    machine: &mut Machine<'_, '_>,
) -> Result<(), Failure> {
    let addresses = wide(warp, address);
    aligned(&addresses, mask, width)?;
    let Places { global, shared, local } = places(&addresses, mask, true, machine)?;
    if global.0 != 0 {
        global_store(warp, &global.1, value, width, global.0, machine)?;
    }
    if shared.0 != 0 {
        shared_store(warp, &shared.1, value, width, shared.0, machine)?;
    }
    if local.0 != 0 {
        local_store(warp, &local.1, value, width, local.0, machine)?;
    }
    Ok(())
}

fn global_store(
    warp: &Warp,
    addresses: &Pairs,
    value: Register,
    width: Width,
    mask: u32,
    machine: &mut Machine<'_, '_>,
) -> Result<(), Failure> {
    let word = |offset: u8| *warp.following(value, offset);
    match width {
        Width::B32 => store(machine.session, addresses, &[word(0)], mask, machine.counts)?,
        Width::B64 => store(machine.session, addresses, &[word(0), word(1)], mask, machine.counts)?,
        Width::B128 => {
            let values = [word(0), word(1), word(2), word(3)];
            store(machine.session, addresses, &values, mask, machine.counts)?;
        }
        Width::U8 | Width::S8 | Width::U16 | Width::S16 => {
            let values = word(0);
            let mut last = None;
            for lane in lanes_of(mask) {
                let va = addresses[lane];
                machine.session.write(GpuVa(va), &values[lane].to_le_bytes()[..bytes(width) as usize])?;
                machine.counts.written = Some(GpuVa(va));
                count(&mut last, va, true, machine);
            }
        }
    }
    Ok(())
}

/// Returns the virtual addresses of a local memory word for the lanes in `mask`.
fn local_addresses(
    warp: &Warp,
    addresses: &Lanes,
    offset: u32,
    mask: u32,
    machine: &Machine<'_, '_>,
) -> Result<Pairs, Failure> {
    let place = machine.local_warp(warp);
    let mut vas = [0; LANES];
    for lane in lanes_of(mask) {
        vas[lane] = memory::local(machine.launch, place, lane, addresses[lane].wrapping_add(offset))?.0;
    }
    Ok(vas)
}

fn local_load(
    warp: &mut Warp,
    dst: Register,
    addresses: &Lanes,
    width: Width,
    mask: u32,
    machine: &mut Machine<'_, '_>,
) -> Result<(), Failure> {
    if is_narrow(width) {
        let vas = local_addresses(warp, addresses, 0, mask, machine)?;
        return global_load(warp, dst, &vas, width, mask, machine);
    }
    for offset in 0..registers(width) {
        let vas = local_addresses(warp, addresses, 4 * u32::from(offset), mask, machine)?;
        let [values] = load::<1>(machine.session, &vas, mask, machine.counts)?;
        warp.set_following(dst, offset, &values, mask);
    }
    Ok(())
}

fn local_store(
    warp: &Warp,
    addresses: &Lanes,
    value: Register,
    width: Width,
    mask: u32,
    machine: &mut Machine<'_, '_>,
) -> Result<(), Failure> {
    for offset in 0..registers(width) {
        let vas = local_addresses(warp, addresses, 4 * u32::from(offset), mask, machine)?;
        if is_narrow(width) {
            global_store(warp, &vas, value, width, mask, machine)?;
        } else {
            store(machine.session, &vas, &[*warp.following(value, offset)], mask, machine.counts)?;
        }
    }
    Ok(())
}

fn shared_load(
    warp: &mut Warp,
    dst: Register,
    addresses: &Lanes,
    width: Width,
    mask: u32,
    machine: &mut Machine<'_, '_>,
) -> Result<(), Failure> {
    for offset in 0..registers(width) {
        let mut values = [0; LANES];
        for lane in lanes_of(mask) {
            let address = addresses[lane].wrapping_add(4 * u32::from(offset));
            values[lane] = match bytes(width) {
                1 => {
                    let [byte] = machine.shared.read::<1>(address)?;
                    extended([byte, 0], width)
                }
                2 => extended(machine.shared.read::<2>(address)?, width),
                _ => u32::from_le_bytes(machine.shared.read::<4>(address)?),
            };
        }
        warp.set_following(dst, offset, &values, mask);
    }
    Ok(())
}

fn shared_store(
    warp: &Warp,
    addresses: &Lanes,
    value: Register,
    width: Width,
    mask: u32,
    machine: &mut Machine<'_, '_>,
) -> Result<(), Failure> {
    for offset in 0..registers(width) {
        let values = warp.following(value, offset);
        for lane in lanes_of(mask) {
            let address = addresses[lane].wrapping_add(4 * u32::from(offset));
            machine.shared.write(address, &values[lane].to_le_bytes()[..bytes(width).min(4) as usize])?;
        }
    }
    Ok(())
}

/// Executes LDSLK. If several lanes request the same word, the first of them locks it.
fn locked_load(
    warp: &mut Warp,
    p: Predicate,
    dst: Register,
    address: Address,
    width: Width,
    mask: u32,
    machine: &mut Machine<'_, '_>,
) -> Result<(), Failure> {
    let addresses = narrow(warp, address);
    aligned(&addresses.map(u64::from), mask, width)?;
    shared_load(warp, dst, &addresses, width, mask, machine)?;
    let got = lanes_of(mask).fold(0, |got, lane| got | u32::from(machine.shared.lock(addresses[lane])) << lane);
    warp.set_predicate(p, got, mask);
    Ok(())
}

/// Returns the addresses of an access that must be to global memory.
fn only_global(
    warp: &Warp,
    address: Address,
    width: Width,
    mask: u32,
    machine: &Machine<'_, '_>,
) -> Result<Pairs, Failure> {
    let addresses = wide(warp, address);
    aligned(&addresses, mask, width)?;
    let Places { global, shared, local } = places(&addresses, mask, true, machine)?;
    if shared.0 | local.0 != 0 { Err(Failure::Warp(warp_error::ADDRESS_SPACE)) } else { Ok(global.1) }
}

/// Executes LDLK, which is LDSLK for words that any block of the grid can lock. The load follows the lock acquisition,
/// so it sees the previous holder's stores.
fn locked_global_load(
    warp: &mut Warp,
    p: Predicate,
    dst: Register,
    address: Address,
    width: Width,
    mask: u32,
    machine: &mut Machine<'_, '_>,
) -> Result<(), Failure> {
    let addresses = only_global(warp, address, width, mask, machine)?;
    let got = lanes_of(mask).fold(0, |got, lane| got | u32::from(machine.locks.lock(addresses[lane])) << lane);
    global_load(warp, dst, &addresses, width, mask, machine)?;
    warp.set_predicate(p, got, mask);
    Ok(())
}

/// Executes STUL.
fn unlocking_store(
    warp: &Warp,
    address: Address,
    value: Register,
    width: Width,
    mask: u32,
    machine: &mut Machine<'_, '_>,
) -> Result<(), Failure> {
    let addresses = only_global(warp, address, width, mask, machine)?;
    global_store(warp, &addresses, value, width, mask, machine)?;
    lanes_of(mask).for_each(|lane| machine.locks.unlock(addresses[lane]));
    Ok(())
}

/// An address in a constant bank.
#[derive(Clone, Copy)]
struct Constant {
    bank: u8,
    base: Register,
    offset: i16,
}

fn constant_load(
    warp: &mut Warp,
    dst: Register,
    constant: Constant,
    width: Width,
    mask: u32,
    machine: &mut Machine<'_, '_>,
) -> Result<(), Failure> {
    let Constant { bank, base, offset } = constant;
    let base = *warp.register(base);
    let addresses = map(|lane| base[lane].wrapping_add_signed(i32::from(offset)));
    aligned(&addresses.map(u64::from), mask, width)?;
    for word in 0..registers(width) {
        let mut values = [0; LANES];
        for lane in lanes_of(mask) {
            let address = addresses[lane].wrapping_add(4 * u32::from(word));
            let outside = warp_error::CONSTANT_ADDRESS_LDC;
            let value = machine.constants.word(bank, address & !3, outside, machine.session)?;
            let value = value >> (8 * (address & 3));
            values[lane] = if is_narrow(width) { extended([value as u8, (value >> 8) as u8], width) } else { value };
        }
        warp.set_following(dst, word, &values, mask);
    }
    Ok(())
}

/// An atomic operation and the registers that hold its operands.
#[derive(Clone, Copy)]
struct Atomic {
    operation: AtomicOp,
    kind: AtomicType,
    a: Register,
    c: Register,
}

fn atomic(
    warp: &mut Warp,
    dst: Option<Register>,
    address: Address,
    atomic: Atomic,
    mask: u32,
    machine: &mut Machine<'_, '_>,
) -> Result<(), Failure> {
    let Atomic { operation, kind, a, c } = atomic;
    let width = if kind == AtomicType::U64 { Width::B64 } else { Width::B32 };
    let addresses = only_global(warp, address, width, mask, machine)?;
    let mut last = None;
    let mut old = [0; LANES];
    let (a, c) = (warp.pair(a), warp.pair(c));
    for lane in lanes_of(mask) {
        let va = GpuVa(addresses[lane]);
        old[lane] = if kind == AtomicType::U64 {
            machine.session.update64(va, |memory| wide_result(operation, memory, a[lane], c[lane]))?
        } else {
            let (a, c) = (a[lane] as u32, c[lane] as u32);
            u64::from(machine.session.update32(va, |memory| result(operation, kind, memory, a, c))?)
        };
        machine.counts.written = Some(va);
        count(&mut last, va.0, true, machine);
    }
    match dst {
        Some(dst) if kind == AtomicType::U64 => warp.set_pair(dst, &old, mask),
        Some(dst) => warp.set(dst, &old.map(|value| value as u32), mask),
        None => {}
    }
    Ok(())
}

/// Returns the value that an atomic operation writes to memory.
fn result(operation: AtomicOp, kind: AtomicType, memory: u32, a: u32, c: u32) -> u32 {
    let less = if kind == AtomicType::S32 { memory.cast_signed() < a.cast_signed() } else { memory < a };
    match operation {
        AtomicOp::Add if kind == AtomicType::F32 => {
            let sum = f32::from_bits(memory) + f32::from_bits(a);
            if sum.is_nan() { super::super::soft::F32.nan as u32 } else { sum.to_bits() }
        }
        AtomicOp::Add => memory.wrapping_add(a),
        AtomicOp::Min => {
            if less {
                memory
            } else {
                a
            }
        }
        AtomicOp::Max => {
            if less {
                a
            } else {
                memory
            }
        }
        AtomicOp::Inc => {
            if memory >= a {
                0
            } else {
                memory + 1
            }
        }
        AtomicOp::Dec => {
            if memory == 0 || memory > a {
                a
            } else {
                memory - 1
            }
        }
        AtomicOp::And => memory & a,
        AtomicOp::Or => memory | a,
        AtomicOp::Xor => memory ^ a,
        AtomicOp::Exch => a,
        AtomicOp::Cas => {
            if memory == a {
                c
            } else {
                memory
            }
        }
    }
}

/// 64-bit version of [`result`]. Operations that the hardware does not support at this width leave memory unchanged.
fn wide_result(operation: AtomicOp, memory: u64, a: u64, c: u64) -> u64 {
    match operation {
        AtomicOp::Add => memory.wrapping_add(a),
        AtomicOp::Exch => a,
        AtomicOp::Cas => {
            if memory == a {
                c
            } else {
                memory
            }
        }
        _ => memory,
    }
}
