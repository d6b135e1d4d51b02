//! Reasons why a card cannot be opened, with remedies.

use std::io;
use std::path::PathBuf;

use vfio_host::{Address, ManagerError, Obstacle};

/// Reason why a card cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The function does not exist, or the host's state cannot be read.
    #[error(transparent)]
    Host(#[from] ManagerError),
    /// The host's state prevents VFIO from using the function.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Obstacles(Vec<Obstacle>),
    /// VFIO's device files do not exist.
    #[error("the kernel provides no {}", .0.display())]
    NoVfio(PathBuf),
    /// The user is not permitted to open VFIO's device files.
    #[error("this user may not open {}", .0.display())]
    Forbidden(PathBuf),
    /// Another process uses the group.
    #[error("another process uses IOMMU group {group}, which contains {address}")]
    InUse {
        /// Address of the function.
        address: Address,
        /// IOMMU group of the function.
        group: u32,
    },
    /// The kernel reports that the group is not viable.
    #[error("the kernel does not permit IOMMU group {group}: a device in it has a driver other than vfio-pci")]
    NotViable {
        /// The IOMMU group.
        group: u32,
    },
    /// The kernel's VFIO has an unexpected version, lacks a required feature, or does not report a PCI function.
    #[error("the kernel's VFIO {0}")]
    Interface(String),
    /// The IOMMU does not prevent a device from forging interrupts.
    #[error("the host's IOMMU does not remap interrupts, so a card could forge interrupts of other devices")]
    NoInterruptRemapping,
    /// A system call failed.
    #[error("{call} failed for {address}: {source}")]
    Call {
        /// Address of the function.
        address: Address,
        /// Name of the failed call.
        call: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The function does not have the BARs of a card.
    #[error("BAR{bar} of {address} has {size:#x} bytes, unlike the BARs of any known card")]
    Bar {
        /// Address of the function.
        address: Address,
        /// BAR number.
        bar: u32,
        /// Size of the BAR in bytes.
        size: u64,
    },
    /// The operator requested a bus reset, which is impossible.
    #[error("the card's bus cannot be reset: {0}")]
    NoBusReset(String),
    /// All registers read as ones.
    #[error("{0} does not respond: its registers read as all ones")]
    Silent(Address),
    /// The chip is not supported.
    #[error("the identity register of {address} reads {boot0:#010x}: this version does not support this chip")]
    UnknownChip {
        /// Address of the function.
        address: Address,
        /// Value of PMC_BOOT_0.
        boot0: u32,
    },
    /// The card's VBIOS has not run.
    #[error(
        "{address} has not been initialised by its VBIOS: register {register:#08x} reads {value:#x}, without bit 1"
    )]
    NotPosted {
        /// Address of the function.
        address: Address,
        /// BAR0 offset of the register.
        register: u32,
        /// Value of the register.
        value: u32,
    },
}

impl OpenError {
    /// Returns a remedy for the operator.
    #[must_use]
    pub fn what_to_do(&self) -> String {
        match self {
            Self::Host(error) => error.what_to_do().to_owned(),
            Self::Obstacles(found) => found.iter().map(Obstacle::what_to_do).collect::<Vec<_>>().join("; "),
            Self::NoVfio(_) => "load the modules: `modprobe vfio-pci`, `modprobe vfio_iommu_type1`".to_owned(),
            Self::Forbidden(path) => format!(
                "give the daemon's user access to {} with a udev rule for SUBSYSTEM==\"vfio\"; in its unit, PrivateDevices=no and \
                 DeviceAllow=char-vfio rw",
                path.display()
            ),
            Self::InUse { group, .. } => format!("stop that process: `fuser /dev/vfio/{group}` shows it"),
            Self::NotViable { group } => {
                format!("see /sys/kernel/iommu_groups/{group}/devices, and `mediatorctl card list --host`")
            }
            Self::Interface(_) => "load the module vfio_iommu_type1, which requires kernel 4.0 or later".to_owned(),
            Self::NoInterruptRemapping => {
                "enable interrupt remapping in the firmware setup (for QEMU's machine: intremap=on), or set the \
                 parameter allow_unsafe_interrupts of the module vfio_iommu_type1 (or iommufd) if the users of the \
                 card need not be isolated from each other"
                    .to_owned()
            }
            Self::Call { .. } => "see `dmesg`".to_owned(),
            Self::Bar { .. } | Self::UnknownChip { .. } => {
                "use a card that docs/guides/real-cards.md lists; the numbers in `nvspec` are not known to be valid \
                 for others"
                    .to_owned()
            }
            Self::NoBusReset(_) => "choose `reset = \"auto\"` or \"units\"".to_owned(),
            Self::Silent(_) => {
                "check that it has power; if it was reset or suspended before, restart the host".to_owned()
            }
            Self::NotPosted { address, .. } => format!(
                "let the firmware run its VBIOS (restart the host, with legacy option ROMs allowed), and keep the kernel from \
                 resetting it: `echo > /sys/bus/pci/devices/{address}/reset_method` before it goes to vfio-pci"
            ),
        }
    }
}
