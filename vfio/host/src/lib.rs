//! The NVIDIA functions of a host, as reported by sysfs: each function's driver, the other functions in its IOMMU
//! group, and any obstacles to its use through VFIO, with remedies. Also binds functions to `vfio-pci` or to another
//! driver.
//!
//! Modules: [`Address`], [`Sysfs`] with [`Sysfs::list`] and [`Sysfs::function`] (in this file), [`bind`].
//!
//! This crate does not contain VFIO itself, and reports only properties that sysfs exposes.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use nvspec::chip::VENDOR_NVIDIA;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod address;
pub mod bind;
#[cfg(any(test, feature = "fake"))]
pub mod fake;

#[cfg(test)]
mod tests;

pub use address::{Address, NoAddress};

/// Name of the driver through which processes use functions.
pub const VFIO_PCI: &str = "vfio-pci";
/// PCI base class of display controllers, in bits 23:16. Source: PCI Code and ID Assignment Specification.
const DISPLAY: u32 = 0x03;
/// PCI base class of bridges.
const BRIDGE: u32 = 0x06;
/// Maximum number of functions read from a host or group.
const MAX_FUNCTIONS: usize = 4096;
/// Maximum file size in bytes. Sysfs files do not exceed one page.
const MAX_FILE: u64 = 4096;

/// Sysfs: the kernel's view of devices, mounted at a folder.
#[derive(Clone, Debug)]
pub struct Sysfs {
    root: PathBuf,
    /// VFIO's device folder, which shows whether a process is using a group, or `None` for a fake.
    files: Option<PathBuf>,
}

impl Default for Sysfs {
    fn default() -> Self {
        Self { root: "/sys".into(), files: Some("/dev/vfio".into()) }
    }
}

/// A PCI function of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Function {
    /// PCI address of the function.
    pub address: Address,
    /// PCI vendor ID.
    pub vendor: u16,
    /// PCI device ID.
    pub device: u16,
    /// 24-bit PCI class code.
    pub class: u32,
    /// Bound driver, if any.
    pub driver: Option<String>,
    /// IOMMU group of the function, if any.
    pub group: Option<u32>,
    /// Other functions in the group, except for bridges.
    pub beside: Vec<Neighbour>,
    /// The kernel's reset methods for this function alone.
    pub resets: Vec<String>,
    /// Name of the function's own node in `/dev/vfio/devices`, if any.
    #[serde(skip)]
    pub node: Option<String>,
}

/// Another function in the same IOMMU group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Neighbour {
    /// PCI address of the function.
    pub address: Address,
    /// PCI vendor ID.
    pub vendor: u16,
    /// Bound driver, if any.
    pub driver: Option<String>,
}

impl Neighbour {
    /// Returns true if this function does not prevent VFIO from using the group. This is the case if it has no driver,
    /// or a driver that does not access the device.
    fn is_harmless(&self) -> bool {
        self.driver.as_deref().is_none_or(|driver| [VFIO_PCI, "pci-stub"].contains(&driver))
    }
}

impl fmt::Display for Neighbour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.driver {
            Some(driver) => write!(f, "{} (driver {driver})", self.address),
            None => write!(f, "{} (no driver)", self.address),
        }
    }
}

/// Reason why VFIO cannot currently use a function.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    /// The function is not an NVIDIA display controller.
    #[error("{address} is {vendor:04x}:{device:04x} of class {class:06x}, not an NVIDIA display controller")]
    NoCard {
        /// Address of the function.
        address: Address,
        /// PCI vendor ID.
        vendor: u16,
        /// PCI device ID.
        device: u16,
        /// PCI class code.
        class: u32,
    },
    /// The function does not belong to an IOMMU group.
    #[error("{0} is in no IOMMU group: the host has no IOMMU, or does not use it")]
    NoIommu(Address),
    /// Other functions in the group are bound to drivers.
    #[error("IOMMU group {group} of {address} contains other devices that the host uses: {}", list(.others))]
    Shared {
        /// Address of the function.
        address: Address,
        /// The IOMMU group.
        group: u32,
        /// The functions that prevent VFIO from using the group.
        others: Vec<Neighbour>,
    },
    /// The function is bound to a different driver, or to none.
    #[error("{}", driven(*.address, .driver.as_deref()))]
    Driver {
        /// Address of the function.
        address: Address,
        /// Bound driver, if any.
        driver: Option<String>,
    },
}

