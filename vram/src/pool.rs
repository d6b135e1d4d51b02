//! Allocates pages in chunks that the mediator owns, for shadow tables, instance blocks, and rings.

mod saved;

pub use saved::SavedPool;

use crate::chunks::CHUNK_BYTES_MAX;
use crate::{ChunkId, ChunkTable, Error, VramAddr};
use std::collections::{BTreeMap, BTreeSet};

/// Size of the smallest allocation, in bytes.
pub const PAGE_BYTES: u64 = 4 << 10;
const PAGE_SHIFT: u32 = PAGE_BYTES.trailing_zeros();
/// Order of the largest allocation (64 MiB, the maximum chunk size).
const ORDER_MAX: u32 = CHUNK_BYTES_MAX.trailing_zeros() - PAGE_SHIFT;

/// Reason for a failed allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The size is not between 1 byte and 64 MiB.
    #[error("{0:#x} bytes are not a valid allocation size")]
    Size(u64),
    /// The pool has reached its limit.
    #[error("the pool has {held:#x} bytes of chunks, and may not grow beyond {limit:#x} bytes")]
    Limit {
        /// Total size of the pool's chunks in bytes.
        held: u64,
        /// Maximum total size of the pool's chunks in bytes.
        limit: u64,
    },
    /// No card chunk is available for the pool.
    #[error("the mediator's page pool cannot grow")]
    Chunks(#[from] Error),
}

#[derive(Clone, Copy, Debug)]
struct Run {
    first: ChunkId,
    chunks: u32,
    bytes: u64,
}

/// Result of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Start address.
    pub address: VramAddr,
    /// True if no part of the block has been used since its chunk was zeroed.
    pub zeroed: bool,
}

/// A buddy allocator over runs of chunks. Block sizes are power-of-two multiples of 4 KiB, and blocks are aligned to
/// their size. The caller must zero reused blocks. Each VM can have its own pool, which [`PagePool::release_all`] frees
/// when the VM ends.
#[derive(Debug)]
pub struct PagePool {
    limit: u64,
    /// Addresses of free blocks, by order.
    free: [BTreeSet<u64>; ORDER_MAX as usize + 1],
    /// Orders of allocated blocks, by address.
    used: BTreeMap<u64, u32>,
    /// Runs of chunks in the pool, keyed by start address. The size of a run is a power of two, and the run is aligned
    /// to its size.
    runs: BTreeMap<u64, Run>,
    /// End of each address range that has not been used since its chunk was zeroed, keyed by start.
    zeroed: BTreeMap<u64, u64>,
    held: u64,
    used_bytes: u64,
}

