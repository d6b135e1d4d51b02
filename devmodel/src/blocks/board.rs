//! Units other than the engines: capabilities, the PCI mirror, the privileged ring, and the PMU. Also contains the copy
//! engines' falcons.

use super::falcon::{Dmem, Imem, Intr};
use super::{At, Cx};
use crate::events::CopyError;
use crate::pci::PciConfig;
use crate::storage::Storage;
use nvspec::falcon::Falcon;
use nvspec::regs::pmu::{CPU_CONTROL, DMA_CONTROL};
use nvspec::regs::{ce0, ce1, pmu, pmu_queue, ppci, privring_hub, ptop};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};

pub(crate) fn read_ptop(reg: ptop::Reg, at: At, cx: &Cx) -> u32 {
    let chip = cx.config.chip;
    match reg {
        ptop::Reg::GPC_COUNT => chip.gpcs,
        ptop::Reg::TPC_PER_GPC => chip.tpcs_per_gpc,
        ptop::Reg::FBP_COUNT => 1,
        ptop::Reg::FBP_DISABLED => 0,
        ptop::Reg::ENGINES_DISABLED => chip.engines_disabled,
        _ => cx.plain_read(at),
    }
}

/// Reads the mirror of configuration space, which drivers use.
pub(crate) fn read_ppci(reg: ppci::Reg, at: At, pci: &PciConfig, cx: &Cx) -> u32 {
    match reg {
        ppci::Reg::CONFIG | ppci::Reg::CAPABILITIES | ppci::Reg::LINK_STATUS => {
            pci.read32(at.offset.wrapping_sub(ppci::BASE))
        }
        ppci::Reg::MSI_REARM => 0,
        _ => cx.plain_read(at),
    }
}

/// Writes the mirror of configuration space. Writes to standard registers are ignored, because the VMM handles them.
/// Returns true if the guest has rearmed MSI.
pub(crate) fn write_ppci(reg: ppci::Reg, at: At, value: u32, cx: &mut Cx) -> bool {
    match reg {
        ppci::Reg::CONFIG | ppci::Reg::CAPABILITIES | ppci::Reg::LINK_STATUS => false,
        ppci::Reg::MSI_REARM => ppci::MSI_REARM::REARM.get(value) == ppci::MSI_REARM::REARM.mask(),
        _ => {
            cx.plain_write(at, value);
            false
        }
    }
}

pub(crate) fn read_privring(reg: privring_hub::Reg, at: At, cx: &Cx) -> u32 {
    match reg {
        privring_hub::Reg::HUB_COUNT | privring_hub::Reg::ROP_COUNT => 1,
        privring_hub::Reg::GPC_COUNT => cx.config.chip.gpcs,
        // Commands complete immediately.
        privring_hub::Reg::COMMAND => 0,
        _ => cx.plain_read(at),
    }
}

pub(crate) fn write_privring(reg: privring_hub::Reg, at: At, value: u32, cx: &mut Cx) {
    match reg {
        privring_hub::Reg::COMMAND
        | privring_hub::Reg::HUB_COUNT
        | privring_hub::Reg::ROP_COUNT
        | privring_hub::Reg::GPC_COUNT => {}
        _ => cx.plain_write(at, value),
    }
}

/// The PMU. Once started, it reports its queues and accepts commands, but never sends messages.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Pmu {
    intr: Intr,
    dmem: Dmem,
}

impl Pmu {
    pub(crate) fn read(&mut self, reg: pmu::Reg, at: At, cx: &Cx) -> u32 {
        use pmu::Reg;
        match reg {
            Reg::INTR => self.intr.status,
            Reg::INTR_EN => self.intr.enable,
            Reg::INTR_SET | Reg::INTR_CLEAR | Reg::INTR_EN_SET | Reg::INTR_EN_CLEAR => 0,
            Reg::DMEM_CONTROL => self.dmem.control(at.index()),
            Reg::DMEM_DATA => self.dmem.read(at.index()),
            // Memory scrubbing completes immediately.
            Reg::DMA_CONTROL => {
                cx.plain_read(at) & !(DMA_CONTROL::IMEM_SCRUBBING.mask() | DMA_CONTROL::DMEM_SCRUBBING.mask())
            }
            _ => cx.plain_read(at),
        }
    }

