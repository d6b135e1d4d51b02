//! Steps shared by several tests: writing a configuration, loading the driver, running a workload, and reading
//! counters.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{Daemon, Output, Paths, Vm, wait};

/// Time limit for loading nouveau, which causes about a million trapped accesses.
pub const LOAD_LIMIT: Duration = Duration::from_secs(240);
/// Time limit of a workload.
pub const SMOKE_LIMIT: Duration = Duration::from_secs(900);
/// Time limit for a counter to show a value that the device has already reached.
const COUNTER_LIMIT: Duration = Duration::from_secs(60);

/// Returns a configuration's `[daemon]` table, and the table of a software card `card0` with `vram_mib` MiB of VRAM.
pub fn card_toml(paths: &Paths, vram_mib: u32) -> String {
    format!(
        "[daemon]\nadmin_socket = {:?}\nread_socket = {:?}\nsocket_dir = {:?}\n\n[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = {vram_mib}\n",
        paths.admin_socket,
        paths.read_socket(),
        paths.folder
    )
}

/// Configuration line that traps all of a VM's aperture and register accesses.
pub const TRAPPED: &str = "apertures = \"trapped\"\n";

/// Returns the configuration table of a mediated VM on `card0`.
pub fn vm_toml(name: &str, vram_mib: u32) -> String {
    format!("\n[[vm]]\nname = {name:?}\ncard = \"card0\"\nvram_mib = {vram_mib}\n")
}

/// Returns the configuration table of a VM with `card0` in passthrough mode.
pub fn passthrough_toml(name: &str) -> String {
    format!("\n[[vm]]\nname = {name:?}\ncard = \"card0\"\npassthrough = true\n")
}

/// Loads stock nouveau and waits for its render node. Returns a description of the driver's state.
pub fn load_driver(vm: &Vm) -> Result<String> {
    vm.run_within("load", LOAD_LIMIT)?.success().with_context(|| format!("VM {}: loading nouveau", vm.name()))?;
    let nodes = vm.run_ok("nodes")?;
    let node = nodes.lines.iter().find(|line| line.contains("renderD128"));
    if node.is_none() {
        bail!("VM {}: nouveau created no render node: {:?}\n{}", vm.name(), nodes.lines, vm.run("dmesg")?.text());
    }
    let interrupts = vm.run_ok("interrupts")?.text();
    let kind = match interrupts.lines().find(|line| line.contains("nvkm") || line.contains("nouveau")) {
        Some(line) if line.contains("MSI") => "MSI",
        Some(_) => "INTx",
        None => "no interrupt",
    };
    Ok(format!("nouveau renderD128 {kind}"))
}

/// The report that a workload prints at its end.
#[derive(Clone, Debug, PartialEq)]
pub struct Smoke {
    /// Set if all bytes were correct.
    pub ok: bool,
    /// Number of checked bytes.
    pub bytes: u64,
    /// Number of channels used.
    pub channels: u64,
    /// Duration in seconds, measured with the guest's clock.
    pub seconds: f64,
    /// Complete result line.
    pub line: String,
}

/// Parses the last `RESULT` line of a workload's output.
pub fn parse_smoke(output: &Output) -> Result<Smoke> {
    let line = output.lines.iter().rev().find(|line| line.starts_with("RESULT "));
    let line = line.with_context(|| format!("no result in:\n{}", output.text()))?;
    let value = |key: &str| {
        line.split_whitespace()
            .find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
            .with_context(|| format!("no {key} in {line}"))
    };
    Ok(Smoke {
        ok: value("ok")? == "true" && output.code == 0,
        bytes: value("bytes")?.parse()?,
        channels: value("channels")?.parse()?,
        seconds: value("seconds")?.parse()?,
        line: line.clone(),
    })
}

/// Runs `gpu-workloads` with `args` to completion. Fails unless every result was verified.
pub fn smoke(vm: &Vm, args: &str) -> Result<Smoke> {
    let output = vm.run_within(&format!("run /bin/gpu-workloads {args}"), SMOKE_LIMIT)?;
    let smoke = parse_smoke(&output)?;
    if !smoke.ok {
        let log = vm.run("dmesg").map(|log| log.text()).unwrap_or_default();
        let end: Vec<_> = log.lines().rev().take(30).collect();
        let end: Vec<_> = end.into_iter().rev().collect();
        bail!("VM {}: {args}: {}\n{}\nkernel log:\n{}", vm.name(), smoke.line, output.text(), end.join("\n"));
    }
    Ok(smoke)
}

/// Returns the output of `mediatorctl vm show` for a VM.
pub fn show(daemon: &Daemon, name: &str) -> Result<Value> {
    daemon.ctl_json(&["vm", "show", name])
}

/// Returns the number of messages that a VM's VMM has sent.
pub fn messages(daemon: &Daemon, name: &str) -> Result<u64> {
    Ok(messages_in(&show(daemon, name)?["transport"]))
}

/// Returns the number of messages in the `transport` counters that [`show`] returns.
pub fn messages_in(transport: &Value) -> u64 {
    let counts = transport.as_object().into_iter().flatten();
    counts.filter(|(key, _)| key.starts_with("messages_")).filter_map(|(_, count)| count.as_u64()).sum()
}

/// Returns a counter of the virtual device.
///
/// The daemon does not wait for a busy device, so the counter may be out of date. [`await_counter`] waits for a newer
/// value.
pub fn counter(daemon: &Daemon, name: &str, counter: &str) -> Result<u64> {
    show(daemon, name)?["counters"][counter].as_u64().with_context(|| format!("no counter {counter}"))
}

/// Waits until a counter of the virtual device satisfies a condition.
pub fn await_counter(daemon: &Daemon, name: &str, counter: &str, condition: impl Fn(u64) -> bool) -> Result<()> {
    let mut last = 0;
    wait::until(&format!("the counter {counter} of {name}"), COUNTER_LIMIT, || {
        last = self::counter(daemon, name, counter)?;
        Ok(condition(last).then_some(()))
    })
    .with_context(|| format!("{counter} of {name} is {last}"))
}
