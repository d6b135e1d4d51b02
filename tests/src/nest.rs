//! A machine with a card behind an IOMMU: an emulated guest with a card passed through from an outer daemon. The
//! machine may itself run VMs ([`inner`]).
//!
//! The outer daemon and its software card act as hardware. In the machine, the card is an ordinary PCI function.

pub mod inner;

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::accel::Accel;
use crate::agent::{Agent, Output, Pending};
use crate::daemon::{Daemon, binary};
use crate::files::Files;
use crate::guest::{card_toml, passthrough_toml};
use crate::vm;
use crate::wait::{self, Scratch};
use crate::{Vm, VmConfig};
use inner::InnerSpec;

/// The outer daemon's VM with the passed-through card.
pub const OUTER_VM: &str = "straight";
/// PCI address of the card in the machine, behind the only port.
pub const ADDRESS: &str = "0000:01:00.0";
/// Folder of this project's programs in the machine.
const PROGRAMS: &str = "bin";
/// Admin socket of the daemon in the machine.
const ADMIN_SOCKET: &str = "/run/admin.sock";
/// State folder of the daemon in the machine, which also contains the approved firmware.
const STATE: &str = "/run/state";
/// Time limit of a command in the machine.
const COMMAND_LIMIT: Duration = Duration::from_secs(600);

/// Number of serial ports for VMs, all on one PCI serial card.
pub const LINES: usize = 4;

/// Description of a machine.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    /// VRAM size of the card in MiB. The mediator in the machine cannot use all of it.
    pub card_mib: u32,
    /// Additional keys for the card's table.
    pub card_keys: &'a str,
    /// RAM of the machine in MiB, excluding its VMs' RAM.
    pub memory_mib: u32,
    /// VMs of the machine, at most [`LINES`].
    pub vms: &'a [InnerSpec],
    /// Total size of the huge pages in MiB, excluding those of the machine's VMs.
    pub huge_mib: u32,
}

impl Shape<'_> {
    /// Returns true if the machine runs guests, and therefore needs KVM.
    fn has_guests(&self) -> bool {
        !self.vms.is_empty() || self.huge_mib != 0
    }
}

/// A running machine with loaded modules and an unbound card.
pub struct Nest {
    // Fields are dropped in declaration order.
    vm: Vm,
    outer: Daemon,
    agents: Vec<Agent>,
    specs: Vec<InnerSpec>,
    /// Command line that starts QEMU in the machine.
    qemu: Vec<String>,
    platform: String,
    began: Instant,
    _scratch: Scratch,
}

impl Nest {
    /// Boots a machine with this project's programs and `files`.
    pub fn boot(name: &str, shape: Shape<'_>, mut files: Files) -> Result<Self> {
        let Shape { card_mib, card_keys, memory_mib, vms, huge_mib: _ } = shape;
        ensure!(vms.len() <= LINES, "{} VMs, but a card has only {LINES} lines", vms.len());
        let began = Instant::now();
        let images = crate::images()?;
        let nest = images::ensure_nest(&images::Progress::stderr())?;
        for program in ["mediatord", "mediatorctl"] {
            files.program(&binary(program)?, &format!("{PROGRAMS}/{program}"))?;
        }
        for program in ["copies", "exits"] {
            files.program(&example(program)?, &format!("{PROGRAMS}/{program}"))?;
        }
        inner::add_images(vms, &mut files)?;
        let outer = Daemon::start(name, |paths| card_toml(paths, card_mib) + card_keys + &passthrough_toml(OUTER_VM))?;
        let scratch = Scratch::new(&format!("{name}-files"))?;
        let mut config = VmConfig::new(name, images, "6.1")?.with_gpu(outer.vm_socket(OUTER_VM));
        config.kernel = nest.bootable(files.finish(), !vms.is_empty(), &scratch.path().join("initrd"))?;
        config.memory_mib = memory_mib;
        (config.accel, config.smp, config.hotplug, config.iommu) = (Accel::Tcg, 2, true, true);
        let lines = if shape.has_guests() { inner::prepare(shape, &mut config, scratch.path())? } else { Vec::new() };
        let vm = Vm::launch(&config)?;
        let health = vm.health();
        let accept =
            |listener: &UnixListener| Agent::new(vm::accept(listener, "a VM's line", &health)?, Arc::clone(&health));
        let agents = lines.iter().map(accept).collect::<Result<_>>()?;
        let release = vm.wait_ready()?;
        vm.run_ok("load")?;
        let inside = if shape.has_guests() { ", kvm inside" } else { "" };
        let platform = format!("Linux {release} under QEMU {} (tcg{inside})", images.qemu.version);
        let qemu = std::iter::once(nest.qemu().program.display().to_string()).chain(nest.qemu().args.clone()).collect();
        let nest = Self { vm, outer, agents, specs: vms.to_vec(), qemu, platform, began, _scratch: scratch };
        nest.say(&nest.platform);
        Ok(nest)
    }

