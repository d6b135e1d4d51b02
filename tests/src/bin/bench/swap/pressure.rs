//! GPUswap's figure 5: five instances of a program on ever less memory, down to an eighth of what their buffers have, with the mean of
//! ten runs; and its figures 7 and 8: the same by the size of a chunk. Every byte of every run is verified.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use tests::bench::{Metric, Target};
use tests::light::{CardConfig, LightGpu, MIB, guest};
use vram::{Limits, VmId};
use workloads::{Options, by_name};

use super::picture::{Picture, Series, draw};
use super::{division, mean_of, ratio_of_means, time};

/// GPUswap's table 1.
const PROGRAMS: [(&str, u32); 7] =
    [("backprop", 20), ("bfs", 10), ("heartwall", 12), ("hotspot", 24), ("lud", 6), ("srad", 16), ("srad2", 16)];
/// Those of figures 7 and 8.
const BY_CHUNK: [&str; 2] = ["backprop", "heartwall"];
/// Instances of a program.
const INSTANCES: u32 = 5;
/// MiB that each VM sees.
const VM_MIB: u64 = 24;
/// MiB of host memory: all that they have.
const HOST_MIB: u64 = INSTANCES as u64 * VM_MIB;
/// MiB of a card on which all fits.
const PLENTY: u64 = HOST_MIB;
/// Times that the buffers of all have the card's memory.
const TIMES: [u64; 3] = [2, 4, 8];
/// Bytes of a chunk: of 2 MiB these programs would have one or two.
const CHUNK: u64 = 128 << 10;
/// Sizes of chunks.
const CHUNKS_KIB: [u64; 4] = [128, 256, 512, 1024];
/// Times that the buffers have the card's memory where those are compared.
const BY_CHUNK_TIMES: u64 = 2;
/// Runs of each; the mean counts, as in the paper.
const RUNS: usize = 10;
const RUNS_BY_CHUNK: usize = 5;

/// Outcome of the instances on a card.
struct Outcome {
    /// Seconds of the slowest one.
    slowest: f64,
    moved: u64,
    verified: u64,
    /// Bytes of buffers of all.
    buffers: u64,
}

/// All instances at once.
fn together(name: &str, count: u32, options: Options, config: &CardConfig, limits: Limits) -> Result<Outcome> {
    let rig = config.open()?;
    let instances: Vec<_> = (0..count).map(|vm| guest(&rig, vm, VM_MIB, limits).and_then(LightGpu::new)).collect();
    let runs = std::thread::scope(|scope| -> Result<Vec<(f64, u64, u64)>> {
        let run = |gpu: Result<LightGpu>, seed| -> Result<(f64, u64, u64)> {
            let mut gpu = gpu?;
            let before = gpu.footprint();
            let workload = by_name(name, Options { seed, ..options }).context("a workload")?;
            let began = Instant::now();
            let report = workloads::run(&*workload, &mut gpu)?;
            let took = began.elapsed().as_secs_f64();
            ensure!(report.verified > 0, "nothing of {name} was verified");
            Ok((took, report.verified, gpu.footprint() - before))
        };
        let runs = instances.into_iter().zip(1..).map(|(gpu, seed)| scope.spawn(move || run(gpu, seed)));
        let runs: Vec<_> = runs.collect();
        runs.into_iter().map(|run| run.join().ok().context("an instance panicked")?).collect()
    })
    .with_context(|| format!("{name} on {} MiB", config.card_mib))?;
    let state = rig.host.lock();
    let moved = |vm| state.memory().moved(VmId(vm)).map_or(0, |moved| moved.sum.bytes);
    Ok(Outcome {
        slowest: runs.iter().map(|run| run.0).fold(0.0, f64::max),
        moved: (0..count).map(moved).sum(),
        verified: runs.iter().map(|run| run.1).sum(),
        buffers: runs.iter().map(|run| run.2).sum(),
    })
}

/// Means over runs of the instances on a card.
struct Means {
    seconds: Vec<f64>,
    moved: f64,
    verified: u64,
    buffers: u64,
}

fn runs(name: &str, scale: u32, config: &CardConfig, runs: usize) -> Result<Means> {
    let options = Options { scale, ..Options::default() };
    let all: Vec<Outcome> =
        (0..runs).map(|_| together(name, INSTANCES, options, config, Limits::default())).collect::<Result<_>>()?;
    Ok(Means {
        seconds: all.iter().map(|run| run.slowest).collect(),
        moved: all.iter().map(|run| run.moved as f64).sum::<f64>() / runs as f64,
        verified: all.iter().map(|run| run.verified).sum(),
        buffers: all.iter().map(|run| run.buffers).max().unwrap_or(0),
    })
}

/// A card with chunks of so many bytes, on which VMs share a part of what their buffers have.
fn card(chunk_bytes: u64, bytes: u64) -> CardConfig {
    // A chunk for each of them at least.
    let card_mib = bytes.div_ceil(MIB).max(INSTANCES as u64 * chunk_bytes / MIB).max(1);
    CardConfig { division: division(), time: time(), chunk_bytes, ..CardConfig::new(card_mib, HOST_MIB) }
}

