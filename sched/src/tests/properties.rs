//! Tests properties of the state machine under any policy and arbitrary changes.

use super::harness::Harness;
use crate::{
    Channel, Config, CopyShare, Engine, Event, LatencyClass, Nanos, Pipeline, PolicyKind, Queues, Scheduler, TenantId,
    Ticket, VgpuParams, sim,
};
use proptest::prelude::*;

const MS: u64 = 1_000_000;
const VGPUS: u32 = 4;

#[derive(Clone, Debug)]
enum Op {
    Arrive {
        vgpu: u32,
        channel: u32,
        engine: usize,
        length: u64,
    },
    Pass(u64),
    Change(u32, VgpuParams),
    Compete(u32, Option<VgpuParams>),
    Configure(Config),
    EndChannel(u32, u32),
    Withdraw(u64),
    Stall(u64),
    GoOn(bool),
    Requeue,
    Remove(u32),
    Add(u32),
    /// Saves and restores the scheduler.
    Restore,
}

fn params() -> impl Strategy<Value = VgpuParams> {
    let class = prop::sample::select(vec![LatencyClass::Interactive, LatencyClass::Normal, LatencyClass::Background]);
    let copies = prop_oneof![
        Just(CopyShare::AS_COMPUTE),
        (1u32..100, 300u32..1500).prop_map(|(weight, cap)| CopyShare {
            weight: Some(weight),
            guarantee_permille: None,
            cap_permille: Some(cap.min(1000)),
        })
    ];
    (1u32..100, 0u32..300, 300u32..1500, class, copies).prop_map(|(weight, guarantee_permille, cap, class, copies)| {
        VgpuParams { weight, guarantee_permille, cap_permille: cap.min(1000), class, max_run_ns: None, copies }
    })
}

fn config() -> impl Strategy<Value = Config> {
    let policy = prop::sample::select(PolicyKind::ALL.to_vec());
    let pipeline = prop::sample::select(vec![Pipeline::ONE, Pipeline::default()]);
    (policy, any::<bool>(), any::<bool>(), pipeline).prop_map(|(policy, single, correct, pipeline)| {
        let mut config = Config { policy, pipeline, ..Config::default() };
        config.queues = if single { Queues::Single } else { Queues::Separate };
        config.band.correct = correct;
        config
    })
}

fn op() -> impl Strategy<Value = Op> {
    let vgpu = || 0..VGPUS;
    let length = prop_oneof![1_000u64..100_000, 100_000u64..20 * MS];
    prop_oneof![
        12 => (vgpu(), 0u32..2, 0usize..3, length)
            .prop_map(|(vgpu, channel, engine, length)| Op::Arrive { vgpu, channel, engine, length }),
        6 => (0u64..5 * MS).prop_map(Op::Pass),
        1 => (vgpu(), params()).prop_map(|(vgpu, params)| Op::Change(vgpu, params)),
        1 => config().prop_map(Op::Configure),
        1 => (vgpu(), prop::option::of(params())).prop_map(|(vgpu, params)| Op::Compete(vgpu, params)),
        1 => (vgpu(), 0u32..2).prop_map(|(vgpu, channel)| Op::EndChannel(vgpu, channel)),
        1 => any::<u64>().prop_map(Op::Withdraw),
        2 => any::<u64>().prop_map(Op::Stall),
        2 => any::<bool>().prop_map(Op::GoOn),
        2 => Just(Op::Requeue),
        1 => vgpu().prop_map(Op::Remove),
        2 => vgpu().prop_map(Op::Add),
        2 => Just(Op::Restore),
    ]
}

