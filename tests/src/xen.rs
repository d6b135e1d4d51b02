//! A Xen host in an emulated machine: domain 0 with the daemon and a software card, and HVM domains with its vGPUs.
//!
//! Each domain has a serial line to this process. Domain 0 uses the machine's second serial port, and the other domains
//! use the ports of a PCI serial card.

mod boot;

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::accel::Accel;
use crate::agent::{Agent, Output, Pending};
use crate::daemon::binary;
use crate::files::Files;
use crate::guest::{self, Smoke};
use crate::vm::{self, Xen};
use crate::wait::{self, Scratch};
use crate::{Vm, VmConfig};

/// Number of serial ports for domains, all on one PCI serial card.
pub const LINES: usize = 4;
/// Device number in domain 0 of the domains' first serial port, after the machine's own ports.
const FIRST_LINE: usize = 4;
/// Admin socket of the daemon in domain 0.
const ADMIN_SOCKET: &str = "/run/admin.sock";
/// Program search path in domain 0.
const PATH: &str = "PATH=/bin:/usr/lib/xen-4.17/bin";
/// Size of a domain's memory for its apertures in MiB. It must not exceed the size of the apertures.
const APERTURES_MIB: u32 = 48;
/// Time limit of a command in domain 0.
const COMMAND_LIMIT: Duration = Duration::from_secs(300);
/// Time limit from `xl create` to the start of a guest's init.
const BOOT_LIMIT: Duration = Duration::from_secs(600);
/// Time limit for loading a domain's driver. Each register access is an emulated round trip between two domains, at
/// about 600 round trips per second. With a passed-through card, which has trapped apertures, loading the driver takes
/// almost an hour.
const DRIVER_LIMIT: Duration = Duration::from_secs(3600);

/// Description of a domain.
#[derive(Clone, Debug)]
pub struct DomainSpec {
    /// Name of the domain and of its VM.
    pub name: &'static str,
    /// Kernel version of the guest.
    pub kernel: &'static str,
    /// True if the domain has the paravirtual driver.
    pub paravirtual: bool,
    /// RAM size in MiB.
    pub memory_mib: u32,
    /// Number of virtual CPUs.
    pub cpus: u32,
}

impl DomainSpec {
    /// Returns the description of a domain with one CPU and the stock driver.
    pub fn new(name: &'static str, kernel: &'static str) -> Self {
        Self { name, kernel, paravirtual: false, memory_mib: 384, cpus: 1 }
    }

    /// Returns the path of the domain's files in domain 0, excluding the suffix.
    fn image(&self) -> String {
        format!("guests/{}{}", self.kernel, if self.paravirtual { "-pv" } else { "" })
    }

    /// Returns the domain's configuration file for `xl`. `line` is the index of its serial port on the PCI serial card.
    ///
    /// The domain's console shows only urgent messages, because each character causes two exits. TSC reads are not
    /// intercepted. Otherwise, QEMU would report RDTSCP as RDTSC, and Xen, which checks the instruction, would inject a
    /// fault.
    pub fn config(&self, line: usize) -> String {
        let Self { name, memory_mib, cpus, .. } = self;
        let (image, line) = (self.image(), FIRST_LINE + line);
        format!(
            "name = {name:?}\ntype = \"hvm\"\nmemory = {memory_mib}\nmaxmem = {memory_mib}\nvcpus = {cpus}\nmmio_hole = 256\n\
             kernel = \"/{image}.boot\"\n\
             cmdline = \"console=ttyS0 no_timer_check panic=0 loglevel=4\"\n\
             serial = [ \"file:/run/{name}.console\", \"/dev/ttyS{line}\" ]\n\
             tsc_mode = \"native\"\nvga = \"none\"\nvnc = 0\nsdl = 0\nusb = 0\non_reboot = \"restart\"\non_crash = \"preserve\"\n\
             device_model_version = \"qemu-xen\"\ndevice_model_override = \"/usr/libexec/xen-qemu-system-i386\"\n\
             device_model_args_hvm = [ {} ]\n",
            [("vmlinuz", boot::KERNEL), ("initrd", boot::RAMDISK)]
                .map(|(file, at)| format!("\"-device\", \"loader,file=/{image}.{file},addr={at:#x},force-raw=on\""))
                .join(", ")
        )
    }
}

