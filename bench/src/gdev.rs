//! Gdev's figures 3 and 4: copies between guest memory and the card with the `gdev` library, by chunk size, through the
//! aperture and with the copy engine. Also measures the library's cost with the papers' workloads, which run with the
//! library and with a driver that issues the same ioctls without it.
//!
//! For copies, the link's speed is modelled: a copy engine is as fast as the guest's CPU, which is measured first, in a
//! separate VM. Both stages of a large copy therefore take the same time, as on the papers' hosts.
//!
//! Copies of pinned memory, as in the paper's figure 5, are not split into chunks. They are reported as `link` in
//! figure 3.

use anyhow::{Context, Result, ensure};
use tests::guest::{self, card_toml, vm_toml};
use tests::{Daemon, Vm, VmConfig};
use workloads::NAMES;

use crate::Request;
use crate::report::{Interval, Metric, Target, median, order};

/// Name of the VM.
const VM: &str = "gdev";
/// Kernel version of the guest.
const KERNEL: &str = "6.12";
/// VRAM size of the card in MiB.
const CARD_MIB: u32 = 384;
/// Size of the VM's VRAM in MiB.
const VRAM_MIB: u32 = 160;
/// Default number of rounds.
const ROUNDS: usize = 5;
/// Size of a large copy in bytes.
const LARGE_BYTES: u64 = 32 << 20;
/// Chunk sizes in bytes.
const PIECES: [u64; 7] = [64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20];
/// Sizes of small copies in bytes.
const SMALL: [u64; 11] = [16, 64, 256, 512, 1024, 2048, 4096, 8192, 16_384, 65_536, 262_144];
/// Number of small copies per measurement.
const SMALL_COUNT: u64 = 50;
/// Limit on the aperture's time as a multiple of the copy engine's time. After the first size that exceeds it, no
/// larger sizes are measured. Each word through the aperture is a message, so a copy of 256 KiB takes a second.
const HOPELESS: f64 = 8.0;
/// Directions of copies.
const DIRECTIONS: [&str; 2] = ["write", "read"];
/// Number of runs of a workload with each driver per round, for the median.
const RUNS: u64 = 8;
/// Maximum time with the library, as a multiple of the time with raw ioctls.
const RAW_TARGET: f64 = 1.02;
const PEER_PIECES: &str = "Gdev: 4 MiB are best";

/// A guest that performs copies.
struct Machine {
    vm: Vm,
    _daemon: Daemon,
}

impl Machine {
    /// Boots a guest on a card with a link speed of `bus` MiB/s, or an unlimited speed if it is 0.
    fn boot(name: &str, bus: u64) -> Result<Self> {
        let time = format!("\n[card.time]\ncopy_mib_per_s = 100000\nbus_mib_per_s = {bus}\n");
        let daemon = Daemon::start(name, |paths| {
            card_toml(paths, CARD_MIB) + if bus == 0 { "" } else { &time } + &vm_toml(VM, VRAM_MIB)
        })?;
        let vm = Vm::launch(&VmConfig::new(VM, tests::images()?, KERNEL)?.with_gpu(daemon.vm_socket(VM)))?;
        vm.wait_ready()?;
        guest::load_driver(&vm)?;
        Ok(Self { vm, _daemon: daemon })
    }

    /// Returns the median time of a copy in microseconds.
    fn copy(&self, direction: &str, bytes: u64, count: u64, more: &str) -> Result<f64> {
        let command = format!("tuning --direction {direction} --bytes {bytes} --count {count} {more}");
        microseconds(&guest::smoke(&self.vm, &command)?.line, "median_ns=")
    }
}

/// Returns the time with the key `key` in a result line, converted from nanoseconds to microseconds.
fn microseconds(line: &str, key: &str) -> Result<f64> {
    let value = line.split_whitespace().find_map(|word| word.strip_prefix(key));
    Ok(value.with_context(|| format!("{key} in {line}"))?.parse::<f64>()? / 1e3)
}

/// Returns the copy speed of the guest's CPU in MiB/s.
fn processor() -> Result<u64> {
    let machine = Machine::boot("gdev-processor", 0)?;
    let us = machine.copy("write", LARGE_BYTES, 5, "--pinned")?;
    let rate = (LARGE_BYTES >> 20) as f64 / (us / 1e6);
    ensure!(rate >= 1.0, "the guest's CPU copies {rate} MiB/s");
    Ok(rate as u64)
}

/// Runs the benchmark. Parts: `raw`, `direct`, `pieces`, `both`.
pub fn run(request: &Request) -> Result<Vec<Metric>> {
    let rounds = request.rounds.unwrap_or(ROUNDS);
    let mut metrics = Vec::new();
    if request.wants("raw") {
        metrics.extend(raw(rounds)?);
    }
    if ["direct", "pieces", "both"].iter().any(|part| request.wants(part)) {
        metrics.extend(copies(request, rounds)?);
    }
    Ok(metrics)
}

