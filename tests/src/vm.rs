//! A virtual machine: QEMU, a stock kernel, our init, and optionally a vGPU.

use std::fs::{self, File};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use images::{Images, Kernel, Qemu};
use serde_json::{Value, json};

use crate::accel::Accel;
use crate::agent::{Agent, Health, Output, Pending};
use crate::children;
use crate::klog;
use crate::qmp::Qmp;
use crate::wait::{self, Scratch};

/// CPU features to disable for Xen. Xen panics on QEMU's monitor instructions, and programs in domain 0 occasionally
/// lose the contents of wide vector registers, which their memory functions use.
const XEN_LACKS: &str = ",-monitor,-xsave,-xsaveopt,-xsavec,-xgetbv1,-avx,-avx2,-fma,-f16c";

/// Time limit for QEMU's sockets to be ready.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Time limit from a guest's reset to the start of its init.
const BOOT_LIMIT: Duration = Duration::from_secs(240);
/// Time limit for a guest to release a device.
const UNPLUG_LIMIT: Duration = Duration::from_secs(120);
/// Name of the port for hot-plugged devices.
const PORT: &str = "rp0";
/// Name of the vGPU in QEMU.
pub const GPU: &str = "gpu0";

/// Description of a VM.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// Name, used in messages and file names.
    pub name: String,
    /// The QEMU to use.
    pub qemu: Qemu,
    /// CPU accelerator.
    pub accel: Accel,
    /// Kernel and initramfs of the guest.
    pub kernel: Kernel,
    /// Guest RAM in MiB.
    pub memory_mib: u32,
    /// Number of CPUs.
    pub smp: u32,
    /// vfio-user socket of the vGPU, if the VM has one.
    pub gpu: Option<PathBuf>,
    /// True if guest RAM is shared with the mediator, as required. Tests clear it to check that the mediator detects
    /// private RAM.
    pub share: bool,
    /// True if the VM has a hot-plug port, to which the vGPU is then connected.
    pub hotplug: bool,
    /// True if the VM has an IOMMU that the guest kernel uses.
    pub iommu: bool,
    /// Hypervisor to boot, with the guest kernel as domain 0.
    pub xen: Option<Xen>,
    /// Additional QEMU arguments.
    pub extra_args: Vec<String>,
    /// Additional parameters on the kernel command line.
    pub append: String,
}

impl VmConfig {
    /// Returns the configuration of a VM with 512 MiB of RAM, one CPU and no vGPU, which boots the kernel `kernel`.
    pub fn new(name: &str, images: &Images, kernel: &str) -> Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            qemu: images.qemu.clone(),
            accel: Accel::detect(images)?,
            kernel: images.kernel(kernel)?.clone(),
            memory_mib: 512,
            smp: 1,
            gpu: None,
            share: true,
            hotplug: false,
            iommu: false,
            xen: None,
            extra_args: Vec::new(),
            append: String::new(),
        })
    }

    /// Adds the vGPU served at `socket`.
    pub fn with_gpu(mut self, socket: impl Into<PathBuf>) -> Self {
        self.gpu = Some(socket.into());
        self
    }

    /// Replaces the stock driver with the paravirtual driver. Builds the latter if it is missing.
    pub fn paravirtual(mut self) -> Result<Self> {
        self.kernel = crate::paravirtual_kernel(&self.kernel.name)?;
        Ok(self)
    }

    /// Returns the QEMU command. Sockets and logs are placed in `folder`.
    fn command(&self, folder: &Path) -> Command {
        let mut command = self.qemu.command();
        let size = format!("{}M", self.memory_mib);
        let share = if self.share { "on" } else { "off" };
        command.args(["-name", &self.name, "-M", "q35", "-smp", &self.smp.to_string(), "-m", &size]);
        let [accel_word, accel, processor_word, processor] = self.accel.args();
        let lacks = if self.xen.is_some() { XEN_LACKS } else { "" };
        command.args([accel_word, accel, processor_word, &format!("{processor}{lacks}")]);
        command.arg("-object").arg(format!("memory-backend-memfd,id=m0,size={size},share={share}"));
        command.args(["-machine", "memory-backend=m0"]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-vga", "none", "-monitor", "none"]);
        let at = |name: &str| folder.join(name).display().to_string();
        command.arg("-chardev").arg(format!("file,id=console,path={}", at("console.log")));
        command.arg("-chardev").arg(format!("socket,id=agent,path={},server=off", at("agent.sock")));
        command.arg("-chardev").arg(format!("socket,id=qmp,path={},server=off", at("qmp.sock")));
        command.args(["-serial", "chardev:console", "-serial", "chardev:agent", "-mon", "chardev=qmp,mode=control"]);
        if let Some(xen) = &self.xen {
            xen.boot(&self.kernel, &self.append, &mut command);
            return self.devices(command);
        }
        command.arg("-kernel").arg(&self.kernel.vmlinuz).arg("-initrd").arg(&self.kernel.initrd);
        // Keep a panicked guest running, so that its console shows the reason. Disable the kernel's timer check, which
        // mistakes a busy host for broken hardware.
        let iommu = if self.iommu { "intel_iommu=on iommu=nopt " } else { "" };
        command.arg("-append").arg(format!("console=ttyS0 no_timer_check panic=0 loglevel=7 {iommu}{}", self.append));
        self.devices(command)
    }

    /// Adds the device arguments.
    fn devices(&self, mut command: Command) -> Command {
        if self.iommu {
            // The IOMMU must precede all devices behind it.
            command.args(["-device", "intel-iommu,caching-mode=on,intremap=on"]);
        }
        if self.hotplug {
            // Reserve address space for the BARs of hot-plugged devices.
            let port = format!("pcie-root-port,id={PORT},chassis=1,slot=1,pref64-reserve=512M,mem-reserve=64M");
            command.arg("-device").arg(port);
        }
        if let Some(socket) = &self.gpu {
            command.arg("-device").arg(gpu_device(socket, self.hotplug).to_string());
        }
        command.args(&self.extra_args);
        command
    }
}

