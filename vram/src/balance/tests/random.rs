//! Tests random requests, frees, and limit changes, followed by a period without requests. Compares the shares with a
//! separate water-filling computation.

use super::CHUNK;
use super::world::{MS, World};
use crate::balance::{Balancer, By, Config, Request, SavedBalancer};
use crate::victim::VictimPolicy;
use crate::{ChunkTable, GuestVramAddr, Limits, OnFull, SavedChunks, TenantId};
use proptest::prelude::*;

const CHUNKS: u32 = 24;

#[derive(Clone, Debug)]
enum Op {
    Create(u32, u64, Limits),
    SetLimits(u32, Limits),
    Destroy(u32),
    Use(u32, u64, u64),
    Free(u32, u64),
    Touch(u32, u64),
    Pin(u32, u64, bool),
    Active(u32),
    Wait(u64),
    Mediator(u32),
    Reserve(u32),
    Policy(VictimPolicy),
}

fn limits(swap_cap: impl Strategy<Value = u32> + 'static) -> impl Strategy<Value = Limits> {
    let quota = prop_oneof![1 => 4..20u32, 1 => Just(u32::MAX)];
    (quota, 0..5u32, swap_cap, 1..5u32, prop_oneof![3 => Just(OnFull::Swap), 1 => Just(OnFull::Queue)]).prop_map(
        |(quota, guarantee, swap_cap, weight, on_full)| Limits { quota, guarantee, swap_cap, weight, on_full },
    )
}

fn op(swap_cap: impl Strategy<Value = u32> + Clone + 'static) -> impl Strategy<Value = Op> {
    let vm = || 0..5u32;
    prop_oneof![
        6 => (vm(), 1..40u64, limits(swap_cap.clone())).prop_map(|(vm, chunks, limits)| Op::Create(vm, chunks, limits)),
        2 => (vm(), limits(swap_cap)).prop_map(|(vm, limits)| Op::SetLimits(vm, limits)),
        1 => vm().prop_map(Op::Destroy),
        12 => (vm(), 0..40u64, 1..12u64).prop_map(|(vm, from, count)| Op::Use(vm, from, count)),
        3 => (vm(), 0..40u64).prop_map(|(vm, index)| Op::Free(vm, index)),
        2 => (vm(), 0..40u64).prop_map(|(vm, index)| Op::Touch(vm, index)),
        2 => (vm(), 0..40u64, any::<bool>()).prop_map(|(vm, index, pinned)| Op::Pin(vm, index, pinned)),
        4 => vm().prop_map(Op::Active),
        6 => (1..120u64).prop_map(|ms| Op::Wait(ms * MS)),
        1 => (1..3u32).prop_map(Op::Mediator),
        1 => (0..4u32).prop_map(Op::Reserve),
        1 => prop::sample::select(VictimPolicy::ALL.to_vec()).prop_map(Op::Policy),
    ]
}

fn config() -> impl Strategy<Value = Config> {
    (prop::sample::select(VictimPolicy::ALL.to_vec()), any::<u64>(), 0..4u32, 2..40usize).prop_map(
        |(policy, seed, low_water, steps_max)| Config {
            policy,
            seed,
            low_water,
            steps_max,
            idle_after_ns: 300 * MS,
            ..Config::default()
        },
    )
}

/// Sets a VM's limits. If the guarantee is rejected, frees chunks and tries again, as the mediator does.
fn set_limits(world: &mut World, vm: u32, limits: Limits) {
    world.unsettle();
    if let Err(crate::Error::Promise { wanted, now, .. }) = world.table.set_limits(TenantId(vm), limits) {
        let more = wanted - now + world.table.spare();
        world.plan(Some(Request { by: By::Guarantee, chunks: more }));
        let _ = world.table.set_limits(TenantId(vm), limits);
    }
    // Chunks that exceed a new quota are evicted immediately.
    world.plan(None);
    world.unsettle();
}

