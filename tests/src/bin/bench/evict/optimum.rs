//! Bounds what no policy can be better than, with the whole trace known.
//!
//! Belady's rule, to give up what is used again last, copies the fewest chunks in; it knows nothing of what has to be copied out.
//! To find the least of both together is NP-hard (Beckmann, Gibbons, Haeupler, McGuffey: *Writeback-Aware Caching*, 2020), so it is
//! bounded from both sides:
//! - below by the fewest copies in plus the fewest copies out, each for itself the best that can be. A copy out is due at least for
//!   each time that a chunk leaves between a write and its next use; to have the fewest of these is the same problem with
//!   only such times, and the same rule solves it;
//! - above by what schedules that can be had really copy: Belady's, of equals the clean one first; and variants in which a chunk that
//!   would have to be copied out counts as needed sooner.

use std::collections::{BTreeMap, BTreeSet};

use super::replay::{Copied, Memory, Piece};

/// A chunk of a VM.
type Chunk = (usize, u32);

/// Divisors of the time to the next use of a chunk that has to be copied out; the best counts.
const DIRTY: [u64; 4] = [1, 2, 3, 6];

/// Bounds of the least that can be copied, in chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Optimum {
    /// Nobody copies fewer.
    pub(super) least: u64,
    /// A schedule copies so many.
    pub(super) reached: u64,
}

/// Uses of each chunk, by the numbers of pieces.
struct Uses(BTreeMap<Chunk, Vec<usize>>);

impl Uses {
    fn of(pieces: &[Piece<'_>]) -> Self {
        let mut uses: BTreeMap<Chunk, Vec<usize>> = BTreeMap::new();
        for (at, piece) in pieces.iter().enumerate() {
            piece.step.keys().for_each(|&chunk| uses.entry((piece.vm, chunk)).or_default().push(at));
        }
        Self(uses)
    }

    /// The first use behind piece `at`.
    fn next(&self, chunk: Chunk, at: usize) -> Option<usize> {
        let uses = self.0.get(&chunk)?;
        uses.get(uses.partition_point(|&used| used <= at)).copied()
    }
}

/// Computes both bounds for a card of `capacity` chunks.
pub(super) fn optimum(pieces: &[Piece<'_>], vms: usize, capacity: usize) -> Optimum {
    let uses = Uses::of(pieces);
    let schedules = DIRTY.map(|divisor| farthest(pieces, &uses, vms, capacity, divisor));
    // The first is Belady's: it has the fewest copies in.
    let ins = schedules[0].ins;
    let reached = schedules.iter().map(|copied| copied.sum()).min().unwrap_or(0);
    Optimum { least: ins + fewest_outs(pieces, &uses, capacity), reached }
}

/// Gives up what is used again last.
fn farthest(pieces: &[Piece<'_>], uses: &Uses, vms: usize, capacity: usize, divisor: u64) -> Copied {
    let mut memory = Memory::new(vms);
    for (at, piece) in pieces.iter().enumerate() {
        let excess = (memory.count() + memory.missing(piece).count()).saturating_sub(capacity);
        if excess > 0 {
            let is_free = |&(vm, chunk): &Chunk| vm != piece.vm || !piece.step.contains_key(&chunk);
            let value = |&(vm, chunk): &Chunk| {
                let dirty = memory.is_dirty(vm, chunk);
                // Never again is later than anything.
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

/// The fewest times that a chunk has to leave between a write and its next use, or the end.
fn fewest_outs(pieces: &[Piece<'_>], uses: &Uses, capacity: usize) -> u64 {
    // Chunks that are kept for their next use, by that: all of them were written when they were used last.
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
