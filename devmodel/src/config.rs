//! The description from which the mediator creates a vGPU.

use crate::pci::{BadBar, BadCapability, PciIdentity};
use nvspec::chip::{CLASS_3D_CONTROLLER, Chip, VENDOR_NVIDIA};
use nvspec::fifo::CHANNELS;
use nvspec::regs::windows;
use std::sync::Arc;

/// Minimum VRAM size in bytes that drivers support.
pub const MIN_VRAM_BYTES: u64 = 16 << 20;
/// Size of a card's address space in bytes.
const MAX_VRAM_BYTES: u64 = 1 << nvspec::addr::BUS_BITS;
const MIB: u64 = 1 << 20;

/// Description of a vGPU.
#[derive(Clone, Debug)]
pub struct VGpuConfig {
    /// Chip shown to the guest.
    pub chip: &'static Chip,
    /// PCI function shown to the guest.
    pub pci: PciIdentity,
    /// Guest VRAM size in bytes, a multiple of 1 MiB.
    pub vram_bytes: u64,
    /// Maximum number of channels that the guest may bind at a time. The guest always sees 128 channels.
    pub channels: u32,
    /// Contents of PROM: the VBIOS image.
    pub vbios: Arc<[u8]>,
    /// Vendor-specific capability, in the format of [`crate::pci::PciConfig::add_vendor_capability`]; empty for none.
    pub vendor_capability: Vec<u8>,
}

impl VGpuConfig {
    /// Returns the configuration of a vGPU of `chip` with the usual aperture sizes.
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

    /// Returns the VRAM size in MiB.
    #[must_use]
    pub fn vram_mib(&self) -> u32 {
        u32::try_from(self.vram_bytes / MIB).unwrap_or(u32::MAX)
    }
}

/// Reason why a description is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The size of a BAR cannot be encoded.
    #[error(transparent)]
    Bar(#[from] BadBar),
    /// The vendor-specific capability does not fit.
    #[error(transparent)]
    Capability(#[from] BadCapability),
    /// BAR0 is too small for the registers.
    #[error("BAR0 of {0:#x} bytes does not hold the chip's registers, which need {needed:#x}", needed = windows::BAR0_BYTES)]
    SmallBar0(u64),
    /// The VRAM size is out of range.
    #[error("VRAM of {0:#x} bytes: must be a multiple of 1 MiB from 16 MiB to 1 TiB")]
    Vram(u64),
    /// The channel limit is out of range.
    #[error("{0} channels: must be from 1 to {CHANNELS}")]
    Channels(u32),
    /// The VBIOS does not fit.
    #[error("a VBIOS of {0} bytes does not fit into PROM, which has {prom}", prom = windows::prom::BYTES)]
    Vbios(usize),
}
