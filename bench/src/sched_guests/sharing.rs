//! Measures unequal weights, bursts alongside batch work, and the throughput of a single VM and of sixteen VMs.

use std::time::Duration;

use anyhow::Result;
use sched::Engine;
use tests::contention::{Load, Outcome};

use super::{
    BAND, CREDIT, DIRECT, FIFO, HALF, LONG_MADD, MADD, SIDE, Stage, VMS, Work, common, equal, errors, length_ns,
    percent, steady,
};
use crate::report::interval::mean;
use crate::report::{Interval, Metric, Target};

/// Number of measurements of a single VM under each of two policies, which alternate. One measurement would not be
/// sufficient, because fluctuations in the guest's speed exceed the scheduler's cost.
const ALONE_RUNS: usize = 2;
/// Number of kernels that the single VM keeps in flight.
const KERNELS_IN_FLIGHT: u32 = 64;
/// Measured time of the interactive VM. It launches hundreds of kernels, so that the 99th percentile is not the slowest
/// launch.
const INTERACTIVE: Duration = Duration::from_secs(20);
/// Pause between launches of the interactive VM, in ms.
const PAUSE_MS: u32 = 14;
/// Minimum number of launches. With fewer launches, the 99th percentile would be the slowest launch.
const MIN_SAMPLES: f64 = 100.0;
/// Numbers of kernel rounds for one VM and for sixteen VMs: 0.4, 1.9 and 5 ms.
const KERNEL_ROUNDS: [u32; 3] = [MADD, LONG_MADD, 13];

/// Measures unequal weights. HAMi publishes a similar figure: the number of completed launches of two programs with
/// limits of 10 % and 90 %.
pub fn weights(stage: &Stage) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for of in [&[1u32, 3][..], &[10, 90], &[1, 15, 84]] {
        let row = format!("sched.guests.weights.{}", of.iter().map(u32::to_string).collect::<Vec<_>>().join("_"));
        let sum: u32 = of.iter().sum();
        let wanted: Vec<f64> = of.iter().map(|weight| f64::from(*weight) / f64::from(sum)).collect();
        for (vm, weight) in of.iter().enumerate() {
            stage.crowd.set_vm(vm, &["--weight", &weight.to_string()])?;
        }
        let outcome = stage.play(&row, BAND, (0..of.len()).map(|vm| steady(vm, MADD)).collect());
        for vm in 0..of.len() {
            stage.crowd.set_vm(vm, &["--weight", "100"])?;
        }
        let outcome = outcome?;
        let work = Work::from_outcome(&outcome, &vec![MADD; of.len()]);
        metrics.extend(errors(&row, &work, BAND, &wanted));
        let shares = work.uses.shares(Engine::Compute, 0, work.length);
        let wrong = shares.iter().zip(&wanted).map(|(share, wanted)| (share / wanted - 1.0).abs()).fold(0.0, f64::max);
        metrics.push(percent(format!("{row}.wrong_by"), wrong));
        if let ([few, many], [low, high]) = (of, &shares[..]) {
            let due = f64::from(*many) / f64::from(*few);
            let launches = Metric::plain(format!("{row}.launches"), high / low, "to 1");
            let off = percent(format!("{row}.launches_off"), (high / low / due - 1.0).abs());
            let peers = ["HAMi: 6 to 8 to 1", "HAMi: 11 to 33 %"];
            metrics.extend([launches, off].into_iter().zip(peers).map(|(metric, peer)| match of {
                [10, 90] => metric.beside(peer),
                _ => metric,
            }));
        }
        metrics.extend(common(&row, &outcome, &work, &wanted));
    }
    Ok(metrics)
}

