//! Compares the number of bytes copied by the victim policies with the minimum, for the memory accesses of real
//! workloads.
//!
//! Each run [records](trace) traces. In the parts `single`, `pair` and `mixed`, all memory in use must be on the card,
//! so chunks are evicted and returned. The part `placed` models the mediator for guests on a card without page faults:
//! chunks that do not fit remain in host memory for the whole run, and are accessed there.
//!
//! Chunks are 128 KiB. With 2 MiB chunks, these programs would have only three to six chunks, which would leave little
//! choice.

mod optimum;
mod placed;
mod replay;
mod trace;

use anyhow::{Context, Result};
use vram::victim::VictimPolicy;

use crate::report::{Metric, Target};
use optimum::{Optimum, optimum};
use replay::{Contender, Copied, Instance, Known, Sees, interleave, replay};
use trace::{BLOCK, Trace};

/// Names and scales of the programs in figure 5 of the `swap` benchmark.
const PROGRAMS: [(&str, u32); 6] =
    [("backprop", 40), ("bfs", 15), ("hotspot", 60), ("lud", 8), ("srad", 40), ("srad2", 40)];
/// Card sizes, in percent of the memory in use.
const PERCENT: [usize; 4] = [90, 75, 50, 25];
/// Number of seeds with which the `random` policy is measured.
const SEEDS: u64 = 20;
/// Input seeds of the two instances, and of the profiling run.
const INPUTS: [u64; 3] = [1, 3, 2];
/// Target for the clock policy: number of bytes copied as a multiple of the minimum.
const TARGET: f64 = 1.2;
/// The policy with a target.
const JUDGED: &str = "clock";

const RANDOM: Contender = Contender { name: "random", policy: Some(VictimPolicy::Random), sees: Sees::Named };
const OTHERS: [Contender; 6] = [
    Contender { name: "priority", policy: Some(VictimPolicy::Priority), sees: Sees::Named },
    Contender { name: "profiled", policy: Some(VictimPolicy::Profiled), sees: Sees::Named },
    Contender { name: JUDGED, policy: Some(VictimPolicy::Clock), sees: Sees::Named },
    Contender { name: "loops", policy: Some(VictimPolicy::Loops), sees: Sees::Named },
    // This policy is hypothetical, because it needs reference bits on the card.
    Contender { name: "clock_bits", policy: Some(VictimPolicy::Clock), sees: Sees::All },
    // This policy is not part of the mediator.
    Contender { name: "latest", policy: None, sees: Sees::Named },
];

fn mib(chunks: f64) -> f64 {
    chunks * BLOCK as f64 / (1 << 20) as f64
}

/// Compares a policy's figure with the minimum, and with [`TARGET`] if `target` is true. If the minimum is 0, the
/// target is 0 and applies to the figure itself.
fn beside(name: String, value: f64, least: f64, target: bool) -> Metric {
    match least > 0.0 {
        true => Metric::ratio(name, value, "MiB", least, if target { Target::AtMost(TARGET) } else { Target::None }),
        false => Metric::plain(name, value, "MiB").target(if target { Target::AtMost(0.0) } else { Target::None }),
    }
}

/// Numbers of card sizes for which the policy certainly meets or certainly misses its target, given the bounds of the
/// optimum.
#[derive(Debug, Default)]
struct Verdicts {
    all: u32,
    met: u32,
    missed: u32,
}

impl Verdicts {
    fn add(&mut self, copied: u64, Optimum { least, reached }: Optimum) {
        self.all += 1;
        self.met += u32::from(copied as f64 <= TARGET * least as f64);
        self.missed += u32::from(copied as f64 > TARGET * reached as f64);
    }
}

