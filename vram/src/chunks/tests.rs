//! Tests sizes, places, and reservations of the chunk table. `model` tests random sequences of operations.

mod model;
mod places;

use super::*;

const CHUNK: u64 = CHUNK_BYTES_MIN;

fn table(chunks: u64) -> ChunkTable {
    ChunkTable::new(chunks * CHUNK, CHUNK, Contents::Zeroed).unwrap()
}

fn on_card(address: u64) -> Place {
    Place::Card(VramAddr(address))
}

fn scrub_all(table: &mut ChunkTable) -> u32 {
    let mut done = 0;
    while let Some(work) = table.take_scrub_work() {
        table.scrubbed(work.place);
        done += 1;
    }
    done
}

#[test]
fn sizes_that_make_no_sense_are_refused() {
    for bytes in [0, 4096, 3 << 20, 128 << 20] {
        assert_eq!(ChunkTable::new(1 << 30, bytes, Contents::Zeroed).unwrap_err(), Error::ChunkSize(bytes));
    }
    assert_eq!(ChunkTable::new(CHUNK - 1, CHUNK, Contents::Zeroed).unwrap_err(), Error::CardSize(CHUNK - 1));
    assert!(matches!(ChunkTable::new(u64::MAX, CHUNK, Contents::Zeroed), Err(Error::CardSize(_))));
}

#[test]
fn only_the_listed_steps_are_legal() {
    let (vm, arriving) = (ChunkState::Vm { vm: TenantId(1), index: 0 }, ChunkState::Arriving(MoveId(0)));
    let states = [ChunkState::Free, ChunkState::NeedsScrub, ChunkState::Scrubbing, ChunkState::Mediator, vm, arriving];
    let legal: Vec<(usize, usize)> =
        vec![(0, 3), (0, 4), (0, 5), (5, 4), (3, 1), (4, 1), (5, 1), (1, 2), (1, 5), (2, 0)];
    for (i, from) in states.iter().enumerate() {
        for (j, to) in states.iter().enumerate() {
            assert_eq!(from.can_go(*to), legal.contains(&(i, j)), "{from:?} to {to:?}");
        }
    }
}

/// Returns the expected error for a VM that has no guarantee and may not swap, if `free` chunks are zeroed and
/// `promised` chunks are reserved for other VMs.
fn refused(vm: u32, free: u32, promised: u32) -> Result<Placed, Error> {
    let limit = Limit::Card { free, to_scrub: 0, promised };
    Err(Error::Full { vm: TenantId(vm), limit, host: Some(Limit::Policy(OnFull::Refuse)) })
}

/// Places the first `chunks` guest chunks of a VM.
fn place_first(table: &mut ChunkTable, vm: u32, chunks: u64) {
    for index in 0..chunks {
        assert!(table.place(TenantId(vm), GuestVramAddr(index * CHUNK)).unwrap().new);
    }
}

#[test]
fn a_chunk_gets_its_place_at_first_use_and_keeps_it() {
    let mut table = table(8);
    table.create_vm(TenantId(1), 3 * CHUNK, Limits::RESERVED).unwrap();
    assert_eq!(table.lookup(TenantId(1), GuestVramAddr(0), 3 * CHUNK), Lookup::Unplaced);
    assert_eq!(
        (table.translate(TenantId(1), GuestVramAddr(0)), table.is_placed(TenantId(1), GuestVramAddr(0))),
        (None, Some(false))
    );
    let placed = table.place(TenantId(1), GuestVramAddr(2 * CHUNK + 0x123)).unwrap();
    assert_eq!(placed, Placed { place: on_card(0x123), new: true });
    assert_eq!(
        table.place(TenantId(1), GuestVramAddr(2 * CHUNK)),
        Ok(Placed { place: on_card(0), new: false }),
        "the same chunk"
    );
    assert_eq!(table.lookup(TenantId(1), GuestVramAddr(2 * CHUNK + 8), CHUNK - 8), Lookup::Placed(on_card(8)));
    assert_eq!(table.translate(TenantId(1), GuestVramAddr(2 * CHUNK)), Some(Run { place: on_card(0), bytes: CHUNK }));
    assert_eq!(table.is_placed(TenantId(1), GuestVramAddr(2 * CHUNK)), Some(true));
    assert_eq!(table.owner(VramAddr(0x10)), Some((TenantId(1), GuestVramAddr(2 * CHUNK + 0x10))));
    let vm = table.summary().vms[&TenantId(1)];
    assert_eq!((vm.advertised, vm.guarantee, vm.placed, vm.unbacked, vm.peak), (3, 3, 1, 2, 1));
}

