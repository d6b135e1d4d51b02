//! Tests evictions and returns. `random` tests random sequences of operations.

mod random;
mod world;

use super::*;
use crate::{CHUNK_BYTES_MIN, Limits, OnFull, Place, Tier};
use world::{MS, World};

const CHUNK: u64 = CHUNK_BYTES_MIN;

/// Creates a card with `chunks` chunks, and VMs with 64 chunks each and the given limits. VM numbers start at 1.
fn world(chunks: u32, vms: &[Limits]) -> World {
    let mut world = World::new(chunks, 1000, Config::default());
    for (vm, &limits) in (1..).zip(vms) {
        world.table.create_vm(TenantId(vm), 64 * CHUNK, limits).unwrap();
    }
    world
}

const ANY: Limits = Limits { quota: u32::MAX, guarantee: 0, swap_cap: u32::MAX, weight: 100, on_full: OnFull::Swap };

fn pin(world: &mut World, vm: u32, first: u64, chunks: u64) -> Result<(), PinError> {
    world.balancer.pin(&world.table, TenantId(vm), GuestVramAddr(first * CHUNK), chunks * CHUNK, true)
}

#[test]
fn the_second_allocator_gets_half_as_in_gpuswaps_figure_4() {
    let mut world = world(43, &[ANY, ANY]);
    assert_eq!(world.use_chunks(1, 0..64), 21, "43 chunks are on the card, the others in host memory");
    for (index, (first, second)) in
        (0..64u64).map(|index| (index, (43u32.saturating_sub(index as u32 + 1).max(22), (index as u32 + 1).min(21))))
    {
        world.ask(2, index).unwrap();
        assert_eq!((world.card(1), world.card(2)), (first, second), "after {} chunks", index + 1);
    }
    assert_eq!(world.rest(&[1, 2]), 0, "21 and 22 of 21.5 chunks each: no VM differs by a whole chunk");
    world.destroy(2).unwrap();
    assert_eq!(world.rest(&[1]), 21, "the other VM's chunks are returned");
    assert_eq!(world.card(1), 43);
}

#[test]
fn a_request_for_many_chunks_is_planned_as_a_whole() {
    let mut world = world(100, &[ANY, ANY]);
    world.use_chunks(1, 0..60);
    world.use_chunks(2, 0..40);
    world.balancer.set_config(Config { steps_max: 8, ..Config::default() });
    // The VM is entitled to 10 of the 24 additional chunks. The other 14 are placed in host memory. The 10 evictions do
    // not fit in one plan of 8 steps.
    let request = Some(Request { by: By::Vm(TenantId(2)), chunks: 24 });
    assert_eq!(world.plan(request).len(), 8);
    assert_eq!(world.plan(request).len(), 2);
    assert_eq!((world.card(1), world.table.spare()), (50, 10));
    assert_eq!(world.plan(request), []);
    let everything = Some(Request { by: By::Vm(TenantId(2)), chunks: u32::MAX });
    assert_eq!(world.plan(everything), [], "its share is half of the card for any number of requested chunks");
}

#[test]
fn working_set_is_at_most_the_quota() {
    let mut world = world(40, &[Limits { quota: 8, ..ANY }, ANY]);
    for vm in [1, 2] {
        world.use_chunks(vm, 0..30);
        world.balancer.active(TenantId(vm), world.now);
    }
    let sets = world.balancer.active_vms(&world.table, world.now, |_| 100).sets;
    let sets: Vec<_> = sets.values().map(|set| (set.bytes / CHUNK, set.resident / CHUNK)).collect();
    assert_eq!(sets, [(8, 8), (30, 0)], "the first VM has its maximum");
}

#[test]
fn weights_and_guarantees_divide_the_card() {
    let mut world = world(40, &[Limits { weight: 300, ..ANY }, ANY, Limits { guarantee: 20, ..ANY }]);
    for vm in [1, 2, 3] {
        world.use_chunks(vm, 0..60);
    }
    world.rest(&[1, 2, 3]);
    assert_eq!((world.card(1), world.card(2), world.card(3)), (15, 5, 20));
    let third = world.balancer.entitlements(&world.table, world.now)[&TenantId(3)];
    assert_eq!(third, Entitlement { floor: 20, ceil: 20 });
}

