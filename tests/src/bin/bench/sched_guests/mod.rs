//! The scheduler with real guests (Linux 6.1, stock nouveau), in the same scenarios as the [simulated](super::sched) ones:
//! [`figures`] of GPUvm and Gdev, [`sharing`] by weight, in bursts and alone, [`rogues`].
//!
//! `madd` takes half a millisecond of the card's modelled time, `long-madd` five times that, and what is reported are charges of
//! the mediator, by the card's clock, in the intervals that it keeps. Guests under emulation are late by milliseconds, and
//! so is what they are told; where that decides, times are scaled: kernels, windows, BAND's period and its wait alike, which
//! leaves the scheduler the same problem.

mod figures;
mod rogues;
mod sharing;

use std::time::Duration;

use anyhow::Result;
use sched::Engine;
use tests::bench::{Metric, Target};
use tests::contest::{Contest, Load, Outcome};
use tests::crowd::Crowd;

const MS: u64 = 1_000_000;
/// By how much times are scaled.
const SCALE: u32 = 4;
/// Rounds of the short and of the long kernel.
const MADD: u32 = SCALE;
const LONG_MADD: u32 = 5 * SCALE;
/// Windows for shares, in ns.
const HALF: u64 = 500 * MS * SCALE as u64;
const TENTH: u64 = 100 * MS * SCALE as u64;
/// Kernels that a guest has on their way: as many of short ones as of long ones, which is what makes policies differ.
const IN_FLIGHT: u32 = 16;
/// VMs at most, and MiB of RAM of each.
const VMS: usize = 16;
const MEMORY_MIB: u32 = 320;
/// Time at the start of a run that is left out.
const WARM: Duration = Duration::from_millis(700);
/// Time that is measured, if it need not be more: four of the longer windows.
const MEASURED: Duration = Duration::from_secs(2 * SCALE as u64);

/// A policy as it is measured: its name in the report, and settings.
type Policy = (&'static str, &'static [&'static str]);

const FIFO: Policy = ("fifo", &["--policy", "fifo"]);
const CREDIT: Policy = ("credit", &["--policy", "credit"]);
const BAND: Policy = ("band", &["--policy", "band"]);
const DIRECT: Policy = ("direct", &["--policy", "direct"]);

/// Measures.
pub fn run() -> Result<Vec<Metric>> {
    let mut crowd = Crowd::boot("sched", VMS, MEMORY_MIB, "")?;
    let [period, wait, ahead, slack] = [30, 500, 1000, 1000].map(|time| (time * SCALE).to_string());
    crowd.set(&["--period-ms", &period, "--wait-us", &wait, "--ahead-us", &ahead, "--stamp-slack-us", &slack])?;
    let mut metrics = Vec::new();
    for part in [figures::gpuvm_7_and_8, figures::gdev_14, figures::gdev_15, figures::gdev_16] {
        metrics.extend(part(&crowd)?);
    }
    for part in [sharing::weights, sharing::interactive, sharing::alone, sharing::sixteen] {
        metrics.extend(part(&crowd)?);
    }
    metrics.extend(rogues::run(&mut crowd)?);
    Ok(metrics)
}

/// Lets guests compete under a policy.
fn play(crowd: &Crowd, row: &str, (_, settings): Policy, measured: Duration, loads: Vec<Load>) -> Result<Outcome> {
    crowd.set(settings)?;
    let outcome = Contest { loads, warm: WARM, measured }.run(crowd, |_| Ok(()))?;
    let received = (0..outcome.vms.len()).map(|place| format!("{:.1}", outcome.received(place) * 100.0));
    eprintln!("bench: {row}: {} % of the time", received.collect::<Vec<_>>().join(" "));
    Ok(outcome)
}

/// A guest that always has kernels of that length queued.
fn steady(vm: usize, rounds: u32) -> Load {
    Load::kernels(vm, rounds, IN_FLIGHT)
}

fn equal(vms: usize) -> Vec<f64> {
    vec![1.0 / vms as f64; vms]
}

fn percent(name: String, value: f64) -> Metric {
    Metric::plain(name, value * 100.0, "%")
}

/// Jain's index, utilisation and waits, which are rounded up to the mediator's buckets.
fn common(row: &str, outcome: &Outcome, wanted: &[f64]) -> Vec<Metric> {
    let all = 0..outcome.vms.len();
    let wait = |permille| outcome.wait_ns(all.clone(), permille) as f64 / 1e3;
    vec![
        Metric::plain(format!("{row}.jain"), outcome.jain(wanted), "index"),
        percent(format!("{row}.utilisation"), outcome.utilisation(Engine::Compute)),
        Metric::plain(format!("{row}.wait_p50_at_most"), wait(500), "us"),
        Metric::plain(format!("{row}.wait_p99_at_most"), wait(990), "us"),
    ]
}

/// The errors of shares in both windows, with the targets of BAND if it is that.
fn errors(row: &str, outcome: &Outcome, (policy, _): Policy, wanted: &[f64]) -> [Metric; 4] {
    let (half, tenth) = (outcome.share_error(HALF, wanted), outcome.share_error(TENTH, wanted));
    let target = |most| if policy == BAND.0 { Target::AtMost(most) } else { Target::None };
    [
        percent(format!("{row}.error_500ms"), half.mean).target(target(1.0)),
        percent(format!("{row}.error_500ms_worst"), half.worst).target(target(1.0)),
        percent(format!("{row}.error_100ms"), tenth.mean).target(target(3.0)),
        percent(format!("{row}.error_100ms_worst"), tenth.worst).target(target(3.0)),
    ]
}
