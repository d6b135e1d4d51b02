//! Tests places in host memory, limit changes, and moves. `model` tests random sequences of operations.

use super::{CHUNK, on_card, place_first, scrub_all, table};
use crate::{
    ChunkTable, Ended, Error, GuestVramAddr, HostAddr, Limit, Limits, Lookup, OnFull, Place, Placed, Run, Step,
    TenantId, Tier, To,
};

const VM: TenantId = TenantId(1);

fn in_host(address: u64) -> Place {
    Place::Host(HostAddr(address))
}

/// Creates a card with four chunks and four host slots, and a VM with eight chunks that has used its first `used`
/// chunks.
fn swapping(used: u64, limits: Limits) -> ChunkTable {
    let mut table = table(4);
    table.set_host_budget(4);
    table.create_vm(VM, 8 * CHUNK, limits).unwrap();
    place_first(&mut table, 1, used);
    table
}

fn at(table: &ChunkTable, index: u64) -> Lookup {
    table.lookup(VM, GuestVramAddr(index * CHUNK), CHUNK)
}

#[test]
fn chunk_without_room_on_card_starts_in_host_memory() {
    let table = swapping(7, Limits::default());
    assert_eq!(at(&table, 3), Lookup::Placed(on_card(3 * CHUNK)));
    assert_eq!(at(&table, 4), Lookup::Placed(in_host(0)));
    assert_eq!(
        table.translate(VM, GuestVramAddr(4 * CHUNK + 8)),
        Some(Run { place: in_host(8), bytes: 3 * CHUNK - 8 })
    );
    assert_eq!(table.lookup(VM, GuestVramAddr(3 * CHUNK), 2 * CHUNK), Lookup::Split, "a part spans only one memory");
    let summary = table.summary();
    let vm = summary.vms[&VM];
    assert_eq!((vm.placed, vm.host, vm.unbacked, vm.born_in_host), (4, 3, 1, 3));
    assert_eq!((summary.host.budget, summary.host.used, summary.host.free, summary.host.end), (4, 3, 1, 3));
}

#[test]
fn a_full_answer_names_each_limit() {
    let full = |limit, host| Err::<Placed, _>(Error::Full { vm: VM, limit, host: Some(host) });
    let next = |used, limits| swapping(used, limits).place(VM, GuestVramAddr(7 * CHUNK));
    let card = Limit::Card { free: 0, to_scrub: 0, promised: 0 };
    let cases = [
        (4, Limits { on_full: OnFull::Queue, ..Limits::default() }, card, Limit::Policy(OnFull::Queue)),
        (6, Limits { swap_cap: 2, ..Limits::default() }, card, Limit::SwapCap(2)),
        (6, Limits { quota: 2, ..Limits::default() }, Limit::Quota(2), Limit::HostBudget(4)),
    ];
    for (used, limits, limit, host) in cases {
        assert_eq!(next(used, limits), full(limit, host));
    }
    let text = next(6, Limits { quota: 2, ..Limits::default() }).unwrap_err().to_string();
    assert_eq!(
        text,
        "VM 1 gets no chunk: its quota of 2 chunks on the card is used up; and none in host memory: the budget of 4 \
         chunks of host memory is used up"
    );
}

#[test]
fn a_move_takes_effect_when_it_is_committed() {
    let mut table = swapping(2, Limits::default());
    let begun = table.begin_move(VM, 1, To::Host).unwrap();
    assert_eq!((begun.from, begun.to, begun.bytes), (on_card(CHUNK), in_host(0), CHUNK));
    assert_eq!((at(&table, 1), table.is_moving(VM, 1)), (Lookup::Placed(on_card(CHUNK)), true));
    assert_eq!(table.begin_move(VM, 1, To::Host), Err(Error::Moving { vm: VM, index: 1 }));
    assert_eq!(table.commit_move(begun.id), Ended::Committed);
    assert_eq!((at(&table, 1), table.is_moving(VM, 1)), (Lookup::Placed(in_host(0)), false));
    assert_eq!(table.begin_move(VM, 1, To::Host), Err(Error::Settled { vm: VM, index: 1 }));
    assert_eq!(table.begin_move(VM, 2, To::Host), Err(Error::NotPlaced { vm: VM, index: 2 }));
    let back = table.begin_move(VM, 1, To::Card).unwrap();
    assert_eq!((back.from, back.to), (in_host(0), on_card(CHUNK)), "the copy overwrites the released chunk");
    table.abort_move(back.id);
    assert_eq!((at(&table, 1), table.moves().count()), (Lookup::Placed(in_host(0)), 0));
    let vm = table.summary().vms[&VM];
    assert_eq!((vm.placed, vm.host, vm.moved_out, vm.moved_in, vm.peak), (1, 1, 1, 0, 2));
    assert_eq!(scrub_all(&mut table), 1, "the unused destination");
}

