//! Commands during which the host counts accesses: a workload that pauses between its phases, and a given number of
//! launches.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use workloads::{Phase, Run, Setup};

use super::Facts;
use crate::compute;
use crate::marks::Marks;
use crate::options::Options;
use crate::rig::{Counts, Rig};
use gdev::nouveau::Device;

/// Runs `phases --name NAME [--marks]`: executes a workload once on its own device, and marks the end of each phase
/// except for the last, which closes the device.
pub fn phases(rig: &Rig, options: &Options) -> Result<Facts> {
    let name = options.text("name").context("--name is missing")?;
    let chosen = workloads::Options { seed: rig.seed(), ..workloads::Options::default() };
    let workload = workloads::by_name(name, chosen).with_context(|| format!("--name {name}: no workload"))?;
    let marks = Marks::new(options.flag("marks"));
    marks.at("begin", "")?;
    let device = Device::open(Path::new(options.text("node").unwrap_or(crate::DEFAULT_NODE)))?;
    let mut gpu = compute::context(&device)?;
    gpu.finish()?;
    let mut run = Run::new(&*workload);
    for phase in Phase::ALL {
        run.step(phase, &mut gpu)?;
        let done = gpu.backend().done();
        marks.at(phase.name(), &format!("cpu_bytes={} link_bytes={}", done.cpu_bytes, done.link_bytes))?;
    }
    let report = run.end(&mut gpu)?;
    rig.add(Counts { bytes: report.verified, copies: gpu.backend().done().copies, channels: 1 });
    Ok(vec![("workload", name.to_owned()), ("size", workload.size().replace(", ", "+").replace(' ', "_"))])
}

/// Runs `launches --name NAME --count N [--side N]`: executes a workload's kernels N times with a wait after each, and
/// then once more to check the result.
pub fn launches(rig: &Rig, options: &Options) -> Result<Facts> {
    let name = options.text("name").context("--name is missing")?;
    let count = options.number("count", 1)?;
    let side = options.text("side").map(|_| options.number("side", 0)).transpose()?;
    let side = side.map(u32::try_from).transpose().context("--side")?;
    let chosen = workloads::Options { seed: rig.seed(), side, ..workloads::Options::default() };
    let workload = workloads::by_name(name, chosen).with_context(|| format!("--name {name}: no workload"))?;
    ensure!(count > 0, "--count 0: at least one launch");
    let device = Device::open(Path::new(options.text("node").unwrap_or(crate::DEFAULT_NODE)))?;
    let mut gpu = compute::measuring(&device)?;
    let setup = Setup::new(&*workload, &mut gpu)?;
    setup.upload(&mut gpu)?;
    gpu.finish()?;
    for _ in 0..count {
        workload.launch(&mut gpu, &setup)?;
        gpu.finish()?;
    }
    setup.free(&mut gpu)?;
    let report = workloads::run(&*workload, &mut gpu)?;
    rig.add(Counts { bytes: report.verified, copies: gpu.backend().done().copies, channels: 1 });
    Ok(vec![("launches", count.to_string()), ("gpu_us", gpu.backend().done().gpu_time.as_micros().to_string())])
}

/// Runs `yardstick`: measures a computation on the CPU alone.
pub fn yardstick(_rig: &Rig, _options: &Options) -> Result<Facts> {
    Ok(vec![("cpu_us", workloads::yardstick().as_micros().to_string())])
}
