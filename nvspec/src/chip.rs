//! Table of known chips.

/// Description of a chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chip {
    /// NVIDIA's name for the chip.
    pub name: &'static str,
    /// Chipset number, bits 28:20 of PMC_BOOT_0.
    pub chipset: u32,
    /// PMC_BOOT_0 value of the modelled revision.
    pub boot0: u32,
    /// PCI device ID of the modelled board.
    pub pci_device: u16,
    /// PCI revision.
    pub pci_revision: u8,
    /// Crystal frequency in Hz.
    pub crystal_hz: u32,
    /// Number of GPCs.
    pub gpcs: u32,
    /// Number of TPCs per GPC.
    pub tpcs_per_gpc: u32,
    /// Number of ROPs.
    pub rops: u32,
    /// Number of PBDMAs.
    pub pbdmas: u32,
    /// Number of L2 slices per memory partition.
    pub ltc_slices: u32,
    /// Size of a PGRAPH context in bytes, as reported by FECS. It is small, because drivers read and copy the whole
    /// context dword by dword.
    pub graph_context_bytes: u32,
    /// Fused-off engines in the format of `ptop::ENGINES_DISABLED`: display and video decoding.
    pub engines_disabled: u32,
}

/// NVIDIA's PCI vendor ID.
pub const VENDOR_NVIDIA: u16 = 0x10de;
/// PCI class code of a 3D controller, which host VGA arbitration ignores.
pub const CLASS_3D_CONTROLLER: u32 = 0x03_02_00;

/// A small configuration of the Quadro 6000: one GPC with four TPCs.
pub const GF100: Chip = Chip {
    name: "GF100",
    chipset: 0x0c0,
    boot0: 0x0c03_00a3,
    pci_device: 0x06d8,
    pci_revision: 0xa3,
    crystal_hz: 27_000_000,
    gpcs: 1,
    tpcs_per_gpc: 4,
    rops: 1,
    pbdmas: 3,
    ltc_slices: 2,
    graph_context_bytes: 0x2000,
    engines_disabled: 0x7,
};

/// All chips.
pub const CHIPS: &[Chip] = &[GF100];

/// Returns the chip with the chipset number in `boot0`, which is a value of PMC_BOOT_0.
#[must_use]
pub fn by_boot0(boot0: u32) -> Option<&'static Chip> {
    CHIPS.iter().find(|chip| chip.chipset == (boot0 >> 20) & 0x1ff)
}
