//! Tests VMs with stock guests on one card. The VMs are randomly killed, powered off or removed, and then recreated.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tests::guest::{self, card_toml};
use tests::holdings::{Holdings, Slack, setting};
use tests::{Daemon, Vm, VmConfig, wait};
use vmm_glue::client::Client;

/// Number of events per test.
const EVENTS: usize = 6;
const CARD_MIB: u64 = 512;
const VM_MIB: &str = "64";
/// Permitted growth, excluding the card's VRAM: touched stacks, and heap memory that the daemon keeps for reuse. It
/// depends on the number of concurrent VMs, not on their total number.
const SLACK: Slack = Slack { mappings: 64, resident_kib: 16 << 10, pools: &["admin-work", "simgpu-sm"] };
/// Time limit for the daemon to detect that a VM is gone.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(60);

/// A VM of the daemon's configuration, and the guest that currently runs in it.
struct Seat {
    name: String,
    vm: Vm,
    /// Set if nouveau is loaded in this VM.
    drives: bool,
}

/// A daemon and its VMs.
struct Host {
    daemon: Daemon,
    random: fastrand::Rng,
    seats: Vec<Seat>,
}

impl Host {
    /// Starts a guest in the VM `name` of the daemon's configuration. If `drives` is true, [`Self::settle`] loads its
    /// driver.
    fn seated(&mut self, name: String, drives: bool) -> Result<Seat> {
        let mut config = VmConfig::new(&name, tests::images()?, ["6.1", "6.12"][self.random.usize(..2)])?;
        config = config.with_gpu(self.daemon.vm_socket(&name));
        config.memory_mib = 256;
        let vm = Vm::launch(&config)?;
        Ok(Seat { name, vm, drives })
    }

    /// Waits until the VM has booted, and loads and tests its driver if it has one.
    fn settle(seat: &Seat) -> Result<()> {
        seat.vm.wait_ready()?;
        if seat.drives {
            guest::load_driver(&seat.vm)?;
            guest::smoke(&seat.vm, "copy --engine m2mf --from gart --to vram --size 262144")?;
        }
        Ok(())
    }

    fn add(&self, name: &str) -> Result<()> {
        self.daemon.ctl(&["vm", "add", name, "--card", "card0", "--vram-mib", VM_MIB])?.success()?;
        Ok(())
    }

    /// Ends one VM, in the middle of its work if its driver is loaded. Another guest then runs under the same VM name.
    fn event(&mut self) -> Result<String> {
        let at = self.random.usize(..self.seats.len());
        let Seat { name, vm, drives } = self.seats.remove(at);
        if drives {
            let before = guest::counter(&self.daemon, &name, "doorbells")?;
            let work = vm.start("run /bin/gpu-workloads stress --seconds 600")?;
            wait::until("the VM to submit work", guest::LOAD_LIMIT, || {
                Ok((guest::counter(&self.daemon, &name, "doorbells")? > before + 20).then_some(()))
            })?;
            drop(work);
        }
        let what = ["killed", "switched off", "removed"][self.random.usize(..3)];
        match what {
            "killed" => vm.kill()?,
            "switched off" => {
                drop(vm.agent().send("poweroff")?);
                vm.wait_exit(guest::LOAD_LIMIT)?;
            }
            _ => {
                self.daemon.ctl(&["vm", "remove", &name])?.success()?;
                if self.daemon.vm_socket(&name).exists() {
                    bail!("the socket of {name} still exists after its removal");
                }
            }
        }
        // The other VMs must still work. A VMM that has lost its device may keep running.
        if let Some(other) = self.seats.iter().find(|seat| seat.drives) {
            guest::smoke(&other.vm, "copy --engine ce0 --from vram --to gart --size 262144")?;
        }
        if what != "removed" {
            self.wait_gone(&name)?;
            // Keep the vGPU for the next VM, or create a new vGPU.
            if self.random.bool() {
                self.daemon.ctl(&["vm", "remove", &name])?.success()?;
                self.add(&name)?;
            }
        } else {
            drop(vm);
            self.add(&name)?;
        }
        let drives = self.random.bool() || self.seats.iter().all(|seat| !seat.drives);
        let seat = self.seated(name.clone(), drives)?;
        Self::settle(&seat)?;
        self.seats.push(seat);
        Ok(format!("{name} was {what}{}", if drives { ", its heir drives" } else { "" }))
    }

