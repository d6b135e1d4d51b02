//! Runs malicious guests alongside three well-behaved guests. Measures the lowest GPU time of the three relative to
//! their entitlement, and their completed work relative to their work alongside a fourth well-behaved guest.

use std::time::Duration;

use anyhow::Result;
use sched::Engine;
use tests::contention::{Contest, Outcome};
use tests::many_vms::ROUND_NS;
use tests::rogues::{Rogue, neighbour, stretched};

use super::{BAND, Stage, WARM_UP, WINDOW_STEP_NS, percent};
use crate::report::{Metric, Target};

/// Numbers of rounds of the well-behaved guests' kernels. The kernels take 2 and 10 ms, so that some are still queued
/// if a busy host delays the guest.
const NEIGHBOURS: [u32; 3] = [4, 4, 20];
/// Minimum measured time per rogue, if the rogue can run for that long.
const MIN_MEASURED_TIME: Duration = Duration::from_secs(6);

/// Runs the benchmark.
pub fn run(stage: &mut Stage) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    let measured = stage.measured.max(MIN_MEASURED_TIME);
    stage.crowd.set(BAND.1)?;
    let entitled = 1.0 / (NEIGHBOURS.len() + 1) as f64;
    let fourth = NEIGHBOURS.len();
    let mut loads: Vec<_> = (0..).zip(NEIGHBOURS).map(|(vm, rounds)| neighbour(vm, rounds)).collect();
    loads.push(neighbour(fourth, NEIGHBOURS[0]));
    eprintln!("bench: sched.guests.rogue.none");
    let behaved = work(&Contest { loads, warm: WARM_UP, measured }.run(&stage.crowd, |_| Ok(()))?);
    metrics.push(percent("sched.guests.rogue.none.neighbours_did".to_owned(), least(&behaved, &[entitled; 3])));
    for rogue in Rogue::ALL {
        eprintln!("bench: sched.guests.rogue.{}", rogue.name);
        let outcome = rogue.beside(&stage.crowd, &NEIGHBOURS, measured.min(rogue.longest()))?;
        let row = format!("sched.guests.rogue.{}", rogue.name);
        let received = (0..NEIGHBOURS.len()).map(|place| outcome.received(place)).fold(1.0, f64::min);
        let stretched = (0..).zip(NEIGHBOURS).map(|(place, rounds)| stretched(&outcome, place, rounds));
        let stretched = stretched.collect::<Result<Vec<_>>>()?.into_iter().fold(0.0, f64::max);
        let account = &outcome.after[fourth];
        metrics.extend([
            // For a share of 25 %, the target permits a loss of one percent of the total time.
            percent(format!("{row}.neighbours"), received / entitled).target(Target::AtLeast(96.0)),
            percent(format!("{row}.neighbours_did"), least(&work(&outcome), &behaved)).target(Target::AtLeast(96.0)),
            // Ratio of a kernel's duration to its card time. The excess is time during which the rogue used the card.
            Metric::plain(format!("{row}.neighbours_stretched"), stretched, "x").target(Target::AtMost(1.1)),
            Metric::plain(format!("{row}.strikes"), account.strikes as f64, "strikes"),
        ]);
    }
    Ok(metrics)
}

/// Returns each well-behaved guest's share of GPU time, computed from its own count of completed kernels.
fn work(outcome: &Outcome) -> Vec<f64> {
    let lengths = NEIGHBOURS.map(|rounds| u64::from(rounds) * ROUND_NS);
    let uses = outcome.counted(&lengths, WINDOW_STEP_NS);
    let part = |place| uses.used(place, Engine::Compute, 0, outcome.length) as f64 / outcome.length.max(1) as f64;
    (0..NEIGHBOURS.len()).map(part).collect()
}

/// Returns the minimum ratio between an element of `of` and the corresponding element of `over`.
fn least(of: &[f64], over: &[f64]) -> f64 {
    of.iter().zip(over).map(|(of, over)| of / over).fold(f64::INFINITY, f64::min)
}
