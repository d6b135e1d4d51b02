//! Tests turns of tenants with various kernel lengths on a card that executes one kernel at a time.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

const MS: u64 = 1_000_000;

fn id(number: u32) -> TenantId {
    TenantId(number)
}

/// Creates turns with slices of 10 ms.
fn turns() -> Turns {
    let config = TurnsConfig { slice_ns: 10 * MS, ..TurnsConfig::default() };
    Turns::new(scheduler_defaults(), config, Nanos(0)).expect("the defaults are valid")
}

/// A tenant's program. It keeps a few kernels of equal length in flight, and may pause after each burst of kernels.
#[derive(Clone, Copy, Debug)]
struct Program {
    kernel_ns: u64,
    ahead: u64,
    /// Number of kernels in a burst and the pause after it in ns, or `None` for a program without pauses.
    burst: Option<(u64, u64)>,
}

impl Program {
    fn steady(kernel_ns: u64, ahead: u64) -> Self {
        Self { kernel_ns, ahead, burst: None }
    }
}

/// Result of a simulation.
#[derive(Debug, Default)]
struct Outcome {
    /// Total length of each tenant's completed kernels, in ns.
    done: BTreeMap<TenantId, u64>,
    /// Times from a tenant's requests for a turn to the grants, in ns.
    waits: BTreeMap<TenantId, Vec<u64>>,
    recalls: usize,
}

/// State of a tenant on the simulated card.
struct Runner {
    program: Program,
    left: u64,
    wakes: u64,
    asked: Option<u64>,
}

/// Simulates programs for `until` ns. `handoff` is the time from the end of a turn's work to the first kernel of the
/// next turn, in ns.
fn simulate(turns: &mut Turns, programs: &[(TenantId, Program)], until: u64, handoff: u64) -> Outcome {
    let mut outcome = Outcome::default();
    let burst = |program: &Program| program.burst.map_or(u64::MAX, |(kernels, _)| kernels);
    let mut runners: BTreeMap<TenantId, Runner> = programs
        .iter()
        .map(|&(tenant, program)| (tenant, Runner { program, left: burst(&program), wakes: 0, asked: None }))
        .collect();
    let mut now = 0;
    let mut holder: Option<TenantId> = None;
    let mut recalled = false;
    while now < until {
        for (&tenant, runner) in &mut runners {
            if runner.wakes <= now && runner.asked.is_none() && holder != Some(tenant) {
                runner.asked = Some(now);
                turns.wants(tenant, Nanos(now));
            }
        }
        turns.tick(Nanos(now));
        for order in turns.take_orders() {
            match order {
                Order::Grant(tenant) => {
                    assert_eq!(holder.replace(tenant), None, "there is only one turn at a time");
                    recalled = false;
                    let asked = runners
                        .get_mut(&tenant)
                        .and_then(|runner| runner.asked.take())
                        .expect("the tenant requested a turn");
                    outcome.waits.entry(tenant).or_default().push(now - asked);
                    now += handoff;
                }
                Order::Recall(tenant) => {
                    assert_eq!(holder, Some(tenant));
                    recalled = true;
                    outcome.recalls += 1;
                }
                // A program with one kernel in flight waits for that kernel's result.
                Order::Yield(tenant) => {
                    assert_eq!(holder, Some(tenant));
                }
                Order::Overdue { .. } | Order::Quarantined(_) => panic!("no tenant exceeds its limit here"),
            }
        }
        let Some((tenant, runner)) = holder.and_then(|tenant| Some((tenant, runners.get_mut(&tenant)?))) else {
            let wake = runners.values().map(|runner| runner.wakes).filter(|&at| at > now).min();
            now = turns.next_wakeup().map(|at| at.0).into_iter().chain(wake).min().unwrap_or(until).max(now + 1);
            continue;
        };
        // A program that waits for each result is asked to yield, and ends its turn after the current kernel.
        let mut yields = false;
        if runner.program.ahead == 1 && !recalled {
            let ends = now + runner.program.kernel_ns;
            while let Some(at) = turns.next_wakeup().filter(|at| at.0 < ends) {
                turns.tick(at.max(Nanos(now)));
                yields |= turns.take_orders().iter().any(|order| matches!(order, Order::Yield(_) | Order::Recall(_)));
            }
        }
        // Work in flight completes even after the turn is recalled.
        let kernels = if recalled { runner.program.ahead.min(runner.left) } else { 1 };
        now += kernels * runner.program.kernel_ns;
        *outcome.done.entry(tenant).or_default() += kernels * runner.program.kernel_ns;
        runner.left -= kernels;
        let rests = runner.left == 0;
        if rests && let Some((kernels, rest)) = runner.program.burst {
            runner.left = kernels;
            runner.wakes = now + rest;
        }
        if rests || recalled || yields {
            holder = None;
            runner.asked = (!rests).then_some(now);
            turns.ended(tenant, Nanos(now), !rests, Nanos(now));
        }
    }
    outcome
}