fn apply(world: &mut World, op: Op) {
    match op {
        Op::Create(vm, chunks, limits) => {
            let bytes = chunks * CHUNK;
            if world.table.create_vm(TenantId(vm), bytes, limits).is_err() && world.table.limits(TenantId(vm)).is_none()
            {
                world.plan(Some(Request { by: By::Guarantee, chunks: limits.guarantee }));
                let _ = world.table.create_vm(TenantId(vm), bytes, limits);
            }
        }
        Op::SetLimits(vm, limits) => set_limits(world, vm, limits),
        Op::Destroy(vm) => {
            let _ = world.destroy(vm);
            world.unsettle();
        }
        Op::Use(vm, from, count) => {
            for index in from..from + count {
                let _ = world.ask(vm, index);
            }
        }
        Op::Free(vm, index) => {
            let _ = world.table.unplace(TenantId(vm), GuestVramAddr(index * CHUNK));
        }
        Op::Touch(vm, index) => {
            let _ = world.balancer.touched(&world.table, TenantId(vm), GuestVramAddr(index * CHUNK), 1);
            let _ =
                world.balancer.set_priority(&world.table, TenantId(vm), GuestVramAddr(index * CHUNK), 1, index as u8);
        }
        Op::Pin(vm, index, pinned) => {
            let _ = world.balancer.pin(&world.table, TenantId(vm), GuestVramAddr(index * CHUNK), 1, pinned);
        }
        Op::Active(vm) => world.balancer.active(TenantId(vm), world.now),
        Op::Wait(ns) => {
            world.now += ns;
            world.plan(None);
        }
        Op::Mediator(chunks) => {
            world.plan(Some(Request { by: By::Mediator, chunks }));
        }
        Op::Reserve(chunks) => {
            let _ = world.table.set_reserve(chunks);
        }
        Op::Policy(policy) => world.balancer.set_policy(policy),
    }
}

