//! Binds a function to `vfio-pci`, or back to another driver.
//!
//! Four sysfs files control the binding: `driver_override` names the only driver that may bind the function, `unbind`
//! unbinds the current driver, a driver's `bind` binds that driver, and `drivers_probe` makes the kernel search for a
//! driver.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use nvspec::chip::VENDOR_NVIDIA;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Address, Function, ManagerError, Obstacle, Sysfs, VFIO_PCI};

/// Writes sysfs files. This trait allows tests to simulate the kernel, because writing a file in a test folder does not
/// bind anything.
pub trait Attributes {
    /// Writes `text` to the existing file at `path`.
    ///
    /// # Errors
    /// Returns the kernel's error if the write fails.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;
}

/// The real sysfs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Kernel;

impl Attributes for Kernel {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
    }
}

/// A function's drivers before and after a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Change {
    /// Address of the function.
    pub address: Address,
    /// Previously bound driver, if any.
    pub before: Option<String>,
    /// Currently bound driver, if any.
    pub now: Option<String>,
}

/// Reason why a function keeps its driver or is left without a driver.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Sysfs cannot be read, or no such function exists.
    #[error(transparent)]
    Host(#[from] ManagerError),
    /// The function is not from NVIDIA.
    #[error("{address} is a function of vendor {vendor:04x}; only NVIDIA's are supported")]
    Foreign {
        /// Address of the function.
        address: Address,
        /// Vendor ID of the function.
        vendor: u16,
    },
    /// The function's state prevents VFIO from using it.
    #[error("{0}")]
    Obstacle(Obstacle),
    /// A process is using the function through VFIO. An unbind would block in the kernel until the process releases it.
    #[error("a process uses IOMMU group {group}, which contains {address}")]
    Lent {
        /// Address of the function.
        address: Address,
        /// IOMMU group of the function.
        group: u32,
    },
    /// The driver does not exist.
    #[error("the kernel has no driver named {0}")]
    NoDriver(String),
    /// The text is not a valid driver name.
    #[error("{0:?} is not a driver name, expected one such as nouveau")]
    NoName(String),
    /// The kernel rejected a write.
    #[error("{} cannot be written: {source}", .path.display())]
    Refused {
        /// Path of the file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// All writes succeeded, but a different driver is bound.
    #[error(
        "the kernel bound {address} to {}, expected {wanted}; see the kernel log",
        .now.as_deref().unwrap_or("no driver")
    )]
    Otherwise {
        /// Address of the function.
        address: Address,
        /// Currently bound driver, if any.
        now: Option<String>,
        /// Expected driver.
        wanted: String,
    },
}

impl BindError {
    /// Returns a remedy for the operator.
    #[must_use]
    pub fn what_to_do(&self) -> String {
        match self {
            Self::Host(error) => error.what_to_do().to_owned(),
            Self::Obstacle(obstacle) => obstacle.what_to_do(),
            Self::Foreign { .. } => "see `mediatorctl card list --host` for the host's cards".to_owned(),
            Self::Lent { .. } => "stop mediatord, or any other user of the group, first".to_owned(),
            Self::NoDriver(name) => format!("load its module: `modprobe {name}`"),
            Self::NoName(_) => "omit the option: the kernel selects a driver".to_owned(),
            Self::Refused { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                "run this as root".to_owned()
            }
            Self::Refused { .. } | Self::Otherwise { .. } => "see `dmesg`".to_owned(),
        }
    }
}

impl Sysfs {
    /// Binds a function to `vfio-pci`, regardless of its current driver. Does nothing if it is already bound to
    /// `vfio-pci`.
    ///
    /// # Errors
    /// Returns a [`BindError`] if the function cannot be bound.
    pub fn bind(&self, files: &dyn Attributes, address: Address) -> Result<Change, BindError> {
        let function = self.nvidia(address)?;
        if function.group.is_none() {
            return Err(BindError::Obstacle(Obstacle::NoIommu(address)));
        }
        if function.driver.as_deref() == Some(VFIO_PCI) {
            return Ok(Change { address, before: function.driver.clone(), now: function.driver });
        }
        self.hand(files, function, Some(VFIO_PCI))
    }

    /// Binds a function to `driver`, or to the driver selected by the kernel if `driver` is `None`. The kernel may
    /// select no driver.
    ///
    /// # Errors
    /// Returns a [`BindError`] if the function cannot be bound to the driver.
    pub fn unbind(&self, files: &dyn Attributes, address: Address, driver: Option<&str>) -> Result<Change, BindError> {
        let function = self.nvidia(address)?;
        let lent = function.group.filter(|_| function.driver.as_deref() == Some(VFIO_PCI));
        if let Some(group) = lent.filter(|group| self.is_lent(*group)) {
            return Err(BindError::Lent { address, group });
        }
        self.hand(files, function, driver)
    }

    fn nvidia(&self, address: Address) -> Result<Function, BindError> {
        let function = self.function(address)?;
        if function.vendor != VENDOR_NVIDIA {
            return Err(BindError::Foreign { address, vendor: function.vendor });
        }
        Ok(function)
    }

    fn hand(&self, files: &dyn Attributes, function: Function, driver: Option<&str>) -> Result<Change, BindError> {
        let address = function.address;
        let folder = self.folder(address);
        if let Some(name) = driver {
            let good = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
            if name.is_empty() || name.len() > 63 || !name.bytes().all(good) {
                return Err(BindError::NoName(name.chars().take(64).collect()));
            }
            if !self.root.join("bus/pci/drivers").join(name).is_dir() {
                return Err(BindError::NoDriver(name.to_owned()));
            }
        }
        let write =
            |path: PathBuf, text: &str| files.write(&path, text).map_err(|source| BindError::Refused { path, source });
        // An empty line clears the override.
        let only = driver.filter(|driver| *driver == VFIO_PCI).unwrap_or_default();
        write(folder.join("driver_override"), &format!("{only}\n"))?;
        if function.driver.is_some() {
            write(folder.join("driver/unbind"), &address.to_string())?;
        }
        match driver {
            Some(name) if name != VFIO_PCI => {
                write(self.root.join("bus/pci/drivers").join(name).join("bind"), &address.to_string())?;
            }
            _ => write(self.root.join("bus/pci/drivers_probe"), &address.to_string())?,
        }
        let now = self.function(address)?.driver;
        match driver {
            Some(wanted) if now.as_deref() != Some(wanted) => {
                Err(BindError::Otherwise { address, now, wanted: wanted.to_owned() })
            }
            _ => Ok(Change { address, before: function.driver, now }),
        }
    }
}
