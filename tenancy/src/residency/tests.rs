//! Tests two tenants with 40 chunks each on a card with 64 chunks, and a third tenant with 4 chunks.

use super::*;
use vram::{CHUNK_BYTES_MIN, Contents, GuestVramAddr, Limits, Mode, OnFull};

const CHUNK: u64 = CHUNK_BYTES_MIN;
const MS: u64 = 1_000_000;
const ONE: TenantId = TenantId(1);
const TWO: TenantId = TenantId(2);
const SMALL: TenantId = TenantId(3);

const ANY: Limits = Limits { quota: u32::MAX, guarantee: 0, swap_cap: u32::MAX, weight: 100, on_full: OnFull::Swap };

/// Creates the card, with quanta of 100 ms for `ONE` and `TWO`.
fn card() -> (ChunkTable, Residency) {
    let mut table = ChunkTable::new(64 * CHUNK, CHUNK, Contents::Zeroed).unwrap();
    table.set_host_budget(64);
    let quanta = QuantaConfig { mode: Mode::Auto, min_ns: 100 * MS, max_ns: 100 * MS, ..QuantaConfig::default() };
    let mut residency = Residency::new(Config::default(), quanta);
    for (tenant, chunks) in [(ONE, 40), (TWO, 40), (SMALL, 4)] {
        table.create_vm(tenant, 64 * CHUNK, ANY).unwrap();
        for index in 0..chunks {
            table.place(tenant, GuestVramAddr(index * CHUNK)).unwrap();
        }
        residency.worked(tenant, 0);
    }
    (table, residency)
}

/// Reports traffic of thrashing tenants until quanta start. Returns the start time and the holds.
fn thrash(table: &ChunkTable, residency: &mut Residency) -> (u64, Holds) {
    for step in 1..200 {
        let now = step * 10 * MS;
        [ONE, TWO, SMALL].into_iter().for_each(|tenant| residency.worked(tenant, now));
        residency.moved(now, 10 * CHUNK, 10 * MS);
        let holds = residency.tick(table, now, |_| 100, None);
        if residency.turn().is_some() {
            return (now, holds);
        }
    }
    panic!("tenants that do not fit together do not take turns");
}

fn params(weight: u32, guarantee_permille: u32) -> VgpuParams {
    VgpuParams { weight, guarantee_permille, ..VgpuParams::default() }
}

#[test]
fn members_are_held_until_memory_of_holder_is_there() {
    let (table, mut residency) = card();
    let (now, holds) = thrash(&table, &mut residency);
    let holder = residency.turn().unwrap().holder;
    let other = if holder == ONE { TWO } else { ONE };
    assert_eq!(holds, [(ONE, true), (TWO, true)], "memory moves first, and the small tenant also fits");
    assert!(residency.is_loading() && residency.is_held(holder) && !residency.is_held(SMALL));
    assert_eq!(residency.wait(other, now), Some((holder, None)));
    assert_eq!(residency.begun(), 1);
    assert_eq!(residency.is_still(&table, now, None), [(holder, false)]);
    assert!(!residency.is_loading() && residency.is_held(other));
    assert_eq!(residency.wait(other, now + 30 * MS), Some((holder, Some(70 * MS))));
    assert_eq!(residency.wait(holder, now), None);
    assert_eq!(residency.is_still(&table, now, None), [], "the quantum has begun");
}

#[test]
fn holds_follow_quanta_and_their_time_is_counted() {
    let (table, mut residency) = card();
    let (begin, _) = thrash(&table, &mut residency);
    let holder = residency.turn().unwrap().holder;
    let other = if holder == ONE { TWO } else { ONE };
    residency.is_still(&table, begin, None);
    let change = begin + 100 * MS;
    [ONE, TWO, SMALL].into_iter().for_each(|tenant| residency.worked(tenant, change));
    let holds = residency.tick(&table, change, |_| 100, None);
    assert_eq!(residency.turn().unwrap().holder, other);
    assert_eq!(holds, [(holder, true)], "all members are held while memory is moving");
    let loaded = change + 20 * MS;
    assert_eq!(residency.is_still(&table, loaded, None), [(other, false)]);
    assert_eq!(residency.held_ns(other, loaded + 50 * MS), 120 * MS);
    assert_eq!(residency.held_ns(holder, loaded + 50 * MS), 70 * MS, "the current hold counts");
    assert_eq!(residency.held_ns(SMALL, loaded), 0);
    residency.forget(holder);
    assert_eq!(residency.held_ns(holder, loaded), 0);
}

