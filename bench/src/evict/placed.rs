//! Compares the policies for final placements. Without page faults, chunks that do not fit on the card remain in host
//! memory, where the GPU accesses them, and all other chunks remain on the card. The placement determines the bus
//! traffic, as in GPUswap and its author's dissertation. The best placement puts the chunks with the least traffic in
//! host memory.

use super::replay::{Instance, Sees};
use super::{JUDGED, OTHERS, PERCENT, RANDOM, SEEDS, beside};
use crate::report::Metric;

/// Converts bytes to MiB.
fn mib(bytes: f64) -> f64 {
    bytes / (1 << 20) as f64
}

/// Measures all policies on cards of all sizes. The policies know the accesses of the whole run.
pub(super) fn sizes(name: &str, Instance { trace, known }: Instance<'_>) -> Vec<Metric> {
    let sums = trace.sums();
    let moved = |chunk: &u32| sums.get(chunk).map_or(0, |used| used.read + used.written);
    let all: Vec<u32> = sums.keys().copied().collect();
    let mut ascending: Vec<u64> = all.iter().map(moved).collect();
    ascending.sort_unstable();
    let mut metrics = Vec::new();
    for percent in PERCENT {
        let count = all.len() - (all.len() * percent).div_ceil(100);
        let least = mib(ascending[..count].iter().sum::<u64>() as f64);
        let row = format!("evict.placed.{name}.{percent}pct");
        let chosen = |contender: super::Contender, seed| {
            let policy = contender.policy?;
            let (mut hints, mut chosen) = (known.hints(), all.clone());
            for submission in &trace.submissions {
                match contender.sees {
                    Sees::Named => submission.seen.iter().for_each(|&chunk| hints.touch(chunk..=chunk)),
                    Sees::All => {
                        submission.steps.iter().flat_map(|step| step.keys()).for_each(|&at| hints.touch(at..=at))
                    }
                }
            }
            policy.build(seed).victims(&mut hints, &mut chosen, count);
            Some(mib(chosen.iter().map(moved).sum::<u64>() as f64))
        };
        let random: Vec<f64> = (0..SEEDS).filter_map(|seed| chosen(RANDOM, seed)).collect();
        let mean = random.iter().sum::<f64>() / random.len().max(1) as f64;
        metrics.push(Metric::plain(format!("{row}.optimum"), least, "MiB"));
        metrics.push(beside(format!("{row}.random"), mean, least, false));
        for contender in OTHERS {
            let found = chosen(contender, 0);
            let judged = contender.name == JUDGED;
            metrics.extend(found.map(|found| beside(format!("{row}.{}", contender.name), found, least, judged)));
        }
    }
    metrics
}
