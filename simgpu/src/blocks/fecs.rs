//! FECS and GPCCS, the falcons that switch PGRAPH contexts. Their firmware is not executed: [`crate::graph`] implements
//! its commands. As on hardware, the falcons are inactive until a driver loads the firmware.

use crate::cx::Cx;
use crate::falcon::{CodeMemory, DataMemory, SavedCode, SavedMemory};
use crate::fifo::Fifo;
use crate::graph;
use nvspec::regs::{fecs, gpccs};
use saved_state::Invalid;

#[derive(Debug)]
pub(crate) struct GraphFalcons {
    fecs: DataMemory,
    gpccs: DataMemory,
    fecs_code: CodeMemory,
    gpccs_code: CodeMemory,
}

impl GraphFalcons {
    pub(crate) fn new() -> Self {
        Self {
            fecs: DataMemory::new(),
            gpccs: DataMemory::new(),
            fecs_code: CodeMemory::new(),
            gpccs_code: CodeMemory::new(),
        }
    }

    pub(crate) fn save(&self) -> ([SavedMemory; 2], [SavedCode; 2]) {
        let Self { fecs, gpccs, fecs_code, gpccs_code } = self;
        ([fecs.save(), gpccs.save()], [fecs_code.save(), gpccs_code.save()])
    }

    pub(crate) fn restore(&mut self, data: [SavedMemory; 2], code: [SavedCode; 2]) -> Result<(), Invalid> {
        let ([fecs, gpccs], [fecs_code, gpccs_code]) = (data, code);
        *self = Self {
            fecs: DataMemory::restored(fecs)?,
            gpccs: DataMemory::restored(gpccs)?,
            fecs_code: CodeMemory::restored(fecs_code)?,
            gpccs_code: CodeMemory::restored(gpccs_code)?,
        };
        Ok(())
    }

    pub(crate) fn read(&mut self, reg: fecs::Reg, offset: u32, fifo: &Fifo, cx: &Cx) -> u32 {
        use fecs::{Reg, UNITS};
        match reg {
            Reg::DMEM_CONTROL => self.fecs.control(),
            Reg::DMEM_DATA => self.fecs.read(),
            Reg::IMEM_CONTROL => self.fecs_code.control(),
            Reg::IMEM_TAG => self.fecs_code.tag(),
            // The uploaded code is discarded.
            Reg::IMEM_DATA => 0,
            Reg::UNITS => UNITS::GPCS.encode(cx.chip.gpcs) | UNITS::ROPS.encode(cx.chip.rops),
            Reg::CURRENT => graph::current(fifo),
            Reg::INTR_SET
            | Reg::INTR_CLEAR
            | Reg::INTR
            | Reg::INTR_MISC
            | Reg::CPU_CONTROL
            | Reg::BOOT_VECTOR
            | Reg::HWCFG
            | Reg::DMA_CONTROL
            | Reg::VERSION
            | Reg::CHANNEL_SWITCH
            | Reg::COMMAND_DATA
            | Reg::COMMAND
            | Reg::RESET_LINES
            | Reg::MAILBOX
            | Reg::MAILBOX_SET
            | Reg::MAILBOX_CLEAR
            | Reg::NEXT
            | Reg::UCODE_INTR
            | Reg::UCODE_ERROR => cx.storage.read(reg.info(), offset),
        }
    }

