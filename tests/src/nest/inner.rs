//! VMs inside a machine, under its own KVM, with vGPUs of its daemon.
//!
//! Each VM has a serial line to this process: its QEMU uses a port of the machine's PCI serial card. A VM's RAM
//! consists of huge pages of the machine, because each page mapped for a card causes a message to the outer daemon.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use images::Kernel;
use serde_json::Value;

use super::{COMMAND_LIMIT, LINES, Nest, Shape};
use crate::accel::Accel;
use crate::agent::{Agent, Output, Pending};
use crate::files::Files;
use crate::guest::{self, Smoke};
use crate::vm;
use crate::{VmConfig, wait};

/// Device number of the first serial port for VMs in the machine, after a PC's own serial ports.
const FIRST_LINE: usize = 4;
/// File in the machine for an argument that contains spaces: the kernel command line.
const WORDS: &str = "etc/vm.cfg";
/// Size of a huge page in MiB.
const HUGE_MIB: u32 = 2;
/// Time limit from the start of QEMU to the start of the guest's init.
const BOOT_LIMIT: Duration = Duration::from_secs(600);

/// Description of a VM.
#[derive(Clone, Debug)]
pub struct InnerSpec {
    /// Name of the VM and of its vGPU.
    pub name: &'static str,
    /// Kernel version of the guest.
    pub kernel: &'static str,
    /// True if the VM has the paravirtual driver.
    pub paravirtual: bool,
    /// RAM size in MiB, a multiple of 2.
    pub memory_mib: u32,
}

impl InnerSpec {
    /// Returns the description of a VM with the stock driver.
    pub fn new(name: &'static str) -> Self {
        Self { name, kernel: "6.1", paravirtual: false, memory_mib: 320 }
    }

    /// Returns the path of the VM's files in the machine, excluding the suffix.
    fn image(&self) -> String {
        format!("guests/{}{}", self.kernel, if self.paravirtual { "-pv" } else { "" })
    }

    fn found(&self) -> Result<Kernel> {
        match self.paravirtual {
            true => crate::paravirtual_kernel(self.kernel),
            false => Ok(crate::images()?.kernel(self.kernel)?.clone()),
        }
    }

    /// Returns the QEMU arguments that start the VM in the machine.
    fn words(&self, line: usize) -> Vec<String> {
        let Self { name, memory_mib, .. } = self;
        let (image, line) = (self.image(), FIRST_LINE + line);
        let device = vm::gpu_device(Path::new(&format!("/run/{name}.sock")), false);
        let text = format!(
            "-name {name} -M q35 -accel kvm -cpu host -smp 1 -m {memory_mib}M \
             -object memory-backend-memfd,id=m0,size={memory_mib}M,share=on,hugetlb=on,hugetlbsize={HUGE_MIB}M,prealloc=on \
             -machine memory-backend=m0 -nodefaults -no-user-config -display none -vga none -monitor none \
             -chardev file,id=console,path=/run/{name}.console -chardev serial,id=agent,path=/dev/ttyS{line} \
             -serial chardev:console -serial chardev:agent \
             -readconfig /{WORDS} -kernel /{image}.vmlinuz -initrd /{image}.initrd -device {device}"
        );
        text.split_whitespace().map(str::to_owned).collect()
    }
}

/// Adds the VMs' boot files to the machine.
pub(super) fn add_images(specs: &[InnerSpec], files: &mut Files) -> Result<()> {
    if specs.is_empty() {
        return Ok(());
    }
    // Disable the kernel's timer check, which mistakes a busy host for broken hardware.
    let words = "[machine]\n  append = \"console=ttyS0 no_timer_check panic=0 loglevel=7\"\n";
    files.write(WORDS, 0o644, words.as_bytes());
    let mut there = Vec::new();
    for spec in specs {
        let image = spec.image();
        if there.contains(&image) {
            continue;
        }
        let kernel = spec.found()?;
        files.copy(&kernel.vmlinuz, &format!("{image}.vmlinuz"), 0o644)?;
        files.copy(&kernel.initrd, &format!("{image}.initrd"), 0o644)?;
        there.push(image);
    }
    Ok(())
}