    pub(crate) fn write(&mut self, reg: pmu::Reg, at: At, value: u32, cx: &mut Cx) {
        use pmu::Reg;
        match reg {
            Reg::INTR_SET => self.intr.status |= value,
            Reg::INTR_CLEAR => self.intr.status &= !value,
            Reg::INTR_EN_SET => self.intr.enable |= value,
            Reg::INTR_EN_CLEAR => self.intr.enable &= !value,
            Reg::INTR | Reg::INTR_EN => {}
            Reg::DMEM_CONTROL => self.dmem.set_control(at.index(), value),
            Reg::DMEM_DATA => self.dmem.write(at.index(), value),
            Reg::CPU_CONTROL => {
                cx.plain_write(at, value);
                if CPU_CONTROL::START.is_set(value) {
                    cx.storage.set(pmu::QUEUE_INFO::OFFSET, pmu_queue::COMMANDS);
                    cx.storage.set(pmu::MESSAGE_INFO::OFFSET, pmu_queue::MESSAGES);
                }
            }
            Reg::QUEUE_HEAD => {
                cx.plain_write(at, value);
                if at.index < pmu::QUEUE_TAIL::COUNT {
                    cx.storage.set(pmu::QUEUE_TAIL::at(at.index), value);
                }
            }
            _ => cx.plain_write(at, value),
        }
    }

    /// Validates restored state.
    pub(crate) fn check(&self) -> Result<(), Invalid> {
        self.dmem.check()
    }

    pub(crate) fn reset(&mut self, cx: &mut Cx) {
        let Self { intr, dmem } = self;
        *intr = Intr::default();
        dmem.reset();
        cx.storage.reset_range(pmu::BASE, pmu::END);
    }

    pub(crate) fn pending(&self) -> bool {
        // GUESS: the routing register selects the interrupts that are delivered to the host. It is ignored, because the
        // PMU raises no interrupts on its own.
        self.intr.pending()
    }
}

/// A copy engine's falcon, which only accepts firmware uploads and reports errors. The card performs the copies.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CopyEngine {
    intr: Intr,
    dmem: Dmem,
    imem: Imem,
    current: u32,
    /// True if the firmware has been started.
    running: bool,
}

/// A register that both copy engines have.
#[derive(Clone, Copy)]
pub(crate) enum CopyReg {
    IntrSet,
    IntrClear,
    Intr,
    EnableSet,
    EnableClear,
    Enable,
    Current,
    DmemControl,
    DmemData,
    ImemControl,
    ImemData,
    Control,
    Plain,
}

macro_rules! copy_reg {
    ($block:ident) => {
        impl From<$block::Reg> for CopyReg {
            fn from(reg: $block::Reg) -> Self {
                match reg {
                    $block::Reg::INTR_SET => Self::IntrSet,
                    $block::Reg::INTR_CLEAR => Self::IntrClear,
                    $block::Reg::INTR => Self::Intr,
                    $block::Reg::INTR_EN_SET => Self::EnableSet,
                    $block::Reg::INTR_EN_CLEAR => Self::EnableClear,
                    $block::Reg::INTR_EN => Self::Enable,
                    $block::Reg::CHANNEL_CURRENT => Self::Current,
                    $block::Reg::DMEM_CONTROL => Self::DmemControl,
                    $block::Reg::DMEM_DATA => Self::DmemData,
                    $block::Reg::IMEM_CONTROL => Self::ImemControl,
                    $block::Reg::IMEM_DATA => Self::ImemData,
                    $block::Reg::CPU_CONTROL => Self::Control,
                    _ => Self::Plain,
                }
            }
        }
    };
}
copy_reg!(ce0);
copy_reg!(ce1);

