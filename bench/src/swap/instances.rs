//! GPUswap with more than two VMs: one to five instances of a program on a card that is too small for them, in
//! comparison with the same number of instances on a card with space for all of them. Verifies every byte.

use anyhow::{Result, ensure};
use vram::Limits;

use super::pressure::{Outcome, PROGRAMS, VM_MIB, several};
use super::{BUS_RATE, LANES, division, time};
use crate::report::interval::{Interval, mean};
use crate::report::{Metric, Target, order};
use rig::in_process_vm::{CardConfig, MIB};

/// Numbers of instances to measure.
const COUNTS: [usize; 3] = [1, 2, 5];
/// VRAM size of the card in MiB. It is large enough for one instance of most programs, and for a fifth to a third of
/// the memory of five instances.
const CARD_MIB: u64 = 20;
/// Number of runs per configuration. The configurations alternate.
const RUNS: usize = 5;

fn run_of(name: &str, scale: u32, count: usize, card_mib: u64) -> Result<Outcome> {
    let host_mib = VM_MIB * count as u64;
    let config = CardConfig { division: division(), time: time(), ..CardConfig::new(card_mib, host_mib) };
    several(name, scale, count, &config, Limits::default())
}

/// Measures one program with each number of instances.
fn program(name: &str, scale: u32, runs: usize) -> Result<Vec<Metric>> {
    let mut plenty: [Vec<f64>; COUNTS.len()] = Default::default();
    let mut short: [Vec<f64>; COUNTS.len()] = Default::default();
    let mut moved: [Vec<f64>; COUNTS.len()] = Default::default();
    for run in 0..runs {
        for at in order(COUNTS.len(), run) {
            let count = COUNTS[at];
            let roomy = run_of(name, scale, count, VM_MIB * count as u64)?;
            ensure!(roomy.moved == 0, "{name}: {} bytes moved on a card with space for all", roomy.moved);
            plenty[at].push(roomy.slower);
            let tight = run_of(name, scale, count, CARD_MIB)?;
            short[at].push(tight.slower);
            moved[at].push(tight.moved as f64);
        }
    }
    let mut metrics = Vec::new();
    let middle = |values: &[f64]| mean(values).unwrap_or(f64::NAN);
    for (at, count) in COUNTS.iter().enumerate() {
        let row = format!("swap.instances.{name}.{count}");
        let (short, plenty, moved) = (&short[at], &plenty[at], &moved[at]);
        let time = Metric::ratio(format!("{row}.time"), middle(short), "s", middle(plenty), Target::None);
        metrics
            .push(time.within(Interval::of_ratio(short, plenty, mean)).beside("GPUswap: by the relocated bytes only"));
        metrics.push(Metric::plain(format!("{row}.moved"), middle(moved) / MIB as f64, "MiB"));
        // Compare the loss with the minimum time that both engines need to copy these bytes.
        let copied = middle(moved) / (LANES * BUS_RATE as f64);
        if copied > 0.0 {
            let lost = middle(short) - middle(plenty);
            metrics.push(Metric::ratio(format!("{row}.lost_to_copies"), lost, "s", copied, Target::None));
        }
    }
    Ok(metrics)
}

/// Runs the benchmark.
pub fn run(runs: Option<usize>) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for (name, scale) in PROGRAMS {
        metrics.extend(program(name, scale, runs.unwrap_or(RUNS))?);
    }
    Ok(metrics)
}