/// Configures the machine to run guests. Returns the listening sockets for the VMs' serial lines.
///
/// The machine has two CPUs if any VM uses the stock driver and the required QEMU can be built, and one otherwise.
pub(super) fn prepare(shape: Shape<'_>, config: &mut VmConfig, folder: &Path) -> Result<Vec<UnixListener>> {
    let huge_mib = shape.huge_mib + shape.vms.iter().map(|spec| spec.memory_mib).sum::<u32>();
    let whole = shape.vms.iter().all(|spec| spec.memory_mib.is_multiple_of(HUGE_MIB));
    ensure!(whole && huge_mib.is_multiple_of(HUGE_MIB), "the RAM size is not a multiple of the huge page size");
    config.memory_mib += huge_mib;
    // Use one thread per CPU only for the stock driver, which is too slow with a single thread. With one thread per
    // CPU, two of five machines failed.
    let wants_threads = shape.vms.iter().any(|spec| !spec.paravirtual);
    let threads = if wants_threads { images::ensure_svm(&images::Progress::stderr())? } else { None };
    match threads {
        Some(qemu) => (config.qemu, config.accel, config.smp) = (qemu, Accel::TcgWithSvm { threads: true }, 2),
        None => (config.accel, config.smp) = (Accel::TcgWithSvm { threads: false }, 1),
    }
    config.append = format!("hugepages={} 8250.nr_uarts=8", huge_mib / HUGE_MIB);
    if shape.vms.is_empty() {
        return Ok(Vec::new());
    }
    let mut card = format!("pci-serial-{LINES}x");
    let mut listeners = Vec::new();
    for line in 1..=LINES {
        let path = folder.join(format!("line{line}"));
        listeners.push(vm::listen(&path)?);
        config.extra_args.push("-chardev".to_owned());
        config.extra_args.push(format!("socket,id=line{line},path={},server=off", path.display()));
        card.push_str(&format!(",chardev{line}=line{line}"));
    }
    config.extra_args.extend(["-device".to_owned(), card]);
    Ok(listeners)
}

impl Nest {
    /// Starts a VM without waiting for its guest (see [`InnerVm::wait_ready`]).
    pub fn launch(&self, name: &str) -> Result<InnerVm<'_>> {
        let line = self.specs.iter().position(|spec| spec.name == name).context("no VM of that name")?;
        let (spec, agent) = self.specs.get(line).zip(self.agents.get(line)).context("no line")?;
        let boots = agent.boots() + 1;
        let command = [self.qemu.clone(), spec.words(line)].concat().join(" ");
        self.say(&format!("VM {name} starts"));
        let process = self.vm.start(&format!("run {command}"))?;
        Ok(InnerVm { machine: self, name: name.to_owned(), agent, process, boots })
    }

    /// Runs `mediatorctl vm show` in the machine for a VM.
    pub fn show(&self, name: &str) -> Result<Value> {
        let command = format!("run /bin/mediatorctl --socket {} --json vm show {name}", super::ADMIN_SOCKET);
        let text = self.vm.run_ok(&command)?.text();
        serde_json::from_str(&text).with_context(|| format!("vm show {name} did not print JSON:\n{text}"))
    }

    /// Waits until the daemon in the machine reports a VM in the given state.
    pub fn wait_state(&self, name: &str, state: &str) -> Result<Value> {
        wait::until(&format!("VM {name} to be {state}"), COMMAND_LIMIT, || {
            let shown = self.show(name)?;
            Ok((shown["state"] == state).then_some(shown))
        })
    }
}

/// A VM running in a machine.
pub struct InnerVm<'a> {
    machine: &'a Nest,
    /// Name of the VM.
    pub name: String,
    agent: &'a Agent,
    process: Pending<'a>,
    boots: u32,
}

