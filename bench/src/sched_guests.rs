//! The scheduler with stock guests (Linux 6.1, nouveau), in the scenarios of the [simulation](super::sched):
//! [`competing`] measures share errors by policy, number of VMs and kernel duration, [`figures`] measures the other
//! figures of GPUvm and Gdev, [`sharing`] measures weights, bursts, and a single VM, and [`rogues`] measures
//! misbehaving VMs.
//!
//! Shares are shares of completed work, as counted by the guests. Each guest reports the end of each of its kernels
//! with a card timestamp, and the card's time model determines the kernel's duration. Fairness therefore does not
//! depend on the mediator's accounting, and windows need not begin or end at kernel boundaries. Times are real: windows
//! are 500 and 100 ms long, and the scheduler uses its default settings. As in the papers' systems, the card does not
//! clear residue between VMs, because the software card needs more time for the clearing kernel than for most of the
//! measured kernels. [`competing::cleared`] measures the default for comparison.

mod competing;
mod figures;
mod rogues;
mod sharing;

use std::time::Duration;

use anyhow::{Context, Result, bail};
use sched::Engine;
use sched::sim::Uses;
use tests::contention::{Contest, Load, Outcome};
use tests::many_vms::{Crowd, round_ns};

use super::Request;
use crate::report::interval::mean;
use crate::report::{Interval, Metric, Record, Target};

const MS: u64 = 1_000_000;
/// Number of rows and columns of the kernels' matrices. A round takes 0.38 ms.
const SIDE: u32 = 28;
/// Number of rounds of the short kernel.
const MADD: u32 = 1;
/// Number of rounds of the long kernel.
const LONG_MADD: u32 = 5;
/// Length of the longer share windows in ns.
const HALF: u64 = 500 * MS;
/// Length of the shorter share windows in ns.
const TENTH: u64 = 100 * MS;
/// Offset between the starts of consecutive shorter windows in ns.
const WINDOW_STEP_NS: u64 = 10 * MS;
/// Number of kernels that a guest keeps in flight. It is the same for short and long kernels, so that the policies'
/// results differ.
const IN_FLIGHT: u32 = 16;
/// Number of VMs to boot if only some of them compete.
const VMS: usize = 16;
const MEMORY_MIB: u32 = 320;
/// Time before the measurement starts.
const WARM_UP: Duration = Duration::from_millis(700);
/// Default measured time: twelve of the longer windows.
const MEASURED_TIME: Duration = Duration::from_secs(6);

