//! GPUswap's figure 5: two instances of a program with decreasing amounts of card memory, down to the minimum with
//! which they run correctly. Also measures the cost of relocation support if memory is sufficient. Verifies every byte
//! of every run.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use vram::{Limits, TenantId};
use workloads::{Options, by_name};

use super::picture::{Picture, Series, draw};
use super::{division, time};
use crate::report::interval::{Interval, mean};
use crate::report::{Metric, Target, order};
use rig::in_process_vm::{CardConfig, LightGpu, MIB, gpu};

/// Names and scales of the programs in GPUswap's table 1.
pub(super) const PROGRAMS: [(&str, u32); 7] =
    [("backprop", 40), ("bfs", 15), ("heartwall", 60), ("hotspot", 60), ("lud", 8), ("srad", 40), ("srad2", 40)];
/// Size of each VM's VRAM in MiB.
pub(super) const VM_MIB: u64 = 64;
/// Host memory in MiB, which is sufficient for both VMs.
pub(super) const HOST_MIB: u64 = 2 * VM_MIB;
/// VRAM sizes of the card in MiB, which range from sufficient for all memory to sufficient for almost none. The paper
/// uses 500 MB to 20 MB.
const CARD_SIZES_MIB: [u64; 5] = [128, 20, 12, 8, 4];
/// VRAM size of a card that has space for both instances, in MiB.
const UNPRESSURED_CARD_MIB: u64 = CARD_SIZES_MIB[0];
/// Number of runs per size. The sizes alternate, as in GPUswap.
const RUNS: usize = 10;
/// Number of runs on a card with spare memory, with and without relocation.
const SPARE_MEMORY_RUNS: usize = 9;

/// Result of running several instances on one card.
pub(super) struct Outcome {
    /// Duration of the slower instance in seconds.
    pub(super) slower: f64,
    pub(super) moved: u64,
    verified: u64,
    /// Maximum amount of VRAM that one instance uses, in bytes.
    footprint: u64,
}

/// Runs both instances concurrently.
pub(super) fn two(name: &str, scale: u32, config: &CardConfig, limits: Limits) -> Result<Outcome> {
    several(name, scale, 2, config, limits)
}

/// Runs `count` concurrent instances.
pub(super) fn several(name: &str, scale: u32, count: usize, config: &CardConfig, limits: Limits) -> Result<Outcome> {
    let rig = config.open()?;
    let vms = 0..u32::try_from(count)?;
    let instances: Vec<_> = vms.clone().map(|vm| gpu(&rig, vm, VM_MIB, limits)).collect();
    let runs = std::thread::scope(|scope| -> Result<Vec<(f64, u64, u64)>> {
        let run = |gpu: Result<LightGpu>, seed| -> Result<(f64, u64, u64)> {
            let mut gpu = gpu?;
            let workload = by_name(name, Options { scale, seed, ..Options::default() }).context("a workload")?;
            let began = Instant::now();
            let report = workloads::run(&*workload, &mut gpu)?;
            let took = began.elapsed().as_secs_f64();
            ensure!(report.verified > 0, "no result of {name} was verified");
            Ok((took, report.verified, gpu.backend().peak_vram_bytes()))
        };
        let runs = instances.into_iter().zip(1..).map(|(gpu, seed)| scope.spawn(move || run(gpu, seed)));
        let runs: Vec<_> = runs.collect();
        runs.into_iter().map(|run| run.join().ok().context("an instance panicked")?).collect()
    })
    .with_context(|| format!("{name} on {} MiB", config.card_mib))?;
    let state = rig.host.lock();
    let moved = vms.map(|vm| state.memory().moved(TenantId(vm)).map_or(0, |moved| moved.sum.bytes)).sum();
    Ok(Outcome {
        slower: runs.iter().map(|run| run.0).fold(0.0, f64::max),
        moved,
        verified: runs.iter().map(|run| run.1).sum(),
        footprint: runs.iter().map(|run| run.2).max().unwrap_or(0),
    })
}

