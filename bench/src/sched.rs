//! Measures the scheduler in simulated time: each VM's share of the GPU under each policy, with the workloads of
//! GPUvm's and Gdev's figures, and with misbehaving guests. Runs are deterministic, except for the measured CPU times
//! of the simulation and of an event.
//!
//! We assume that GPUvm's `madd` takes 0.5 ms, and its `long-madd` five times as long. Without preemption, an engine is
//! allocated in units of whole kernels, so the share in a window of 100 ms can be off by one kernel at each end.
//! Because 3 % of the window is 3 ms, policies cannot meet the target if the longest kernel is much longer than 2.5 ms.
//! `sched.lengths` covers other lengths.
//!
//! `sched_guests` runs the same measurements with stock guests, and [`idle`] measures the effect of idle VMs.

mod idle;

use ::sched::sim::{Card, Guest, Length, Outcome, Pulse, Scenario, Step, Stream, jain, run as simulate, run_with};
use ::sched::{
    BandParams, Config, Engine, Histogram, LatencyClass, Nanos, Pipeline, PolicyKind, Queues, Scheduler, VgpuParams,
};
use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};

use crate::report::{Metric, Target};

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;
/// Time from an interrupt to the guest's next doorbell.
const THINK: Length = Length::Uniform(20 * US, 60 * US);
const MADD: u64 = 500 * US;
const LONG_MADD: u64 = 5 * MADD;
/// Initial part of a run that is excluded from all figures, in ns.
const WARM_UP_NS: u64 = SECOND;
/// Seeds of the runs. The report contains the worst result.
const SEEDS: [u64; 3] = [1, 2, 3];

/// A policy under test.
struct Contender {
    name: &'static str,
    config: Config,
}

fn contender(name: &'static str, policy: PolicyKind, published: bool) -> Contender {
    let config = Config { policy, ..Config::default() };
    let papers = Config { band: BandParams::published(), pipeline: Pipeline::ONE, ..config };
    Contender { name, config: if published { papers } else { config } }
}

/// Returns all policies. As published, the papers' policies run one submission at a time.
fn contenders() -> Vec<Contender> {
    vec![
        contender("fifo", PolicyKind::Fifo, true),
        contender("credit", PolicyKind::Credit, true),
        contender("band_published", PolicyKind::Band, true),
        contender("disengaged", PolicyKind::Disengaged, false),
        contender("band", PolicyKind::Band, false),
    ]
}

fn ours() -> Config {
    Config::default()
}

fn looping(length: u64) -> Guest {
    Guest::new(Stream::looping(Length::Fixed(length), THINK))
}

/// Returns a guest that always has several kernels queued.
fn backlog(length: u64) -> Guest {
    Guest::new(Stream { depth: 4, ..Stream::looping(Length::Fixed(length), THINK) })
}

fn unequal(vms: usize, madd: u64) -> Vec<Guest> {
    (0..vms).map(|vm| looping(if vm % 2 == 0 { madd } else { 5 * madd })).collect()
}

fn play(config: Config, seconds: u64, guests: Vec<Guest>, seed: u64) -> Result<Outcome> {
    Ok(simulate(&Scenario::new(config, seconds * SECOND, guests), seed)?)
}

fn equal(vms: usize) -> Vec<f64> {
    vec![1.0 / vms as f64; vms]
}

/// Returns the VMs' entitlements as fractions of the GPU time, which are proportional to their weights.
fn due(guests: &[Guest]) -> Vec<f64> {
    let weight = |guest: &Guest| f64::from(guest.params.weight);
    let sum: f64 = guests.iter().map(weight).sum();
    guests.iter().map(|guest| weight(guest) / sum).collect()
}

fn percent(name: String, value: f64) -> Metric {
    Metric::plain(name, value * 100.0, "%")
}

fn micros(name: String, ns: u64) -> Metric {
    Metric::plain(name, ns as f64 / 1e3, "us")
}

/// Returns the wait times of all VMs.
fn all_waits(outcome: &Outcome) -> Histogram {
    let mut waits = Histogram::default();
    outcome.waits.iter().for_each(|of| waits.merge(of));
    waits
}

