//! Tests budget policies in simulated time. A few of sixteen VMs compete, and the others are idle or nearly idle.

use super::harness::Harness;
use crate::sim::{Guest, Length, Outcome, Pulse, Scenario, Stream, run};
use crate::{BandParams, Config, Engine, Nanos, Pipeline, PolicyKind, TenantId, VgpuParams};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;
/// Time from the end of a submission to the guest's next doorbell, in ns.
const THINK: Length = Length::Uniform(20 * US, 60 * US);
/// Total number of VMs.
const VMS: usize = 16;

/// Returns CREDIT and the published BAND, each once with one submission at a time and once with the default pipeline.
fn contenders() -> [(&'static str, Config); 4] {
    let config = |policy, pipeline| Config { policy, band: BandParams::published(), pipeline, ..Config::default() };
    [
        ("credit, one at a time", config(PolicyKind::Credit, Pipeline::ONE)),
        ("credit", config(PolicyKind::Credit, Pipeline::default())),
        ("band as published, one at a time", config(PolicyKind::Band, Pipeline::ONE)),
        ("band as published", config(PolicyKind::Band, Pipeline::default())),
    ]
}

/// Returns a guest that always has several kernels queued.
fn backlog(length: u64, weight: u32) -> Guest {
    Guest::new(Stream { depth: 4, ..Stream::looping(Length::Fixed(length), THINK) }).weight(weight)
}

/// Returns a guest without work.
fn idle(weight: u32) -> Guest {
    Guest::new(Stream { depth: 0, ..Stream::looping(Length::Fixed(MS), THINK) }).weight(weight)
}

/// Returns a guest that occasionally submits a short kernel.
fn drowsy() -> Guest {
    Guest::new(Stream::looping(Length::Fixed(100 * US), Length::Uniform(0, 200 * MS)))
}

/// Returns the competing VMs, followed by VMs that `rest` creates.
fn among(competing: &[(u64, u32)], rest: impl Fn() -> Guest) -> Vec<Guest> {
    let competing = competing.iter().map(|(length, weight)| backlog(*length, *weight));
    competing.chain(std::iter::repeat_with(rest)).take(VMS).collect()
}

fn play(config: Config, seconds: u64, guests: Vec<Guest>) -> Outcome {
    run(&Scenario::new(config, seconds * SECOND, guests), 7).unwrap()
}

/// Returns the fraction of the total use to which each competitor is entitled.
fn due(competing: &[(u64, u32)]) -> Vec<f64> {
    let sum: u32 = competing.iter().map(|(_, weight)| weight).sum();
    competing.iter().map(|(_, weight)| f64::from(*weight) / f64::from(sum)).collect()
}

/// Returns sets of competitors as kernel lengths and weights. Half of the competitors run short kernels, and half run
/// long ones.
fn contests() -> Vec<Vec<(u64, u32)>> {
    let mut contests = Vec::new();
    for vms in [2, 4, 8] {
        for (short, long) in [(400 * US, 2 * MS), (500 * US, 2500 * US), (MS, 5 * MS), (400 * US, 5 * MS)] {
            let length = |vm: usize| [short, long][vm % 2];
            contests.push((0..vms).map(|vm| (length(vm), 100)).collect());
            // First give the smaller weight to the VMs with long kernels, and then the larger one.
            contests.push((0..vms).map(|vm| (length(vm), [300, 100][vm % 2])).collect());
            contests.push((0..vms).map(|vm| (length(vm), [100, 300][vm % 2])).collect());
        }
    }
    contests
}

#[test]
fn shares_are_of_those_that_compete() {
    for (name, config) in contenders() {
        for contest in contests() {
            let outcome = play(config, 6, among(&contest, || idle(100)));
            let error = outcome.share_error(Engine::Compute, 500 * MS, SECOND, &due(&contest));
            assert!(error.mean <= 0.02, "{name}: {contest:?}: {error:?}");
        }
    }
}

#[test]
fn idle_vms_change_nothing() {
    for (name, config) in contenders() {
        for contest in contests() {
            let guests = |count: usize| among(&contest, || idle(1000)).into_iter().take(count).collect();
            let (alone, beside) = (play(config, 2, guests(contest.len())), play(config, 2, guests(VMS)));
            let vms = contest.len();
            assert_eq!(alone.rounds, beside.rounds[..vms], "{name}: {contest:?}");
            assert_eq!(alone.events - vms as u64, beside.events - VMS as u64, "{name}: {contest:?}");
        }
    }
}

#[test]
fn vms_that_do_next_to_nothing_change_little() {
    for (name, config) in contenders() {
        for contest in contests().into_iter().filter(|contest| contest.len() < 8) {
            let outcome = play(config, 6, among(&contest, drowsy));
            let shares = outcome.shares(Engine::Compute, SECOND, u64::MAX);
            let sum: f64 = shares[..contest.len()].iter().sum();
            for (share, due) in shares.iter().zip(due(&contest)) {
                assert!((share / sum - due).abs() < 0.05, "{name}: {contest:?}: {shares:?}");
            }
        }
    }
}

#[test]
fn vm_alone_saves_little_credit_before_others_arrive() {
    for (name, config) in contenders() {
        let late = |length| {
            let mut guest = backlog(length, 100);
            guest.streams[0].from = Nanos(2 * SECOND);
            guest
        };
        // In the first two seconds, the first VM needs only a small part of the card's time.
        let mut first = Guest::new(Stream::looping(Length::Fixed(MS), Length::Fixed(5 * MS)));
        let busy = Stream { from: Nanos(2 * SECOND), depth: 4, ..Stream::looping(Length::Fixed(MS), THINK) };
        first.streams.push(busy);
        let outcome = play(config, 3, vec![first, late(MS), late(3 * MS), idle(100)]);
        let shares = outcome.shares(Engine::Compute, 2 * SECOND, 2 * SECOND + 500 * MS);
        for share in &shares[..3] {
            assert!((share - 1.0 / 3.0).abs() < 0.06, "{name}: {shares:?}");
        }
    }
}

#[test]
fn share_above_cap_is_divided_among_competing_vms() {
    for (name, config) in contenders() {
        let mut guests = among(&[(MS, 100), (400 * US, 100), (2 * MS, 200)], || idle(100));
        guests[0].params.cap_permille = 100;
        let shares = play(config, 10, guests).shares(Engine::Compute, SECOND, u64::MAX);
        for (share, due) in shares.iter().zip([0.1, 0.3, 0.6]) {
            assert!((share - due).abs() < 0.02, "{name}: {shares:?}");
        }
    }
}

#[test]
fn a_debt_is_forgiven_beyond_a_period_for_each_that_competes() {
    let mut harness = Harness::new(Config { policy: PolicyKind::Credit, ..Config::default() });
    (0..2).for_each(|vgpu| harness.add(vgpu, VgpuParams::default()));
    harness.arrive(0, 0, Engine::Compute, SECOND);
    for _ in 0..100 {
        harness.arrive(1, 0, Engine::Compute, MS);
    }
    harness.pass(SECOND + 70 * MS);
    let credit = harness.scheduler.standing(TenantId(0), Engine::Compute).credit;
    assert!(credit.unsigned_abs() <= 60 * MS, "{credit}");
}

/// Generates a VM that alternates between idle and active: in phase with the periods, out of phase, or at a different
/// frequency.
fn toggler() -> impl Strategy<Value = Guest> {
    let time = || prop_oneof![prop::sample::select(vec![MS, 15 * MS, 30 * MS, 60 * MS]), US..120 * MS];
    let length = prop_oneof![US..100 * US, 400 * US..5 * MS];
    (time(), time(), 0..60 * MS, length, 0..2 * MS, 1u32..9, 1u32..5).prop_map(
        |(on, off, from, length, think, depth, weight)| {
            let pulse = Some(Pulse { on, off });
            let stream = Stream::looping(Length::Fixed(length), Length::Uniform(0, think));
            Guest::new(Stream { depth, pulse, from: Nanos(from), ..stream }).weight(weight)
        },
    )
}

proptest! {
    // Use the same cases in each run, because the worst case has no proven bound.
    #![proptest_config(ProptestConfig { rng_seed: RngSeed::Fixed(1), ..ProptestConfig::with_cases(60) })]

    /// Checks that pauses, credit, and debt do not let a VM get more for its weight than a VM that always has work. The
    /// published BAND does not track overuse caused by non-preemptible work, so its tolerance is larger.
    #[test]
    fn no_one_gains_by_coming_and_going(
        contender in 0..contenders().len(),
        togglers in prop::collection::vec(toggler(), 1..4),
        steady in prop::collection::vec((400 * US..5 * MS, 1u32..5), 1..5),
        idle_weight in 1u32..100,
    ) {
        let (name, config) = contenders()[contender];
        let guests: Vec<_> = togglers.iter().cloned().chain(among(&steady, || idle(idle_weight))).take(VMS).collect();
        let weights: Vec<_> = guests.iter().map(|guest| f64::from(guest.params.weight)).collect();
        let outcome = play(config, 6, guests);
        let shares = outcome.shares(Engine::Compute, SECOND, u64::MAX);
        let level = |vm: usize| shares[vm] / weights[vm];
        let always = togglers.len()..togglers.len() + steady.len();
        let least = always.map(level).fold(f64::INFINITY, f64::min);
        let allowed = if config.policy == PolicyKind::Credit { 0.05 } else { 0.2 };
        for vm in 0..togglers.len() + steady.len() {
            let more = shares[vm] - least * weights[vm];
            prop_assert!(more <= allowed, "{name}: VM {vm} exceeds its share by {more}: {shares:?}");
        }
        // The idle VMs have used no time.
        let sum: f64 = shares[..togglers.len() + steady.len()].iter().sum();
        prop_assert!((sum - 1.0).abs() < 1e-9, "{shares:?}");
    }
}
