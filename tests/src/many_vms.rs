//! VMs that compete for the time of one software card.
//!
//! A time model determines the duration of the card's work: a 32x32 `madd` takes half a millisecond, according to the
//! memory traffic of its rounds. The software card computes it in a fifth of this time, so that the charges match the
//! model.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, Result, anyhow};
use serde_json::Value;

use crate::guest::{self, card_toml, vm_toml};
use crate::{Daemon, Vm, VmConfig};

/// Size of a memory transaction of the card's shaders in bytes.
const TRANSACTION: u64 = 128;

/// Returns the duration of one round of a kernel with matrices of side length `side`, in ns. Each element requires two
/// word reads and one word write, in whole transactions.
pub const fn round_ns(side: u32) -> u64 {
    let bytes = ((side * side) as u64 * 4).div_ceil(TRANSACTION) * TRANSACTION;
    3 * bytes * 1_000_000_000 / ((SHADER_MIB_PER_S as u64) << 20)
}

/// Name of the card.
pub const CARD: &str = "card0";
/// Number of rows and columns of the matrices in the guests' kernels.
pub const SIDE: u32 = 32;
const SHADER_MIB_PER_S: u32 = 24;
/// Duration of one round of a kernel with matrices of side length [`SIDE`], in ns.
pub const ROUND_NS: u64 = round_ns(SIDE);
/// Copy bandwidth of the card in MiB per second.
pub const COPY_MIB_PER_S: u64 = 256;
/// VRAM size of a VM in MiB.
const VRAM_MIB: u32 = 32;
/// Maximum number of guests that boot concurrently.
const BOOTS: usize = 2;

/// Returns the configuration lines of a card's time model.
pub fn card_time_toml() -> String {
    format!("[card.time]\ncopy_mib_per_s = {COPY_MIB_PER_S}\nshader_mhz = 50\nshader_mib_per_s = {SHADER_MIB_PER_S}\n")
}

/// The daemon and its VMs, all of which have loaded their drivers.
pub struct Crowd {
    daemon: Daemon,
    vms: Vec<Vm>,
}

/// A VM's submissions to an engine, and the time charged for them, since the VM was added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Number of completed submissions.
    pub completed: u64,
    /// Number of submissions on killed channels.
    pub killed: u64,
    /// Time charged, in ns.
    pub used_ns: u64,
    /// Number of submissions, by the upper bound of their wait time in ns.
    pub waits: BTreeMap<u64, u64>,
    /// Number of started submissions.
    pub started: u64,
    /// Number of the VM's submissions, on any engine, that ran too long.
    pub strikes: u64,
    /// Set if the VM is quarantined. Its work is then not started.
    pub quarantined: bool,
}

impl Crowd {
    /// Boots `count` VMs named `vm0` and so on, with Linux 6.1. `keys` are added to each `[[vm]]` table.
    pub fn boot(name: &str, count: usize, memory_mib: u32, keys: &str) -> Result<Self> {
        Self::boot_with(name, count, memory_mib, keys, count)
    }

    /// Boots VMs like [`Self::boot`], but installs the paravirtual driver in VMs with an index of `knowing` or higher.
    pub fn boot_with(name: &str, count: usize, memory_mib: u32, keys: &str, knowing: usize) -> Result<Self> {
        Self::boot_on("", name, count, memory_mib, keys, knowing)
    }

    /// Boots VMs like [`Self::boot`], on a card that does not clear a kernel's residue before the next VM's kernel.
    pub fn boot_keeping(name: &str, count: usize, memory_mib: u32) -> Result<Self> {
        Self::boot_on("residue = \"keep\"\n", name, count, memory_mib, "", count)
    }

    fn boot_on(card: &str, name: &str, count: usize, memory_mib: u32, keys: &str, knowing: usize) -> Result<Self> {
        let images = crate::images()?;
        let daemon = Daemon::start(name, |paths| {
            let vram_mib = 128 + VRAM_MIB * u32::try_from(count).unwrap_or(u32::MAX / VRAM_MIB);
            let time = card_time_toml();
            let offer = |index| if index < knowing { "" } else { "paravirtual = { offered = true }\n" };
            let vms = (0..count).map(|index| vm_toml(&name_of(index), VRAM_MIB) + keys + offer(index));
            card_toml(paths, vram_mib) + card + &time + &vms.collect::<String>()
        })?;
        let boot = |index: usize| -> Result<Vm> {
            let name = name_of(index);
            let config = VmConfig::new(&name, images, "6.1")?.with_gpu(daemon.vm_socket(&name));
            let config = if index < knowing { config } else { config.paravirtual()? };
            let vm = Vm::launch(&VmConfig { memory_mib, ..config })?;
            vm.wait_ready()?;
            guest::load_driver(&vm)?;
            Ok(vm)
        };
        let next = AtomicUsize::new(0);
        let some = || -> Result<Vec<(usize, Vm)>> {
            let indices = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
            indices.take_while(|index| *index < count).map(|index| Ok((index, boot(index)?))).collect()
        };
        let mut vms = BTreeMap::new();
        thread::scope(|scope| {
            let threads: Vec<_> = (0..BOOTS).map(|_| scope.spawn(some)).collect();
            threads.into_iter().try_for_each(|thread| {
                vms.extend(thread.join().map_err(|_| anyhow!("a thread that boots guests panicked"))??);
                anyhow::Ok(())
            })
        })?;
        Ok(Self { daemon, vms: vms.into_values().collect() })
    }

    /// Returns the daemon.
    pub fn daemon(&mut self) -> &mut Daemon {
        &mut self.daemon
    }

    /// Returns the number of VMs.
    pub fn len(&self) -> usize {
        self.vms.len()
    }

    /// Returns true if no VMs exist.
    pub fn is_empty(&self) -> bool {
        self.vms.is_empty()
    }