    /// Returns the outer daemon.
    pub fn outer(&self) -> &Daemon {
        &self.outer
    }

    /// Returns a description of the machine's kernel, VMM and accelerator.
    pub fn platform(&self) -> &str {
        &self.platform
    }

    /// Prints a line, prefixed with the time since the start.
    pub fn say(&self, text: &str) {
        println!("[{:6.1} s] {text}", self.began.elapsed().as_secs_f64());
    }

    /// Runs a program in the machine to completion. Does not check the exit code. Prints the command and its output.
    pub fn run(&self, command: &str) -> Result<Output> {
        self.say(&format!("# {command}"));
        let output = self.vm.run_within(&format!("run /{PROGRAMS}/{command}"), COMMAND_LIMIT)?;
        println!("{}{}", output.text(), if output.code == 0 { String::new() } else { format!("\n[{}]", output.code) });
        Ok(output)
    }

    /// Calls [`Self::run`], but treats a nonzero exit code as an error. Returns the output.
    pub fn ok(&self, command: &str) -> Result<String> {
        let output = self.run(command)?;
        ensure!(output.code == 0, "{command}: exited with code {}:\n{}", output.code, output.text());
        Ok(output.text())
    }

    /// Runs `mediatorctl` in the machine and parses its JSON output.
    pub fn ctl_json(&self, command: &str) -> Result<Value> {
        let text = self.ok(&format!("mediatorctl --socket {ADMIN_SOCKET} --json {command}"))?;
        serde_json::from_str(&text).with_context(|| format!("{command} did not print JSON:\n{text}"))
    }

    /// Approves firmware for the card, as an operator would. The contents are arbitrary, because the card does not
    /// execute them.
    pub fn approve_firmware(&self) -> Result<()> {
        let firmware = |command: &str| format!("card firmware {command} --state-dir {STATE}");
        let listed = self.ctl_json(&firmware("import --stand-in"))?;
        let images = listed["images"].as_array().context("the list is not empty")?;
        let digests: Vec<&str> = images.iter().filter_map(|image| image["digest"].as_str()).collect();
        let approved = self.ctl_json(&firmware(&format!("approve {}", digests.join(" "))))?;
        let all = approved["images"].as_array().into_iter().flatten().all(|image| image["approved"] == true);
        ensure!(all && digests.len() == 4, "{approved}");
        Ok(())
    }

    /// Starts `mediatord` in the machine with the configuration file at path `config`, and waits until the daemon is
    /// ready.
    pub fn start_daemon(&self, config: &str) -> Result<Pending<'_>> {
        self.say(&format!("# mediatord --config {config} &"));
        let daemon = self.vm.start(&format!("run /{PROGRAMS}/mediatord --config {config}"))?;
        wait::until("mediatord in the machine to serve", COMMAND_LIMIT, || {
            ensure!(!daemon.ended(), "mediatord has exited:\n{}", daemon.lines().join("\n"));
            let asked = self.vm.run(&format!("run /{PROGRAMS}/mediatorctl --socket {ADMIN_SOCKET} card list"))?;
            Ok((asked.code == 0).then_some(()))
        })?;
        self.say("mediatord in the machine serves");
        Ok(daemon)
    }

    /// Stops a daemon in the machine, which must exit cleanly. Returns the daemon's log.
    pub fn stop_daemon(&self, daemon: Pending<'_>) -> Result<String> {
        daemon.terminate()?;
        let output = daemon.wait_within(COMMAND_LIMIT)?.success().context("mediatord in the machine")?;
        self.say("mediatord in the machine has exited");
        Ok(output.text())
    }
}

/// Returns a configuration for a daemon in the machine that manages the card. `more` is appended to the card's keys.
///
/// Chunks are small, because each word that the daemon zeroes causes a message to the outer daemon.
pub fn config(vram_mib: u32, more: &str) -> String {
    format!(
        "[daemon]\nadmin_socket = {ADMIN_SOCKET:?}\nsocket_dir = \"/run\"\nstate_dir = {STATE:?}\n\n[[card]]\nname = \"card0\"\nkind = \"vfio\"\n\
         address = {ADDRESS:?}\nvram_mib = {vram_mib}\nchunk_kib = 128\n{more}"
    )
}

/// Finds an example program of this workspace next to the other programs.
fn example(name: &str) -> Result<PathBuf> {
    let daemon = binary("mediatord")?;
    let path = daemon.parent().unwrap_or(Path::new("")).join("examples").join(name);
    ensure!(path.is_file(), "{} is not built; run `cargo build --package rig --example {name}`", path.display());
    Ok(path)
}
