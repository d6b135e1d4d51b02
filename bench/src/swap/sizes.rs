//! GPUswap's figures 7 and 8 for all programs: run time by chunk size, on a card that is too small for two instances.

use anyhow::Result;
use vram::Limits;

use super::pressure::{HOST_MIB, PROGRAMS, two};
use super::{CHUNK, division, time};
use crate::report::interval::{Interval, mean};
use crate::report::{Metric, Target, order};
use rig::in_process_vm::{CardConfig, MIB};

/// Chunk sizes in KiB. GPUswap's range is 128 to 65,536, on 100 MB.
const CHUNK_SIZES_KIB: [u64; 5] = [128, 512, 2048, 4096, 8192];
/// VRAM size of the card in MiB. One instance of most programs needs at least as much memory.
const CARD_MIB: u64 = 16;
/// Number of runs per size. The sizes alternate.
const RUNS: usize = 5;

/// Measures one program with each chunk size.
fn program(name: &str, scale: u32) -> Result<Vec<Metric>> {
    let mut times: [Vec<f64>; CHUNK_SIZES_KIB.len()] = Default::default();
    let mut moved: [Vec<f64>; CHUNK_SIZES_KIB.len()] = Default::default();
    for run in 0..RUNS {
        for at in order(CHUNK_SIZES_KIB.len(), run) {
            let chunk_bytes = CHUNK_SIZES_KIB[at] << 10;
            let config =
                CardConfig { chunk_bytes, division: division(), time: time(), ..CardConfig::new(CARD_MIB, HOST_MIB) };
            let outcome = two(name, scale, &config, Limits::default())?;
            times[at].push(outcome.slower);
            moved[at].push(outcome.moved as f64 / MIB as f64);
        }
    }
    let usual = CHUNK_SIZES_KIB.iter().position(|kib| kib << 10 == CHUNK).unwrap_or_default();
    let mut metrics = Vec::new();
    for (at, kib) in CHUNK_SIZES_KIB.iter().enumerate() {
        let row = format!("swap.sizes.{name}.{kib}k");
        let middle = |values: &[f64]| mean(values).unwrap_or(f64::NAN);
        let time = Metric::ratio(format!("{row}.time"), middle(&times[at]), "s", middle(&times[usual]), Target::None);
        let time = time.within(Interval::of_ratio(&times[at], &times[usual], mean));
        metrics.push(time.beside("GPUswap figures 7 and 8: no size is best for all; baseline here: 2 MiB"));
        metrics.push(Metric::plain(format!("{row}.moved"), middle(&moved[at]), "MiB"));
    }
    Ok(metrics)
}

/// Runs the benchmark.
pub fn run() -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for (name, scale) in PROGRAMS {
        metrics.extend(program(name, scale)?);
    }
    Ok(metrics)
}
