//! Creates the files with which tests boot guests: a QEMU with `vfio-user-pci`, stock Debian kernels, and an initramfs.
//!
//! The parts:
//! - [`recipe`]: the requested images (`manifest.toml` next to this crate), and the record of their resolution;
//! - [`mirror`]: the host's source of Debian packages;
//! - [`apt`]: a private apt state, verified against the archive keyring, that never changes the system's apt;
//! - [`qemu`]: the host's QEMU if it is new enough, or an unpacked QEMU run by its own dynamic loader;
//! - [`kernel`] and [`modinfo`]: `vmlinuz` and the modules that the GPU driver needs, in load order;
//! - [`unpacked`]: packages unpacked into a root folder for programs, such as the tools that check our packages;
//! - [`browser`]: a browser, for the tests of the daemon's page;
//! - [`monitoring`]: Prometheus and a proxy, for the tests of a daemon's metrics;
//! - [`pv`], [`hooks`] and [`kbuild`]: the paravirtual modules, which are our module and the driver with hooks that
//!   call it;
//! - [`system`]: a Debian system with systemd, on which the Debian package is installed, and a system with cluster
//!   software;
//! - [`xen`]: a Xen host: the hypervisor and domain 0;
//! - [`svm`]: a QEMU for machines that run VMs;
//! - `cuda_guest`: a guest with the stock driver of virtio-gpu;
//! - [`nest`]: a machine with VFIO, KVM and QEMU, which runs other machines; [`libraries`]: the libraries that a
//!   program loads;
//! - [`initramfs`] and [`cpio`]: the archive with our init, our test programs and the modules;
//! - [`cache`], [`exec`], [`progress`]: the cache folder and its lock, child processes, and messages for the user.
//!
//! All items are stored in one cache folder (`.cache` in the workspace, or `GPU_MEDIATOR_CACHE`). Each item has a
//! folder named after a hash of the item's inputs. Existing items are not recreated. If all items exist, the crate does
//! not use the network.
//!
//! The crate does not install packages or need root privileges. It supports only x86-64.
//!
//! Environment: `GPU_MEDIATOR_CACHE` (cache folder), `GPU_MEDIATOR_DEBIAN_MIRROR` and
//! `GPU_MEDIATOR_DEBIAN_SECURITY_MIRROR` (archive URIs), `GPU_MEDIATOR_QEMU` (a QEMU binary to use unchanged).
//!
//! Sources: the formats are described in `apt.conf(5)`, `sources.list(5)`, `deb822(5)` and the kernel's
//! `Documentation/driver-api/early-userspace/buffer-format.rst`.

pub mod apt;
pub mod browser;
pub mod cache;
pub mod cpio;
mod cuda_guest;
pub mod exec;
pub mod hooks;
pub mod initramfs;
pub mod kbuild;
pub mod kernel;
pub mod libraries;
pub mod mirror;
pub mod modinfo;
pub mod monitoring;
pub mod nest;
pub mod progress;
pub mod pv;
pub mod qemu;
pub mod recipe;
pub mod svm;
pub mod system;
pub mod unpacked;
pub mod xen;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

pub use cuda_guest::CudaGuest;
pub use monitoring::Monitoring;
pub use nest::Nest;
pub use progress::Progress;
pub use qemu::Qemu;
pub use system::System;
pub use xen::XenHost;

use cache::Cache;
use initramfs::Program;
use kernel::{Unpacked, Wanted};
use recipe::{KernelRecipe, Manifest, Record};

/// One guest kernel, ready to boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Short name with which tests request it, such as `6.12`.
    pub name: String,
    /// Release as `uname -r` prints it in the guest.
    pub release: String,
    /// Path of the kernel image.
    pub vmlinuz: PathBuf,
    /// Path of the initramfs for this kernel (uncompressed cpio).
    pub initrd: PathBuf,
}

/// Name of the system with cluster software, in the record of created items.
const FLEET: &str = "fleet";

/// The VMM and the kernels that guests need.
#[derive(Clone, Debug)]
pub struct Images {
    /// The VMM.
    pub qemu: Qemu,
    /// The kernels, in the order of the manifest.
    pub kernels: Vec<Kernel>,
}

impl Images {
    /// Returns the kernel called `name` in the manifest. The error lists the existing names.
    pub fn kernel(&self, name: &str) -> Result<&Kernel> {
        match self.kernels.iter().find(|k| k.name == name) {
            Some(kernel) => Ok(kernel),
            None => {
                let known: Vec<_> = self.kernels.iter().map(|k| k.name.as_str()).collect();
                bail!("no guest kernel is called {name:?}; images/manifest.toml has {}", known.join(", "))
            }
        }
    }
}

