//! A Xen host: the hypervisor, and domain 0 in an initramfs with the toolstack and the domains' device model.
//!
//! The packages are unpacked but not installed. Only the programs and files that the manifest names are used, together
//! with the libraries against which the programs are linked. Domain 0 uses our init. The script [`START`] sets up the
//! machine as a Xen host.
//!
//! The host does not have a network, disks, Python, or the parts of the toolstack that need them.
//!
//! Domain 0 uses Debian's libraries. Programs built on this host use its C library, which must not be older than
//! Debian's.
//!
//! Sources: `xl(1)`, `xenstored(8)`, Debian's `/etc/init.d/xen`, the multiboot notes of `docs/misc/` in Xen.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::Kernel;
use crate::apt::{self, Apt, Fetched};
use crate::cache::{Cache, key, remove};
use crate::cpio::Archive;
use crate::exec;
use crate::hooks::{library_folders, loader};
use crate::initramfs::{self, Program};
use crate::kernel::Unpacked;
use crate::libraries;
use crate::progress::{Progress, Step};
use crate::recipe::{Made, Record, Suite, XenRecipe};

/// Version of the recipe. It must be incremented when the recipe's result changes.
const VERSION: &str = "2";
/// Name of the host's kernel in the record of created items.
pub const ENTRY: &str = "xen";
/// Mask of the control register accesses that Xen intercepts in addition to those required by the domain's paging mode:
/// all reads (lower half), and all writes except to CR2 and CR8.
///
/// Since version 9.1, QEMU's emulation treats a read of any control register as a read of CR0. Xen intercepts these
/// reads and emulates the instruction with its own copy of CR2. This copy is not valid, because Xen lets domains read
/// CR2 directly. As a result, every domain's kernel crashes at its first page fault. Reads of CR0 need not be
/// intercepted: a domain sees the CPU's TS bit.
const INTERCEPTED: u32 = 0xfefb_fefb;
/// The bit for reads of CR0 in the mask.
const CR0_READ: u32 = 1;
/// File name of the tools archive in the item's folder.
const ARCHIVE: &str = "tools.cpio";
/// File name of the hypervisor in the item's folder.
const HYPERVISOR: &str = "xen";
/// The folder for libraries in domain 0.
const LIBRARIES: &str = "lib";
/// The script that starts xenstored and sets up domain 0. Domains can be created once it has completed.
pub const START: &str = "etc/xen-start";

const SCRIPT: &str = "#!/bin/busybox sh
export PATH=/bin:/usr/lib/xen-4.17/bin
/bin/busybox --install -s /bin
mkdir -p /dev/pts /run/xen /run/lock /var/lib/xen /var/log/xen
mount -t devpts devpts /dev/pts
mount -t xenfs xenfs /proc/xen
[ -c /dev/xen/privcmd ] || { echo 'this is no domain 0'; exit 1; }
xenstored --pid-file /run/xenstored.pid || exit 1
for try in $(seq 100); do xenstore-list / >/dev/null 2>&1 && break; usleep 100000; done
xen-init-dom0 || exit 1
xenconsoled --pid-file=/run/xenconsoled.pid || exit 1
xl info | grep -E '^(xen_version|xen_caps|virt_caps)'
";

/// A Xen host with the files that boot it.
#[derive(Clone, Debug)]
pub struct XenHost {
    pub(crate) kernel: Unpacked,
    pub(crate) programs: Vec<Program>,
    folder: PathBuf,
    /// Version of the hypervisor package.
    pub version: String,
}

impl XenHost {
    /// Returns the path of the hypervisor image that QEMU boots.
    pub fn hypervisor(&self) -> PathBuf {
        self.folder.join(HYPERVISOR)
    }

    /// Writes domain 0's initramfs, extended by `more`, to the file `initrd`.
    pub fn bootable(&self, more: Archive, initrd: &Path) -> Result<Kernel> {
        let archive = self.folder.join(ARCHIVE);
        let tools = fs::read(&archive).with_context(|| format!("cannot read {}", archive.display()))?;
        // The kernel accepts concatenated archives.
        let all = [initramfs::pack(&self.kernel, &self.programs)?, tools, more.finish()].concat();
        fs::write(initrd, all).with_context(|| format!("cannot write {}", initrd.display()))?;
        let Unpacked { name, release, vmlinuz, .. } = self.kernel.clone();
        Ok(Kernel { name, release, vmlinuz, initrd: initrd.to_owned() })
    }
}

/// Finds or creates the Xen host. Its domain 0 runs `kernel` and `programs`.
pub fn ensure(
    recipe: &XenRecipe,
    kernel: Unpacked,
    programs: Vec<Program>,
    cache: &Cache,
    record: &mut Record,
    progress: &Progress,
) -> Result<XenHost> {
    let version = version(recipe);
    let known = record.xen.as_ref().filter(|made| made.recipe == version).cloned();
    let found = known.and_then(|made| Some((cache.find("xen", &made.key)?, made)));
    let (folder, made) = match found {
        Some(found) => found,
        None => apt::first_of(&recipe.from, |suite| make(recipe, &version, suite, cache, progress))?,
    };
    let package = made.packages.iter().find(|package| package.name == recipe.hypervisor);
    let version = package.map(|package| package.version.clone()).unwrap_or_default();
    record.xen = Some(made);
    Ok(XenHost { kernel, programs, folder, version })
}

/// Returns the version of the item, which depends on the manifest and this recipe.
fn version(recipe: &XenRecipe) -> String {
    let inputs = [&recipe.packages[..], &recipe.programs, &recipe.files].concat();
    let inputs: Vec<_> = inputs.iter().map(String::as_str).chain([SCRIPT]).collect();
    format!("{VERSION}-{}", key(&inputs))
}

