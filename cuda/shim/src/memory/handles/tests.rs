//! Tests handles with a mock driver.

use super::super::fixture::Model;
use super::*;

const CHUNK: u64 = 2 << 20;
const AT: Address = 0x3_0000_0000;
const PROPERTY: Property = [1, 0, 1, 0, 0, 0, 0, 0];

fn chunk(id: u64) -> Piece {
    let chunk = Backing::new(Chunk { id: ChunkId(id), place: Place::Device }, None);
    Piece { handle: 100 + id, bytes: CHUNK, chunk: Some(chunk) }
}

/// Creates a handle from two chunks and a driver allocation of half a chunk.
fn three(handles: &mut Handles, first: u64) -> Handle {
    let rest = Piece { handle: 100 + first + 2, bytes: CHUNK / 2, chunk: None };
    handles.add(0, PROPERTY, vec![chunk(first), chunk(first + 1), rest])
}

const ALL: u64 = 2 * CHUNK + CHUNK / 2;

fn move_of(id: u64) -> Chunk {
    Chunk { id: ChunkId(id), place: Place::Host }
}

#[test]
fn a_handle_lives_as_long_as_a_reference_or_a_mapping() {
    let (mut handles, mut pages) = (Handles::default(), Model::default());
    let handle = three(&mut handles, 0);
    assert_eq!(handles.map(&mut pages, AT, ALL, 0, handle), SUCCESS);
    assert_eq!(handles.release(&mut pages, handle), Ok(None), "it is mapped");
    assert_eq!(handles.release(&mut pages, handle), Err(INVALID_VALUE), "the program has no reference");
    assert_eq!(handles.map(&mut pages, AT + 8 * CHUNK, ALL, 0, handle), INVALID_VALUE);
    assert_eq!(handles.property(handle), None);
    assert_eq!(handles.retain(AT + ALL - 1), Some(handle));
    assert_eq!(handles.map(&mut pages, AT + 8 * CHUNK, ALL, 0, handle), SUCCESS, "it has one again");
    assert_eq!(handles.unmap(&mut pages, AT, 32 * CHUNK), Ok(Vec::new()), "both mappings and the gap between them");
    assert!(pages.released.is_empty() && pages.mapped.is_empty());
    let freed = Freed { card: 0, chunks: vec![ChunkId(0), ChunkId(1)], fixed: CHUNK / 2, exported: 0 };
    assert_eq!(handles.release(&mut pages, handle), Ok(Some(freed)));
    assert_eq!(pages.released, [100, 101, 102]);
    assert_eq!(handles.place(ChunkId(0)), None);
}

#[test]
fn only_whole_handles_and_whole_mappings_will_do() {
    let (mut handles, mut pages) = (Handles::default(), Model::default());
    let handle = three(&mut handles, 0);
    assert_eq!(handles.map(&mut pages, AT, 0, 0, handle), INVALID_VALUE);
    assert_eq!(handles.map(&mut pages, AT, CHUNK, 0, handle), NOT_SUPPORTED);
    assert_eq!(handles.map(&mut pages, AT, CHUNK, CHUNK, handle), NOT_SUPPORTED);
    assert_eq!(handles.map(&mut pages, AT, ALL, 0, handle + 1), INVALID_VALUE);
    assert_eq!(handles.map(&mut pages, AT, ALL, 0, handle), SUCCESS);
    assert_eq!(handles.cover(AT - CHUNK, CHUNK), Cover::None);
    assert_eq!(handles.cover(AT - CHUNK, ALL + CHUNK), Cover::Whole);
    for (at, bytes) in [(AT, CHUNK), (AT + CHUNK, ALL), (AT - CHUNK, 2 * CHUNK), (AT + CHUNK, CHUNK)] {
        assert_eq!(handles.unmap(&mut pages, at, bytes), Err(INVALID_VALUE));
        assert_eq!(handles.allow(&mut pages, at, bytes, &[Access::all(0)]), INVALID_VALUE);
    }
    assert_eq!(handles.allow(&mut pages, AT, ALL, &[Access::none(2, 0)]), NOT_SUPPORTED, "the host");
    assert_eq!(pages.mapped.len(), 3);
    assert_eq!(pages.map(AT + ALL, CHUNK, 7), SUCCESS, "a handle from the driver");
    assert_eq!(handles.allow(&mut pages, AT + ALL, CHUNK, &[Access::none(2, 0)]), SUCCESS, "the driver decides");
    assert_eq!(handles.find(AT + ALL), None);
}

#[test]
fn a_handle_that_cannot_be_mapped_whole_is_not_mapped() {
    let (mut handles, mut pages) = (Handles::default(), Model { left: Some(2), ..Model::default() });
    let handle = three(&mut handles, 0);
    assert_eq!(handles.map(&mut pages, AT, ALL, 0, handle), 2);
    assert!(pages.mapped.is_empty() && handles.find(AT).is_none());
}