/// Compares all workloads with the library and with raw ioctls, which alternate in one guest.
fn raw(rounds: usize) -> Result<Vec<Metric>> {
    let machine = Machine::boot("gdev-raw", 0)?;
    let mut samples = vec![[Vec::new(), Vec::new()]; NAMES.len()];
    for round in 0..rounds {
        for at in order(NAMES.len(), round) {
            let name = NAMES[at];
            eprintln!("bench: gdev, {name} with and without the library, round {} of {rounds}", round + 1);
            let line = guest::smoke(&machine.vm, &format!("compare --name {name} --count {RUNS}"))?.line;
            for (samples, key) in samples[at].iter_mut().zip(["library_ns=", "raw_ns="]) {
                samples.push(microseconds(&line, key)?);
            }
        }
    }
    let named = NAMES.iter().zip(&samples);
    let mut metrics: Vec<Metric> = named
        .map(|(name, [library, raw])| {
            Metric::ratio_of_samples(format!("gdev.raw.{name}"), library, "us", raw, Target::AtMost(RAW_TARGET))
        })
        .collect();
    // Total time of all workloads in a round.
    let total = |driver: usize| -> Vec<f64> {
        (0..rounds).map(|round| samples.iter().filter_map(|of| of[driver].get(round)).sum()).collect()
    };
    let (library, raw) = (total(0), total(1));
    let all = Metric::ratio_of_samples("gdev.raw.all", &library, "us", &raw, Target::AtMost(RAW_TARGET));
    metrics.push(all);
    Ok(metrics)
}

/// Measures copies on a card with a link as fast as the guest's CPU.
fn copies(request: &Request, rounds: usize) -> Result<Vec<Metric>> {
    let rate = processor()?;
    eprintln!("bench: gdev, the CPU and the link copy {rate} MiB/s");
    let machine = Machine::boot("gdev", rate)?;
    let mut metrics = vec![Metric::plain("gdev.link", rate as f64, "MiB/s")];
    for direction in DIRECTIONS {
        if request.wants("direct") {
            metrics.extend(direct(&machine, direction, rounds)?);
        }
        if request.wants("pieces") {
            metrics.extend(pieces(&machine, direction, rounds)?);
        }
    }
    if request.wants("both") {
        metrics.extend(both(&machine, rounds)?);
    }
    Ok(metrics)
}

/// Measures copies of pinned memory in both directions, both sequentially and concurrently on the two copy engines.
fn both(machine: &Machine, rounds: usize) -> Result<Vec<Metric>> {
    let ways = ["", "--serial"];
    let mut samples = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        for at in order(ways.len(), round) {
            eprintln!("bench: gdev, both directions {}, round {} of {rounds}", ways[at], round + 1);
            samples[at].push(machine.copy("both", LARGE_BYTES, 1, ways[at])?);
        }
    }
    let [at_once, serial] = &samples;
    Ok(vec![Metric::ratio_of_samples("gdev.both".to_owned(), at_once, "us", serial, Target::AtMost(0.7))])
}

/// Compares copies through the aperture with copies by the copy engine, by size (figure 4).
fn direct(machine: &Machine, direction: &str, rounds: usize) -> Result<Vec<Metric>> {
    let ways = ["--direct", ""];
    let mut metrics = Vec::new();
    let (mut crossover, mut wins) = (0, true);
    for bytes in SMALL {
        let mut samples = [Vec::new(), Vec::new()];
        for round in 0..rounds {
            eprintln!("bench: gdev, direct {direction} of {bytes} bytes, round {} of {rounds}", round + 1);
            for at in order(ways.len(), round) {
                samples[at].push(machine.copy(direction, bytes, SMALL_COUNT, ways[at])?);
            }
        }
        let [by_cpu, by_engine] = &samples;
        let name = format!("gdev.direct.{direction}.{bytes}");
        metrics.push(Metric::ratio_of_samples(name, by_cpu, "us", by_engine, Target::None));
        let ratio = median(by_cpu).zip(median(by_engine)).map(|(cpu, engine)| cpu / engine).context("a measurement")?;
        wins = wins && ratio < 1.0;
        crossover = if wins { bytes } else { crossover };
        if ratio > HOPELESS {
            break;
        }
    }
    // The largest measured size up to which the aperture is always faster.
    metrics.push(Metric::plain(format!("gdev.direct.{direction}.crossover"), crossover as f64, "bytes"));
    Ok(metrics)
}

/// Measures large copies by chunk size (figure 3), and the gain from overlap.
fn pieces(machine: &Machine, direction: &str, rounds: usize) -> Result<Vec<Metric>> {
    // Without chunks, the CPU copies all data before the copy engine starts.
    let whole = format!("--serial --piece {LARGE_BYTES}");
    let ways: Vec<String> =
        std::iter::once(whole).chain(PIECES.iter().map(|bytes| format!("--piece {bytes}"))).collect();
    let mut samples = vec![Vec::new(); ways.len()];
    for round in 0..rounds {
        for at in order(ways.len(), round) {
            eprintln!("bench: gdev, {direction} {}, round {} of {rounds}", ways[at], round + 1);
            samples[at].push(machine.copy(direction, LARGE_BYTES, 1, &ways[at])?);
        }
    }
    let (whole, split) = samples.split_first().context("a measurement")?;
    let mut metrics: Vec<Metric> = PIECES
        .iter()
        .zip(split)
        .map(|(bytes, times)| {
            let name = format!("gdev.pieces.{direction}.{}K", bytes >> 10);
            Metric::ratio_of_samples(name, times, "us", whole, Target::None).beside(PEER_PIECES)
        })
        .collect();
    let best =
        split.iter().min_by(|one, other| median(one).partial_cmp(&median(other)).unwrap_or(std::cmp::Ordering::Equal));
    let best = best.context("a measurement")?;
    let gain = median(whole).zip(median(best)).map(|(whole, best)| whole / best).context("a measurement")?;
    let interval = Interval::of_ratio(whole, best, median);
    metrics.push(
        Metric::plain(format!("gdev.pieces.{direction}.gain"), gain, "times")
            .target(Target::AtLeast(1.5))
            .within(interval),
    );
    Ok(metrics)
}