fn shares(outcome: &Outcome) -> Vec<f64> {
    let all: u64 = outcome.done.values().sum();
    outcome.done.values().map(|&done| done as f64 / all as f64).collect()
}

fn with(weights: &[u32]) -> Turns {
    let mut turns = turns();
    for (number, &weight) in weights.iter().enumerate() {
        turns.add(id(number as u32), VgpuParams::weight(weight), Nanos(0));
    }
    turns
}

#[test]
fn single_tenant_is_granted_once_and_never_recalled() {
    let mut turns = with(&[100]);
    turns.wants(id(0), Nanos(0));
    assert_eq!(turns.take_orders(), [Order::Grant(id(0))]);
    for ms in 1..5000 {
        turns.tick(Nanos(ms * MS));
        assert_eq!(turns.take_orders(), []);
    }
}

#[test]
fn time_used_without_competition_is_not_owed() {
    let mut turns = with(&[100, 100]);
    turns.wants(id(0), Nanos(0));
    // No tick has occurred for nine seconds.
    turns.wants(id(1), Nanos(9_000 * MS));
    let beyond = turns.scheduler().standing(id(0), ENGINE).beyond;
    assert!(beyond.unsigned_abs() < MS, "the lag is {beyond} ns");
    assert_eq!(turns.take_orders(), [Order::Grant(id(0))]);
}

#[test]
fn equal_weights_share_equally_whatever_the_kernels_last() {
    for kernels in [(MS / 10, 9 * MS), (4_500_000, 90_000), (MS, MS)] {
        let mut turns = with(&[100, 100]);
        let programs = [(id(0), Program::steady(kernels.0, 2)), (id(1), Program::steady(kernels.1, 2))];
        let outcome = simulate(&mut turns, &programs, 2000 * MS, 50_000);
        let shares = shares(&outcome);
        assert!((shares[0] - 0.5).abs() < 0.02, "{kernels:?}: {shares:?}");
    }
}

#[test]
fn weights_divide_the_card() {
    for weights in [vec![300, 100], vec![100, 200, 400]] {
        let mut turns = with(&weights);
        let lengths = [910_000, 2 * MS, 100_000];
        let programs: Vec<_> = (0..weights.len()).map(|at| (id(at as u32), Program::steady(lengths[at], 2))).collect();
        let outcome = simulate(&mut turns, &programs, 3000 * MS, 50_000);
        let sum: u32 = weights.iter().sum();
        for (share, weight) in shares(&outcome).iter().zip(&weights) {
            let due = f64::from(*weight) / f64::from(sum);
            assert!((share - due).abs() < 0.02, "{weights:?}: share {share}, expected {due}");
        }
    }
}

#[test]
fn a_tenant_that_rests_half_of_the_time_lets_the_other_run() {
    let mut turns = with(&[100, 100]);
    let mixed = Program { kernel_ns: MS, ahead: 2, burst: Some((20, 20 * MS)) };
    let programs = [(id(0), mixed), (id(1), Program::steady(MS, 2))];
    let outcome = simulate(&mut turns, &programs, 2000 * MS, 50_000);
    let busy: u64 = outcome.done.values().sum();
    assert!(busy >= 1940 * MS, "the card was busy for {busy} ns in two seconds");
}

#[test]
fn the_interactive_class_does_not_wait_for_the_end_of_a_slice() {
    let mut turns = turns();
    turns.add(id(0), VgpuParams { class: LatencyClass::Interactive, ..VgpuParams::default() }, Nanos(0));
    turns.add(id(1), VgpuParams::default(), Nanos(0));
    let short = Program { kernel_ns: MS, ahead: 1, burst: Some((1, 50 * MS)) };
    let programs = [(id(0), short), (id(1), Program::steady(MS, 2))];
    let outcome = simulate(&mut turns, &programs, 5000 * MS, 50_000);
    let worst = outcome.waits[&id(0)].iter().max().copied().unwrap_or(0);
    assert!(worst <= 5 * MS, "the longest wait is {worst} ns");
    assert!(outcome.waits[&id(0)].len() > 80);
}