/// A running machine with a ready Xen toolstack.
pub struct XenMachine {
    // Fields are dropped in declaration order.
    vm: Vm,
    agents: Vec<Agent>,
    specs: Vec<DomainSpec>,
    platform: String,
    began: Instant,
    _scratch: Scratch,
}

impl XenMachine {
    /// Boots a machine for the domains in `specs`, at most [`LINES`]. `config` is the configuration of the daemon in
    /// domain 0.
    pub fn boot(name: &str, specs: &[DomainSpec], config: &str, memory_mib: u32) -> Result<Self> {
        ensure!(specs.len() <= LINES, "{} domains, but a card has only {LINES} lines", specs.len());
        let began = Instant::now();
        let images = crate::images()?;
        let host = images::ensure_xen(&images::Progress::stderr())?;
        let mut files = Files::default();
        for program in ["mediatord", "mediatorctl"] {
            files.program(&binary(program)?, &format!("bin/{program}"))?;
        }
        files.write("etc/mediatord.toml", 0o644, config.as_bytes());
        let mut there = Vec::new();
        for (line, spec) in specs.iter().enumerate() {
            files.write(&format!("etc/xen/{}.cfg", spec.name), 0o644, spec.config(line).as_bytes());
            let image = spec.image();
            if there.contains(&image) {
                continue;
            }
            let kernel = match spec.paravirtual {
                true => crate::paravirtual_kernel(spec.kernel)?,
                false => images.kernel(spec.kernel)?.clone(),
            };
            files.copy(&kernel.vmlinuz, &format!("{image}.vmlinuz"), 0o644)?;
            let initrd = compressed(&kernel.initrd)?;
            files.write(&format!("{image}.initrd"), 0o644, &initrd);
            files.write(&format!("{image}.boot"), 0o644, &boot::program(initrd.len())?);
            there.push(image);
        }
        let scratch = Scratch::new(&format!("{name}-lines"))?;
        let at = |file: &str| scratch.path().join(file);
        let mut config = VmConfig::new(name, images, "6.1")?;
        config.kernel = host.bootable(files.finish(), &at("initrd"))?;
        config.xen = Some(Xen { image: host.hypervisor(), dom0_mib: memory_mib });
        config.memory_mib =
            memory_mib + specs.iter().map(|spec| spec.memory_mib + 24 + APERTURES_MIB).sum::<u32>() + 192;
        // Use a single CPU: with two CPUs on separate threads, domains were reset and machines hung.
        config.smp = 1;
        config.accel = Accel::TcgWithSvm { threads: false };
        if let Some(qemu) = images::ensure_svm(&images::Progress::stderr())? {
            config.qemu = qemu;
        }
        let mut card = format!("pci-serial-{LINES}x");
        let mut listeners = Vec::new();
        for line in 1..=LINES {
            let path = at(&format!("line{line}"));
            listeners.push(vm::listen(&path)?);
            config.extra_args.push("-chardev".to_owned());
            config.extra_args.push(format!("socket,id=line{line},path={},server=off", path.display()));
            card.push_str(&format!(",chardev{line}=line{line}"));
        }
        config.extra_args.extend(["-device".to_owned(), card]);
        let vm = Vm::launch(&config)?;
        let health = vm.health();
        let accept = |listener: &UnixListener| {
            Agent::new(vm::accept(listener, "a domain's line", &health)?, Arc::clone(&health))
        };
        let agents = listeners.iter().map(accept).collect::<Result<_>>()?;
        let release = vm.wait_ready()?;
        vm.run_ok("load")?;
        let xen = host.version;
        let platform = format!("Xen {xen}, domain 0 Linux {release}, under QEMU {} (tcg)", images.qemu.version);
        let this = Self { vm, agents, specs: specs.to_vec(), platform, began, _scratch: scratch };
        this.say(&this.platform);
        let started = this.vm.run_within(&format!("run /bin/busybox sh /{}", images::xen::START), COMMAND_LIMIT)?;
        println!("{}", started.success().context("Xen's toolstack")?.text());
        Ok(this)
    }

