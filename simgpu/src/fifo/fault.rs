//! Reports channel errors.

use super::Fifo;
use super::channel::Health;
use super::decoder::Method;
use super::slot::Condition;
use crate::cx::Cx;
use crate::faults::EngineId;
use nvspec::addr::Target;
use nvspec::mmu::fault::gpc_client;
use nvspec::regs::pfifo;
use simgpu_engines::engines;
use simgpu_memory::mmu::MmuFault;

/// Unit that made a faulting access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Client {
    /// A client number in [`nvspec::mmu::fault::hub_client`].
    Hub(u32),
    /// A client number in [`nvspec::mmu::fault::gpc_client`], for the first GPC.
    Gpc(u32),
}

/// An MMU fault and its origin.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Report {
    /// A unit number in [`nvspec::mmu::fault::unit`].
    pub(crate) unit: u32,
    pub(crate) client: Client,
    pub(crate) instance: (Target, u64),
    pub(crate) fault: MmuFault,
}

/// Stores a fault in the fault registers. Drops the fault if the driver has not acknowledged the unit's previous one.
pub(crate) fn report(report: Report, cx: &mut Cx) {
    let Report { unit, client, instance, fault } = report;
    let pending = cx.storage.peek(pfifo::MMU_FAULT_ID::OFFSET);
    if pending & (1 << unit) != 0 {
        return;
    }
    use pfifo::FAULT_TYPE::{CLIENT, GPC, HUB, REASON, WRITE};
    let from = match client {
        Client::Hub(client) => HUB.encode(1) | CLIENT.encode(client),
        Client::Gpc(client) => GPC.encode(0) | CLIENT.encode(client),
    };
    let kind = REASON.encode(fault.reason) | from | WRITE.encode(u32::from(fault.write));
    cx.storage.poke(pfifo::FAULT_INST::at(unit), pfifo::FAULT_INST::ADDRESS.encode((instance.1 >> 12) as u32));
    cx.storage.poke(pfifo::FAULT_VA_LO::at(unit), fault.va.0 as u32);
    cx.storage.poke(pfifo::FAULT_VA_HI::at(unit), (fault.va.0 >> 32) as u32);
    cx.storage.poke(pfifo::FAULT_TYPE::at(unit), kind);
    cx.storage.poke(pfifo::MMU_FAULT_ID::OFFSET, pending | 1 << unit);
    tracing::debug!(unit, ?client, %fault, instance = instance.1, "MMU fault");
}

impl Fifo {
    /// Stops a faulting channel and reports the fault. Other channels continue.
    pub(crate) fn channel_fault(&mut self, channel: u8, what: Report, cx: &mut Cx) {
        self.counters.faults += 1;
        if let Some(channel) = self.channels.get_mut(usize::from(channel)) {
            channel.health = Health::Faulted;
        }
        report(what, cx);
    }

    /// Stops a faulting engine and its channel. The engine remains stopped until the driver acknowledges the error and
    /// resets the engine.
    pub(crate) fn engine_fault(
        &mut self,
        slot: usize,
        channel: Option<u8>,
        fault: MmuFault,
        client: Client,
        cx: &mut Cx,
    ) {
        let resident = self.slots[slot].resident;
        let channel = channel.or(resident.and_then(|resident| resident.channel));
        let instance = channel
            .and_then(|channel| self.channels.get(usize::from(channel))?.instance())
            .or(resident.map(|resident| resident.instance))
            .unwrap_or((Target::Vram, 0));
        self.engine_stopped(slot, channel, instance, fault, client, cx);
    }

    fn engine_stopped(
        &mut self,
        slot: usize,
        channel: Option<u8>,
        instance: (Target, u64),
        fault: MmuFault,
        client: Client,
        cx: &mut Cx,
    ) {
        let slot = &mut self.slots[slot];
        slot.condition = Condition::Failed;
        slot.stopped_by = channel;
        let at = pfifo::SCHED_ENABLE_ACK::OFFSET;
        cx.storage.poke(at, cx.storage.peek(at) | 1 << slot.number());
        let unit = slot.fault_unit();
        match channel {
            Some(channel) => self.channel_fault(channel, Report { unit, client, instance, fault }, cx),
            None => report(Report { unit, client, instance, fault }, cx),
        }
    }

    /// Lets the scheduler use engines again after an error has stopped them. Each of these engines must still be reset.
    pub(crate) fn acknowledge_errors(engines: u32, cx: &mut Cx) {
        let at = pfifo::SCHED_ENABLE_ACK::OFFSET;
        cx.storage.poke(at, cx.storage.peek(at) & !engines);
    }

    /// Saves an engine's context. If the context image cannot be written, stops the engine and returns false. The fault
    /// is then attributed to the channel of that context, not to the next channel.
    pub(crate) fn evict(&mut self, slot: usize, cx: &mut Cx) -> bool {
        let Some(resident) = self.slots[slot].resident else { return true };
        let client = self.slots[slot].context_client();
        let Err(fault) = self.slots[slot].evict(cx) else { return true };
        // The channel number may have been reused.
        let owner = |channel: &u8| {
            self.channels.get(usize::from(*channel)).is_some_and(|it| it.instance() == Some(resident.instance))
        };
        let channel = resident.channel.filter(owner);
        self.engine_stopped(slot, channel, resident.instance, fault, client, cx);
        false
    }

    /// Reports that an engine could not execute a method or continue its work.
    pub(super) fn engine_error(
        &mut self,
        id: EngineId,
        channel: Option<u8>,
        method: Option<(u32, Method)>,
        error: engines::EngineError,
        cx: &mut Cx,
    ) {
        match error {
            engines::EngineError::Fault(fault) => {
                let client = self.slots[id.index()].fault_client();
                return self.engine_fault(id.index(), channel, fault, client, cx);
            }
            engines::EngineError::ShaderFault(fault) => {
                return self.engine_fault(id.index(), channel, fault, Client::Gpc(gpc_client::TEX), cx);
            }
            _ => {}
        }
        let (class, method) = method.unwrap_or((0, Method { subchannel: 0, address: 0, data: 0 }));
        self.slots[id.index()].condition = Condition::Trapped;
        match id {
            EngineId::Graph => crate::graph::trap(error, class, method, cx),
            EngineId::Copy0 => crate::blocks::falcon::trap(0, error, method, cx),
            EngineId::Copy1 => crate::blocks::falcon::trap(1, error, method, cx),
        }
    }

    /// Reports that a subchannel was bound to a class that the engine does not support.
    pub(super) fn illegal_class(&mut self, id: EngineId, class: u32, method: Method, cx: &mut Cx) {
        self.engine_error(id, None, Some((class, method)), engines::EngineError::IllegalClass, cx);
    }
}

impl Fifo {
    /// Stops engine `number` and its channel with a fault, at the driver's request.
    pub(crate) fn trigger_fault(&mut self, number: u32, cx: &mut Cx) {
        let Some(id) = super::slot::by_number(number) else { return };
        let client = self.slots[id.index()].fault_client();
        let fault = MmuFault { reason: nvspec::mmu::fault::PTE, va: nvspec::addr::GpuVa(0), write: false };
        let channel = self.slots[id.index()].resident.and_then(|resident| resident.channel);
        self.slots[id.index()].stop();
        self.engine_fault(id.index(), channel, fault, client, cx);
    }
}