#[test]
fn vm_that_shrinks_keeps_its_chunks_and_gets_no_more() {
    let mut table = table(8);
    let vm = TenantId(1);
    table.create_vm(vm, 4 * CHUNK, Limits::UNRESERVED).unwrap();
    place_first(&mut table, 1, 4);
    table.resize_vm(vm, 2 * CHUNK, Limits::UNRESERVED).unwrap();
    let full = Err(Error::Full { vm, limit: Limit::Quota(2), host: None });
    let account = table.summary().vms[&vm];
    assert_eq!((account.advertised, account.placed, account.unbacked), (2, 4, 0));
    assert!(!table.place(vm, GuestVramAddr(3 * CHUNK)).unwrap().new, "existing chunks stay");
    assert!(table.unplace(vm, GuestVramAddr(0)).unwrap());
    assert_eq!(table.place(vm, GuestVramAddr(0)), full);
    assert!(table.unplace(vm, GuestVramAddr(3 * CHUNK)).unwrap(), "the address is still valid");
    assert_eq!(table.place(vm, GuestVramAddr(0)), full);
    assert!(table.unplace(vm, GuestVramAddr(CHUNK)).unwrap());
    scrub_all(&mut table);
    assert!(table.place(vm, GuestVramAddr(0)).unwrap().new);
    assert_eq!(table.place(vm, GuestVramAddr(CHUNK)), full);
    // A larger size adds addresses.
    assert_eq!(table.lookup(vm, GuestVramAddr(4 * CHUNK), CHUNK), Lookup::Outside);
    table.resize_vm(vm, 6 * CHUNK, Limits::UNRESERVED).unwrap();
    assert!(table.place(vm, GuestVramAddr(5 * CHUNK)).unwrap().new);
    assert_eq!(table.summary().vms[&vm].unbacked, 3);
}

#[test]
fn resize_that_cannot_be_promised_changes_nothing() {
    let mut table = table(4);
    table.create_vm(TenantId(1), 2 * CHUNK, Limits::RESERVED).unwrap();
    table.create_vm(TenantId(2), CHUNK, Limits::RESERVED).unwrap();
    let before = table.summary();
    assert!(matches!(table.resize_vm(TenantId(1), 4 * CHUNK, Limits::RESERVED), Err(Error::Promise { .. })));
    assert_eq!(table.resize_vm(TenantId(1), 0, Limits::RESERVED), Err(Error::Empty));
    assert_eq!(table.resize_vm(TenantId(1), u64::MAX, Limits::RESERVED), Err(Error::Advertised(u64::MAX)));
    assert_eq!(table.resize_vm(TenantId(3), CHUNK, Limits::RESERVED), Err(Error::NoSuchVm(TenantId(3))));
    assert_eq!(table.summary(), before);
    table.resize_vm(TenantId(1), 3 * CHUNK, Limits::RESERVED).unwrap();
    assert_eq!((table.summary().promised, table.spare()), (4, 0));
    table.resize_vm(TenantId(1), CHUNK, Limits::RESERVED).unwrap();
    assert_eq!((table.summary().promised, table.spare()), (2, 2));
}