    /// Returns a description of Xen, domain 0's kernel, and the VMM.
    pub fn platform(&self) -> &str {
        &self.platform
    }

    /// Prints a line, prefixed with the time since the start.
    pub fn say(&self, text: &str) {
        println!("[{:6.1} s] {text}", self.began.elapsed().as_secs_f64());
    }

    /// Runs a shell command in domain 0 to completion. Does not check the exit code. Prints the command and its output.
    pub fn run(&self, command: &str) -> Result<Output> {
        self.say(&format!("# {command}"));
        let output = self.vm.run_within(&format!("sh {PATH}; export PATH; {command}"), COMMAND_LIMIT)?;
        println!("{}{}", output.text(), if output.code == 0 { String::new() } else { format!("\n[{}]", output.code) });
        Ok(output)
    }

    /// Calls [`Self::run`], but treats a nonzero exit code as an error. Returns the output.
    pub fn ok(&self, command: &str) -> Result<String> {
        let output = self.run(command)?;
        ensure!(output.code == 0, "{command}: exited with code {}:\n{}", output.code, output.text());
        Ok(output.text())
    }

    /// Starts the daemon with its configuration, and waits until it is ready.
    pub fn start_daemon(&self) -> Result<Pending<'_>> {
        self.say("# mediatord --config /etc/mediatord.toml &");
        let daemon = self.vm.start("run /bin/mediatord --config /etc/mediatord.toml")?;
        wait::until("mediatord in domain 0 to serve", COMMAND_LIMIT, || {
            ensure!(!daemon.ended(), "mediatord has exited:\n{}", daemon.lines().join("\n"));
            let asked = self.vm.run(&format!("run /bin/mediatorctl --socket {ADMIN_SOCKET} card list"))?;
            Ok((asked.code == 0).then_some(()))
        })?;
        self.say("mediatord in domain 0 serves");
        Ok(daemon)
    }

    /// Stops the daemon, which must exit cleanly. Returns the daemon's log.
    pub fn stop_daemon(&self, daemon: Pending<'_>) -> Result<String> {
        daemon.terminate()?;
        let output = daemon.wait_within(COMMAND_LIMIT)?.success().context("mediatord in domain 0")?;
        self.say("mediatord in domain 0 has exited");
        Ok(output.text())
    }

    /// Runs `mediatorctl` and returns its output.
    pub fn ctl(&self, command: &str) -> Result<String> {
        self.ok(&format!("mediatorctl --socket {ADMIN_SOCKET} {command}"))
    }

    /// Runs `mediatorctl vm show` for a VM.
    pub fn show(&self, name: &str) -> Result<Value> {
        let command = format!("run /bin/mediatorctl --socket {ADMIN_SOCKET} --json vm show {name}");
        let text = self.vm.run_ok(&command)?.text();
        serde_json::from_str(&text).with_context(|| format!("vm show {name} did not print JSON:\n{text}"))
    }

    /// Creates a paused domain, waits until the daemon serves it, and unpauses it.
    pub fn create(&self, name: &str) -> Result<Domain<'_>> {
        let line = self.specs.iter().position(|spec| spec.name == name).context("no domain of that name")?;
        let agent = self.agents.get(line).context("no line")?;
        let boots = agent.boots();
        if self.run(&format!("xl create -p /etc/xen/{name}.cfg 2>&1"))?.code != 0 {
            let log = self.run(&format!("cat /var/log/xen/qemu-dm-{name}.log; dmesg | tail -n 20"))?;
            bail!("domain {name} was not created; logs of its device model and of domain 0's kernel:\n{}", log.text());
        }
        self.wait_state(name, "connected")?;
        self.ok(&format!("xl unpause {name}"))?;
        Ok(Domain { machine: self, name: name.to_owned(), agent, boots: boots + 1 })
    }

    /// Waits until the daemon reports a VM in the given state.
    pub fn wait_state(&self, name: &str, state: &str) -> Result<Value> {
        wait::until(&format!("VM {name} to be {state}"), COMMAND_LIMIT, || {
            let shown = self.show(name)?;
            Ok((shown["state"] == state).then_some(shown))
        })
    }

    /// Returns Xen's log, which includes messages of the domains' firmware.
    pub fn log(&self) -> String {
        self.vm.console()
    }
}

