//! Status of a VM's device, and errors of its creation.

use card_manager::ManagerError;
use card_manager::shortage::Shortage;
use devmodel::ConfigError;
use devmodel::pci::{BadBar, BadRom};
use std::collections::BTreeMap;
use std::io;

/// Interrupt mode selected by the guest's driver.
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

/// Denied accesses to one location, for one reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeniedAccess {
    /// Name of the register or other location.
    pub place: String,
    /// Offset in BAR0, in bytes, for a register.
    pub offset: Option<u32>,
    /// Reason for the denial.
    pub reason: String,
    /// Number of denied reads.
    pub reads: u64,
    /// Number of denied writes.
    pub writes: u64,
}

/// The status of a VM's device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceStatus {
    /// Guest-visible VRAM in MiB.
    pub vram_mib: u64,
    /// Number of channels that the guest uses on the card.
    pub channels_used: u32,
    /// PCI vendor ID and device ID.
    pub pci_id: (u16, u16),
    /// Set if the guest permits the device to access its memory.
    pub bus_master: bool,
    /// Interrupt mode selected by the guest's driver.
    pub interrupts: InterruptKind,
    /// Denied accesses, by location and reason.
    pub denied: Vec<DeniedAccess>,
    /// Counters, with names that are valid for metrics (`snake_case`).
    pub counters: BTreeMap<String, u64>,
}

/// Reason why a device cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// A memory limit prevents the creation.
    #[error(transparent)]
    Shortage(Shortage),
    /// The card's owner rejected the creation.
    #[error(transparent)]
    Host(ManagerError),
    /// A value in the device's description is out of range.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The sizes of the card's apertures are invalid for a PCI function.
    #[error(transparent)]
    Bar(#[from] BadBar),
    /// The size of the card's ROM is invalid for a PCI function.
    #[error(transparent)]
    Rom(#[from] BadRom),
    /// The operating system cannot provide an event file descriptor or a thread.
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
