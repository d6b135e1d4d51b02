//! Memory accesses of a warp to global, local and shared memory, up to 32 addresses at a time.

use super::launch::{Failure, GlobalMap, Launch};
use super::warp::{ALL, LANES, Lanes, Pairs, lanes_of};
use nvspec::addr::{GpuVa, VA_BITS};
use nvspec::class::compute90c0::{LOCAL_ADDRESS_BITS, WINDOW_BYTES, warp_error};
use simgpu_memory::mmu::Session;

/// Size of a memory transaction in bytes, which is the unit of the time model.
pub const TRANSACTION_BYTES: u64 = card::AccessCounts::BURST_BYTES;

/// Counters of a grid or part of it. Their sums do not depend on the execution order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Number of warp instructions.
    pub(crate) instructions: u64,
    /// Number of thread instructions.
    pub(crate) thread_instructions: u64,
    /// Number of memory transactions, including those to local memory.
    pub(crate) transactions: u64,
    /// Number of bytes that these transactions transferred to or from system memory.
    pub(crate) bus_bytes: u64,
    /// Address of the most recent store.
    pub(crate) written: Option<GpuVa>,
}

impl Counts {
    pub(crate) fn add(&mut self, other: &Self) {
        self.instructions += other.instructions;
        self.thread_instructions += other.thread_instructions;
        self.transactions += other.transactions;
        self.bus_bytes += other.bus_bytes;
        self.written = other.written.or(self.written);
    }
}

/// Target memory of a generic address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Global(GpuVa),
    Shared(u32),
    Local(u32),
}

/// Resolves a generic address for a load or a store.
pub(crate) fn resolve(launch: &Launch, address: u64, write: bool) -> Result<Place, Failure> {
    let within = |window: u64| Some(address.wrapping_sub(window)).filter(|offset| *offset < WINDOW_BYTES);
    if let Some(offset) = within(launch.shared_window) {
        return Ok(Place::Shared(offset as u32));
    }
    if let Some(offset) = within(launch.local_window) {
        return Ok(Place::Local(offset as u32));
    }
    global(launch, address, write).map(Place::Global)
}

/// Translates a global address to a virtual address.
pub(crate) fn global(launch: &Launch, address: u64, write: bool) -> Result<GpuVa, Failure> {
    let Some(map) = launch.global_map.as_ref().filter(|_| address >> VA_BITS == 0) else { return Ok(GpuVa(address)) };
    let entry = map.0[(address >> 32) as usize];
    let right = if write { GlobalMap::WRITE } else { GlobalMap::READ };
    if entry & right == 0 {
        return Err(Failure::Warp(warp_error::ADDRESS_SPACE));
    }
    Ok(GpuVa(u64::from(entry & 0xff) << 32 | address & u64::from(u32::MAX)))
}

/// Translates a local memory address to a virtual address. For the same local address, adjacent lanes use adjacent
/// words.
pub(crate) fn local(launch: &Launch, warp: u32, lane: usize, address: u32) -> Result<GpuVa, Failure> {
    let outside = Failure::Warp(warp_error::OUT_OF_RANGE_ADDRESS);
    let address = address & ((1 << LOCAL_ADDRESS_BITS) - 1);
    let upper = (1 << LOCAL_ADDRESS_BITS) - launch.local_high;
    let index = if address < launch.local_low {
        address
    } else if address >= upper {
        launch.local_low + (address - upper)
    } else {
        return Err(outside);
    };
    let bytes = launch.warp_local_bytes();
    let start = u64::from(warp) * bytes;
    if start + bytes > launch.local_bytes {
        return Err(outside);
    }
    let offset = u64::from(index / 4) * 4 * LANES as u64 + 4 * lane as u64 + u64::from(index % 4);
    Ok(launch.local_base.offset(start + offset))
}

/// Returns true if the lanes' accesses, each `bytes` bytes long, form one contiguous range.
fn contiguous(addresses: &Pairs, mask: u32, bytes: u64) -> bool {
    let first = addresses[0];
    mask == ALL
        && addresses
            .iter()
            .enumerate()
            .fold(true, |all, (lane, address)| all & (*address == first.wrapping_add(bytes.wrapping_mul(lane as u64))))
}

/// Counts the transactions of an access whose lanes execute sequentially.
#[derive(Debug, Default)]
struct Transactions {
    last: Option<u64>,
    count: u64,
}

impl Transactions {
    /// Records the access that a lane has just made.
    fn note(&mut self, va: GpuVa, write: bool, session: &mut Session<'_>) {
        let line = Some(va.0 / TRANSACTION_BYTES);
        if line != self.last {
            self.last = line;
            self.count += 1;
            session.count(write, TRANSACTION_BYTES);
        }
    }
}