/// Compresses a file with gzip, a format that the kernel can unpack.
fn compressed(path: &Path) -> Result<Vec<u8>> {
    let output = Command::new("gzip").args(["-c", "-6"]).arg(path).stderr(Stdio::inherit()).output();
    let output = output.context("cannot start gzip; install the package gzip")?;
    ensure!(output.status.success(), "gzip failed ({}) on {}", output.status, path.display());
    Ok(output.stdout)
}

/// A running domain.
pub struct Domain<'a> {
    machine: &'a XenMachine,
    /// Name of the domain.
    pub name: String,
    agent: &'a Agent,
    boots: u32,
}

impl<'a> Domain<'a> {
    /// Waits for the guest's init. Returns the release of the guest's kernel.
    pub fn wait_ready(&self) -> Result<String> {
        let release = self.agent.wait_boots(self.boots, BOOT_LIMIT).map_err(|error| self.explain(error))?;
        self.machine.say(&format!("domain {}: Linux {release} is up", self.name));
        Ok(release)
    }

    /// Runs a command in the guest. Treats a nonzero exit code as an error.
    pub fn ok(&self, command: &str, limit: Duration) -> Result<Output> {
        let ran = self.agent.run_within(command, limit).and_then(Output::success);
        ran.map_err(|error| self.explain(error)).with_context(|| format!("domain {}: {command}", self.name))
    }

    /// Starts a command in the guest that runs concurrently with other commands.
    pub fn start(&self, command: &str) -> Result<Pending<'a>> {
        self.agent.start(command)
    }

    /// Loads the driver and waits for its render node.
    pub fn load_driver(&self) -> Result<()> {
        self.ok("load", DRIVER_LIMIT)?;
        let nodes = self.ok("nodes", COMMAND_LIMIT)?.text();
        if !nodes.contains("renderD128") {
            let log = self.agent.run("dmesg")?.text();
            bail!("domain {}: nouveau created no render node: {nodes}\n{log}", self.name);
        }
        let interrupts = self.ok("interrupts", COMMAND_LIMIT)?.text();
        let line = interrupts.lines().find(|line| line.contains("nvkm") || line.contains("nouveau")).unwrap_or("none");
        self.machine.say(&format!("domain {}: nouveau is up, interrupt: {}", self.name, line.trim()));
        Ok(())
    }

    /// Runs `gpu-workloads` with `args` to completion. Fails unless every result was verified.
    pub fn smoke(&self, args: &str) -> Result<Smoke> {
        self.finish(self.start(&format!("run /bin/gpu-workloads {args}"))?, args)
    }

    /// Waits for a running workload, and fails unless every result was verified.
    pub fn finish(&self, pending: Pending<'_>, args: &str) -> Result<Smoke> {
        let output = pending.wait_within(guest::SMOKE_LIMIT).map_err(|error| self.explain(error))?;
        let smoke = guest::parse_smoke(&output)?;
        if !smoke.ok {
            let log = self.agent.run("dmesg").map(|log| log.text()).unwrap_or_default();
            bail!("domain {}: {args}: {}\n{}\n{log}", self.name, smoke.line, output.text());
        }
        self.machine.say(&format!("domain {}: {args}: {}", self.name, smoke.line));
        Ok(smoke)
    }

    /// Reboots the guest cleanly. `xl` creates and runs a new domain from the domain's configuration file.
    pub fn reboot(&mut self) -> Result<()> {
        self.boots = self.agent.boots() + 1;
        self.agent.send("reboot").map(drop)
    }

    /// Destroys the domain immediately.
    pub fn destroy(&self) -> Result<()> {
        self.machine.ok(&format!("xl destroy {}", self.name)).map(drop)
    }

    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let console = self.machine.vm.run(&format!("sh tail -n 40 /run/{}.console", self.name));
        let console = console.map(|output| output.text()).unwrap_or_default();
        error.context(format!("domain {}; its console ends with:\n{console}", self.name))
    }
}