#[test]
fn addresses_that_the_guest_does_not_have_are_outside() {
    let mut table = table(8);
    table.create_vm(TenantId(1), CHUNK + 0x1000, Limits::RESERVED).unwrap();
    let beyond = GuestVramAddr(CHUNK + 0x1000);
    for vm in [TenantId(1), TenantId(2)] {
        assert_eq!(table.lookup(vm, beyond, 1), Lookup::Outside);
        assert_eq!(table.lookup(vm, GuestVramAddr(u64::MAX), 1), Lookup::Outside);
        assert_eq!((table.translate(vm, beyond), table.is_placed(vm, beyond)), (None, None));
    }
    assert_eq!(table.lookup(TenantId(1), GuestVramAddr(CHUNK), 0x1001), Lookup::Outside);
    assert_eq!(table.lookup(TenantId(1), GuestVramAddr(0x10), u64::MAX), Lookup::Outside);
    assert_eq!(table.lookup(TenantId(1), beyond, 0), Lookup::Outside);
    assert_eq!(table.place(TenantId(1), beyond), Err(Error::OutOfRange { vm: TenantId(1), address: beyond }));
    assert_eq!(table.unplace(TenantId(1), beyond), Err(Error::OutOfRange { vm: TenantId(1), address: beyond }));
    assert_eq!(table.place(TenantId(2), GuestVramAddr(0)), Err(Error::NoSuchVm(TenantId(2))));
    assert_eq!(table.unplace(TenantId(2), GuestVramAddr(0)), Err(Error::NoSuchVm(TenantId(2))));
    assert_eq!(table.unplace_all(TenantId(2)), 0);
    assert_eq!(table.summary().free, 8);
}

#[test]
fn last_chunk_is_cut_to_guest_size() {
    let mut table = table(8);
    table.create_vm(TenantId(1), CHUNK + 0x1000, Limits::RESERVED).unwrap();
    place_first(&mut table, 1, 2);
    assert_eq!(table.translate(TenantId(1), GuestVramAddr(CHUNK)), Some(Run { place: on_card(CHUNK), bytes: 0x1000 }));
    assert_eq!(table.translate(TenantId(1), GuestVramAddr(CHUNK + 0x1000)), None);
    assert_eq!(table.translate_range(TenantId(1), GuestVramAddr(CHUNK), 0x1001), None);
    assert_eq!(table.translate_range(TenantId(1), GuestVramAddr(u64::MAX), 2), None);
    assert_eq!(table.translate_range(TenantId(1), GuestVramAddr(0x10), u64::MAX), None);
    assert_eq!(table.summary().vms[&TenantId(1)].placed, 2);
}

#[test]
fn a_range_over_chunks_that_are_no_neighbours_is_split() {
    let mut table = table(4);
    table.create_vm(TenantId(1), CHUNK, Limits::RESERVED).unwrap();
    table.create_vm(TenantId(2), 3 * CHUNK, Limits::RESERVED).unwrap();
    table.place(TenantId(2), GuestVramAddr(0)).unwrap();
    table.place(TenantId(1), GuestVramAddr(0)).unwrap();
    table.place(TenantId(2), GuestVramAddr(CHUNK)).unwrap();
    let at = |address| table.lookup(TenantId(2), GuestVramAddr(address), 0x1000);
    assert_eq!(at(CHUNK - 0x1000), Lookup::Placed(on_card(CHUNK - 0x1000)));
    assert_eq!(at(CHUNK - 0x800), Lookup::Split, "chunk 0, then chunk 2");
    assert_eq!(at(2 * CHUNK - 0x800), Lookup::Split, "the second half is unplaced");
    assert_eq!(table.translate_range(TenantId(2), GuestVramAddr(CHUNK - 0x800), 0x1000), None);
    let pieces: Vec<_> = table.pieces(GuestVramAddr(2 * CHUNK - 0x800), 0x1000).collect();
    assert_eq!(pieces, [(GuestVramAddr(2 * CHUNK - 0x800), 0x800), (GuestVramAddr(2 * CHUNK), 0x800)]);
    let answers: Vec<_> = pieces.iter().map(|&(at, len)| table.lookup(TenantId(2), at, len)).collect();
    assert_eq!(answers, [Lookup::Placed(on_card(3 * CHUNK - 0x800)), Lookup::Unplaced]);
    assert_eq!(table.translate(TenantId(2), GuestVramAddr(0)), Some(Run { place: on_card(0), bytes: CHUNK }));
    assert_eq!(table.owner(VramAddr(2 * CHUNK + 8)), Some((TenantId(2), GuestVramAddr(CHUNK + 8))));
    assert_eq!(table.owner(VramAddr(4 * CHUNK)), None);
}