/// Returns Jain's index of the shares from `from` ns on, and the utilization and wait times of the whole run.
fn common(row: &str, outcome: &Outcome, from: u64, wanted: &[f64]) -> Vec<Metric> {
    let shares = outcome.shares(Engine::Compute, from, u64::MAX);
    let waits = all_waits(outcome);
    vec![
        Metric::plain(format!("{row}.jain"), jain(&shares, wanted), "index"),
        percent(format!("{row}.utilisation"), outcome.utilisation(Engine::Compute)),
        micros(format!("{row}.wait_p50"), waits.quantile(500)),
        micros(format!("{row}.wait_p99"), waits.quantile(990)),
    ]
}

/// A part of the benchmark and its name.
type Part = (&'static str, fn() -> Result<Vec<Metric>>);

const PARTS: [Part; 13] = [
    ("gpuvm", gpuvm_figures_7_and_8),
    ("idle", idle::run),
    ("lengths", lengths),
    ("gdev14", gdev_figure_14),
    ("gdev15", gdev_figure_15),
    ("gdev15_copies", unequal_copies),
    ("gdev16", gdev_figure_16),
    ("weights", weights),
    ("interactive", interactive),
    ("alone", alone),
    ("16vms", sixteen),
    ("rogue", rogues),
    ("scale", scale),
];

/// Measures all parts, or only those whose name contains `only`.
pub fn run(only: Option<&str>) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for (_, part) in PARTS.iter().filter(|(name, _)| only.is_none_or(|only| name.contains(only))) {
        metrics.extend(part()?);
    }
    Ok(metrics)
}

/// Returns the maximum of each value over the seeds.
fn worst(each: impl Fn(u64) -> Result<Vec<f64>>) -> Result<Vec<f64>> {
    let all = SEEDS.iter().map(|seed| each(*seed)).collect::<Result<Vec<_>>>()?;
    let most = |a: Vec<f64>, b: Vec<f64>| a.iter().zip(&b).map(|(a, b)| a.max(*b)).collect();
    all.into_iter().reduce(most).context("no seed")
}

/// Measures `madd` against `long-madd` in 2, 4 and 8 VMs.
fn gpuvm_figures_7_and_8() -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for vms in [2, 4, 8] {
        for Contender { name, config } in contenders() {
            let values = worst(|seed| {
                let outcome = play(config, 30, unequal(vms, MADD), seed)?;
                let half = outcome.share_error(Engine::Compute, 500 * MS, WARM_UP_NS, &equal(vms));
                let tenth = outcome.share_error(Engine::Compute, 100 * MS, WARM_UP_NS, &equal(vms));
                let unfair = 1.0 - jain(&outcome.shares(Engine::Compute, WARM_UP_NS, u64::MAX), &equal(vms));
                let idle = 1.0 - outcome.utilisation(Engine::Compute);
                let waits = all_waits(&outcome);
                let [p50, p99] = [500, 990].map(|permille| waits.quantile(permille) as f64 / 1e3);
                Ok(vec![half.mean, half.worst, tenth.mean, tenth.worst, unfair, idle, p50, p99])
            })?;
            let [half, half_worst, tenth, tenth_worst, unfair, idle, p50, p99] = values[..] else { continue };
            let row = format!("sched.gpuvm.{vms}vms.{name}");
            let (half_target, tenth_target) = match name {
                "band" => (Target::AtMost(1.0), Target::AtMost(3.0)),
                _ => (Target::None, Target::None),
            };
            let peer = match (name, vms) {
                ("fifo", _) => "GPUvm fig. 7: long-madd higher in all cases",
                ("credit", 2) => "GPUvm fig. 7: not fair",
                ("credit", _) => "GPUvm fig. 7: fair",
                ("band_published" | "band", _) => "GPUvm fig. 7: fair; Gdev: within 7 %",
                _ => "",
            };
            metrics.extend([
                percent(format!("{row}.error_500ms"), half).target(half_target).beside(peer),
                percent(format!("{row}.error_500ms_worst"), half_worst).target(half_target),
                percent(format!("{row}.error_100ms"), tenth)
                    .target(tenth_target)
                    .beside("GPUvm fig. 8: nobody fair, BAND neither"),
                percent(format!("{row}.error_100ms_worst"), tenth_worst).target(tenth_target),
                Metric::plain(format!("{row}.jain"), 1.0 - unfair, "index"),
                percent(format!("{row}.utilisation"), 1.0 - idle),
                Metric::plain(format!("{row}.wait_p50"), p50, "us"),
                Metric::plain(format!("{row}.wait_p99"), p99, "us"),
            ]);
        }
    }
    Ok(metrics)
}