#[test]
fn interactive_tenant_waits_only_for_minimum_slice() {
    let mut turns = turns();
    turns.add(id(0), VgpuParams { class: LatencyClass::Interactive, ..VgpuParams::default() }, Nanos(0));
    turns.add(id(1), VgpuParams::default(), Nanos(0));
    turns.wants(id(1), Nanos(0));
    turns.wants(id(0), Nanos(MS / 10));
    assert_eq!(turns.take_orders(), [Order::Grant(id(1))], "the turn is too short to be cut short");
    assert_eq!(turns.next_wakeup(), Some(Nanos(MS)), "it is cut short before the end of its slice");
    turns.tick(Nanos(MS));
    assert_eq!(turns.take_orders(), [Order::Recall(id(1))]);
}

/// A tenant of the better class gets the card at the next submission boundary only while it is due. If it is above its
/// share, it waits until it is due again.
#[test]
fn interactive_tenant_waits_for_its_excess_beyond_its_share() {
    let run = |kernels, rest| {
        let mut turns = turns();
        turns.add(id(0), VgpuParams { class: LatencyClass::Interactive, ..VgpuParams::default() }, Nanos(0));
        turns.add(id(1), VgpuParams::default(), Nanos(0));
        let interactive = Program { kernel_ns: MS, ahead: 1, burst: Some((kernels, rest)) };
        let programs = [(id(0), interactive), (id(1), Program::steady(2 * MS, 2))];
        let outcome = simulate(&mut turns, &programs, 5000 * MS, 50_000);
        (outcome.waits[&id(0)].iter().max().copied().unwrap_or(0), shares(&outcome)[0])
    };
    for rest in [50, 20] {
        let (wait, share) = run(1, rest * MS);
        // The wait consists of the other turn's minimum time and the two kernels in flight.
        assert!(wait <= 6 * MS && share < 0.45, "{wait} ns for a share of {share}, after {rest} ms");
    }
    for rest in [10, 5, 1] {
        // A pause is credited only at the other tenant's next charge, so a debt of one submission may remain.
        let (wait, share) = run(1, rest * MS);
        assert!(wait <= 7 * MS && share < 0.45, "{wait} ns for a share of {share}, after {rest} ms");
    }
    let (wait, share) = run(20, MS / 10);
    // Until it is above its share, its turns are as long as slices.
    assert!((2 * MS..=10 * MS).contains(&wait) && (share - 0.5).abs() < 0.05, "{wait} ns for a share of {share}");
}

#[test]
fn wakeup_is_for_yield_then_slice_end_in_one_class() {
    let mut turns = with(&[100, 100]);
    turns.wants(id(0), Nanos(0));
    turns.wants(id(1), Nanos(MS / 10));
    let may_yield = Some(Nanos(TurnsConfig::default().yield_ns));
    assert_eq!(turns.next_wakeup(), may_yield, "the classes are equal");
    turns.change(id(1), VgpuParams { class: LatencyClass::Background, ..VgpuParams::default() }, Nanos(MS / 5));
    assert_eq!(turns.next_wakeup(), may_yield, "the waiting tenant has a worse class");
    turns.tick(Nanos(4 * MS));
    assert_eq!(turns.next_wakeup(), Some(Nanos(10 * MS + MS / 10)), "the next event is the end of the slice");
}

#[test]
fn a_paused_tenant_gives_its_turn_back_and_gets_none() {
    let mut turns = with(&[100, 100]);
    turns.wants(id(0), Nanos(0));
    assert_eq!(turns.take_orders(), [Order::Grant(id(0))]);
    turns.pause(id(0), true, Nanos(MS));
    assert_eq!(turns.take_orders(), [Order::Recall(id(0))]);
    turns.ended(id(0), Nanos(2 * MS), true, Nanos(2 * MS));
    turns.tick(Nanos(20 * MS));
    assert_eq!(turns.take_orders(), []);
    assert!(turns.is_busy(id(0)), "its work is still queued");
    turns.pause(id(0), false, Nanos(30 * MS));
    assert_eq!(turns.take_orders(), [Order::Grant(id(0))]);
}

#[test]
fn waiting_tenant_gets_turn_although_it_is_paused_often() {
    let mut turns = with(&[100, 100]);
    turns.wants(id(0), Nanos(0));
    turns.wants(id(1), Nanos(MS));
    assert_eq!(turns.take_orders(), [Order::Grant(id(0))]);
    let recalled = (0..50).find(|round| {
        let now = Nanos((2 + 3 * round) * MS);
        turns.pause(id(1), true, now);
        turns.pause(id(1), false, now);
        turns.tick(now);
        turns.take_orders().contains(&Order::Recall(id(0)))
    });
    assert!(recalled.is_some(), "the holder keeps the card");
}