#[test]
fn pieces_end_with_the_address_space() {
    let table = table(1);
    let pieces: Vec<_> = table.pieces(GuestVramAddr(u64::MAX - 1), u64::MAX).collect();
    assert_eq!(pieces, [(GuestVramAddr(u64::MAX - 1), 1)]);
    assert_eq!(table.pieces(GuestVramAddr(5), 0).count(), 0);
}

#[test]
fn a_reservation_is_refused_when_it_cannot_be_kept() {
    let mut table = table(4);
    let refused = |vm, wanted, left| Err(Error::Promise { vm: TenantId(vm), wanted, now: left, left });
    assert_eq!(table.create_vm(TenantId(1), 5 * CHUNK, Limits::RESERVED), refused(1, 5, 4));
    table.create_vm(TenantId(1), 3 * CHUNK, Limits::RESERVED).unwrap();
    assert_eq!(table.create_vm(TenantId(2), CHUNK + 1, Limits::RESERVED), refused(2, 2, 1));
    assert_eq!(table.create_vm(TenantId(1), CHUNK, Limits::RESERVED), Err(Error::Exists(TenantId(1))));
    assert_eq!(table.create_vm(TenantId(2), 0, Limits::UNRESERVED), Err(Error::Empty));
    assert_eq!(table.create_vm(TenantId(2), 1 << 41, Limits::UNRESERVED), Err(Error::Advertised(1 << 41)));
    assert_eq!(table.create_vm(TenantId(2), 1 << 40, Limits::RESERVED), refused(2, 1 << 23, 1));
    table.create_vm(TenantId(2), CHUNK, Limits::RESERVED).unwrap();
    assert_eq!(table.summary().spare(), 0);
    assert_eq!(table.destroy_vm(TenantId(1)), Ok(0));
    assert_eq!((table.summary().spare(), table.summary().promised), (3, 1));
}

#[test]
fn vm_without_reservation_gets_only_unguaranteed_chunks() {
    let mut table = table(4);
    table.create_vm(TenantId(1), 3 * CHUNK, Limits::RESERVED).unwrap();
    table.create_vm(TenantId(2), 100 * CHUNK, Limits::UNRESERVED).unwrap();
    table.place(TenantId(2), GuestVramAddr(99 * CHUNK)).unwrap();
    let full = refused(2, 3, 3);
    assert_eq!(table.place(TenantId(2), GuestVramAddr(0)), full);
    assert!(!table.place(TenantId(2), GuestVramAddr(99 * CHUNK)).unwrap().new, "existing chunks stay");
    place_first(&mut table, 1, 3);
    assert_eq!(table.place(TenantId(2), GuestVramAddr(0)), refused(2, 0, 0));
    // Chunks freed by the other VM stay promised to it until it is destroyed.
    assert_eq!(table.unplace_all(TenantId(1)), 3);
    assert_eq!(scrub_all(&mut table), 3);
    assert_eq!(table.place(TenantId(2), GuestVramAddr(0)), full);
    table.destroy_vm(TenantId(1)).unwrap();
    assert!(table.place(TenantId(2), GuestVramAddr(0)).unwrap().new);
    let vm = table.summary().vms[&TenantId(2)];
    assert_eq!((vm.advertised, vm.guarantee, vm.placed, vm.unbacked, vm.peak), (100, 0, 2, 98, 2));
}