/// Measures BAND with other durations of `madd`, to find windows that are too short, and kernels that are too short to
/// wait for.
fn lengths() -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for madd in [100 * US, 200 * US, MS, 2 * MS, 5 * MS] {
        for vms in [2, 8] {
            let outcome = play(ours(), 30, unequal(vms, madd), 1)?;
            let row = format!("sched.lengths.{}us.{vms}vms", madd / US);
            for window in [500, 100] {
                let error = outcome.share_error(Engine::Compute, window * MS, WARM_UP_NS, &equal(vms));
                metrics.push(percent(format!("{row}.error_{window}ms"), error.mean));
                metrics.push(percent(format!("{row}.error_{window}ms_worst"), error.worst));
            }
            metrics.push(percent(format!("{row}.utilisation"), outcome.utilisation(Engine::Compute)));
        }
    }
    Ok(metrics)
}

/// Measures short tasks against long tasks that arrive 30 s later, in runs of 200 s.
fn gdev_figure_14() -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for Contender { name, config } in contenders() {
        let config = Config { queues: Queues::Single, ..config };
        let short = Guest::new(Stream::looping(Length::Uniform(300 * US, 900 * US), THINK));
        let late = Stream { from: Nanos(30 * SECOND), ..Stream::looping(Length::Uniform(3 * MS, 9 * MS), THINK) };
        let outcome = play(config, 200, vec![short, Guest::new(late)], 1)?;
        let error = outcome.share_error(Engine::Compute, 500 * MS, 31 * SECOND, &equal(2));
        let row = format!("sched.gdev14.{name}");
        let peer = match name {
            "fifo" | "credit" => "Gdev: no isolation",
            _ => "Gdev, BAND: within 7 % on average",
        };
        metrics.push(percent(format!("{row}.error"), error.mean).beside(peer));
        metrics.extend(common(&row, &outcome, 31 * SECOND, &equal(2)));
    }
    Ok(metrics)
}

/// Measures copies and kernels of two sizes under BAND, with separate queues (MRQ) and with one queue (SDQ).
fn gdev_figure_15() -> Result<Vec<Metric>> {
    let guest = |copy: u64, kernel: u64| {
        let step = |engine, length| Step { engine, length: Length::Fixed(length) };
        let mut steps = vec![step(Engine::Copy0, copy)];
        steps.extend([step(Engine::Compute, kernel); 4]);
        steps.push(step(Engine::Copy0, copy));
        Guest::new(Stream { steps, depth: 2, ..Stream::looping(Length::Fixed(0), THINK) })
    };
    let mut metrics = Vec::new();
    for (name, queues) in [("mrq", Queues::Separate), ("sdq", Queues::Single)] {
        let guests = vec![guest(2 * MS, 300 * US), guest(2 * MS, 1200 * US)];
        let mut scenario = Scenario::new(Config { queues, ..ours() }, 30 * SECOND, guests);
        scenario.card = Card { copy_slowdown_permille: 300, ..Card::default() };
        let outcome = simulate(&scenario, 1)?;
        let part = |vm, engine| outcome.used(vm, engine, WARM_UP_NS, 30 * SECOND) as f64 / (29 * SECOND) as f64;
        let row = format!("sched.gdev15.{name}");
        let both = outcome.utilisation(Engine::Compute) + outcome.utilisation(Engine::Copy0);
        let peer = if name == "mrq" { "Gdev, MRQ: exceeds 100 %" } else { "Gdev, SDQ: does not overlap" };
        for vm in 0..2 {
            metrics.push(percent(format!("{row}.vm{vm}.compute"), part(vm, Engine::Compute)));
            metrics.push(
                percent(format!("{row}.vm{vm}.copy"), part(vm, Engine::Copy0)).beside("Gdev, MRQ: about 50 % at most"),
            );
        }
        metrics.push(percent(format!("{row}.both_engines"), both).beside(peer));
    }
    Ok(metrics)
}