impl PagePool {
    /// Creates an empty pool with at most `limit` bytes of chunks.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self {
            limit,
            free: std::array::from_fn(|_| BTreeSet::new()),
            used: BTreeMap::new(),
            runs: BTreeMap::new(),
            zeroed: BTreeMap::new(),
            held: 0,
            used_bytes: 0,
        }
    }

    /// Allocates at least `bytes`, rounded up to a power of two and aligned to it. Takes chunks from `table` if the
    /// pool has no free block that is large enough.
    ///
    /// # Errors
    /// Returns a [`PoolError`] if the size is invalid or no memory is available.
    pub fn alloc(&mut self, table: &mut ChunkTable, bytes: u64) -> Result<VramAddr, PoolError> {
        Ok(self.alloc_block(table, bytes)?.address)
    }

    /// Like [`Self::alloc`], but returns a [`Block`], which also indicates whether the block contains only zeros.
    ///
    /// # Errors
    /// Returns a [`PoolError`] if the size is invalid or no memory is available.
    pub fn alloc_block(&mut self, table: &mut ChunkTable, bytes: u64) -> Result<Block, PoolError> {
        let order = order_of(bytes).ok_or(PoolError::Size(bytes))?;
        if self.smallest(order).is_none() {
            self.grow(table, PAGE_BYTES << order)?;
        }
        let mut at = self.smallest(order).ok_or(PoolError::Size(bytes))?;
        let start = self.free[at as usize].pop_first().expect("`smallest` found a block");
        while at > order {
            at -= 1;
            self.free[at as usize].insert(start + (PAGE_BYTES << at));
        }
        self.used.insert(start, order);
        self.used_bytes += PAGE_BYTES << order;
        Ok(Block { address: VramAddr(start), zeroed: self.soil(start, PAGE_BYTES << order) })
    }

    /// Frees a block from [`Self::alloc`] or [`Self::alloc_block`].
    ///
    /// # Panics
    /// Panics if `address` is not an allocation of this pool.
    pub fn free(&mut self, address: VramAddr) {
        let order = self.used.remove(&address.0).expect("the address is not allocated");
        self.used_bytes -= PAGE_BYTES << order;
        self.insert_free(address.0, order);
    }

    /// Releases all runs of chunks without allocations to `table`. Returns the number of released chunks.
    pub fn reclaim(&mut self, table: &mut ChunkTable) -> u32 {
        let mut given = 0;
        let Self { free, used, runs, zeroed, held, .. } = self;
        runs.retain(|&start, run| {
            let range = start..start + run.bytes;
            if used.range(range.clone()).next().is_some() {
                return true;
            }
            for blocks in free.iter_mut() {
                blocks.retain(|block| !range.contains(block));
            }
            zeroed.retain(|start, _| !range.contains(start));
            *held -= run.bytes;
            given += run.chunks;
            table.release_mediator(run.first, run.chunks);
            false
        });
        given
    }

    /// Releases all chunks to `table`, including those with allocations, which leaves the pool empty.
    pub fn release_all(&mut self, table: &mut ChunkTable) {
        self.used.clear();
        self.used_bytes = 0;
        self.reclaim(table);
    }

    /// Returns the current allocations, so that their users' records can be checked after a restore.
    #[must_use]
    pub fn allocations(&self) -> Allocations {
        Allocations(self.used.clone())
    }

    /// Returns the number of allocated bytes, including rounding.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Returns the total size of the pool's chunks in bytes.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held
    }

    fn smallest(&self, order: u32) -> Option<u32> {
        (order..=ORDER_MAX).find(|&at| !self.free[at as usize].is_empty())
    }

    fn grow(&mut self, table: &mut ChunkTable, bytes: u64) -> Result<(), PoolError> {
        // Both sizes are powers of two, so a run is aligned to its length.
        let size = bytes.max(table.chunk_bytes());
        let chunks = (size / table.chunk_bytes()) as u32;
        if self.held + size > self.limit {
            return Err(PoolError::Limit { held: self.held, limit: self.limit });
        }
        let first = table.reserve_mediator(chunks, chunks)?;
        let start = table.address(first).0;
        self.runs.insert(start, Run { first, chunks, bytes: size });
        self.zeroed.insert(start, start + size);
        self.held += size;
        // The maximum order is large enough for every run and every allocation.
        self.free[(size.trailing_zeros() - PAGE_SHIFT) as usize].insert(start);
        Ok(())
    }

    /// Records that the block at `start` was allocated. Returns true if it contains only zeros.
    fn soil(&mut self, start: u64, bytes: u64) -> bool {
        let end = start + bytes;
        let mut zeroed = 0;
        // An overlapping range starts before the block's end. Of the ranges that start before the block, only the last
        // one can overlap it.
        let before = self.zeroed.range(..start).next_back().map(|(first, _)| *first);
        let within: Vec<u64> =
            before.into_iter().chain(self.zeroed.range(start..end).map(|(first, _)| *first)).collect();
        for first in within {
            let Some(last) = self.zeroed.remove(&first) else { continue };
            if first < start {
                self.zeroed.insert(first, last.min(start));
            }
            if last > end {
                self.zeroed.insert(end.max(first), last);
            }
            zeroed += last.min(end).saturating_sub(first.max(start));
        }
        zeroed == bytes
    }

    /// Frees a block, and merges it with its buddy while the buddy is free and in the same run.
    fn insert_free(&mut self, mut start: u64, mut order: u32) {
        let run = self.runs.range(..=start).next_back().map_or(0, |(_, run)| run.bytes);
        while PAGE_BYTES << order < run {
            let buddy = start ^ (PAGE_BYTES << order);
            if !self.free[order as usize].remove(&buddy) {
                break;
            }
            start = start.min(buddy);
            order += 1;
        }
        self.free[order as usize].insert(start);
    }
}

/// Allocations of a pool, for checks of their users' records.
#[derive(Clone, Debug)]
pub struct Allocations(BTreeMap<u64, u32>);

impl Allocations {
    /// Returns true if `address` and `bytes` match an allocation of the pool.
    #[must_use]
    pub fn holds(&self, address: VramAddr, bytes: u64) -> bool {
        self.0.get(&address.0).is_some_and(|order| order_of(bytes) == Some(*order))
    }
}

fn order_of(bytes: u64) -> Option<u32> {
    if bytes == 0 || bytes > PAGE_BYTES << ORDER_MAX {
        return None;
    }
    Some(bytes.next_power_of_two().trailing_zeros().saturating_sub(PAGE_SHIFT))
}

#[cfg(test)]
mod tests;
