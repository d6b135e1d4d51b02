//! Compares a shared card with a passed-through card by counting the messages while the driver loads and during each
//! workload. In a machine with KVM and an IOMMU, also measures the cost of an exit with and without the server's reply,
//! and the cost of mapping guest RAM. Also measures the cost of clearing PGRAPH between VMs.
//!
//! The parts are `load`, `exits` and `handover`. A guest under TCG has no exits, so each message to the server counts
//! as an exit. The machine is emulated, so its times are meaningful only in comparison with each other.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::files::Files;
use tests::guest::{self, LOAD_LIMIT, TRAPPED, card_toml, passthrough_toml, vm_toml};
use tests::nest::{self, ADDRESS, Nest, Shape};
use tests::{Daemon, Vm, VmConfig};

use crate::Request;
use crate::report::{Metric, Target, median};

mod handover;

/// VRAM size of the card in MiB.
const CARD_MIB: u32 = 256;
/// VRAM size of the mediated VM in MiB.
const VM_MIB: u32 = 192;
/// Number of rounds of the driver load and of each workload.
const ROUNDS: usize = 5;
/// Name of the step that unbinds and rebinds the driver.
const LOAD: &str = "load";
/// Names and commands of the workloads.
const WORKLOADS: [(&str, &str); 4] = [
    ("copy", "copy --engine ce0 --from vram --to vram --size 65536 --count 20"),
    ("fences", "fences --count 50"),
    ("map", "copy --engine m2mf --from gart --to vram --size 262144"),
    ("launch", "workload --name mmul --scale 1 --rounds 1"),
];
/// Transport counters, with their names in the report.
const COUNTS: [(&str, &str); 3] =
    [("region_reads", "exits_that_read"), ("region_writes", "exits_that_write"), ("posted", "posted")];

/// VRAM size in MiB of the card that the daemon inside the machine manages.
const INNER_MIB: u32 = 64;
/// VRAM size in MiB of the VM that the daemon inside the machine serves.
const INNER_VM_MIB: u32 = 16;
/// Amount of RAM to map with huge pages, in MiB.
const LENT_HUGE_MIB: u32 = 512;
/// Amount of RAM to map with small pages, in MiB.
const LENT_SMALL_MIB: u32 = 64;
/// Number of rounds in the machine.
const INNER_ROUNDS: usize = 7;
/// Number of exits per round.
const EXITS: u32 = 500;

/// Values of a repeated measurement.
#[derive(Clone, Debug, Default)]
struct Values(Vec<f64>);

impl Values {
    fn middle(&self) -> Result<f64> {
        median(&self.0).context("nothing was measured")
    }

    /// Returns the minimum and the maximum as metrics.
    fn spread(&self, name: &str, unit: &'static str) -> [Metric; 2] {
        let least = self.0.iter().copied().fold(f64::INFINITY, f64::min);
        let most = self.0.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        [("least", least), ("most", most)].map(|(what, value)| Metric::plain(format!("{name}.{what}"), value, unit))
    }

    /// Returns the median, with the median of `other` as its baseline, and the spread of both.
    fn beside(&self, other: &Self, name: &str, unit: &'static str) -> Result<Vec<Metric>> {
        let mut metrics = vec![Metric::ratio(name, self.middle()?, unit, other.middle()?, Target::None)];
        metrics.extend(self.spread(name, unit));
        metrics.extend(other.spread(&format!("{name}.baseline"), unit));
        Ok(metrics)
    }
}

/// Counts and times of each step, by step name and count name.
type Steps = BTreeMap<(&'static str, &'static str), Values>;

/// Runs the benchmark.
pub fn run(request: &Request) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    if request.wants("load") {
        metrics.extend(messages()?);
    }
    if request.wants("exits") {
        metrics.extend(machine()?);
    }
    if request.wants("handover") {
        metrics.extend(handover::run()?);
    }
    Ok(metrics)
}

/// A VM on the card of a separate daemon.
struct Side {
    name: &'static str,
    daemon: Daemon,
    vm: Vm,
    steps: Steps,
}

impl Side {
    fn boot(name: &'static str, table: &str) -> Result<Self> {
        let daemon = Daemon::start(name, |paths| card_toml(paths, CARD_MIB) + table)?;
        let vm = Vm::launch(&VmConfig::new(name, tests::images()?, "6.1")?.with_gpu(daemon.vm_socket(name)))?;
        vm.wait_ready()?;
        guest::load_driver(&vm)?;
        Ok(Self { name, daemon, vm, steps: Steps::new() })
    }

    fn transport(&self) -> Result<Value> {
        Ok(guest::show(&self.daemon, self.name)?["transport"].clone())
    }

