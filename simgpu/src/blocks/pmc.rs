//! PMC: chip identification, the interrupt tree, and the unit enables.

use super::Effect;
use crate::cx::Cx;
use nvspec::regs::pmc::{ENABLE, INTR_EN_0, INTR_MASK_0, Reg};

/// State of the interrupt lines to PMC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lines {
    /// The asserted lines, as bits of INTR_0.
    pub(crate) pending: u32,
}

impl Lines {
    /// Returns true if the card's interrupt line is asserted.
    pub(crate) fn level(self, cx: &Cx) -> bool {
        let enabled = INTR_EN_0::ENABLE.is_set(cx.storage.peek(INTR_EN_0::OFFSET));
        enabled && self.pending & cx.storage.peek(INTR_MASK_0::OFFSET) != 0
    }
}

pub(crate) fn read(reg: Reg, offset: u32, lines: Lines, cx: &Cx) -> u32 {
    match reg {
        Reg::BOOT_0 => cx.chip.boot0,
        Reg::INTR_0 => lines.pending,
        Reg::INTR_LINE_0 => u32::from(lines.level(cx)),
        Reg::BOOT_1
        | Reg::INTR_1
        | Reg::INTR_LTC
        | Reg::INTR_EN_0
        | Reg::INTR_EN_1
        | Reg::ENABLE
        | Reg::PBDMA_ENABLE
        | Reg::ELPG_GATE
        | Reg::INTR_MASK_0
        | Reg::INTR_MASK_1 => cx.storage.read(reg.info(), offset),
    }
}

pub(crate) fn write(reg: Reg, offset: u32, value: u32, cx: &mut Cx) -> Effect {
    match reg {
        Reg::ENABLE => {
            let lost = cx.storage.peek(ENABLE::OFFSET) & !value;
            cx.storage.poke(offset, value);
            Effect::ResetUnits(lost)
        }
        Reg::PBDMA_ENABLE => {
            cx.storage.poke(offset, value & pbdma_mask(cx));
            Effect::None
        }
        Reg::BOOT_0
        | Reg::BOOT_1
        | Reg::INTR_0
        | Reg::INTR_1
        | Reg::INTR_LTC
        | Reg::INTR_LINE_0
        | Reg::INTR_EN_0
        | Reg::INTR_EN_1
        | Reg::ELPG_GATE
        | Reg::INTR_MASK_0
        | Reg::INTR_MASK_1 => {
            cx.storage.write(reg.info(), offset, value);
            Effect::None
        }
    }
}

/// Returns a mask with one bit for each PBDMA of the chip.
pub(crate) fn pbdma_mask(cx: &Cx) -> u32 {
    (1 << cx.chip.pbdmas) - 1
}

#[cfg(test)]
mod tests {
    use crate::gpu::Gpu;
    use nvspec::regs::pmc;

    #[test]
    fn only_pbdmas_that_exist_can_be_enabled() {
        let mut gpu = Gpu::for_test();
        gpu.write32(pmc::PBDMA_ENABLE::OFFSET, u32::MAX);
        assert_eq!(gpu.read32(pmc::PBDMA_ENABLE::OFFSET), 7);
    }

    #[test]
    fn identity_is_the_chips_and_cannot_be_written() {
        let mut gpu = Gpu::for_test();
        gpu.write32(pmc::BOOT_0::OFFSET, 0);
        assert_eq!(gpu.read32(pmc::BOOT_0::OFFSET), 0x0c03_00a3);
    }
}
