use super::*;
use crate::{CHUNK_BYTES_MIN, Contents, TenantId};
use proptest::prelude::*;

const CHUNK: u64 = CHUNK_BYTES_MIN;

fn table(chunks: u64) -> ChunkTable {
    ChunkTable::new(chunks * CHUNK, CHUNK, Contents::Zeroed).unwrap()
}

#[test]
fn sizes_are_rounded_up_and_aligned() {
    let (mut table, mut pool) = (table(8), PagePool::new(u64::MAX));
    let a = pool.alloc(&mut table, 1).unwrap();
    let b = pool.alloc(&mut table, 0x2001).unwrap();
    assert_eq!((b.0 % 0x4000, pool.used_bytes()), (0, 0x5000));
    assert_ne!(a, b);
    assert!(matches!(pool.alloc(&mut table, 0), Err(PoolError::Size(0))));
    assert!(matches!(pool.alloc(&mut table, u64::MAX), Err(PoolError::Size(_))));
}

#[test]
fn a_table_larger_than_a_chunk_gets_neighbouring_chunks() {
    let (mut table, mut pool) = (table(8), PagePool::new(u64::MAX));
    pool.alloc(&mut table, 0x1000).unwrap();
    let large = pool.alloc(&mut table, 2 * CHUNK).unwrap();
    assert_eq!(large.0 % (2 * CHUNK), 0);
    assert_eq!(pool.held_bytes(), 3 * CHUNK);
}

#[test]
fn the_limit_holds() {
    let (mut table, mut pool) = (table(8), PagePool::new(CHUNK));
    pool.alloc(&mut table, CHUNK).unwrap();
    assert_eq!(pool.alloc(&mut table, 0x1000), Err(PoolError::Limit { held: CHUNK, limit: CHUNK }));
    assert_eq!(table.summary().mediator, 1);
}

#[test]
fn a_full_card_is_an_error_that_passes() {
    let (mut table, mut pool) = (table(2), PagePool::new(u64::MAX));
    table.create_vm(TenantId(1), 2 * CHUNK, crate::Limits::RESERVED).unwrap();
    for index in 0..2 {
        table.place(TenantId(1), crate::GuestVramAddr(index * CHUNK)).unwrap();
    }
    assert!(matches!(pool.alloc(&mut table, 0x1000), Err(PoolError::Chunks(Error::CardFull { .. }))));
    table.destroy_vm(TenantId(1)).unwrap();
    assert!(matches!(pool.alloc(&mut table, 0x1000), Err(PoolError::Chunks(Error::NeedsScrub { .. }))));
}

#[test]
fn release_all_gives_every_chunk_back_for_scrubbing() {
    let (mut table, mut pool) = (table(8), PagePool::new(u64::MAX));
    for _ in 0..40 {
        pool.alloc(&mut table, 0x2000).unwrap();
    }
    pool.release_all(&mut table);
    assert_eq!((pool.used_bytes(), pool.held_bytes()), (0, 0));
    let summary = table.summary();
    assert_eq!((summary.mediator, summary.to_scrub), (0, 3));
}

#[test]
fn never_allocated_pages_are_known_to_be_zeroed() {
    let (mut table, mut pool) = (table(8), PagePool::new(u64::MAX));
    let small = pool.alloc_block(&mut table, 0x1000).unwrap();
    let large = pool.alloc_block(&mut table, 2 * CHUNK).unwrap();
    assert!(small.zeroed && large.zeroed);
    pool.free(small.address);
    pool.free(large.address);
    // Part of the new block was allocated before.
    assert!(!pool.alloc_block(&mut table, 0x2000).unwrap().zeroed);
    assert!(pool.alloc_block(&mut table, 0x1000).unwrap().zeroed, "the page was never allocated");
    assert!(!pool.alloc_block(&mut table, 2 * CHUNK).unwrap().zeroed);
    // A released chunk is zeroed before the pool gets it again.
    pool.release_all(&mut table);
    while let Some(work) = table.take_scrub_work() {
        table.scrubbed(work.place);
    }
    assert!(pool.alloc_block(&mut table, 0x2000).unwrap().zeroed);
}

#[test]
#[should_panic(expected = "not allocated")]
fn freeing_twice_is_caught() {
    let (mut table, mut pool) = (table(2), PagePool::new(u64::MAX));
    let page = pool.alloc(&mut table, 0x1000).unwrap();
    pool.free(page);
    pool.free(page);
}

/// Returns the saved form of a pool with an allocation of two chunks and one of a page.
fn saved() -> (ChunkTable, SavedPool) {
    let (mut table, mut pool) = (table(8), PagePool::new(u64::MAX));
    pool.alloc(&mut table, 2 * CHUNK).unwrap();
    pool.alloc(&mut table, 0x1000).unwrap();
    let saved = pool.save();
    (table, saved)
}

