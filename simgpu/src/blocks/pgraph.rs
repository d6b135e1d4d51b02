//! PGRAPH's front end: interrupts, traps, and the registers for setting context state directly.

use crate::cx::Cx;
use crate::faults::EngineId;
use crate::fifo::Fifo;
use crate::graph;
use nvspec::regs::pgraph::{INTR, INTR_EN, PWR_HANDSHAKE, Reg};

pub(crate) fn read(reg: Reg, offset: u32, fifo: &Fifo, cx: &Cx) -> u32 {
    use nvspec::regs::pgraph::STATUS;
    match reg {
        Reg::STATUS => STATUS::BUSY.encode(u32::from(fifo.slots[EngineId::Graph.index()].pending())),
        // The handshake completes immediately.
        Reg::PWR_HANDSHAKE => PWR_HANDSHAKE::BUSY.with(cx.storage.peek(offset), 0),
        Reg::INTR
        | Reg::TRAP
        | Reg::DATA_ERROR
        | Reg::TRAP_GPCS
        | Reg::TRAP_EN
        | Reg::INTR_EN
        | Reg::ICMD_COMMAND
        | Reg::ICMD_DATA
        | Reg::ICMD_ENABLE
        | Reg::CONTROL
        | Reg::ACTIVITY
        | Reg::TRAPPED_ADDRESS
        | Reg::TRAPPED_DATA_LO
        | Reg::TRAPPED_DATA_HI
        | Reg::SUBCHANNEL_CLASS
        | Reg::MTHD_COMMAND
        | Reg::MTHD_DATA
        | Reg::CTX_CONTROL => cx.storage.read(reg.info(), offset),
    }
}

pub(crate) fn write(reg: Reg, offset: u32, value: u32, fifo: &mut Fifo, cx: &mut Cx) {
    cx.storage.write(reg.info(), offset, value);
    match reg {
        Reg::INTR => {
            if cx.storage.peek(INTR::OFFSET) & graph::STOPPING == 0 {
                fifo.slot(EngineId::Graph).resume();
                fifo.retry_waiting();
            }
        }
        // The model ignores context state that is set this way.
        Reg::ICMD_COMMAND | Reg::MTHD_COMMAND => {}
        Reg::TRAP
        | Reg::DATA_ERROR
        | Reg::TRAP_GPCS
        | Reg::TRAP_EN
        | Reg::INTR_EN
        | Reg::ICMD_DATA
        | Reg::ICMD_ENABLE
        | Reg::CONTROL
        | Reg::ACTIVITY
        | Reg::STATUS
        | Reg::TRAPPED_ADDRESS
        | Reg::TRAPPED_DATA_LO
        | Reg::TRAPPED_DATA_HI
        | Reg::SUBCHANNEL_CLASS
        | Reg::MTHD_DATA
        | Reg::PWR_HANDSHAKE
        | Reg::CTX_CONTROL => {}
    }
}

/// Returns true if the unit asserts its interrupt line to PMC.
pub(crate) fn asserts(cx: &Cx) -> bool {
    cx.storage.peek(INTR::OFFSET) & cx.storage.peek(INTR_EN::OFFSET) != 0
}
