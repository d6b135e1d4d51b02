//! Figures of the Gdev paper (ATC 2012).

use std::time::Duration;

use anyhow::{Context, Result};
use sched::Engine;
use tests::contention::{Load, Outcome};
use tests::many_vms::COPY_MIB_PER_S;

use super::{BAND, CREDIT, FIFO, HALF, LONG_MADD, MADD, MS, Stage, TENTH, Work, equal, percent, steady};
use crate::report::Metric;

/// Size of a copy in bytes, which the guest rounds up. A copy takes 2 ms, which is about as long as a long kernel.
const COPY: u64 = (COPY_MIB_PER_S << 20) * 2 / 1000;

/// Time before and after an arrival during which windows are omitted, in ns. This covers the setup of the arriving VM
/// and a window of history.
const ARRIVAL: u64 = HALF;

/// Returns the time from a load's start to the next load's start, or to the end of the run, in ns. Excludes [`ARRIVAL`]
/// next to each start.
fn between(outcome: &Outcome, load: usize) -> Result<(u64, u64)> {
    let from = outcome.marks.get(load).context("a load that has not begun")? + ARRIVAL;
    let until = outcome.marks.get(load + 1).map_or(outcome.length, |next| next.saturating_sub(ARRIVAL));
    Ok((from.next_multiple_of(TENTH), until))
}

/// Measures short tasks alongside long tasks that start 3 s later.
pub fn gdev_14(stage: &Stage) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for policy in [FIFO, CREDIT, BAND] {
        let row = format!("sched.guests.gdev14.{}", policy.0);
        let rounds = [MADD, 2 * LONG_MADD];
        let late = steady(1, rounds[1]).after(Duration::from_secs(3));
        let measured = Duration::from_secs(4) + stage.measured;
        let outcome = stage.play_for(&row, policy, measured, vec![steady(0, rounds[0]), late])?;
        let work = Work::from_outcome(&outcome, &rounds);
        let (from, until) = between(&outcome, 1)?;
        let error = work.uses.share_error(Engine::Compute, HALF, from, until, &equal(2));
        let peer = match policy.0 {
            "fifo" | "credit" => "Gdev: no isolation",
            _ => "Gdev, BAND: within 7 % on average",
        };
        metrics.push(percent(format!("{row}.error"), error.mean).beside(peer));
        let before = from.min(2_000 * MS);
        let alone = work.uses.used(0, Engine::Compute, 0, before) as f64 / before as f64;
        metrics.push(percent(format!("{row}.alone_before"), alone));
    }
    Ok(metrics)
}

/// Measures copies and kernels of two sizes, in two VMs under BAND, with separate queues (MRQ) and with one queue
/// (SDQ). The figures are based on the mediator's charges.
pub fn gdev_15(stage: &Stage) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for (name, queues) in [("mrq", "separate"), ("sdq", "single")] {
        let row = format!("sched.guests.gdev15.{name}");
        stage.crowd.set(&["--queues", queues])?;
        let kernels = [MADD, LONG_MADD].into_iter().enumerate().map(|(vm, rounds)| steady(vm, rounds));
        let copies = (0..2).map(|vm| Load::copies(vm, COPY));
        let outcome = stage.play(&row, BAND, kernels.chain(copies).collect());
        stage.crowd.set(&["--queues", "separate"])?;
        let outcome = outcome?;
        let peer = if name == "mrq" { "Gdev, MRQ: exceeds 100 %" } else { "Gdev, SDQ: does not overlap" };
        let mut both = 0.0;
        for vm in 0..2 {
            // A VM is charged for the copies of all its programs.
            let part = |engine| outcome.uses.used(vm, engine, 0, outcome.length) as f64 / outcome.length as f64;
            let (compute, copy) = (part(Engine::Compute), part(Engine::Copy0));
            both += compute + copy;
            metrics.push(percent(format!("{row}.vm{vm}.compute"), compute));
            metrics.push(percent(format!("{row}.vm{vm}.copy"), copy).beside("Gdev, MRQ: about 50 % at most"));
        }
        metrics.push(percent(format!("{row}.both_engines"), both).beside(peer));
    }
    Ok(metrics)
}

/// Measures Gdev's figure 15 with copies of two durations, and with equal and different shares for copies and compute.
pub fn unequal_copies(stage: &Stage) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for (name, weight, wanted) in [("equal", "compute", [0.5, 0.5]), ("weights_3_1", "300", [0.75, 0.25])] {
        let row = format!("sched.guests.gdev15_copies.{name}");
        stage.crowd.set_vm(0, &["--copy-weight", weight])?;
        let kernels = (0..2).map(|vm| steady(vm, LONG_MADD));
        let copies = [COPY, 3 * COPY].into_iter().enumerate().map(|(vm, bytes)| Load::copies(vm, bytes));
        let outcome = stage.play(&row, BAND, kernels.chain(copies).collect());
        stage.crowd.set_vm(0, &["--copy-weight", "compute"])?;
        let outcome = outcome?;
        for (engine, wanted) in [(Engine::Compute, [0.5, 0.5]), (Engine::Copy0, wanted)] {
            let used = [0, 1].map(|vm| outcome.uses.used(vm, engine, 0, outcome.length) as f64);
            let part = used[0] / (used[0] + used[1]).max(1.0);
            let row = format!("{row}.{}", engine.name());
            metrics.push(percent(format!("{row}.error"), (part - wanted[0]).abs()));
            metrics.push(percent(format!("{row}.vm0"), part).beside("Gdev figure 15: both copy as much"));
        }
    }
    Ok(metrics)
}

/// Measures four equal VMs that start at intervals of 5 s.
pub fn gdev_16(stage: &Stage) -> Result<Vec<Metric>> {
    let row = "sched.guests.gdev16";
    let loads = (0..4).map(|vm| steady(vm, MADD).after(Duration::from_secs(5) * vm as u32));
    let outcome = stage.play_for(row, BAND, Duration::from_secs(20), loads.collect())?;
    let work = Work::from_outcome(&outcome, &[MADD; 4]);
    let mut metrics = Vec::new();
    for vms in 1..=4 {
        let (from, until) = between(&outcome, vms - 1)?;
        let wanted: Vec<f64> = (0..4).map(|vm| if vm < vms { 1.0 / vms as f64 } else { 0.0 }).collect();
        let error = work.uses.share_error(Engine::Compute, HALF, from, until, &wanted);
        metrics.push(percent(format!("{row}.{vms}vms.error_500ms_worst"), error.worst).beside("Gdev: fair"));
    }
    Ok(metrics)
}
