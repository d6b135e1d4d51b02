//! Full virtualization: runs the guest's workloads in each mediation mode, and compares them with the same workloads in
//! a VM with a passed-through card.
//!
//! All VMs run concurrently, each on its own software card. They take turns for each workload, so that changes in the
//! host's speed affect all of them equally.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::Value;
use tests::guest::{self, LOAD_LIMIT};
use tests::{Daemon, Paths, Vm, VmConfig};

use super::Request;
use crate::report::interval::picked;
use crate::report::{Interval, Metric, Target, median, order};

/// Number of rounds of each workload for modes without a target, and of the driver step for all modes. The report
/// contains the median.
const MIN_ROUNDS: usize = 9;
/// Number of rounds of each workload, except the driver step, for the default mode and its baseline.
const MAX_ROUNDS: usize = 25;
/// VRAM size of each card, and thus of the passthrough VM, in MiB.
const CARD_MIB: u32 = 512;
/// VRAM size of a mediated VM in MiB.
const VRAM_MIB: u32 = 384;
/// Workload names for `gpu-workloads timed`.
const WORKLOADS: [&str; 8] = [
    "channels",
    "copy-small-in",
    "copy-small-out",
    "copy-large-in",
    "copy-large-out",
    "map-churn",
    "many-channels",
    "small-submissions",
];
/// Name of the step that unbinds and rebinds the driver, which repeats the work of loading it.
const DRIVER: &str = "driver-load";

/// A way to provide a GPU to a VM.
struct Kind {
    name: &'static str,
    /// Lines of the VM's `[[vm]]` table.
    toml: &'static str,
    /// True if the targets apply to this kind.
    is_default: bool,
}

const BASELINE: &str = "passthrough";

#[rustfmt::skip]
const KINDS: [Kind; 6] = [
    Kind { name: BASELINE, toml: "passthrough = true\n", is_default: false },
    Kind { name: "naive", toml: "shadow = \"naive\"\napertures = \"trapped\"\n", is_default: false },
    Kind { name: "lazy", toml: "shadow = \"lazy\"\napertures = \"trapped\"\n", is_default: false },
    Kind { name: "incremental", toml: "shadow = \"incremental\"\napertures = \"trapped\"\n", is_default: false },
    Kind { name: "trapped", toml: "apertures = \"trapped\"\n", is_default: false },
    Kind { name: "default", toml: "", is_default: true },
];

/// Counters of a mediated VM, with their names in the report.
const COUNTERS: [(&str, &str); 5] = [
    ("shadow_syncs", "shadow_updates"),
    ("shadow_entries_written", "entries_written"),
    ("shadow_bytes_scanned", "bytes_scanned"),
    ("tlb_flushes", "tlb_flushes"),
    ("doorbells", "doorbells"),
];

/// Duration of each round in seconds, and total counts of all rounds.
#[derive(Default)]
struct Measured {
    seconds: Vec<f64>,
    counts: BTreeMap<String, f64>,
}

/// Runs the benchmark. Its parts are the mediation modes. Each one is measured together with the baseline.
pub fn run(request: &Request) -> Result<Vec<Metric>> {
    let images = tests::images()?;
    let kinds: Vec<&Kind> = KINDS.iter().filter(|kind| kind.name == BASELINE || request.wants(kind.name)).collect();
    let daemon = Daemon::start("fv", |paths| configuration(paths, &kinds))?;
    let mut vms = Vec::new();
    for kind in &kinds {
        let config = VmConfig::new(kind.name, images, "6.1")?.with_gpu(daemon.vm_socket(kind.name));
        let vm = Vm::launch(&config)?;
        vm.wait_ready()?;
        vms.push(vm);
    }
    for vm in &vms {
        guest::load_driver(vm)?;
    }
    let mut measured: BTreeMap<(&'static str, &'static str), Measured> = BTreeMap::new();
    for workload in [DRIVER].into_iter().chain(WORKLOADS) {
        let rounds = if workload == DRIVER { MIN_ROUNDS } else { MAX_ROUNDS };
        for round in 0..rounds {
            eprintln!("bench: fv, {workload}, round {} of {rounds}", round + 1);
            for at in order(kinds.len(), round) {
                let (kind, vm) = (kinds[at], &vms[at]);
                if round >= MIN_ROUNDS && !kind.is_default && kind.name != BASELINE {
                    continue;
                }
                let before = counts(&daemon, kind.name)?;
                let seconds = once(vm, workload).with_context(|| format!("{workload} in VM {}", kind.name))?;
                let after = counts(&daemon, kind.name)?;
                let entry = measured.entry((workload, kind.name)).or_default();
                entry.seconds.push(seconds);
                for (name, value) in after {
                    *entry.counts.entry(name.clone()).or_default() += value - before.get(&name).unwrap_or(&0.0);
                }
            }
        }
    }
    report(&measured, &kinds)
}