#[test]
fn saved_pools_that_cannot_be_are_refused() {
    let refused = |edit: &dyn Fn(&mut SavedPool)| {
        let (table, mut saved) = saved();
        edit(&mut saved);
        let mut unclaimed = table.unclaimed();
        PagePool::restored(saved, &table, &mut unclaimed).expect_err("restoring succeeded").to_string()
    };
    // A chunk that does not belong to the mediator is rejected.
    assert!(
        refused(&|saved| saved.runs[1].0 = 5).contains("chunk 5 is used twice, or does not belong to the mediator")
    );
    assert!(refused(&|saved| saved.runs[1] = saved.runs[0]).contains("used twice"));
    assert!(refused(&|saved| saved.runs[0].1 = u32::MAX).contains("used twice"));
    assert!(refused(&|saved| saved.runs[0].0 = u32::MAX).contains("no end"));
    assert!(refused(&|saved| saved.used[0].1 = 99).contains("too large"));
    assert!(refused(&|saved| saved.used[0].1 += 1).contains("outside its chunks"));
    assert!(refused(&|saved| saved.used[0].0 += 0x800).contains("outside its chunks"));
    assert!(refused(&|saved| saved.used[1].0 = 7 * CHUNK).contains("outside its chunks"));
    let both = |saved: &mut SavedPool| saved.used.insert(1, (saved.used[0].0 + 0x1000, 0));
    let (table, mut pool) = saved();
    both(&mut pool);
    assert!(
        PagePool::restored(pool, &table, &mut table.unclaimed()).is_err(),
        "an allocation inside another one is rejected"
    );
}

#[test]
fn chunks_of_the_mediator_have_one_user() {
    let (table, pool) = saved();
    let mut unclaimed = table.unclaimed();
    PagePool::restored(pool.clone(), &table, &mut unclaimed).unwrap();
    let twice = PagePool::restored(pool, &table, &mut unclaimed).unwrap_err();
    assert!(twice.to_string().contains("used twice"), "{twice}");
    let (table, mut pool) = saved();
    let mut unclaimed = table.unclaimed();
    pool.runs.pop();
    pool.used.pop();
    PagePool::restored(pool, &table, &mut unclaimed).unwrap();
    assert!(unclaimed.finish().unwrap_err().to_string().contains("of the mediator has no user"));
}

proptest! {
    /// Checks that allocations never overlap, are aligned, and are in the mediator's chunks, and that freeing them
    /// returns all chunks.
    #[test]
    fn allocations_are_disjoint_and_all_comes_back(
        ops in prop::collection::vec((any::<bool>(), 1u64..3 * CHUNK, any::<usize>()), 1..150)
    ) {
        let (mut table, mut pool) = (table(16), PagePool::new(12 * CHUNK));
        let mut live: Vec<(u64, u64)> = Vec::new();
        // Pages that have been allocated since their chunk was added to the pool.
        let mut had = std::collections::BTreeSet::new();
        for (free, bytes, which) in ops {
            if free && !live.is_empty() {
                let (start, _) = live.swap_remove(which % live.len());
                pool.free(VramAddr(start));
            } else if let Ok(Block { address, zeroed }) = pool.alloc_block(&mut table, bytes) {
                let size = bytes.next_power_of_two().max(PAGE_BYTES);
                let pages: Vec<u64> = (address.0..address.0 + size).step_by(PAGE_BYTES as usize).collect();
                prop_assert_eq!(zeroed, pages.iter().all(|page| !had.contains(page)));
                had.extend(pages);
                prop_assert_eq!(address.0 % size, 0);
                prop_assert!(live.iter().all(|&(start, len)| address.0 + size <= start || start + len <= address.0));
                for at in (address.0..address.0 + size).step_by(CHUNK as usize) {
                    let chunk = table.chunk_at(VramAddr(at)).unwrap();
                    prop_assert_eq!(table.state(chunk), crate::ChunkState::Mediator);
                }
                live.push((address.0, size));
            }
            if which % 4 == 0 {
                let saved = pool.save();
                let mut unclaimed = table.unclaimed();
                let restored = PagePool::restored(saved.clone(), &table, &mut unclaimed);
                let restored = restored.map_err(|why| TestCaseError::fail(why.to_string()))?;
                prop_assert!(unclaimed.finish().is_ok());
                prop_assert_eq!((&restored.free, &restored.used, restored.held), (&pool.free, &pool.used, pool.held));
                prop_assert_eq!(restored.save(), saved);
                // A restored pool does not know which pages are zeroed.
                had.extend((0..16 * CHUNK).step_by(PAGE_BYTES as usize).filter(|page| {
                    table.chunk_at(VramAddr(*page)).is_some_and(|chunk| table.state(chunk) == crate::ChunkState::Mediator)
                }));
                pool = restored;
            }
            prop_assert_eq!(pool.used_bytes(), live.iter().map(|&(_, size)| size).sum::<u64>());
            prop_assert!(pool.held_bytes() <= 12 * CHUNK);
        }
        for (start, _) in live {
            pool.free(VramAddr(start));
        }
        let held = pool.held_bytes() / CHUNK;
        prop_assert_eq!(u64::from(pool.reclaim(&mut table)), held);
        prop_assert_eq!(pool.held_bytes(), 0);
        prop_assert!(pool.free.iter().all(std::collections::BTreeSet::is_empty));
    }
}