#[test]
fn a_lowered_quota_is_met_at_once_and_kills_nothing() {
    let mut world = world(40, &[ANY, ANY]);
    world.use_chunks(1, 0..40);
    world.table.set_limits(TenantId(1), Limits { quota: 10, ..ANY }).unwrap();
    assert_eq!(world.plan(None).len(), 30);
    let account = world.table.summary().vms[&TenantId(1)];
    assert_eq!((account.placed, account.host), (10, 30));
    assert_eq!(world.rest(&[1]), 0, "no chunk is returned despite spare chunks");
    assert!(matches!(world.ask(1, 50).unwrap().place, Place::Host(_)), "new chunks are placed in host memory");
    world.table.set_limits(TenantId(1), ANY).unwrap();
    world.unsettle();
    assert_eq!((world.rest(&[1]), world.card(1)), (30, 40));
}

#[test]
fn a_vm_that_may_not_swap_gives_nothing_and_is_refused() {
    let mut world = world(10, &[Limits::UNRESERVED, Limits { on_full: OnFull::Queue, ..ANY }]);
    world.use_chunks(1, 0..10);
    assert!(matches!(world.ask(1, 10), Err(Error::Full { .. })));
    assert!(matches!(world.ask(2, 0), Err(Error::Full { .. })), "no chunk of the first VM can be evicted");
    world.table.set_limits(TenantId(1), Limits { swap_cap: 3, ..Limits::UNRESERVED }).unwrap();
    for index in 0..3 {
        assert!(matches!(world.ask(2, index).unwrap().place, Place::Card(_)));
    }
    assert!(matches!(world.ask(2, 3), Err(Error::Full { .. })), "its swap cap is used up");
}

#[test]
fn an_idle_vm_gives_way_to_an_active_one_down_to_its_guarantee() {
    let mut world = world(20, &[Limits { guarantee: 4, ..ANY }, ANY]);
    world.use_chunks(1, 0..20);
    world.use_chunks(2, 0..20);
    assert_eq!((world.card(1), world.card(2)), (10, 10));
    world.rest(&[2]);
    assert_eq!((world.card(1), world.card(2)), (4, 16));
    world.rest(&[1, 2]);
    assert_eq!((world.card(1), world.card(2)), (10, 10), "it gets its share when it works again");
    world.destroy(2).unwrap();
    world.rest(&[]);
    assert_eq!(world.card(1), 20, "no other VM requests the chunks");
}

#[test]
fn vm_keeps_returned_memory_for_a_while_despite_requests() {
    let mut world = world(20, &[ANY, Limits { weight: 300, ..ANY }]);
    world.use_chunks(1, 0..20);
    world.use_chunks(2, 0..20);
    world.rest(&[1, 2]);
    // The second VM frees all of its memory, and the first one's chunks are returned from host memory.
    for index in 0..20 {
        world.table.unplace(TenantId(2), GuestVramAddr(index * CHUNK)).unwrap();
    }
    world.now += 50 * MS;
    world.balancer.active(TenantId(1), world.now);
    world.plan(None);
    assert_eq!(world.card(1), 20);
    let came = world.table.summary().vms[&TenantId(1)].moved_in;
    assert!(came > 0);
    // The second VM requests its whole share. It immediately gets the chunks that have been resident long enough, and
    // the others later.
    world.now += 5 * MS;
    let request = Some(Request { by: By::Vm(TenantId(2)), chunks: 20 });
    assert_eq!(world.plan(request).len(), 5, "of 15");
    world.now += 20 * MS;
    assert_eq!(world.plan(request).len(), 10);
}

#[test]
fn a_chunk_that_has_just_come_does_not_go_again() {
    let mut world = world(20, &[ANY, ANY]);
    world.use_chunks(1, 0..20);
    world.use_chunks(2, 0..20);
    world.rest(&[1, 2]);
    // The second VM frees memory and immediately allocates it again. It regains the chunks that the first VM gained in
    // between, but only after they have settled.
    for index in 0..15 {
        world.table.unplace(TenantId(2), GuestVramAddr(index * CHUNK)).unwrap();
    }
    let before = world.table.summary().vms[&TenantId(1)].moved_in;
    world.now += 50 * MS;
    world.plan(None);
    let came = world.table.summary().vms[&TenantId(1)].moved_in - before;
    assert!(came > 0, "the VM gains chunks that the other VM has freed");
    world.table.set_limits(TenantId(2), Limits { weight: 10_000, ..ANY }).unwrap();
    world.table.set_limits(TenantId(1), Limits { quota: 20, ..ANY }).unwrap();
    world.now += 50 * MS;
    let steps = world.plan(None);
    assert!(steps.iter().all(|step| step.vm != TenantId(1) || step.to == To::Card), "{steps:?}");
}

