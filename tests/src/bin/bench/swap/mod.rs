//! More memory than the card has: GPUswap's figures 4 to 9 and Gdev's 12 and 13 on this system, and turns against
//! thrashing. Guests are light ones ([`tests::light`]): no VM is booted.
//!
//! The card's engines move memory at set rates, its own and the host's 25 to 1 as on GPUswap's card, so that figures are
//! ratios of what was modelled and not of what this machine had to spare. The rates are low enough for the software card
//! to keep up with them. What a guest's driver and kernels take of this machine is in the times, too, so that ratios to
//! modelled times are upper bounds.

mod bandwidth;
mod delay;
mod fairness;
mod jobs;
mod picture;
mod pressure;
mod reserve;
mod thrash;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use owner::Division;
use simgpu::TimeModel;
use tests::bench::interval::mean;
use tests::bench::{Interval, Metric, Target, median};
use tests::light::{MIB, timing};
use vram::Mode;

/// Bytes per second that an engine moves of the card's memory.
const VRAM_RATE: u64 = 800 * MIB;
/// Bytes per second that an engine moves of the host's.
const BUS_RATE: u64 = 32 * MIB;
/// Bytes of a chunk where nothing else is said.
const CHUNK: u64 = 2 * MIB;
/// Links that cards have, in bytes per second: PCIe 2 and 3 with 16 lanes, and PCIe 5 or what ties a card to its processor.
const LINKS: [(&str, f64); 3] = [("6gbs", 6e9), ("12gbs", 12e9), ("50gbs", 50e9)];
/// Nothing here takes that long.
const LONG: Duration = Duration::from_secs(120);

/// Returns the time that work takes.
fn time() -> Option<TimeModel> {
    Some(timing(VRAM_RATE, BUS_RATE))
}

/// Nobody takes turns; all else as an operator gets it who says nothing.
fn division() -> Division {
    let mut division = Division::default();
    division.quanta.mode = Mode::Off;
    division
}

/// Waits until something holds.
fn eventually(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let began = Instant::now();
    while !holds()? {
        ensure!(began.elapsed() < LONG, "{what}: not within {LONG:?}");
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

/// The middle one.
fn middle(values: &[f64]) -> Result<f64> {
    median(values).context("no measurement")
}

/// The largest.
fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

/// The mean of samples, with its interval.
fn mean_of(name: impl Into<String>, samples: &[f64], unit: &'static str) -> Result<Metric> {
    let value = mean(samples).context("no measurement")?;
    Ok(Metric::plain(name, value, unit).within(Interval::of(samples, mean)))
}

/// The mean of samples beside that of a baseline's, with the interval of the ratio.
fn ratio_of_means(
    name: impl Into<String>,
    samples: &[f64],
    unit: &'static str,
    baseline: &[f64],
    target: Target,
) -> Result<Metric> {
    let [value, whole] = [mean(samples), mean(baseline)].map(|of| of.context("no measurement"));
    Ok(Metric::ratio(name, value?, unit, whole?, target).within(Interval::of_ratio(samples, baseline, mean)))
}

/// A part of the benchmark by name.
type Part<'a> = (&'static str, &'a dyn Fn() -> Result<Vec<Metric>>);

/// Measures. The pictures of figures 4 and 5 go beside `json`.
pub fn run(json: Option<&Path>) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    // A part can be chosen while one works on it.
    let only = std::env::var("GPU_MEDIATOR_SWAP_PART").ok();
    let picture = |of: &str| json.map(|json| json.with_extension(format!("{of}.svg")));
    let parts: [Part<'_>; 11] = [
        ("bandwidth", &bandwidth::throughput),
        ("links", &|| Ok([bandwidth::links()?, delay::links()?].concat())),
        ("delay", &delay::run),
        ("chunks", &bandwidth::chunk_sizes),
        ("chunk_delay", &delay::by_chunk),
        ("chunk_time", &pressure::by_chunk),
        ("fairness", &|| fairness::run(picture("shares").as_deref())),
        ("reserve", &reserve::run),
        ("thrash", &thrash::run),
        ("without_pressure", &pressure::without_pressure),
        ("pressure", &|| pressure::run(picture("pressure").as_deref())),
    ];
    for (name, part) in parts.iter().filter(|(name, _)| only.as_deref().is_none_or(|only| only == *name)) {
        let began = Instant::now();
        metrics.extend(part().with_context(|| format!("swap: {name}"))?);
        eprintln!("swap: {name} took {:.1} s", began.elapsed().as_secs_f64());
    }
    Ok(metrics)
}
