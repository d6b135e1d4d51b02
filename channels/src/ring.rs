//! A channel's positions in the guest's and the host's ring, and its submissions in flight. This module does no I/O.
//!
//! A position is the number of an entry in the host's ring, counted since bind, and never wraps. An index is a position
//! modulo the ring size. Positions in the guest's ring are stored as indices.

mod saved;

pub(crate) use saved::{COUNT_MAX, SavedRing};

use crate::entry::Entry;
use crate::work::{RECORDS, RING_ENTRIES};
use crate::{GuestInstance, RingFault, Submission};
use nvspec::addr::GpuVa;
use std::collections::VecDeque;

/// Maximum number of queued entries in a host ring: one less than its size, because a full ring would look empty.
const MAX_QUEUED_ENTRIES: u64 = RING_ENTRIES as u64 - 1;
/// Maximum number of submissions in flight in a shallow ring.
const MAX_SHALLOW_SUBMISSIONS: usize = 8;
/// Mask of the index bits of a position.
const INDEX: u64 = RING_ENTRIES as u64 - 1;
/// Mask of the record slot bits of a submission number.
const SLOT: u64 = RECORDS as u64 - 1;

/// A submission: guest entries followed by a completion record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    /// Submission number, unique among all submissions of the card.
    pub(crate) submission: Submission,
    /// Payload of the submission's semaphore, which is never 0.
    pub(crate) sequence: u32,
    /// Index of the submission's push buffer and semaphore in the work area.
    pub(crate) slot: usize,
    /// Host position of the submission's first entry.
    first: u64,
    /// Guest ring index of the submission's first entry.
    guest_first: u32,
    /// Number of guest entries.
    pub(crate) entries: u32,
    /// Time at which the submission was pulled from the guest's ring, in ns.
    pub(crate) submitted_at: u64,
}

impl Record {
    /// Returns the host position after the submission's record entry.
    pub(crate) fn end(&self) -> u64 {
        self.first.wrapping_add(self.entries.into()).wrapping_add(1)
    }
}

/// A bound channel's rings.
#[derive(Debug)]
pub(crate) struct Ring {
    /// Virtual address of the guest's ring.
    pub(crate) gp_base: GpuVa,
    /// Number of entries in the guest's ring, a power of two.
    pub(crate) entries: u32,
    /// GP_PUT of the last accepted doorbell, or the guest's saved value.
    pub(crate) gp_put: u32,
    /// Index of the next entry to pull from the guest's ring.
    pub(crate) next: u32,
    /// Guest ring index up to which entries may be pulled, and the number of the doorbell that permitted it.
    target: (u32, u64),
    /// Number of accepted doorbells.
    doorbells: u64,
    /// Host position after the last entry written.
    put: u64,
    /// Host position up to which the card may fetch.
    started: u64,
    /// Host position that the card had reached at the last poll.
    get: u64,
    /// Pulled submissions in flight, oldest first. The card may have fetched the first ones.
    pub(crate) records: VecDeque<Record>,
    /// Number of submissions since bind.
    submitted: u64,
    sequence: u32,
    /// Sequence number of the last completed submission, or 0 if there is none.
    pub(crate) completed: u32,
    /// For each record slot, the end address of the last guest range before the record, or 0 if there is none.
    ends: Box<[u64]>,
    last_end: u64,
    /// Reason why the guest's ring cannot be read any further.
    pub(crate) fault: Option<RingFault>,
    /// Position and GET at the last check for progress. GET is `None` if there was no check since the card last had
    /// none of the channel's submissions.
    pub(crate) seen: (u64, Option<u32>),
}

impl Ring {
    /// Creates the rings of a newly bound channel. The host's ring is empty, and the guest's ring continues at its
    /// saved position.
    pub(crate) fn new(guest: &GuestInstance) -> Self {
        let entries = guest.gp_entries();
        let next = if guest.gp_get < entries { guest.gp_get } else { 0 };
        let gp_put = if guest.gp_put < entries { guest.gp_put } else { next };
        Self {
            gp_base: guest.gp_base,
            entries,
            gp_put,
            next,
            target: (gp_put, 0),
            doorbells: 0,
            put: 0,
            started: 0,
            get: 0,
            records: VecDeque::new(),
            submitted: 0,
            sequence: 0,
            completed: 0,
            ends: vec![0; RECORDS].into_boxed_slice(),
            last_end: 0,
            fault: None,
            seen: (0, None),
        }
    }

    /// Accepts a doorbell, and returns its number.
    pub(crate) fn ring(&mut self, gp_put: u32) -> u64 {
        self.gp_put = gp_put;
        self.doorbells = self.doorbells.wrapping_add(1);
        self.doorbells
    }

    /// Permits pulls of entries up to `gp_put`, unless a later doorbell has already set this limit.
    pub(crate) fn allow(&mut self, gp_put: u32, doorbell: u64) {
        if doorbell > self.target.1 {
            self.target = (gp_put, doorbell);
        }
    }

    /// Returns the guest ring index up to which entries may be pulled, and the number of the doorbell that permitted
    /// it.
    pub(crate) fn allowed(&self) -> (u32, u64) {
        self.target
    }

    /// Returns the number of entries that may be pulled but have not been pulled yet.
    pub(crate) fn left(&self) -> u32 {
        self.distance(self.next, self.target.0)
    }

