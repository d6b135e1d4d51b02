//! The recipe (`manifest.toml` next to this crate) and the record of its resolution.

use std::collections::BTreeMap;

use anyhow::Result;
use serde::{Deserialize, Serialize};

/// Version of the recipes. It must be incremented when the result of a recipe changes, so that older items are
/// recreated.
pub const RECIPE_VERSION: &str = "1";

/// The manifest of requested images.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The VMM.
    pub qemu: QemuRecipe,
    /// Recipes of the guest kernels.
    #[serde(rename = "kernel")]
    pub kernels: Vec<KernelRecipe>,
    /// Contents of the initramfs.
    pub initramfs: InitramfsRecipe,
    /// Recipe of the paravirtual driver.
    pub paravirtual: ParavirtualRecipe,
    /// Recipe of the programs that monitor a daemon.
    pub monitoring: MonitoringRecipe,
    /// Recipe of the Debian system with systemd.
    pub system: SystemRecipe,
    /// Recipe of the Debian system with cluster software.
    pub fleet: TreeRecipe,
    /// Recipe of the headless browser.
    pub browser: TreeRecipe,
    /// Recipe of the tools that check packages, manifests and scripts.
    pub checkers: TreeRecipe,
    /// Recipe of the machine that has a card behind an IOMMU and runs its own VMs.
    pub nest: NestRecipe,
    /// Recipe of the guest with CUDA programs.
    pub cuda_guest: CudaGuestRecipe,
    /// The Xen host.
    pub xen: XenRecipe,
}

/// A source of packages.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Suite {
    /// The Debian release.
    pub base: String,
    /// An add-on suite of the release, such as backports, or `None` for the release itself.
    pub suite: Option<String>,
}

impl Suite {
    /// Returns the name of the suite from which packages are fetched.
    pub fn target(&self) -> &str {
        self.suite.as_deref().unwrap_or(&self.base)
    }
}

/// Requirements for QEMU, and its packages.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QemuRecipe {
    /// The lowest accepted version.
    pub minimum: String,
    /// A device that QEMU must support.
    pub device: String,
    /// The packages to unpack, with their dependencies.
    pub packages: Vec<String>,
    /// Suites to try, in order.
    pub from: Vec<Suite>,
}

/// Source of a guest kernel.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelRecipe {
    /// The name used by tests. The kernel version must start with this name.
    pub name: String,
    /// The metapackage that depends on the newest image.
    pub package: String,
    /// Suites to try, in order.
    pub from: Vec<Suite>,
}

/// Contents of the initramfs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InitramfsRecipe {
    /// The module to pack, together with all its dependencies.
    pub module: String,
    /// The workspace package whose program becomes `/init`.
    pub init: String,
    /// The workspace packages whose programs are placed in `/bin`.
    pub programs: Vec<String>,
}

/// Recipe of the paravirtual driver.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParavirtualRecipe {
    /// Packages of the program that applies the hooks, with its libraries.
    pub hooks: Vec<String>,
    /// Suites to try for these packages, in order.
    pub from: Vec<Suite>,
}

/// Source of Prometheus and its proxy.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MonitoringRecipe {
    /// The packages to unpack, including packages of required libraries.
    pub packages: Vec<String>,
    /// Suites to try, in order.
    pub from: Vec<Suite>,
}

/// Recipe of the Debian system with systemd.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SystemRecipe {
    /// The name of the kernel that boots the system.
    pub kernel: String,
    /// The files of the system.
    pub files: TreeRecipe,
}

/// Files of a Debian system: their packages, and the sources of the packages.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TreeRecipe {
    /// The packages, with their dependencies.
    pub packages: Vec<String>,
    /// Paths of files and folders to omit from the packages.
    pub without: Vec<String>,
    /// Dependencies that are not fetched.
    #[serde(default)]
    pub unneeded: Vec<String>,
    /// systemd units to mask.
    #[serde(default)]
    pub masked: Vec<String>,
    /// Suites to try, in order.
    pub from: Vec<Suite>,
}

/// Parts of the machine that has a card behind an IOMMU and runs its own VMs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NestRecipe {
    /// The name of the kernel that boots the machine.
    pub kernel: String,
    /// The modules to pack, together with all their dependencies.
    pub modules: Vec<String>,
    /// Files that QEMU reads when it starts a VM.
    pub firmware: Vec<String>,
}

/// The parts of a guest with CUDA programs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CudaGuestRecipe {
    /// The modules to pack, together with all their dependencies, by kernel name.
    pub modules: BTreeMap<String, Vec<String>>,
    /// The workspace package of the guest's init.
    pub init: String,
    /// The workspace packages of the guest's programs.
    pub programs: Vec<String>,
}

/// The parts of a Xen host.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct XenRecipe {
    /// The name of the kernel that domain 0 runs.
    pub kernel: String,
    /// The modules to pack, together with all their dependencies.
    pub modules: Vec<String>,
    /// The package of the hypervisor.
    pub hypervisor: String,
    /// The packages, with their dependencies.
    pub packages: Vec<String>,
    /// Programs to include in domain 0, together with the libraries against which they are linked.
    pub programs: Vec<String>,
    /// Other files to include in domain 0.
    pub files: Vec<String>,
    /// Suites to try, in order.
    pub from: Vec<Suite>,
}

impl Manifest {
    /// Returns the manifest of this build.
    pub fn load() -> Result<Self> {
        Ok(toml::from_str(include_str!("../manifest.toml"))?)
    }
}

/// A fetched package file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Package {
    /// Package name.
    pub name: String,
    /// Version in the archive.
    pub version: String,
    /// SHA-256 of the file, in hexadecimal.
    pub sha256: String,
}

/// Sources of a created item, and the item's key in the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    /// Version of the recipe that created the item.
    pub recipe: String,
    /// The name of the item's folder.
    pub key: String,
    /// The suite that provided the packages.
    pub suite: String,
    /// Packages from which the item was created.
    #[serde(default)]
    pub packages: Vec<Package>,
}

/// The record of the manifest's resolution, which is stored as `manifest.toml` in the cache.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// QEMU, or `None` if the host's QEMU is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qemu: Option<Made>,
    /// The kernels, by entry name, including those with modules other than the card's driver.
    #[serde(default, rename = "kernel")]
    pub kernels: BTreeMap<String, Made>,
    /// The paravirtual modules, by kernel name.
    #[serde(default)]
    pub paravirtual: BTreeMap<String, Made>,
    /// Prometheus and its proxy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub monitoring: Option<Made>,
    /// The Debian system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system: Option<Made>,
    /// The Debian system with cluster software.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fleet: Option<Made>,
    /// The browser.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub browser: Option<Made>,
    /// The tools that check packages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkers: Option<Made>,
    /// The Xen host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub xen: Option<Made>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifest_of_this_crate_is_well_formed() {
        let manifest = Manifest::load().unwrap();
        let names: Vec<_> = manifest.kernels.iter().map(|k| k.name.as_str()).collect();
        assert_eq!(names, ["6.1", "6.12"]);
        assert_eq!(manifest.qemu.from[0].target(), "trixie-backports");
    }

    #[test]
    fn a_record_survives_writing_and_reading() {
        let package = Package { name: "a".into(), version: "1:2~3".into(), sha256: "00".into() };
        let made = Made { recipe: "1".into(), key: "k".into(), suite: "s".into(), packages: vec![package] };
        let record =
            Record { qemu: Some(made.clone()), kernels: [("6.1".to_owned(), made)].into(), ..Record::default() };
        let text = toml::to_string_pretty(&record).unwrap();
        assert_eq!(toml::from_str::<Record>(&text).unwrap(), record);
    }
}
