//! Writes to host memory that are under way: posted, so that nobody waits for them.
//!
//! How long a write is on its way through caches and over the bus is not bounded by anything that the card's owner sees.
//! A flush ([`BAR_FLUSH`](nvspec::regs::pflush::BAR_FLUSH), or a push buffer's) and a semaphore that waits for its engine push
//! all writes before them on; a read of host memory those that came the same way, by the hub or from shaders. A test makes the way long ([`crate::SimGpu::hold_posted_writes`]); else
//! it takes no time. A write is looked up in the table of host memory when it arrives, as by an IOMMU: what is not mapped
//! then is lost, and what is mapped then to something else is written there.

use super::sysmem::SysmemView;
use super::{BusError, Memory};
use nvspec::addr::Iova;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes that are under way at most.
// GUESS: a card's buffers are smaller. It is what tests need to see that nothing waits for so much.
const ROOM: usize = 1 << 20;
/// Bytes of a write as long as a copy makes them.
pub(super) const PIECE: usize = 4096;

/// Ways to host memory: by the hub (copy engines, PFIFO, apertures), and from shaders.
pub(super) const WAYS: usize = 2;

/// Writes that are under way.
#[derive(Debug, Default)]
pub(super) struct Posted {
    held: AtomicBool,
    ways: [Mutex<Queue>; WAYS],
}

#[derive(Debug, Default)]
struct Queue {
    writes: VecDeque<(Iova, Vec<u8>)>,
    bytes: usize,
}

impl Posted {
    pub(super) fn hold(&self, hold: bool) {
        // Those that see the old value write at once, which comes too early at most.
        self.held.store(hold, Ordering::Release);
    }

    /// Returns whether writes are held.
    pub(super) fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }

    /// Adds a write, if there is room. One that is larger than that arrives in pieces of it.
    pub(super) fn add(&self, way: usize, iova: Iova, data: &[u8]) -> bool {
        let mut queue = self.ways[way].lock();
        if queue.bytes != 0 && queue.bytes + data.len() > ROOM {
            return false;
        }
        queue.bytes += data.len();
        queue.writes.push_back((iova, data.to_vec()));
        true
    }

    /// All that goes one way arrives, in its order.
    pub(super) fn push(&self, way: usize, memory: &Memory, table: &SysmemView<'_>) {
        let mut queue = self.ways[way].lock();
        queue.bytes = 0;
        for (iova, data) in queue.writes.drain(..) {
            if let Err(error) = arrive(table, iova, &data) {
                memory.count_lost(error);
            }
        }
    }

    pub(super) fn clear(&self) {
        self.ways.iter().for_each(|queue| *queue.lock() = Queue::default());
    }
}

fn arrive(table: &SysmemView<'_>, iova: Iova, data: &[u8]) -> Result<(), BusError> {
    let mut done = 0;
    while done < data.len() {
        let piece = table.piece(iova.offset(done as u64), (data.len() - done) as u64, true)?;
        piece.copy_from(&data[done..]);
        done += piece.len();
    }
    Ok(())
}