/// A hypervisor that boots before the guest kernel.
#[derive(Clone, Debug)]
pub struct Xen {
    /// Path of the hypervisor image.
    pub image: PathBuf,
    /// Memory of domain 0 in MiB. The remaining memory is for other domains.
    pub dom0_mib: u32,
}

impl Xen {
    /// Makes QEMU boot the hypervisor with `kernel` as domain 0.
    fn boot(&self, kernel: &Kernel, append: &str, command: &mut Command) {
        let memory = self.dom0_mib;
        command.arg("-kernel").arg(&self.image);
        // Include the domains' output in Xen's log. Disable idle states, which QEMU does not emulate.
        let words = format!(
            "com1=115200,8n1 console=com1 dom0_mem={memory}M,max:{memory}M cpuidle=off sched_ratelimit_us=0 guest_loglvl=all"
        );
        command.arg("-append").arg(words);
        let (vmlinuz, initrd) = (kernel.vmlinuz.display(), kernel.initrd.display());
        command
            .arg("-initrd")
            .arg(format!("{vmlinuz} console=hvc0 8250.nr_uarts=8 panic=0 loglevel=7 {append},{initrd}"));
    }
}

/// Returns QEMU's description of a vfio-user device for `socket`. QEMU accepts socket addresses only in JSON.
pub fn gpu_device(socket: &Path, hotplug: bool) -> Value {
    let mut device = json!({
        "driver": "vfio-user-pci",
        "id": GPU,
        "rombar": 0,
        "socket": {"type": "unix", "path": socket},
    });
    if hotplug {
        device["bus"] = PORT.into();
    }
    device
}

/// A running virtual machine, which is killed on drop.
pub struct Vm {
    config: VmConfig,
    process: Arc<Mutex<Child>>,
    agent: Agent,
    qmp: Mutex<Qmp>,
    boots: Mutex<u32>,
    scratch: Scratch,
}

impl Vm {
    /// Starts a VM, and waits until QEMU is running, but not until the guest has booted (see [`Vm::wait_ready`]).
    pub fn launch(config: &VmConfig) -> Result<Self> {
        Self::try_launch(config).with_context(|| format!("VM {}", config.name))
    }

