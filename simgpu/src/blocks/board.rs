//! Registers outside the engines: capabilities, the PCI mirror, and the privileged ring. Other board registers (GPIO,
//! thermal sensors, fuses, clocks, counters, display) only store values.

use super::Effect;
use crate::cx::Cx;
use nvspec::chip::{CLASS_3D_CONTROLLER, VENDOR_NVIDIA};
use nvspec::regs::{gpc_units, ppci, privring_hub, ptop};

pub(crate) fn read_ptop(reg: ptop::Reg, offset: u32, cx: &Cx) -> u32 {
    use ptop::Reg;
    match reg {
        Reg::GPC_COUNT => cx.chip.gpcs,
        Reg::TPC_PER_GPC => cx.chip.tpcs_per_gpc,
        Reg::ENGINES_DISABLED => cx.chip.engines_disabled,
        Reg::FUSE_CTRL
        | Reg::DEVINIT_STATUS
        | Reg::PCI_STRAPS
        | Reg::FBP_COUNT
        | Reg::GPC_DISABLED
        | Reg::PART_DISABLED
        | Reg::FBP_DISABLED
        | Reg::GPC_OFF
        | Reg::PART_OFF => cx.storage.read(reg.info(), offset),
    }
}

pub(crate) fn read_ppci(reg: ppci::Reg, index: u32, offset: u32, cx: &Cx) -> u32 {
    use ppci::Reg;
    match (reg, index) {
        (Reg::CONFIG, 0) => u32::from(cx.chip.pci_device) << 16 | u32::from(VENDOR_NVIDIA),
        (Reg::CONFIG, 2) => CLASS_3D_CONTROLLER << 8 | u32::from(cx.chip.pci_revision),
        (
            Reg::CONFIG
            | Reg::ROM_CONTROL
            | Reg::CAPABILITIES
            | Reg::LINK_STATUS
            | Reg::PRIVATE
            | Reg::MSI_REARM
            | Reg::PRIVATE_2,
            _,
        ) => cx.storage.read(reg.info(), offset),
    }
}

pub(crate) fn write_ppci(reg: ppci::Reg, offset: u32, value: u32, cx: &mut Cx) -> Effect {
    use ppci::Reg;
    match reg {
        Reg::MSI_REARM if ppci::MSI_REARM::REARM.get(value) == ppci::MSI_REARM::REARM.mask() => Effect::Rearm,
        Reg::CONFIG
        | Reg::ROM_CONTROL
        | Reg::CAPABILITIES
        | Reg::LINK_STATUS
        | Reg::PRIVATE
        | Reg::MSI_REARM
        | Reg::PRIVATE_2 => {
            cx.storage.write(reg.info(), offset, value);
            Effect::None
        }
    }
}

pub(crate) fn read_ring(reg: privring_hub::Reg, offset: u32, cx: &Cx) -> u32 {
    use privring_hub::{COMMAND, Reg};
    match reg {
        // The command completes immediately.
        Reg::COMMAND => COMMAND::COMMAND.with(cx.storage.peek(offset), 0),
        Reg::GPC_COUNT => cx.chip.gpcs,
        Reg::ROP_COUNT => cx.chip.rops,
        Reg::INTR_0 | Reg::INTR_1 | Reg::HUB_COUNT | Reg::DECODE | Reg::ERROR => cx.storage.read(reg.info(), offset),
    }
}

pub(crate) fn read_gpc(reg: gpc_units::Reg, index: u32, cx: &Cx) -> u32 {
    match reg {
        gpc_units::Reg::TPC_COUNT if index < cx.chip.gpcs => cx.chip.tpcs_per_gpc,
        gpc_units::Reg::TPC_COUNT => 0,
    }
}