#[test]
fn a_piece_moves_at_all_its_addresses_and_each_keeps_its_access() {
    let (mut handles, mut pages) = (Handles::default(), Model::default());
    let handle = three(&mut handles, 0);
    let (rw, ro) = ([Access::all(0)], [Access::none(1, 0)]);
    let other = AT + 8 * CHUNK;
    for (at, access) in [(AT, Some(&rw)), (other, Some(&ro)), (AT + 16 * CHUNK, None)] {
        assert_eq!(handles.map(&mut pages, at, ALL, 0, handle), SUCCESS);
        if let Some(access) = access {
            assert_eq!(handles.allow(&mut pages, at, ALL, access), SUCCESS);
        }
    }
    let places: Vec<_> = [0, 1].map(|id| handles.place(ChunkId(id)).expect("a place")).to_vec();
    for (place, id) in places.iter().zip([0, 1]) {
        assert!(handles.replace(&mut pages, *place, 200 + id, move_of(id), None));
    }
    assert!(handles.restore(&mut pages, places));
    for (at, access) in [(AT, &rw[..]), (other, &ro[..]), (AT + 16 * CHUNK, &[])] {
        let mapped: Vec<_> = pages.mapped.range(at..at + ALL).map(|(_, m)| (m.1, m.2.as_slice())).collect();
        assert_eq!(mapped, [(200, access), (201, access), (102, access)]);
    }
    assert_eq!(pages.released, [100, 101]);
    assert_eq!(handles.access(AT + CHUNK, Access::none(1, 0)), Some(3));
    assert_eq!(handles.access(other, Access::none(1, 0)), Some(0));
    assert_eq!(handles.access(AT + 4 * CHUNK, Access::none(1, 0)), None, "nothing is mapped there");
    assert!(handles.chunks().all(|(_, chunk)| chunk.place == Place::Host));
}

#[test]
fn a_copy_that_cannot_be_mapped_everywhere_is_mapped_nowhere() {
    let (mut handles, mut pages) = (Handles::default(), Model::default());
    let handle = three(&mut handles, 0);
    for at in [AT, AT + 8 * CHUNK, AT + 16 * CHUNK] {
        assert_eq!(handles.map(&mut pages, at, ALL, 0, handle), SUCCESS);
        assert_eq!(handles.allow(&mut pages, at, ALL, &[Access::all(0)]), SUCCESS);
    }
    let before = pages.mapped.clone();
    pages.left = Some(1);
    let place = handles.place(ChunkId(1)).expect("a place");
    assert!(!handles.replace(&mut pages, place, 201, move_of(1), None));
    assert_eq!(pages.mapped, before);
    assert!(pages.released.is_empty());
    assert!(handles.replace(&mut pages, place, 202, move_of(1), None), "later it can");
    assert!(handles.restore(&mut pages, vec![place]));
}

#[test]
fn unmapped_handle_moves_and_maps_at_new_backing() {
    let (mut handles, mut pages) = (Handles::default(), Model::default());
    let handle = three(&mut handles, 0);
    let place = handles.place(ChunkId(0)).expect("a place");
    assert!(handles.replace(&mut pages, place, 200, move_of(0), None));
    assert_eq!(pages.released, [100]);
    assert_eq!(handles.map(&mut pages, AT, ALL, 0, handle), SUCCESS);
    assert_eq!(pages.mapped[&AT].1, 200);
}

#[test]
fn exported_handle_becomes_one_backing_in_all_mappings() {
    let (mut handles, mut pages) = (Handles::default(), Model::default());
    let handle = three(&mut handles, 0);
    let places = [(AT, &[Access::all(0)][..]), (AT + 8 * CHUNK, &[Access::none(1, 0)]), (AT + 16 * CHUNK, &[])];
    for (at, access) in places {
        assert_eq!(handles.map(&mut pages, at, ALL, 0, handle), SUCCESS);
        if !access.is_empty() {
            assert_eq!(handles.allow(&mut pages, at, ALL, access), SUCCESS);
        }
    }
    let before = pages.mapped.clone();
    pages.left = Some(2);
    assert_eq!(handles.unite(&mut pages, handle, 300), None, "it cannot be mapped everywhere");
    assert_eq!(pages.mapped, before, "and is as before, with its access");
    assert!(pages.released.is_empty());
    let rest = Freed { card: 0, chunks: vec![ChunkId(0), ChunkId(1)], fixed: CHUNK / 2, exported: 0 };
    assert_eq!(handles.unite(&mut pages, handle, 300), Some(rest));
    let expected = places.map(|(at, access)| (at, (ALL, 300, access.to_vec())));
    assert_eq!(pages.mapped, BTreeMap::from(expected));
    assert_eq!(handles.described(handle).and_then(|described| described.whole), Some(300));
    assert_eq!(handles.place(ChunkId(0)), None, "the handle no longer has movable chunks");
    assert_eq!(handles.unmap(&mut pages, AT, 32 * CHUNK), Ok(Vec::new()));
    let rest = Freed { card: 0, chunks: Vec::new(), fixed: 0, exported: ALL };
    assert_eq!(handles.release(&mut pages, handle), Ok(Some(rest)));
    assert_eq!(pages.released, [100, 101, 102, 300]);
}

#[test]
fn handle_names_the_card_of_its_memory() {
    for card in [0, 1, 15] {
        let mut handles = Handles::of_card(card);
        let handle = three(&mut handles, 0);
        assert_eq!((Handles::card(handle), Handles::is_ours(handle)), (card, true));
    }
    for other in [0, 0x1001, 0x7fff_ffff_ffff, FIRST - 1, FIRST + (1 << 40)] {
        assert!(!Handles::is_ours(other), "{other:#x} is a driver handle");
    }
}
