//! Para-virtualization: GPUvm's figure 4 and tables 2 to 4 on this system. The papers' workloads in guests with the stock driver
//! under full virtualization (shadowing as GPUvm published it, lazy, and as it is by default), in guests with the
//! modified driver (a call for each entry, and batches), and in a guest that has a card for itself.
//!
//! All VMs are up at the same time, each on a software card of its own, and take turns workload by workload.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::bench::{Metric, Target, median, order};
use tests::guest::{self, LOAD_LIMIT, SMOKE_LIMIT};
use tests::{Daemon, Paths, Vm, VmConfig};

use crate::bars;

/// Rounds of each workload; the median counts.
const ROUNDS: usize = 5;
/// MiB of each card.
const CARD_MIB: u32 = 384;
/// MiB of a mediated VM's VRAM.
const VRAM_MIB: u32 = 256;
/// The guest's kernel.
const KERNEL: &str = "6.1";
/// The driver taken from the device and given to it again: what it does when it is loaded.
const DRIVER: &str = "driver-load";
/// Of a workload, as its result line names them; all together are its time.
const PHASES: [&str; 5] = ["init", "htod", "launch", "dtoh", "close"];
/// Shape, kernel and side of the matrices of data-flow programs. The papers' matrices are of 256 and 1024 rows; here a product of 64
/// takes as long as one of theirs.
const FLOWS: [(&str, &str, u32); 6] = [
    ("tree", "madd", 64),
    ("tree", "madd", 256),
    ("tree", "mmul", 64),
    ("rectangle", "madd", 64),
    ("rectangle", "madd", 256),
    ("rectangle", "mmul", 64),
];
/// Bars of the picture are cut off there.
const TOP: f64 = 3.0;

/// A way to give a VM a GPU.
struct Kind {
    name: &'static str,
    /// As the picture says it.
    title: &'static str,
    /// Lines of its `[[vm]]` table.
    toml: &'static str,
    /// The modified driver, and words for it on the kernel's command line.
    driver: Option<&'static str>,
    target: Target,
}

const BASELINE: &str = "passthrough";
const OFFERED: &str = "paravirtual = { offered = true }\n";

#[rustfmt::skip]
const KINDS: [Kind; 6] = [
    Kind { name: BASELINE, title: "passthrough", toml: "passthrough = true\n", driver: None, target: Target::None },
    Kind { name: "fv-naive", title: "FV naive", toml: "shadow = \"naive\"\n", driver: None, target: Target::None },
    Kind { name: "fv-lazy", title: "FV lazy", toml: "shadow = \"lazy\"\n", driver: None, target: Target::None },
    Kind { name: "fv", title: "FV default", toml: "", driver: None, target: Target::AtMost(1.10) },
    Kind { name: "pv-naive", title: "PV naive", toml: OFFERED, driver: Some("gpu_mediator_pv.naive=1"), target: Target::None },
    Kind { name: "pv", title: "PV multicall", toml: OFFERED, driver: Some(""), target: Target::AtMost(1.03) },
];

/// Counters of a mediated VM, what they are called in the report, and what GPUvm published for one benchmark of it.
#[rustfmt::skip]
const COUNTERS: [(&str, &str, &str); 6] = [
    ("aperture_bytes", "aperture_bytes", ""),
    ("shadow_syncs", "shadow_updates", "GPUvm: 26-52 naive, 6-7 lazy"),
    ("tlb_flushes", "tlb_flushes", ""),
    ("pv_batches", "calls", "GPUvm: 1,169-34,784 naive, 81-218 multicall"),
    ("pv_operations", "operations", ""),
    ("pv_entries", "entries", ""),
];

type Counts = BTreeMap<&'static str, f64>;

/// Seconds of each round by phase, and what was counted in all rounds together.
#[derive(Default)]
struct Measured {
    phases: BTreeMap<&'static str, Vec<f64>>,
    totals: Vec<f64>,
    counts: Counts,
}

/// All that was measured, by workload and kind.
type Table = BTreeMap<(&'static str, &'static str), Measured>;

/// Measures. The picture goes beside `json`.
pub fn run(json: Option<&Path>) -> Result<Vec<Metric>> {
    let images = tests::images()?;
    let daemon = Daemon::start("pv", configuration)?;
    let mut vms = Vec::new();
    for kind in &KINDS {
        let mut config = VmConfig::new(kind.name, images, KERNEL)?.with_gpu(daemon.vm_socket(kind.name));
        if let Some(parameters) = kind.driver {
            config = config.paravirtual()?;
            config.append = format!("{} {parameters}", config.append);
        }
        let vm = Vm::launch(&config)?;
        vm.wait_ready()?;
        vms.push(vm);
    }
    for (kind, vm) in KINDS.iter().zip(&vms) {
        guest::load_driver(vm)?;
        if kind.driver.is_some() {
            let calls = guest::counter(&daemon, kind.name, "pv_batches")?;
            ensure!(calls > 0, "the driver of VM {} does not use the paravirtual interface", kind.name);
        }
    }
    let mut table = Table::new();
    for workload in workloads() {
        for round in 0..ROUNDS {
            eprintln!("bench: pv, {workload}, round {} of {ROUNDS}", round + 1);
            for at in order(KINDS.len(), round) {
                let (kind, vm) = (&KINDS[at], &vms[at]);
                let before = counts(&daemon, kind.name)?;
                let seconds = once(vm, workload).with_context(|| format!("{workload} in VM {}", kind.name))?;
                let after = counts(&daemon, kind.name)?;
                let entry = table.entry((workload, kind.name)).or_default();
                entry.totals.push(seconds.values().sum());
                for (phase, seconds) in seconds {
                    entry.phases.entry(phase).or_default().push(seconds);
                }
                for (name, value) in after {
                    *entry.counts.entry(name).or_default() += value - before.get(name).unwrap_or(&0.0);
                }
            }
        }
    }
    if let Some(json) = json {
        picture(&json.with_extension("svg"), &table)?;
    }
    let knowing = vms.last().context("no guests")?;
    Ok([report(&table)?, data_flow(knowing)?].concat())
}