/// Creates the missing images, and returns the paths of all images.
///
/// Several processes can call this function concurrently: one creates the images, and the others wait. An error names
/// the missing package or setting.
pub fn ensure(progress: &Progress) -> Result<Images> {
    ensure_with(progress, false)
}

/// Works like [`ensure`], but resolves the package versions again if `refresh` is true, even if older versions are in
/// the cache.
pub fn ensure_with(progress: &Progress, refresh: bool) -> Result<Images> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        bail!("the guests are x86-64 Linux machines; this host is not one, and no cross recipe exists");
    }
    let manifest = Manifest::load().context("images/manifest.toml")?;
    let cache = Cache::open(progress)?;
    let mut record = if refresh { Record::default() } else { cache.load_record() };

    let qemu = qemu::ensure(&manifest.qemu, &cache, &mut record, progress)?;
    let mut unpacked = Vec::new();
    for recipe in &manifest.kernels {
        let kernel = kernel_of(recipe, &manifest, &cache, &mut record, progress)
            .with_context(|| format!("guest kernel {}", recipe.name))?;
        unpacked.push(kernel);
    }
    let programs = guest_programs(&manifest, progress)?;
    let mut kernels = Vec::new();
    let mut initramfs = Vec::new();
    for kernel in unpacked {
        // Keep the initramfs of an existing paravirtual kernel. Otherwise, every run for the stock kernel would remove
        // it.
        if let Some(hooked) = pv::find(&kernel, &cache)? {
            initramfs.push(initramfs::key_of(&hooked, &programs)?);
        }
        initramfs.push(initramfs::key_of(&kernel, &programs)?);
        kernels.push(bootable(kernel, &programs, &cache, progress)?);
    }
    cache.store_record(&record)?;
    let made = |m: &recipe::Made| m.key.clone();
    let wanted: Vec<_> = record.qemu.iter().chain(record.kernels.values()).map(made).collect();
    let wanted: Vec<_> = wanted.iter().map(String::as_str).collect();
    cache.prune("qemu", &wanted)?;
    cache.prune("kernel", &wanted)?;
    let wanted: Vec<_> = record.paravirtual.values().map(|m| m.key.as_str()).collect();
    cache.prune("pv", &wanted)?;
    for (name, made) in [("system", &record.system), (FLEET, &record.fleet), ("xen", &record.xen)] {
        let wanted: Vec<_> = made.iter().map(|m| m.key.as_str()).collect();
        cache.prune(name, &wanted)?;
    }
    cache.prune("initramfs", &initramfs.iter().map(String::as_str).collect::<Vec<_>>())?;
    Ok(Images { qemu, kernels })
}

/// Calls [`ensure_with`], and also creates all other files that tests boot or start. Excludes the images of suites that
/// run only on request, because these suites create their own images.
pub fn ensure_all(progress: &Progress, refresh: bool) -> Result<Images> {
    let images = ensure_with(progress, refresh)?;
    for kernel in &images.kernels {
        ensure_paravirtual(&kernel.name, progress)?;
    }
    ensure_monitoring(progress, refresh)?;
    ensure_system(progress)?;
    ensure_fleet(progress)?;
    ensure_browser(progress)?;
    ensure_checkers(progress)?;
    ensure_nest(progress)?;
    for kernel in &images.kernels {
        ensure_cuda_guest(&kernel.name, progress)?;
    }
    Ok(images)
}

/// Works like [`ensure`] for the kernel called `name`, but with the paravirtual driver instead of the stock driver. The
/// modules are built from the kernel's sources, which takes minutes the first time.
pub fn ensure_paravirtual(name: &str, progress: &Progress) -> Result<Kernel> {
    let manifest = Manifest::load().context("images/manifest.toml")?;
    let cache = Cache::open(progress)?;
    let mut record = cache.load_record();
    let recipe = manifest.kernels.iter().find(|recipe| recipe.name == name);
    let recipe = recipe.with_context(|| format!("no guest kernel is called {name:?}"))?;
    let kernel =
        kernel_of(recipe, &manifest, &cache, &mut record, progress).with_context(|| format!("guest kernel {name}"))?;
    let hooked = pv::ensure(&kernel, (recipe, &manifest.paravirtual), &cache, &mut record, progress)
        .with_context(|| format!("paravirtual modules for kernel {name}"))?;
    cache.store_record(&record)?;
    bootable(hooked, &guest_programs(&manifest, progress)?, &cache, progress)
}

