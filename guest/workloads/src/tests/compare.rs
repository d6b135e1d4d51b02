//! Compares the `gdev` library with raw ioctls. Both execute the same workloads in alternation, and all results are
//! checked.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use gdev::nouveau::Device;
use workloads::{Gpu, NAMES, Workload};

use super::Facts;
use crate::compute;
use crate::options::Options;
use crate::raw::Raw;
use crate::report;
use crate::rig::{Counts, Rig};

/// Maximum value of `--scale`, the same as in the `workloads` crate.
const MOST_SCALE: u64 = 1000;
/// Maximum value of `--count`.
const MOST_COUNT: u64 = 1000;

/// Run times of a workload, and the number of compared bytes.
struct Outcome {
    library: Vec<Duration>,
    raw: Vec<Duration>,
    verified: u64,
}

/// Runs `compare [--name NAME|all] [--scale N] [--count N]`: executes each workload N times with the library and N
/// times with raw ioctls, in alternation. Reports the median times from opening to closing the device. These times
/// exclude checking the results and computing the expected results on the CPU.
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let name = options.text("name").unwrap_or("all");
    let names = if name == "all" { NAMES.to_vec() } else { vec![name] };
    let (scale, count) = (options.number("scale", 1)?, options.number("count", 1)?);
    ensure!((1..=MOST_SCALE).contains(&scale), "--scale {scale}: from 1 to {MOST_SCALE}");
    ensure!((1..=MOST_COUNT).contains(&count), "--count {count}: from 1 to {MOST_COUNT}");
    let chosen = workloads::Options { scale: scale as u32, seed: rig.seed(), ..workloads::Options::default() };
    let node = Path::new(options.text("node").unwrap_or(crate::DEFAULT_NODE));
    let mut last = Vec::new();
    for name in &names {
        let Some(workload) = workloads::by_name(name, chosen) else {
            bail!("--name {name}: all, or one of {}", NAMES.join(" "));
        };
        let began = Instant::now();
        let outcome = alternately(node, &*workload, count).with_context(|| (*name).to_owned())?;
        let counts = Counts { bytes: outcome.verified, copies: 0, channels: 2 * count };
        rig.add(counts);
        last = facts(outcome)?;
        if names.len() > 1 {
            report::print_as(false, name, counts, began.elapsed().as_secs_f64(), &Ok(last.clone()));
        }
    }
    // If several workloads were run, each has its own line.
    Ok(if names.len() > 1 { vec![("workloads", names.len().to_string())] } else { last })
}

fn facts(outcome: Outcome) -> Result<Facts> {
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times.get(times.len() / 2).map(|time| time.as_nanos().to_string()).context("a time")
    };
    Ok(vec![("library_ns", median(outcome.library)?), ("raw_ns", median(outcome.raw)?)])
}

/// Executes a workload `count` times with each driver. The driver that runs first alternates.
fn alternately(node: &Path, workload: &dyn Workload, count: u64) -> Result<Outcome> {
    let mut outcome = Outcome { library: Vec::new(), raw: Vec::new(), verified: 0 };
    for at in 0..2 * count {
        // The order of four runs is library, raw, raw, library.
        let (times, ran) = if matches!(at % 4, 0 | 3) {
            let open = || compute::context(&Device::open(node)?);
            (&mut outcome.library, once(workload, open).context("with the library")?)
        } else {
            (&mut outcome.raw, once(workload, || Raw::open(node)).context("with raw ioctls")?)
        };
        times.push(ran.0);
        outcome.verified += ran.1;
    }
    Ok(outcome)
}

/// Executes a workload once. Returns the total time of opening, all phases and closing, and the number of compared
/// bytes.
fn once<G: Gpu>(workload: &dyn Workload, open: impl FnOnce() -> Result<G>) -> Result<(Duration, u64)> {
    let began = Instant::now();
    let mut gpu = open()?;
    gpu.finish()?;
    let opened = began.elapsed();
    let report = workloads::run(workload, &mut gpu)?;
    let began = Instant::now();
    drop(gpu);
    let close = report.freed + began.elapsed();
    Ok((opened + report.times.iter().sum::<Duration>() + close, report.verified))
}
