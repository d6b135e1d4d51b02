//! Engine access counts per memory block, for eviction decisions.
//!
//! The counters need 64 KiB per GiB accessed by an engine, and are never freed: at most 64 MiB for all 2^40 bytes of
//! I/O addresses. Any thread may update and read them without locking.

use super::BusAddr;
use card::AccessCounts;
use nvspec::addr::BUS_BITS;
use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of blocks whose counters are allocated together.
const GROUP_BLOCKS: u64 = (1 << 30) / AccessCounts::BLOCK_BYTES;

/// Counters for VRAM or for host memory.
#[derive(Debug)]
struct Counters {
    groups: Box<[OnceLock<Box<[AtomicU64]>>]>,
}

impl Counters {
    /// Creates zeroed counters for a memory of `bytes` bytes.
    fn new(bytes: u64) -> Self {
        let groups = bytes.div_ceil(GROUP_BLOCKS * AccessCounts::BLOCK_BYTES);
        Self { groups: (0..groups).map(|_| OnceLock::new()).collect() }
    }

    /// Adds to the counter of the block at `address`. Ignores addresses beyond the end of the memory.
    fn add(&self, address: u64, bursts: u64) {
        let block = address / AccessCounts::BLOCK_BYTES;
        let Some(group) = self.groups.get((block / GROUP_BLOCKS) as usize) else { return };
        let counters = group.get_or_init(|| (0..GROUP_BLOCKS).map(|_| AtomicU64::new(0)).collect());
        // The counter would wrap only after centuries.
        counters[(block % GROUP_BLOCKS) as usize].fetch_add(bursts, Ordering::Relaxed);
    }

    /// Returns the accessed blocks and their counts. Zeroes the counts if `reset` is true.
    fn read(&self, reset: bool) -> impl Iterator<Item = (u64, u64)> {
        let groups = (0..).zip(&self.groups).filter_map(|(index, group)| Some((index, group.get()?)));
        let blocks = groups.flat_map(|(index, group)| (index * GROUP_BLOCKS..).zip(group));
        blocks
            .map(move |(block, counter)| {
                // The swap counts a concurrent access exactly once, in either this read or the next.
                let count = if reset { counter.swap(0, Ordering::Relaxed) } else { counter.load(Ordering::Relaxed) };
                (block, count)
            })
            .filter(|(_, count)| *count != 0)
    }
}

/// Engine access counts for VRAM and host memory.
#[derive(Debug)]
pub(super) struct Profile {
    /// Number of VRAM blocks.
    blocks: usize,
    vram: Counters,
    system: Counters,
}

impl Profile {
    /// Creates zeroed counters for a card with `vram_bytes` bytes of VRAM.
    pub(super) fn new(vram_bytes: u64) -> Self {
        Self {
            blocks: vram_bytes.div_ceil(AccessCounts::BLOCK_BYTES) as usize,
            vram: Counters::new(vram_bytes),
            system: Counters::new(1 << BUS_BITS),
        }
    }

    /// Counts `bytes` bytes, in bursts, transferred to or from the page at `address`.
    pub(super) fn add(&self, address: BusAddr, bytes: u64) {
        let bursts = bytes.div_ceil(AccessCounts::BURST_BYTES);
        match address {
            BusAddr::Vram(address) => self.vram.add(address.0, bursts),
            BusAddr::System(iova) => self.system.add(iova.0, bursts),
        }
    }

    /// Returns the access counts. Zeroes them if `reset` is true.
    pub(super) fn read(&self, reset: bool) -> AccessCounts {
        let mut vram = vec![0; self.blocks];
        for (block, count) in self.vram.read(reset) {
            // The last group may extend beyond the end of VRAM. Ignore the excess blocks.
            if let Some(place) = vram.get_mut(block as usize) {
                *place = count;
            }
        }
        let system: BTreeMap<u64, u64> =
            self.system.read(reset).map(|(block, count)| (block * AccessCounts::BLOCK_BYTES, count)).collect();
        AccessCounts { vram, system }
    }
}