fn sweep(name: &'static str, scale: u32) -> Result<(Vec<Metric>, Series)> {
    let plenty = runs(name, scale, &card(CHUNK, PLENTY * MIB), RUNS)?;
    ensure!(plenty.moved == 0.0, "{name}: {} bytes moved on a card with room for all", plenty.moved);
    let row = format!("swap.pressure.{name}");
    let mut metrics = vec![
        mean_of(format!("{row}.fits.time"), &plenty.seconds, "s")?,
        Metric::plain(format!("{row}.buffers"), plenty.buffers as f64 / MIB as f64, "MiB"),
    ];
    let mut points = vec![(1.0, 1.0)];
    for times in TIMES {
        let config = card(CHUNK, plenty.buffers / times);
        let Means { seconds, moved, verified, .. } = runs(name, scale, &config, RUNS)?;
        let row = format!("{row}.{times}_times");
        let peer = if times == 8 { "GPUswap figure 5, 20 MB: 1.5x to 8.9x" } else { "" };
        let took = ratio_of_means(format!("{row}.time"), &seconds, "s", &plenty.seconds, Target::None)?;
        points.push((times as f64, took.value / took.baseline.unwrap_or(took.value)));
        metrics.push(took.beside(peer));
        metrics.push(Metric::plain(format!("{row}.card"), config.card_mib as f64, "MiB"));
        metrics.push(Metric::plain(format!("{row}.moved"), moved / MIB as f64, "MiB"));
        metrics.push(Metric::plain(format!("{row}.verified"), verified as f64 / MIB as f64, "MiB"));
    }
    Ok((metrics, Series { name: name.to_owned(), points }))
}

/// Run time by the size of a chunk.
pub fn by_chunk() -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for (name, scale) in PROGRAMS.into_iter().filter(|(name, _)| BY_CHUNK.contains(name)) {
        let plenty = runs(name, scale, &card(CHUNK, PLENTY * MIB), RUNS_BY_CHUNK)?;
        for kib in CHUNKS_KIB {
            let config = card(kib << 10, plenty.buffers / BY_CHUNK_TIMES);
            let Means { seconds, moved, .. } = runs(name, scale, &config, RUNS_BY_CHUNK)?;
            let row = format!("swap.chunk_time.{name}.{kib}k");
            let peer = "GPUswap figures 7 and 8: no size is best for all";
            let took = ratio_of_means(format!("{row}.time"), &seconds, "s", &plenty.seconds, Target::None)?;
            metrics.push(took.beside(peer));
            metrics.push(Metric::plain(format!("{row}.card"), config.card_mib as f64, "MiB"));
            metrics.push(Metric::plain(format!("{row}.moved"), moved / MIB as f64, "MiB"));
        }
    }
    Ok(metrics)
}

/// MiB of the card that VMs share, the least with which two instances of a working set of 4 MiB are right.
fn smallest() -> Result<Metric> {
    let mut least = None;
    for card_mib in [8, 4, 2, 1] {
        let config = CardConfig { chunk_bytes: CHUNK, division: division(), ..CardConfig::new(card_mib, HOST_MIB) };
        let options = Options { scale: 16, ..Options::default() };
        match together("memory", 2, options, &config, Limits::default()) {
            Ok(_) => least = Some(card_mib),
            Err(error) => {
                eprintln!("swap: {card_mib} MiB are too few: {error:#}");
                break;
            }
        }
    }
    let least = least.context("no size works")?;
    Ok(Metric::plain("swap.smallest_shared", least as f64, "MiB").beside("GPUswap: 20 MB"))
}

/// Pairs of runs with memory to spare, with relocation there and not.
const PAIRS: usize = 60;

/// With memory to spare: relocation switched on against not there at all. Each pair of runs has its own ratio, so that what this
/// machine does beside them, which changes more slowly, is in both.
pub fn without_pressure() -> Result<Vec<Metric>> {
    let options = Options { scale: 4, ..Options::default() };
    let mut seconds = [Vec::new(), Vec::new()];
    for round in 0..=PAIRS {
        let mut took = [0.0; 2];
        for at in tests::bench::order(2, round) {
            let host_mib = [0, HOST_MIB][at];
            let config = CardConfig { division: division(), time: time(), ..CardConfig::new(PLENTY, host_mib) };
            let limits = if host_mib == 0 { Limits::UNRESERVED } else { Limits::default() };
            let outcome = together("memory", 2, options, &config, limits)?;
            ensure!(outcome.moved == 0, "{} bytes moved", outcome.moved);
            took[at] = outcome.slowest;
        }
        // The first ones find this machine's caches empty.
        if round > 0 {
            seconds.iter_mut().zip(took).for_each(|(all, one)| all.push(one));
        }
    }
    let [off, on] = seconds;
    let ratio = ratio_of_means("swap.without_pressure", &on, "s", &off, Target::AtMost(1.005))?;
    Ok(vec![
        ratio.beside("GPUswap: native speed; NVIDIA's vGPU: 2-6 %"),
        Metric::plain("swap.without_pressure.pairs", on.len() as f64, "pairs"),
    ])
}

/// Measures, and draws figure 5 into `file`.
pub fn run(file: Option<&Path>) -> Result<Vec<Metric>> {
    let (mut metrics, mut lines) = (vec![smallest()?], Vec::new());
    for (name, scale) in PROGRAMS {
        let (rows, line) = sweep(name, scale)?;
        metrics.extend(rows);
        lines.push(line);
    }
    if let Some(file) = file {
        let title = "Five instances each on ever less memory (GPUswap, figure 5)";
        let x = "what their buffers have, in times of the card's memory";
        draw(file, &Picture { title, x, y: "times as long as with room for all" }, &lines)?;
    }
    Ok(metrics)
}
