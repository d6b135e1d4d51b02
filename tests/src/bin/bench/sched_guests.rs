//! The scheduler with real guests: VMs that submit kernels of unequal length on one card, under each policy.
//!
//! The card's time model makes the kernels long, so that guests under emulation keep up: `madd` of about 6 ms and of five
//! times that. Two processes in each guest submit, so that one has something queued while the other is told of its end.
//! What is reported are charges of the mediator, by the card's clock. Kernels of 30 ms leave windows of 500 ms off by a
//! twentieth, so the shares are of the whole run.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::bench::{Metric, Target};
use tests::guest::{self, card_toml, vm_toml};
use tests::{Daemon, Paths, Vm, VmConfig};

/// MHz of the card's multiprocessors.
const SHADER_MHZ: u32 = 1;
/// Rounds of the short and of the long kernel.
const ROUNDS: [u32; 2] = [20, 120];
/// How long the guests submit, how long of that is left out at the start, and how long is measured.
const RUN: Duration = Duration::from_secs(16);
const WARM: Duration = Duration::from_secs(3);
const MEASURED: Duration = Duration::from_secs(10);
/// Processes in each guest.
const PROCESSES: usize = 2;
/// VMs at most.
const VMS: usize = 4;

/// Name in the report, and what is set of the card.
const POLICIES: [(&str, &[&str]); 3] =
    [("fifo", &["--policy", "fifo"]), ("credit", &["--policy", "credit"]), ("band", &["--policy", "band"])];

/// Measures.
pub fn run() -> Result<Vec<Metric>> {
    let images = tests::images()?;
    let daemon = Daemon::start("sched", configuration)?;
    let mut vms = Vec::new();
    for index in 0..VMS {
        let name = name(index);
        let vm = Vm::launch(&VmConfig::new(&name, images, "6.1")?.with_gpu(daemon.vm_socket(&name)))?;
        vm.wait_ready()?;
        vms.push(vm);
    }
    for vm in &vms {
        guest::load_driver(vm)?;
    }
    let mut metrics = Vec::new();
    for count in [2, VMS] {
        for (policy, settings) in POLICIES {
            eprintln!("bench: sched, {count} guests, {policy}");
            daemon.ctl(&[&["sched", "set", "card0"], settings].concat())?.success()?;
            metrics.extend(compete(&daemon, vms.get(..count).context("that many VMs")?, policy)?);
        }
    }
    Ok(metrics)
}

fn name(index: usize) -> String {
    format!("vm{index}")
}

fn configuration(paths: &Paths) -> String {
    let mut text = card_toml(paths, 512);
    text += &format!("[card.time]\ncopy_mib_per_s = 4096\nshader_mhz = {SHADER_MHZ}\n");
    (0..VMS).for_each(|index| text += &vm_toml(&name(index), 96));
    text
}

/// Lets the VMs submit, every other one the long kernel, and measures what each has got.
fn compete(daemon: &Daemon, vms: &[Vm], policy: &str) -> Result<Vec<Metric>> {
    let mut running = Vec::new();
    for (index, vm) in vms.iter().enumerate() {
        let rounds = ROUNDS[index % 2];
        let seconds = RUN.as_secs();
        let command =
            format!("run /bin/gpu-workloads workload --name long-madd --rounds {rounds} --duration {seconds}");
        for _ in 0..PROCESSES {
            running.push(vm.agent().start(&command)?);
        }
    }
    sleep(WARM);
    let (at, before) = used(daemon, vms.len())?;
    sleep(MEASURED);
    let (end, after) = used(daemon, vms.len())?;
    for pending in running {
        let output = pending.wait_within(guest::SMOKE_LIMIT)?;
        ensure!(guest::parse_smoke(&output)?.ok, "{}", output.text());
    }
    let got: Vec<f64> = after.iter().zip(&before).map(|(after, before)| (after - before) as f64).collect();
    let total: f64 = got.iter().sum();
    let wanted = 1.0 / vms.len() as f64;
    let error = got.iter().map(|got| (got / total - wanted).abs()).fold(0.0, f64::max);
    let jain = total * total / (vms.len() as f64 * got.iter().map(|got| got * got).sum::<f64>());
    let row = format!("sched.guests.{}_vms.{policy}", vms.len());
    // BAND is to be fair, the others are here to be seen.
    let target = if policy == "band" { Target::AtMost(1.0) } else { Target::None };
    Ok(vec![
        Metric::plain(format!("{row}.share_error"), error * 100.0, "%").target(target),
        Metric::plain(format!("{row}.jain"), jain, "index"),
        Metric::plain(format!("{row}.utilisation"), total / (end - at) as f64 * 100.0, "%"),
    ])
}

/// The card's clock, and the time in ns that each VM has been charged for PGRAPH.
fn used(daemon: &Daemon, count: usize) -> Result<(u64, Vec<u64>)> {
    let now = daemon.ctl_json(&["sched", "show", "card0"])?;
    let shown = |index: usize| -> Result<u64> {
        let vms = find(&now, "vms").and_then(Value::as_array).context("no vms")?;
        let vm = vms.iter().find(|vm| vm["vm"] == Value::String(name(index))).context("a VM is not shown")?;
        vm["engines"]["compute"]["used_ns"].as_u64().with_context(|| format!("no used_ns in {vm}"))
    };
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    Ok((u64::try_from(clock.as_nanos())?, (0..count).map(shown).collect::<Result<_>>()?))
}

/// The key of the answer, or of the only card in it.
fn find<'a>(answer: &'a Value, key: &str) -> Option<&'a Value> {
    answer.get(key).or_else(|| answer["schedulers"].get(0)?.get(key))
}