#[test]
fn quantum_waits_a_bounded_time_for_more_memory() {
    let (table, mut residency) = card();
    let (begin, _) = thrash(&table, &mut residency);
    // All of the holder's memory is on the card, so no more of it can return.
    assert_eq!((residency.turn().unwrap().holder, table.vms().next().unwrap().1.host), (ONE, 0));
    assert_eq!(residency.is_still(&table, begin, Some(&|_| 0)), [(ONE, false)]);
    let now = begin + 100 * MS;
    [ONE, TWO, SMALL].into_iter().for_each(|tenant| residency.worked(tenant, now));
    residency.tick(&table, now, |_| 100, None);
    let patience = 100 * MS / u64::from(residency.quanta().config().factor);
    assert_eq!(residency.is_still(&table, now, Some(&|_| 0)), []);
    assert_eq!(residency.is_still(&table, now + patience - 1, Some(&|_| 0)), []);
    residency.moves();
    assert_eq!(residency.is_still(&table, now + patience, Some(&|_| 0)), [], "a move restarts the time");
    assert_eq!(residency.is_still(&table, now + 2 * patience, Some(&|_| 0)), [(TWO, false)]);
}

#[test]
fn quantum_does_not_wait_for_memory_that_never_moves() {
    let (table, mut residency) = card();
    let (begin, _) = thrash(&table, &mut residency);
    residency.is_still(&table, begin, None);
    let now = begin + 100 * MS;
    [ONE, TWO, SMALL].into_iter().for_each(|tenant| residency.worked(tenant, now));
    residency.tick(&table, now, |_| 100, None);
    let placed = |tenant| table.vms().find(|(vm, _)| *vm == tenant).map_or(0, |(_, account)| account.placed);
    assert!(table.spare() == 0 && residency.turn().unwrap().holder == TWO);
    assert_eq!(residency.is_still(&table, now, Some(&|tenant| placed(tenant) - u32::from(tenant == ONE))), []);
    assert_eq!(residency.is_still(&table, now, Some(&placed)), [(TWO, false)]);
}

#[test]
fn holder_competes_for_all_members() {
    let (table, mut residency) = card();
    let own = |tenant: TenantId| Some(params([0, 100, 300, 50][tenant.0 as usize], 100));
    assert_eq!(residency.competing(ONE, own), None, "no tenant has a quantum");
    thrash(&table, &mut residency);
    let holder = residency.turn().unwrap().holder;
    let expected = VgpuParams { weight: 400, guarantee_permille: 200, ..VgpuParams::default() };
    assert_eq!(residency.competing(holder, own), Some(expected));
    for tenant in [ONE, TWO, SMALL].into_iter().filter(|tenant| *tenant != holder) {
        assert_eq!(residency.competing(tenant, own), None);
    }
}

#[test]
fn requests_are_planned_before_guarantees_and_returns() {
    let (table, mut residency) = card();
    let unmet = BTreeMap::from([(SMALL, 2)]);
    let planned = residency.plan(&table, 0, Demand { unmet, guarantee: Some(8), ..Demand::default() });
    assert_eq!((planned.steps.len(), &planned.served), (2, &BTreeSet::from([SMALL])));
    let planned = residency.plan(&table, 0, Demand { guarantee: Some(8), ..Demand::default() });
    assert_eq!((planned.steps.len(), planned.served.is_empty()), (8, true));
    residency.moved(0, CHUNK, MS);
    let planned = residency.plan(&table, 0, Demand { only_requests: true, ..Demand::default() });
    assert!(planned.steps.is_empty());
}

#[test]
fn restored_division_keeps_holds() {
    let (table, mut residency) = card();
    let (now, _) = thrash(&table, &mut residency);
    let Residency { balancer, quanta, held, begun, .. } = residency;
    let restored = Residency::restored(balancer, quanta, begun, held);
    assert!(restored.is_loading() && restored.is_held(ONE) && restored.begun() == 1);
    let (table, mut residency) = card();
    thrash(&table, &mut residency);
    residency.is_still(&table, now, None);
    let Residency { balancer, quanta, held, begun, .. } = residency;
    assert!(!Residency::restored(balancer, quanta, begun, held).is_loading());
}
