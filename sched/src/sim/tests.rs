//! Tests policies with workloads, and tests the simulator itself.

use super::{Card, Change, Guest, Length, Outcome, Pulse, Scenario, Step, Stream, jain, run, run_with};
use crate::trace::{Recorder, Trace, TraceError};
use crate::{BandParams, Config, Engine, Nanos, Pipeline, PolicyKind, Queues, Scheduler, TenantId, VgpuParams};
use std::collections::BTreeMap;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;
/// Time from the end of a submission to the guest's next doorbell, in ns.
const THINK: Length = Length::Uniform(20_000, 60_000);
/// Length of a kernel of the papers' `madd`, in ns.
const MADD: u64 = MS / 2;
/// Length of a kernel of the papers' `long-madd`, in ns.
const LONG_MADD: u64 = 5 * MADD;

fn looping(length: u64) -> Guest {
    Guest::new(Stream::looping(Length::Fixed(length), THINK))
}

/// Returns VMs, half of which loop a short kernel, while the other half loop a kernel that is five times as long.
fn unequal(vms: usize) -> Vec<Guest> {
    (0..vms).map(|vm| looping(if vm % 2 == 0 { MADD } else { LONG_MADD })).collect()
}

fn published(policy: PolicyKind) -> Config {
    Config { policy, band: BandParams::published(), pipeline: Pipeline::ONE, ..Config::default() }
}

fn simulate(config: Config, seconds: u64, guests: Vec<Guest>) -> Outcome {
    run(&Scenario::new(config, seconds * SECOND, guests), 7).unwrap()
}

