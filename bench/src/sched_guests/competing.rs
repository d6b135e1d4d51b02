//! Measures share errors under each policy (GPUvm's figures 7 and 8) for several kernel durations, while two, four or
//! eight of sixteen VMs compete.

use anyhow::Result;
use tests::many_vms::Crowd;

use super::{
    BAND, CREDIT, FIFO, LONG_MADD, MADD, MEMORY_MIB, Policy, Stage, VMS, Work, common, equal, errors, length_ns, steady,
};
use crate::report::{Metric, Record};

/// Number of rounds of each kernel, for each half of the VMs. The first kernels take 0.4 and 1.9 ms (GPUvm's `madd` and
/// `long-madd`, to the extent that its paper specifies them). The next ones take 0.4, 1.9 or 5 ms in both halves. The
/// last ones take 0.4 and 5 ms.
const KERNEL_ROUNDS: [(u32, u32); 5] = [(MADD, LONG_MADD), (1, 1), (5, 5), (13, 13), (1, 13)];

/// Runs the benchmark. Records each run when it ends, and skips recorded runs.
pub fn run(stage: &mut Stage, record: &mut Record) -> Result<Vec<Metric>> {
    for (short, long) in KERNEL_ROUNDS {
        for vms in [2, 4, 8] {
            for policy in [FIFO, CREDIT, BAND] {
                let micros = |rounds| length_ns(rounds) / 1000;
                let row = format!("sched.guests.{vms}of{VMS}.{}us_{}us.{}", micros(short), micros(long), policy.0);
                let last = format!("{row}.wait_p99_at_most");
                let compared = policy != FIFO || (short, long) == (MADD, LONG_MADD);
                if compared && record.metrics().iter().all(|metric| metric.name != last) {
                    record.put(one(stage, &row, policy, vms, short, long)?)?;
                }
            }
        }
    }
    Ok(Vec::new())
}

/// Measures two and four VMs under BAND with the default setting, which clears PGRAPH between VMs.
pub fn cleared(stage: &Stage) -> Result<Vec<Metric>> {
    const BOOTED: usize = 4;
    let stage = Stage { crowd: Crowd::boot("sched-cleared", BOOTED, MEMORY_MIB, "")?, measured: stage.measured };
    let mut metrics = Vec::new();
    for (short, long) in [(MADD, LONG_MADD), (1, 1), (5, 5), (13, 13)] {
        for vms in [2, 4] {
            let micros = |rounds| length_ns(rounds) / 1000;
            let row = format!("sched.guests.cleared.{vms}of{BOOTED}.{}us_{}us.band", micros(short), micros(long));
            metrics.extend(one(&stage, &row, BAND, vms, short, long)?);
        }
    }
    Ok(metrics)
}

fn one(stage: &Stage, row: &str, policy: Policy, vms: usize, short: u32, long: u32) -> Result<Vec<Metric>> {
    let rounds: Vec<u32> = (0..vms).map(|vm| if vm % 2 == 0 { short } else { long }).collect();
    let loads = rounds.iter().enumerate().map(|(vm, rounds)| steady(vm, *rounds));
    let outcome = stage.play(row, policy, loads.collect())?;
    let work = Work::from_outcome(&outcome, &rounds);
    let mut metrics = errors(row, &work, policy, &equal(vms));
    if (short, long) == (MADD, LONG_MADD) {
        let peers = match (policy.0, vms) {
            ("fifo", _) => ["GPUvm fig. 7: long-madd higher in all cases", "GPUvm fig. 8: nobody fair"],
            ("credit", 2) => ["GPUvm fig. 7: not fair", "GPUvm fig. 8: nobody fair"],
            ("credit", _) => ["GPUvm fig. 7: fair", "GPUvm fig. 8: nobody fair"],
            _ => ["GPUvm fig. 7: fair; Gdev: within 7 %", "GPUvm fig. 8: nobody fair, BAND neither"],
        };
        for (metric, peer) in metrics.iter_mut().step_by(2).zip(peers) {
            *metric = metric.clone().beside(peer);
        }
    }
    metrics.extend(common(row, &outcome, &work, &equal(vms)));
    Ok(metrics)
}