    fn try_launch(config: &VmConfig) -> Result<Self> {
        let scratch = Scratch::new(&config.name)?;
        let folder = scratch.path();
        // QEMU connects to both sockets, so that early guest output is not lost.
        let agent = listen(&folder.join("agent.sock"))?;
        let qmp = listen(&folder.join("qmp.sock"))?;
        let log = folder.join("qemu.log");
        let output = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let mut command = config.command(folder);
        let errors = output.try_clone().context("QEMU's log")?;
        let child = children::spawn(command.stdin(Stdio::null()).stdout(output).stderr(errors));
        let child = child.with_context(|| format!("cannot start {}", config.qemu.program.display()))?;
        let guard = KillOnDrop(Arc::new(Mutex::new(child)));
        let health: Health = {
            let (process, folder) = (Arc::clone(&guard.0), folder.to_owned());
            Arc::new(move || health(&process, &folder))
        };
        let agent = Agent::new(accept(&agent, "QEMU's agent line", &health)?, Arc::clone(&health))?;
        let qmp = Qmp::new(accept(&qmp, "QEMU's machine protocol", &health)?);
        let qmp = qmp.or_else(|error| health().and(Err(error)))?;
        let process = Arc::clone(&guard.0);
        std::mem::forget(guard);
        let config = config.clone();
        Ok(Self { config, process, agent, qmp: Mutex::new(qmp), boots: Mutex::new(1), scratch })
    }

    /// Returns the VM's name.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Returns the VM's configuration.
    pub fn config(&self) -> &VmConfig {
        &self.config
    }

    /// Returns the agent in the guest.
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Waits until the guest has booted after the last launch, reset or reboot. Returns its kernel release.
    pub fn wait_ready(&self) -> Result<String> {
        let boots = *lock(&self.boots);
        self.agent.wait_boots(boots, BOOT_LIMIT).map_err(|e| self.explain(e))
    }

    /// Runs a command in the guest to completion. Does not check the exit code.
    pub fn run(&self, command: &str) -> Result<Output> {
        self.agent.run(command).map_err(|e| self.explain(e))
    }

    /// Runs a command like [`Vm::run`], but with time limit `limit`.
    pub fn run_within(&self, command: &str, limit: Duration) -> Result<Output> {
        self.agent.run_within(command, limit).map_err(|e| self.explain(e))
    }

    /// Runs a command in the guest. Treats a nonzero exit code as an error, which contains the output.
    pub fn run_ok(&self, command: &str) -> Result<Output> {
        self.run(command)?.success().with_context(|| format!("VM {}: {command}", self.name()))
    }

    /// Returns the complete log of the guest kernel since its last boot.
    pub fn kernel_log(&self) -> Result<Vec<klog::Line>> {
        Ok(klog::parse(&self.run_ok("dmesg")?.lines))
    }