#[test]
fn chunk_removed_while_moving_leaves_destination_to_scrub() {
    let mut table = swapping(4, Limits { guarantee: 4, ..Limits::default() });
    let [unplaced, destroyed] = [0, 1].map(|index| table.begin_move(VM, index, To::Host).unwrap());
    assert_eq!(table.unplace(VM, GuestVramAddr(0)), Ok(true));
    assert!(!table.is_moving(VM, 0));
    assert_eq!(table.summary().vms[&VM].moving, 1);
    table.destroy_vm(VM).unwrap();
    // Moves of a destroyed VM do not affect a new VM with the same number.
    table.create_vm(VM, CHUNK, Limits { swap_cap: 0, ..Limits::default() }).unwrap();
    assert_eq!((table.commit_move(unplaced.id), table.commit_move(destroyed.id)), (Ended::Gone, Ended::Gone));
    assert_eq!(scrub_all(&mut table), 6);
    let summary = table.summary();
    assert_eq!((summary.free, summary.host.free, summary.host.used, summary.vms[&VM].host), (4, 4, 0, 0));
}

#[test]
fn a_lowered_quota_takes_nothing_and_gives_nothing() {
    let mut table = swapping(3, Limits::default());
    table.set_limits(VM, Limits { quota: 1, ..Limits::default() }).unwrap();
    assert_eq!(table.summary().vms[&VM].placed, 3);
    assert_eq!(table.place(VM, GuestVramAddr(3 * CHUNK)), Ok(Placed { place: in_host(0), new: true }));
    let full = Err(Error::Full { vm: VM, limit: Limit::Quota(1), host: None });
    assert_eq!(table.begin_move(VM, 3, To::Card), full);
}

#[test]
fn a_raised_guarantee_is_refused_while_others_have_the_chunks() {
    let mut table = swapping(3, Limits::default());
    let two = TenantId(2);
    table.create_vm(two, 8 * CHUNK, Limits::default()).unwrap();
    let refused = Error::Promise { vm: two, wanted: 3, now: 1, left: 4 };
    let limits = Limits { guarantee: 3, ..Limits::default() };
    assert_eq!(table.set_limits(two, limits), Err(refused));
    assert!(refused.to_string().contains("1 can be promised at once, 4 when"), "{refused}");
    for index in [0, 1] {
        let id = table.begin_move(VM, index, To::Host).unwrap().id;
        table.commit_move(id);
    }
    table.set_limits(two, limits).unwrap();
    assert_eq!((table.summary().promised, table.spare()), (3, 0));
    assert_eq!(table.begin_move(VM, 0, To::Card).unwrap_err().to_string().matches("reserved for others").count(), 1);
    assert_eq!(
        table.set_limits(two, Limits { quota: 2, ..limits }),
        Err(Error::Guarantee { vm: two, guarantee: 3, quota: 2 })
    );
    assert_eq!(table.set_limits(two, Limits { weight: 0, ..limits }), Err(Error::Weight(two)));
    assert_eq!(table.set_limits(TenantId(3), limits), Err(Error::NoSuchVm(TenantId(3))));
}

#[test]
fn a_host_slot_is_scrubbed_before_its_next_owner() {
    let mut table = swapping(8, Limits::default());
    for index in 4..8 {
        table.unplace(VM, GuestVramAddr(index * CHUNK)).unwrap();
    }
    assert_eq!(table.place(VM, GuestVramAddr(4 * CHUNK)), Err(Error::NeedsScrub { tier: Tier::Host, short: 1 }));
    let work = table.take_scrub_work_in(Tier::Host).unwrap();
    assert_eq!((work.place, work.bytes), (in_host(0), CHUNK));
    assert_eq!(table.take_scrub_work_in(Tier::Card), None);
    table.scrubbed(work.place);
    assert_eq!(table.place(VM, GuestVramAddr(4 * CHUNK)), Ok(Placed { place: in_host(0), new: true }));
    assert_eq!((table.summary().host.scrubbed, table.summary().host.to_scrub), (1, 3));
}

