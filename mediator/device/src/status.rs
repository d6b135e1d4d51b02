//! Status of a VM's device, and errors of its creation.

use card_manager::ManagerError;
use card_manager::shortage::Shortage;
use devmodel::ConfigError;
use devmodel::pci::{BadBar, BadRom};
use std::collections::BTreeMap;
use std::io;

/// Interrupt mode that the guest's driver has selected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InterruptKind {
    /// Not connected.
    #[default]
    Off,
    /// Through the pin.
    Intx,
    /// Through messages.
    Msi,
}

/// Accesses of one kind that were denied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeniedAccess {
    /// The name of a register, or of another place.
    pub place: String,
    /// Byte offset in BAR0, for a register.
    pub offset: Option<u32>,
    /// The reason.
    pub reason: String,
    /// Reads that were denied.
    pub reads: u64,
    /// Writes that were denied.
    pub writes: u64,
}

/// The state of a VM's device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceStatus {
    /// Guest-visible VRAM in MiB.
    pub vram_mib: u64,
    /// Channels that the guest has on the card.
    pub channels_used: u32,
    /// PCI vendor and device.
    pub pci_id: (u16, u16),
    /// The guest allows the device to access its memory.
    pub bus_master: bool,
    /// Interrupt mode that the guest's driver has selected.
    pub interrupts: InterruptKind,
    /// Accesses that were denied, by place and reason.
    pub denied: Vec<DeniedAccess>,
    /// Counts, by names that are good for metrics (`snake_case`).
    pub counters: BTreeMap<String, u64>,
}

/// Reason that a device cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// A memory limit prevents the creation.
    #[error(transparent)]
    Shortage(Shortage),
    /// The card's owner refuses.
    #[error(transparent)]
    Host(ManagerError),
    /// The device's description is out of range.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The card's apertures are impossible for a PCI function.
    #[error(transparent)]
    Bar(#[from] BadBar),
    /// The card's ROM is impossible for a PCI function.
    #[error(transparent)]
    Rom(#[from] BadRom),
    /// The operating system refuses an event descriptor or a thread.
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
