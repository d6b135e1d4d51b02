//! Handles card events and memory relocations on behalf of a VM.

use super::device::{Core, MediatedVm};
use super::work::Runlist;
use card_manager::mailbox::Recipient;
use card_manager::{CardState, GuestEvent, GuestEvents, ManagerError, Ranges};
use devmodel::events::{CopyError, EngineError, GraphError, MmuFault, PbdmaError};
use nvspec::regs::{pbdma, pfifo, pgraph};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

impl GuestEvents for MediatedVm {
    fn deliver(&self, event: GuestEvent) {
        // A panic must not kill the card's interrupt thread, which also serves other VMs.
        if catch_unwind(AssertUnwindSafe(|| self.core.deliver(event))).is_err() {
            tracing::error!(vm = %self.vm, "handling an event of the card panicked: the VM is out of service");
            self.link.disconnect();
        }
    }

    fn relocated(&self, commit: &mut dyn FnMut(&mut CardState) -> Ranges) -> Result<(), ManagerError> {
        if self.core.is_torn() {
            return Err(ManagerError::OutOfService);
        }
        self.core().backend.relocate(commit)
    }

    fn taken_over(&self) -> Result<(), ManagerError> {
        self.core().backend.prepare_all()
    }

    fn card_failed(&self) {
        self.link.disconnect();
    }
}

impl Recipient for Core {
    fn take_up(&mut self, event: GuestEvent) {
        if self.gone {
            return;
        }
        let Self { gpu, backend, .. } = &mut *self;
        match event {
            GuestEvent::Resume(doorbell) => backend.submit(doorbell),
            GuestEvent::Memory => backend.retry(),
            GuestEvent::Left => backend.channels_left(),
            GuestEvent::Runlist => {
                if backend.runlist_ends(Runlist::Awaited) {
                    gpu.runlist_done(backend);
                }
            }
            GuestEvent::Alarm => {
                // If the alarm expires too early by the card's clock, arm it again for the remaining time.
                self.alarm = None;
                self.gpu.tick(&mut self.backend);
            }
            GuestEvent::Hang { engine, channel } => {
                backend.count_hang();
                tracing::warn!(vm = %backend.vm(), ?channel, engine, "a channel made no progress and was killed");
                if backend.end_retired(channel).is_some() {
                    gpu.ctxsw_timeout(engine, channel, backend);
                }
            }
            GuestEvent::NonStall { engine } => gpu.non_stall(engine, backend),
            GuestEvent::MmuFault { channel, unit, va, kind } => {
                backend.count_fault();
                let instance = backend.end_retired(channel);
                tracing::warn!(vm = %backend.vm(), ?channel, unit, %va, kind, "a guest's work caused an MMU fault");
                let field = |field: nvspec::Field| field.get(kind);
                gpu.mmu_fault(
                    MmuFault {
                        unit,
                        instance,
                        va,
                        reason: field(pfifo::FAULT_TYPE::REASON),
                        client: field(pfifo::FAULT_TYPE::CLIENT),
                        hub: field(pfifo::FAULT_TYPE::HUB) != 0,
                        write: field(pfifo::FAULT_TYPE::WRITE) != 0,
                        gpc: field(pfifo::FAULT_TYPE::GPC),
                    },
                    backend,
                );
            }
            GuestEvent::Pbdma { channel, unit, intr, method, data } => gpu.pbdma_error(
                PbdmaError {
                    unit,
                    channel,
                    intr,
                    subchannel: pbdma::METHOD_0::SUBCHANNEL.get(method),
                    method: pbdma::METHOD_0::METHOD.get(method) << 2,
                    data,
                },
                backend,
            ),
            GuestEvent::Graph { channel, intr, code, class, address, data, trap, sm } => {
                let instance = backend.work().instance(channel);
                let error = GraphError {
                    intr,
                    code,
                    instance,
                    subchannel: pgraph::TRAPPED_ADDRESS::SUBCHANNEL.get(address),
                    class,
                    method: pgraph::TRAPPED_ADDRESS::METHOD.get(address) << 2,
                    data,
                    trap,
                    sm,
                };
                gpu.engine_error(EngineError::Graph(error), backend);
            }
            GuestEvent::Copy { channel, engine, intr, report, data } => {
                let instance = backend.work().instance(channel);
                gpu.engine_error(EngineError::Copy(CopyError { engine, intr, instance, report, data }), backend);
            }
        }
        self.finish_access();
    }

    fn leave(&mut self) {
        if self.board.wanted.load(Ordering::Relaxed) {
            self.board.publish(self.status());
        }
    }
}
