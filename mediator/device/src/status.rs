//! Status of a VM's device, and device creation errors.

use card_manager::ManagerError;
use card_manager::shortage::Shortage;
use devmodel::ConfigError;
use devmodel::pci::{BadBar, BadRom};
use std::collections::BTreeMap;
use std::io;

/// Interrupt mode selected by the guest driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InterruptKind {
    /// No interrupts.
    #[default]
    Off,
    /// Interrupts through the INTx pin.
    Intx,
    /// Message-signaled interrupts.
    Msi,
}

/// Denied accesses to one location for the same reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeniedAccess {
    /// Name of the register or other location.
    pub place: String,
    /// Offset in BAR0 in bytes, if the location is a register.
    pub offset: Option<u32>,
    /// Reason for the denial.
    pub reason: String,
    /// Number of denied reads.
    pub reads: u64,
    /// Number of denied writes.
    pub writes: u64,
}

/// Status of a VM's device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceStatus {
    /// Guest-visible VRAM in MiB.
    pub vram_mib: u64,
    /// Number of channels that the guest uses.
    pub channels_used: u32,
    /// PCI vendor ID and device ID.
    pub pci_id: (u16, u16),
    /// True if the guest has enabled bus mastering.
    pub bus_master: bool,
    /// Interrupt mode selected by the guest driver.
    pub interrupts: InterruptKind,
    /// Denied accesses by location and reason.
    pub denied: Vec<DeniedAccess>,
    /// Counters, whose names are also metric names (`snake_case`).
    pub counters: BTreeMap<String, u64>,
}

/// Reason why a device cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// A memory limit would be exceeded.
    #[error(transparent)]
    Shortage(Shortage),
    /// The card manager rejected the device.
    #[error(transparent)]
    Host(ManagerError),
    /// A value in the device's configuration is out of range.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The sizes of the card's apertures are invalid for PCI BARs.
    #[error(transparent)]
    Bar(#[from] BadBar),
    /// The size of the card's ROM is invalid for a PCI expansion ROM.
    #[error(transparent)]
    Rom(#[from] BadRom),
    /// Creating an eventfd or a thread failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<ManagerError> for DeviceError {
    fn from(error: ManagerError) -> Self {
        match error {
            ManagerError::OutOfMemory(shortage) => Self::Shortage(shortage),
            other => Self::Host(other),
        }
    }
}
