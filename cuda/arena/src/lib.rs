//! Places a CUDA program's allocations in an address range backed by chunks.
//!
//! The strategy is best fit: the arena uses the smallest sufficiently large hole, so that small allocations fill chunks
//! that are already in use. A caller that restores a program can specify the offset ([`Arena::place_at`]).
//!
//! [`Ordered`] manages memory that programs free in stream order.
//!
//! The crate does not map memory. The arena works on offsets, not addresses.

#![forbid(unsafe_code)]

mod ordered;

pub use ordered::{Behind, Lane, Ordered};

use std::collections::{BTreeMap, BTreeSet};

/// Minimum alignment of allocations in bytes, as in the driver.
const ALIGN: u64 = 512;
/// Alignment in bytes of all allocations that are at least as large as this value.
const LARGE_ALIGN: u64 = 2 << 20;

/// Returns the number of bytes that an allocation occupies, or `None` if no range can be large enough.
pub fn rounded(bytes: u64) -> Option<u64> {
    bytes.max(1).checked_next_multiple_of(align(bytes))
}

fn align(bytes: u64) -> u64 {
    if bytes >= LARGE_ALIGN { LARGE_ALIGN } else { ALIGN }
}

/// Allocations and holes in one address range.
#[derive(Debug)]
pub struct Arena {
    chunk_bytes: u64,
    /// Lengths of holes, keyed by offset.
    holes: BTreeMap<u64, u64>,
    /// The same holes, sorted by length.
    lengths: BTreeSet<(u64, u64)>,
    /// Lengths of allocations, keyed by offset.
    used: BTreeMap<u64, u64>,
    /// Number of allocations in each chunk.
    users: BTreeMap<u32, u32>,
}

/// Location of a new allocation.
#[derive(Debug, PartialEq, Eq)]
pub struct Placed {
    /// Offset of the allocation in the range.
    pub offset: u64,
    /// Previously empty chunks that the allocation uses, in ascending order.
    pub chunks: Vec<u32>,
}

impl Arena {
    /// Creates an empty arena of `bytes` bytes, which must be a multiple of the chunk size.
    pub fn new(bytes: u64, chunk_bytes: u64) -> Self {
        let mut arena = Self {
            chunk_bytes,
            holes: BTreeMap::new(),
            lengths: BTreeSet::new(),
            used: BTreeMap::new(),
            users: BTreeMap::new(),
        };
        arena.add_hole(0, bytes);
        arena
    }

    /// Places an allocation of `bytes` bytes. Returns `None` if no hole is large enough.
    pub fn place(&mut self, bytes: u64) -> Option<Placed> {
        let (align, bytes) = (align(bytes), rounded(bytes)?);
        let fits = |&(length, at): &(u64, u64)| {
            let start = at.next_multiple_of(align);
            (at + length).checked_sub(start).is_some_and(|room| room >= bytes).then_some((at, length, start))
        };
        let (at, length, start) = self.lengths.range((bytes, 0)..).find_map(fits)?;
        Some(self.take((at, length), start, bytes))
    }

    /// Places an allocation of `bytes` bytes at `start`, an offset that [`Self::place`] has returned for the same size,
    /// possibly in another process. Returns `None` if the range is not free, or if `start` is not aligned.
    pub fn place_at(&mut self, start: u64, bytes: u64) -> Option<Placed> {
        let (align, bytes) = (align(bytes), rounded(bytes)?);
        let (&at, &length) = self.holes.range(..=start).next_back()?;
        let fits = start.is_multiple_of(align) && start.checked_add(bytes)? <= at + length;
        fits.then(|| self.take((at, length), start, bytes))
    }

    /// Allocates `bytes` bytes at `start` from the hole with the given offset and length, which must contain the range.
    fn take(&mut self, (at, length): (u64, u64), start: u64, bytes: u64) -> Placed {
        self.remove_hole(at, length);
        self.add_hole(at, start - at);
        self.add_hole(start + bytes, at + length - start - bytes);
        self.used.insert(start, bytes);
        let mut chunks = Vec::new();
        for chunk in self.chunks(start, bytes) {
            let users = self.users.entry(chunk).or_default();
            *users += 1;
            if *users == 1 {
                chunks.push(chunk);
            }
        }
        Placed { offset: start, chunks }
    }

    /// Frees the allocation at `offset`. Returns the chunks that became empty.
    pub fn release(&mut self, offset: u64) -> Option<Vec<u32>> {
        let bytes = self.used.remove(&offset)?;
        let mut chunks = Vec::new();
        for chunk in self.chunks(offset, bytes) {
            if let Some(users) = self.users.get_mut(&chunk) {
                *users -= 1;
                if *users == 0 {
                    self.users.remove(&chunk);
                    chunks.push(chunk);
                }
            }
        }
        let (mut start, mut length) = (offset, bytes);
        if let Some((&before, &room)) = self.holes.range(..offset).next_back()
            && before + room == offset
        {
            self.remove_hole(before, room);
            (start, length) = (before, length + room);
        }
        if let Some(&room) = self.holes.get(&(offset + bytes)) {
            self.remove_hole(offset + bytes, room);
            length += room;
        }
        self.add_hole(start, length);
        Some(chunks)
    }

    /// Returns the offset and length of the allocation that contains `offset`.
    pub fn find(&self, offset: u64) -> Option<(u64, u64)> {
        let (&start, &bytes) = self.used.range(..=offset).next_back()?;
        (offset < start + bytes).then_some((start, bytes))
    }

