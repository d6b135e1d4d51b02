//! Finds obstacles to CUDA in a guest, with their remedies.
//!
//! The checks cover all components that a program needs: the device, its window, the kernel driver, the render node,
//! the host's version, and the library that the loader finds.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::node::{Node, OpenError};

/// PCI vendor and device IDs of virtio-gpu.
const IDS: (&str, &str) = ("0x1af4", "0x1050");
/// Minimum size of the window in bytes. Smaller regions contain registers.
const MIN_WINDOW_BYTES: u64 = 1 << 30;
/// Regions at or above this address are mapped as cacheable.
const FOUR_GIB: u64 = 1 << 32;
/// Folder where the package installs the libraries.
pub const LIBRARIES: &str = "usr/lib/gpu-mediator-guest";
/// Name of the library that programs load.
const LIBRARY: &str = "libcuda.so.1";

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Name of the check. Does not change between versions.
    pub check: &'static str,
    /// Description of the detected state.
    pub found: String,
    /// The remedy if there is an obstacle.
    pub remedy: Option<String>,
}

impl Finding {
    fn good(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, found: found.into(), remedy: None }
    }

    fn missing(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { check, found: found.into(), remedy: Some(remedy.into()) }
    }
}

/// A guest, identified by its root folder.
#[derive(Clone, Debug)]
pub struct Guest {
    root: PathBuf,
}

impl Guest {
    /// Returns the guest that runs this program.
    #[must_use]
    pub fn this() -> Self {
        Self { root: "/".into() }
    }

    /// Runs the checks. Skips the checks that depend on a failed one.
    #[must_use]
    pub fn findings(&self) -> Vec<Finding> {
        let mut findings = self.facts();
        if findings.iter().all(|finding| finding.remedy.is_none()) {
            findings.push(node(Node::find()));
            let cache = Command::new("/sbin/ldconfig").arg("-p").stdin(Stdio::null()).stderr(Stdio::null()).output();
            findings.push(library(&cache.map(|output| output.stdout).unwrap_or_default()));
        }
        findings
    }

    /// Runs the checks that only read files.
    fn facts(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        for check in [Self::device, Self::window, Self::kernel, Self::render_node] {
            let finding = check(self);
            let is_good = finding.remedy.is_none();
            findings.push(finding);
            if !is_good {
                break;
            }
        }
        findings
    }