    /// Waits until the daemon has detected the VMM's exit and freed the VM's resources.
    fn wait_gone(&self, name: &str) -> Result<()> {
        wait::until(&format!("{name}'s channels to be freed"), NOTICE_TIMEOUT, || {
            let shown = guest::show(&self.daemon, name)?;
            let empty = shown["channels_used"] == 0 && shown["counters"]["address_spaces"] == 0;
            Ok((shown["state"] == "waiting" && empty).then_some(()))
        })
    }

    /// Reads the daemon's resources from its own accounting and from the kernel. Reads the kernel's numbers first,
    /// because the connection for the accounting uses a descriptor of the daemon.
    fn holdings(&self) -> Result<(Value, Vec<String>, Holdings)> {
        let holdings = Holdings::for_process(self.daemon.pid(), CARD_MIB << 10)?;
        let card = self.daemon.ctl_json(&["card", "show", "card0"])?;
        let folder = std::fs::read_dir(&self.daemon.paths().folder)?;
        let files: std::io::Result<Vec<_>> =
            folder.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect();
        let mut files = files?;
        files.sort();
        Ok((card, files, holdings))
    }
}

fn come_and_go(name: &str, count: usize) -> Result<()> {
    let daemon = Daemon::start(name, |paths| card_toml(paths, CARD_MIB as u32))?;
    let seed = setting("GPU_MEDIATOR_CHURN_SEED", 1) << 8 | count as u64;
    let mut host = Host { daemon, random: fastrand::Rng::with_seed(seed), seats: Vec::new() };
    // Add and remove a VM, because the daemon allocates some persistent resources for its first VM.
    host.add("first")?;
    drop(Client::connect(&host.daemon.vm_socket("first"))?);
    host.daemon.ctl(&["vm", "remove", "first"])?.success()?;
    // Wait until earlier connections are closed. Otherwise, they could hide a leak.
    std::thread::sleep(Duration::from_millis(500));
    let (card, files, before) = host.holdings()?;

    // Boot all VMs concurrently. Every second VM has a driver.
    for index in 0..count {
        let name = format!("vm{index}");
        host.add(&name)?;
        let seat = host.seated(name, index % 2 == 0)?;
        host.seats.push(seat);
    }
    host.seats.iter().try_for_each(Host::settle)?;
    for _ in 0..EVENTS {
        let what = host.event().with_context(|| host.daemon.log_tail())?;
        println!("{what}");
    }
    for Seat { name, vm, .. } in std::mem::take(&mut host.seats) {
        vm.kill()?;
        host.wait_gone(&name)?;
        host.daemon.ctl(&["vm", "remove", &name])?.success()?;
    }

    let mut last = Vec::new();
    let clean = wait::until("all resources of the VMs to be freed", NOTICE_TIMEOUT, || {
        let (card_now, files_now, now) = host.holdings()?;
        last = before.lost(&now, SLACK);
        if card_now != card {
            last.push(format!("of the card: {card_now}, was {card}"));
        }
        if files_now != files {
            last.push(format!("files: {files_now:?}, were {files:?}"));
        }
        Ok(last.is_empty().then_some(now))
    });
    println!("before: {before}; after: {}", clean.with_context(|| last.join("\n"))?);
    let log = host.daemon.log();
    let bad: Vec<_> = log.lines().filter(|line| line.contains(" ERROR ") || line.contains("panicked")).collect();
    assert!(bad.is_empty(), "the daemon logged errors:\n{}", bad.join("\n"));
    assert!(host.daemon.alive());
    Ok(())
}

#[test]
fn two_vms_come_and_go_and_leave_nothing() -> Result<()> {
    come_and_go("churn2", 2)
}

mod full {
    use super::*;

    #[test]
    fn four_vms_come_and_go_and_leave_nothing() -> Result<()> {
        come_and_go("churn4", 4)
    }
}