#[test]
fn budget_below_use_only_blocks_new_placements() {
    let mut table = swapping(7, Limits::default());
    table.set_host_budget(2);
    let host = table.summary().host;
    assert_eq!((host.budget, host.used, host.free, host.end), (2, 3, 0, 3));
    let full =
        |result: Result<Placed, Error>| matches!(result, Err(Error::Full { host: Some(Limit::HostBudget(2)), .. }));
    assert!(full(table.place(VM, GuestVramAddr(7 * CHUNK))));
    table.unplace(VM, GuestVramAddr(4 * CHUNK)).unwrap();
    scrub_all(&mut table);
    assert!(full(table.place(VM, GuestVramAddr(7 * CHUNK))), "slot 0 is free, but two slots are still used");
    table.unplace(VM, GuestVramAddr(6 * CHUNK)).unwrap();
    assert_eq!(table.summary().host.end, 3, "it contains data until it is scrubbed");
    scrub_all(&mut table);
    assert_eq!(table.summary().host.end, 2);
    assert_eq!(table.place(VM, GuestVramAddr(7 * CHUNK)), Ok(Placed { place: in_host(0), new: true }));
    table.set_host_budget(u32::MAX);
    assert_eq!(table.summary().host.free, u32::MAX - 2);
}

#[test]
fn the_reserve_takes_an_eviction_without_a_copy_and_drains() {
    let mut table = table(4);
    table.set_host_budget(1);
    table.create_vm(VM, 8 * CHUNK, Limits::default()).unwrap();
    table.set_reserve(1).unwrap();
    place_first(&mut table, 1, 3);
    assert_eq!((table.spare(), table.summary().reserve), (0, 1), "no VM gets chunks of the reserve");
    assert_eq!(table.set_reserve(2).unwrap_err().to_string().matches("1 are free").count(), 1);
    let step = |index, to| Step { vm: VM, index, to };
    assert_eq!(table.start(step(1, To::Reserve)), Ok(None));
    assert_eq!((table.spare(), table.summary().reserve), (1, 0));
    assert_eq!(at(&table, 1), Lookup::Placed(on_card(CHUNK)), "it stays at its place");
    let vm = table.summary().vms[&VM];
    assert_eq!((vm.placed, vm.parked, vm.host, table.is_parked(VM, 1)), (2, 1, 0, true));
    // The only slot is reserved for the chunk in the reserve. No other chunk can get it, even through the reserve.
    let budget = Err(Error::Full { vm: VM, limit: Limit::HostBudget(1), host: None });
    assert_eq!(table.start(step(0, To::Host)), budget.map(Some));
    assert_eq!(table.start(step(0, To::Reserve)), budget.map(Some));
    assert_eq!(table.place(VM, GuestVramAddr(3 * CHUNK)), Ok(Placed { place: on_card(3 * CHUNK), new: true }));
    // The chunk can return only if a card chunk is spare.
    assert!(matches!(table.start(step(1, To::Card)), Err(Error::Full { limit: Limit::Card { .. }, .. })));
    let drain = table.start(step(1, To::Host)).unwrap().unwrap();
    assert_eq!((table.commit_move(drain.id), at(&table, 1)), (Ended::Committed, Lookup::Placed(in_host(0))));
    let summary = table.summary();
    assert_eq!(
        (summary.reserve, summary.parked, summary.to_scrub, table.spare()),
        (1, 0, 1, 0),
        "the reserve is refilled"
    );
}

#[test]
fn a_chunk_comes_back_from_the_reserve_without_a_copy() {
    let mut table = swapping(2, Limits::default());
    table.set_reserve(2).unwrap();
    let step = |to| Step { vm: VM, index: 1, to };
    assert_eq!(table.start(step(To::Reserve)), Ok(None));
    assert_eq!(table.resting(VM, Tier::Card).collect::<Vec<_>>(), [0]);
    assert_eq!(table.resting(VM, Tier::Host).collect::<Vec<_>>(), [1]);
    assert_eq!(table.start(step(To::Reserve)), Err(Error::Settled { vm: VM, index: 1 }));
    assert_eq!(table.begin_move(VM, 1, To::Card), Err(Error::Settled { vm: VM, index: 1 }), "no copy is needed");
    assert_eq!(table.start(step(To::Card)), Ok(None));
    assert_eq!((table.is_parked(VM, 1), table.summary().parked, table.summary().reserve), (false, 0, 2));
    // After an aborted move to host memory, the chunk is still in the reserve. The move of an unplaced chunk has no
    // effect.
    table.start(step(To::Reserve)).unwrap();
    let drain = table.start(step(To::Host)).unwrap().unwrap();
    table.abort_move(drain.id);
    assert_eq!((table.is_parked(VM, 1), table.summary().parked), (true, 1));
    let drain = table.start(step(To::Host)).unwrap().unwrap();
    table.unplace(VM, GuestVramAddr(CHUNK)).unwrap();
    assert_eq!((table.commit_move(drain.id), table.summary().parked), (Ended::Gone, 0));
    assert_eq!((scrub_all(&mut table), table.summary().host.used), (2, 0), "both moves had the same slot");
}