/// Loads `N` words into each lane of `mask` from global memory.
pub(crate) fn load<const N: usize>(
    session: &mut Session<'_>,
    addresses: &Pairs,
    mask: u32,
    counts: &mut Counts,
) -> Result<[Lanes; N], Failure> {
    let mut values = [[0; LANES]; N];
    let bytes = 4 * N as u64;
    if contiguous(addresses, mask, bytes) {
        let mut buffer = [[[0u8; 4]; N]; LANES];
        session.read(GpuVa(addresses[0]), buffer.as_flattened_mut().as_flattened_mut())?;
        for (lane, words) in buffer.iter().enumerate() {
            for (value, word) in values.iter_mut().zip(words) {
                value[lane] = u32::from_le_bytes(*word);
            }
        }
        session.count(false, N as u64 * TRANSACTION_BYTES);
        counts.transactions += N as u64;
        return Ok(values);
    }
    let mut transactions = Transactions::default();
    let mut before: Option<usize> = None;
    for lane in lanes_of(mask) {
        let va = GpuVa(addresses[lane]);
        if let Some(before) = before.filter(|before| addresses[*before] == va.0) {
            values.iter_mut().for_each(|value| value[lane] = value[before]);
            continue;
        }
        before = Some(lane);
        if N == 1 {
            values[0][lane] = session.read32(va)?;
        } else {
            let mut buffer = [[0u8; 4]; N];
            session.read(va, buffer.as_flattened_mut())?;
            values.iter_mut().zip(buffer).for_each(|(value, word)| value[lane] = u32::from_le_bytes(word));
        }
        transactions.note(va, false, session);
    }
    counts.transactions += transactions.count;
    Ok(values)
}

/// Stores `N` words from each lane of `mask` to global memory. If addresses are equal, the highest lane wins.
pub(crate) fn store<const N: usize>(
    session: &mut Session<'_>,
    addresses: &Pairs,
    values: &[Lanes; N],
    mask: u32,
    counts: &mut Counts,
) -> Result<(), Failure> {
    let bytes = 4 * N as u64;
    if contiguous(addresses, mask, bytes) {
        let mut buffer = [[[0u8; 4]; N]; LANES];
        for (lane, words) in buffer.iter_mut().enumerate() {
            for (value, word) in values.iter().zip(words) {
                *word = value[lane].to_le_bytes();
            }
        }
        session.write(GpuVa(addresses[0]), buffer.as_flattened().as_flattened())?;
        session.count(true, N as u64 * TRANSACTION_BYTES);
        counts.transactions += N as u64;
        counts.written = Some(GpuVa(addresses[0]));
        return Ok(());
    }
    let mut transactions = Transactions::default();
    for lane in lanes_of(mask) {
        let va = GpuVa(addresses[lane]);
        if N == 1 {
            session.write32(va, values[0][lane])?;
        } else {
            let mut buffer = [[0u8; 4]; N];
            values.iter().zip(&mut buffer).for_each(|(value, word)| *word = value[lane].to_le_bytes());
            session.write(va, buffer.as_flattened())?;
        }
        transactions.note(va, true, session);
        counts.written = Some(va);
    }
    counts.transactions += transactions.count;
    Ok(())
}

#[derive(Clone, Debug, Default)]
pub(crate) struct SharedMemory {
    bytes: Vec<u8>,
    /// Bitmap of the locked words.
    locks: Vec<u64>,
}

impl SharedMemory {
    /// Starts a block with `bytes` bytes of shared memory, initialized with `left` and padded with zeros.
    pub(crate) fn start(&mut self, bytes: u32, left: &[u8]) {
        self.bytes.clear();
        self.bytes.extend_from_slice(left.get(..bytes as usize).unwrap_or(left));
        self.bytes.resize(bytes as usize, 0);
        self.locks.clear();
        self.locks.resize((bytes as usize).div_ceil(4 * 64), 0);
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Reads `N` bytes at an address.
    pub(crate) fn read<const N: usize>(&self, address: u32) -> Result<[u8; N], Failure> {
        let start = address as usize;
        let outside = Failure::Warp(warp_error::OUT_OF_RANGE_ADDRESS);
        let bytes = self.bytes.get(start..start.saturating_add(N)).ok_or(outside)?;
        bytes.try_into().map_err(|_| outside)
    }

    pub(crate) fn write(&mut self, address: u32, bytes: &[u8]) -> Result<(), Failure> {
        let start = address as usize;
        let place = self.bytes.get_mut(start..start.saturating_add(bytes.len()));
        place.ok_or(Failure::Warp(warp_error::OUT_OF_RANGE_ADDRESS))?.copy_from_slice(bytes);
        Ok(())
    }

    /// Locks the word at an address. Returns false if the word is already locked.
    pub(crate) fn lock(&mut self, address: u32) -> bool {
        let word = address as usize / 4;
        let Some(bits) = self.locks.get_mut(word / 64) else { return false };
        let free = *bits & 1 << (word % 64) == 0;
        *bits |= 1 << (word % 64);
        free
    }

    pub(crate) fn unlock(&mut self, address: u32) {
        let word = address as usize / 4;
        if let Some(bits) = self.locks.get_mut(word / 64) {
            *bits &= !(1 << (word % 64));
        }
    }
}
