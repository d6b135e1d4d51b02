//! Records how often work accesses each of a VM's chunks. The records serve as profiles for `victims = "profiled"`.
//!
//! Only the software card counts accesses, as bursts of its engines. On other cards, a record counts the submissions
//! that refer to a chunk's memory, which misses accesses by kernels through pointers.

use super::Memory;
use card::AccessCounts;
use std::collections::BTreeMap;
use vram::{ChunkTable, HostAddr, Lookup, Place, TenantId};

/// Unit of the counts in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// Bursts of the card's engines.
    Bursts,
    /// Submissions that refer to memory.
    Submissions,
}

/// Access counts of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accesses {
    /// Unit of the counts.
    pub counted: Counted,
    /// Access count of each chunk of the guest's VRAM.
    pub counts: Vec<u64>,
}

/// Records in progress, at most one for each VM.
#[derive(Debug, Default)]
pub struct Records(BTreeMap<TenantId, Accesses>);

impl Records {
    /// Returns true if any record is in progress.
    pub(crate) fn any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Counts a submission that refers to memory in a chunk, if the VM's submissions are being counted.
    pub(crate) fn named(&mut self, vm: TenantId, index: u64) {
        let record = self.0.get_mut(&vm).filter(|record| record.counted == Counted::Submissions);
        let count = record.and_then(|record| record.counts.get_mut(usize::try_from(index).ok()?));
        if let Some(count) = count {
            *count = count.saturating_add(1);
        }
    }

    /// Adds the card's counts since the last poll. `accesses` returns the count for a location.
    pub(crate) fn counted(&mut self, chunks: &ChunkTable, accesses: impl Fn(Place) -> u64) {
        for (vm, record) in self.0.iter_mut().filter(|(_, record)| record.counted == Counted::Bursts) {
            for (index, count) in (0..).zip(&mut record.counts) {
                if let Lookup::Placed(place) = chunks.lookup(*vm, chunks.guest_address(index), 1) {
                    *count = count.saturating_add(accesses(place));
                }
            }
        }
    }

    pub(crate) fn forget(&mut self, vm: TenantId) {
        self.0.remove(&vm);
    }
}

impl Memory {
    /// Starts recording a VM's accesses. Returns `false` if the VM does not exist or its accesses are already being
    /// recorded.
    pub fn start_accesses(&mut self, now: u64, vm: TenantId) -> bool {
        let Some(bytes) = self.vram.chunks.vm_bytes(vm).filter(|_| !self.vram.records.0.contains_key(&vm)) else {
            return false;
        };
        // Earlier counts belong to other records.
        self.take_accesses(now);
        let counted = match self.vram.memory.card().access_counts(true) {
            Some(_) => Counted::Bursts,
            None => Counted::Submissions,
        };
        let chunks = usize::try_from(bytes.div_ceil(self.vram.chunks.chunk_bytes())).unwrap_or(0);
        self.vram.records.0.insert(vm, Accesses { counted, counts: vec![0; chunks] });
        true
    }

    /// Ends a VM's record and returns it, or `None` if no record is in progress, for example because the VM was
    /// removed.
    pub fn end_accesses(&mut self, now: u64, vm: TenantId) -> Option<Accesses> {
        self.take_accesses(now);
        self.vram.records.0.remove(&vm)
    }

    fn take_accesses(&mut self, now: u64) {
        let (counts, traffic) = self.take_counts(now);
        self.divider.machine.add_traffic(&self.vram.chunks, now, &traffic);
        self.tell_balancer(counts.as_ref());
    }
}

/// Returns the number of accesses to a chunk of `bytes` bytes at `place`. `host` converts a host memory address to an
/// I/O address.
pub(crate) fn at(counts: &AccessCounts, place: Place, bytes: u64, host: impl Fn(HostAddr) -> u64) -> u64 {
    match place {
        Place::Card(at) => (at.0..at.0.saturating_add(bytes))
            .step_by(AccessCounts::BLOCK_BYTES as usize)
            .filter_map(|at| counts.vram.get((at / AccessCounts::BLOCK_BYTES) as usize))
            .fold(0, |sum, count| sum.saturating_add(*count)),
        Place::Host(at) => {
            let first = host(at);
            counts
                .system
                .range(first..first.saturating_add(bytes))
                .fold(0, |sum, (_, count)| sum.saturating_add(*count))
        }
    }
}