/// Measures Gdev's figure 15 with copies of unequal duration, and with different shares for copies and compute.
fn unequal_copies() -> Result<Vec<Metric>> {
    let guest = |copy: u64, weight: u32| {
        let kernels = Stream { depth: 2, ..Stream::looping(Length::Fixed(MS), THINK) };
        let step = Step { engine: Engine::Copy0, length: Length::Fixed(copy) };
        let copies = Stream { steps: vec![step], ..kernels.clone() };
        let mut guest = Guest { streams: vec![kernels.clone(), copies], ..Guest::new(kernels) };
        guest.params.copies.weight = Some(weight);
        guest
    };
    let mut metrics = Vec::new();
    for (name, weights, wanted) in [("equal", [100, 100], [0.5, 0.5]), ("weights_3_1", [300, 100], [0.75, 0.25])] {
        let guests = vec![guest(2 * MS, weights[0]), guest(6 * MS, weights[1])];
        let mut scenario = Scenario::new(ours(), 30 * SECOND, guests);
        scenario.card = Card { copy_slowdown_permille: 300, ..Card::default() };
        let outcome = simulate(&scenario, 1)?;
        for (engine, wanted) in [(Engine::Compute, [0.5, 0.5]), (Engine::Copy0, wanted)] {
            let row = format!("sched.gdev15_copies.{name}.{}", engine.name());
            let error = outcome.share_error(engine, 500 * MS, WARM_UP_NS, &wanted);
            metrics.push(percent(format!("{row}.error_500ms"), error.mean).target(Target::AtMost(1.0)));
            metrics.push(percent(format!("{row}.error_500ms_worst"), error.worst));
            let shares = outcome.shares(engine, WARM_UP_NS, u64::MAX);
            metrics.extend(shares.iter().enumerate().map(|(vm, share)| percent(format!("{row}.vm{vm}"), *share)));
        }
    }
    Ok(metrics)
}

/// Measures four equal VMs, which start at intervals of 30 s and run four instances each.
fn gdev_figure_16() -> Result<Vec<Metric>> {
    let guest = |vm: u64| {
        let stream =
            Stream { from: Nanos(vm * 30 * SECOND), ..Stream::looping(Length::Uniform(300 * US, 900 * US), THINK) };
        Guest { streams: vec![stream.clone(), stream.clone(), stream.clone(), stream.clone()], ..Guest::new(stream) }
    };
    let outcome = play(ours(), 150, (0..4).map(guest).collect(), 1)?;
    let mut metrics = Vec::new();
    for vms in 1..=4u64 {
        let from = (vms - 1) * 30 * SECOND + WARM_UP_NS;
        let until = if vms == 4 { 150 * SECOND } else { vms * 30 * SECOND };
        let wanted: Vec<f64> = (0..4).map(|vm| if vm < vms { 1.0 / vms as f64 } else { 0.0 }).collect();
        let errors = outcome.windows(Engine::Compute, 500 * MS, from, until).flat_map(|shares| {
            let errors: Vec<f64> = shares.iter().zip(&wanted).map(|(share, wanted)| (share - wanted).abs()).collect();
            errors
        });
        let most = errors.fold(0.0, f64::max);
        metrics.push(percent(format!("sched.gdev16.{vms}vms.error_500ms_worst"), most).beside("Gdev: fair"));
    }
    metrics.extend(common("sched.gdev16.4vms", &outcome, 91 * SECOND, &equal(4)));
    Ok(metrics)
}

