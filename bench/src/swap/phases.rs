//! Jobs with kernels that access memory through pointers and indices that submissions do not contain, with CPU phases
//! between kernels (unified-memory thesis, table 12.2). Two such jobs, which do not fit on the card together, run
//! without quanta, with quanta, and with quanta of fixed lengths.
//!
//! A job runs one of the workloads repeatedly. It fills its buffers, computes, reads the result back, and compares
//! every byte, which takes CPU time. Both sides of a ratio have the same number of runs. The number is chosen so that a
//! job takes much longer than a quantum, and much longer than the 2 s after which other VMs get an idle VM's memory.

use std::sync::Barrier;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use vram::{Limits, Mode, TenantId};
use workloads::{Options, by_name};

use super::{division, time};
use crate::report::{Metric, Target, median};
use rig::in_process_vm::{CardConfig, LightGpu, MIB, gpu};

/// Names and scales of the programs. One has kernels that follow graph edges, one has a single large kernel, and one
/// has many small kernels.
const PROGRAMS: [(&str, u32); 3] = [("bfs", 15), ("backprop", 40), ("srad", 40)];
/// Minimum duration of a job that runs alone, in seconds.
const MIN_JOB_SECONDS: f64 = 8.0;
/// Number of measurements. The report contains the median.
const ROUNDS: usize = 3;
/// VRAM size of a VM in MiB.
const VM_MIB: u64 = 64;
const HOST_MIB: u64 = 2 * VM_MIB;
/// Chunk size in KiB. Chunks are small, so that a switch between quanta is short in comparison with a quantum.
const CHUNK_KIB: u64 = 512;
/// Card memory for the driver, in addition to the buffers of one job, in MiB.
const BESIDE_MIB: u64 = 4;
/// Quantum lengths to measure in ms.
const QUANTA_MS: [u64; 3] = [250, 1000, 4000];

/// Quantum settings of a job.
#[derive(Clone, Copy)]
struct Turns {
    mode: Mode,
    /// Quantum length in ms, or `None` to let the mediator choose it.
    quantum_ms: Option<u64>,
}

impl Turns {
    const fn by(mode: Mode) -> Self {
        Self { mode, quantum_ms: None }
    }
}

/// Result of concurrent jobs.
struct Outcome {
    makespan: f64,
    /// Number of bytes moved.
    moved: u64,
    /// Maximum amount of VRAM that one job uses, in bytes.
    footprint: u64,
}

/// Runs `count` concurrent jobs with `runs` runs each.
fn jobs(name: &str, scale: u32, runs: u64, count: u32, card_mib: u64, turns: Turns) -> Result<Outcome> {
    let mut division = division();
    division.quanta.mode = turns.mode;
    if let Some(ms) = turns.quantum_ms {
        (division.quanta.min_ns, division.quanta.max_ns) = (ms * 1_000_000, ms * 1_000_000);
    }
    let config =
        CardConfig { division, time: time(), chunk_bytes: CHUNK_KIB << 10, ..CardConfig::new(card_mib, HOST_MIB) };
    let rig = config.open()?;
    let guests = (0..count).map(|vm| gpu(&rig, vm, VM_MIB, Limits::default()));
    let guests = guests.collect::<Result<Vec<_>>>()?;
    let ready = Barrier::new(guests.len());
    let began = Instant::now();
    let job = |mut gpu: LightGpu, seed: u64| -> Result<u64> {
        ready.wait();
        let mut most = 0;
        for run in 0..runs {
            let options = Options { scale, seed: seed * runs + run, ..Options::default() };
            let workload = by_name(name, options).context("a workload")?;
            let report = workloads::run(&*workload, &mut gpu)?;
            ensure!(report.verified > 0, "no result of {name} was verified");
            most = most.max(gpu.backend().peak_vram_bytes());
        }
        Ok(most)
    };
    let footprints = std::thread::scope(|scope| -> Result<Vec<u64>> {
        let job = &job;
        let threads = guests.into_iter().zip(1..).map(|(gpu, seed)| scope.spawn(move || job(gpu, seed)));
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|job| job.join().ok().context("a job panicked")?).collect()
    })
    .with_context(|| format!("{count} of {name} on {card_mib} MiB"))?;
    let makespan = began.elapsed().as_secs_f64();
    let state = rig.host.lock();
    let moved = (0..count).map(|vm| state.memory().moved(TenantId(vm)).map_or(0, |moved| moved.sum.bytes)).sum();
    Ok(Outcome { makespan, moved, footprint: footprints.into_iter().max().unwrap_or(0) })
}