/// Measures all policies on cards of all sizes.
fn sizes(row: &str, instances: &[Instance<'_>], verdicts: &mut Verdicts) -> Vec<Metric> {
    let pieces = interleave(instances);
    let footprint: usize = instances.iter().map(|instance| instance.trace.sums().len()).sum();
    // The card must have space for all memory that one step uses.
    let most = pieces.iter().map(|piece| piece.step.len()).max().unwrap_or(0);
    let mut metrics = vec![
        Metric::plain(format!("{row}.footprint"), mib(footprint as f64), "MiB"),
        Metric::plain(format!("{row}.pieces"), pieces.len() as f64, "pieces"),
    ];
    for percent in PERCENT {
        let capacity = (footprint * percent).div_ceil(100).max(most);
        let (row, best) = (format!("{row}.{percent}pct"), optimum(&pieces, instances.len(), capacity));
        let least = mib(best.least as f64);
        let run = |contender, seed| replay(&pieces, instances, capacity, contender, seed).sum() as f64;
        let random: Vec<f64> = (0..SEEDS).map(|seed| run(RANDOM, seed)).collect();
        let mean = random.iter().sum::<f64>() / SEEDS as f64;
        let (low, high) =
            random.iter().fold((f64::INFINITY, 0.0_f64), |(low, high), sum| (low.min(*sum), high.max(*sum)));
        metrics.push(Metric::plain(format!("{row}.optimum_least"), least, "MiB"));
        metrics.push(Metric::plain(format!("{row}.optimum_reached"), mib(best.reached as f64), "MiB"));
        metrics.push(beside(format!("{row}.random"), mib(mean), least, false));
        metrics.push(Metric::plain(format!("{row}.random_lowest"), mib(low), "MiB"));
        metrics.push(Metric::plain(format!("{row}.random_highest"), mib(high), "MiB"));
        for contender in OTHERS {
            let Copied { ins, outs } = replay(&pieces, instances, capacity, contender, 0);
            let judged = contender.name == JUDGED;
            if judged {
                verdicts.add(ins + outs, best);
            }
            metrics.push(beside(format!("{row}.{}", contender.name), mib((ins + outs) as f64), least, judged));
        }
    }
    metrics
}

/// The recorded runs of a program.
struct Runs {
    name: &'static str,
    first: Trace,
    second: Trace,
    known: Known,
}

/// Measures all parts, or only those whose name contains `only`.
pub fn run(only: Option<&str>) -> Result<Vec<Metric>> {
    let wants = |part: &str| only.is_none_or(|only| part.contains(only));
    let record = |(name, scale)| -> Result<Runs> {
        let traces = INPUTS.map(|seed| trace::record(name, scale, seed).with_context(|| format!("evict: {name}")));
        let [first, second, profile] = traces;
        Ok(Runs { name, first: first?, second: second?, known: Known::from_profile(&profile?) })
    };
    let all = PROGRAMS.into_iter().map(record).collect::<Result<Vec<_>>>()?;
    let (mut metrics, mut verdicts) = (Vec::new(), Verdicts::default());
    for Runs { name, first, second, known } in &all {
        let [first, second] = [first, second].map(|trace| Instance { trace, known });
        if wants("single") {
            metrics.extend(sizes(&format!("evict.single.{name}"), &[first], &mut verdicts));
        }
        if wants("pair") {
            metrics.extend(sizes(&format!("evict.pair.{name}"), &[first, second], &mut verdicts));
        }
        if wants("placed") {
            metrics.extend(placed::sizes(name, first));
        }
    }
    if wants("mixed") {
        let instances: Vec<_> = all.iter().map(|Runs { first, known, .. }| Instance { trace: first, known }).collect();
        metrics.extend(sizes("evict.mixed", &instances, &mut verdicts));
    }
    for (what, count) in [("all", verdicts.all), ("surely_met", verdicts.met), ("surely_missed", verdicts.missed)] {
        metrics.push(Metric::plain(format!("evict.verdicts.{JUDGED}.{what}"), f64::from(count), "cards"));
    }
    Ok(metrics)
}

#[cfg(test)]
mod tests;
