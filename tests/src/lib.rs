//! End-to-end tests with real VMMs and guests: the harness shared by tests, the demo and benchmarks.
//!
//! Parts:
//! - [`vm`]: a QEMU process with a stock kernel; [`agent`] sends commands to the guest's init, and [`qmp`] to QEMU
//! - [`daemon`]: runs `mediatord` and `mediatorctl` as an operator would
//! - [`accel`]: starts a guest to detect whether KVM works
//! - [`children`]: child processes that end with this process
//! - [`guest`]: steps shared by most tests: configuration, driver, workload
//! - [`many_vms`]: VMs that share a card; [`contention`]: each VM's share of the card's time
//! - [`host`]: a Debian host with systemd, for the package; [`debian`]: a host in namespaces, with workload managers
//! - [`toolbox`]: programs that check packages, manifests and scripts
//! - [`files`]: files to add to a machine before it boots
//! - [`nest`]: a machine with a card behind an IOMMU and with its own VMs
//! - [`xen`]: a Xen host, and domains with vGPUs
//! - [`holdings`]: resources of a process, for detecting leaks
//! - [`http`]: requests to a daemon's API or monitoring port
//! - [`pages`]: code blocks in operators' pages
//! - [`scale`]: selection of small or full workloads
//! - [`klog`]: a guest's kernel log, by level
//! - [`wait`]: functions that wait with a time limit, create scratch folders, or return the last lines of logs
//!
//! An example of a test:
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! let images = images::ensure(&images::Progress::stderr())?;
//! let vm = tests::Vm::launch(&tests::VmConfig::new("a", &images, "6.12")?)?;
//! vm.wait_ready()?;
//! assert_eq!(vm.run("cat /proc/sys/kernel/ostype")?.lines, ["Linux"]);
//! # Ok(())
//! # }
//! ```
//!
//! This crate builds neither images (see the `images` crate) nor binaries (xtask builds them and sets
//! `GPU_MEDIATOR_BIN_DIR`).
//!
//! Environment variables: `GPU_MEDIATOR_BIN_DIR` (folder that contains `mediatord`), `GPU_MEDIATOR_ACCEL` (`kvm` or
//! `tcg`), `GPU_MEDIATOR_KEEP` (keeps logs and sockets), `GPU_MEDIATOR_TIME_SCALE` (multiplies every time limit),
//! `GPU_MEDIATOR_FULL` (selects full workloads).
//!
//! Sources: QEMU's `qmp-spec` and `qemu-system-x86_64(1)`.

pub mod accel;
pub mod agent;
pub mod children;
pub mod contention;
pub mod daemon;
pub mod debian;
pub mod files;
pub mod guest;
pub mod holdings;
pub mod host;
pub mod http;
pub mod klog;
pub mod many_vms;
pub mod nest;
pub mod pages;
mod process;
pub mod qmp;
pub mod rogues;
pub mod scale;
pub mod toolbox;
pub mod vm;
pub mod wait;
pub mod xen;

pub use accel::Accel;
pub use agent::{Agent, Output, Pending};
pub use daemon::{Daemon, Paths};
pub use debian::Debian;
pub use host::Host;
pub use nest::Nest;
pub use vm::{Vm, VmConfig};

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use anyhow::{Result, anyhow};
use images::{Images, Kernel, Monitoring, Progress};

/// Returns the images. A process creates them at most once, and prints progress to standard error.
pub fn images() -> Result<&'static Images> {
    static IMAGES: OnceLock<Result<Images, String>> = OnceLock::new();
    let made = IMAGES.get_or_init(|| images::ensure(&Progress::stderr()).map_err(|e| format!("{e:#}")));
    made.as_ref().map_err(|e| anyhow!("{e}"))
}

/// Returns Prometheus and its proxy. Creates them if they are missing.
pub fn monitoring() -> Result<Monitoring> {
    images::ensure_monitoring(&Progress::stderr(), false)
}

/// Returns the kernel `name` with the paravirtual driver. A process creates it at most once.
pub fn paravirtual_kernel(name: &str) -> Result<Kernel> {
    static KERNELS: Mutex<BTreeMap<String, Kernel>> = Mutex::new(BTreeMap::new());
    let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(kernel) = kernels.get(name) {
        return Ok(kernel.clone());
    }
    let kernel = images::ensure_paravirtual(name, &Progress::stderr())?;
    kernels.insert(name.to_owned(), kernel.clone());
    Ok(kernel)
}
