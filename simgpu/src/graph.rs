//! PGRAPH beside M2MF: the classes that drivers bind without using, traps, and what FECS does with contexts.
//!
//! FECS's firmware is not executed: its commands do what nouveau's firmware does with them.

use crate::cx::Cx;
use crate::engines::copy::m2mf::M2mf;
use crate::engines::{ContextState, Engine, EngineCx, EngineError, Progress};
use crate::faults::EngineId;
use crate::fifo::Fifo;
use crate::fifo::decoder::Method;
use crate::fifo::slot::{Condition, Slot};
use crate::mmu::Access;
use nvspec::addr::{GpuVa, Target};
use nvspec::class::{id, m2mf9039};
use nvspec::regs::fecs::{COMMAND_DATA, MAILBOX, NEXT, UCODE_INTR};
use nvspec::regs::windows::STATE_RANGES;
use nvspec::regs::{fecs, fecs_command, pgraph};

/// M2MF, and the 2D, 3D and compute classes as far as binding them and the two methods that every class has.
pub(crate) struct GraphClasses {
    m2mf: M2mf,
}

impl GraphClasses {
    pub(crate) fn new(m2mf: M2mf) -> Self {
        Self { m2mf }
    }
}

impl Engine for GraphClasses {
    fn class_supported(&self, class: u32) -> bool {
        matches!(class, id::FERMI_TWOD_A | id::FERMI_A | id::FERMI_COMPUTE_A) || self.m2mf.class_supported(class)
    }

    fn method(
        &mut self,
        subchannel: u8,
        class: u32,
        method: u32,
        data: u32,
        cx: &mut EngineCx<'_>,
    ) -> Result<(), EngineError> {
        match class {
            id::FERMI_TWOD_A | id::FERMI_A | id::FERMI_COMPUTE_A => match method {
                m2mf9039::NOP | m2mf9039::SERIALIZE => Ok(()),
                _ => Err(EngineError::IllegalMethod),
            },
            _ => self.m2mf.method(subchannel, class, method, data, cx),
        }
    }

    fn pending(&self) -> bool {
        self.m2mf.pending()
    }

    fn step(&mut self, cx: &mut EngineCx<'_>, budget_bytes: u64) -> Result<Progress, EngineError> {
        self.m2mf.step(cx, budget_bytes)
    }

    fn save(&mut self) -> ContextState {
        self.m2mf.save()
    }

    fn load(&mut self, state: ContextState) {
        self.m2mf.load(state);
    }

    fn reset(&mut self) {
        self.m2mf.reset();
    }
}

/// Raises PGRAPH's interrupt for a method that it could not execute.
pub(crate) fn trap(error: EngineError, class: u32, method: Method, cx: &mut Cx) {
    use pgraph::INTR::{DATA_ERROR, ILLEGAL_CLASS, ILLEGAL_METHOD};
    use pgraph::TRAPPED_ADDRESS::{METHOD, SUBCHANNEL};
    let bits = match error {
        EngineError::IllegalClass => ILLEGAL_CLASS,
        EngineError::Data(code) => {
            cx.storage.poke(pgraph::DATA_ERROR::OFFSET, code);
            DATA_ERROR
        }
        EngineError::IllegalMethod | EngineError::Fault(_) => ILLEGAL_METHOD,
    };
    let subchannel = u32::from(method.subchannel);
    cx.storage.poke(pgraph::TRAPPED_ADDRESS::OFFSET, SUBCHANNEL.of(subchannel) | METHOD.of(method.address >> 2));
    cx.storage.poke(pgraph::TRAPPED_DATA_LO::OFFSET, method.data);
    cx.storage.poke(pgraph::SUBCHANNEL_CLASS::at(subchannel & 7), class);
    let at = pgraph::INTR::OFFSET;
    cx.storage.poke(at, cx.storage.peek(at) | bits.mask());
    tracing::debug!(%error, class, method = method.address, data = method.data, "PGRAPH trap");
}

/// PGRAPH's interrupts that stop methods.
pub(crate) const STOPPING: u32 =
    pgraph::INTR::DATA_ERROR.mask() | pgraph::INTR::ILLEGAL_CLASS.mask() | pgraph::INTR::ILLEGAL_METHOD.mask();

/// Most entries of a context's register list.
const MMIO_LIST_MAX: u32 = 256;

/// A context was loaded: the register list that its image names is written, once.
pub(crate) fn loaded(slot: &Slot, cx: &mut Cx) {
    let (EngineId::Graph, Some(resident)) = (slot.id, slot.resident) else { return };
    let mut writes = Vec::new();
    let mut session = cx.mmu.session(&cx.memory, &resident.space, Access::PRIVILEGED);
    let (Ok(count), Ok(base)) = (session.read32(resident.image), session.read32(resident.image.offset(4))) else {
        return;
    };
    if count == 0 {
        return;
    }
    for index in 0..u64::from(count.min(MMIO_LIST_MAX)) {
        let at = GpuVa(u64::from(base) << 8).offset(8 * index);
        let (Ok(register), Ok(value)) = (session.read32(at), session.read32(at.offset(4))) else { break };
        writes.push((register, value));
    }
    if session.write32(resident.image, 0).is_err() {
        tracing::debug!("a context image became read-only");
    }
    drop(session);
    // Only registers without behaviour: FECS can reach no others.
    for (register, value) in writes {
        let state = STATE_RANGES.iter().any(|(_, first, end)| (*first..*end).contains(&register));
        if state && register % 4 == 0 {
            cx.storage.poke(register, value);
        }
    }
}

fn instance(register: u32) -> (Target, u64) {
    // The falcon's channel words hold no target: FECS's instance blocks lie in VRAM.
    (Target::Vram, u64::from(COMMAND_DATA::ADDRESS.get(register)) << 12)
}

/// What the register with the current context reads.
pub(crate) fn current(fifo: &Fifo) -> u32 {
    fifo.slots[EngineId::Graph.index()].resident.map_or(0, |resident| {
        fecs::CURRENT::VALID.of(1) | fecs::CURRENT::ADDRESS.of((resident.instance.1 >> 12) as u32)
    })
}

/// FECS was started: it says how large a context is.
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

/// A command of the driver to FECS.
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
            // The built-in firmware's error code for an unknown command.
            const BAD_COMMAND: u32 = 1;
            cx.storage.poke(MAILBOX::at(5), BAD_COMMAND);
            cx.storage.poke(UCODE_INTR::OFFSET, cx.storage.peek(UCODE_INTR::OFFSET) | 1);
            let at = pgraph::INTR::OFFSET;
            cx.storage.poke(at, cx.storage.peek(at) | pgraph::INTR::CTXCTL.mask());
        }
    }
}

/// The driver raised FECS's context switch interrupt: the context of the next channel is loaded, or none.
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