#[test]
fn unscrubbed_chunks_back_a_reservation_but_are_not_placed() {
    let mut table = ChunkTable::new(2 * CHUNK, CHUNK, Contents::Unknown).unwrap();
    table.create_vm(TenantId(1), 2 * CHUNK, Limits::RESERVED).unwrap();
    assert_eq!(table.place(TenantId(1), GuestVramAddr(0)), Err(Error::NeedsScrub { tier: Tier::Card, short: 1 }));
    let work = table.take_scrub_work().unwrap();
    assert_eq!(
        table.place(TenantId(1), GuestVramAddr(0)),
        Err(Error::NeedsScrub { tier: Tier::Card, short: 1 }),
        "an incomplete scrub does not count"
    );
    table.scrubbed(work.place);
    assert_eq!(table.place(TenantId(1), GuestVramAddr(0)), Ok(Placed { place: on_card(0), new: true }));
    assert_eq!(table.unplace(TenantId(1), GuestVramAddr(8)), Ok(true));
    assert_eq!(table.unplace(TenantId(1), GuestVramAddr(8)), Ok(false));
    assert_eq!(
        table.place(TenantId(1), GuestVramAddr(0)),
        Err(Error::NeedsScrub { tier: Tier::Card, short: 1 }),
        "it must be scrubbed again"
    );
    assert_eq!(scrub_all(&mut table), 2);
    place_first(&mut table, 1, 2);
    assert_eq!((table.summary().scrubbed, table.summary().vms[&TenantId(1)].peak), (3, 2));
}

#[test]
fn destroying_a_vm_gives_all_back_for_scrubbing() {
    let mut table = table(4);
    table.create_vm(TenantId(1), 4 * CHUNK, Limits::RESERVED).unwrap();
    place_first(&mut table, 1, 3);
    assert_eq!(table.destroy_vm(TenantId(1)), Ok(3));
    assert_eq!(table.destroy_vm(TenantId(1)), Err(Error::NoSuchVm(TenantId(1))));
    let summary = table.summary();
    assert_eq!((summary.free, summary.to_scrub, summary.promised), (1, 3, 0));
    assert_eq!(table.lookup(TenantId(1), GuestVramAddr(0), 1), Lookup::Outside);
}

#[test]
fn chunks_set_aside_go_to_mediator_only() {
    let mut table = table(8);
    table.set_aside(3).unwrap();
    let full = Err(Error::Promise { vm: TenantId(1), wanted: 6, now: 5, left: 5 });
    assert_eq!(table.create_vm(TenantId(1), 6 * CHUNK, Limits::RESERVED), full);
    table.create_vm(TenantId(1), 4 * CHUNK, Limits::RESERVED).unwrap();
    table.create_vm(TenantId(2), 8 * CHUNK, Limits::UNRESERVED).unwrap();
    place_first(&mut table, 2, 1);
    assert_eq!(table.place(TenantId(2), GuestVramAddr(CHUNK)), refused(2, 7, 7));
    // The mediator gets only its own share, because the other chunks are promised.
    table.reserve_mediator(1, 1).unwrap();
    let run = table.reserve_mediator(2, 1).unwrap();
    assert_eq!((table.summary().set_aside, table.summary().mediator), (0, 3));
    assert_eq!(table.reserve_mediator(1, 1), Err(Error::CardFull { wanted: 1, free: 4, to_scrub: 0, promised: 4 }));
    table.release_mediator(run, 2);
    assert_eq!(table.set_aside(4), Err(Error::CardFull { wanted: 3, free: 4, to_scrub: 2, promised: 4 }));
    table.set_aside(2).unwrap();
    assert_eq!((table.summary().set_aside, table.summary().spare()), (1, 1));
}

#[test]
fn unknown_contents_are_scrubbed_before_first_use() {
    let mut table = ChunkTable::new(3 * CHUNK, CHUNK, Contents::Unknown).unwrap();
    assert_eq!(table.reserve_mediator(1, 1), Err(Error::NeedsScrub { tier: Tier::Card, short: 1 }));
    assert_eq!(scrub_all(&mut table), 3);
    assert!(table.reserve_mediator(1, 1).is_ok());
    assert_eq!(table.summary().scrubbed, 3);
}