/// Creates the missing programs of a monitoring host, with `refresh` as in [`ensure_with`].
pub fn ensure_monitoring(progress: &Progress, refresh: bool) -> Result<Monitoring> {
    let manifest = Manifest::load().context("images/manifest.toml")?;
    let cache = Cache::open(progress)?;
    let mut record = cache.load_record();
    if refresh {
        record.monitoring = None;
    }
    let made = monitoring::ensure(&manifest.monitoring, &cache, &mut record, progress).context("Prometheus")?;
    cache.store_record(&record)?;
    let wanted: Vec<_> = record.monitoring.iter().map(|made| made.key.as_str()).collect();
    cache.prune("monitoring", &wanted)?;
    Ok(made)
}

/// Creates the Debian system with systemd, if it is missing.
pub fn ensure_system(progress: &Progress) -> Result<System> {
    let manifest = Manifest::load().context("images/manifest.toml")?;
    let cache = Cache::open(progress)?;
    let mut record = cache.load_record();
    let recipe = manifest.kernels.iter().find(|recipe| recipe.name == manifest.system.kernel);
    let recipe = recipe.context("images/manifest.toml: no kernel has the name in `system`")?;
    let kernel = kernel_of(recipe, &manifest, &cache, &mut record, progress)?;
    let programs = guest_programs(&manifest, progress)?;
    let agent = programs.into_iter().find(|program| program.guest_path == initramfs::INIT);
    let agent = agent.context("no program is the guests' init")?.path;
    let files = system::ensure("system", &manifest.system.files, &cache, &mut record.system, progress);
    let files = files.context("the Debian system")?;
    cache.store_record(&record)?;
    Ok(System::new(kernel, files, agent))
}

/// Creates the files of a Debian system with cluster software (libvirt, Slurm, podman), if they are missing. Returns an
/// archive for [`cpio::unpack`].
pub fn ensure_fleet(progress: &Progress) -> Result<PathBuf> {
    let manifest = Manifest::load().context("images/manifest.toml")?;
    let cache = Cache::open(progress)?;
    let mut record = cache.load_record();
    let files = system::ensure(FLEET, &manifest.fleet, &cache, &mut record.fleet, progress);
    let files = files.context("the Debian system with cluster software")?;
    cache.store_record(&record)?;
    Ok(files)
}

/// Creates the root folder for [`browser::PROGRAM`] if it is missing.
pub fn ensure_browser(progress: &Progress) -> Result<PathBuf> {
    let manifest = Manifest::load().context("images/manifest.toml")?;
    let cache = Cache::open(progress)?;
    let mut record = cache.load_record();
    let root = unpacked::ensure("browser", &manifest.browser, &cache, &mut record.browser, progress);
    let root = root.context("the browser")?;
    cache.store_record(&record)?;
    let wanted: Vec<_> = record.browser.iter().map(|made| made.key.as_str()).collect();
    cache.prune("browser", &wanted)?;
    Ok(root)
}

/// Creates the root folder for the tools that check packages, manifests and scripts, if it is missing.
pub fn ensure_checkers(progress: &Progress) -> Result<PathBuf> {
    let manifest = Manifest::load().context("images/manifest.toml")?;
    let cache = Cache::open(progress)?;
    let mut record = cache.load_record();
    let root = unpacked::ensure("checkers", &manifest.checkers, &cache, &mut record.checkers, progress);
    let root = root.context("the tools that check packages")?;
    cache.store_record(&record)?;
    let wanted: Vec<_> = record.checkers.iter().map(|made| made.key.as_str()).collect();
    cache.prune("checkers", &wanted)?;
    Ok(root)
}

/// Creates the machine that has a card behind an IOMMU and runs its own VMs. Creates the kernel if it is missing.
pub fn ensure_nest(progress: &Progress) -> Result<Nest> {
    let manifest = Manifest::load().context("images/manifest.toml")?;
    let cache = Cache::open(progress)?;
    let mut record = cache.load_record();
    let recipe = &manifest.nest;
    let kernel = manifest.kernels.iter().find(|kernel| kernel.name == recipe.kernel);
    let kernel = kernel.context("images/manifest.toml: no kernel has the name in `nest`")?;
    let modules: Vec<_> = recipe.modules.iter().map(String::as_str).collect();
    let wanted = Wanted { entry: nest::ENTRY, modules: &modules };
    let kernel = kernel::ensure(kernel, wanted, &cache, &mut record, progress);
    let kernel = kernel.context("the kernel of the machine with VFIO")?;
    let qemu = qemu::ensure(&manifest.qemu, &cache, &mut record, progress)?;
    cache.store_record(&record)?;
    Nest::new(recipe, kernel, guest_programs(&manifest, progress)?, &qemu)
}

