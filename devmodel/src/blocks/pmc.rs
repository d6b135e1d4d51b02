//! PMC: chip identification, the interrupt tree, and the enable registers.

use super::{At, Cx};
use nvspec::regs::pmc::{self, Reg};
use serde::{Deserialize, Serialize};

/// The enable registers of units and PBDMAs. All other registers of PMC are plain storage or derived from other blocks.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Pmc {
    enable: u32,
    pbdma_enable: u32,
}

impl Pmc {
    /// Reads a register. `pending` is the mask of units with a pending interrupt.
    pub(crate) fn read(&self, reg: Reg, at: At, pending: u32, cx: &Cx) -> u32 {
        match reg {
            Reg::BOOT_0 => cx.config.chip.boot0,
            // GUESS from driver behavior: the status registers show only interrupts that are enabled in the mask.
            Reg::INTR_0 | Reg::INTR_LINE_0 => pending & cx.storage.get(pmc::INTR_MASK_0::OFFSET),
            Reg::BOOT_1 | Reg::INTR_1 => 0,
            Reg::ENABLE => self.enable,
            Reg::PBDMA_ENABLE => self.pbdma_enable,
            _ => cx.plain_read(at),
        }
    }

    /// Writes a register. Returns the units that the write resets, in the format of the enable register.
    pub(crate) fn write(&mut self, reg: Reg, at: At, value: u32, cx: &mut Cx) -> u32 {
        match reg {
            Reg::ENABLE => {
                let reset = self.enable & !value;
                self.enable = value;
                return reset;
            }
            Reg::PBDMA_ENABLE => self.pbdma_enable = value & pbdma_mask(cx),
            Reg::BOOT_0 | Reg::BOOT_1 | Reg::INTR_0 | Reg::INTR_1 | Reg::INTR_LINE_0 => {}
            _ => cx.plain_write(at, value),
        }
        0
    }

    pub(crate) fn reset(&mut self) {
        let Self { enable, pbdma_enable } = self;
        (*enable, *pbdma_enable) = (0, 0);
    }

    /// Returns the units that the guest has enabled.
    #[must_use]
    pub fn enable(&self) -> u32 {
        self.enable
    }
}

/// Returns the mask of the chip's PBDMAs.
pub(crate) fn pbdma_mask(cx: &Cx) -> u32 {
    1u32.checked_shl(cx.config.chip.pbdmas).unwrap_or(0).wrapping_sub(1)
}

/// Returns the level of the interrupt line.
pub(crate) fn line(pending: u32, storage: &crate::storage::Storage) -> bool {
    let enabled = pmc::INTR_EN_0::ENABLE.is_set(storage.get(pmc::INTR_EN_0::OFFSET));
    enabled && pending & storage.get(pmc::INTR_MASK_0::OFFSET) != 0
}
