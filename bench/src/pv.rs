//! Paravirtualization: GPUvm's figures 4 and 5 and tables 2 to 4 on this system. Runs the papers' workloads in three
//! kinds of guests: with the stock driver under full virtualization, with the modified driver, and with a
//! passed-through card. The variants of full virtualization are shadowing as published for GPUvm, remapped apertures,
//! lazy shadowing, both, and the defaults. The variants of the modified driver are one call per entry, and batches.
//!
//! All VMs run concurrently, each on its own software card, and take turns for each workload. The report shows the
//! measured time next to the time from a model ([`crate::model`]), which multiplies the guest's operations in each
//! phase by their cost on a real host.
//!
//! Parts: [`counting`] counts a guest's operations in each phase, [`report`] computes the figures, [`dataflow`] is
//! Gdev's figure 11, [`contexts`] is GPUvm's figure 6, and [`picture`] draws charts from a results file.

pub mod contexts;
mod counting;
pub mod dataflow;
pub mod picture;
mod report;

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::guest::{self, LOAD_LIMIT, SMOKE_LIMIT};
use tests::{Daemon, Paths, Vm, VmConfig};

use super::Request;
use crate::model::Platform;
use crate::report::{Metric, Target, median, order};
use counting::Phases;

/// Default number of rounds of each workload.
const ROUNDS: usize = 5;
/// VRAM size of each card in MiB.
const CARD_MIB: u32 = 384;
/// VRAM size of a mediated VM in MiB.
const VRAM_MIB: u32 = 256;
/// Kernel version of the guests.
const KERNEL: &str = "6.1";
/// Name of the step that unbinds and rebinds the driver, which repeats the work of loading it.
const DRIVER: &str = "driver-load";
/// Names of a workload's phases in its result line. Their times add up to the workload's time.
const PHASES: [&str; 5] = ["init", "htod", "launch", "dtoh", "close"];

/// A way to provide a GPU to a VM.
struct Kind {
    name: &'static str,
    /// Lines of the VM's `[[vm]]` table.
    toml: &'static str,
    /// Kernel command-line words for the modified driver, or `None` for the stock driver.
    driver: Option<&'static str>,
    platform: Platform,
    /// Target for the modelled time, relative to passthrough.
    target: Target,
}

const BASELINE: &str = "passthrough";
const NATIVE: &str = "native";
const OFFERED: &str = "paravirtual = { offered = true }\n";
const TRAPPED: Platform = Platform::Mediated { posted: true };
// QEMU waits for each write if any region of the device can be mapped.
const REMAPPED: Platform = Platform::Mediated { posted: false };

#[rustfmt::skip]
const KINDS: [Kind; 8] = [
    Kind { name: BASELINE, toml: "passthrough = true\n", driver: None, platform: Platform::Passthrough, target: Target::None },
    Kind { name: "fv-naive", toml: "shadow = \"naive\"\napertures = \"trapped\"\n", driver: None, platform: TRAPPED, target: Target::None },
    Kind { name: "fv-remap", toml: "shadow = \"naive\"\napertures = \"remapped\"\n", driver: None, platform: REMAPPED, target: Target::None },
    Kind { name: "fv-lazy", toml: "shadow = \"lazy\"\napertures = \"trapped\"\n", driver: None, platform: TRAPPED, target: Target::None },
    Kind { name: "fv-both", toml: "shadow = \"lazy\"\napertures = \"remapped\"\n", driver: None, platform: REMAPPED, target: Target::None },
    Kind { name: "fv", toml: "", driver: None, platform: REMAPPED, target: Target::AtMost(1.10) },
    Kind { name: "pv-naive", toml: OFFERED, driver: Some("gpu_mediator_pv.naive=1"), platform: REMAPPED, target: Target::None },
    Kind { name: "pv", toml: OFFERED, driver: Some(""), platform: REMAPPED, target: Target::AtMost(1.03) },
];

/// Durations of the rounds in seconds, by phase and in total, and the counts of an additional round.
#[derive(Default)]
struct Measured {
    phases: BTreeMap<&'static str, Vec<f64>>,
    totals: Vec<f64>,
    counts: Phases,
}

/// All measurements, by workload and kind.
type Table = BTreeMap<(&'static str, &'static str), Measured>;