/// Computes each VM's share from the accounts alone, by bisection in floating point. VMs in `busy` take priority.
fn shares(world: &World, busy: &[u32]) -> Vec<(TenantId, f64)> {
    let summary = world.table.summary();
    let low_water = world.balancer.config().low_water.min(summary.spare());
    let kept = summary.mediator + summary.set_aside + (summary.reserve + summary.parked) + low_water;
    let chunks = f64::from(summary.total - kept);
    let vms: Vec<_> = summary
        .vms
        .iter()
        .map(|(&vm, account)| {
            let most =
                (account.placed + account.parked + account.host).min(account.limits.quota).max(account.guarantee);
            (vm, f64::from(account.limits.weight), f64::from(account.guarantee), f64::from(most))
        })
        .collect();
    let is_busy = |vm: TenantId| busy.contains(&vm.0);
    let fill = |chunks: f64, of: &dyn Fn(TenantId) -> Option<(f64, f64)>| {
        let at = |level: f64| {
            let bounds = |vm: &(TenantId, f64, f64, f64)| of(vm.0).unwrap_or((vm.2, vm.3));
            vms.iter().map(|vm| (vm.0, (level * vm.1).max(bounds(vm).0).min(bounds(vm).1))).collect::<Vec<_>>()
        };
        let (mut low, mut high) = (0.0, 1e4);
        for _ in 0..100 {
            let level = (low + high) / 2.0;
            let sum: f64 = at(level).iter().map(|(_, share)| share).sum();
            (low, high) = if sum < chunks { (level, high) } else { (low, level) };
        }
        at(high)
    };
    let claims: std::collections::BTreeMap<_, _> = vms.iter().map(|vm| (vm.0, (vm.2, vm.3))).collect();
    let urgent: f64 = vms.iter().map(|vm| if is_busy(vm.0) { vm.3 } else { vm.2 }).sum();
    if urgent <= chunks {
        fill(chunks, &|vm| is_busy(vm).then(|| (claims[&vm].1, claims[&vm].1)))
    } else {
        fill(chunks, &|vm| (!is_busy(vm)).then(|| (claims[&vm].0, claims[&vm].0)))
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    /// Checks that the balancer converges if host memory is sufficient: each VM is at most one chunk from its share,
    /// has the used part of its guarantee on the card, and respects its quota.
    #[test]
    fn at_rest_no_one_is_off_by_more_than_a_chunk(
        config in config(),
        ops in prop::collection::vec(op(Just(u32::MAX)), 1..60),
        busy in prop::collection::vec(0..5u32, 0..5),
    ) {
        let mut world = World::new(CHUNKS, 1000, config);
        for op in ops {
            apply(&mut world, op);
        }
        world.rest(&busy);
        let accounts = world.table.summary().vms;
        let shares = shares(&world, &busy);
        for &(vm, share) in &shares {
            let account = accounts[&vm];
            let used = account.placed + account.parked + account.host;
            // Unused chunks that are reserved for a VM count as used.
            let card = f64::from(account.placed.max(account.guarantee));
            prop_assert!((card - share).abs() <= 1.0 + 1e-6, "VM {vm}: {card}, share {share}: {accounts:?} {shares:?}");
            prop_assert!(account.placed >= account.guarantee.min(used), "VM {vm} is below its guarantee: {account:?}");
            prop_assert!(account.placed <= account.limits.quota);
        }
        let summary = world.table.summary();
        let spare = world.table.spare();
        prop_assert!(spare <= world.balancer.config().low_water || summary.vms.values().all(|vm| {
            vm.host + vm.parked == 0 || vm.placed >= vm.limits.quota
        }), "{} chunks are spare while some are in host memory", spare);
        prop_assert_eq!(summary.parked, 0, "the reserve has drained");
    }

    /// Checks that saving and restoring a balancer does not change its plans. The `loops` policy is excluded because
    /// its information is not saved.
    #[test]
    fn restored_plans_are_the_same(
        config in config().prop_filter("a policy whose information is saved", |config| config.policy != VictimPolicy::Loops),
        ops in prop::collection::vec((op(0..30u32), any::<bool>()), 1..60),
    ) {
        let ops = ops.into_iter().filter(|(op, _)| !matches!(op, Op::Policy(VictimPolicy::Loops)));
        let (mut world, mut other) = (World::new(CHUNKS, 40, config), World::new(CHUNKS, 40, config));
        for (op, restore) in ops {
            apply(&mut world, op.clone());
            apply(&mut other, op);
            if restore {
                let fail = |why: saved_state::Invalid| TestCaseError::fail(why.to_string());
                let (table, balancer) = (other.table.save(), other.balancer.save());
                let bytes = postcard::to_allocvec(&(&table, &balancer)).unwrap();
                let (table, balancer): (SavedChunks, SavedBalancer) = postcard::from_bytes(&bytes).unwrap();
                other.table = ChunkTable::try_from(table).map_err(fail)?;
                other.balancer = Balancer::restored(balancer, &other.table).map_err(fail)?;
            }
            prop_assert_eq!(other.table.save(), world.table.save());
            prop_assert_eq!(other.balancer.save(), world.balancer.save());
        }
    }

    /// Checks that a corrupted saved balancer is either rejected or harmless.
    #[test]
    fn edited_balancers_never_panic(
        config in config(),
        ops in prop::collection::vec(op(0..30u32), 1..30),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut world = World::new(CHUNKS, 40, config);
        for op in ops {
            apply(&mut world, op);
        }
        let mut bytes = postcard::to_allocvec(&world.balancer.save()).unwrap();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let Ok((saved, _)) = postcard::take_from_bytes::<SavedBalancer>(&bytes) else { return Ok(()) };
        let Ok(mut balancer) = Balancer::restored(saved, &world.table) else { return Ok(()) };
        for request in [None, Some(Request { by: By::Vm(TenantId(1)), chunks: 3 })] {
            let _ = balancer.plan(&world.table, world.now + 1000 * MS, request);
        }
        let _ = balancer.entitlements(&world.table, world.now);
        let _ = balancer.touched(&world.table, TenantId(1), GuestVramAddr(0), 3 * CHUNK);
        let _ = balancer.set_priority(&world.table, TenantId(1), GuestVramAddr(0), 3 * CHUNK, 1);
    }

    /// Checks that the balancer also converges with little host memory and low swap caps, that every planned step can
    /// be executed, and that limits are respected.
    #[test]
    fn it_rests_whatever_is_exhausted(
        config in config(),
        ops in prop::collection::vec(op(0..8u32), 1..60),
        host in 0..16u32,
    ) {
        let mut world = World::new(CHUNKS, host, config);
        for op in ops {
            apply(&mut world, op);
            for (_, account) in world.table.vms() {
                prop_assert!(account.host + account.parked <= account.limits.swap_cap.max(account.host_peak));
            }
        }
        world.rest(&[0, 1]);
        for (vm, account) in world.table.vms() {
            let used = account.placed + account.parked + account.host;
            prop_assert!(account.placed >= account.guarantee.min(used), "VM {} is below its guarantee", vm);
        }
        prop_assert!(world.table.summary().host.used <= host);
    }
}
