//! Tests regions with a mock driver.

use super::super::fixture::Model;
use super::*;
use crate::descriptors::tests::kept;

const CHUNK: u64 = 2 << 20;
const BASE: Address = 0x5_0000_0000;

fn region() -> Region {
    Region::new(vec![0], 0, BASE, 64 * CHUNK, CHUNK)
}

fn chunks(ids: std::ops::Range<u64>, place: Place) -> Vec<(Chunk, ChunkDescriptor)> {
    let null = || kept(std::fs::File::open("/dev/null").expect("opens").into());
    ids.map(|id| (Chunk { id: ChunkId(id), place }, null())).collect()
}

/// Creates a region with four chunks on the card, starting at index 1.
fn four() -> (Region, Model) {
    let (mut region, mut pages) = (region(), Model::default());
    assert!(region.map(&mut pages, &[1, 2, 3, 4], &chunks(10..14, Place::Device)));
    (region, pages)
}

/// Returns the indices of accessible chunks, with their driver handles.
fn accessible(pages: &Model) -> Vec<(u64, Handle)> {
    let can = |(_, mapping): &(&Address, &(u64, Handle, Vec<Access>))| !mapping.2.is_empty();
    pages.mapped.iter().filter(can).map(|(at, mapping)| ((at - BASE) / CHUNK, mapping.1)).collect()
}

#[test]
fn evicted_chunks_are_mapped_only_when_work_may_run() {
    let (mut region, mut pages) = four();
    assert_eq!(region.redirect(&mut pages, 2, &chunks(11..13, Place::Host)), 2);
    assert_eq!(pages.unmaps, 1, "both are unmapped in one call");
    assert_eq!(accessible(&pages), [(1, 1000), (4, 1003)]);
    assert_eq!(pages.released, [1001, 1002]);
    assert_eq!(region.away(), 2);
    assert!(region.is_away(BASE + 4 * CHUNK - 1) && !region.is_away(BASE + 4 * CHUNK) && !region.is_away(BASE - 1));
    assert!(region.bring(&mut pages));
    assert_eq!(accessible(&pages), [(1, 1000), (2, 1004), (3, 1005), (4, 1003)]);
    assert_eq!(region.away(), 0);
}

#[test]
fn chunks_returned_before_any_work_skip_host_mapping() {
    let (mut region, mut pages) = four();
    region.redirect(&mut pages, 1, &chunks(10..14, Place::Host));
    assert_eq!(region.redirect(&mut pages, 1, &chunks(10..14, Place::Device)), 4);
    assert_eq!(accessible(&pages), [(1, 1004), (2, 1005), (3, 1006), (4, 1007)]);
    assert_eq!((region.away(), pages.unmaps), (0, 1));
}

#[test]
fn chunks_keep_old_mapping_when_driver_fails() {
    let (mut region, mut pages) = four();
    pages.left = Some(1);
    assert_eq!(region.redirect(&mut pages, 1, &chunks(10..14, Place::Device)), 1, "the first");
    let now = accessible(&pages);
    assert_eq!(now, [(1, 1004), (2, 1001), (3, 1002), (4, 1003)]);
    let unused = [1005, 1006, 1007];
    assert!(unused.iter().all(|handle| pages.released.contains(handle)), "{:?}", pages.released);
}

#[test]
fn failed_chunk_mapping_is_retried() {
    let (mut region, mut pages) = four();
    region.redirect(&mut pages, 1, &chunks(10..14, Place::Host));
    pages.left = Some(1);
    assert!(!region.bring(&mut pages), "the driver has no memory");
    assert_eq!(region.away(), 1);
    assert!(region.bring(&mut pages));
    assert_eq!(accessible(&pages).len(), 4);
}

#[test]
fn a_chunk_is_given_up_wherever_it_is() {
    let (mut region, mut pages) = four();
    region.redirect(&mut pages, 2, &chunks(11..12, Place::Host));
    let mut ids = region.unmap(&mut pages, &[4, 1, 2, 3, 9]);
    ids.sort_unstable();
    assert_eq!(ids, [10, 11, 12, 13].map(ChunkId));
    assert!(pages.mapped.is_empty());
    assert_eq!((region.away(), pages.released.len()), (0, 4));
    assert!(region.bring(&mut pages), "nothing is left to map");
    assert!(pages.mapped.is_empty());
}

#[test]
fn peer_has_access_to_chunks_before_and_after_moves() {
    let (mut region, mut pages) = four();
    let devices = |pages: &Model| {
        let of = |mapping: &(u64, Handle, Vec<Access>)| {
            mapping.2.iter().filter(|one| one.flags() != 0).filter_map(Access::device).collect::<Vec<_>>()
        };
        pages.mapped.values().map(of).collect::<Vec<_>>()
    };
    assert!(region.add_peer(&mut pages, 3));
    assert_eq!(devices(&pages), [[0, 3]; 4]);
    // Chunks that move, or return from host memory, are also accessible to the peer.
    assert_eq!(region.redirect(&mut pages, 1, &chunks(10..12, Place::Device)), 2);
    assert_eq!(region.redirect(&mut pages, 3, &chunks(12..13, Place::Host)), 1);
    assert!(region.bring(&mut pages));
    assert!(region.map(&mut pages, &[5], &chunks(14..15, Place::Device)));
    assert_eq!(devices(&pages), [[0, 3]; 5]);
    assert!(region.remove_peer(&mut pages, 3) && region.remove_peer(&mut pages, 3));
    assert_eq!(devices(&pages), [[0]; 5]);
    assert_eq!(region.redirect(&mut pages, 1, &chunks(10..11, Place::Device)), 1);
    assert_eq!(devices(&pages), [[0]; 5]);
}
