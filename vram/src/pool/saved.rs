//! Saved form of a page pool. It contains runs of chunks and allocations, from which free blocks are derived.

use super::{ORDER_MAX, PAGE_BYTES, PAGE_SHIFT, PagePool, Run};
use crate::{ChunkTable, chunks::UnclaimedChunks};
use saved_state::{Invalid, ascend, first_version};
use serde::{Deserialize, Serialize};

/// Saved page pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedPool {
    pub(crate) limit: u64,
    /// First chunk and number of chunks of each run, in order.
    pub(crate) runs: Vec<(u32, u32)>,
    /// Address and order of each allocation, sorted by address.
    pub(crate) used: Vec<(u64, u32)>,
}

first_version!(SavedPool, "vram.pool");

impl PagePool {
    /// Saves the pool.
    #[must_use]
    pub fn save(&self) -> SavedPool {
        // The zeroed ranges are not saved, so their blocks are zeroed again before use.
        let Self { limit, free: _, used, runs, zeroed: _, held: _, used_bytes: _ } = self;
        SavedPool {
            limit: *limit,
            runs: runs.values().map(|Run { first, chunks, bytes: _ }| (first.number(), *chunks)).collect(),
            used: used.iter().map(|(start, order)| (*start, *order)).collect(),
        }
    }

    /// Restores a pool in its chunks of `table`. `unclaimed` contains the chunks that no user has claimed yet.
    ///
    /// # Errors
    /// Returns an error if a chunk does not belong to the mediator or has another user, or if an allocation is outside
    /// the chunks.
    pub fn restored(saved: SavedPool, table: &ChunkTable, unclaimed: &mut UnclaimedChunks) -> Result<Self, Invalid> {
        let SavedPool { limit, runs, used } = saved;
        let orders = used.iter().all(|(_, order)| *order <= ORDER_MAX);
        Invalid::unless(ascend(used.iter().map(|(start, _)| start)) && orders, || {
            "the allocations of a page pool are not in order, or too large".into()
        })?;
        let mut pool = Self::new(limit);
        pool.used_bytes = used.iter().map(|(_, order)| PAGE_BYTES << order).fold(0, u64::saturating_add);
        pool.used = used.into_iter().collect();
        let mut found = 0;
        for (first, chunks) in runs {
            unclaimed.claim(first, chunks)?;
            let bytes = u64::from(chunks) * table.chunk_bytes();
            let run = Run { first: crate::ChunkId::numbered(first), chunks, bytes };
            let start = table.address(run.first).0;
            let aligned = bytes.is_power_of_two() && start.is_multiple_of(bytes) && bytes <= PAGE_BYTES << ORDER_MAX;
            Invalid::unless(aligned, || format!("{chunks} chunks from {first} on are not a run of a page pool"))?;
            pool.held = pool.held.saturating_add(bytes);
            found += pool.fill(start, bytes.trailing_zeros() - PAGE_SHIFT);
            pool.runs.insert(start, run);
        }
        Invalid::unless(found == pool.used.len(), || {
            "allocations of a page pool are outside its chunks, or overlap".into()
        })?;
        Ok(pool)
    }

    /// Adds the free blocks within the block of 2^`order` pages at `start`. Returns the number of valid allocations in
    /// this block.
    fn fill(&mut self, start: u64, order: u32) -> usize {
        let end = start + (PAGE_BYTES << order);
        let first = self.used.range(start..end).next().map(|(start, order)| (*start, *order));
        match first {
            None => {
                // The caller has checked that the order is not too large.
                self.free[order as usize].insert(start);
                0
            }
            Some(block) if block == (start, order) => 1,
            Some(_) if order == 0 => 0,
            Some(_) => {
                let half = order - 1;
                self.fill(start, half) + self.fill(start + (PAGE_BYTES << half), half)
            }
        }
    }
}
