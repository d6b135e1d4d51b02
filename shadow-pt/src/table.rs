//! Arrays of entries that are kept on the card and mirrored here: what differs is written, in as few writes as
//! reasonable.

use crate::translate::{PageSize, loses, translate};
use crate::{Frames, GuestMemory, GuestRange, Place, ShadowMemory, SyncReport};
use nvspec::addr::VramAddr;
use nvspec::mmu::{ENTRY_BYTES, Pte};
use std::ops::Range;

/// Changed entries this far apart are written together with what is between them.
const GAP: usize = 8;
/// When a table does not lie in the guest's memory as a whole, it is read in pieces of this size.
const PIECE: usize = 4096;

/// Entries that changed, and whether any of them lost a permission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) range: Range<usize>,
    pub(crate) loses: bool,
}

/// Collects changed entries, in ascending order, into runs.
#[derive(Debug, Default)]
pub(crate) struct Runs(Vec<Run>);

impl Runs {
    pub(crate) fn push(&mut self, index: usize, loses: bool) {
        let end = index.saturating_add(1);
        match self.0.last_mut() {
            Some(run) if index.saturating_sub(run.range.end) <= GAP => {
                run.range.end = end;
                run.loses |= loses;
            }
            _ => self.0.push(Run { range: index..end, loses }),
        }
    }

    /// Writes the runs that lose something, or those that do not, from the mirror to the card.
    pub(crate) fn write(
        &self,
        losing: bool,
        card: VramAddr,
        mirror: &[u64],
        memory: &mut impl ShadowMemory,
        report: &mut SyncReport,
    ) {
        let mut bytes = Vec::new();
        for run in self.0.iter().filter(|run| run.loses == losing) {
            let Some(entries) = mirror.get(run.range.clone()) else { continue };
            bytes.clear();
            bytes.extend(entries.iter().flat_map(|entry| entry.to_le_bytes()));
            memory.write(card.offset((run.range.start as u64).saturating_mul(ENTRY_BYTES)), &bytes);
            report.writes = report.writes.saturating_add(1);
            report.entries_written = report.entries_written.saturating_add(entries.len() as u64);
            report.lost_permission |= losing;
        }
    }
}

/// Reads `count` entries of the guest's at `place` into `entries`. Where the guest has no memory they are 0. `false` when
/// nothing could be read.
pub(crate) fn read_entries(
    guest: &mut impl GuestMemory,
    place: Place,
    count: usize,
    entries: &mut Vec<u64>,
    report: &mut SyncReport,
) -> bool {
    let len = count.saturating_mul(size_of::<u64>());
    let mut bytes = vec![0u8; len];
    let mut read = 0usize;
    if guest.read(place, &mut bytes).is_ok() {
        read = len;
    } else {
        for (index, piece) in bytes.chunks_mut(PIECE).enumerate() {
            let offset = (index as u64).saturating_mul(PIECE as u64);
            match place.checked_add(offset).map(|place| guest.read(place, piece)) {
                Some(Ok(())) => read = read.saturating_add(piece.len()),
                _ => piece.fill(0),
            }
        }
    }
    entries.clear();
    entries.extend(bytes.as_chunks().0.iter().map(|entry| u64::from_le_bytes(*entry)));
    report.bytes_scanned = report.bytes_scanned.saturating_add(read as u64);
    if read > 0 {
        report.tables_scanned = report.tables_scanned.saturating_add(1);
    }
    read > 0
}

/// The shadow of one guest table.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) card: VramAddr,
    size: PageSize,
    /// What the guest's entries were when they were read last.
    guest: Box<[u64]>,
    /// What the card's entries are.
    shadow: Box<[u64]>,
}

impl Table {
    /// A table of `entries` entries whose shadow at `card` is all zero.
    pub(crate) fn new(card: VramAddr, size: PageSize, entries: usize) -> Self {
        Self { card, size, guest: vec![0; entries].into(), shadow: vec![0; entries].into() }
    }

    /// Takes in what the guest's entries are now. The mirror is up to date afterwards, the card is once the runs are
    /// written.
    pub(crate) fn scan(&mut self, fresh: &[u64], frames: &impl Frames, report: &mut SyncReport) -> Runs {
        let mut runs = Runs::default();
        let entries = self.guest.iter_mut().zip(self.shadow.iter_mut()).zip(fresh);
        for (index, ((guest, shadow), &raw)) in entries.enumerate() {
            // A valid entry without a shadow was denied or has been taken away: it is looked at each time.
            if raw == *guest && (*shadow != 0 || !Pte::from(raw).valid()) {
                continue;
            }
            let new = translate(raw, self.size, frames).unwrap_or_else(|denial| {
                if raw != *guest {
                    report.denied.add(denial);
                }
                0
            });
            *guest = raw;
            if new != *shadow {
                runs.push(index, loses(*shadow, new));
                *shadow = new;
            }
        }
        runs
    }

    /// Drops the entries that map into `range`.
    pub(crate) fn invalidate(&mut self, range: GuestRange) -> Runs {
        let mut runs = Runs::default();
        for (index, (guest, shadow)) in self.guest.iter().zip(self.shadow.iter_mut()).enumerate() {
            if *shadow != 0 && names(Pte::from(*guest), self.size, range) {
                runs.push(index, true);
                *shadow = 0;
            }
        }
        runs
    }

    pub(crate) fn write(&self, runs: &Runs, losing: bool, memory: &mut impl ShadowMemory, report: &mut SyncReport) {
        runs.write(losing, self.card, &self.shadow, memory, report);
    }
}

/// Whether a guest entry names a byte in `range`.
fn names(pte: Pte, size: PageSize, range: GuestRange) -> bool {
    let (system, start, len) = match range {
        GuestRange::Vram(start, len) => (false, start.0, len),
        GuestRange::Ram(start, len) => (true, start.0, len),
    };
    let page = pte.address();
    pte.aperture().is_system() == system
        && page < start.saturating_add(len)
        && start < page.saturating_add(size.bytes())
}