/// Measures shares with unequal weights.
fn weights() -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for of in [&[1u32, 3][..], &[10, 90], &[1, 15, 84]] {
        let name = of.iter().map(u32::to_string).collect::<Vec<_>>().join("_");
        let sum: u32 = of.iter().sum();
        let wanted: Vec<f64> = of.iter().map(|weight| f64::from(*weight) / f64::from(sum)).collect();
        let guests: Vec<_> = of.iter().map(|weight| backlog(MADD).weight(*weight)).collect();
        let outcome = play(ours(), 30, guests, 1)?;
        let error = outcome.share_error(Engine::Compute, 500 * MS, WARM_UP_NS, &wanted);
        let shares = outcome.shares(Engine::Compute, WARM_UP_NS, u64::MAX);
        let wrong = shares.iter().zip(&wanted).map(|(share, wanted)| (share / wanted - 1.0).abs()).fold(0.0, f64::max);
        let row = format!("sched.weights.{name}");
        metrics.push(percent(format!("{row}.error_500ms"), error.mean).target(Target::AtMost(1.0)));
        metrics.push(percent(format!("{row}.error_500ms_worst"), error.worst));
        let wrong = percent(format!("{row}.wrong_by"), wrong);
        metrics.push(if of == [10, 90] { wrong.beside("HAMi: 11-33 %") } else { wrong });
        metrics.extend(common(&row, &outcome, WARM_UP_NS, &wanted));
    }
    Ok(metrics)
}

/// Measures a VM that needs 2 ms about every 16 ms, alone and alongside three VMs that always have work.
fn interactive() -> Result<Vec<Metric>> {
    let frames = |class| {
        let stream = Stream::looping(Length::Uniform(1500 * US, 2500 * US), Length::Uniform(13 * MS, 15 * MS));
        Guest { params: VgpuParams { class, ..VgpuParams::default() }, ..Guest::new(stream) }
    };
    let mut metrics = Vec::new();
    let mut row = |name: &str, config, guests| -> Result<()> {
        let outcome = play(config, 60, guests, 1)?;
        for permille in [500, 990] {
            let wait = outcome.waits[0].quantile(permille);
            metrics.push(micros(format!("sched.interactive.{name}.wait_p{}", permille / 10), wait));
        }
        Ok(())
    };
    row("alone", ours(), vec![frames(LatencyClass::Normal)])?;
    let batch = || (0..3).map(|_| backlog(LONG_MADD));
    for Contender { name, config } in contenders() {
        row(name, config, [frames(LatencyClass::Normal)].into_iter().chain(batch()).collect())?;
    }
    row("band.class_interactive", ours(), [frames(LatencyClass::Interactive)].into_iter().chain(batch()).collect())?;
    Ok(metrics)
}

/// Compares a single VM with and without a scheduler.
fn alone() -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for (kind, length, depth) in [("sync", MADD, 1), ("short", 20 * US, 8), ("queued", MADD, 4)] {
        let guest = || Guest::new(Stream { depth, ..Stream::looping(Length::Fixed(length), THINK) });
        let direct = play(Config { policy: PolicyKind::Direct, ..ours() }, 10, vec![guest()], 1)?;
        for Contender { name, config } in contenders() {
            let outcome = play(config, 10, vec![guest()], 1)?;
            let lost = 1.0 - outcome.busy(Engine::Compute) as f64 / direct.busy(Engine::Compute) as f64;
            let target = if name == "band" { Target::AtMost(0.5) } else { Target::None };
            metrics.push(percent(format!("sched.alone.{kind}.{name}.lost"), lost).target(target));
        }
    }
    Ok(metrics)
}

/// Compares sixteen VMs with one VM.
fn sixteen() -> Result<Vec<Metric>> {
    let one = play(ours(), 30, vec![backlog(MADD)], 1)?;
    let outcome = play(ours(), 30, (0..16).map(|_| looping(MADD)).collect(), 1)?;
    let error = |window| outcome.share_error(Engine::Compute, window, WARM_UP_NS, &equal(16));
    let mut metrics = vec![
        Metric::ratio(
            "sched.16vms.throughput",
            outcome.completed as f64 / 30.0,
            "1/s",
            one.completed as f64 / 30.0,
            Target::AtLeast(0.95),
        ),
        percent("sched.16vms.error_500ms".to_owned(), error(500 * MS).mean).target(Target::AtMost(1.0)),
        percent("sched.16vms.error_500ms_worst".to_owned(), error(500 * MS).worst).target(Target::AtMost(1.0)),
        percent("sched.16vms.error_100ms".to_owned(), error(100 * MS).mean).target(Target::AtMost(3.0)),
        percent("sched.16vms.error_100ms_worst".to_owned(), error(100 * MS).worst).target(Target::AtMost(3.0)),
    ];
    metrics.extend(common("sched.16vms", &outcome, WARM_UP_NS, &equal(16)));
    Ok(metrics)
}