#[test]
fn policies_for_a_full_card_are_known_by_name() {
    for policy in [OnFull::Swap, OnFull::Queue, OnFull::Refuse] {
        assert_eq!(policy.to_string().parse(), Ok(policy));
    }
    assert!("swp".parse::<OnFull>().is_err_and(|text| text.contains("`swap`, `queue` or `refuse`")));
}

#[test]
fn quarantined_chunk_is_not_reused_after_owner_loses_it() {
    let mut table = swapping(2, Limits::default());
    // Quarantine a chunk that has an owner, and a dirty chunk.
    table.quarantine(on_card(0));
    table.unplace(VM, GuestVramAddr(CHUNK)).unwrap();
    table.quarantine(on_card(CHUNK));
    assert_eq!(table.summary().quarantined, 1);
    assert_eq!(at(&table, 0), Lookup::Placed(on_card(0)));
    table.unplace_all(VM);
    scrub_all(&mut table);
    let summary = table.summary();
    assert_eq!((summary.quarantined, summary.free, summary.to_scrub), (2, 2, 0));
    for index in 0..4 {
        table.place(VM, GuestVramAddr(index * CHUNK)).unwrap();
    }
    assert_eq!(at(&table, 0), Lookup::Placed(on_card(2 * CHUNK)));
    assert_eq!(at(&table, 2), Lookup::Placed(in_host(0)), "two chunks of the card remain");
}

#[test]
fn quarantined_chunk_that_was_just_scrubbed_gets_no_owner() {
    let mut table = swapping(2, Limits::default());
    table.unplace_all(VM);
    scrub_all(&mut table);
    let free = table.summary().free;
    // The card's TLBs may still contain a translation to this chunk.
    table.quarantine(on_card(0));
    let summary = table.summary();
    assert_eq!((summary.quarantined, summary.free), (1, free - 1));
    table.place(VM, GuestVramAddr(0)).unwrap();
    assert_eq!(at(&table, 0), Lookup::Placed(on_card(CHUNK)));
    table.unplace_all(VM);
    scrub_all(&mut table);
    assert_eq!(table.summary().free, free - 1);
}

#[test]
fn move_overwrites_chunk_that_waits_to_be_scrubbed() {
    let mut table = swapping(8, Limits::default());
    table.unplace(VM, GuestVramAddr(0)).unwrap();
    let before = table.summary();
    // A newly placed chunk must not contain the old owner's data.
    assert_eq!(table.place(VM, GuestVramAddr(0)), Err(Error::NeedsScrub { tier: Tier::Card, short: 1 }));
    let begun = table.begin_move(VM, 4, To::Card).unwrap();
    assert_eq!(begun.to, on_card(0));
    assert_eq!(table.summary().to_scrub, before.to_scrub - 1);
    assert_eq!(table.commit_move(begun.id), Ended::Committed);
    assert_eq!(scrub_all(&mut table), 1, "only the chunk's old place needs a scrub");
    // After an aborted copy, the slot may contain data of two owners.
    let begun = table.begin_move(VM, 4, To::Host).unwrap();
    table.abort_move(begun.id);
    assert_eq!(table.take_scrub_work().map(|work| work.place), Some(begun.to));
}

#[test]
fn where_a_move_was_to_go_is_quarantined_when_it_is_aborted() {
    let mut table = swapping(1, Limits::default());
    let begun = table.begin_move(VM, 0, To::Host).unwrap();
    table.quarantine(begun.to);
    table.abort_move(begun.id);
    assert_eq!(table.summary().host.quarantined, 1);
    assert_eq!(table.take_scrub_work_in(Tier::Host), None);
    assert_ne!(table.begin_move(VM, 0, To::Host).unwrap().to, begun.to);
}

#[test]
fn a_quarantine_that_breaks_a_guarantee_leaves_nothing_spare() {
    let mut table = swapping(4, Limits { guarantee: 4, ..Limits::default() });
    table.quarantine(on_card(0));
    table.unplace_all(VM);
    scrub_all(&mut table);
    let summary = table.summary();
    assert_eq!((summary.quarantined, summary.promised, summary.free), (1, 4, 3));
    assert_eq!((table.spare(), table.for_mediator(), summary.spare()), (0, 0, 0));
    assert!(table.create_vm(TenantId(2), CHUNK, Limits { guarantee: 1, ..Limits::default() }).is_err());
}