    pub(crate) fn write(&mut self, reg: fecs::Reg, index: u32, offset: u32, value: u32, fifo: &mut Fifo, cx: &mut Cx) {
        use fecs::{CPU_CONTROL, INTR, INTR_SET, MAILBOX, Reg, UCODE_INTR};
        match reg {
            Reg::DMEM_CONTROL => self.fecs.set_control(value),
            Reg::DMEM_DATA => self.fecs.write(value),
            Reg::IMEM_CONTROL => self.fecs_code.set_control(value),
            Reg::IMEM_TAG => self.fecs_code.set_tag(value),
            Reg::IMEM_DATA => self.fecs_code.write(value),
            Reg::MAILBOX_SET => {
                let at = MAILBOX::at(index);
                cx.storage.poke(at, cx.storage.peek(at) | value);
            }
            Reg::MAILBOX_CLEAR => {
                let at = MAILBOX::at(index);
                cx.storage.poke(at, cx.storage.peek(at) & !value);
            }
            Reg::CPU_CONTROL => {
                cx.storage.poke(offset, value);
                if CPU_CONTROL::START.is_set(value) {
                    // The FECS program starts the GPCCS programs.
                    let begins = self.fecs_code.begins_at(cx.storage.peek(fecs::BOOT_VECTOR::OFFSET))
                        && self.gpccs_code.begins_at(cx.storage.peek(gpccs::BOOT_VECTOR::OFFSET));
                    if begins {
                        graph::fecs_started(fifo, cx);
                    } else {
                        tracing::debug!("FECS was started without a program for FECS and GPCCS");
                    }
                }
            }
            Reg::COMMAND => graph::fecs_command(value, fifo, cx),
            Reg::INTR_SET => {
                if INTR_SET::CONTEXT.is_set(value) {
                    graph::fecs_switch(fifo, cx);
                }
            }
            Reg::INTR_CLEAR => cx.storage.poke(INTR::OFFSET, cx.storage.peek(INTR::OFFSET) & !value),
            // Writing the first word acknowledges the firmware's errors.
            Reg::UCODE_ERROR if index == 0 => {
                cx.storage.poke(UCODE_INTR::OFFSET, cx.storage.peek(UCODE_INTR::OFFSET) & !value);
            }
            // A read computes this register from the context that PGRAPH has loaded.
            Reg::CURRENT => {}
            Reg::INTR
            | Reg::INTR_MISC
            | Reg::BOOT_VECTOR
            | Reg::HWCFG
            | Reg::DMA_CONTROL
            | Reg::VERSION
            | Reg::CHANNEL_SWITCH
            | Reg::COMMAND_DATA
            | Reg::UNITS
            | Reg::RESET_LINES
            | Reg::MAILBOX
            | Reg::NEXT
            | Reg::UCODE_INTR
            | Reg::UCODE_ERROR => cx.storage.write(reg.info(), offset, value),
        }
    }

    pub(crate) fn read_gpccs(&mut self, reg: gpccs::Reg, offset: u32, cx: &Cx) -> u32 {
        use gpccs::Reg;
        match reg {
            Reg::DMEM_CONTROL => self.gpccs.control(),
            Reg::DMEM_DATA => self.gpccs.read(),
            Reg::IMEM_CONTROL => self.gpccs_code.control(),
            Reg::IMEM_TAG => self.gpccs_code.tag(),
            Reg::IMEM_DATA => 0,
            Reg::CPU_CONTROL | Reg::BOOT_VECTOR | Reg::HWCFG | Reg::DMA_CONTROL | Reg::VERSION => {
                cx.storage.read(reg.info(), offset)
            }
        }
    }

    pub(crate) fn write_gpccs(&mut self, reg: gpccs::Reg, offset: u32, value: u32, cx: &mut Cx) {
        use gpccs::Reg;
        match reg {
            Reg::DMEM_CONTROL => self.gpccs.set_control(value),
            Reg::DMEM_DATA => self.gpccs.write(value),
            Reg::IMEM_CONTROL => self.gpccs_code.set_control(value),
            Reg::IMEM_TAG => self.gpccs_code.set_tag(value),
            Reg::IMEM_DATA => self.gpccs_code.write(value),
            Reg::CPU_CONTROL | Reg::BOOT_VECTOR | Reg::HWCFG | Reg::DMA_CONTROL | Reg::VERSION => {
                cx.storage.write(reg.info(), offset, value)
            }
        }
    }

    pub(crate) fn reset(&mut self) {
        *self = Self::new();
    }
}
