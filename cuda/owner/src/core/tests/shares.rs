//! Tests the time shares of tenants whose memory does not fit on the card together, with fixed and arbitrary settings.

use super::*;
use proptest::prelude::*;

/// Number of chunks that fit on the card.
const CARD: u64 = 64;

/// A tenant that always has work.
#[derive(Clone, Copy, Debug)]
struct Busy {
    weight: u32,
    /// Number of chunks that its program allocates.
    chunks: u32,
    quota: u32,
    guarantee: u32,
}

impl Busy {
    const fn new(weight: u32, chunks: u32) -> Self {
        Self { weight, chunks, quota: u32::MAX, guarantee: 0 }
    }
}

/// Runs the tenants for `seconds`. Returns each tenant's share of the time, in permille.
fn shares(tenants: &[Busy], seconds: u64) -> (World, Vec<u64>) {
    let mut world = World::new(CARD, 512);
    let config = world.core.config().clone();
    // Use short quanta, because the measurement may end in the middle of a cycle.
    let quanta = vram::QuantaConfig { max_ns: 2_000 * MS, ..config.quanta };
    world.core.tune(config.time, config.balance, quanta, config.host_bytes).expect("the request is valid");
    let mut sessions = Vec::new();
    for (at, tenant) in tenants.iter().enumerate() {
        let limits = Limits { quota: tenant.quota, guarantee: tenant.guarantee, ..Limits::default() };
        let name = format!("t{at}");
        let time = sched::VgpuParams::weight(tenant.weight);
        world.core.add_tenant(TenantSpec { time, ..spec(&name, 256, limits) }).expect("the request is valid");
        sessions.push(world.connect(&name));
    }
    for (session, tenant) in sessions.iter().zip(tenants) {
        world.ask(*session, 1, tenant.chunks);
        world.say(*session, FromTenant::Waiting { card: 0 });
    }
    // The first quanta end within this time.
    world.pass(20_000 * MS);
    let mut ran = vec![0u64; tenants.len()];
    for _ in 0..seconds * 200 {
        world.pass(5 * MS);
        for (at, session) in sessions.iter().enumerate() {
            ran[at] += u64::from(world.programs[session].run.is_some());
        }
    }
    world.check();
    let sum: u64 = ran.iter().sum();
    (world, ran.into_iter().map(|of| of * 1000 / sum.max(1)).collect())
}

fn assert_near(shares: &[u64], expected: &[u64]) {
    let near = shares.iter().zip(expected).all(|(share, expected)| share.abs_diff(*expected) <= 40);
    assert!(near, "{shares:?} instead of {expected:?} permille");
}

#[test]
fn quota_that_makes_sets_fit_ends_memory_quanta() {
    let held = Busy { quota: 16, ..Busy::new(100, 48) };
    let (world, shares) = shares(&[held, Busy::new(300, 48)], 60);
    assert_eq!(world.core.memory_turn(), None, "16 and 48 chunks fit");
    assert_near(&shares, &[250, 750]);
}

#[test]
fn memory_quanta_are_as_long_as_weights_say() {
    let (world, shares) = shares(&[Busy::new(100, 48), Busy::new(300, 48)], 120);
    assert!(world.core.memory_turn().is_some());
    assert_near(&shares, &[250, 750]);
}

#[test]
fn guaranteed_memory_stays_and_its_tenant_never_waits() {
    let sure = Busy { guarantee: 48, ..Busy::new(300, 48) };
    let (mut world, shares) = shares(&[Busy::new(100, 48), sure], 60);
    assert_eq!(world.core.memory_turn(), None, "no other tenant competes for memory");
    assert_near(&shares, &[250, 750]);
    world.pass(1_000 * MS);
    let two = *world.programs.keys().nth(1).expect("connected");
    assert_eq!(world.places(two), (48, 0));
}

#[test]
fn tenant_outside_of_quanta_keeps_its_share() {
    let sure = Busy { guarantee: 24, ..Busy::new(200, 24) };
    let (world, shares) = shares(&[Busy::new(100, 60), Busy::new(300, 60), sure], 240);
    assert_eq!(world.core.memory_turn().map(|turn| turn.members.len()), Some(2));
    assert_near(&shares, &[166, 500, 333]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// Checks that a tenant's memory settings do not affect any tenant's share of time.
    #[test]
    fn shares_of_time_ignore_memory_settings(
        tenants in prop::collection::vec((1u32..=4, 8u32..=56, 8u32..=64, 0u32..=16), 2..=3),
    ) {
        let tenants: Vec<Busy> = tenants
            .into_iter()
            .map(|(weight, chunks, quota, guarantee)| Busy {
                weight: weight * 100,
                chunks,
                quota,
                guarantee: guarantee.min(quota).min(chunks),
            })
            .collect();
        let sum: u64 = tenants.iter().map(|tenant| u64::from(tenant.weight)).sum();
        let expected: Vec<u64> = tenants.iter().map(|tenant| u64::from(tenant.weight) * 1000 / sum).collect();
        let (_, shares) = shares(&tenants, 240);
        let near = shares.iter().zip(&expected).all(|(share, expected)| share.abs_diff(*expected) <= 50);
        prop_assert!(near, "{:?} instead of {:?} permille: {:?}", shares, expected, tenants);
    }
}

#[test]
fn interactive_program_that_pauses_returns_turn_when_it_waits() {
    let mut world = two(8, 8);
    let time = sched::VgpuParams { class: sched::LatencyClass::Interactive, ..sched::VgpuParams::default() };
    world.core.add_tenant(TenantSpec { time, ..spec("urgent", 8, Limits::default()) }).expect("the request is valid");
    let [_other, urgent] = ["one", "urgent"].map(|name| world.connect(name));
    // Returns true if the program must return the turn that follows a pause of this length when it waits for a result.
    let yields_after = |world: &mut World, ns: u64| {
        world.say(urgent, FromTenant::Waiting { card: 0 });
        world.settle();
        let turn = world.programs[&urgent].run.expect("no other program works").turn;
        world.programs.get_mut(&urgent).expect("there").run = None;
        world.say(urgent, FromTenant::Stopped { card: 0, turn, usage: Usage::default(), waiting: false });
        world.now += ns;
        world.say(urgent, FromTenant::Waiting { card: 0 });
        world.settle();
        let turn = world.programs[&urgent].run.expect("no other program works").turn;
        let yields = world.programs[&urgent].yields == Some(turn);
        world.programs.get_mut(&urgent).expect("there").run = None;
        world.say(urgent, FromTenant::Stopped { card: 0, turn, usage: Usage::default(), waiting: false });
        yields
    };
    assert!(yields_after(&mut world, 5 * MS));
    assert!(!yields_after(&mut world, MS / 10), "it would pay for a change of turns at each result");
    assert!(yields_after(&mut world, 5 * MS));
    let id = world.core.tenant("urgent").expect("there");
    world.core.change_tenant(id, &spec("urgent", 8, Limits::default())).expect("the request is valid");
    assert!(!yields_after(&mut world, 5 * MS), "no tenant has a worse class");
}
