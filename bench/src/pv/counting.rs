//! Counts a guest's operations in each phase of a workload, with the daemon's counters. The guest program pauses
//! between phases until the counters have been read.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tests::guest::{LOAD_LIMIT, SMOKE_LIMIT};
use tests::{Daemon, Vm};

use crate::model::Counts;

/// Time limit for a guest to reach the next mark.
const MARK_LIMIT: Duration = Duration::from_secs(300);

/// Interval between polls for a guest's posted messages.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum number of polls for a guest's posted messages.
const MAX_POLLS: u32 = 40;

/// Counts, by phase.
pub type Phases = BTreeMap<&'static str, Counts>;

/// Reads a VM's total counts.
pub fn total(daemon: &Daemon, vm: &str) -> Result<Counts> {
    let shown = daemon.api(&format!("/v1/vms/{vm}"))?;
    Ok(Counts::from_counters(|counter| shown["counters"][counter].as_f64().unwrap_or(0.0)))
}

/// Reads the total counts of an idle guest once its posted messages have arrived.
fn settled(daemon: &Daemon, vm: &str) -> Result<Counts> {
    let mut before = total(daemon, vm)?;
    for _ in 0..MAX_POLLS {
        std::thread::sleep(POLL_INTERVAL);
        let now = total(daemon, vm)?;
        if now == before {
            break;
        }
        before = now;
    }
    Ok(before)
}

/// Counts the operations of unbinding and rebinding the driver.
pub fn driver(daemon: &Daemon, vm: &Vm) -> Result<Phases> {
    let before = total(daemon, vm.name())?;
    vm.run_within("unbind", LOAD_LIMIT)?.success()?;
    let between = settled(daemon, vm.name())?;
    vm.run_within("bind", LOAD_LIMIT)?.success()?;
    let after = settled(daemon, vm.name())?;
    Ok([("close", between.minus(&before)), ("init", after.minus(&between))].into())
}

/// Runs `gpu-workloads`, and counts operations after its `begin` mark. Each mark labels the operations before it.
/// `last` labels the operations between the last mark and the end of the program.
pub fn marked(
    daemon: &Daemon,
    vm: &Vm,
    command: &str,
    marks: &[&'static str],
    last: Option<&'static str>,
) -> Result<Phases> {
    let running = vm.start(&format!("run /bin/gpu-workloads {command} --marks"))?;
    let mut phases = Phases::new();
    let mut before = Counts::default();
    for mark in ["begin"].into_iter().chain(marks.iter().copied()) {
        let line = running.wait_line(&format!("MARK {mark} "), MARK_LIMIT)?;
        let now = with_copies(settled(daemon, vm.name())?, &line);
        if mark != "begin" {
            phases.insert(mark, now.minus(&before));
        }
        before = now;
        vm.run_ok(&format!("write /mark-{mark} seen"))?;
    }
    let output = running.wait_within(SMOKE_LIMIT)?.success()?;
    if let Some(last) = last {
        let after = settled(daemon, vm.name())?;
        // The previous mark has already reported the copies.
        let after = Counts { cpu_bytes: before.cpu_bytes, link_bytes: before.link_bytes, ..after };
        phases.insert(last, after.minus(&before));
    }
    ensure!(!output.lines.is_empty(), "{command} printed no output");
    Ok(phases)
}

/// Sets the numbers of copied bytes to those that the guest has reported.
fn with_copies(counts: Counts, line: &str) -> Counts {
    let said = |key: &str| {
        let value = line.split_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        value.and_then(|value| value.parse().ok()).unwrap_or(0.0)
    };
    Counts { cpu_bytes: said("cpu_bytes"), link_bytes: said("link_bytes"), ..counts }
}

/// Returns the number after `key=` in a line.
pub fn number(line: &str, key: &str) -> Result<f64> {
    let value = line.split_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
    value.with_context(|| format!("no {key} in {line}"))?.parse().with_context(|| line.to_owned())
}