#[test]
fn pinned_chunks_stay_and_are_part_of_the_guarantee() {
    let mut world = world(20, &[Limits { guarantee: 5, ..ANY }, Limits { weight: 100_000, ..ANY }]);
    world.use_chunks(1, 0..20);
    pin(&mut world, 1, 0, 3).unwrap();
    pin(&mut world, 1, 2, 3).unwrap();
    assert_eq!(world.balancer.pinned(TenantId(1)), 5);
    let refused = pin(&mut world, 1, 5, 1).unwrap_err();
    assert_eq!(refused, PinError::Guarantee { vm: TenantId(1), pinned: 6, guarantee: 5 });
    assert!(matches!(pin(&mut world, 1, 60, 5), Err(PinError::Range(Error::OutOfRange { .. }))));
    assert!(matches!(pin(&mut world, 9, 0, 1), Err(PinError::Range(Error::NoSuchVm(_)))));
    world.use_chunks(2, 0..60);
    world.rest(&[1, 2]);
    let left: Vec<u32> = world.table.resting(TenantId(1), Tier::Card).collect();
    assert_eq!(left, [0, 1, 2, 3, 4]);
    // Lowering a guarantee unpins chunks.
    world.table.set_limits(TenantId(1), Limits { guarantee: 2, ..ANY }).unwrap();
    world.unsettle();
    world.rest(&[1, 2]);
    assert_eq!(world.balancer.pinned(TenantId(1)), 2);
    assert_eq!(world.table.resting(TenantId(1), Tier::Card).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn pinned_chunks_come_back_first() {
    let mut world = world(4, &[Limits { guarantee: 2, ..ANY }]);
    world.use_chunks(1, 0..10);
    pin(&mut world, 1, 8, 2).unwrap();
    for index in 0..2 {
        world.table.unplace(TenantId(1), GuestVramAddr(index * CHUNK)).unwrap();
    }
    world.rest(&[1]);
    assert_eq!(world.table.resting(TenantId(1), Tier::Card).collect::<Vec<_>>(), [2, 3, 8, 9]);
}

#[test]
fn policies_choose_victims_and_can_be_changed() {
    let mut world = world(8, &[ANY, ANY]);
    world.use_chunks(1, 0..8);
    let at = |index: u64| GuestVramAddr(index * CHUNK);
    world.balancer.set_priority(&world.table, TenantId(1), at(3), CHUNK + 1, 7).unwrap();
    world.balancer.set_accesses(&world.table, TenantId(1), at(0), 64 * CHUNK, 100).unwrap();
    world.balancer.set_accesses(&world.table, TenantId(1), at(6), 1, 1).unwrap();
    world.balancer.touched(&world.table, TenantId(1), at(0), CHUNK).unwrap();
    world.balancer.arrived(&world.table, TenantId(1), at(5)).unwrap();
    let outside = Err(Error::OutOfRange { vm: TenantId(1), address: at(64) });
    assert_eq!(world.balancer.wanted(&world.table, TenantId(1), at(64)), outside);
    assert_eq!(world.balancer.touched(&world.table, TenantId(1), at(64), 1), outside);
    assert_eq!(world.balancer.set_priority(&world.table, TenantId(3), at(0), 1, 1), Err(Error::NoSuchVm(TenantId(3))));
    let mut evicted = Vec::new();
    for (policy, index) in
        [(VictimPolicy::Priority, 0), (VictimPolicy::Profiled, 1), (VictimPolicy::Clock, 2), (VictimPolicy::Loops, 3)]
    {
        world.balancer.set_policy(policy);
        world.ask(2, index).unwrap();
        evicted.extend(world.table.resting(TenantId(1), Tier::Host).find(|index| !evicted.contains(index)));
    }
    assert_eq!(evicted, [3, 6, 1, 5]);
}

#[test]
fn reserve_is_used_first_and_drains_when_idle() {
    let mut world = world(10, &[ANY, ANY]);
    world.table.set_reserve(2).unwrap();
    world.use_chunks(1, 0..8);
    let step = |world: &mut World| world.plan(Some(Request { by: By::Vm(TenantId(2)), chunks: 3 }));
    let to: Vec<To> = step(&mut world).into_iter().map(|step| step.to).collect();
    assert_eq!(to, [To::Reserve, To::Reserve, To::Host], "two chunks without a copy");
    world.use_chunks(2, 0..3);
    world.now += 50 * MS;
    assert!(world.plan(None).iter().all(|step| step.to == To::Host), "it drains");
    assert_eq!((world.table.summary().parked, world.table.summary().reserve), (0, 2));
    // Chunks in the reserve return without a copy when other chunks become free.
    world.use_chunks(2, 3..4);
    assert_eq!(world.table.summary().parked, 1);
    world.destroy(2).unwrap();
    world.now += 300 * MS;
    let before = world.table.summary().vms[&TenantId(1)].moved_in;
    let steps = world.plan(None);
    let after = world.table.summary();
    assert_eq!((steps.len(), after.parked, after.vms[&TenantId(1)].moved_in - before), (4, 0, 3));
}

#[test]
fn mediator_claim_on_free_chunks_counts_in_no_share() {
    let mut world = world(10, &[ANY, Limits { on_full: OnFull::Queue, ..ANY }]);
    world.table.claim(2);
    world.use_chunks(1, 0..20);
    assert_eq!((world.card(1), world.table.spare()), (8, 0));
    // If the shares included the two claimed chunks, the first VM would be below its share, and the second VM would
    // wait forever.
    for index in 0..4 {
        assert!(world.ask(2, index).is_ok(), "chunk {index}");
    }
    assert_eq!((world.card(1), world.card(2), world.table.kept_for_mediator()), (4, 4, 2));
}

#[test]
fn the_mediator_and_a_guarantee_get_room() {
    let mut world = world(20, &[ANY, ANY]);
    world.table.set_aside(2).unwrap();
    world.use_chunks(1, 0..18);
    assert_eq!(world.plan(Some(Request { by: By::Mediator, chunks: 2 })), [], "these chunks are already set aside");
    assert_eq!(world.plan(Some(Request { by: By::Mediator, chunks: 5 })).len(), 3);
    assert_eq!(world.table.for_mediator(), 5);
    let limits = Limits { guarantee: 10, ..ANY };
    let Err(Error::Promise { wanted, now, .. }) = world.table.set_limits(TenantId(2), limits) else {
        panic!("the evictions do not free enough chunks")
    };
    let more = wanted - now + world.table.spare();
    assert_eq!(world.plan(Some(Request { by: By::Guarantee, chunks: more })).len(), 7);
    world.table.set_limits(TenantId(2), limits).unwrap();
    // Other VMs' guaranteed chunks are not evicted for a new guarantee.
    world.table.set_limits(TenantId(1), Limits { guarantee: 8, ..ANY }).unwrap();
    assert_eq!(world.plan(Some(Request { by: By::Guarantee, chunks: 1 })), []);
}

#[test]
fn the_holder_of_a_turn_has_the_card_and_the_others_wait() {
    let mut world = world(20, &[ANY, ANY, ANY]);
    world.use_chunks(3, 0..2);
    world.use_chunks(1, 0..18);
    world.use_chunks(2, 0..18);
    world.rest(&[1, 2, 3]);
    assert_eq!((world.card(1), world.card(2), world.card(3)), (9, 9, 2));
    for holder in [1, 2, 1] {
        let turn = Turn { members: vec![TenantId(1), TenantId(2)], holder: TenantId(holder), quantum_ns: 1 };
        world.balancer.set_turn(Some(turn));
        world.unsettle();
        world.balancer.active(TenantId(holder), world.now);
        world.balancer.active(TenantId(3), world.now);
        world.plan(None);
        assert_eq!(
            (world.card(holder), world.card(3 - holder), world.card(3)),
            (18, 0, 2),
            "all moves are planned immediately"
        );
    }
    world.balancer.set_turn(None);
    world.unsettle();
    world.rest(&[1, 2, 3]);
    assert_eq!((world.card(1), world.card(2)), (9, 9));
}

#[test]
fn moves_under_way_are_not_planned_again() {
    let mut table = ChunkTable::new(8 * CHUNK, CHUNK, crate::Contents::Zeroed).unwrap();
    table.set_host_budget(100);
    let mut balancer = Balancer::new(Config::default());
    for vm in [1, 2] {
        table.create_vm(TenantId(vm), 64 * CHUNK, ANY).unwrap();
    }
    for index in 0..8 {
        table.place(TenantId(1), GuestVramAddr(index * CHUNK)).unwrap();
    }
    let request = Some(Request { by: By::Vm(TenantId(2)), chunks: 3 });
    let steps = balancer.plan(&table, 0, request);
    assert_eq!(steps.len(), 3);
    let moves: Vec<_> = steps.iter().map(|&step| table.start(step).unwrap().unwrap()).collect();
    assert_eq!(balancer.plan(&table, 0, request), [], "three chunks will be spare");
    table.commit_move(moves[0].id);
    table.abort_move(moves[1].id);
    assert_eq!(balancer.plan(&table, 0, request).len(), 1, "one chunk has stayed");
    assert!(!table.is_gone(moves[2].id));
    table.unplace(TenantId(1), table.guest_address(moves[2].index)).unwrap();
    assert!(table.is_gone(moves[2].id) && table.is_gone(moves[0].id));
}

#[test]
fn pending_eviction_for_request_is_not_repeated() {
    let mut table = ChunkTable::new(8 * CHUNK, CHUNK, crate::Contents::Zeroed).unwrap();
    table.set_host_budget(100);
    let mut balancer = Balancer::new(Config::default());
    for (vm, chunks) in [(1, 7), (3, 7), (2, 0)] {
        table.create_vm(TenantId(vm), 64 * CHUNK, ANY).unwrap();
        (0..chunks).for_each(|index| _ = table.place(TenantId(vm), GuestVramAddr(index * CHUNK)).unwrap());
    }
    // The first VM stays above its share, because the third VM is below its own share.
    let request = Some(Request { by: By::Vm(TenantId(2)), chunks: 1 });
    let steps = balancer.plan(&table, 0, request);
    assert_eq!(steps.len(), 1);
    table.start(steps[0]).unwrap();
    assert_eq!(balancer.plan(&table, 0, request), [], "one chunk will be spare");
}

#[test]
fn chunks_owed_to_raised_guarantee_return() {
    let mut world = world(10, &[ANY, Limits { guarantee: 4, ..ANY }]);
    world.use_chunks(1, 0..10);
    assert_eq!(world.card(1), 6, "four chunks are reserved for the other VM");
    // The first VM, which has chunks in host memory, gets the second VM's guarantee while no chunk is spare.
    world.table.set_limits(TenantId(2), ANY).unwrap();
    world.table.set_limits(TenantId(1), Limits { guarantee: 10, ..ANY }).unwrap();
    assert_eq!(world.table.spare(), 0);
    assert_eq!((world.rest(&[1]), world.card(1)), (4, 10));
}

#[test]
fn vm_that_gains_chunks_in_a_round_gives_none() {
    let limits = |quota, guarantee, weight| Limits { quota, guarantee, weight, ..ANY };
    let vms = [limits(13, 0, 1), limits(4, 1, 3), limits(8, 0, 4), limits(4, 3, 1)];
    let mut world = world(24, &vms);
    world.balancer.set_config(Config { idle_after_ns: 300 * MS, ..Config::default() });
    world.use_chunks(2, 0..4);
    world.now += 50 * MS;
    world.use_chunks(1, 0..13);
    world.use_chunks(3, 0..8);
    // The second VM becomes idle first and loses three chunks. When the third VM is also idle, the second one is
    // entitled to them again, but the chunks must settle first.
    world.rest(&[1]);
    assert_eq!(
        [1, 2, 3, 4].map(|vm| world.card(vm)),
        [13, 3, 5, 0],
        "13 chunks are divided into 3.4, 4.6, and pinned chunks"
    );
}

#[test]
fn a_vm_that_is_gone_is_forgotten() {
    let mut world = world(8, &[Limits { guarantee: 4, ..ANY }]);
    world.use_chunks(1, 0..8);
    pin(&mut world, 1, 0, 2).unwrap();
    world.destroy(1).unwrap();
    // Another VM with the same number and size is created before the next plan.
    world.table.create_vm(TenantId(1), 64 * CHUNK, ANY).unwrap();
    assert_eq!(
        (world.balancer.pinned(TenantId(1)), world.balancer.known.len(), world.balancer.active.len()),
        (0, 0, 0)
    );
}