/// Returns each VM's share of the use of the compute engine, excluding the first second.
fn shares(outcome: &Outcome) -> Vec<f64> {
    outcome.shares(Engine::Compute, SECOND, u64::MAX)
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_does_not() {
    let scenario = Scenario::new(Config::default(), SECOND, unequal(4));
    let log = |seed| {
        let mut log = Vec::new();
        run_with(&scenario, seed, &mut |at, event, decisions| log.push((at, event, decisions.to_vec()))).unwrap();
        log
    };
    assert_eq!(log(1), log(1));
    assert_ne!(log(1), log(2));
}

#[test]
fn the_schedulers_books_agree_with_the_card() {
    for policy in PolicyKind::ALL {
        let outcome = simulate(Config { policy, ..Config::default() }, 3, unequal(5));
        // A submission is charged from the time at which the card receives it, because an idle engine starts it
        // immediately.
        let (charged, busy) = (outcome.scheduler.busy(Engine::Compute), outcome.busy(Engine::Compute));
        assert_eq!(charged, busy, "{policy:?}");
    }
}

#[test]
fn fifo_gives_the_long_kernels_five_times_as_much() {
    let shares = shares(&simulate(published(PolicyKind::Fifo), 5, unequal(2)));
    assert!((shares[1] / shares[0] - 5.0).abs() < 0.05, "{shares:?}");
}

#[test]
fn credit_fails_with_two_vms_and_not_with_four() {
    let two = shares(&simulate(published(PolicyKind::Credit), 5, unequal(2)));
    assert!(two[1] > 0.8, "{two:?}");
    let four = shares(&simulate(published(PolicyKind::Credit), 5, unequal(4)));
    assert!(jain(&four, &[0.25; 4]) > 0.999, "{four:?}");
}

#[test]
fn published_band_is_fair_over_500_ms_but_not_over_100_ms() {
    let outcome = simulate(published(PolicyKind::Band), 10, unequal(2));
    assert!(outcome.share_error(Engine::Compute, SECOND / 2, SECOND, &[0.5; 2]).mean < 0.07);
    let outcome = simulate(published(PolicyKind::Band), 10, unequal(8));
    assert!(outcome.share_error(Engine::Compute, SECOND / 10, SECOND, &[0.125; 8]).worst > 0.1);
}

#[test]
fn band_meets_its_targets_with_unequal_kernels() {
    for vms in [2, 4, 8] {
        let outcome = simulate(Config::default(), 20, unequal(vms));
        let wanted = vec![1.0 / vms as f64; vms];
        let error = |window| outcome.share_error(Engine::Compute, window, SECOND, &wanted);
        assert!(error(SECOND / 2).worst <= 0.01, "{vms} VMs: {:?}", error(SECOND / 2));
        assert!(error(SECOND / 10).worst <= 0.03, "{vms} VMs: {:?}", error(SECOND / 10));
    }
}

#[test]
fn disengaged_policy_throttles_vms_over_their_share() {
    for vms in [2, 4, 8] {
        let outcome = simulate(Config { policy: PolicyKind::Disengaged, ..Config::default() }, 20, unequal(vms));
        assert!(jain(&shares(&outcome), &vec![1.0 / vms as f64; vms]) > 0.999, "{vms} VMs: {:?}", shares(&outcome));
        assert!(outcome.utilisation(Engine::Compute) > 0.95);
    }
}

#[test]
fn one_vm_alone_loses_nothing_to_any_policy() {
    for length in [50_000, MADD] {
        let stream = || Stream { depth: 4, ..Stream::looping(Length::Fixed(length), THINK) };
        let done = |policy| simulate(Config { policy, ..Config::default() }, 3, vec![Guest::new(stream())]).rounds[0];
        let direct = done(PolicyKind::Direct);
        for policy in PolicyKind::ALL {
            assert!(done(policy) * 1000 >= direct * 995, "{policy:?}: {} of {direct}", done(policy));
        }
    }
}

#[test]
fn idle_vm_share_goes_to_others_and_returns_within_period() {
    let guests = vec![
        looping(MADD),
        looping(MADD),
        Guest::new(Stream {
            pulse: Some(Pulse { on: SECOND, off: SECOND }),
            ..Stream::looping(Length::Fixed(MADD), THINK)
        }),
    ];
    let outcome = simulate(Config::default(), 6, guests);
    let idle = outcome.shares(Engine::Compute, SECOND + 30 * MS, 2 * SECOND);
    assert!(idle[2] < 0.01 && (idle[0] - 0.5).abs() < 0.01, "{idle:?}");
    assert!(outcome.used(0, Engine::Compute, SECOND, 2 * SECOND) > 480 * MS);
    let back = outcome.shares(Engine::Compute, 2 * SECOND, 2 * SECOND + 30 * MS);
    assert!(back[2] > 0.3, "{back:?}");
    let on = outcome.shares(Engine::Compute, 2 * SECOND + 30 * MS, 3 * SECOND);
    assert!(on.iter().all(|share| (share - 1.0 / 3.0).abs() < 0.01), "{on:?}");
}

#[test]
fn a_guarantee_and_a_cap_hold_while_others_want_more() {
    let greedy = || Guest::new(Stream { depth: 3, ..Stream::looping(Length::Fixed(MADD), THINK) });
    let mut guests = vec![greedy().weight(1), greedy(), greedy(), greedy()];
    guests[0].params.guarantee_permille = 400;
    guests[1].params.cap_permille = 100;
    let shares = shares(&simulate(Config::default(), 10, guests));
    for (share, wanted) in shares.iter().zip([0.4, 0.1, 0.25, 0.25]) {
        assert!((share - wanted).abs() < 0.01, "{shares:?}");
    }
}

#[test]
fn copies_and_kernels_overlap_unless_they_share_a_queue() {
    let steps = |copy, compute| {
        let step = |engine, length| Step { engine, length: Length::Fixed(length) };
        vec![step(Engine::Copy0, copy), step(Engine::Compute, compute), step(Engine::Copy0, copy)]
    };
    let guest = |compute| Guest::new(Stream { steps: steps(MS, compute), ..Stream::looping(Length::Fixed(0), THINK) });
    let both = |queues| {
        let outcome = simulate(Config { queues, ..Config::default() }, 3, vec![guest(2 * MS), guest(2 * MS)]);
        outcome.utilisation(Engine::Compute) + outcome.utilisation(Engine::Copy0)
    };
    assert!(both(Queues::Separate) > 1.5, "{}", both(Queues::Separate));
    assert!(both(Queues::Single) < 1.0, "{}", both(Queues::Single));
}

#[test]
fn record_replays_to_same_decisions_only_under_same_policy() {
    let mut scenario = Scenario::new(Config::default(), SECOND, unequal(3));
    scenario.changes.push((Nanos(SECOND / 2), Change::Config(published(PolicyKind::Fifo))));
    scenario.changes.push((Nanos(SECOND / 3), Change::Vgpu(TenantId(1), VgpuParams::weight(7))));
    let fresh = Scheduler::new(scenario.config, Nanos(0)).unwrap();
    let mut recorder = Recorder::new(Vec::new(), &fresh, Nanos(0), &BTreeMap::new()).unwrap();
    let outcome = run_with(&scenario, 3, &mut |at, event, decisions| recorder.record(at, event, decisions).unwrap());
    let text = recorder.finish().unwrap();
    let mut trace = Trace::read(&*text).unwrap();
    assert_eq!(trace.entries.len() as u64, outcome.unwrap().events);
    assert!(trace.replay().other.is_empty());
    trace.scheduler = Scheduler::new(published(PolicyKind::Credit), Nanos(0)).unwrap();
    assert!(!trace.replay().other.is_empty());
    assert!(Trace::read(&text[..text.len() - 5]).is_err());
    assert!(Trace::read(&b""[..]).is_err());
    assert!(matches!(Trace::read(&b"{\"sched_trace\":2}\n"[..]), Err(TraceError::Format(2))));
}

#[test]
fn a_record_that_begins_in_mid_run_replays_under_any_policy() {
    let capped = VgpuParams { cap_permille: 300, ..VgpuParams::weight(30) };
    for policy in PolicyKind::ALL {
        let mut scenario = Scenario::new(Config { policy, ..Config::default() }, SECOND, unequal(4));
        scenario.changes.push((Nanos(SECOND / 3), Change::Vgpu(TenantId(1), capped)));
        // To obtain the state in the middle of the run, feed the same events to a second scheduler.
        let mut twin = Scheduler::new(scenario.config, Nanos(0)).unwrap();
        let mut recorder = None;
        let names = BTreeMap::from([(TenantId(0), "web".to_owned())]);
        let run = run_with(&scenario, 3, &mut |at, event, decisions| {
            if at.0 > SECOND / 2 {
                let recorder = recorder.get_or_insert_with(|| Recorder::new(Vec::new(), &twin, at, &names).unwrap());
                recorder.record(at, event, decisions).unwrap();
            }
            twin.event(at, event, &mut Vec::new());
        });
        run.unwrap();
        let text = recorder.unwrap().finish().unwrap();
        let trace = Trace::read(&*text).unwrap();
        assert_eq!(trace.names, names);
        assert!(trace.entries.len() > 100 && trace.length() > SECOND / 3, "{policy:?}");
        let replay = trace.replay();
        assert_eq!(replay.other, [], "{policy:?}");
        assert!(replay.scheduler.account(TenantId(0), Engine::Compute).unwrap().used > 0, "accounts of the record");
    }
}

#[test]
fn record_under_other_policy_keeps_work_and_changes_order() {
    // Three guests keep up to four kernels each in flight or queued, so the engine is always busy.
    let guests = (0..3)
        .map(|vm| Guest::new(Stream { depth: 4, ..Stream::looping(Length::Fixed([1, 5, 5][vm] * MS / 2), THINK) }));
    let scenario = Scenario::new(published(PolicyKind::Fifo), 2 * SECOND, guests.collect());
    let fresh = Scheduler::new(scenario.config, Nanos(0)).unwrap();
    let mut recorder = Recorder::new(Vec::new(), &fresh, Nanos(0), &BTreeMap::new()).unwrap();
    run_with(&scenario, 1, &mut |at, event, decisions| recorder.record(at, event, decisions).unwrap()).unwrap();
    let trace = Trace::read(&*recorder.finish().unwrap()).unwrap();
    let recorded = trace.replay().scheduler;
    let used = |scheduler: &Scheduler, vm| scheduler.account(TenantId(vm), Engine::Compute).unwrap().clone();
    for policy in PolicyKind::ALL {
        let other = trace.under(Config { policy, ..Config::default() }).unwrap();
        for vm in 0..3 {
            let (one, other) = (used(&recorded, vm), used(&other, vm));
            assert_eq!(other.completed, one.completed, "{policy:?}");
            assert!(other.used.abs_diff(one.used) < one.used / 50, "{policy:?}: {} {}", other.used, one.used);
        }
    }
    // The guest with short kernels waits less with BAND than with FIFO.
    let band = trace.under(Config::default()).unwrap();
    assert!(used(&band, 0).waits.mean() < used(&recorded, 0).waits.mean());
}

/// Runs three well-behaved VMs alongside a misbehaving VM.
fn neighbours_of(rogue: Guest, config: Config) -> Outcome {
    simulate(config, 10, vec![looping(MADD), looping(MADD), looping(LONG_MADD), rogue])
}

fn assert_neighbours_keep_their_share(outcome: &Outcome) {
    for vm in 0..3 {
        let used = outcome.used(vm, Engine::Compute, SECOND, 10 * SECOND) as f64 / (9 * SECOND) as f64;
        assert!(used >= 0.24, "VM {vm} had a share of {used}: {:?}", shares(outcome));
    }
}

#[test]
fn a_flood_of_empty_submissions_takes_no_ones_share() {
    let flood = Stream { depth: 200, ..Stream::looping(Length::Fixed(100), Length::Fixed(0)) };
    assert_neighbours_keep_their_share(&neighbours_of(Guest::new(flood), Config::default()));
}

#[test]
fn work_that_is_split_to_look_small_takes_no_ones_share() {
    let split = Stream { depth: 64, ..Stream::looping(Length::Fixed(20_000), Length::Fixed(0)) };
    assert_neighbours_keep_their_share(&neighbours_of(Guest::new(split), Config::default()));
}

#[test]
fn vm_idling_around_engine_wait_takes_no_neighbour_share() {
    // The VM submits again just before or just after the engine's wait for it ends.
    for think in [450_000, 520_000] {
        let tease = Stream::looping(Length::Fixed(1_000), Length::Fixed(think));
        assert_neighbours_keep_their_share(&neighbours_of(Guest::new(tease), Config::default()));
    }
}

#[test]
fn vm_hung_in_flight_is_killed_and_neighbours_keep_share() {
    let forever = Stream { from: Nanos(3 * SECOND / 2), ..Stream::looping(Length::Forever, THINK) };
    let mut rogue = Guest::new(forever);
    rogue.params.max_run_ns = Some(100 * MS);
    let outcome = neighbours_of(rogue, Config::default());
    assert_eq!(outcome.killed, 1);
    assert_neighbours_keep_their_share(&outcome);
    // A VMM dies while its VM's work is on the card.
    let mut rogue = looping(20 * MS);
    rogue.gone = Some(Nanos(2 * SECOND + 7 * MS));
    assert_neighbours_keep_their_share(&neighbours_of(rogue, Config::default()));
}

#[test]
fn ends_that_are_forged_take_no_ones_share() {
    let mut liar = looping(LONG_MADD);
    liar.lie = LONG_MADD;
    let outcome = neighbours_of(liar, Config::default());
    for vm in 0..3 {
        let used = outcome.used(vm, Engine::Compute, SECOND, 10 * SECOND) as f64 / (9 * SECOND) as f64;
        assert!(used >= 0.23, "VM {vm} had a share of {used}: {:?}", shares(&outcome));
    }
}

#[test]
fn an_hour_of_sixteen_idle_vms_costs_nothing() {
    let outcome = simulate(
        Config::default(),
        3600,
        (0..16)
            .map(|_| Guest::new(Stream { from: Nanos(u64::MAX), ..Stream::looping(Length::Fixed(MADD), THINK) }))
            .collect(),
    );
    assert_eq!((outcome.events, outcome.ticks), (16, 0));
}

/// Returns a guest that always has work queued and whose driver, like nouveau's, sends a short submission after each
/// kernel.
fn fenced(length: u64) -> Guest {
    let step = |length| Step { engine: Engine::Compute, length: Length::Fixed(length) };
    Guest::new(Stream {
        steps: vec![step(length), step(MS / 20)],
        depth: 16,
        ..Stream::looping(Length::Fixed(1), THINK)
    })
}

#[test]
fn short_kernels_do_not_pay_for_a_host_that_sees_ends_late() {
    let lengths = [(4 * MS / 10, 19 * MS / 10), (4 * MS / 10, 5 * MS)];
    let cases = [PolicyKind::Credit, PolicyKind::Band].into_iter().flat_map(|policy| lengths.map(|of| (policy, of)));
    for (policy, (short, long)) in cases {
        for (late, most) in [(8_000, 0.005), (50_000, 0.01), (200_000, 0.03)] {
            let card = Card { interrupt: Length::Uniform(late * 3 / 4, late * 5 / 4), ..Card::default() };
            let config = Config { policy, ..Config::default() };
            let guests = vec![fenced(short), fenced(long)];
            let shares = shares(&run(&Scenario { card, ..Scenario::new(config, 5 * SECOND, guests) }, 7).unwrap());
            // CREDIT has no free waits.
            let most = if policy == PolicyKind::Credit { most + 0.01 } else { most };
            assert!((shares[0] - 0.5).abs() < most, "{policy:?}, {short} and {long} ns, {late} ns late: {shares:?}");
        }
    }
}

#[test]
fn idle_vms_do_not_keep_an_interactive_one_waiting() {
    // One VM has 2 ms of work every 16 ms, and three other VMs always have work. The first VM's overuse decays between
    // its bursts.
    let waits = |idle: usize| {
        let bursts = Guest::new(Stream::looping(Length::Fixed(2 * MS), Length::Fixed(14 * MS)));
        let batch = Guest::new(Stream { depth: 4, ..Stream::looping(Length::Fixed(LONG_MADD), THINK) });
        let nothing = Guest::new(Stream { depth: 0, ..Stream::looping(Length::Fixed(MS), THINK) });
        let mut guests = vec![bursts; 1];
        guests[0].params.class = crate::LatencyClass::Interactive;
        guests.extend(vec![batch; 3]);
        guests.extend(vec![nothing; idle]);
        simulate(Config::default(), 20, guests).waits[0].mean()
    };
    let (none, some) = (waits(0), waits(12));
    assert!(some < none + none / 10, "mean wait in ns: {none} without idle VMs, {some} with twelve");
}

#[test]
fn short_submissions_after_kernel_do_not_wait_out_its_debt() {
    // The VM uses a sixth of the card, which is below its share of a quarter: it submits a kernel and three short
    // submissions every 18 ms.
    let step = |length| Step { engine: Engine::Compute, length: Length::Fixed(length) };
    let pulse = |steps: Vec<Step>, from| Stream {
        steps,
        pulse: Some(Pulse { on: MS / 10, off: 18 * MS }),
        from: Nanos(from),
        ..Stream::looping(Length::Fixed(1), Length::Fixed(MS / 5))
    };
    let mut bursts = Guest::new(pulse(vec![step(3 * MS)], 0));
    bursts.streams.extend((1..=3).map(|at| pulse(vec![step(MS / 20)], at * MS)));
    bursts.params.class = crate::LatencyClass::Interactive;
    let batch = Guest::new(Stream { depth: 4, ..Stream::looping(Length::Fixed(19 * MS / 10), THINK) });
    let outcome = simulate(Config::default(), 20, [vec![bursts], vec![batch; 3]].concat());
    let waits = [500, 900, 990].map(|permille| outcome.waits[0].quantile(permille));
    assert!(waits[0] < 3 * MS && waits[2] < 6 * MS, "waits in ns: {waits:?}");
}