    fn read(&self, path: &Path) -> String {
        fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned()).unwrap_or_default()
    }

    fn names(&self, folder: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.root.join(folder)).into_iter().flatten().flatten();
        let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        paths
    }

    /// Returns the sysfs folders of virtio-gpu devices. A VM may also have such a device for its display.
    fn devices(&self) -> Vec<PathBuf> {
        let mut devices = self.names("sys/bus/pci/devices");
        devices.retain(|path| (&*self.read(&path.join("vendor")), &*self.read(&path.join("device"))) == IDS);
        devices
    }

    fn device(&self) -> Finding {
        match self.devices().first().and_then(|path| path.file_name()) {
            Some(name) => Finding::good("device", format!("virtio-gpu at {}", name.display())),
            None => Finding::missing(
                "device",
                "no virtio-gpu device",
                "on the host, give the VM a CUDA function (`mediatorctl vm add NAME --cuda`, or the table `cuda` of the VM), and \
                 start its VMM with the options that `mediatorctl vm launch-args NAME` prints",
            ),
        }
    }

    /// Returns the start and size of a device's largest region.
    fn largest_region(&self, device: &Path) -> Option<(u64, u64)> {
        let text = self.read(&device.join("resource"));
        let regions = text.lines().filter_map(|line| {
            let mut numbers =
                line.split_whitespace().map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16));
            let (start, end) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
            Some((start, end.checked_sub(start)?.checked_add(1).filter(|_| end > 0)?))
        });
        regions.max_by_key(|(_, bytes)| *bytes)
    }

    fn window(&self) -> Finding {
        let regions = self.devices().into_iter().filter_map(|device| self.largest_region(&device));
        match regions.max_by_key(|(_, bytes)| *bytes) {
            Some((start, bytes)) if bytes >= MIN_WINDOW_BYTES && start >= FOUR_GIB => {
                Finding::good("window", format!("{} MiB", bytes >> 20))
            }
            Some((start, bytes)) if bytes >= MIN_WINDOW_BYTES => Finding::missing(
                "window",
                format!("{} MiB below 4 GiB ({start:#x}), which is mapped uncached", bytes >> 20),
                "give the VM firmware that places large regions above 4 GiB, such as OVMF or a newer SeaBIOS",
            ),
            _ => Finding::missing(
                "window",
                "no window: the firmware or the kernel found no space for it, or the device is a display",
                "give the VM a larger range of addresses above 4 GiB (QEMU: `-global q35-pcihost.pci-hole64-size=2T`, and \
                 `-cpu host`), or a smaller window on the host (`cuda.window_mib`); `dmesg | grep BAR` has the kernel's reason",
            ),
        }
    }

    fn kernel(&self) -> Finding {
        let release = self.read(&self.root.join("proc/sys/kernel/osrelease"));
        if self.root.join("sys/module/virtio_gpu").exists()
            || self.root.join("sys/bus/virtio/drivers/virtio_gpu").exists()
        {
            return Finding::good("kernel", format!("{release} with virtio_gpu"));
        }
        let modules = self.root.join("lib/modules").join(&release);
        let lists = ["modules.dep", "modules.builtin"].map(|name| self.read(&modules.join(name)));
        if lists.iter().any(|list| list.contains("/virtio-gpu.ko")) {
            return Finding::missing(
                "kernel",
                format!("{release}: the module virtio-gpu is not loaded"),
                "`modprobe virtio-gpu`; for each boot, add the line `virtio-gpu` to a file in /etc/modules-load.d",
            );
        }
        Finding::missing(
            "kernel",
            format!("{release} has no virtio_gpu: it was built without DRM"),
            "install a kernel with graphics drivers (Debian: `apt install linux-image-amd64` instead of \
             linux-image-cloud-amd64; Ubuntu: linux-generic) and boot it",
        )
    }

    fn render_node(&self) -> Finding {
        let nodes = self.names("dev/dri");
        let is_node =
            |path: &&PathBuf| path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with("renderD"));
        match nodes.iter().find(is_node) {
            Some(path) => {
                Finding::good("render-node", format!("/dev/dri/{}", path.file_name().unwrap_or_default().display()))
            }
            None => Finding::missing(
                "render-node",
                "no render node in /dev/dri",
                "the driver did not bind to the device: `dmesg | grep -i virtio_gpu` shows the reason; in a container, \
                 pass /dev/dri (`--device /dev/dri`)",
            ),
        }
    }
}

/// Converts the result of opening the render node to a finding.
fn node(found: Result<Node, OpenError>) -> Finding {
    match found {
        Ok(node) => {
            let capset = node.capset();
            Finding::good("host", format!("version {}, a window of {} MiB", capset.version, capset.window_bytes >> 20))
        }
        Err(error @ OpenError::Denied(_)) => {
            Finding::missing("access", error.to_string(), "`usermod --append --groups render USER`, then log in again")
        }
        Err(error @ OpenError::Version { .. }) => {
            Finding::missing("host", error.to_string(), "update the older side; versions may differ by one")
        }
        Err(error) => Finding::missing(
            "host",
            error.to_string(),
            "the host's daemon does not serve this VM's CUDA function: `mediatorctl doctor` and `mediatorctl vm show NAME` there",
        ),
    }
}

/// Checks the library that programs load, according to the loader's cache.
fn library(cache: &[u8]) -> Finding {
    let cache = String::from_utf8_lossy(cache);
    let mut places = cache.lines().filter_map(|line| {
        let (name, place) = line.trim().split_once(" => ")?;
        (name.split_whitespace().next() == Some(LIBRARY)).then_some(place)
    });
    match places.next() {
        Some(place) if place.contains(LIBRARIES) => Finding::good("library", place),
        Some(place) => Finding::missing(
            "library",
            format!("programs load {place}, which is not from gpu-mediator-guest"),
            "remove NVIDIA's driver from this VM (Debian: `apt remove libcuda1 nvidia-driver`), or list our folder \
             first: LD_LIBRARY_PATH=/usr/lib/gpu-mediator-guest",
        ),
        None => Finding::missing(
            "library",
            format!("the loader does not find {LIBRARY}"),
            "install the package gpu-mediator-guest, or run `ldconfig`",
        ),
    }
}

#[cfg(test)]
mod tests;
