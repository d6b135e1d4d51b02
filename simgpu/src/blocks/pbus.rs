//! PBUS: the PRAMIN window and the BAR instance blocks. The model does not raise access faults, because drivers probe
//! registers of other chips, and every probe would fault.

use crate::cx::Cx;
use card::Aperture;
use nvspec::regs::pbus::{INTR, INTR_EN, Reg};

pub(crate) fn read(reg: Reg, offset: u32, cx: &Cx) -> u32 {
    match reg {
        Reg::INTR
        | Reg::INTR_EN
        | Reg::DEBUG_1
        | Reg::DEBUG_4
        | Reg::HWSQ_SLEEP
        | Reg::HWSQ_STATE
        | Reg::PWM
        | Reg::PRAMIN_WINDOW
        | Reg::BAR1_BLOCK
        | Reg::BIND_STATUS
        | Reg::BAR3_BLOCK
        | Reg::PEEPHOLE_BLOCK => cx.storage.read(reg.info(), offset),
    }
}

pub(crate) fn write(reg: Reg, offset: u32, value: u32, cx: &mut Cx) {
    cx.storage.write(reg.info(), offset, value);
    match reg {
        Reg::PRAMIN_WINDOW => cx.apertures.place_pramin(value),
        Reg::BAR1_BLOCK => cx.apertures.bind(Aperture::Bar1, value, &cx.memory),
        Reg::BAR3_BLOCK => cx.apertures.bind(Aperture::Bar3, value, &cx.memory),
        Reg::INTR
        | Reg::INTR_EN
        | Reg::DEBUG_1
        | Reg::DEBUG_4
        | Reg::HWSQ_SLEEP
        | Reg::HWSQ_STATE
        | Reg::PWM
        | Reg::BIND_STATUS
        | Reg::PEEPHOLE_BLOCK => {}
    }
}

/// Returns true if the unit asserts its interrupt line to PMC.
pub(crate) fn asserts(cx: &Cx) -> bool {
    cx.storage.peek(INTR::OFFSET) & cx.storage.peek(INTR_EN::OFFSET) != 0
}