    fn chunks(&self, offset: u64, bytes: u64) -> std::ops::RangeInclusive<u32> {
        let number = |at: u64| u32::try_from(at / self.chunk_bytes).unwrap_or(u32::MAX);
        number(offset)..=number(offset + bytes - 1)
    }

    fn add_hole(&mut self, at: u64, length: u64) {
        if length > 0 {
            self.holes.insert(at, length);
            self.lengths.insert((length, at));
        }
    }

    fn remove_hole(&mut self, at: u64, length: u64) {
        self.holes.remove(&at);
        self.lengths.remove(&(length, at));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CHUNK: u64 = 2 << 20;

    #[test]
    fn small_ones_share_a_chunk_and_the_last_gives_it_back() {
        let mut arena = Arena::new(8 * CHUNK, CHUNK);
        let first = arena.place(100).expect("room");
        assert_eq!(first, Placed { offset: 0, chunks: vec![0] });
        let second = arena.place(100).expect("room");
        assert_eq!(second, Placed { offset: 512, chunks: vec![] });
        assert_eq!(arena.release(first.offset), Some(vec![]));
        assert_eq!(arena.release(second.offset), Some(vec![0]));
        assert_eq!(arena.release(second.offset), None, "freed before");
        assert_eq!(arena.place(8 * CHUNK).expect("the holes have merged").chunks.len(), 8);
    }

    #[test]
    fn an_address_within_an_allocation_finds_it() {
        let mut arena = Arena::new(8 * CHUNK, CHUNK);
        let at = arena.place(1000).expect("room").offset;
        assert_eq!(arena.find(at + 1023), Some((at, 1024)));
        assert_eq!(arena.find(at + 1024), None);
    }

    #[test]
    fn allocation_at_an_offset_takes_free_aligned_space_only() {
        let mut arena = Arena::new(8 * CHUNK, CHUNK);
        assert_eq!(arena.place_at(CHUNK + 512, 100), Some(Placed { offset: CHUNK + 512, chunks: vec![1] }));
        assert_eq!(arena.place_at(CHUNK + 512, 100), None, "in use");
        assert_eq!(arena.place_at(CHUNK, 1000), None, "the end is in use");
        assert_eq!(arena.place_at(CHUNK + 100, 100), None, "not aligned");
        assert_eq!(arena.place_at(2 * CHUNK + 512, CHUNK), None, "misaligned for its size");
        assert_eq!(arena.place_at(8 * CHUNK - 512, 513), None, "beyond the range");
        assert_eq!(arena.place_at(8 * CHUNK, 1), None, "after the range");
        assert_eq!(arena.place_at(u64::MAX - 511, 512), None, "overflowing offset");
        assert_eq!(arena.place_at(0, u64::MAX), None, "overflowing size");
        assert_eq!(arena.place_at(CHUNK, 512), Some(Placed { offset: CHUNK, chunks: vec![] }), "the same chunk");
        assert_eq!(arena.place(100).expect("a hole").offset, 0, "the smallest hole");
    }

    proptest! {
        #[test]
        fn allocations_of_another_arena_fit_at_their_offsets(
            steps in proptest::collection::vec((any::<bool>(), 1u64..(5 << 20)), 1..60),
            order in any::<u64>(),
        ) {
            let (mut first, mut second) = (Arena::new(64 * CHUNK, CHUNK), Arena::new(64 * CHUNK, CHUNK));
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (free, bytes) in steps {
                if free && !live.is_empty() {
                    let (offset, _) = live.swap_remove(bytes as usize % live.len());
                    first.release(offset).expect("lives");
                } else if let Some(placed) = first.place(bytes) {
                    live.push((placed.offset, bytes));
                }
            }
            let middle = order as usize % live.len().max(1);
            live.rotate_left(middle);
            for (offset, bytes) in live {
                prop_assert_eq!(second.place_at(offset, bytes).map(|placed| placed.offset), Some(offset));
            }
            prop_assert_eq!(&first.used, &second.used);
            prop_assert_eq!(&first.holes, &second.holes);
            prop_assert_eq!(&first.users, &second.users);
        }

        #[test]
        fn random_allocations_do_not_overlap_and_back_needed_chunks(
            steps in proptest::collection::vec((any::<bool>(), 1u64..(5 << 20)), 1..120)
        ) {
            let mut arena = Arena::new(64 * CHUNK, CHUNK);
            let mut live: Vec<(u64, u64)> = Vec::new();
            let mut backed = BTreeSet::new();
            for (free, bytes) in steps {
                if free && !live.is_empty() {
                    let (offset, _) = live.swap_remove(bytes as usize % live.len());
                    for chunk in arena.release(offset).expect("lives") {
                        prop_assert!(backed.remove(&chunk));
                    }
                } else if let Some(placed) = arena.place(bytes) {
                    prop_assert!(live.iter().all(|(o, b)| placed.offset + bytes <= *o || o + b <= placed.offset));
                    for chunk in placed.chunks {
                        prop_assert!(backed.insert(chunk));
                    }
                    live.push((placed.offset, bytes));
                }
                let needed: BTreeSet<u32> = live
                    .iter()
                    .flat_map(|(o, b)| (o / CHUNK) as u32..=((o + b - 1) / CHUNK) as u32)
                    .collect();
                prop_assert!(needed.is_subset(&backed));
            }
            for (offset, _) in live {
                arena.release(offset);
            }
            prop_assert_eq!(arena.holes.len(), 1);
            prop_assert!(arena.users.is_empty());
        }
    }
}
