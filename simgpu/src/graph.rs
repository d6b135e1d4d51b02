//! PGRAPH's traps and FECS's contexts. The `simgpu-engines` crate executes PGRAPH's classes.
//!
//! FECS's firmware is not executed. Its commands have the same effect as in nouveau's firmware.

use crate::cx::Cx;
use crate::faults::EngineId;
use crate::fifo::Fifo;
use crate::fifo::decoder::Method;
use crate::fifo::slot::{Condition, Slot};
use nvspec::addr::{GpuVa, Target};
use nvspec::instance::graph_image;
use nvspec::regs::fecs::{COMMAND_DATA, MAILBOX, NEXT, UCODE_INTR};
use nvspec::regs::{fecs, fecs_command, pgraph, sm_trap};
use simgpu_engines::engines::EngineError;
use simgpu_memory::mmu::Access;

/// Raises PGRAPH's interrupt for a method that failed.
pub(crate) fn trap(error: EngineError, class: u32, method: Method, cx: &mut Cx) {
    use pgraph::INTR::{DATA_ERROR, ILLEGAL_CLASS, ILLEGAL_METHOD, TRAP};
    use pgraph::TRAPPED_ADDRESS::{METHOD, SUBCHANNEL};
    let bits = match error {
        EngineError::IllegalClass => ILLEGAL_CLASS,
        EngineError::Data(code) => {
            cx.storage.poke(pgraph::DATA_ERROR::OFFSET, code);
            DATA_ERROR
        }
        EngineError::Warp(code) => {
            warp_error(code, cx);
            TRAP
        }
        EngineError::IllegalMethod | EngineError::Fault(_) | EngineError::ShaderFault(_) => ILLEGAL_METHOD,
    };
    let subchannel = u32::from(method.subchannel);
    cx.storage
        .poke(pgraph::TRAPPED_ADDRESS::OFFSET, SUBCHANNEL.encode(subchannel) | METHOD.encode(method.address >> 2));
    cx.storage.poke(pgraph::TRAPPED_DATA_LO::OFFSET, method.data);
    cx.storage.poke(pgraph::SUBCHANNEL_CLASS::at(subchannel & 7), class);
    let at = pgraph::INTR::OFFSET;
    cx.storage.poke(at, cx.storage.peek(at) | bits.mask());
    tracing::debug!(%error, class, method = method.address, data = method.data, "PGRAPH trap");
}

/// Stores a warp error in the registers of the first multiprocessor, where drivers read it, even if another
/// multiprocessor ran the block.
fn warp_error(code: u32, cx: &mut Cx) {
    let mut set = |at: u32, bits: u32| cx.storage.poke(at, cx.storage.peek(at) | bits);
    set(pgraph::TRAP::OFFSET, pgraph::TRAP::GPC.mask());
    set(pgraph::TRAP_GPCS::OFFSET, 1);
    set(sm_trap::gpc(0), sm_trap::TPC_MASK.encode(1));
    set(sm_trap::tpc(0, 0), sm_trap::SM.mask());
    cx.storage.poke(sm_trap::warp_error(0, 0), code);
}

/// PGRAPH interrupts that stop method execution.
pub(crate) const STOPPING: u32 = pgraph::INTR::TRAP.mask()
    | pgraph::INTR::DATA_ERROR.mask()
    | pgraph::INTR::ILLEGAL_CLASS.mask()
    | pgraph::INTR::ILLEGAL_METHOD.mask();

/// Maximum number of entries in a context's register list.
const MMIO_LIST_MAX: u32 = 256;