/// Measures one program with decreasing amounts of memory. Returns the program's times, and its line in the chart.
fn sweep(name: &str, scale: u32, runs: usize) -> Result<(Vec<Metric>, Series)> {
    let mut outcomes: [Vec<Outcome>; CARD_SIZES_MIB.len()] = Default::default();
    for run in 0..runs {
        for at in order(CARD_SIZES_MIB.len(), run) {
            let config =
                CardConfig { division: division(), time: time(), ..CardConfig::new(CARD_SIZES_MIB[at], HOST_MIB) };
            outcomes[at].push(two(name, scale, &config, Limits::default())?);
        }
    }
    let middle = |values: &[f64]| mean(values).unwrap_or(f64::NAN);
    let times = |of: &[Outcome]| -> Vec<f64> { of.iter().map(|outcome| outcome.slower).collect() };
    let mib = |of: &[Outcome], bytes: fn(&Outcome) -> u64| {
        middle(&of.iter().map(|outcome| bytes(outcome) as f64 / MIB as f64).collect::<Vec<_>>())
    };
    let (mut metrics, mut points) = (Vec::new(), Vec::new());
    let whole = times(&outcomes[0]);
    for (card_mib, of) in CARD_SIZES_MIB.iter().zip(&outcomes) {
        let row = format!("swap.pressure.{name}.{card_mib}m");
        let (took, moved) = (times(of), mib(of, |outcome| outcome.moved));
        if *card_mib == UNPRESSURED_CARD_MIB {
            ensure!(moved == 0.0, "{name}: {moved} MiB moved on a card with space for all");
            metrics.push(
                Metric::plain(format!("{row}.time"), middle(&took), "s").within(Interval::from_samples(&took, mean)),
            );
            metrics.push(Metric::plain(format!("{row}.buffers_of_one"), mib(of, |outcome| outcome.footprint), "MiB"));
            continue;
        }
        points.push((*card_mib as f64, middle(&took) / middle(&whole)));
        let peer = if *card_mib == 20 { "GPUswap figure 5, 20 MB: 1.5x to 8.9x" } else { "" };
        let time = Metric::ratio(format!("{row}.time"), middle(&took), "s", middle(&whole), Target::None);
        metrics.push(time.within(Interval::of_ratio(&took, &whole, mean)).beside(peer));
        metrics.push(Metric::plain(format!("{row}.moved"), moved, "MiB"));
        metrics.push(Metric::plain(format!("{row}.verified"), mib(of, |outcome| outcome.verified), "MiB"));
    }
    Ok((metrics, Series { name: name.to_owned(), points }))
}

/// Compares cards with and without relocation support, both with sufficient memory.
fn without_pressure() -> Result<Metric> {
    let mut fastest = [f64::INFINITY; 2];
    for _ in 0..SPARE_MEMORY_RUNS {
        for (host_mib, fastest) in [0, HOST_MIB].into_iter().zip(&mut fastest) {
            let config =
                CardConfig { division: division(), time: time(), ..CardConfig::new(UNPRESSURED_CARD_MIB, host_mib) };
            let limits = if host_mib == 0 { Limits::UNRESERVED } else { Limits::default() };
            let outcome = two("memory", 16, &config, limits)?;
            ensure!(outcome.moved == 0, "{} bytes moved", outcome.moved);
            *fastest = fastest.min(outcome.slower);
        }
    }
    let [off, on] = fastest;
    let metric = Metric::ratio("swap.without_pressure", on, "s", off, Target::AtMost(1.005));
    Ok(metric.beside("GPUswap: native speed; NVIDIA's vGPU: 2-6 %"))
}

/// Returns the minimum card memory for VMs, in MiB, with which two instances of 4 MiB each compute correctly.
fn smallest() -> Result<Metric> {
    let mut least = None;
    for card_mib in [8, 4, 2, 1] {
        let config = CardConfig { chunk_bytes: 128 << 10, division: division(), ..CardConfig::new(card_mib, HOST_MIB) };
        match two("memory", 16, &config, Limits::default()) {
            Ok(_) => least = Some(card_mib),
            Err(error) => {
                eprintln!("swap: {card_mib} MiB are not enough: {error:#}");
                break;
            }
        }
    }
    let least = least.context("no size works")?;
    Ok(Metric::plain("swap.smallest_shared", least as f64, "MiB").beside("GPUswap: 20 MB"))
}

/// Runs the benchmark, and draws figure 5 to `file`.
pub fn run(file: Option<&Path>, runs: Option<usize>) -> Result<Vec<Metric>> {
    let (mut metrics, mut lines) = (vec![smallest()?, without_pressure()?], Vec::new());
    for (name, scale) in PROGRAMS {
        let (rows, line) = sweep(name, scale, runs.unwrap_or(RUNS))?;
        metrics.extend(rows);
        lines.push(line);
    }
    if let Some(file) = file {
        let title = "Two instances of each program with decreasing memory (GPUswap, figure 5)";
        draw(file, &Picture { title, x: "card memory in MiB", y: "run time relative to sufficient memory" }, &lines)?;
    }
    Ok(metrics)
}