/// Measures three well-behaved VMs (two with `madd`, one with `long-madd`) alongside a misbehaving VM. The figure is
/// the minimum ratio between a well-behaved VM's GPU time and its entitlement.
fn rogues() -> Result<Vec<Metric>> {
    let stream = |length, think, depth| Stream { depth, ..Stream::looping(length, think) };
    let now = Length::Fixed(0);
    let forever = Stream { from: Nanos(3 * SECOND / 2), ..stream(Length::Forever, THINK, 1) };
    let mut hang = Guest::new(forever);
    hang.params.max_run_ns = Some(100 * MS);
    let rogues = [
        ("empty_flood", Guest::new(stream(Length::Fixed(100), now, 200))),
        ("split_work", Guest::new(stream(Length::Fixed(20 * US), now, 64))),
        ("no_doorbell", Guest::new(stream(Length::Fixed(US), Length::Fixed(450 * US), 1))),
        ("hang", hang),
        ("dies", Guest { gone: Some(Nanos(2 * SECOND + 7 * MS)), ..backlog(20 * MS) }),
        ("forged_ends", Guest { lie: LONG_MADD, ..looping(LONG_MADD) }),
    ];
    let mut metrics = Vec::new();
    for (rogue, guest) in rogues {
        for Contender { name, config } in contenders() {
            let guests = vec![looping(MADD), looping(MADD), looping(LONG_MADD), guest.clone()];
            let outcome = play(config, 20, guests, 1)?;
            let part = |vm| outcome.used(vm, Engine::Compute, WARM_UP_NS, 20 * SECOND) as f64 / (19 * SECOND) as f64;
            let least = (0..3).map(part).fold(1.0, f64::min);
            // For a share of 25 %, the target permits a loss of one percent of the total time.
            let target = if name == "band" { Target::AtLeast(96.0) } else { Target::None };
            metrics.push(percent(format!("sched.rogue.{rogue}.{name}.neighbours"), least / 0.25).target(target));
        }
    }
    Ok(metrics)
}

/// Returns this thread's CPU time in seconds, which does not depend on other programs on the machine.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Measures the CPU time for simulating an hour of 32 VMs, and the scheduler's CPU time per event with 16 VMs.
fn scale() -> Result<Vec<Metric>> {
    let guest = |vm: u64| {
        let stream = Stream::looping(Length::Exponential(MS * (1 + vm % 5)), Length::Exponential(5 * MS));
        Guest::new(Stream { pulse: Some(Pulse { on: (1 + vm % 7) * SECOND, off: (vm % 3) * SECOND }), ..stream })
    };
    let scenario = Scenario::new(ours(), 3600 * SECOND, (0..32).map(guest).collect());
    let began = cpu_seconds();
    let outcome = simulate(&scenario, 1)?;
    let hour = cpu_seconds() - began;

    let mut events = Vec::new();
    let scenario = Scenario::new(ours(), 20 * SECOND, (0..16).map(|_| looping(MADD)).collect());
    run_with(&scenario, 1, &mut |at, event, _| events.push((at, event)))?;
    let mut scheduler = Scheduler::new(ours(), Nanos(0))?;
    let mut decisions = Vec::new();
    let began = cpu_seconds();
    for (at, event) in &events {
        scheduler.event(*at, *event, &mut decisions);
        decisions.clear();
    }
    let each = (cpu_seconds() - began) / events.len() as f64;
    Ok(vec![
        Metric::plain("sched.scale.hour_of_32_vms", hour, "s"),
        Metric::plain("sched.scale.hour_of_32_vms.events", outcome.events as f64, "events"),
        Metric::plain("sched.scale.event_with_16_vms", each * 1e9, "ns"),
    ])
}