fn list(neighbours: &[Neighbour]) -> String {
    let shown: Vec<_> = neighbours.iter().take(8).map(ToString::to_string).collect();
    let more = neighbours.len() - shown.len();
    shown.join(", ") + &if more == 0 { String::new() } else { format!(" and {more} more") }
}

fn driven(address: Address, driver: Option<&str>) -> String {
    match driver {
        Some(driver) => format!("{address} is bound to driver {driver}, not {VFIO_PCI}"),
        None => format!("{address} is bound to no driver, expected {VFIO_PCI}"),
    }
}

impl Obstacle {
    /// Returns a remedy for the operator.
    #[must_use]
    pub fn what_to_do(&self) -> String {
        match self {
            Self::NoCard { .. } => "see `mediatorctl card list --host` for the host's cards".to_owned(),
            Self::NoIommu(_) => {
                "enable the IOMMU in the firmware setup, and boot with intel_iommu=on or amd_iommu=on".to_owned()
            }
            Self::Driver { address, .. } => format!("`mediatorctl card bind {address}` as root"),
            Self::Shared { others, .. } if others.iter().all(|other| other.vendor == VENDOR_NVIDIA) => {
                let binds: Vec<_> =
                    others.iter().take(8).map(|other| format!("`mediatorctl card bind {}`", other.address)).collect();
                format!("{} as root", binds.join(", "))
            }
            Self::Shared { .. } => "move the card to a slot that has its own IOMMU group".to_owned(),
        }
    }
}

/// Reason why the host's state cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// No such function exists.
    #[error("the host has no PCI function {0}")]
    NoFunction(Address),
    /// Sysfs cannot be read.
    #[error("{} cannot be read: {source}", .path.display())]
    Unreadable {
        /// Path of the file or folder.
        path: PathBuf,
        /// Read error.
        #[source]
        source: io::Error,
    },
    /// Sysfs has contents in an unexpected format.
    #[error("{} is {found:?}, which is {expected}", .path.display())]
    Unexpected {
        /// Path of the file or link.
        path: PathBuf,
        /// The actual contents.
        found: String,
        /// Expected format.
        expected: &'static str,
    },
}

impl ManagerError {
    /// Returns a remedy for the operator.
    #[must_use]
    pub fn what_to_do(&self) -> &'static str {
        match self {
            Self::NoFunction(_) => "see `mediatorctl card list --host` for the host's cards",
            Self::Unreadable { .. } | Self::Unexpected { .. } => "check that sysfs is mounted at /sys",
        }
    }
}

impl Function {
    /// Returns true if the function is an NVIDIA display controller.
    #[must_use]
    pub fn is_card(&self) -> bool {
        self.vendor == VENDOR_NVIDIA && self.class >> 16 == DISPLAY
    }

    /// Returns all obstacles to VFIO, in the order in which they must be removed.
    #[must_use]
    pub fn obstacles(&self) -> Vec<Obstacle> {
        let Self { address, vendor, device, class, .. } = *self;
        let mut found = Vec::new();
        if !self.is_card() {
            return vec![Obstacle::NoCard { address, vendor, device, class }];
        }
        let Some(group) = self.group else { return vec![Obstacle::NoIommu(address)] };
        let others: Vec<_> = self.beside.iter().filter(|other| !other.is_harmless()).cloned().collect();
        if self.driver.as_deref() != Some(VFIO_PCI) {
            found.push(Obstacle::Driver { address, driver: self.driver.clone() });
        }
        if !others.is_empty() {
            found.push(Obstacle::Shared { address, group, others });
        }
        found
    }
}

