//! Gdev's figures 12 and 13: small jobs alongside a job that occupies most of the card, with and without a reserve for
//! immediate evictions, and jobs in a VM with a decreasing share of the card.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use rig::Rig;
use vram::{Limits, TenantId};
use workloads::{Options, by_name};

use super::{CHUNK, division, time};
use crate::report::{Metric, Target};
use rig::in_process_vm::{CardConfig, MIB, SharedGuest, guest};

/// VRAM size of the card in MiB, which is a sixteenth of the size in the Gdev paper.
const CARD_MIB: u64 = 100;
/// Memory of the large job in MiB.
const LARGE_MIB: u64 = 64;
/// Memory of each small job in MiB.
const SMALL_MIB: u64 = 8;
/// VRAM of a VM in addition to its job's memory, in MiB.
const BESIDE_MIB: u64 = 16;
/// Numbers of concurrent small jobs.
const JOBS: [u32; 4] = [1, 2, 4, 6];
/// Size of the reserve in MiB, which is a tenth of the card, as in the Gdev paper.
const RESERVE_MIB: u64 = 10;
/// Number of passes of a job over its memory.
const PASSES: u32 = 2;

/// Runs a job to completion in its own VM, and removes the VM. Returns the job's duration in seconds.
fn job(rig: &Rig, vm: u32, mib: u64, limits: Limits) -> Result<f64> {
    let guest = SharedGuest::new(rig, vm, mib + BESIDE_MIB, limits);
    let mut gpu = guest.start()?;
    let options = Options { working_set: Some(mib * MIB), rounds: Some(PASSES), seed: vm.into(), ..Options::default() };
    let workload = by_name("memory", options).context("a workload")?;
    let began = Instant::now();
    let report = workloads::run(&*workload, &mut gpu)?;
    ensure!(report.verified >= mib * MIB, "VM {vm}: only {} bytes were verified", report.verified);
    let took = began.elapsed().as_secs_f64();
    drop(gpu);
    guest.remove()?;
    Ok(took)
}

/// Starts `jobs` small jobs at the same time, alongside the large job, which keeps its memory. Returns the time until
/// all small jobs have finished, in seconds, and the large job's suspension time, in ns.
fn beside_a_large_one(jobs: u32, reserve_mib: u64) -> Result<(f64, u64)> {
    let mut division = division();
    division.reserve = u32::try_from(reserve_mib * MIB / CHUNK)?;
    let rig = CardConfig { division, time: time(), ..CardConfig::new(CARD_MIB, 256) }.open()?;
    let keeps = u32::try_from(LARGE_MIB * MIB / CHUNK)?;
    let large = Limits { guarantee: keeps, ..Limits::default() };
    let mut holder = guest(&rig, 100, LARGE_MIB + BESIDE_MIB, large)?;
    let channel = holder.channel(1);
    for mib in 8..8 + LARGE_MIB {
        holder.guest.vram_write(mib * MIB, &[7; 4096]);
    }
    let began = Instant::now();
    std::thread::scope(|scope| -> Result<()> {
        let rig = &rig;
        let jobs: Vec<_> =
            (0..jobs).map(|vm| scope.spawn(move || job(rig, vm, SMALL_MIB, Limits::default()))).collect();
        jobs.into_iter().try_for_each(|job| job.join().ok().context("a job panicked")?.map(drop))
    })?;
    let makespan = began.elapsed().as_secs_f64();
    let suspended = rig.host.lock().memory().moved(TenantId(100)).map_or(0, |moved| moved.sum.suspended_ns);
    let _ = channel;
    Ok((makespan, suspended))
}

/// Runs the benchmark.
pub fn run() -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    let mut alone = None;
    for jobs in JOBS {
        let (without, suspended) = beside_a_large_one(jobs, 0)?;
        let (with, suspended_with) = beside_a_large_one(jobs, RESERVE_MIB)?;
        let one = *alone.get_or_insert(without);
        let name = format!("swap.reserve.{jobs}_jobs");
        let each = one * f64::from(jobs);
        metrics.push(
            Metric::ratio(format!("{name}.without"), without, "s", each, Target::None)
                .beside("Gdev figure 12: fails beyond 3 jobs without swap"),
        );
        metrics.push(
            Metric::ratio(format!("{name}.with"), with, "s", without, Target::None)
                .beside("Gdev figure 12: the reserve softens the slope"),
        );
        for (what, ns) in [("without", suspended), ("with", suspended_with)] {
            metrics.push(Metric::plain(format!("{name}.large_suspended_{what}"), ns as f64 / 1e6, "ms"));
        }
    }
    // Figure 13: decrease the VM's share of the card.
    let mut whole = None;
    for parts in [1, 2, 4, 8] {
        let quota = u32::try_from(2 * SMALL_MIB * MIB / CHUNK)? / parts;
        let rig = CardConfig { division: division(), time: time(), ..CardConfig::new(CARD_MIB, 256) }.open()?;
        let took = job(&rig, 0, 2 * SMALL_MIB, Limits { quota: quota + 4, ..Limits::default() })?;
        let whole = *whole.get_or_insert(took);
        let name = format!("swap.quota.1_of_{parts}");
        metrics.push(Metric::ratio(name, took, "s", whole, Target::None).beside("Gdev figure 13: all complete"));
    }
    Ok(metrics)
}
