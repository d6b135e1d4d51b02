//! Saved form of a bound channel's rings. The positions, record slots and sequence numbers of submissions in flight are
//! derived from the last submission.

use super::{MAX_QUEUED_ENTRIES, Record, Ring, SLOT};
use crate::work::RECORDS;
use crate::{RingFault, Submission};
use nvspec::addr::{GpuVa, VA_BITS};
use nvspec::instance::ramfc;
use nvspec::mmu::HOST_VA_BASE;
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Maximum value of an event counter.
pub(crate) const COUNT_MAX: u64 = 1 << 62;

/// Saved form of a channel's positions in the guest's ring and the host's ring.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedRing {
    pub(crate) gp_base: u64,
    pub(crate) entries: u32,
    pub(crate) gp_put: u32,
    pub(crate) next: u32,
    pub(crate) target: (u32, u64),
    pub(crate) doorbells: u64,
    pub(crate) put: u64,
    /// Number of records that the card may fetch.
    pub(crate) started: u16,
    pub(crate) get: u64,
    pub(crate) records: Vec<SavedRecord>,
    pub(crate) submitted: u64,
    pub(crate) sequence: u32,
    completed: u32,
    pub(crate) ends: Vec<u64>,
    last_end: u64,
    fault: Option<SavedFault>,
    seen: (u64, Option<u32>),
}

/// Saved form of a submission in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedRecord {
    pub(crate) submission: u64,
    pub(crate) entries: u32,
    submitted_at: u64,
}

/// Saved reason why a guest's ring cannot be read any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum SavedFault {
    Unmapped { va: u64 },
    Entry { index: u32, raw: u64 },
}

impl Ring {
    pub(crate) fn save(&self) -> SavedRing {
        let Self {
            gp_base,
            entries,
            gp_put,
            next,
            target,
            doorbells,
            put,
            started: _,
            get,
            records,
            submitted,
            sequence,
            completed,
            ends,
            last_end,
            fault,
            seen,
        } = self;
        let saved_record = |record: &Record| {
            let Record { submission, sequence: _, slot: _, first: _, guest_first: _, entries, submitted_at } = *record;
            SavedRecord { submission: submission.0, entries, submitted_at }
        };
        let fault = fault.map(|fault| match fault {
            RingFault::Unmapped { va } => SavedFault::Unmapped { va: va.0 },
            RingFault::Entry { index, raw } => SavedFault::Entry { index, raw },
        });
        SavedRing {
            gp_base: gp_base.0,
            entries: *entries,
            gp_put: *gp_put,
            next: *next,
            target: *target,
            doorbells: *doorbells,
            put: *put,
            started: u16::try_from(self.with_card()).unwrap_or(u16::MAX),
            get: *get,
            records: records.iter().map(saved_record).collect(),
            submitted: *submitted,
            sequence: *sequence,
            completed: *completed,
            ends: ends.to_vec(),
            last_end: *last_end,
            fault,
            seen: *seen,
        }
    }

    pub(crate) fn restored(saved: SavedRing) -> Result<Self, Invalid> {
        saved.check()?;
        let SavedRing {
            gp_base,
            entries,
            gp_put,
            next,
            target,
            doorbells,
            put,
            started,
            get,
            records,
            submitted,
            sequence,
            completed,
            ends,
            last_end,
            fault,
            seen,
        } = saved;
        let fault = fault.map(|fault| match fault {
            SavedFault::Unmapped { va } => RingFault::Unmapped { va: GpuVa(va) },
            SavedFault::Entry { index, raw } => RingFault::Entry { index, raw },
        });
        let records = unwind(&records, put, next, submitted, sequence, entries)?;
        let first = records.front().map_or(put, |record| record.first);
        let last_started = usize::from(started).checked_sub(1).and_then(|last| records.get(last));
        let started = last_started.map_or(first, Record::end);
        Invalid::unless((first..=started).contains(&get), || {
            format!("the card is at position {get} of a ring, outside {first} to {started}")
        })?;
        Ok(Self {
            gp_base: GpuVa(gp_base),
            entries,
            gp_put,
            next,
            target,
            doorbells,
            put,
            started,
            get,
            records,
            submitted,
            sequence,
            completed,
            ends: ends.into_boxed_slice(),
            last_end,
            fault,
            seen,
        })
    }
}

/// Computes the start of each submission in flight, backwards from the end of the last one. A start consists of a host
/// position, guest ring index, submission number, and sequence number.
fn unwind(
    saved: &[SavedRecord],
    put: u64,
    next: u32,
    submitted: u64,
    sequence: u32,
    entries: u32,
) -> Result<VecDeque<Record>, Invalid> {
    let mut records = VecDeque::with_capacity(saved.len());
    let (mut end, mut guest_end, mut number, mut sequence) = (put, next, submitted, sequence);
    for record in saved.iter().rev() {
        let before = || Invalid::new("more entries are in flight than were submitted");
        let first = end.checked_sub(record.entries.into()).and_then(|at| at.checked_sub(1)).ok_or_else(before)?;
        number = number.checked_sub(1).ok_or_else(before)?;
        let guest_first = guest_end.wrapping_sub(record.entries) & entries.wrapping_sub(1);
        records.push_front(Record {
            submission: Submission(record.submission),
            sequence,
            slot: usize::try_from(number & SLOT).unwrap_or(0),
            first,
            guest_first,
            entries: record.entries,
            submitted_at: record.submitted_at,
        });
        // The sequence number skips 0 when it wraps around.
        sequence = sequence.checked_sub(1).filter(|before| *before != 0).unwrap_or(u32::MAX);
        (end, guest_end) = (first, guest_first);
    }
    Ok(records)
}

impl SavedRing {
    /// Checks all values except the positions of the submissions in flight, which [`unwind`] computes.
    fn check(&self) -> Result<(), Invalid> {
        let Self { gp_base, entries, gp_put, next, target, doorbells, put, started, records, .. } = self;
        let Self { submitted, sequence, ends, last_end, seen, .. } = self;
        let most = 1u32.checked_shl(ramfc::GP_ENTRIES_LOG2_MAX).unwrap_or(u32::MAX);
        Invalid::unless(entries.is_power_of_two() && *entries <= most, || {
            format!("{entries} is not a valid number of ring entries")
        })?;
        let based = gp_base.checked_rem(8) == Some(0) && *gp_base < 1 << VA_BITS;
        Invalid::unless(based, || format!("ring address {gp_base:#x} is invalid"))?;
        let within = [gp_put, next, &target.0].into_iter().all(|index| index < entries);
        Invalid::unless(within && target.1 <= *doorbells, || {
            "an index or a doorbell is beyond the end of its ring".into()
        })?;
        let counts = [put, doorbells, submitted, &seen.0].into_iter().all(|count| *count <= COUNT_MAX);
        Invalid::unless(counts && (*submitted == 0 || *sequence > 0), || "the counters of a ring are invalid".into())?;
        let held = records.iter().fold(0u64, |sum, record| sum.saturating_add(record.entries.into()).saturating_add(1));
        let fits =
            records.len() <= RECORDS && held <= MAX_QUEUED_ENTRIES && records.iter().all(|record| record.entries > 0);
        Invalid::unless(fits && usize::from(*started) <= records.len(), || {
            "more entries are in flight than a ring can contain".into()
        })?;
        let addresses = ends.iter().chain([last_end]).all(|end| *end <= HOST_VA_BASE.0);
        Invalid::unless(ends.len() == RECORDS && addresses, || {
            "a range ends at an address of the host, or is missing".into()
        })
    }
}