/// Measures a VM that needs 2 ms about every 16 ms alongside three VMs that always have work. The mediator measures the
/// VM's wait from doorbell to start. The guest measures `each`, the time from launch to return.
pub fn interactive(stage: &Stage) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    let mut row = |name: &str, policy, class: &str, batch: usize| -> Result<()> {
        let row = format!("sched.guests.interactive.{name}");
        stage.crowd.set_vm(0, &["--class", class])?;
        let mut loads = vec![Load::bursts(0, SIDE, LONG_MADD, PAUSE_MS)];
        loads.extend((1..=batch).map(|vm| steady(vm, LONG_MADD)));
        let outcome = stage.play_for(&row, policy, INTERACTIVE, loads);
        stage.crowd.set_vm(0, &["--class", "normal"])?;
        let outcome = outcome?;
        for permille in [500, 990] {
            let wait = outcome.wait_ns(std::iter::once(0), permille) as f64 / 1e3;
            let name = format!("p{}", permille / 10);
            metrics.push(Metric::plain(format!("{row}.wait_{name}_at_most"), wait, "us"));
        }
        let samples = outcome.reported(0, "iterations")?;
        let last = if samples < MIN_SAMPLES { "max" } else { "p99" };
        for (name, key) in [("p50", "each_p50_us"), (last, "each_p99_us")] {
            metrics.push(Metric::plain(format!("{row}.each_{name}"), outcome.reported(0, key)?, "us"));
        }
        metrics.push(Metric::plain(format!("{row}.each_samples"), samples, "launches"));
        Ok(())
    };
    row("alone", BAND, "normal", 0)?;
    row("fifo", FIFO, "normal", 3)?;
    row("credit", CREDIT, "normal", 3)?;
    row("band", BAND, "normal", 3)?;
    row("band.class_interactive", BAND, "interactive", 3)?;
    Ok(metrics)
}

/// Measures the throughput of one VM with and without a scheduler, and of sixteen VMs.
pub fn throughput(stage: &Stage) -> Result<Vec<Metric>> {
    let mut metrics = alone(stage)?;
    for rounds in KERNEL_ROUNDS {
        metrics.extend(sixteen(stage, rounds)?);
    }
    Ok(metrics)
}

/// Returns the number of kernels that all VMs together complete per second, for each of the longer windows.
fn rates(outcome: &Outcome, rounds: u32) -> Vec<f64> {
    let vms = outcome.vms.len();
    let work = Work::from_outcome(outcome, &vec![rounds; vms]);
    let ends = (HALF..=work.length).step_by(HALF as usize);
    let done = |end: u64| (0..vms).map(|vm| work.uses.used(vm, Engine::Compute, end - HALF, end)).sum::<u64>();
    ends.map(|end| done(end) as f64 / length_ns(rounds) as f64 * 1e9 / HALF as f64).collect()
}

/// Compares the mean of the windows' rates with the mean of the baseline's windows.
fn beside(name: String, rates: &[f64], baseline: &[f64], least: f64) -> Metric {
    let of = |rates: &[f64]| mean(rates).unwrap_or(f64::NAN);
    let ratio = Metric::ratio(name, of(rates), "1/s", of(baseline), Target::AtLeast(least));
    ratio.within(Interval::of_ratio(rates, baseline, mean))
}

/// Compares a single VM with and without a scheduler.
fn alone(stage: &Stage) -> Result<Vec<Metric>> {
    let mut rates_of = [Vec::new(), Vec::new()];
    for _ in 0..ALONE_RUNS {
        for (all, policy) in rates_of.iter_mut().zip([BAND, DIRECT]) {
            let row = format!("sched.guests.alone.{}", policy.0);
            let outcome =
                stage.play(&row, policy, vec![Load::kernels_of(0, SIDE, MADD, KERNELS_IN_FLIGHT).telling_ends()])?;
            all.extend(rates(&outcome, MADD));
        }
    }
    let [band, direct] = rates_of;
    let utilisation = mean(&direct).unwrap_or(f64::NAN) * length_ns(MADD) as f64 / 1e9;
    Ok(vec![
        beside("sched.guests.alone.band".to_owned(), &band, &direct, 0.995),
        percent("sched.guests.alone.direct.utilisation".to_owned(), utilisation),
    ])
}

/// Compares all VMs with one VM.
fn sixteen(stage: &Stage, rounds: u32) -> Result<Vec<Metric>> {
    let micros = length_ns(rounds) / 1000;
    let one = stage.play(&format!("sched.guests.one_vm.{micros}us"), BAND, vec![steady(0, rounds)])?;
    let row = format!("sched.guests.{VMS}vms.{micros}us");
    let outcome = stage.play(&row, BAND, (0..VMS).map(|vm| steady(vm, rounds)).collect())?;
    let work = Work::from_outcome(&outcome, &[rounds; VMS]);
    let mut metrics = vec![beside(format!("{row}.throughput"), &rates(&outcome, rounds), &rates(&one, rounds), 0.95)];
    metrics.extend(errors(&row, &work, BAND, &equal(VMS)));
    metrics.extend(common(&row, &outcome, &work, &equal(VMS)));
    Ok(metrics)
}