fn configuration(paths: &Paths, kinds: &[&Kind]) -> String {
    let mut text = format!("[daemon]\nadmin_socket = {:?}\nsocket_dir = {:?}\n", paths.admin_socket, paths.folder);
    for Kind { name, toml, .. } in kinds {
        text += &format!("\n[[card]]\nname = \"card-{name}\"\nkind = \"simgpu\"\nvram_mib = {CARD_MIB}\n");
        text += &format!("\n[[vm]]\nname = {name:?}\ncard = \"card-{name}\"\n{toml}");
        if *name != BASELINE {
            text += &format!("vram_mib = {VRAM_MIB}\n");
        }
    }
    text
}

/// Returns the duration of one run in seconds, measured with the host's clock for the driver step and with the guest's
/// clock for other workloads.
fn once(vm: &Vm, workload: &str) -> Result<f64> {
    if workload == DRIVER {
        vm.run_within("unbind", LOAD_LIMIT)?.success()?;
        let began = std::time::Instant::now();
        vm.run_within("bind", LOAD_LIMIT)?.success()?;
        return Ok(began.elapsed().as_secs_f64());
    }
    let smoke = guest::smoke(vm, &format!("timed --what {workload}"))?;
    let value = smoke.line.split_whitespace().find_map(|word| word.strip_prefix("timed_us="));
    Ok(value.context("no timed_us")?.parse::<f64>().with_context(|| smoke.line.clone())? / 1e6)
}

/// Reads the daemon's counters for a VM, including the message counts of its VMM.
fn counts(daemon: &Daemon, name: &str) -> Result<BTreeMap<String, f64>> {
    let shown = guest::show(daemon, name)?;
    let number = |value: &Value| value.as_u64().unwrap_or(0) as f64;
    let mut counts: BTreeMap<_, _> =
        COUNTERS.iter().map(|(key, called)| ((*called).to_owned(), number(&shown["counters"][*key]))).collect();
    counts.insert("messages".to_owned(), guest::messages_in(&shown["transport"]) as f64);
    Ok(counts)
}

fn report(measured: &BTreeMap<(&'static str, &'static str), Measured>, kinds: &[&Kind]) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    let mut times: BTreeMap<&str, Vec<[Vec<f64>; 2]>> = BTreeMap::new();
    let workloads: Vec<&'static str> = [DRIVER].into_iter().chain(WORKLOADS).collect();
    for workload in &workloads {
        let of = |kind: &'static str| {
            measured.get(&(*workload, kind)).with_context(|| format!("{workload}: no measurement of {kind}"))
        };
        let base = of(BASELINE)?;
        for kind in kinds.iter().filter(|kind| kind.name != BASELINE) {
            let measured = of(kind.name)?;
            let rounds = measured.seconds.len();
            // Compare the same number of rounds.
            let [ours, theirs] = [&measured.seconds, &base.seconds].map(|of| milliseconds(&of[..rounds.min(of.len())]));
            times.entry(kind.name).or_default().push([ours.clone(), theirs.clone()]);
            let target = if kind.is_default { Target::AtMost(1.10) } else { Target::None };
            let name = format!("fv.{workload}.{}", kind.name);
            metrics.push(Metric::ratio_of_samples(format!("{name}.time"), &ours, "ms", &theirs, target));
            for (count, value) in &measured.counts {
                let per_round = value / rounds as f64;
                let baseline = base.counts.get(count).map_or(0.0, |value| value / base.seconds.len() as f64);
                let name = format!("{name}.{count}");
                metrics.push(if count == "messages" && baseline > 0.0 {
                    Metric::ratio(name, per_round, "count", baseline, Target::None)
                } else {
                    Metric::plain(name, per_round, "count")
                });
            }
        }
    }
    for kind in kinds.iter().filter(|kind| kind.name != BASELINE) {
        let of = times.get(kind.name).context("no ratios")?;
        let rounds = of.iter().map(|[ours, _]| ours.len()).max().unwrap_or(0);
        let all: Vec<usize> = (0..rounds).collect();
        let mean = geometric_mean(of, &all).context("no ratios")?;
        let target = if kind.is_default { Target::AtMost(1.05) } else { Target::None };
        let metric = Metric::ratio(format!("fv.geometric_mean.{}", kind.name), mean, "x", 1.0, target);
        metrics.push(metric.within(Interval::of_rounds(rounds, |rounds| geometric_mean(of, rounds))));
    }
    Ok(metrics)
}

fn milliseconds(seconds: &[f64]) -> Vec<f64> {
    seconds.iter().map(|seconds| seconds * 1e3).collect()
}

/// Returns the geometric mean of the ratios of all workloads. Each ratio is computed from the medians of the given
/// rounds. For a workload with fewer rounds, round indices wrap around.
fn geometric_mean(workloads: &[[Vec<f64>; 2]], rounds: &[usize]) -> Option<f64> {
    let logarithm = |[ours, theirs]: &[Vec<f64>; 2]| {
        let rounds: Vec<usize> = rounds.iter().map(|round| round % ours.len().max(1)).collect();
        Some((median(&picked(ours, &rounds))? / median(&picked(theirs, &rounds))?).ln())
    };
    let sum = workloads.iter().map(logarithm).try_fold(0.0, |sum: f64, of| Some(sum + of?))?;
    Some((sum / workloads.len() as f64).exp())
}