/// A policy under test: its name in the report and its settings.
type Policy = (&'static str, &'static [&'static str]);

const FIFO: Policy = ("fifo", &["--policy", "fifo"]);
const CREDIT: Policy = ("credit", &["--policy", "credit"]);
const BAND: Policy = ("band", &["--policy", "band"]);
const DIRECT: Policy = ("direct", &["--policy", "direct"]);

/// The booted guests and the measured time of each run.
struct Stage {
    crowd: Crowd,
    measured: Duration,
}

/// A part of the benchmark.
struct Part {
    name: &'static str,
    /// Number of VMs needed by the part. Other parts may have booted more VMs, which are then idle.
    vms: usize,
    run: fn(&mut Stage, &mut Record) -> Result<Vec<Metric>>,
}

const PARTS: [Part; 10] = [
    Part { name: "competing", vms: VMS, run: competing::run },
    Part { name: "cleared", vms: 0, run: |stage, _| competing::cleared(stage) },
    Part { name: "gdev14", vms: 2, run: |stage, _| figures::gdev_14(stage) },
    Part { name: "gdev15", vms: 2, run: |stage, _| figures::gdev_15(stage) },
    Part { name: "gdev15_copies", vms: 2, run: |stage, _| figures::unequal_copies(stage) },
    Part { name: "gdev16", vms: 4, run: |stage, _| figures::gdev_16(stage) },
    Part { name: "weights", vms: 3, run: |stage, _| sharing::weights(stage) },
    Part { name: "interactive", vms: 4, run: |stage, _| sharing::interactive(stage) },
    Part { name: "throughput", vms: VMS, run: |stage, _| sharing::throughput(stage) },
    Part { name: "rogues", vms: 4, run: |stage, _| rogues::run(stage) },
];

/// Runs the benchmark. Records each part when it ends, and skips recorded parts.
pub fn run(request: &Request, record: &mut Record) -> Result<Vec<Metric>> {
    let called = |part: &Part| format!("sched-guests.{}", part.name);
    let missing = PARTS.iter().filter(|part| request.wants(part.name) && !record.has_ended(&called(part)));
    let missing: Vec<&Part> = missing.collect();
    if missing.is_empty() {
        return Ok(Vec::new());
    }
    let measured = request.seconds.map_or(MEASURED_TIME, Duration::from_secs);
    let vms = missing.iter().map(|part| part.vms).max().unwrap_or(0);
    let mut stage = Stage { crowd: Crowd::boot_keeping("sched", vms, MEMORY_MIB)?, measured };
    for part in missing {
        let found = (part.run)(&mut stage, record)?;
        record.put(found)?;
        record.end(&called(part))?;
    }
    if !stage.crowd.daemon().alive() {
        bail!("mediatord has exited\n{}", stage.crowd.daemon().log_tail());
    }
    Ok(Vec::new())
}

impl Stage {
    /// Runs competing guests under a policy.
    fn play(&self, row: &str, policy: Policy, loads: Vec<Load>) -> Result<Outcome> {
        self.play_for(row, policy, self.measured, loads)
    }

    /// Same as [`Self::play`], but with the measured time `measured`.
    fn play_for(&self, row: &str, (_, settings): Policy, measured: Duration, loads: Vec<Load>) -> Result<Outcome> {
        self.crowd.set(settings)?;
        let outcome =
            Contest { loads, warm: WARM_UP, measured }.run(&self.crowd, |_| Ok(())).context(row.to_owned())?;
        let received = (0..outcome.vms.len()).map(|place| format!("{:.1}", outcome.received(place) * 100.0));
        eprintln!("bench: {row}: {} % of the time", received.collect::<Vec<_>>().join(" "));
        Ok(outcome)
    }
}

/// Returns a guest that always has kernels of `rounds` rounds queued, and reports their ends.
fn steady(vm: usize, rounds: u32) -> Load {
    Load::kernels_of(vm, SIDE, rounds, IN_FLIGHT).telling_ends()
}

/// Returns the duration of a kernel of `rounds` rounds, in ns.
fn length_ns(rounds: u32) -> u64 {
    u64::from(rounds) * round_ns(SIDE)
}

fn equal(vms: usize) -> Vec<f64> {
    vec![1.0 / vms as f64; vms]
}

fn percent(name: String, value: f64) -> Metric {
    Metric::plain(name, value * 100.0, "%")
}

/// Work completed by guests with kernels of `rounds` rounds, as counted by the guests.
struct Work {
    uses: Uses,
    length: u64,
}

impl Work {
    fn from_outcome(outcome: &Outcome, rounds: &[u32]) -> Self {
        let lengths: Vec<u64> = rounds.iter().map(|rounds| length_ns(*rounds)).collect();
        Self { uses: outcome.counted(&lengths, WINDOW_STEP_NS), length: outcome.length }
    }

    /// Returns the fraction of time during which the card executed this work.
    fn utilisation(&self, vms: usize) -> f64 {
        (0..vms).map(|vm| self.part(vm)).sum()
    }

    /// Returns the fraction of time during which the card executed one VM's work.
    fn part(&self, vm: usize) -> f64 {
        self.uses.used(vm, Engine::Compute, 0, self.length) as f64 / self.length.max(1) as f64
    }

    /// Returns the deviations of the shares from `wanted`, for each window and VM.
    fn distances(&self, window: u64, wanted: &[f64]) -> Vec<Vec<f64>> {
        let windows = self.uses.windows(Engine::Compute, window, 0, self.length);
        windows
            .map(|shares| shares.iter().zip(wanted).map(|(share, wanted)| (share - wanted).abs()).collect())
            .collect()
    }

    /// Returns the share errors in windows of `window` ns: the largest of the VMs' mean errors, with its interval, and
    /// the largest error in any window.
    fn errors(&self, row: &str, window: u64, wanted: &[f64], target: Target) -> [Metric; 2] {
        let distances = self.distances(window, wanted);
        let of = |windows: &[usize]| {
            let of_vm = |vm: usize| mean(&windows.iter().map(|at| distances[*at][vm] * 100.0).collect::<Vec<_>>());
            (0..wanted.len()).map(of_vm).try_fold(0.0, |most: f64, error| Some(most.max(error?)))
        };
        let all: Vec<usize> = (0..distances.len()).collect();
        let worst = distances.iter().flatten().copied().fold(0.0, f64::max);
        let name = format!("{row}.error_{}ms", window / MS);
        let error = Metric::plain(name.clone(), of(&all).unwrap_or(f64::NAN), "%").target(target);
        [error.within(Interval::of_rounds(all.len(), of)), percent(format!("{name}_worst"), worst)]
    }
}

/// Returns the utilization according to completed work and according to the mediator's charges, Jain's index, and the
/// wait times, which are rounded up to the mediator's buckets.
fn common(row: &str, outcome: &Outcome, work: &Work, wanted: &[f64]) -> Vec<Metric> {
    let all = 0..outcome.vms.len();
    let wait = |permille| outcome.wait_ns(all.clone(), permille) as f64 / 1e3;
    let shares = work.uses.shares(Engine::Compute, 0, work.length);
    vec![
        Metric::plain(format!("{row}.jain"), sched::sim::jain(&shares, wanted), "index"),
        percent(format!("{row}.utilisation"), work.utilisation(wanted.len())),
        percent(format!("{row}.charged"), outcome.utilisation(Engine::Compute)),
        Metric::plain(format!("{row}.wait_p50_at_most"), wait(500), "us"),
        Metric::plain(format!("{row}.wait_p99_at_most"), wait(990), "us"),
    ]
}

/// Returns the share errors for both window lengths, with the targets of a policy.
fn errors(row: &str, work: &Work, policy: Policy, wanted: &[f64]) -> Vec<Metric> {
    let (half, tenth) = match policy.0 {
        "band" => (Target::AtMost(1.0), Target::AtMost(3.0)),
        "credit" => (Target::AtMost(2.0), Target::None),
        _ => (Target::None, Target::None),
    };
    let errors = [(HALF, half), (TENTH, tenth)].map(|(window, target)| work.errors(row, window, wanted, target));
    errors.into_iter().flatten().collect()
}