fn apply(harness: &mut Harness, op: Op) {
    match op {
        Op::Arrive { vgpu, channel, engine, length } => {
            harness.arrive(vgpu, channel, Engine::ALL[engine], length);
        }
        Op::Pass(ns) => harness.pass(ns),
        Op::Change(vgpu, params) => {
            harness.feed(Event::Changed { vgpu: TenantId(vgpu), params });
        }
        Op::Compete(vgpu, params) => {
            harness.feed(Event::Competes { vgpu: TenantId(vgpu), params });
        }
        Op::Configure(config) => {
            harness.feed(Event::Configured(config));
        }
        Op::EndChannel(vgpu, channel) => {
            harness.end_channel(vgpu, channel);
        }
        Op::Withdraw(number) => {
            use super::harness::Fate::{Dropped, Queued};
            let ticket = Ticket(number % (harness.fates.len() as u64 + 1));
            if let Some((fate, _)) = harness.fates.get_mut(&ticket).filter(|(fate, _)| *fate == Queued) {
                *fate = Dropped;
                harness.feed(Event::Withdrawn { ticket });
            }
        }
        Op::Stall(number) => {
            harness.stall(Ticket(number % (harness.fates.len() as u64 + 1)));
        }
        Op::GoOn(ended) => harness.go_on(ended),
        Op::Requeue => harness.requeue(),
        Op::Remove(vgpu) => {
            harness.remove(vgpu);
        }
        Op::Restore => harness.restore(),
        Op::Add(vgpu) => {
            harness.feed(Event::Added { vgpu: TenantId(vgpu), params: VgpuParams::default() });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Checks that no submission is lost or started twice, regardless of intermediate changes (the harness asserts this
    /// at each step), and that the charges add up to the busy time.
    #[test]
    fn tickets_and_time_are_conserved(
        first in config(),
        latency in prop::sample::select(vec![0u64, 9_000]),
        ops in prop::collection::vec(op(), 1..250),
    ) {
        let mut harness = Harness::new(first);
        harness.latency = latency;
        (0..VGPUS).for_each(|vgpu| harness.add(vgpu, VgpuParams::default()));
        for op in ops {
            apply(&mut harness, op);
        }
        harness.drain();
        let departed = harness.scheduler.vgpus().count() < VGPUS as usize;
        harness.audit();
        prop_assert!(departed || harness.scheduler.in_flight() == 0);
    }

    /// Checks that a saved scheduler with modified bytes is either rejected or harmless.
    #[test]
    fn edited_schedulers_never_panic(
        first in config(),
        ops in prop::collection::vec(op(), 1..40),
        then in prop::collection::vec(op(), 1..20),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut harness = Harness::new(first);
        (0..VGPUS).for_each(|vgpu| harness.add(vgpu, VgpuParams::default()));
        for op in ops {
            apply(&mut harness, op);
        }
        let mut bytes = postcard::to_allocvec(&harness.scheduler.save()).unwrap();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let now = Nanos(harness.now);
        let Ok((saved, _)) = postcard::take_from_bytes(&bytes) else { return Ok(()) };
        let Ok(mut scheduler) = Scheduler::restored(saved, now) else { return Ok(()) };
        // Do not use the harness here, because it fails on wrong decisions, which are permitted.
        let (mut decisions, mut now) = (Vec::new(), now);
        for op in then {
            now = now.after(MS);
            let event = match op {
                Op::Arrive { vgpu, channel, engine, length } => Event::Arrival {
                    vgpu: TenantId(vgpu),
                    channel: Channel(channel),
                    engine: Engine::ALL[engine],
                    ticket: Ticket(length << 20),
                },
                Op::Remove(vgpu) => Event::Removed { vgpu: TenantId(vgpu) },
                Op::Configure(config) => Event::Configured(config),
                Op::EndChannel(vgpu, channel) => {
                    Event::ChannelEnded { vgpu: TenantId(vgpu), channel: Channel(channel) }
                }
                Op::Change(vgpu, params) => Event::Changed { vgpu: TenantId(vgpu), params },
                Op::Compete(vgpu, params) => Event::Competes { vgpu: TenantId(vgpu), params },
                Op::Withdraw(_) | Op::Stall(_) | Op::GoOn(_) => match scheduler.pending().next() {
                    Some((_, _, _, ticket)) => Event::Completed { ticket, ended: Some(now) },
                    None => Event::Tick,
                },
                _ => Event::Tick,
            };
            scheduler.event(now, event, &mut decisions);
            let _ = scheduler.next_wakeup();
        }
    }

    /// Checks that budgets stay within a few periods per competitor, and that each vGPU's use in excess of its share is
    /// bounded.
    #[test]
    fn credits_are_bounded(
        policy in prop::sample::select(vec![PolicyKind::Credit, PolicyKind::Band]),
        correct: bool,
        arrivals in prop::collection::vec((0u64..4 * MS, 0u32..4, 1_000u64..20 * MS), 1..300),
    ) {
        let mut config = Config { policy, ..Config::default() };
        config.band.correct = correct;
        let mut harness = Harness::new(config);
        (0..4).for_each(|vgpu| harness.add(vgpu, VgpuParams::weight(1 + vgpu)));
        let period = 30 * MS as i64;
        for (pause, vgpu, length) in arrivals {
            harness.pass(pause);
            harness.arrive(vgpu, 0, Engine::Compute, length);
            for vgpu in 0..4 {
                let standing = harness.scheduler.standing(TenantId(vgpu), Engine::Compute);
                prop_assert!(standing.credit.abs() <= 8 * period, "{standing:?}");
                prop_assert!(standing.beyond.abs() < 300 * period, "{standing:?}");
            }
        }
    }

}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Checks that each vGPU with work gets the engine within a time that depends on the submissions' lengths and the
    /// weights.
    #[test]
    fn no_one_starves(
        policy in prop::sample::select(vec![PolicyKind::Fifo, PolicyKind::Credit, PolicyKind::Band, PolicyKind::Disengaged]),
        correct: bool,
        guests in prop::collection::vec((1u32..20, 50_000u64..5 * MS, 0u64..200_000, 1u32..4), 2..7),
        seed: u64,
    ) {
        let weights: u32 = guests.iter().map(|(weight, ..)| weight).sum();
        let least = guests.iter().map(|(weight, ..)| *weight).min().unwrap();
        let longest = guests.iter().map(|(_, length, ..)| *length).max().unwrap();
        let most: u64 = guests.iter().map(|(.., depth)| u64::from(*depth)).sum();
        let guests = guests.into_iter().map(|(weight, length, think, depth)| {
            let mut stream = sim::Stream::looping(sim::Length::Fixed(length), sim::Length::Uniform(0, think));
            stream.depth = depth;
            sim::Guest::new(stream).weight(weight)
        });
        let mut config = Config { policy, ..Config::default() };
        config.band.correct = correct;
        let scenario = sim::Scenario::new(config, 2_000 * MS, guests.collect());
        let outcome = sim::run(&scenario, seed).unwrap();
        // The bound is the time of a weighted round of all waiting vGPUs, plus a few periods for time used ahead.
        let bound = most * longest * u64::from(weights) / u64::from(least) + 12 * 30 * MS;
        for (vm, waits) in outcome.waits.iter().enumerate() {
            prop_assert!(waits.max() <= bound, "VM {vm} waited {} of {bound}", waits.max());
            prop_assert!(waits.count() > 0 && outcome.rounds[vm] > 0 || bound > 1_000 * MS, "VM {vm} was not served");
        }
    }

    /// Checks that shares match changed weights after two periods, regardless of the history.
    #[test]
    fn shares_converge_to_weights_from_any_start(
        before in prop::collection::vec((config(), prop::collection::vec(params(), 3)), 0..4),
        weights in prop::collection::vec(1u32..30, 3),
        lengths in prop::collection::vec(100_000u64..2 * MS, 3),
        seed: u64,
    ) {
        use sim::Change;
        let guests = lengths.iter().map(|length| {
            let mut stream = sim::Stream::looping(sim::Length::Fixed(*length), sim::Length::Uniform(10_000, 50_000));
            stream.depth = 3;
            sim::Guest::new(stream)
        });
        let mut scenario = sim::Scenario::new(Config::default(), 4_000 * MS, guests.collect());
        let mut at = 0;
        for (config, params) in before {
            at += 100 * MS;
            scenario.changes.push((crate::Nanos(at), Change::Config(config)));
            let params = params.into_iter().zip(0..).map(|(params, vgpu)| Change::Vgpu(TenantId(vgpu), params));
            scenario.changes.extend(params.map(|change| (crate::Nanos(at), change)));
        }
        let at = 500 * MS;
        scenario.changes.push((crate::Nanos(at), Change::Config(Config::default())));
        let set = weights.iter().zip(0..).map(|(weight, vgpu)| Change::Vgpu(TenantId(vgpu), VgpuParams::weight(*weight)));
        scenario.changes.extend(set.map(|change| (crate::Nanos(at), change)));
        let outcome = sim::run(&scenario, seed).unwrap();
        let sum: u32 = weights.iter().sum();
        let shares = outcome.shares(Engine::Compute, at + 60 * MS, 4_000 * MS);
        for (share, weight) in shares.iter().zip(&weights) {
            let wanted = f64::from(*weight) / f64::from(sum);
            prop_assert!((share - wanted).abs() < 0.01, "{shares:?} for {weights:?}");
        }
    }
}