/// Creates the guest with the kernel called `name` and the virtio-gpu driver. Creates the kernel if it is missing.
pub fn ensure_cuda_guest(name: &str, progress: &Progress) -> Result<CudaGuest> {
    let manifest = Manifest::load().context("images/manifest.toml")?;
    let cache = Cache::open(progress)?;
    let mut record = cache.load_record();
    let kernel = manifest.kernels.iter().find(|kernel| kernel.name == name);
    let kernel = kernel.with_context(|| format!("no guest kernel is called {name:?}"))?;
    let modules = manifest.cuda_guest.modules.get(name).into_iter().flatten();
    let modules: Vec<_> = modules.map(String::as_str).collect();
    let wanted = Wanted { entry: &cuda_guest::entry(name), modules: &modules };
    let kernel = kernel::ensure(kernel, wanted, &cache, &mut record, progress);
    let kernel = kernel.with_context(|| format!("guest kernel {name} with virtio-gpu"))?;
    cache.store_record(&record)?;
    let recipe = &manifest.cuda_guest;
    Ok(CudaGuest::new(kernel, initramfs::build_programs(&recipe.init, &recipe.programs, progress)?))
}

/// Creates the QEMU for machines that run VMs, with one thread per CPU. Returns `None` if it cannot be created from the
/// QEMU in use.
pub fn ensure_svm(progress: &Progress) -> Result<Option<Qemu>> {
    let manifest = Manifest::load().context("images/manifest.toml")?;
    let cache = Cache::open(progress)?;
    let mut record = cache.load_record();
    let qemu = qemu::ensure(&manifest.qemu, &cache, &mut record, progress)?;
    cache.store_record(&record)?;
    svm::ensure(&qemu, &cache, progress).context("QEMU for machines that run VMs")
}

/// Creates the Xen host. Fetches its packages if they are missing.
pub fn ensure_xen(progress: &Progress) -> Result<XenHost> {
    let manifest = Manifest::load().context("images/manifest.toml")?;
    let cache = Cache::open(progress)?;
    let mut record = cache.load_record();
    let recipe = &manifest.xen;
    let kernel = manifest.kernels.iter().find(|kernel| kernel.name == recipe.kernel);
    let kernel = kernel.context("images/manifest.toml: no kernel has the name in `xen`")?;
    let modules: Vec<_> = recipe.modules.iter().map(String::as_str).collect();
    let wanted = Wanted { entry: xen::ENTRY, modules: &modules };
    let kernel = kernel::ensure(kernel, wanted, &cache, &mut record, progress).context("the kernel of domain 0")?;
    let programs = guest_programs(&manifest, progress)?;
    let host = xen::ensure(recipe, kernel, programs, &cache, &mut record, progress).context("the Xen host")?;
    cache.store_record(&record)?;
    Ok(host)
}

/// Returns the kernel of `recipe` with the card's driver.
fn kernel_of(
    recipe: &KernelRecipe,
    manifest: &Manifest,
    cache: &Cache,
    record: &mut Record,
    progress: &Progress,
) -> Result<Unpacked> {
    let wanted = Wanted { entry: &recipe.name, modules: &[&manifest.initramfs.module] };
    kernel::ensure(recipe, wanted, cache, record, progress)
}

/// Builds the programs for guests with a vGPU.
fn guest_programs(manifest: &Manifest, progress: &Progress) -> Result<Vec<Program>> {
    initramfs::build_programs(&manifest.initramfs.init, &manifest.initramfs.programs, progress)
}

/// Packs the initramfs of a kernel.
fn bootable(kernel: Unpacked, programs: &[Program], cache: &Cache, progress: &Progress) -> Result<Kernel> {
    let initrd = initramfs::ensure(&kernel, programs, cache, progress)
        .with_context(|| format!("initramfs for kernel {}", kernel.name))?;
    Ok(Kernel { name: kernel.name, release: kernel.release, vmlinuz: kernel.vmlinuz, initrd })
}
