//! The control queue in guest memory.
//!
//! Descriptors and commands are copied once when they are read, because the guest can change them at any time.

use std::sync::atomic::Ordering;

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};
use vmm_glue::memory::MemoryTable;

use crate::command::MAX_COMMAND_BYTES;
use crate::registers::{QUEUE_SIZES, Setup};
use crate::saved::{MAX_WRITABLE, Progress, SavedCommand};

/// Flag in the available ring: the guest requests no interrupts. Source: VIRTIO 1.2, 2.7.6.
const NO_INTERRUPT: u16 = 1;

/// Reason why the queue can no longer be used. The guest must reset the device.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueueError {
    /// The queue's rings violate the standard.
    #[error(transparent)]
    Rings(#[from] virtio_queue::Error),
    /// The guest has changed the index of the used ring.
    #[error("the guest has changed the used ring")]
    Changed,
    /// The queue's rings are not in guest memory.
    #[error(transparent)]
    Memory(#[from] GuestMemoryError),
}

/// A command without a response.
#[derive(Debug)]
pub(crate) struct Request {
    /// First descriptor of the command's chain.
    head: u16,
    /// First bytes of the command.
    pub(crate) bytes: Vec<u8>,
    writable: Vec<(GuestAddress, usize)>,
}

impl Request {
    /// Returns the first descriptor of the command's chain.
    pub(crate) fn head(&self) -> u16 {
        self.head
    }

    /// Returns the address and size in bytes of each range of guest memory for the response.
    pub(crate) fn writable(&self) -> Vec<(u64, u64)> {
        self.writable.iter().map(|&(at, len)| (at.0, len as u64)).collect()
    }

    /// Returns a command that another process has popped from the queue, without the command's bytes.
    pub(crate) fn restored(command: &SavedCommand) -> Self {
        let part = |&(at, len): &(u64, u64)| (GuestAddress(at), usize::try_from(len).unwrap_or(usize::MAX));
        Self { head: command.head, bytes: Vec::new(), writable: command.writable.iter().map(part).collect() }
    }
}

/// The control queue and its command counts.
#[derive(Debug)]
pub(crate) struct ControlQueue {
    queue: Queue,
    progress: Progress,
}

impl ControlQueue {
    /// Creates the queue that the guest has set up, positioned after the commands in `progress`. Returns `None` if the
    /// setup is invalid or does not refer to guest memory.
    pub(crate) fn new(setup: Setup, progress: Progress, memory: &MemoryTable) -> Option<Self> {
        let [most, _] = QUEUE_SIZES;
        let mut queue = Queue::new(most).ok()?;
        queue.try_set_size(setup.size).ok()?;
        queue.try_set_desc_table_address(GuestAddress(setup.descriptors)).ok()?;
        queue.try_set_avail_ring_address(GuestAddress(setup.available)).ok()?;
        queue.try_set_used_ring_address(GuestAddress(setup.used)).ok()?;
        queue.set_ready(true);
        let [popped, answered] = [progress.popped, progress.answered].map(low);
        queue.set_next_avail(popped);
        queue.set_next_used(answered);
        queue.is_valid(memory).then_some(Self { queue, progress })
    }

    /// Returns the command counts of the queue.
    pub(crate) fn progress(&self) -> Progress {
        self.progress
    }

    /// Returns the number of responses in the used ring beyond those in `progress`.
    ///
    /// # Errors
    /// Returns an error if the rings are invalid or inaccessible.
    pub(crate) fn answers_beyond(&self, memory: &MemoryTable) -> Result<u16, QueueError> {
        Ok(self.queue.used_idx(memory, Ordering::Acquire)?.0.wrapping_sub(low(self.progress.answered)))
    }

    /// Replaces the command counts, and positions the queue after these commands.
    pub(crate) fn set_progress(&mut self, progress: Progress) {
        self.progress = progress;
        self.queue.set_next_avail(low(progress.popped));
        self.queue.set_next_used(low(progress.answered));
    }

    /// Pops the next command.
    ///
    /// # Errors
    /// Returns an error if the rings are invalid or inaccessible.
    pub(crate) fn pop(&mut self, memory: &MemoryTable) -> Result<Option<Request>, QueueError> {
        let Some(chain) = self.queue.iter(memory)?.next() else { return Ok(None) };
        self.progress.popped = self.progress.popped.wrapping_add(1);
        let mut request = Request { head: chain.head_index(), bytes: Vec::new(), writable: Vec::new() };
        // The `virtio_queue` crate limits the length of a chain, to 65,535 in an indirect table.
        for part in chain {
            let len = usize::try_from(part.len()).unwrap_or(usize::MAX);
            if part.is_write_only() {
                if request.writable.len() < MAX_WRITABLE {
                    request.writable.push((part.addr(), len));
                }
            } else if request.bytes.len() < MAX_COMMAND_BYTES && request.writable.is_empty() {
                let from = request.bytes.len();
                request.bytes.resize(from.saturating_add(len).min(MAX_COMMAND_BYTES), 0);
                let to = request.bytes.get_mut(from..).unwrap_or_default();
                if memory.read_slice(to, part.addr()).is_err() {
                    // These bytes are not in guest memory. Truncate the command before them.
                    request.bytes.truncate(from);
                }
            }
        }
        Ok(Some(request))
    }

    /// Responds to a command. Returns true if the guest requests an interrupt.
    ///
    /// # Errors
    /// Returns an error if the rings are invalid or inaccessible.
    pub(crate) fn answer(&mut self, memory: &MemoryTable, request: &Request, bytes: &[u8]) -> Result<bool, QueueError> {
        let mut rest = bytes;
        let mut written = 0u32;
        for &(at, len) in &request.writable {
            let (now, later) = rest.split_at(len.min(rest.len()));
            if memory.write_slice(now, at).is_err() {
                break;
            }
            written = written.saturating_add(u32::try_from(now.len()).unwrap_or(0));
            rest = later;
        }
        self.queue.add_used(memory, request.head, written)?;
        self.progress.answered = self.progress.answered.wrapping_add(1);
        // The interrupt check of the `virtio_queue` crate ignores the ring's flag.
        let flags: u16 = memory.load(GuestAddress(self.queue.avail_ring()), Ordering::SeqCst)?;
        Ok(u16::from_le(flags) & NO_INTERRUPT == 0)
    }

    /// Notifies the guest that no doorbells are needed.
    ///
    /// # Errors
    /// Returns an error if the rings are invalid or inaccessible.
    pub(crate) fn suppress_kicks(&mut self, memory: &MemoryTable) -> Result<(), QueueError> {
        Ok(self.queue.disable_notification(memory)?)
    }

    /// Notifies the guest that each command needs a doorbell. Returns true if commands have arrived without one.
    ///
    /// # Errors
    /// Returns an error if the rings are invalid or inaccessible.
    pub(crate) fn allow_kicks(&mut self, memory: &MemoryTable) -> Result<bool, QueueError> {
        // This call executes a full fence between writing the flag and reading the index.
        Ok(self.queue.enable_notification(memory)?)
    }
}

/// Returns the lower half of a count, as in the rings' indices.
fn low(count: u32) -> u16 {
    let [a, b, ..] = count.to_le_bytes();
    u16::from_le_bytes([a, b])
}