#[test]
fn a_mediator_run_is_aligned_and_refused_without_room() {
    let mut table = table(8);
    table.create_vm(TenantId(1), CHUNK, Limits::RESERVED).unwrap();
    place_first(&mut table, 1, 1);
    let run = table.reserve_mediator(4, 4).unwrap();
    assert_eq!(table.address(run), VramAddr(4 * CHUNK));
    assert!(matches!(table.reserve_mediator(4, 4), Err(Error::CardFull { wanted: 4, .. })));
    assert!(
        matches!(table.reserve_mediator(2, 4), Err(Error::CardFull { wanted: 2, .. })),
        "enough chunks, but no contiguous run"
    );
    assert!(matches!(table.reserve_mediator(u32::MAX, 1), Err(Error::CardFull { .. })));
    table.release_mediator(run, 4);
    assert_eq!(table.reserve_mediator(4, 4), Err(Error::NeedsScrub { tier: Tier::Card, short: 4 }));
}

#[test]
fn mediator_claim_is_met_from_spare_chunks_after_guarantees() {
    let mut table = table(4);
    table.claim(3);
    table.create_vm(TenantId(1), 4 * CHUNK, Limits::default()).unwrap();
    table.place(TenantId(1), GuestVramAddr(0)).unwrap();
    assert_eq!((table.spare(), table.kept_for_mediator()), (0, 3));
    assert!(matches!(table.place(TenantId(1), GuestVramAddr(CHUNK)), Err(Error::Full { .. })));
    let own = table.reserve_mediator(1, 1).unwrap();
    assert_eq!((table.spare(), table.kept_for_mediator()), (0, 2), "the claim is partly satisfied");
    // Claimed chunks are not promised, so they are available for a guarantee.
    table.create_vm(TenantId(2), CHUNK, Limits::RESERVED).unwrap();
    assert_eq!(table.kept_for_mediator(), 1);
    table.claim(0);
    assert_eq!(table.spare(), 1);
    table.release_mediator(own, 1);
}

#[test]
fn card_that_is_all_the_mediators_has_nothing_for_vms() {
    let mut table = table(4);
    table.set_host_budget(4);
    table.set_reserve(2).unwrap();
    table.reserve_mediator(4, 1).unwrap();
    assert_eq!((table.borrowed(), table.left_reserve(), table.for_vms()), (2, 0, 0));
}

#[test]
fn mediator_repays_borrowed_reserve_before_chunks_are_spare() {
    let mut table = table(4);
    table.set_host_budget(4);
    table.set_reserve(2).unwrap();
    table.create_vm(TenantId(1), 4 * CHUNK, Limits::default()).unwrap();
    for index in 0..2 {
        table.place(TenantId(1), GuestVramAddr(index * CHUNK)).unwrap();
    }
    assert_eq!((table.spare(), table.for_mediator(), table.left_reserve()), (0, 0, 2));
    let own = table.reserve_mediator(1, 1).unwrap();
    assert_eq!((table.borrowed(), table.left_reserve(), table.spare()), (1, 1, 0));
    assert_eq!(table.for_vms(), 2, "a borrowed chunk is subtracted only once");
    assert!(table.reserve_mediator(2, 1).is_err(), "the reserve is used up");
    table.unplace(TenantId(1), GuestVramAddr(0)).unwrap();
    assert_eq!((table.spare(), table.left_reserve()), (0, 1), "free chunks are returned to the reserve");
    table.repay();
    assert_eq!((table.borrowed(), table.left_reserve(), table.spare()), (0, 2, 0));
    table.release_mediator(own, 1);
    assert_eq!(table.spare(), 1);
}

#[test]
fn the_chunks_of_a_frozen_vm_stay_until_it_is_destroyed() {
    let mut table = table(2);
    table.set_host_budget(2);
    table.create_vm(TenantId(1), CHUNK, Limits::default()).unwrap();
    table.place(TenantId(1), GuestVramAddr(0)).unwrap();
    table.freeze(TenantId(1));
    assert_eq!(table.begin_move(TenantId(1), 0, To::Host), Err(Error::Settled { vm: TenantId(1), index: 0 }));
    table.destroy_vm(TenantId(1)).unwrap();
    table.create_vm(TenantId(1), CHUNK, Limits::default()).unwrap();
    assert!(!table.is_frozen(TenantId(1)));
}
