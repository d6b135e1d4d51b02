//! The papers' workloads. Each workload opens the device and creates a channel, and its phases are timed as in the
//! papers. The results are compared with those of the CPU.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use workloads::{NAMES, Report, Setup, Workload};

use super::Facts;
use crate::compute::{self, Guest};
use crate::ending::Ending;
use crate::options::Options;
use crate::report;
use crate::rig::{Counts, Rig};
use gdev::nouveau::Device;
use gdev::nouveau::Done;

/// Maximum value of `--scale`, the same as in the `workloads` crate.
const MOST_SCALE: u64 = 1000;

/// Durations of one run, and the amount of work done.
struct Outcome {
    /// Times of the phases. The first phase, `init`, includes opening the device.
    report: Report,
    close: Duration,
    done: Done,
    looped: Option<Looped>,
}

/// Result of repeated work.
pub struct Looped {
    /// Number of iterations. Each iteration launches all kernels.
    pub iterations: u64,
    /// Time from the start to the end of the last iteration.
    pub took: Duration,
    /// Durations of the iterations in ascending order, if each iteration waited for its kernels.
    pub each: Vec<Duration>,
}

/// Parameters of repeated work.
#[derive(Debug, Clone, Copy)]
pub struct Repeat {
    /// Duration of the period in which iterations are launched.
    pub duration: Duration,
    /// Maximum number of submissions in flight. If it is 1, each iteration waits for its kernels.
    pub in_flight: u64,
    /// Pause between iterations.
    pub pause: Option<Duration>,
    /// Set to record and report the end time of each kernel.
    pub ends: bool,
}

/// Runs `workload --name NAME|all [--scale N] [--rounds N] [--side N] [--working-set BYTES] [--duration SECONDS
/// [--in-flight N] [--pause-ms N] [--ends]] [--json]`.
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let name = options.text("name").unwrap_or("all");
    let names = if name == "all" { NAMES.to_vec() } else { vec![name] };
    let scale = options.number("scale", 1)?;
    ensure!((1..=MOST_SCALE).contains(&scale), "--scale {scale}: from 1 to {MOST_SCALE}");
    let optional = |name: &str| options.text(name).map(|_| options.number(name, 0)).transpose();
    let chosen = workloads::Options {
        scale: scale as u32,
        seed: rig.seed(),
        rounds: optional("rounds")?.map(u32::try_from).transpose().context("--rounds")?,
        working_set: optional("working-set")?,
        side: optional("side")?.map(u32::try_from).transpose().context("--side")?,
    };
    let duration = optional("duration")?.map(Duration::from_secs);
    let in_flight = optional("in-flight")?;
    let pause = optional("pause-ms")?.map(Duration::from_millis);
    let ends = options.flag("ends");
    ensure!(
        duration.is_some() || in_flight.is_none() && pause.is_none() && !ends,
        "--in-flight, --pause-ms and --ends are for --duration"
    );
    ensure!(pause.is_none() || in_flight.is_none_or(|count| count == 1), "--pause-ms: each launch is waited for");
    let repeat = duration.map(|duration| Repeat { duration, in_flight: in_flight.unwrap_or(1), pause, ends });
    let node = Path::new(options.text("node").unwrap_or(crate::DEFAULT_NODE));
    let mut failed = Vec::new();
    for name in &names {
        let Some(workload) = workloads::by_name(name, chosen) else {
            bail!("--name {name}: all, or one of {}", NAMES.join(" "));
        };
        let began = Instant::now();
        let outcome = one(node, &*workload, repeat);
        let counts = outcome.as_ref().map_or_else(|_| Counts::default(), counts);
        rig.add(counts);
        let facts = outcome.map(|outcome| facts(&*workload, &outcome));
        failed.extend(facts.is_err().then_some(*name));
        report::print_as(options.flag("json"), name, counts, began.elapsed().as_secs_f64(), &facts);
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join(" "));
    Ok(vec![("workloads", names.len().to_string()), ("scale", scale.to_string()), ("seed", rig.seed().to_string())])
}

fn counts(outcome: &Outcome) -> Counts {
    Counts { bytes: outcome.report.verified, copies: outcome.done.copies, channels: 1 }
}

fn facts(workload: &dyn Workload, outcome: &Outcome) -> Facts {
    let us = |time: Duration| time.as_micros().to_string();
    let Outcome { report, close, done, looped } = outcome;
    let [init, htod, launch, dtoh] = report.times;
    let mut facts = vec![
        // Values in a result line must not contain spaces.
        ("size", workload.size().replace(", ", "+").replace(' ', "_")),
        ("init_us", us(init)),
        ("htod_us", us(htod)),
        ("launch_us", us(launch)),
        ("dtoh_us", us(dtoh)),
        ("close_us", us(*close)),
        ("launches", done.launches.to_string()),
        ("gpu_us", us(done.gpu_time)),
    ];
    if let Some(Looped { iterations, took, each }) = looped {
        facts.extend([("iterations", iterations.to_string()), ("looped_us", us(*took))]);
        let nth = |permille: usize| each.get((each.len() * permille).div_ceil(1000).saturating_sub(1));
        facts.extend(nth(500).map(|time| ("each_p50_us", us(*time))));
        facts.extend(nth(990).map(|time| ("each_p99_us", us(*time))));
    }
    facts
}

/// Runs one workload once. If `repeat` is given, first repeats the workload's kernels.
fn one(node: &Path, workload: &dyn Workload, repeat: Option<Repeat>) -> Result<Outcome> {
    let began = Instant::now();
    let device = Device::open(node)?;
    let ahead = repeat.filter(|repeat| repeat.in_flight > 1);
    let mut gpu = match ahead {
        Some(Repeat { in_flight, .. }) => compute::running_ahead(&device, in_flight)?,
        None => compute::context(&device)?,
    };
    gpu.backend_mut().measure_launches();
    gpu.finish()?;
    let opened = began.elapsed();
    if repeat.is_some_and(|repeat| repeat.ends) {
        gpu.backend_mut().keep_ends();
    }
    let looped = repeat.map(|repeat| again_and_again(workload, &mut gpu, repeat)).transpose()?;
    gpu.backend_mut().take_ends().iter().for_each(|ends| report::print_ends(ends));
    let done_in_loop = gpu.backend().done();
    let mut report = workloads::run(workload, &mut gpu)?;
    report.times[0] += opened;
    // If the kernels were repeated, count only the repetitions. The final run shows that the card can still compute.
    let done = if looped.is_some() { done_in_loop } else { gpu.backend().done() };
    let began = Instant::now();
    drop(gpu);
    drop(device);
    let close = report.freed + began.elapsed();
    Ok(Outcome { report, close, done, looped })
}

/// Launches kernels until the time expires, and waits for all of them. Does not check results, because a kernel that
/// works in place gets its own output as input.
pub fn again_and_again(workload: &dyn Workload, gpu: &mut Guest, repeat: Repeat) -> Result<Looped> {
    let setup = Setup::new(workload, gpu)?;
    setup.upload(gpu)?;
    gpu.finish()?;
    let ending = Ending::after(repeat.duration);
    let (mut iterations, mut each) = (0, Vec::new());
    while !ending.is_over() || iterations == 0 {
        let launched = Instant::now();
        workload.launch(gpu, &setup)?;
        if repeat.in_flight == 1 {
            gpu.finish()?;
            each.push(launched.elapsed());
        }
        iterations += 1;
        repeat.pause.into_iter().for_each(sleep);
    }
    gpu.finish()?;
    let took = ending.elapsed();
    setup.free(gpu)?;
    each.sort_unstable();
    Ok(Looped { iterations, took, each })
}
