//! Batches out of the guest's memory, and answers into it.
//!
//! Everything that is read there is copied once, and the guest may change all of it meanwhile: rings, descriptors, batches.

use super::super::device::Core;
use super::Interface;
use pv::abi::{MAX_BATCH_BYTES, MAX_QUEUE, status};
use pv::{Answers, Batch};
use std::io::{Read, Write};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::GuestAddress;
use vmm_glue::memory::MemoryTable;

/// Where the guest says that the queue is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Setup {
    /// Entries; 0 for a number that cannot be.
    pub(super) size: u16,
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
}

impl Setup {
    fn queue(&self, memory: &MemoryTable) -> Option<Queue> {
        let mut queue = Queue::new(MAX_QUEUE).ok()?;
        queue.try_set_size(self.size).ok()?;
        queue.try_set_desc_table_address(GuestAddress(self.descriptors)).ok()?;
        queue.try_set_avail_ring_address(GuestAddress(self.available)).ok()?;
        queue.try_set_used_ring_address(GuestAddress(self.used)).ok()?;
        queue.set_ready(true);
        queue.is_valid(memory).then_some(queue)
    }
}

impl Interface {
    fn start(&mut self, memory: Option<&MemoryTable>) {
        self.queue = memory.and_then(|memory| self.setup.queue(memory));
        self.ended = 0;
        if self.queue.is_some() {
            self.status = status::READY;
        } else {
            self.fail("its set-up names no memory that can be mapped, or bus mastering is off");
        }
    }

    fn fail(&mut self, why: &str) {
        tracing::warn!(vm = %self.party.vm, setup = ?self.setup, why, "the paravirtual queue cannot be used; the guest must reset it");
        (self.status, self.queue) = (status::FAILED, None);
    }

    /// What a batch came to.
    fn count(&mut self, answers: &Answers) {
        self.ended = self.ended.wrapping_add(1);
        self.counts.batches += 1;
        self.counts.operations += u64::from(answers.done());
        self.counts.refused += u64::from(answers.status() != pv::abi::Status::Done);
    }
}

impl Core {
    /// The guest has set its queue up.
    pub(in crate::vgpu) fn start_pv(&mut self) {
        let backend = &mut self.backend;
        let memory = backend.link.memory().snapshot();
        let memory = backend.bus_master.then_some(&*memory);
        if let Some(pv) = &mut backend.pv {
            pv.start(memory);
        }
    }

    /// Deals with all batches that are available now.
    pub(in crate::vgpu) fn serve_pv(&mut self) {
        let Some(mut queue) = self.backend.pv.as_mut().and_then(|pv| pv.queue.take()) else { return };
        match self.serve_queue(&mut queue) {
            // An operation of a batch cannot reset the interface, so the queue is still the one.
            Ok(()) => self.with_pv(|pv| pv.queue = Some(queue)),
            Err(why) => self.with_pv(|pv| pv.fail(&why)),
        }
    }

    fn with_pv(&mut self, act: impl FnOnce(&mut Interface)) {
        if let Some(pv) = &mut self.backend.pv {
            act(pv);
        }
    }

    /// At most as many as the queue has entries: those that were there when the doorbell was rung.
    fn serve_queue(&mut self, queue: &mut Queue) -> Result<(), String> {
        let memory = self.backend.link.memory().snapshot();
        if !self.backend.bus_master {
            return Err("bus mastering is off".to_owned());
        }
        let chains: Vec<_> = queue.iter(&*memory).map_err(|error| error.to_string())?.collect();
        let any = !chains.is_empty();
        for chain in chains {
            let head = chain.head_index();
            let answers = self.serve_chain(&chain, &memory);
            let written = answer(&chain, &memory, &answers);
            self.with_pv(|pv| pv.count(&answers));
            queue.add_used(&*memory, head, written).map_err(|error| error.to_string())?;
        }
        let told = any && queue.needs_notification(&*memory).map_err(|error| error.to_string())?;
        self.with_pv(|pv| pv.interrupt |= told && pv.interrupt_enabled);
        Ok(())
    }

    fn serve_chain(&mut self, chain: &DescriptorChain<&MemoryTable>, memory: &MemoryTable) -> Answers {
        let malformed = |vm, why: &dyn std::fmt::Display| {
            tracing::warn!(%vm, %why, "a guest's batch is malformed, and nothing of it is done");
            Answers::malformed()
        };
        let vm = self.backend.vm;
        let data = match read(chain, memory) {
            Ok(data) => data,
            Err(error) => return malformed(vm, &error),
        };
        match Batch::parse(&data) {
            Ok(batch) => self.execute(&batch),
            Err(error) => malformed(vm, &error),
        }
    }
}

/// The device-readable part of a chain, copied; at most as much as a batch can have.
fn read(chain: &DescriptorChain<&MemoryTable>, memory: &MemoryTable) -> std::io::Result<Vec<u8>> {
    let reader = chain.clone().reader(memory).map_err(std::io::Error::other)?;
    let mut data = Vec::new();
    reader.take(MAX_BATCH_BYTES.into()).read_to_end(&mut data)?;
    Ok(data)
}

/// Writes the answers into the device-writable part of a chain; how many bytes that were.
fn answer(chain: &DescriptorChain<&MemoryTable>, memory: &MemoryTable, answers: &Answers) -> u32 {
    let Ok(mut writer) = chain.clone().writer(memory) else { return 0 };
    let bytes = answers.bytes(writer.available_bytes());
    match writer.write_all(&bytes) {
        Ok(()) => bytes.len() as u32,
        Err(_) => 0,
    }
}