    /// Returns the VM with this index.
    pub fn vm(&self, index: usize) -> Result<&Vm> {
        self.vms.get(index).with_context(|| format!("there is no VM {index}"))
    }

    /// Changes the card's scheduler settings with `mediatorctl sched set CARD settings...`.
    pub fn set(&self, settings: &[&str]) -> Result<()> {
        self.daemon.ctl(&[&["sched", "set", CARD], settings].concat())?.success().map(drop)
    }

    /// Changes a VM's share with `mediatorctl sched set-vm VM share...`.
    pub fn set_vm(&self, index: usize, share: &[&str]) -> Result<()> {
        self.daemon.ctl(&[&["sched", "set-vm", &name_of(index)], share].concat())?.success().map(drop)
    }

    /// Releases a VM from quarantine.
    pub fn release(&self, index: usize) -> Result<()> {
        self.daemon.ctl(&["sched", "release", &name_of(index)])?.success().map(drop)
    }

    /// Returns the VMs' usage of an engine according to the mediator's accounting.
    pub fn accounts(&self, engine: &str) -> Result<Vec<Account>> {
        let shown = self.daemon.api(&format!("/v1/cards/{CARD}/scheduler"))?;
        (0..self.len()).map(|index| account(of_vm(&shown, index)?, engine)).collect()
    }

    /// Returns the card's clock, and the charges of each VM in the intervals of the last `since_ms` milliseconds.
    pub fn history(&self, since_ms: u64) -> Result<History> {
        let shown = self.daemon.api(&format!("/v1/cards/{CARD}/scheduler/history?since_ms={since_ms}"))?;
        let number = |value: &Value, key: &str| value[key].as_u64().with_context(|| format!("no {key} in {value}"));
        let samples = (0..self.len()).map(|index| {
            let samples = of_vm(&shown, index)?["samples"].as_array().context("no samples")?;
            samples.iter().map(|sample| Ok((number(sample, "from_ns")?, sample["used_ns"].clone()))).collect()
        });
        let samples = samples.collect::<Result<_>>()?;
        let interval_ns = number(&shown, "interval_ms")? * 1_000_000;
        let now_ns = number(&shown, "now_ns")?;
        // The first interval may be incomplete.
        let from_ns = now_ns.saturating_sub(since_ms * 1_000_000) + interval_ns;
        Ok(History { now_ns, from_ns, interval_ns, samples })
    }
}

/// Recent charges of all VMs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// Time of the query, in ns of the card's clock.
    pub now_ns: u64,
    /// Start of the complete part of the history, in ns of the card's clock.
    pub from_ns: u64,
    /// Length of an interval in ns.
    pub interval_ns: u64,
    /// Per VM, the intervals in which it was charged. Each consists of its start in ns, and an object with the charged
    /// time in ns by engine.
    pub samples: Vec<Vec<(u64, Value)>>,
}

impl History {
    /// Appends the samples of a later query. The daemon keeps samples for only one minute, which is shorter than some
    /// measurements.
    pub fn append(&mut self, later: Self) {
        if self.samples.is_empty() {
            self.from_ns = later.from_ns;
        }
        self.samples.resize(later.samples.len().max(self.samples.len()), Vec::new());
        for (all, more) in self.samples.iter_mut().zip(later.samples) {
            all.retain(|(at, _)| *at < later.from_ns);
            all.extend(more.into_iter().filter(|(at, _)| *at >= later.from_ns));
        }
        (self.now_ns, self.interval_ns) = (later.now_ns, later.interval_ns);
    }
}

/// Returns the name of the VM with this index.
pub fn name_of(index: usize) -> String {
    format!("vm{index}")
}

fn of_vm(shown: &Value, index: usize) -> Result<&Value> {
    let vms = shown["vms"].as_array().with_context(|| format!("no vms in {shown}"))?;
    let name = name_of(index);
    vms.iter().find(|vm| vm["vm"] == name.as_str()).with_context(|| format!("{name} is not in {shown}"))
}

fn account(vm: &Value, engine: &str) -> Result<Account> {
    let of = &vm["engines"][engine];
    let number = |key: &str| of[key].as_u64().with_context(|| format!("no {key} in {of}"));
    let buckets = of["wait"]["buckets"].as_array().context("no waits")?;
    let bucket = |bucket: &Value| Some((bucket["at_most_ns"].as_u64()?, bucket["count"].as_u64()?));
    Ok(Account {
        completed: number("completed")?,
        killed: number("killed")?,
        used_ns: number("used_ns")?,
        waits: buckets.iter().filter_map(bucket).collect(),
        started: number("started")?,
        strikes: vm["strikes"].as_u64().context("no strikes")?,
        quarantined: vm.get("quarantine").is_some_and(|quarantine| !quarantine.is_null()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_read_in_pieces_has_each_interval_once() {
        let history = |from_ns: u64, now_ns: u64, at: &[u64]| History {
            now_ns,
            from_ns,
            interval_ns: 10,
            samples: vec![at.iter().map(|at| (*at, Value::from(now_ns))).collect()],
        };
        let mut all = History::default();
        all.append(history(20, 65, &[10, 20, 40, 60]));
        // The interval at 60 was incomplete in the first query, so it comes from the second query. The second query
        // contains only a part of the interval at 50, and the first query contains no charges in it.
        all.append(history(60, 95, &[50, 60, 70, 90]));
        let at: Vec<(u64, u64)> = all.samples[0].iter().map(|(at, used)| (*at, used.as_u64().unwrap_or(0))).collect();
        assert_eq!(at, [(20, 65), (40, 65), (60, 95), (70, 95), (90, 95)]);
        assert_eq!((all.from_ns, all.now_ns, all.interval_ns), (20, 95, 10));
    }
}