impl Sysfs {
    /// Creates a view of the fake sysfs at `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), files: None }
    }

    /// Returns true if a process uses the group through vfio-pci. The kernel allows only one process to open a group.
    fn is_lent(&self, group: u32) -> bool {
        let file = self.files.as_ref().map(|files| files.join(group.to_string()));
        file.is_some_and(|file| {
            let opened = fs::OpenOptions::new().read(true).write(true).open(file);
            opened.is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
        })
    }

    fn devices(&self) -> PathBuf {
        self.root.join("bus/pci/devices")
    }

    fn folder(&self, address: Address) -> PathBuf {
        self.devices().join(address.to_string())
    }

    /// Returns all NVIDIA display controllers, sorted by address. The list is empty on a host without PCI.
    ///
    /// # Errors
    /// Returns an error if sysfs cannot be read. Omits functions that disappear during the scan.
    pub fn list(&self) -> Result<Vec<Function>, ManagerError> {
        let mut functions = Vec::new();
        for address in addresses(&self.devices())? {
            match self.function(address) {
                Ok(function) if function.is_card() => functions.push(function),
                Ok(_) | Err(ManagerError::NoFunction(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(functions)
    }

    /// Returns a function of any vendor and class.
    ///
    /// # Errors
    /// Returns an error if the function does not exist, or sysfs cannot be read.
    pub fn function(&self, address: Address) -> Result<Function, ManagerError> {
        let folder = self.folder(address);
        if !folder.exists() {
            return Err(ManagerError::NoFunction(address));
        }
        let group = match link(&folder.join("iommu_group"))? {
            None => None,
            Some(name) => Some(name.parse().map_err(|_| ManagerError::Unexpected {
                path: folder.join("iommu_group"),
                found: name,
                expected: "not a link to a numbered group",
            })?),
        };
        let mut beside = Vec::new();
        if group.is_some() {
            for other in addresses(&folder.join("iommu_group/devices"))? {
                let folder = self.folder(other);
                if other == address || number(&folder.join("class"))? >> 16 == BRIDGE {
                    continue;
                }
                let vendor = short(&folder.join("vendor"))?;
                beside.push(Neighbour { address: other, vendor, driver: link(&folder.join("driver"))? });
            }
        }
        let resets = read(&folder.join("reset_method")).unwrap_or_default();
        Ok(Function {
            address,
            vendor: short(&folder.join("vendor"))?,
            device: short(&folder.join("device"))?,
            class: number(&folder.join("class"))?,
            driver: link(&folder.join("driver"))?,
            group,
            beside,
            resets: resets.split_whitespace().map(str::to_owned).collect(),
            node: node_in(&folder.join("vfio-dev")),
        })
    }
}

/// Returns the device node name of a function that is bound to vfio-pci, if any. A function has at most one node.
fn node_in(folder: &Path) -> Option<String> {
    let name = fs::read_dir(folder).ok()?.next()?.ok()?.file_name().into_string().ok()?;
    let number = name.strip_prefix("vfio")?;
    (!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())).then_some(name)
}

/// Returns the PCI addresses among the names in a folder, in ascending order. The list is empty if the folder does not
/// exist.
fn addresses(folder: &Path) -> Result<Vec<Address>, ManagerError> {
    let unreadable = |source| ManagerError::Unreadable { path: folder.to_owned(), source };
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(unreadable(error)),
    };
    let mut found = Vec::new();
    for entry in entries.take(MAX_FUNCTIONS) {
        let name = entry.map_err(unreadable)?.file_name();
        found.extend(name.to_str().and_then(|name| name.parse::<Address>().ok()));
    }
    found.sort_unstable();
    Ok(found)
}

/// Returns the last component of a link's target, or `None` if the link does not exist.
fn link(path: &Path) -> Result<Option<String>, ManagerError> {
    match fs::read_link(path) {
        Ok(target) => Ok(target.file_name().map(|name| name.to_string_lossy().into_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ManagerError::Unreadable { path: path.to_owned(), source }),
    }
}

fn read(path: &Path) -> Result<String, ManagerError> {
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(MAX_FILE).read_to_string(&mut text))
        .map_err(|source| ManagerError::Unreadable { path: path.to_owned(), source })?;
    Ok(text)
}

/// Reads a number in sysfs format, for example `0x10de`.
fn number(path: &Path) -> Result<u32, ManagerError> {
    let text = read(path)?;
    let digits = text.trim().strip_prefix("0x").unwrap_or_default();
    u32::from_str_radix(digits, 16).map_err(|_| ManagerError::Unexpected {
        path: path.to_owned(),
        found: text.chars().take(32).collect(),
        expected: "not a number such as 0x10de",
    })
}

fn short(path: &Path) -> Result<u16, ManagerError> {
    number(path).map(|number| (number & 0xffff) as u16)
}