fn make(
    recipe: &XenRecipe,
    version: &str,
    suite: &Suite,
    cache: &Cache,
    progress: &Progress,
) -> Result<(PathBuf, Made)> {
    let apt = Apt::open(suite, cache, progress)?;
    let fetched = apt.fetch_closure(&recipe.packages, progress)?;
    let mut inputs = vec![version];
    inputs.extend(fetched.iter().map(|package| package.package.sha256.as_str()));
    let key = key(&inputs);
    let folder = match cache.find("xen", &key) {
        Some(folder) => folder,
        None => cache.make("xen", &key, |folder| {
            let mut step = progress.step(format!("unpacking Xen and the {} packages that it needs", fetched.len()));
            fill(recipe, &fetched, folder, &mut step)
        })?,
    };
    apt.clean()?;
    let packages = fetched.into_iter().map(|package| package.package).collect();
    Ok((folder, Made { recipe: version.to_owned(), key, suite: suite.target().to_owned(), packages }))
}

/// Unpacks the packages, and copies the files that a host needs.
fn fill(recipe: &XenRecipe, packages: &[Fetched], folder: &Path, step: &mut Step<'_>) -> Result<()> {
    let all = folder.join("all");
    fs::create_dir(&all).with_context(|| format!("cannot create {}", all.display()))?;
    packages.iter().try_for_each(|package| apt::unpack(package, &all, step))?;
    let archive = pack(recipe, &all)?;
    fs::write(folder.join(ARCHIVE), archive).context("cannot write the archive of Xen's tools")?;
    fs::write(folder.join(HYPERVISOR), hypervisor(&all.join("boot"), step)?).context("cannot write the hypervisor")?;
    remove(&all)
}

fn pack(recipe: &XenRecipe, root: &Path) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    let mut folders = std::collections::BTreeSet::new();
    let mut names = std::collections::BTreeSet::new();
    let mut add = |name: &str, mode: u32, bytes: &[u8]| {
        for folder in name.match_indices('/').map(|(at, _)| &name[..at]) {
            if folders.insert(folder.to_owned()) {
                archive.folder(folder);
            }
        }
        if names.insert(name.to_owned()) {
            archive.file(name, mode, bytes);
        }
    };
    let mut library_folders = library_folders(root);
    let own = root.join("usr/lib/xen-4.17/lib/x86_64-linux-gnu");
    library_folders.extend(own.is_dir().then_some(own));
    for name in &recipe.programs {
        let path = root.join(name);
        add(name, 0o755, &read(&path)?);
        // Skip busybox, which is statically linked.
        if !is_dynamic(&path)? {
            continue;
        }
        let mut command = Command::new(loader(&library_folders)?);
        command.arg("--library-path").arg(std::env::join_paths(&library_folders).context("library folders")?);
        for library in libraries::list(command.arg(&path)).with_context(|| format!("libraries of {name}"))? {
            let place = match library.is_loader {
                true => format!("lib64/{}", library.file_name()),
                false => format!("{LIBRARIES}/{}", library.file_name()),
            };
            add(&place, 0o755, &read(&library.path)?);
        }
    }
    for name in &recipe.files {
        add(name, 0o644, &read(&root.join(name))?);
    }
    add(START, 0o755, SCRIPT.as_bytes());
    add("etc/xen/xl.conf", 0o644, b"");
    for folder in ["proc/xen", "var", "var/lib", "var/log"] {
        archive.folder(folder);
    }
    // Link each command name to the `xenstore` program.
    for name in ["xenstore-list", "xenstore-read", "xenstore-ls", "xenstore-write"] {
        archive.link(&format!("bin/{name}"), "/usr/bin/xenstore");
    }
    archive.link("var/run", "/run");
    archive.link("var/lock", "/run/lock");
    Ok(archive.finish())
}

/// Returns true if a program requires a dynamic loader.
fn is_dynamic(path: &Path) -> Result<bool> {
    use object::{Object, ObjectSection};
    let bytes = read(path)?;
    let file = object::File::parse(&*bytes).with_context(|| format!("{} is not a program", path.display()))?;
    Ok(file.section_by_name(".interp").is_some_and(|section| section.size() != 0))
}

/// Returns the hypervisor in a package's `boot` folder. The result is uncompressed, because QEMU cannot boot a
/// compressed one, and patched so that it does not intercept reads of CR0 (see `INTERCEPTED`).
fn hypervisor(boot: &Path, step: &mut Step<'_>) -> Result<Vec<u8>> {
    let entries = fs::read_dir(boot).with_context(|| format!("cannot read {}", boot.display()))?;
    let named = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("xen-") && name.ends_with(".gz")
    };
    let Some(path) = entries.flatten().map(|entry| entry.path()).find(named) else {
        bail!("{} contains no hypervisor", boot.display());
    };
    let output = exec::run(Command::new("gzip").arg("-dc").arg(&path), "gzip", step, String::new)?;
    let mut image = output.stdout;
    let wanted = INTERCEPTED.to_le_bytes();
    let places: Vec<usize> = image.windows(4).enumerate().filter(|(_, at)| **at == wanted).map(|(at, _)| at).collect();
    let [place] = places[..] else {
        bail!("{} contains the mask of intercepted accesses {} times: see `INTERCEPTED`", path.display(), places.len());
    };
    image[place..place + 4].copy_from_slice(&(INTERCEPTED & !CR0_READ).to_le_bytes());
    Ok(image)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}
