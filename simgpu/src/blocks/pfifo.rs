//! PFIFO and PBDMA registers. [`crate::fifo`] implements their behaviour.

use super::pmc;
use crate::cx::Cx;
use crate::fifo::Fifo;
use nvspec::regs::{pbdma, pfifo};

pub(crate) fn read(reg: pfifo::Reg, index: u32, offset: u32, fifo: &Fifo, cx: &Cx) -> u32 {
    use pfifo::Reg;
    match reg {
        Reg::INTR => Fifo::interrupts(cx),
        Reg::RUNLIST_STATUS => pfifo::RUNLIST_STATUS::PENDING.encode(u32::from(fifo.runlist_pending)),
        Reg::ENG_RUNLIST => pfifo::ENG_RUNLIST::PENDING.with(cx.storage.peek(offset), u32::from(fifo.runlist_pending)),
        Reg::PBDMA_INTR_ID => Fifo::pbdma_interrupts(cx),
        Reg::NON_STALL_ID => Fifo::non_stall_engines(cx),
        Reg::PREEMPT => fifo.preempt_state(cx),
        Reg::ENGINE_STATUS => fifo.engine_status(index, cx),
        Reg::CHANNEL => fifo.channel_bind(index),
        Reg::CHANNEL_STATE => fifo.channel_state(index),
        Reg::INTR_EN
        | Reg::INTR_STALL
        | Reg::SCHED_EN
        | Reg::PBDMA_PRESENT
        | Reg::ENGINE_PBDMA_MASK
        | Reg::IDLE_FILTER
        | Reg::USERD_BASE
        | Reg::RUNLIST_BASE
        | Reg::RUNLIST
        | Reg::ENG_RUNLIST_BASE
        | Reg::TIMESLICE
        | Reg::INTR_0_REASON
        | Reg::SCHED_ERROR_REASON
        | Reg::INTR_16_REASON
        | Reg::INTR_24_REASON
        | Reg::MMU_FAULT_ID
        | Reg::NON_STALL_INTR
        | Reg::NON_STALL_EN
        | Reg::SCHED_ENABLE_ACK
        | Reg::SCHED_DISABLE
        | Reg::RUNLIST_INTR
        | Reg::RUNLIST_INTR_2
        | Reg::FAULT_TRIGGER
        | Reg::FAULT_INST
        | Reg::FAULT_VA_LO
        | Reg::FAULT_VA_HI
        | Reg::FAULT_TYPE => cx.storage.read(reg.info(), offset),
    }
}

pub(crate) fn write(reg: pfifo::Reg, index: u32, offset: u32, value: u32, fifo: &mut Fifo, cx: &mut Cx) {
    use pfifo::Reg;
    match reg {
        Reg::PBDMA_PRESENT => cx.storage.poke(offset, value & pmc::pbdma_mask(cx)),
        Reg::RUNLIST => {
            cx.storage.poke(offset, value);
            fifo.submit_runlist(cx);
        }
        Reg::PREEMPT => fifo.preempt(value, cx),
        Reg::SCHED_ENABLE_ACK => Fifo::acknowledge_errors(value, cx),
        Reg::FAULT_TRIGGER => {
            cx.storage.poke(offset, value);
            if pfifo::FAULT_TRIGGER::TRIGGER.is_set(value) {
                fifo.trigger_fault(index, cx);
            }
        }
        Reg::CHANNEL => fifo.bind(index, value, cx),
        Reg::CHANNEL_STATE => fifo.control(index, value, cx),
        Reg::INTR
        | Reg::INTR_EN
        | Reg::INTR_STALL
        | Reg::SCHED_EN
        | Reg::SCHED_DISABLE
        | Reg::ENGINE_PBDMA_MASK
        | Reg::IDLE_FILTER
        | Reg::USERD_BASE
        | Reg::RUNLIST_BASE
        | Reg::RUNLIST_STATUS
        | Reg::ENG_RUNLIST_BASE
        | Reg::ENG_RUNLIST
        | Reg::TIMESLICE
        | Reg::INTR_0_REASON
        | Reg::SCHED_ERROR_REASON
        | Reg::INTR_16_REASON
        | Reg::INTR_24_REASON
        | Reg::MMU_FAULT_ID
        | Reg::PBDMA_INTR_ID
        | Reg::NON_STALL_ID
        | Reg::NON_STALL_INTR
        | Reg::NON_STALL_EN
        | Reg::ENGINE_STATUS
        | Reg::RUNLIST_INTR
        | Reg::RUNLIST_INTR_2
        | Reg::FAULT_INST
        | Reg::FAULT_VA_LO
        | Reg::FAULT_VA_HI
        | Reg::FAULT_TYPE => cx.storage.write(reg.info(), offset, value),
    }
    if !acknowledges(offset) {
        fifo.retry_waiting();
    }
}

/// Returns true if a write to `offset` only acknowledges an interrupt. Drivers make such a write for each submission.
pub(crate) fn acknowledges(offset: u32) -> bool {
    matches!(pfifo::decode(offset), Some((pfifo::Reg::INTR | pfifo::Reg::NON_STALL_INTR, _)))
}

pub(crate) fn read_pbdma(reg: pbdma::Reg, offset: u32, cx: &Cx) -> u32 {
    use pbdma::Reg;
    match reg {
        Reg::GP_BASE_LO
        | Reg::GP_BASE_HI
        | Reg::PB_HEADER
        | Reg::METHOD_0
        | Reg::DATA_0
        | Reg::INTR_0
        | Reg::INTR_EN_0
        | Reg::CHANNEL
        | Reg::INTR_STALL
        | Reg::TIMEOUT => cx.storage.read(reg.info(), offset),
    }
}

pub(crate) fn write_pbdma(reg: pbdma::Reg, index: u32, offset: u32, value: u32, fifo: &mut Fifo, cx: &mut Cx) {
    use pbdma::Reg;
    cx.storage.write(reg.info(), offset, value);
    match reg {
        Reg::INTR_0 => fifo.pbdma_cleared(index, cx),
        Reg::GP_BASE_LO
        | Reg::GP_BASE_HI
        | Reg::PB_HEADER
        | Reg::METHOD_0
        | Reg::DATA_0
        | Reg::INTR_EN_0
        | Reg::CHANNEL
        | Reg::INTR_STALL
        | Reg::TIMEOUT => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{Gpu, concerns_scheduler};

    #[test]
    fn interrupt_acknowledgement_wakes_channels_only_for_faults() {
        let mut gpu = Gpu::for_test();
        gpu.fifo.channels[3].retry_at = Some(7);
        for offset in [pfifo::INTR::OFFSET, pfifo::NON_STALL_INTR::at(4)] {
            gpu.write32(offset, u32::MAX);
            assert!(!concerns_scheduler(offset));
            assert_eq!(gpu.fifo.channels[3].retry_at, Some(7));
        }
        // A new fault is not reported until the driver has read the previous fault report.
        let offset = pfifo::MMU_FAULT_ID::OFFSET;
        gpu.write32(offset, 1);
        assert!(concerns_scheduler(offset));
        assert_eq!(gpu.fifo.channels[3].retry_at, Some(0));
    }
}