impl CopyEngine {
    pub(crate) fn read(&mut self, reg: CopyReg, at: At, cx: &Cx) -> u32 {
        match reg {
            CopyReg::Intr => self.intr.status,
            CopyReg::Enable => self.intr.enable,
            CopyReg::Current => self.current,
            CopyReg::DmemControl => self.dmem.control(0),
            CopyReg::DmemData => self.dmem.read(0),
            CopyReg::ImemControl => self.imem.control(),
            CopyReg::ImemData | CopyReg::IntrSet | CopyReg::IntrClear | CopyReg::EnableSet | CopyReg::EnableClear => 0,
            CopyReg::Control | CopyReg::Plain => cx.plain_read(at),
        }
    }

    pub(crate) fn write(&mut self, reg: CopyReg, at: At, value: u32, cx: &mut Cx) {
        match reg {
            CopyReg::IntrSet => self.intr.status |= value,
            CopyReg::IntrClear => self.intr.status &= !value,
            CopyReg::EnableSet => self.intr.enable |= value,
            CopyReg::EnableClear => self.intr.enable &= !value,
            CopyReg::Intr | CopyReg::Enable => {}
            CopyReg::Current => self.current = value,
            CopyReg::DmemControl => self.dmem.set_control(0, value),
            CopyReg::DmemData => self.dmem.write(0, value),
            CopyReg::ImemControl => self.imem.set_control(value),
            CopyReg::ImemData => self.imem.write(value),
            CopyReg::Control => {
                cx.plain_write(at, value);
                if ce0::CPU_CONTROL::START.is_set(value) {
                    self.running = true;
                    let falcon = if at.offset < ce1::BASE { Falcon::Copy0 } else { Falcon::Copy1 };
                    cx.backend.firmware_started(falcon, self.imem.dwords(), self.dmem.dwords());
                }
            }
            CopyReg::Plain => cx.plain_write(at, value),
        }
    }

    /// Validates restored state.
    pub(crate) fn check(&self) -> Result<(), Invalid> {
        self.dmem.check()?;
        self.imem.check()
    }

    /// Resets the falcon. Its registers are at `base..end`.
    pub(crate) fn reset(&mut self, base: u32, end: u32, cx: &mut Cx) {
        let Self { intr, dmem, imem, current, running } = self;
        *intr = Intr::default();
        (*current, *running) = (0, false);
        dmem.reset();
        imem.set_control(0);
        cx.storage.reset_range(base, end);
    }

    /// Reports a rejected method if the firmware has been started. As firmware does, stores the report, raises and
    /// enables the interrupt, and routes it to the host. `base` is the offset of the falcon's registers.
    #[expect(clippy::cast_possible_truncation, reason = "the register contains a 28-bit page number")]
    pub(crate) fn error(&mut self, error: &CopyError, base: u32, storage: &mut Storage) {
        if !self.running {
            return;
        }
        self.intr.status |= error.intr;
        self.intr.enable |= error.intr;
        // The registers of both copy engines have the same layout.
        let at = |register: u32| register.wrapping_sub(ce0::BASE).wrapping_add(base);
        let dispatch = at(ce0::INTR_DISPATCH::OFFSET);
        storage.set(dispatch, storage.get(dispatch) | (error.intr & 0xffff));
        storage.set(at(ce0::SCRATCH::at(0)), error.report);
        storage.set(at(ce0::SCRATCH::at(1)), error.data);
        if let Some(instance) = error.instance {
            self.current = ce0::CHANNEL_CURRENT::VALID.mask()
                | ce0::CHANNEL_CURRENT::ADDRESS.encode((instance.address() >> 12) as u32);
        }
    }

    pub(crate) fn pending(&self) -> bool {
        self.intr.pending()
    }
}