    /// Returns the number of guest entries that fit in a submission now.
    pub(crate) fn room(&self) -> u32 {
        if self.records.len() >= RECORDS {
            return 0;
        }
        let free = MAX_QUEUED_ENTRIES.saturating_sub(self.put.wrapping_sub(self.get));
        u32::try_from(free.saturating_sub(1)).unwrap_or(0)
    }

    /// Records that the card's GP_GET was `index`.
    pub(crate) fn observe(&mut self, index: u32) {
        self.get = self.position(index);
    }

    /// Returns the host position that corresponds to the card's GP_GET. Replaces an impossible value with the last
    /// known position.
    pub(crate) fn position(&self, index: u32) -> u64 {
        let ahead = u64::from(index).wrapping_sub(self.get) & INDEX;
        let position = self.get.wrapping_add(ahead);
        if index < RING_ENTRIES && position <= self.started { position } else { self.get }
    }

    /// Returns the host position that the card had reached at the last poll.
    pub(crate) fn reached(&self) -> u64 {
        self.get
    }

    /// Returns true if, at the last poll, the card had fetched all work passed to it.
    pub(crate) fn drained(&self) -> bool {
        self.get == self.started
    }

    /// Returns true if little work is in flight and no guest entry waits for free space, so completions are not urgent.
    pub(crate) fn is_shallow(&self) -> bool {
        self.left() == 0 && self.records.len() <= MAX_SHALLOW_SUBMISSIONS
    }

    /// Returns the number of records that the card may fetch or has already fetched.
    pub(crate) fn with_card(&self) -> usize {
        self.records.partition_point(|record| record.end() <= self.started)
    }

    /// Lets the card fetch a submission and all earlier ones. Returns the new GP_PUT index, or `None` if the card may
    /// already run the submission or if it does not exist.
    pub(crate) fn start(&mut self, submission: Submission) -> Option<u32> {
        let record = self.records.iter().find(|record| record.submission == submission)?;
        let end = record.end();
        if end <= self.started {
            return None;
        }
        if self.with_card() == 0 {
            self.seen = (self.get, None);
        }
        self.started = end;
        u32::try_from(end & INDEX).ok()
    }

    /// Returns the host ring index up to which the card may fetch.
    pub(crate) fn allowed_index(&self) -> u32 {
        u32::try_from(self.started & INDEX).unwrap_or(0)
    }

    /// Returns the number of records that the card has fetched completely.
    pub(crate) fn fetched(&self) -> usize {
        self.records.partition_point(|record| record.end() <= self.get)
    }

    /// Converts the card's host `position` to the guest's GP_GET, the index of the next guest entry to fetch.
    pub(crate) fn virtual_get(&self, position: u64) -> u32 {
        let past = self.records.partition_point(|record| record.end() <= position);
        let Some(record) = self.records.get(past) else { return self.next };
        let within = position.saturating_sub(record.first);
        self.wrap(record.guest_first, u32::try_from(within).unwrap_or(0))
    }

    /// Returns the host ring index at which the next entry is written.
    pub(crate) fn host_index(&self) -> u32 {
        u32::try_from(self.put & INDEX).unwrap_or(0)
    }

    /// Adds `entries` as the next submission. Their number must be between 1 and [`Self::room`].
    pub(crate) fn submit(&mut self, submission: Submission, entries: &[Entry], now: u64) -> Record {
        let slot = usize::try_from(self.submitted & SLOT).unwrap_or(0);
        self.sequence = self.sequence.checked_add(1).unwrap_or(1);
        let count = u32::try_from(entries.len()).unwrap_or(0);
        let record = Record {
            submission,
            sequence: self.sequence,
            slot,
            first: self.put,
            guest_first: self.next,
            entries: count,
            submitted_at: now,
        };
        if let Some(end) = entries.iter().rev().find_map(|entry| entry.end) {
            self.last_end = end;
        }
        if let Some(end) = self.ends.get_mut(slot) {
            *end = self.last_end;
        }
        self.submitted = self.submitted.wrapping_add(1);
        self.next = self.wrap(self.next, count);
        self.put = record.end();
        self.records.push_back(record);
        record
    }

    /// Removes the oldest record, which has ended.
    pub(crate) fn complete(&mut self) -> Option<Record> {
        let record = self.records.pop_front()?;
        self.completed = record.sequence;
        Some(record)
    }

    /// Returns the end address of the last guest range before a record, or 0 if there is none.
    pub(crate) fn end_before(&self, slot: usize) -> u64 {
        self.ends.get(slot).copied().unwrap_or(0)
    }

    /// Returns the index `by` entries after `index` in the guest's ring.
    pub(crate) fn wrap(&self, index: u32, by: u32) -> u32 {
        index.wrapping_add(by) & self.entries.wrapping_sub(1)
    }

    /// Returns the host ring indices of the guest entries in flight, oldest first.
    pub(crate) fn guests_entries(&self) -> impl Iterator<Item = u32> + '_ {
        self.records.iter().flat_map(|record| {
            let entries = (0..u64::from(record.entries)).map(|entry| record.first.wrapping_add(entry) & INDEX);
            entries.map(|index| u32::try_from(index).unwrap_or(0))
        })
    }

    /// Returns the slot of the record that ended last, if any.
    pub(crate) fn last_ended(&self) -> Option<usize> {
        let number = self.submitted.checked_sub(self.records.len() as u64)?.checked_sub(1)?;
        usize::try_from(number & SLOT).ok()
    }

    fn distance(&self, from: u32, to: u32) -> u32 {
        to.wrapping_sub(from) & self.entries.wrapping_sub(1)
    }
}

#[cfg(test)]
mod tests;