#[test]
fn work_that_does_not_end_is_overdue_by_its_own_limit() {
    let mut turns = turns();
    let limit = VgpuParams { max_run_ns: Some(200 * MS), ..VgpuParams::default() };
    turns.add(id(0), limit, Nanos(0));
    turns.add(id(1), limit, Nanos(0));
    turns.wants(id(0), Nanos(0));
    turns.wants(id(1), Nanos(0));
    turns.tick(Nanos(10 * MS));
    assert_eq!(turns.take_orders(), [Order::Grant(id(0)), Order::Recall(id(0))]);
    turns.tick(Nanos(39 * MS));
    assert_eq!(turns.take_orders(), []);
    assert_eq!(turns.next_wakeup(), Some(Nanos(40 * MS)));
    turns.tick(Nanos(40 * MS));
    assert_eq!(turns.take_orders(), [Order::Grant(id(1))], "the other tenant no longer waits for it");
    turns.tick(Nanos(199 * MS));
    assert_eq!(turns.take_orders(), []);
    assert_eq!(turns.next_wakeup(), Some(Nanos(200 * MS)));
    turns.tick(Nanos(201 * MS));
    assert_eq!(turns.take_orders(), [Order::Overdue { tenant: id(0), ran_ns: 201 * MS }]);
    turns.tick(Nanos(205 * MS));
    assert_eq!(turns.take_orders(), [], "the order is sent only once");
    turns.remove(id(0), Nanos(210 * MS));
    assert_eq!(turns.holders().collect::<Vec<_>>(), [id(1)]);
}

#[test]
fn turn_that_overruns_is_charged_and_paid_back() {
    let mut turns = with(&[100, 100, 100]);
    for tenant in 0..3 {
        turns.wants(id(tenant), Nanos(0));
    }
    let mut now = 0;
    // The first tenant never ends its turn. The other tenants end theirs when they are recalled.
    let mut granted = BTreeMap::<u32, u32>::new();
    for _ in 0..1000 {
        now += MS;
        turns.tick(Nanos(now));
        for order in turns.take_orders() {
            match order {
                Order::Grant(tenant) => *granted.entry(tenant.0).or_default() += 1,
                Order::Recall(tenant) if tenant != id(0) => turns.ended(tenant, Nanos(now), true, Nanos(now)),
                Order::Recall(_) | Order::Yield(_) => {}
                Order::Overdue { .. } | Order::Quarantined(_) => panic!("{order:?}"),
            }
        }
    }
    let used = [0, 1, 2].map(|tenant| turns.account(id(tenant)).expect("the tenant exists").used / MS);
    assert_eq!(granted[&0], 1);
    assert!(granted[&1] >= 20 && granted[&1].abs_diff(granted[&2]) <= 1, "both other tenants run: {granted:?}");
    // The first tenant ran alone for 40 ms, and then used half of the card's time.
    assert!(used[0].abs_diff(520) <= 10 && used[1].abs_diff(240) <= 10 && used[2].abs_diff(240) <= 10, "{used:?}");
    // The first tenant's kernel ends. The tenant has more work, but the other tenants run first.
    turns.ended(id(0), Nanos(now), true, Nanos(now));
    let before = turns.account(id(0)).expect("the tenant exists").used;
    for _ in 0..300 {
        now += MS;
        turns.tick(Nanos(now));
        for order in turns.take_orders() {
            if let Order::Recall(tenant) = order {
                turns.ended(tenant, Nanos(now), true, Nanos(now));
            }
        }
    }
    let after = turns.account(id(0)).expect("the tenant exists").used;
    assert!(after - before <= 40 * MS, "the tenant in debt got {} ms of 300", (after - before) / MS);
}

#[test]
fn turn_overruns_only_while_another_tenant_waits() {
    let mut turns = with(&[100, 100]);
    turns.wants(id(0), Nanos(0));
    turns.pause(id(0), true, Nanos(MS));
    turns.tick(Nanos(500 * MS));
    assert_eq!(turns.take_orders(), [Order::Grant(id(0)), Order::Recall(id(0))]);
    assert!(!turns.overruns(id(0)), "no other tenant waits");
    turns.wants(id(1), Nanos(501 * MS));
    assert_eq!(
        turns.take_orders(),
        [Order::Grant(id(1))],
        "the order is sent immediately because the turn is already late"
    );
    assert!(turns.overruns(id(0)));
    turns.ended(id(0), Nanos(510 * MS), false, Nanos(510 * MS));
    assert!(!turns.overruns(id(0)));
    assert_eq!(turns.holders().collect::<Vec<_>>(), [id(1)]);
}

