//! The PMU, which is a falcon. Its firmware is not executed. The model has two queues, consumes commands, and sends no
//! messages.

use crate::cx::Cx;
use crate::falcon::{DataMemory, SavedMemory};
use nvspec::regs::pmu::{INTR, INTR_EN, MESSAGE_INFO, QUEUE_HEAD, QUEUE_INFO, QUEUE_TAIL, Reg};
use nvspec::regs::{pmu, pmu_queue};
use saved_state::Invalid;

#[derive(Debug)]
pub(crate) struct Pmu {
    data: DataMemory,
}

impl Pmu {
    pub(crate) fn new() -> Self {
        Self { data: DataMemory::new() }
    }

    pub(crate) fn save(&self) -> SavedMemory {
        let Self { data } = self;
        data.save()
    }

    pub(crate) fn restore(&mut self, saved: SavedMemory) -> Result<(), Invalid> {
        self.data = DataMemory::restored(saved)?;
        Ok(())
    }

    pub(crate) fn read(&mut self, reg: Reg, index: u32, offset: u32, cx: &Cx) -> u32 {
        match (reg, index) {
            (Reg::DMEM_CONTROL, 0) => self.data.control(),
            (Reg::DMEM_DATA, 0) => self.data.read(),
            // The PMU consumes the host's commands immediately.
            (Reg::QUEUE_TAIL, 0) => cx.storage.peek(QUEUE_HEAD::at(0)),
            _ => cx.storage.read(reg.info(), offset),
        }
    }

    pub(crate) fn write(&mut self, reg: Reg, index: u32, offset: u32, value: u32, cx: &mut Cx) {
        match (reg, index) {
            (Reg::DMEM_CONTROL, 0) => self.data.set_control(value),
            (Reg::DMEM_DATA, 0) => self.data.write(value),
            (Reg::INTR_CLEAR, _) => cx.storage.poke(INTR::OFFSET, cx.storage.peek(INTR::OFFSET) & !value),
            (Reg::INTR_SET, _) => cx.storage.poke(INTR::OFFSET, cx.storage.peek(INTR::OFFSET) | value),
            (Reg::INTR_EN_SET, _) => cx.storage.poke(INTR_EN::OFFSET, cx.storage.peek(INTR_EN::OFFSET) | value),
            (Reg::INTR_EN_CLEAR, _) => cx.storage.poke(INTR_EN::OFFSET, cx.storage.peek(INTR_EN::OFFSET) & !value),
            (Reg::CPU_CONTROL, _) => {
                cx.storage.poke(offset, value);
                if pmu::CPU_CONTROL::START.is_set(value) {
                    cx.storage.poke(QUEUE_INFO::OFFSET, pmu_queue::COMMANDS);
                    cx.storage.poke(MESSAGE_INFO::OFFSET, pmu_queue::MESSAGES);
                }
            }
            _ => cx.storage.write(reg.info(), offset, value),
        }
    }

    pub(crate) fn reset(&mut self, cx: &mut Cx) {
        let Self { data } = self;
        *data = DataMemory::new();
        cx.storage.reset_range(pmu::BASE, pmu::END);
        cx.storage.poke(QUEUE_TAIL::at(0), 0);
    }

    /// Returns true if the unit asserts its interrupt line to PMC.
    pub(crate) fn asserts(cx: &Cx) -> bool {
        cx.storage.peek(INTR::OFFSET) & cx.storage.peek(INTR_EN::OFFSET) != 0
    }
}