impl<'a> InnerVm<'a> {
    /// Waits for the guest's init. Returns the release of the guest's kernel.
    pub fn wait_ready(&self) -> Result<String> {
        let deadline = Instant::now() + wait::scaled(BOOT_LIMIT);
        loop {
            match self.agent.wait_boots(self.boots, Duration::from_secs(1)) {
                Ok(release) => {
                    self.machine.say(&format!("VM {}: Linux {release} is up", self.name));
                    return Ok(release);
                }
                Err(error) if self.process.ended() || Instant::now() >= deadline => return Err(self.explain(error)),
                Err(_) => self.machine.vm.ensure_healthy()?,
            }
        }
    }

    /// Runs a command in the guest. Treats a nonzero exit code as an error.
    pub fn ok(&self, command: &str, limit: Duration) -> Result<Output> {
        let ran = self.agent.run_within(command, limit).and_then(Output::success);
        ran.map_err(|error| self.explain(error)).with_context(|| format!("VM {}: {command}", self.name))
    }

    /// Starts a command in the guest that runs concurrently with other commands.
    pub fn start(&self, command: &str) -> Result<Pending<'a>> {
        self.agent.start(command)
    }

    /// Loads the driver and waits for its render node.
    pub fn load_driver(&self) -> Result<()> {
        self.ok("load", COMMAND_LIMIT)?;
        let nodes = self.ok("nodes", guest::LOAD_LIMIT)?.text();
        if !nodes.contains("renderD128") {
            let log = self.agent.run("dmesg")?.text();
            let shown = self.machine.show(&self.name)?;
            let error =
                anyhow!("VM {}: nouveau created no render node: {nodes}\n{log}\nthe daemon says: {shown}", self.name);
            return Err(self.explain(error));
        }
        let interrupts = self.ok("interrupts", guest::LOAD_LIMIT)?.text();
        let line = interrupts.lines().find(|line| line.contains("nvkm") || line.contains("nouveau")).unwrap_or("none");
        self.machine.say(&format!("VM {}: nouveau is up, interrupt: {}", self.name, line.trim()));
        Ok(())
    }

    /// Runs `gpu-workloads` with `args` to completion. Fails unless every result was verified.
    pub fn smoke(&self, args: &str) -> Result<Smoke> {
        self.finish(self.start(&format!("run /bin/gpu-workloads {args}"))?, args)
    }

    /// Waits for a running workload, and fails unless every result was verified.
    pub fn finish(&self, pending: Pending<'_>, args: &str) -> Result<Smoke> {
        let output = pending.wait_within(COMMAND_LIMIT).map_err(|error| self.explain(error))?;
        let smoke = guest::parse_smoke(&output)?;
        if !smoke.ok {
            let log = self.agent.run("dmesg").map(|log| log.text()).unwrap_or_default();
            bail!("VM {}: {args}: {}\n{}\n{log}", self.name, smoke.line, output.text());
        }
        self.machine.say(&format!("VM {}: {args}: {}", self.name, smoke.line));
        Ok(smoke)
    }

    /// Reboots the guest cleanly, without waiting for it (see [`InnerVm::wait_ready`]).
    pub fn reboot(&mut self) -> Result<()> {
        self.boots = self.agent.boots() + 1;
        self.machine.say(&format!("VM {} reboots", self.name));
        self.agent.send("reboot").map(drop)
    }

    /// Kills the VM's QEMU, as the OOM killer would, and waits until it has exited.
    pub fn kill(self) -> Result<()> {
        self.machine.say(&format!("VM {} is killed", self.name));
        self.process.kill()?;
        self.process.wait_within(COMMAND_LIMIT).map(drop)
    }

    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let console = self.machine.vm.run(&format!("cat /run/{}.console", self.name));
        let console = console.map(|output| output.lines).unwrap_or_default();
        let end = console.split_at(console.len().saturating_sub(40)).1.join("\n");
        let outside = self.machine.vm.console();
        let outside: Vec<&str> = outside.lines().collect();
        let outside = outside.split_at(outside.len().saturating_sub(40)).1.join("\n");
        let ended = if self.process.ended() { "has ended" } else { "runs" };
        let said = self.process.lines().join("\n");
        error.context(format!("VM {}: its QEMU {ended}:\n{said}\nits console ends with:\n{end}\nthe machine's console ends with:\n{outside}", self.name))
    }
}
