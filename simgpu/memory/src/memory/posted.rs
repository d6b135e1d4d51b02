//! Posted writes to host memory that are still in flight.
//!
//! The latency of a posted write is unbounded. A flush ([`BAR_FLUSH`](nvspec::regs::pflush::BAR_FLUSH), or the push
//! buffer's flush method) and a semaphore release that waits for its engine complete all earlier writes. A read from
//! host memory completes the writes on the same path, either the hub's or the shaders'. Tests can keep writes in flight
//! ([`super::Memory::hold_posted`]). Otherwise, writes arrive immediately. As with an IOMMU, the address is translated
//! when the write arrives. The write is lost if the address has been unmapped, and modifies other memory if the address
//! has been remapped.

use super::sysmem::SysmemView;
use super::{BusError, Memory};
use nvspec::addr::Iova;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

/// Maximum number of bytes in flight on a path.
// GUESS: a card's buffers are smaller. Tests need this size to check that no code waits for this many writes.
const MAX_BYTES_IN_FLIGHT: usize = 1 << 20;
/// Maximum size in bytes of a single write by a copy.
pub(super) const MAX_WRITE_BYTES: usize = 4096;

/// Number of paths to host memory: one for the hub (copy engines, PFIFO, apertures), and one for the shaders.
pub(super) const PATHS: usize = 2;

#[derive(Debug, Default)]
pub(super) struct Posted {
    held: AtomicBool,
    ways: [Mutex<Queue>; PATHS],
}

#[derive(Debug, Default)]
struct Queue {
    writes: VecDeque<(Iova, Vec<u8>)>,
    bytes: usize,
}

impl Posted {
    pub(super) fn hold(&self, hold: bool) {
        // A thread that still sees the old value writes immediately, which is always permitted.
        self.held.store(hold, Ordering::Release);
    }

    pub(super) fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }

    /// Adds a write if there is space for it or no other write is in flight on the path. Returns true if it was added.
    pub(super) fn add(&self, way: usize, iova: Iova, data: &[u8]) -> bool {
        let mut queue = self.ways[way].lock();
        if queue.bytes != 0 && queue.bytes + data.len() > MAX_BYTES_IN_FLIGHT {
            return false;
        }
        queue.bytes += data.len();
        queue.writes.push_back((iova, data.to_vec()));
        true
    }

    /// Completes all writes on one path, in order.
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
