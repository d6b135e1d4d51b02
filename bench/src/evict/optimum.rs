//! Computes bounds for the optimal policy from the whole trace.
//!
//! Belady's rule evicts the chunk with the farthest next use. It minimizes copies in, but ignores copies out.
//! Minimizing the sum of both is NP-hard (Beckmann, Gibbons, Haeupler, McGuffey: *Writeback-Aware Caching*, 2020), so
//! this module computes a lower and an upper bound:
//! - The lower bound is the minimum of copies in plus the minimum of copies out, each optimized separately. A chunk
//!   must be copied out each time it leaves between a write and its next use. Minimizing these copies is the same
//!   problem restricted to these intervals, so the same rule solves it.
//! - The upper bound is the number of copies in feasible schedules. These are Belady's schedule, which prefers clean
//!   chunks among equals, and variants that treat the next use of a dirty chunk as nearer.

use std::collections::{BTreeMap, BTreeSet};

use super::replay::{Copied, Memory, Piece};

/// A chunk of a VM.
type Chunk = (usize, u32);

/// Divisors of the distance to a dirty chunk's next use. The best result is used.
const DIRTY: [u64; 4] = [1, 2, 3, 6];

/// Bounds on the minimum number of copied chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Optimum {
    /// Lower bound on the number of copied chunks.
    pub(super) least: u64,
    /// Number of copied chunks in the best schedule found.
    pub(super) reached: u64,
}

/// Uses of each chunk, as step indices.
struct Uses(BTreeMap<Chunk, Vec<usize>>);

impl Uses {
    fn from_pieces(pieces: &[Piece<'_>]) -> Self {
        let mut uses: BTreeMap<Chunk, Vec<usize>> = BTreeMap::new();
        for (at, piece) in pieces.iter().enumerate() {
            piece.step.keys().for_each(|&chunk| uses.entry((piece.vm, chunk)).or_default().push(at));
        }
        Self(uses)
    }

    /// Returns the first use after step `at`.
    fn next(&self, chunk: Chunk, at: usize) -> Option<usize> {
        let uses = self.0.get(&chunk)?;
        uses.get(uses.partition_point(|&used| used <= at)).copied()
    }
}

/// Computes both bounds for a card of `capacity` chunks.
pub(super) fn optimum(pieces: &[Piece<'_>], vms: usize, capacity: usize) -> Optimum {
    let uses = Uses::from_pieces(pieces);
    let schedules = DIRTY.map(|divisor| farthest(pieces, &uses, vms, capacity, divisor));
    // The first schedule is Belady's, with the fewest copies in.
    let ins = schedules[0].ins;
    let reached = schedules.iter().map(|copied| copied.sum()).min().unwrap_or(0);
    Optimum { least: ins + fewest_outs(pieces, &uses, capacity), reached }
}

/// Simulates a schedule that evicts the chunk with the farthest next use.
fn farthest(pieces: &[Piece<'_>], uses: &Uses, vms: usize, capacity: usize, divisor: u64) -> Copied {
    let mut memory = Memory::new(vms);
    for (at, piece) in pieces.iter().enumerate() {
        let excess = (memory.count() + memory.missing(piece).count()).saturating_sub(capacity);
        if excess > 0 {
            let is_free = |&(vm, chunk): &Chunk| vm != piece.vm || !piece.step.contains_key(&chunk);
            let value = |&(vm, chunk): &Chunk| {
                let dirty = memory.is_dirty(vm, chunk);
                // A chunk that is not used again gets the largest value, so it is evicted first.
                let until = uses.next((vm, chunk), at).map_or(1 << 40, |next| (next - at) as u64);
                (if dirty { until / divisor } else { until }, !dirty)
            };
            let mut free: Vec<_> = memory.all().filter(is_free).map(|chunk| (value(&chunk), chunk)).collect();
            free.sort_unstable_by(|a, b| b.cmp(a));
            free.into_iter().take(excess).for_each(|(_, (vm, chunk))| memory.evict(vm, chunk));
        }
        memory.run(piece);
    }
    memory.copied()
}

/// Returns the minimum number of evictions of written chunks: those between a write to a chunk and the chunk's next
/// use, or the end.
fn fewest_outs(pieces: &[Piece<'_>], uses: &Uses, capacity: usize) -> u64 {
    // Chunks kept until their next use, sorted by that use. Each was written at its last use.
    let mut kept: BTreeSet<(usize, Chunk)> = BTreeSet::new();
    let mut outs = 0;
    for (at, piece) in pieces.iter().enumerate() {
        piece.step.keys().for_each(|&chunk| _ = kept.remove(&(at, (piece.vm, chunk))));
        while kept.len() + piece.step.len() > capacity && kept.pop_last().is_some() {
            outs += 1;
        }
        for (&chunk, _) in piece.step.iter().filter(|(_, used)| used.written > 0) {
            let chunk = (piece.vm, chunk);
            kept.insert((uses.next(chunk, at).unwrap_or(usize::MAX), chunk));
        }
    }
    outs
}