/// Runs the benchmark. Its parts are the workloads.
pub fn run(request: &Request) -> Result<Vec<Metric>> {
    let images = tests::images()?;
    let daemon = Daemon::start("pv", configuration)?;
    let mut vms = Vec::new();
    for kind in &KINDS {
        let mut config = VmConfig::new(kind.name, images, KERNEL)?.with_gpu(daemon.vm_socket(kind.name));
        if let Some(parameters) = kind.driver {
            config = config.paravirtual()?;
            config.append = format!("{} {parameters}", config.append);
        }
        vms.push(Vm::launch(&config)?);
    }
    for (kind, vm) in KINDS.iter().zip(&vms) {
        vm.wait_ready()?;
        guest::load_driver(vm)?;
        if kind.driver.is_some() {
            let calls = guest::counter(&daemon, kind.name, "pv_batches")?;
            ensure!(calls > 0, "the driver of VM {} does not use the paravirtual interface", kind.name);
        }
    }
    let factor = emulation(&vms[0])?;
    let mut table = Table::new();
    let rounds = request.rounds.unwrap_or(ROUNDS);
    for workload in workloads().filter(|workload| request.wants(workload)) {
        for round in 0..rounds {
            eprintln!("bench: pv, {workload}, round {} of {rounds}", round + 1);
            for at in order(KINDS.len(), round) {
                let (kind, vm) = (&KINDS[at], &vms[at]);
                let entry = table.entry((workload, kind.name)).or_default();
                let seconds = once(vm, workload).with_context(|| format!("{workload} in VM {}", kind.name))?;
                entry.totals.push(seconds.values().sum());
                for (phase, seconds) in seconds {
                    entry.phases.entry(phase).or_default().push(seconds);
                }
            }
        }
        for (kind, vm) in KINDS.iter().zip(&vms) {
            let counts = counted(&daemon, vm, workload).with_context(|| format!("{workload} in VM {}", kind.name))?;
            table.entry((workload, kind.name)).or_default().counts = counts;
        }
    }
    report::all(&table, factor)
}

fn workloads() -> impl Iterator<Item = &'static str> {
    [DRIVER].into_iter().chain(::workloads::NAMES.iter().copied())
}

fn configuration(paths: &Paths) -> String {
    let mut text = format!("[daemon]\nadmin_socket = {:?}\nsocket_dir = {:?}\n", paths.admin_socket, paths.folder);
    for Kind { name, toml, .. } in &KINDS {
        text += &format!("\n[[card]]\nname = \"card-{name}\"\nkind = \"simgpu\"\nvram_mib = {CARD_MIB}\n");
        text += &format!("\n[[vm]]\nname = {name:?}\ncard = \"card-{name}\"\n");
        if *name != BASELINE {
            text += &format!("vram_mib = {VRAM_MIB}\n");
        }
        text += toml;
    }
    text
}

/// Returns the factor by which a guest's CPU is slower than this host's.
fn emulation(vm: &Vm) -> Result<f64> {
    let mut factors = Vec::new();
    for _ in 0..ROUNDS {
        let line = guest::smoke(vm, "yardstick")?.line;
        factors.push(counting::number(&line, "cpu_us")? / (::workloads::yardstick().as_secs_f64() * 1e6));
    }
    Ok(median(&factors).context("no measurement")?.max(1.0))
}

/// Returns the duration of each phase of one run in seconds, measured with the host's clock for the driver step and
/// with the guest's clock for other workloads.
fn once(vm: &Vm, workload: &str) -> Result<BTreeMap<&'static str, f64>> {
    if workload == DRIVER {
        let began = Instant::now();
        vm.run_within("unbind", LOAD_LIMIT)?.success()?;
        let unbound = Instant::now();
        vm.run_within("bind", LOAD_LIMIT)?.success()?;
        let close = unbound.duration_since(began);
        return Ok([("close", close.as_secs_f64()), ("init", unbound.elapsed().as_secs_f64())].into());
    }
    let command = format!("run /bin/gpu-workloads workload --name {workload} --json");
    let output = vm.run_within(&command, SMOKE_LIMIT)?.success()?;
    let line = output.lines.iter().find(|line| line.starts_with('{')).context("no result")?;
    let result: Value = serde_json::from_str(line).with_context(|| line.clone())?;
    ensure!(result["ok"] == true, "{line}");
    let seconds = |phase: &'static str| {
        let us = result[format!("{phase}_us")].as_f64().with_context(|| format!("no {phase}_us in {line}"))?;
        Ok((phase, us / 1e6))
    };
    PHASES.into_iter().map(seconds).collect()
}

/// Counts a guest's operations during one run, by phase.
fn counted(daemon: &Daemon, vm: &Vm, workload: &str) -> Result<Phases> {
    if workload == DRIVER {
        return counting::driver(daemon, vm);
    }
    let command = format!("phases --name {workload}");
    counting::marked(daemon, vm, &command, &PHASES[..4], Some(PHASES[4]))
}
