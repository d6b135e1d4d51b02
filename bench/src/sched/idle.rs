//! Simulates sixteen VMs, a few of which compete while the others are idle, as on a host where most guests are idle
//! after booting. Half of the competing VMs run short kernels, and the other half run long kernels. Kernels are either
//! queued, or submitted when the previous kernel has ended.

use anyhow::Result;
use sched::Engine;
use sched::sim::{Guest, Length, Stream};

use super::{Contender, MS, THINK, US, WARM_UP_NS, contenders, due, percent, play, worst};
use crate::report::{Metric, Target};

const VMS: usize = 16;
const SIMULATED_SECONDS: u64 = 20;
/// Durations of the short and the long kernels in ns.
const KERNEL_LENGTHS_NS: [(u64, u64); 5] =
    [(400 * US, 2 * MS), (500 * US, 2500 * US), (MS, 5 * MS), (400 * US, 5 * MS), (5 * MS, 5 * MS)];
/// Weights of the VMs with short kernels and with long kernels.
const WEIGHTS: [(u32, u32); 3] = [(1, 1), (3, 1), (1, 3)];

/// Runs the benchmark.
pub fn run() -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for (kind, depth) in [("queued", 4), ("sync", 1)] {
        for (short, long) in KERNEL_LENGTHS_NS {
            for vms in [2, 4, 8] {
                for weights in WEIGHTS {
                    let guests = guests(short, long, weights, depth, vms);
                    for Contender { name, config } in contenders() {
                        if !["credit", "band_published", "band"].contains(&name) {
                            continue;
                        }
                        let wanted = due(&guests[..vms]);
                        let errors = worst(|seed| {
                            let outcome = play(config, SIMULATED_SECONDS, guests.clone(), seed)?;
                            let error = |window| outcome.share_error(Engine::Compute, window * MS, WARM_UP_NS, &wanted);
                            let idle = 1.0 - outcome.utilisation(Engine::Compute);
                            Ok(vec![error(500).mean, error(500).worst, error(100).mean, error(100).worst, idle])
                        })?;
                        let row = format!(
                            "sched.idle.{kind}.{}us_{}us.{vms}of{VMS}.weights{}_{}.{name}",
                            short / US,
                            long / US,
                            weights.0,
                            weights.1
                        );
                        metrics.extend(figures(&row, kind, name, &errors));
                    }
                }
            }
        }
    }
    Ok(metrics)
}

fn guests(short: u64, long: u64, weights: (u32, u32), depth: u32, vms: usize) -> Vec<Guest> {
    let guest = |depth, length| Guest::new(Stream { depth, ..Stream::looping(Length::Fixed(length), THINK) });
    let competing = (0..vms).map(|vm| match vm % 2 {
        0 => guest(depth, short).weight(100 * weights.0),
        _ => guest(depth, long).weight(100 * weights.1),
    });
    competing.chain((vms..VMS).map(|_| guest(0, MS))).collect()
}

/// Returns the metrics with their targets. CREDIT has a target only if guests queue work, because it does not wait for
/// guests without queued work.
fn figures(row: &str, kind: &str, policy: &str, errors: &[f64]) -> Vec<Metric> {
    let (half, tenth) = match (policy, kind) {
        ("band", _) => (Target::AtMost(1.0), Target::AtMost(3.0)),
        ("credit", "queued") => (Target::AtMost(2.0), Target::None),
        _ => (Target::None, Target::None),
    };
    let names = ["error_500ms", "error_500ms_worst", "error_100ms", "error_100ms_worst", "idle"];
    let targets = [half, half, tenth, tenth, Target::None];
    let each = names.iter().zip(targets).zip(errors);
    each.map(|((name, target), error)| percent(format!("{row}.{name}"), *error).target(target)).collect()
}
