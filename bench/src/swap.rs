//! Overcommitted card memory: GPUswap's figures 4 to 9 and Gdev's figures 12 and 13 on this system, and quanta as a
//! remedy for thrashing. Guests run in this process ([`rig::in_process_vm`]), without booting a VM.
//!
//! The card's engines transfer data from and to card and host memory at fixed rates with a ratio of 25 to 1, as on
//! GPUswap's card. Figures are ratios of modelled times, which do not depend on this machine's speed. The rates are low
//! enough for the software card to keep up. The measured times include this machine's work for guest drivers and
//! kernels, so ratios to modelled times are upper bounds.

mod bandwidth;
mod delay;
mod fairness;
mod instances;
mod link;
mod phases;
mod picture;
mod pressure;
mod reserve;
mod sizes;
mod thrash;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use card_manager::Division;
use simgpu::TimeModel;
use vram::Mode;

use super::Request;
use crate::report::Metric;
use rig::in_process_vm::{MIB, timing};

/// Rate at which an engine transfers data from or to card memory, in bytes per second.
const VRAM_RATE: u64 = 800 * MIB;
/// Rate at which an engine transfers data from or to host memory, in bytes per second.
const BUS_RATE: u64 = 32 * MIB;
/// Number of copy engines.
const LANES: f64 = 2.0;
/// Default size of a chunk in bytes.
const CHUNK: u64 = 2 * MIB;
/// Timeout of all waits.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// Returns the time model of the benchmark's cards.
fn time() -> Option<TimeModel> {
    Some(timing(VRAM_RATE, BUS_RATE))
}

/// Returns the default memory division, without quanta.
fn division() -> Division {
    let mut division = Division::default();
    division.quanta.mode = Mode::Off;
    division
}

/// Waits until a condition holds.
fn eventually(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let began = Instant::now();
    while !holds()? {
        ensure!(began.elapsed() < WAIT_TIMEOUT, "{what}: not within {WAIT_TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Returns the quantile at `permille` of the values.
fn quantile(values: &[f64], permille: usize) -> Result<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1).context("no values")?;
    Ok(sorted[(last * permille).div_ceil(1000).min(last)])
}

/// A part of the benchmark and its name.
type Part<'a> = (&'static str, &'a dyn Fn() -> Result<Vec<Metric>>);

/// Runs the benchmark. Writes charts of figures 4 and 5 to the folder of the results file.
pub fn run(request: &Request) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    let picture = |of: &str| request.file.as_deref().map(|file| file.with_extension(format!("{of}.svg")));
    let parts: [Part<'_>; 14] = [
        ("bandwidth", &bandwidth::throughput),
        ("delay", &delay::run),
        ("chunks", &bandwidth::chunk_sizes),
        ("delay_by_chunk", &delay::by_chunk_size),
        ("sizes", &sizes::run),
        ("fairness", &|| fairness::run(picture("shares").as_deref())),
        ("reserve", &reserve::run),
        ("thrash", &thrash::run),
        ("phases.bfs", &|| phases::run("bfs", request.rounds)),
        ("phases.backprop", &|| phases::run("backprop", request.rounds)),
        ("phases.srad", &|| phases::run("srad", request.rounds)),
        ("link", &link::run),
        ("pressure", &|| pressure::run(picture("pressure").as_deref(), request.rounds)),
        ("instances", &|| instances::run(request.rounds)),
    ];
    for (name, part) in parts.iter().filter(|(name, _)| request.wants(name)) {
        let began = Instant::now();
        metrics.extend(part().with_context(|| format!("swap: {name}"))?);
        eprintln!("swap: {name} took {:.1} s", began.elapsed().as_secs_f64());
    }
    Ok(metrics)
}