/// Gdev's figure 11: graphs whose nodes hand on their outputs by segments, against the same by the CPU's memory.
fn data_flow(vm: &Vm) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for (shape, kernel, side) in FLOWS {
        let name = format!("pv.dataflow.{shape}.{kernel}.{side}");
        let (mut copied, mut shared) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            eprintln!("bench: {name}, round {} of {ROUNDS}", round + 1);
            for (more, times) in [("", &mut copied), (" --share", &mut shared)] {
                let command = format!("dataflow --shape {shape} --kernel {kernel} --side {side}{more}");
                let line = guest::smoke(vm, &command)?.line;
                let value = line.split_whitespace().find_map(|word| word.strip_prefix("makespan_us="));
                times.push(value.with_context(|| line.clone())?.parse::<f64>()? / 1e3);
            }
        }
        let [copied, shared] = [copied, shared].map(|times| median(&times));
        let (copied, shared) = (copied.context("no measurement")?, shared.context("no measurement")?);
        metrics.push(Metric::ratio(name, shared, "ms", copied, Target::None).beside("Gdev: down to 0.67"));
    }
    Ok(metrics)
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

/// Seconds of one run by phase, by the guest's clock where the guest can tell.
fn once(vm: &Vm, workload: &str) -> Result<BTreeMap<&'static str, f64>> {
    if workload == DRIVER {
        vm.run_within("unbind", LOAD_LIMIT)?.success()?;
        let began = Instant::now();
        vm.run_within("bind", LOAD_LIMIT)?.success()?;
        return Ok([("init", began.elapsed().as_secs_f64())].into());
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

/// Reads the daemon's counters of a VM.
fn counts(daemon: &Daemon, name: &str) -> Result<Counts> {
    let shown = guest::show(daemon, name)?;
    let number = |key: &str| shown["counters"][key].as_u64().unwrap_or(0) as f64;
    Ok(COUNTERS.iter().map(|(key, called, _)| (*called, number(key))).collect())
}

fn of<'a>(table: &'a Table, workload: &'static str, kind: &'static str) -> Result<&'a Measured> {
    table.get(&(workload, kind)).with_context(|| format!("{workload}: no measurement of {kind}"))
}

/// Time against passthrough.
fn ratio(table: &Table, workload: &'static str, kind: &'static str) -> Result<f64> {
    let time = |kind| median(&of(table, workload, kind)?.totals).context("no measurement");
    Ok(time(kind)? / time(BASELINE)?)
}

fn picture(file: &Path, table: &Table) -> Result<()> {
    let groups: Vec<&str> = workloads().collect();
    let bars = |kind: &Kind| {
        let values = workloads().map(|workload| ratio(table, workload, kind.name)).collect::<Result<_>>()?;
        Ok(bars::Kind { name: kind.title.to_owned(), values })
    };
    let kinds = KINDS.iter().map(bars).collect::<Result<Vec<_>>>()?;
    bars::draw(file, "time of workloads against passthrough (GPUvm's figure 4)", &groups, &kinds, TOP)
}

fn report(table: &Table) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for workload in workloads() {
        let base = of(table, workload, BASELINE)?;
        let baseline = median(&base.totals).context("no measurement")?;
        for kind in KINDS.iter().filter(|kind| kind.name != BASELINE) {
            let measured = of(table, workload, kind.name)?;
            let seconds = median(&measured.totals).context("no measurement")?;
            let name = format!("pv.{workload}.{}", kind.name);
            metrics.push(Metric::ratio(format!("{name}.time"), seconds * 1e3, "ms", baseline * 1e3, kind.target));
            for (_, called, peer) in COUNTERS {
                let count = measured.counts.get(called).copied().unwrap_or(0.0) / ROUNDS as f64;
                let metric = Metric::plain(format!("{name}.{called}"), count, "count");
                metrics.push(if peer.is_empty() { metric } else { metric.beside(peer) });
            }
        }
    }
    for kind in KINDS.iter().filter(|kind| kind.name != BASELINE) {
        // The driver is loaded once in a guest's life; what is left is what programs see.
        let ratios =
            ::workloads::NAMES.iter().map(|workload| ratio(table, workload, kind.name)).collect::<Result<_>>()?;
        let mean = geometric_mean(ratios);
        metrics.push(Metric::ratio(format!("pv.geometric_mean.{}", kind.name), mean, "x", 1.0, kind.target));
        for phase in PHASES {
            let time = |workload: &'static str, kind: &'static str| {
                let phases = &of(table, workload, kind)?.phases;
                phases.get(phase).and_then(|seconds| median(seconds)).context("no measurement")
            };
            let sum = |kind| ::workloads::NAMES.iter().map(|workload| time(workload, kind)).sum::<Result<f64>>();
            let (own, base) = (sum(kind.name)?, sum(BASELINE)?);
            let name = format!("pv.{phase}.{}.time", kind.name);
            metrics.push(Metric::ratio(name, own * 1e3, "ms", base * 1e3, Target::None));
        }
    }
    Ok(metrics)
}

fn geometric_mean(ratios: Vec<f64>) -> f64 {
    (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp()
}