#[test]
fn a_time_that_a_tenant_made_up_is_bounded_by_the_clock() {
    let mut turns = with(&[100, 100]);
    turns.wants(id(0), Nanos(0));
    // The tenant first reports that its work ended at the start of its turn, and then that its work will end in the
    // distant future.
    turns.ended(id(0), Nanos(0), false, Nanos(50 * MS));
    let used = turns.account(id(0)).expect("the tenant exists").used;
    assert!(used >= 49 * MS, "charged {used} ns of 50 ms");
    turns.wants(id(0), Nanos(60 * MS));
    turns.ended(id(0), Nanos(u64::MAX), false, Nanos(70 * MS));
    let used = turns.account(id(0)).expect("the tenant exists").used;
    assert!(used <= 61 * MS, "charged {used} ns of 60 ms");
}

#[derive(Clone, Debug)]
enum Call {
    Wants(u32),
    Ended(u32, bool),
    Pause(u32, bool),
    Remove(u32),
    Add(u32),
    Wait(u64),
}

fn call() -> impl Strategy<Value = Call> {
    let tenant = 0..4u32;
    prop_oneof![
        4 => tenant.clone().prop_map(Call::Wants),
        4 => (tenant.clone(), any::<bool>()).prop_map(|(t, more)| Call::Ended(t, more)),
        2 => (tenant.clone(), any::<bool>()).prop_map(|(t, paused)| Call::Pause(t, paused)),
        1 => tenant.clone().prop_map(Call::Remove),
        1 => tenant.prop_map(Call::Add),
        4 => (0..30 * MS).prop_map(Call::Wait),
    ]
}

proptest! {
    #[test]
    fn at_most_one_has_the_turn_and_no_want_is_forgotten(calls in proptest::collection::vec(call(), 1..120)) {
        let mut turns = with(&[100, 200, 300, 100]);
        let (mut now, mut paused, mut there) = (0, BTreeSet::new(), BTreeSet::from([0, 1, 2, 3]));
        let mut wanting = BTreeSet::new();
        for call in calls {
            match call {
                Call::Wants(t) => {
                    turns.wants(id(t), Nanos(now));
                    if there.contains(&t) { wanting.insert(t); }
                }
                Call::Ended(t, more) => {
                    turns.ended(id(t), Nanos(now), more, Nanos(now));
                    if more && there.contains(&t) { wanting.insert(t); } else { wanting.remove(&t); }
                }
                Call::Pause(t, stop) => {
                    turns.pause(id(t), stop, Nanos(now));
                    if !there.contains(&t) { continue; }
                    if stop { paused.insert(t); } else { paused.remove(&t); }
                }
                Call::Remove(t) => {
                    turns.remove(id(t), Nanos(now));
                    there.remove(&t); wanting.remove(&t); paused.remove(&t);
                }
                Call::Add(t) => {
                    turns.add(id(t), VgpuParams::default(), Nanos(now));
                    there.insert(t);
                }
                Call::Wait(ns) => { now += ns; turns.tick(Nanos(now)); }
            }
            prop_assert!(turns.holders().filter(|holder| !turns.overruns(*holder)).count() <= 1);
            for holder in turns.holders() {
                prop_assert!(there.contains(&holder.0));
            }
        }
        // The tenant with the turn keeps returning it, so all unpaused tenants that want a turn get one.
        wanting.retain(|t| !paused.contains(t));
        for _ in 0..200 {
            now += 11 * MS;
            turns.tick(Nanos(now));
            let holders: Vec<_> = turns.holders().collect();
            for holder in holders {
                wanting.remove(&holder.0);
                turns.ended(holder, Nanos(now), false, Nanos(now));
            }
        }
        prop_assert!(wanting.is_empty(), "without a turn: {wanting:?}");
        let used: u64 = turns.scheduler().vgpus().filter_map(|v| turns.account(v)).map(|a| a.used).sum();
        prop_assert_eq!(used + turns.scheduler().departed(ENGINE), turns.scheduler().busy(ENGINE));
    }
}

