//! Reads batches from guest memory, and writes the replies.
//!
//! Rings, descriptors and batches are copied once before they are parsed, because the guest may modify them.

use super::Interface;
use pv::abi::{AnswerHeader, MAX_BATCH_BYTES, MAX_QUEUE, status};
use pv::{Answers, Begun, Malformed};
use std::sync::atomic::Ordering;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};
use vmm_glue::memory::MemoryTable;

/// Flag in the available ring: the guest does not want an interrupt. Source: VIRTIO 1.2, 2.7.6.
const NO_INTERRUPT: u16 = 1;

/// Reason why a queue is unusable. The guest must reset the interface.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueueError {
    /// The driver accepted features that the device does not offer.
    #[error("the driver accepted features that were not offered")]
    Features,
    /// The setup is invalid, or bus mastering is off.
    #[error("its setup contains an address that cannot be mapped, or bus mastering is off")]
    Setup,
    /// The device may not access the guest's memory.
    #[error("bus mastering is off")]
    NoBusMaster,
    /// The rings violate the standard.
    #[error(transparent)]
    Rings(#[from] virtio_queue::Error),
    /// The rings are outside guest memory.
    #[error(transparent)]
    Memory(#[from] GuestMemoryError),
}

/// Reason why a batch is not executed.
#[derive(Debug, thiserror::Error)]
enum Unreadable {
    /// The chain has more than [`MAX_QUEUE`] descriptors.
    #[error("its chain is longer than the queue")]
    Long,
    /// The standard does not permit this order of descriptors.
    #[error("a readable descriptor follows a writable one")]
    Order,
    /// The chain's writable buffers are too small for the header of a reply.
    #[error("it has no space for the reply")]
    NoRoom,
    /// A descriptor refers to an address outside guest memory.
    #[error(transparent)]
    Memory(#[from] GuestMemoryError),
    /// The bytes are not a valid batch.
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

/// Queue parameters set by the guest.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Setup {
    /// Number of entries, or 0 if the guest's value is invalid.
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
    /// Starts using the queue that the guest has set up in its RAM. If the setup or the accepted features are invalid,
    /// marks the queue as unusable.
    pub(crate) fn start(&mut self, memory: Option<&MemoryTable>) {
        self.queue = memory.and_then(|memory| self.setup.queue(memory));
        self.ended = 0;
        if self.accepted & !self.offered != 0 {
            self.fail(&QueueError::Features);
        } else if self.queue.is_some() {
            self.status = status::READY;
        } else {
            self.fail(&QueueError::Setup);
        }
    }

    /// Marks the queue as unusable.
    pub(crate) fn fail(&mut self, why: &QueueError) {
        if self.may_complain() {
            let (vm, setup) = (self.party.vm, self.setup);
            tracing::warn!(%vm, ?setup, %why, "cannot use the paravirtual queue; the guest must reset it");
        }
        (self.status, self.queue, self.ongoing) = (status::FAILED, None, None);
    }

    /// Returns true if an error of the guest should be logged. Repeated errors are logged less and less often.
    fn may_complain(&mut self) -> bool {
        self.complaints += 1;
        vmm_glue::worth_logging(self.complaints)
    }

    /// Takes the queue out of the interface, so that it can be served.
    pub(crate) fn take_queue(&mut self) -> Option<Queue> {
        self.queue.take()
    }

    /// Returns the queue to the interface.
    pub(crate) fn put_queue(&mut self, queue: Queue) {
        self.queue = Some(queue);
    }

    /// Returns the current batch, or else reads the next available one. Returns `None` if there is none.
    pub(crate) fn next_batch(
        &mut self,
        queue: &mut Queue,
        memory: &MemoryTable,
    ) -> Result<Option<Box<Ongoing>>, QueueError> {
        if let Some(ongoing) = self.ongoing.take() {
            return Ok(Some(ongoing));
        }
        let Some(chain) = queue.iter(memory)?.next() else { return Ok(None) };
        let head = chain.head_index();
        let mut complain = |why: &Unreadable| {
            if self.may_complain() {
                tracing::warn!(vm = %self.party.vm, %why, "a guest's batch is malformed, so none of its operations were executed");
            }
        };
        let parts = Parts::from_chain(chain).inspect_err(&mut complain).ok();
        let batch = parts.as_ref().and_then(|parts| parts.batch(memory).inspect_err(complain).ok());
        Ok(Some(Box::new(Ongoing { head, parts, batch, copied: None })))
    }

    /// Keeps a batch that must continue later.
    pub(crate) fn put_batch(&mut self, ongoing: Box<Ongoing>) {
        self.ongoing = Some(ongoing);
    }

    /// Counts another acquisition of the VM's lock for a batch.
    pub(crate) fn count_hold(&mut self) {
        self.counts.holds += 1;
    }

    /// Replies to a completed batch.
    pub(crate) fn end_batch(
        &mut self,
        queue: &mut Queue,
        memory: &MemoryTable,
        ongoing: Ongoing,
    ) -> Result<(), QueueError> {
        let answers = ongoing.batch.map_or_else(Answers::malformed, Begun::into_answers);
        let written = ongoing.parts.map_or(0, |parts| parts.answer(memory, &answers));
        self.ended = self.ended.wrapping_add(1);
        self.counts.batches += 1;
        self.counts.operations += u64::from(answers.done());
        self.counts.refused += u64::from(answers.status() != pv::abi::Status::Done);
        queue.add_used(memory, ongoing.head, written)?;
        // The library's check for interrupts ignores this flag.
        let flags: u16 = memory.load(GuestAddress(queue.avail_ring()), Ordering::SeqCst)?;
        let wanted = u16::from_le(flags) & NO_INTERRUPT == 0;
        self.interrupt |= wanted && self.interrupt_enabled;
        Ok(())
    }
}

/// Result of serving the queue in one critical section of the VM's lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// No batch is available.
    Idle,
    /// A batch has ended.
    Batch,
    /// A batch can continue immediately.
    Part,
    /// A batch continues after pages under mapped apertures have moved or a pending bind has completed.
    Waits,
}

/// A batch in progress.
#[derive(Debug)]
pub(crate) struct Ongoing {
    /// Index of the first descriptor in the batch's chain.
    head: u16,
    parts: Option<Parts>,
    /// The batch, or `None` if it cannot be read.
    pub(crate) batch: Option<Begun>,
    /// Number of bytes of the current operation that have been processed, if it has started.
    pub(crate) copied: Option<u64>,
}

/// Readable and writable parts of a chain in guest RAM. The chain's descriptors are read only once.
#[derive(Debug, Default)]
struct Parts {
    readable: Vec<(GuestAddress, usize)>,
    writable: Vec<(GuestAddress, usize)>,
}

impl Parts {
    fn from_chain(chain: DescriptorChain<&MemoryTable>) -> Result<Self, Unreadable> {
        let mut parts = Self::default();
        for (index, part) in chain.enumerate() {
            if index >= usize::from(MAX_QUEUE) {
                return Err(Unreadable::Long);
            }
            let place = (part.addr(), part.len() as usize);
            if part.is_write_only() {
                parts.writable.push(place);
            } else if parts.writable.is_empty() {
                parts.readable.push(place);
            } else {
                return Err(Unreadable::Order);
            }
        }
        let room = parts.writable.iter().map(|(_, len)| len).fold(0, |sum: usize, len| sum.saturating_add(*len));
        if room < size_of::<AnswerHeader>() {
            return Err(Unreadable::NoRoom);
        }
        Ok(parts)
    }

    /// Reads the batch from the readable parts, up to the maximum size of a batch.
    fn batch(&self, memory: &MemoryTable) -> Result<Begun, Unreadable> {
        let mut data = Vec::new();
        for (at, len) in &self.readable {
            let from = data.len();
            data.resize(from.saturating_add(*len).min(MAX_BATCH_BYTES as usize), 0);
            memory.read_slice(&mut data[from..], *at)?;
        }
        Ok(Begun::new(data)?)
    }

    /// Writes the replies to the writable parts. Returns the number of bytes written, or 0 if a part is outside guest
    /// memory.
    fn answer(&self, memory: &MemoryTable, answers: &Answers) -> u32 {
        let room = self.writable.iter().fold(0, |sum: usize, (_, len)| sum.saturating_add(*len));
        let bytes = answers.bytes(room);
        let mut rest = &bytes[..];
        for (at, len) in &self.writable {
            let (now, later) = rest.split_at((*len).min(rest.len()));
            if memory.write_slice(now, *at).is_err() {
                return 0;
            }
            rest = later;
        }
        bytes.len() as u32
    }
}
