//! Configuration of a vGPU.

use crate::pci::{BadBar, BadCapability, PciIdentity};
use nvspec::chip::{CLASS_3D_CONTROLLER, Chip, VENDOR_NVIDIA};
use nvspec::fifo::CHANNELS;
use nvspec::regs::windows;
use std::sync::Arc;

/// Minimum VRAM size that drivers support, in bytes.
pub const MIN_VRAM_BYTES: u64 = 16 << 20;
/// Maximum VRAM size in bytes: the size of the card's address space.
const MAX_VRAM_BYTES: u64 = 1 << nvspec::addr::BUS_BITS;
const MIB: u64 = 1 << 20;

/// Configuration of a vGPU.
#[derive(Clone, Debug)]
pub struct VGpuConfig {
    /// Guest-visible chip.
    pub chip: &'static Chip,
    /// Guest-visible PCI function.
    pub pci: PciIdentity,
    /// Size of the guest's VRAM in bytes, a multiple of 1 MiB.
    pub vram_bytes: u64,
    /// Maximum number of channels that the guest can bind at the same time. The guest always sees 128 channels.
    pub channels: u32,
    /// VBIOS image, which the guest reads from PROM.
    pub vbios: Arc<[u8]>,
    /// Vendor-specific capability in the format of [`crate::pci::PciConfig::add_vendor_capability`]. Empty if the vGPU
    /// has no such capability.
    pub vendor_capability: Vec<u8>,
}

impl VGpuConfig {
    /// Returns the configuration of a vGPU of `chip` with default aperture sizes.
    #[must_use]
    pub fn of_chip(chip: &'static Chip, vram_bytes: u64, vbios: Arc<[u8]>) -> Self {
        let pci = PciIdentity {
            vendor: VENDOR_NVIDIA,
            device: chip.pci_device,
            subsystem_vendor: VENDOR_NVIDIA,
            subsystem: 0x076f,
            revision: chip.pci_revision,
            class: CLASS_3D_CONTROLLER,
            bar0_bytes: windows::BAR0_BYTES,
            bar1_bytes: 128 * MIB,
            bar3_bytes: 64 * MIB,
        };
        Self { chip, pci, vram_bytes, channels: CHANNELS, vbios, vendor_capability: Vec::new() }
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if !self.vram_bytes.is_multiple_of(MIB) || !(MIN_VRAM_BYTES..=MAX_VRAM_BYTES).contains(&self.vram_bytes) {
            return Err(ConfigError::Vram(self.vram_bytes));
        }
        if !(1..=CHANNELS).contains(&self.channels) {
            return Err(ConfigError::Channels(self.channels));
        }
        if self.vbios.len() as u64 > u64::from(windows::prom::BYTES) {
            return Err(ConfigError::Vbios(self.vbios.len()));
        }
        if self.pci.bar0_bytes < windows::BAR0_BYTES {
            return Err(ConfigError::SmallBar0(self.pci.bar0_bytes));
        }
        Ok(())
    }

    /// Returns the size of VRAM in MiB.
    #[must_use]
    pub fn vram_mib(&self) -> u32 {
        u32::try_from(self.vram_bytes / MIB).unwrap_or(u32::MAX)
    }
}

/// Reason why a configuration is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A BAR size cannot be encoded.
    #[error(transparent)]
    Bar(#[from] BadBar),
    /// The vendor-specific capability does not fit in configuration space.
    #[error(transparent)]
    Capability(#[from] BadCapability),
    /// BAR0 is smaller than the chip's register space.
    #[error("BAR0 has {0:#x} bytes, but the chip's registers need {needed:#x}", needed = windows::BAR0_BYTES)]
    SmallBar0(u64),
    /// The VRAM size is out of range, or not a multiple of 1 MiB.
    #[error("VRAM of {0:#x} bytes: must be a multiple of 1 MiB from 16 MiB to 1 TiB")]
    Vram(u64),
    /// The channel limit is out of range.
    #[error("{0} channels: must be from 1 to {CHANNELS}")]
    Channels(u32),
    /// The VBIOS does not fit in PROM.
    #[error("a VBIOS of {0} bytes does not fit in PROM, which has {prom} bytes", prom = windows::prom::BYTES)]
    Vbios(usize),
}