    /// Runs a step once, and records its counts and its time.
    fn step(&mut self, name: &'static str, args: &str) -> Result<()> {
        if name == LOAD {
            self.vm.run_within("unbind", LOAD_LIMIT)?.success()?;
        }
        let (before, began) = (self.transport()?, std::time::Instant::now());
        if name == LOAD {
            self.vm.run_within("bind", LOAD_LIMIT)?.success()?;
        } else {
            guest::smoke(&self.vm, args)?;
        }
        let (seconds, after) = (began.elapsed().as_secs_f64(), self.transport()?);
        let grown = |key: &str| -> Result<f64> {
            let count = |of: &Value| of[key].as_u64().with_context(|| format!("no count {key} in {of}"));
            Ok(count(&after)?.saturating_sub(count(&before)?) as f64)
        };
        let messages = guest::messages_in(&after) - guest::messages_in(&before);
        let mut keep = |what, value| self.steps.entry((name, what)).or_default().0.push(value);
        keep("messages", messages as f64);
        keep("time", seconds);
        for (key, what) in COUNTS {
            keep(what, grown(key)?);
        }
        Ok(())
    }
}

/// Counts the messages of a mediated card and of a passed-through card, in alternation.
fn messages() -> Result<Vec<Metric>> {
    let mut sides =
        [Side::boot("mediated", &vm_toml("mediated", VM_MIB))?, Side::boot("straight", &passthrough_toml("straight"))?];
    let steps: Vec<_> = std::iter::once((LOAD, "")).chain(WORKLOADS).collect();
    for round in 0..ROUNDS {
        eprintln!("bench: nested, round {} of {ROUNDS}", round + 1);
        for (name, args) in &steps {
            for side in crate::report::order(sides.len(), round) {
                if let Some(side) = sides.get_mut(side) {
                    side.step(name, args)?;
                }
            }
        }
    }
    let [mediated, straight] = sides.map(|side| side.steps);
    let mut metrics = Vec::new();
    for (key, values) in &mediated {
        let (step, what) = key;
        let other = straight.get(key).context("a step of one side only")?;
        let unit = if *what == "time" { "s" } else { "messages" };
        metrics.extend(values.beside(other, &format!("nested.{step}.{what}"), unit)?);
    }
    Ok(metrics)
}

/// Parses `name=value` pairs, and collects the values of each name. Ignores other words.
fn read(text: &str) -> Result<BTreeMap<String, Values>> {
    let mut found: BTreeMap<String, Values> = BTreeMap::new();
    for (name, value) in text.split_whitespace().filter_map(|word| word.split_once('=')) {
        let value = value.parse().with_context(|| format!("no number in {text}"))?;
        found.entry(name.to_owned()).or_default().0.push(value);
    }
    ensure!(!found.is_empty(), "no values in:\n{text}");
    Ok(found)
}

/// Measures exits and RAM mapping in a machine whose daemon drives a passed-through card through VFIO.
fn machine() -> Result<Vec<Metric>> {
    let mut files = Files::default();
    let vms = vm_toml("a", INNER_VM_MIB) + TRAPPED;
    files.write("etc/mediatord.toml", 0o644, nest::config(INNER_MIB, &vms).as_bytes());
    let shape = Shape { card_mib: 128, card_keys: "", memory_mib: 1024, vms: &[], huge_mib: LENT_HUGE_MIB };
    let nest = Nest::boot("nested-bench", shape, files)?;
    nest.ok(&format!("mediatorctl card bind {ADDRESS}"))?;
    nest.approve_firmware()?;
    let daemon = nest.start_daemon("/etc/mediatord.toml")?;
    let exits = read(&nest.ok(&format!("exits /run/a.sock {INNER_ROUNDS} {EXITS}"))?)?;
    let lend = |mib: u32, pages| read(&nest.ok(&format!("exits lend /run/a.sock {mib} {pages} {INNER_ROUNDS}"))?);
    let huge = lend(LENT_HUGE_MIB, "huge")?;
    let small = lend(LENT_SMALL_MIB, "small")?;
    println!("{}", nest.stop_daemon(daemon)?);
    let get = |of: &BTreeMap<String, Values>, name: &str| of.get(name).cloned().with_context(|| format!("no {name}"));
    let mut metrics = Vec::new();
    for access in ["read", "write"] {
        let (served, alone) = (get(&exits, &format!("{access}_served"))?, get(&exits, &format!("{access}_alone"))?);
        metrics.extend(served.beside(&alone, &format!("nested.exit.{access}"), "ns")?);
    }
    let milliseconds = |values: Values| Values(values.0.into_iter().map(|nanoseconds| nanoseconds / 1e6).collect());
    for (name, of, mib) in [("huge", &huge, LENT_HUGE_MIB), ("small", &small, LENT_SMALL_MIB)] {
        for what in ["map", "unmap"] {
            let values = milliseconds(get(of, what)?);
            let name = format!("nested.{what}_{mib}_mib_{name}_pages");
            metrics.push(Metric::plain(name.clone(), values.middle()?, "ms"));
            metrics.extend(values.spread(&name, "ms"));
        }
    }
    Ok(metrics)
}
