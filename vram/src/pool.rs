//! An allocator of pages in chunks that the mediator owns, for shadow tables, instance blocks and rings.

mod saved;

pub use saved::SavedPool;

use crate::chunks::CHUNK_BYTES_MAX;
use crate::{ChunkId, ChunkTable, Error, VramAddr};
use std::collections::{BTreeMap, BTreeSet};

/// Size of the smallest allocation.
pub const PAGE_BYTES: u64 = 4 << 10;
const PAGE_SHIFT: u32 = PAGE_BYTES.trailing_zeros();
/// Order of the largest allocation, which has the size of the largest chunk: 64 MiB.
const ORDER_MAX: u32 = CHUNK_BYTES_MAX.trailing_zeros() - PAGE_SHIFT;

/// Reasons for a failed allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The size is not from 1 byte to 64 MiB.
    #[error("{0:#x} bytes are not a valid size of an allocation")]
    Size(u64),
    /// The pool has reached its limit.
    #[error("the pool holds {held:#x} bytes and may not grow beyond {limit:#x}")]
    Limit {
        /// Size in bytes of the chunks that the pool holds.
        held: u64,
        /// Maximum number of bytes that the pool may hold.
        limit: u64,
    },
    /// The card has no chunk for the pool.
    #[error("the mediator's page pool cannot grow")]
    Chunks(#[from] Error),
}

#[derive(Clone, Copy, Debug)]
struct Run {
    first: ChunkId,
    chunks: u32,
    bytes: u64,
}

/// An allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Start of the allocation.
    pub address: VramAddr,
    /// True if no part of the block was allocated since its chunk was zeroed.
    pub zeroed: bool,
}

/// A buddy allocator over runs of chunks. Blocks are powers of two of 4 KiB, aligned to their size. The caller must
/// zero blocks that were allocated before. If each VM has its own pool, [`PagePool::release_all`] frees all of the VM's
/// memory when the VM ends.
#[derive(Debug)]
pub struct PagePool {
    limit: u64,
    /// Free blocks by order.
    free: [BTreeSet<u64>; ORDER_MAX as usize + 1],
    /// Allocated blocks and their orders.
    used: BTreeMap<u64, u32>,
    /// Runs of chunks in the pool, by start address. The length of a run is a power of two, and the run is aligned to
    /// its length.
    runs: BTreeMap<u64, Run>,
    /// Ranges of pages that were not allocated since their chunk was zeroed: first page and end.
    zeroed: BTreeMap<u64, u64>,
    held: u64,
    used_bytes: u64,
}

impl PagePool {
    /// Creates an empty pool that never holds more than `limit` bytes of chunks.
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

    /// Allocates at least `bytes`, aligned to the next power of two. Takes chunks from `table` if the pool's own chunks
    /// have no free block of this size.
    ///
    /// # Errors
    /// Returns a [`PoolError`] if no memory is available.
    pub fn alloc(&mut self, table: &mut ChunkTable, bytes: u64) -> Result<VramAddr, PoolError> {
        Ok(self.alloc_block(table, bytes)?.address)
    }

    /// Same as [`Self::alloc`], but also returns whether the block is zeroed.
    ///
    /// # Errors
    /// Returns a [`PoolError`] if no memory is available.
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

    /// Frees the block that [`Self::alloc`] returned.
    ///
    /// # Panics
    /// Panics if `address` is not an allocation of this pool, which is a bug in the caller.
    pub fn free(&mut self, address: VramAddr) {
        let order = self.used.remove(&address.0).expect("freed a page that is not allocated");
        self.used_bytes -= PAGE_BYTES << order;
        self.insert_free(address.0, order);
    }

    /// Returns every run of chunks without an allocation to `table`. The return value is the number of chunks.
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

    /// Returns all chunks to `table`, with or without allocations. The pool is empty afterwards.
    pub fn release_all(&mut self, table: &mut ChunkTable) {
        self.used.clear();
        self.used_bytes = 0;
        self.reclaim(table);
    }

    /// Returns the current allocations, so that their users can be restored.
    #[must_use]
    pub fn allocations(&self) -> Allocations {
        Allocations(self.used.clone())
    }

    /// Returns the number of allocated bytes, after rounding.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Returns the size in bytes of the chunks that the pool holds.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held
    }

    fn smallest(&self, order: u32) -> Option<u32> {
        (order..=ORDER_MAX).find(|&at| !self.free[at as usize].is_empty())
    }

    fn grow(&mut self, table: &mut ChunkTable, bytes: u64) -> Result<(), PoolError> {
        // Both sizes are powers of two, so a run is as long as its alignment.
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
        // Chunks and allocations are at most as large as the largest order.
        self.free[(size.trailing_zeros() - PAGE_SHIFT) as usize].insert(start);
        Ok(())
    }

    /// Records that the block at `start` is allocated. Returns true if the block is zeroed.
    fn soil(&mut self, start: u64, bytes: u64) -> bool {
        let end = start + bytes;
        let mut zeroed = 0;
        // Ranges that overlap the block begin before its end. Of the ranges that begin before the block, only the last
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

    /// Frees a block, and merges it with its buddy as long as the buddy is free and in the same run.
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

/// Allocations of a pool.
#[derive(Clone, Debug)]
pub struct Allocations(BTreeMap<u64, u32>);

impl Allocations {
    /// Returns true if the range of `bytes` at `address` is one of the allocations.
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