/// Adds the register writes listed in the image of a newly loaded context to [`Cx::context_writes`]. They must be
/// performed before the engine executes the channel's methods.
pub(crate) fn loaded(slot: &Slot, cx: &mut Cx) {
    let (EngineId::Graph, Some(resident)) = (slot.id, slot.resident) else { return };
    let mut session = cx.mmu.session(&cx.memory, &resident.space, Access::PRIVILEGED);
    let head = resident.image.offset(graph_image::REGISTERS);
    let (Ok(count), Ok(base)) = (session.read32(head), session.read32(resident.image.offset(graph_image::LIST))) else {
        return;
    };
    if count == 0 {
        return;
    }
    for index in 0..u64::from(count.min(MMIO_LIST_MAX)) {
        let at = GpuVa(u64::from(base) << 8).offset(graph_image::ENTRY_BYTES * index);
        let (Ok(register), Ok(value)) = (session.read32(at), session.read32(at.offset(4))) else { break };
        cx.context_writes.push((register, value));
    }
    if session.write32(head, 0).is_err() {
        tracing::debug!("a context image became read-only");
    }
}

fn instance(register: u32) -> (Target, u64) {
    // The falcon's channel registers have no target field, because FECS expects instance blocks in VRAM.
    (Target::Vram, u64::from(COMMAND_DATA::ADDRESS.get(register)) << 12)
}

/// Returns the value of the current-context register.
pub(crate) fn current(fifo: &Fifo) -> u32 {
    fifo.slots[EngineId::Graph.index()].resident.map_or(0, |resident| {
        fecs::CURRENT::VALID.encode(1) | fecs::CURRENT::ADDRESS.encode((resident.instance.1 >> 12) as u32)
    })
}

/// Completes the start of FECS: reports the context size, and makes PGRAPH available.
pub(crate) fn fecs_started(fifo: &mut Fifo, cx: &mut Cx) {
    cx.storage.poke(MAILBOX::at(1), cx.chip.graph_context_bytes);
    ready(cx);
    fifo.slot(EngineId::Graph).start();
    fifo.retry_waiting();
}

fn ready(cx: &mut Cx) {
    let at = MAILBOX::at(0);
    cx.storage.poke(at, cx.storage.peek(at) | MAILBOX::READY.mask());
}

/// Executes a command from the driver to FECS.
pub(crate) fn fecs_command(command: u32, fifo: &mut Fifo, cx: &mut Cx) {
    let data = cx.storage.peek(COMMAND_DATA::OFFSET);
    if fifo.slot(EngineId::Graph).condition == Condition::Down {
        return;
    }
    match command {
        fecs_command::SET_CHANNEL => {
            cx.storage.poke(NEXT::OFFSET, data);
            switch(fifo, data, cx);
            ready(cx);
        }
        fecs_command::SAVE_CONTEXT => {
            fifo.evict(EngineId::Graph.index(), cx);
            ready(cx);
        }
        _ => {
            // The built-in firmware returns this code for unknown commands.
            const BAD_COMMAND: u32 = 1;
            cx.storage.poke(MAILBOX::at(5), BAD_COMMAND);
            cx.storage.poke(UCODE_INTR::OFFSET, cx.storage.peek(UCODE_INTR::OFFSET) | 1);
            let at = pgraph::INTR::OFFSET;
            cx.storage.poke(at, cx.storage.peek(at) | pgraph::INTR::CTXCTL.mask());
        }
    }
}

/// Loads the next channel's context, or only unloads the current one if there is none, after the driver has raised
/// FECS's context switch interrupt.
pub(crate) fn fecs_switch(fifo: &mut Fifo, cx: &mut Cx) {
    let next = cx.storage.peek(NEXT::OFFSET);
    if fifo.slot(EngineId::Graph).condition != Condition::Down {
        switch(fifo, next, cx);
    }
}

fn switch(fifo: &mut Fifo, next: u32, cx: &mut Cx) {
    let graph = EngineId::Graph.index();
    if !NEXT::VALID.is_set(next) {
        fifo.evict(graph, cx);
        return;
    }
    match fifo.slots[graph].make_current(None, instance(next), cx) {
        Ok(true) => loaded(&fifo.slots[graph], cx),
        Ok(false) => {}
        Err(fault) => {
            let client = fifo.slots[graph].context_client();
            fifo.engine_fault(graph, None, fault, client, cx);
        }
    }
}