    /// Starts a command in the guest that runs concurrently with other commands.
    pub fn start(&self, command: &str) -> Result<Pending<'_>> {
        self.agent.start(command).map_err(|e| self.explain(e))
    }

    /// Executes a QMP command.
    pub fn qmp(&self, command: &str, arguments: Value) -> Result<Value> {
        let result = lock(&self.qmp).execute(command, arguments);
        result.map_err(|e| self.explain(e))
    }

    /// Plugs the vGPU served at `socket` into the hot-plug port.
    pub fn device_add(&self, socket: &Path) -> Result<()> {
        self.qmp("device_add", gpu_device(socket, true)).map(drop)
    }

    /// Unplugs the vGPU and waits until the guest has released it.
    pub fn device_del(&self) -> Result<()> {
        let mut qmp = lock(&self.qmp);
        qmp.forget_events();
        let result = qmp
            .execute("device_del", json!({"id": GPU}))
            .and_then(|_| qmp.wait_event("DEVICE_DELETED", UNPLUG_LIMIT, |data| data["device"] == GPU));
        drop(qmp);
        result.map(drop).map_err(|e| self.explain(e))
    }

    /// Resets the machine as a reset button does, without waiting for the guest (see [`Vm::wait_ready`]).
    pub fn reset(&self) -> Result<()> {
        self.expect_boot();
        self.qmp("system_reset", json!({})).map(drop)
    }

    /// Reboots the guest cleanly, without waiting for it (see [`Vm::wait_ready`]).
    pub fn reboot(&self) -> Result<()> {
        self.expect_boot();
        // Do not wait for a reply, because the guest may already have shut down or restarted.
        self.agent.send("reboot").map(drop).map_err(|e| self.explain(e))
    }

    fn expect_boot(&self) {
        *lock(&self.boots) = self.agent.boots() + 1;
    }

    /// Kills QEMU with SIGKILL, as the OOM killer would, and waits until it has exited.
    pub fn kill(&self) -> Result<()> {
        kill(&self.process)
    }

    /// Returns true if QEMU is running.
    pub fn alive(&self) -> bool {
        matches!(lock(&self.process).try_wait(), Ok(None))
    }

    /// Fails if QEMU has exited or the guest kernel has panicked. The error contains the last lines of both logs.
    pub fn ensure_healthy(&self) -> Result<()> {
        health(&self.process, self.folder()).with_context(|| format!("VM {}", self.name()))
    }

    /// Waits until QEMU exits by itself, for example after `poweroff` in the guest.
    pub fn wait_exit(&self, limit: Duration) -> Result<ExitStatus> {
        let ended = wait::until("QEMU to end", limit, || Ok(lock(&self.process).try_wait()?));
        ended.map_err(|e| self.explain(e))
    }

    /// Returns QEMU's process ID.
    pub fn pid(&self) -> u32 {
        lock(&self.process).id()
    }

    /// Returns the guest kernel's console output so far.
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.folder().join("console.log")).unwrap_or_default()).into_owned()
    }

    /// Returns QEMU's own output so far.
    pub fn qemu_log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.folder().join("qemu.log")).unwrap_or_default()).into_owned()
    }

    /// Returns a health check of QEMU and the guest kernel, for agents on other serial lines.
    pub(crate) fn health(&self) -> Health {
        let (process, folder) = (Arc::clone(&self.process), self.folder().to_owned());
        Arc::new(move || health(&process, &folder))
    }

    /// Returns the folder with the VM's logs and sockets.
    pub fn folder(&self) -> &Path {
        self.scratch.path()
    }

    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let shown = error.to_string().contains("the end of console.log");
        let tails =
            [wait::tail(&self.folder().join("console.log")), wait::tail(&self.folder().join("qemu.log"))].concat();
        let text = if shown { String::new() } else { format!("\n{tails}") };
        anyhow!("VM {}: {error:#}{text}", self.name())
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // An error means that the process has already exited.
        let _ = self.kill();
    }
}

struct KillOnDrop(Arc<Mutex<Child>>);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = kill(&self.0);
    }
}

fn kill(process: &Mutex<Child>) -> Result<()> {
    let mut child = lock(process);
    if child.try_wait()?.is_none() {
        child.kill().context("cannot kill QEMU")?;
        child.wait().context("cannot wait for QEMU")?;
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Fails if QEMU has exited or the guest kernel has panicked.
fn health(process: &Mutex<Child>, folder: &Path) -> Result<()> {
    let (console, log) = (folder.join("console.log"), folder.join("qemu.log"));
    if let Some(status) = lock(process).try_wait().context("cannot query QEMU's state")? {
        bail!("QEMU has exited ({status})\n{}{}", wait::tail(&log), wait::tail(&console));
    }
    let bytes = fs::read(&console).unwrap_or_default();
    if bytes.windows(12).any(|w| w == b"Kernel panic") {
        bail!("the guest kernel panicked\n{}", wait::tail(&console));
    }
    Ok(())
}

/// Creates a non-blocking listener for a socket to which QEMU connects.
pub(crate) fn listen(path: &Path) -> Result<UnixListener> {
    let listener = UnixListener::bind(path).with_context(|| format!("cannot listen on {}", path.display()))?;
    listener.set_nonblocking(true).context("socket mode")?;
    Ok(listener)
}

/// Waits until QEMU connects to a listener.
pub(crate) fn accept(listener: &UnixListener, what: &str, health: &Health) -> Result<UnixStream> {
    let stream = wait::until(what, START_LIMIT, || match listener.accept() {
        Ok((stream, _)) => Ok(Some(stream)),
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => health().map(|()| None),
        Err(e) => Err(e).with_context(|| format!("accepting {what}")),
    })?;
    stream.set_nonblocking(false).context("socket mode")?;
    Ok(stream)
}
