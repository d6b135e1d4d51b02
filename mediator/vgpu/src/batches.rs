//! Effects of a paravirtual guest's batches on the vGPU.
//!
//! A batch can access the card only in ways in which registers can. An operation on a channel makes the equivalent
//! register accesses, and `shadow-pt` reads and checks kept page tables like tables in guest memory ([decision
//! 108](../../../../docs/decisions/108-paravirtual-tables.md)).

mod execute;

use super::device::Core;
use super::pv::{Interface, Progress, QueueError};
use execute::Executed;
use nvspec::regs::pfifo::CHANNEL;
use virtio_queue::Queue;

impl Core {
    /// Starts the queue as configured by the guest.
    pub(crate) fn start_pv(&mut self) {
        let memory = self.backend.ram_now();
        self.with_pv(|pv| pv.start(memory.as_deref()));
    }

    /// Executes the current batch, or the next available one, for at most one critical section of the VM's lock. The
    /// caller must release the lock between calls.
    pub(crate) fn serve_pv(&mut self) -> Progress {
        if self.backend.look_at_moves() {
            return Progress::Waits;
        }
        let Some(mut queue) = self.backend.pv_mut().and_then(Interface::take_queue) else { return Progress::Idle };
        let served = self.serve_queue(&mut queue);
        match &served {
            // No operation in a batch can reset the interface, so this is still the same queue.
            Ok(_) => self.with_pv(|pv| pv.put_queue(queue)),
            Err(why) => self.with_pv(|pv| pv.fail(why)),
        }
        self.signal_pv();
        served.unwrap_or(Progress::Idle)
    }

    fn with_pv(&mut self, act: impl FnOnce(&mut Interface)) {
        if let Some(pv) = self.backend.pv_mut() {
            act(pv);
        }
    }

    fn serve_queue(&mut self, queue: &mut Queue) -> Result<Progress, QueueError> {
        let memory = self.backend.ram_now().ok_or(QueueError::NoBusMaster)?;
        let Some(pv) = self.backend.pv_mut() else { return Ok(Progress::Idle) };
        let Some(mut ongoing) = pv.next_batch(queue, &memory)? else { return Ok(Progress::Idle) };
        pv.count_hold();
        let executed = match &mut ongoing.batch {
            Some(batch) => self.execute(batch, &mut ongoing.copied),
            None => Executed::Whole,
        };
        let Some(pv) = self.backend.pv_mut() else { return Ok(Progress::Idle) };
        match executed {
            Executed::Whole => {
                pv.end_batch(queue, &memory, *ongoing)?;
                Ok(Progress::Batch)
            }
            Executed::Part => {
                pv.put_batch(ongoing);
                Ok(Progress::Part)
            }
            Executed::AwaitsBind => {
                pv.put_batch(ongoing);
                Ok(Progress::Waits)
            }
        }
    }

    /// Resets the interface to its initial state, except for the counters, and unbinds the channels that it created.
    pub(crate) fn reset_pv(&mut self) {
        let Self { gpu, backend, .. } = self;
        let Some(pv) = backend.pv() else { return };
        for channel in pv.channels() {
            gpu.bar0_write32(CHANNEL::at(channel.into()), 0, backend);
        }
        backend.reset_pv();
        // Address spaces of other channels may use the old tables.
        if let Err(error) = backend.flush_spaces(None) {
            tracing::error!(vm = %backend.vm(), %error, "the card's TLBs may keep translations from removed tables");
        }
        self.signal_pv();
    }

    /// Sets the function's interrupt level according to the interface's state.
    pub(crate) fn signal_pv(&mut self) {
        let asserted = self.backend.pv().is_some_and(Interface::interrupts);
        self.gpu.set_beside(asserted, &mut self.backend);
    }
}