/// Compares concurrent jobs of one program in each mode with the same jobs in sequence.
fn program(name: &str, scale: u32, rounds: usize) -> Result<Vec<Metric>> {
    let Outcome { makespan, footprint, .. } = jobs(name, scale, 3, 1, VM_MIB, Turns::by(Mode::Off))?;
    let runs = (3.0 * MIN_JOB_SECONDS / makespan).ceil() as u64;
    let tight = footprint.div_ceil(MIB) + BESIDE_MIB;
    let ways: Vec<(String, u64, Turns)> = [
        ("off".to_owned(), tight, Turns::by(Mode::Off)),
        ("auto".to_owned(), tight, Turns::by(Mode::Auto)),
        ("forced".to_owned(), tight, Turns::by(Mode::Forced)),
        ("both_fit.off".to_owned(), 2 * VM_MIB, Turns::by(Mode::Off)),
        ("both_fit.auto".to_owned(), 2 * VM_MIB, Turns::by(Mode::Auto)),
    ]
    .into_iter()
    .chain(QUANTA_MS.map(|ms| (format!("quantum_{ms}_ms"), tight, Turns { mode: Mode::Forced, quantum_ms: Some(ms) })))
    .collect();
    let (mut serial, mut together) = (Vec::new(), vec![(Vec::new(), Vec::new()); ways.len()]);
    for _ in 0..rounds {
        let alone = || jobs(name, scale, runs, 1, tight, Turns::by(Mode::Off)).map(|outcome| outcome.makespan);
        let alone = alone()? + alone()?;
        serial.push(alone);
        for ((_, card_mib, turns), (times, moved)) in ways.iter().zip(&mut together) {
            let outcome = jobs(name, scale, runs, 2, *card_mib, *turns)?;
            times.push(outcome.makespan);
            moved.push(outcome.moved as f64 / MIB as f64);
        }
    }
    let row = format!("swap.phases.{name}");
    let mut metrics = vec![
        Metric::plain(format!("{row}.buffers_of_one"), footprint as f64 / MIB as f64, "MiB"),
        Metric::plain(format!("{row}.runs_of_a_job"), runs as f64, "runs"),
    ];
    for ((way, ..), (times, moved)) in ways.iter().zip(&together) {
        let peer = match way.as_str() {
            "off" => "thesis, big_50: thrashes",
            "auto" | "forced" => "thesis, big_50: 0.78 of serial with its lock",
            "both_fit.off" | "both_fit.auto" => "thesis, small_50: 1.14 of the hardware's own sharing with its lock",
            _ => "thesis, quanta of 5 to 30 s: 1.94 to 1.06",
        };
        let name = format!("{row}.{way}.makespan_to_serial");
        metrics.push(Metric::ratio_of_samples(name, times, "s", &serial, Target::None).beside(peer));
        metrics.push(Metric::plain(format!("{row}.{way}.moved"), median(moved).unwrap_or(f64::NAN), "MiB"));
    }
    Ok(metrics)
}

/// Measures one of [`PROGRAMS`].
pub fn run(name: &str, rounds: Option<usize>) -> Result<Vec<Metric>> {
    let known = PROGRAMS.into_iter().find(|(known, _)| *known == name);
    let (name, scale) = known.with_context(|| format!("no program {name}"))?;
    program(name, scale, rounds.unwrap_or(ROUNDS))
}