#[test]
fn programs_that_wait_change_at_submission_boundaries() {
    let mut turns = turns();
    for number in 0..2 {
        turns.add(id(number), VgpuParams::default(), Nanos(0));
    }
    let decode = Program::steady(2_100_000, 1);
    let outcome = simulate(&mut turns, &[(id(0), decode), (id(1), decode)], 5000 * MS, 100_000);
    let longest = outcome.waits.values().flatten().max().copied().expect("no tenant has waited");
    assert!(longest <= 7 * MS, "the longest wait for a turn is {longest} ns, {} turns", turns.switches());
    let done: u64 = outcome.done.values().sum();
    assert!(done >= 4_750 * MS, "{done} ns of work in 5 s");
    let shares = shares(&outcome);
    assert!((shares[0] - 0.5).abs() < 0.01, "{shares:?}");
}

#[test]
fn work_that_fills_the_card_keeps_long_slices() {
    let mut turns = with(&[100, 100]);
    let programs = [(id(0), Program::steady(MS / 2, 4)), (id(1), Program::steady(MS / 2, 4))];
    let outcome = simulate(&mut turns, &programs, 2000 * MS, 100_000);
    // Slices in this test are 10 ms long.
    assert!(turns.switches() <= 200, "{} turns", turns.switches());
    assert!(shares(&outcome).iter().all(|share| (share - 0.5).abs() < 0.02));
}

#[test]
fn waiting_program_keeps_its_weight_next_to_full_one() {
    let mut turns = with(&[300, 100]);
    let programs = [(id(0), Program::steady(2 * MS, 1)), (id(1), Program::steady(MS, 2))];
    let outcome = simulate(&mut turns, &programs, 4000 * MS, 100_000);
    let shares = shares(&outcome);
    assert!((shares[0] - 0.75).abs() < 0.02, "{shares:?}");
}

#[test]
fn holder_is_not_asked_to_yield_while_no_other_tenant_is_due() {
    let mut turns = with(&[1000, 1]);
    turns.wants(id(0), Nanos(0));
    assert_eq!(turns.take_orders(), [Order::Grant(id(0))]);
    turns.tick(Nanos(9 * MS));
    assert_eq!(turns.take_orders(), [], "no tenant is waiting");
    turns.wants(id(1), Nanos(9 * MS));
    turns.ended(id(0), Nanos(10 * MS), true, Nanos(10 * MS));
    turns.take_orders();
    assert_eq!(turns.holders().collect::<Vec<_>>(), [id(1)]);
    turns.tick(Nanos(13 * MS));
    assert_eq!(turns.take_orders(), [], "the turn is too short");
    let may_yield = Nanos(10 * MS + TurnsConfig::default().yield_ns);
    assert_eq!(turns.next_wakeup(), Some(may_yield));
    turns.tick(may_yield);
    assert_eq!(turns.take_orders(), [Order::Yield(id(1))]);
    turns.tick(Nanos(18 * MS));
    assert_eq!(turns.take_orders(), [], "it is asked only once");
}

#[test]
fn two_programs_that_fill_card_get_long_slices() {
    let run = |programs: &[Program]| {
        let mut turns = with(&vec![100; programs.len()]);
        let programs: Vec<(TenantId, Program)> = (0..).map(id).zip(programs.iter().copied()).collect();
        let outcome = simulate(&mut turns, &programs, 4000 * MS, 300_000);
        let longest = outcome.waits.values().flatten().max().copied().unwrap_or(0);
        let turn = 4000 * MS / turns.switches();
        (turn / MS, longest / MS, outcome.done.values().sum::<u64>() as f64 / (4000 * MS) as f64, shares(&outcome))
    };
    let full = Program::steady(MS / 2, 4);
    let (turn, longest, work, shares) = run(&[full; 2]);
    // In this test, slices are 10 ms long, and 20 ms for two tenants that fill the card. The work in flight at the end
    // of a slice adds to this time.
    assert!((20..=23).contains(&turn) && longest <= 24 && work >= 0.985, "{turn} {longest} {work}");
    assert!((shares[0] - 0.5).abs() < 0.01, "{shares:?}");
    let (turn, longest, ..) = run(&[full; 3]);
    assert!(turn <= 13 && longest <= 38, "three share the card: {turn} {longest}");
    let waits = Program::steady(2 * MS, 1);
    let (turn, longest, _, shares) = run(&[full, waits]);
    assert!(turn <= 13 && longest <= 14, "one of them waits for results: {turn} {longest}");
    assert!((shares[0] - 0.5).abs() < 0.02, "{shares:?}");
}
