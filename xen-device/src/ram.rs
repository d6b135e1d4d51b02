//! The domain's memory, mapped for the device in chunks of bounded size.
//!
//! A complete chunk is one region. A chunk with holes has a region for each run of frames, and is checked periodically,
//! because Xen does not report that the guest has taken memory back. When Xen reports that frames may have been
//! removed, each chunk is compared with the present frames. The regions of missing frames are unmapped first from the
//! device, and then from this process, because a mapping in this process keeps the frames allocated in the hypervisor.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use vmm_glue::device::Device;
use vmm_glue::link::Link;
use vmm_glue::memory::{MemoryLimits, PAGE_SIZE};

use crate::hypervisor::Target;

/// Minimum chunk size in frames: 2 MiB. Only the first and last chunk of a range may be smaller.
const MIN_PIECE: u64 = 512;
/// Target number of chunks. The number of regions per client is limited.
const TARGET_PIECES: u64 = 1024;
/// Frames of a PC's VGA memory, which never contain RAM. A chunk with these frames would always have a hole, and would
/// be checked forever.
pub(crate) const VGA: Range<u64> = 0xa0..0xc0;
/// First frame of the range below 4 GiB that never contains RAM. The guest's firmware and Xen use the addresses from
/// here to 4 GiB.
const LOW_END: u64 = 0xf_0000;
/// Frame at 4 GiB.
const FRAME_AT_4_GIB: u64 = 0x10_0000;

/// A run of frames mapped for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    first: u64,
    count: u64,
}

impl Run {
    fn gpa(self) -> u64 {
        self.first.saturating_mul(PAGE_SIZE)
    }

    fn size(self) -> u64 {
        self.count.saturating_mul(PAGE_SIZE)
    }
}

/// A chunk of the domain's address space.
#[derive(Debug)]
struct Piece {
    first: u64,
    count: u64,
    runs: Vec<Run>,
}

impl Piece {
    fn is_whole(&self) -> bool {
        matches!(*self.runs, [Run { count, .. }] if count == self.count)
    }
}

/// The part of the domain's memory that is mapped for the device.
#[derive(Debug)]
pub(crate) struct Ram {
    pieces: Vec<Piece>,
    limits: MemoryLimits,
    /// Number of failed attempts to map a run for the device.
    refused: u64,
}

impl Ram {
    /// Creates the chunks of a domain with up to `kib` KiB of memory. No chunk is mapped yet.
    pub fn new(kib: u64, limits: MemoryLimits) -> Self {
        let frames = kib.div_ceil(4).min(limits.mapped_bytes / PAGE_SIZE);
        let piece = (frames / TARGET_PIECES).next_power_of_two().max(MIN_PIECE);
        // The range below 4 GiB contains as much memory as fits. The toolstack places the rest above.
        let low = [0..frames.min(VGA.start), VGA.end..frames.min(LOW_END)];
        let all = low.into_iter().chain(std::iter::once(FRAME_AT_4_GIB..FRAME_AT_4_GIB.saturating_add(frames)));
        Self { pieces: all.flat_map(|range| cut(range, piece)).collect(), limits, refused: 0 }
    }

    /// Maps all present memory.
    pub fn lend_all(&mut self, target: &dyn Target, link: &Link, device: &mut dyn Device) {
        let mut met_end = false;
        for place in 0..self.pieces.len() {
            let Some(piece) = self.pieces.get(place) else { return };
            if piece.first == FRAME_AT_4_GIB {
                met_end = false;
            }
            // Below and above 4 GiB, a domain's memory is initially contiguous, so a chunk without memory is followed
            // only by other such chunks. Drop these chunks instead of checking them periodically.
            if !met_end {
                self.fill(place, target, link, device);
                met_end = self.pieces.get(place).is_some_and(|piece| piece.runs.is_empty());
            }
        }
        self.pieces.retain(|piece| !piece.runs.is_empty());
        gauge(link);
    }

    /// Maps frames that the guest has added to chunks with holes. Returns true if any chunk had holes.
    pub fn look_at_holes(&mut self, target: &dyn Target, link: &Link, device: &mut dyn Device) -> bool {
        let holes: Vec<_> = (0..).zip(&self.pieces).filter(|(_, piece)| !piece.is_whole()).map(|(at, _)| at).collect();
        for &place in &holes {
            self.fill(place, target, link, device);
        }
        gauge(link);
        !holes.is_empty()
    }

    /// Returns true if any chunk has a hole.
    pub fn has_holes(&self) -> bool {
        self.pieces.iter().any(|piece| !piece.is_whole())
    }

    /// Withdraws missing frames. Afterwards, neither the device nor this process maps any missing frame.
    pub fn invalidate(&mut self, target: &dyn Target, link: &Link, device: &mut dyn Device) {
        for piece in &mut self.pieces {
            let count = usize::try_from(piece.count).unwrap_or(0);
            // Treat frames that cannot be queried as removed.
            let present = target.present(piece.first, count).unwrap_or_default();
            let first = piece.first;
            piece.runs.retain(|run| {
                let at = |frame: u64| usize::try_from(frame.saturating_sub(first)).unwrap_or(usize::MAX);
                let frames = present.get(at(run.first)..at(run.first.saturating_add(run.count)));
                let stays = frames.is_some_and(|frames| frames.iter().all(|there| *there));
                if !stays {
                    withdraw(*run, link, device);
                }
                stays
            });
        }
        for place in 0..self.pieces.len() {
            if self.pieces.get(place).is_some_and(|piece| !piece.is_whole()) {
                self.fill(place, target, link, device);
            }
        }
        gauge(link);
    }

    /// Withdraws all memory.
    pub fn withdraw_all(&mut self, link: &Link, device: &mut dyn Device) {
        for run in self.pieces.drain(..).flat_map(|piece| piece.runs) {
            withdraw(run, link, device);
        }
        gauge(link);
    }

    /// Maps the frames of a chunk that are present and not mapped yet.
    fn fill(&mut self, place: usize, target: &dyn Target, link: &Link, device: &mut dyn Device) {
        let Some(piece) = self.pieces.get_mut(place) else { return };
        let whole = Run { first: piece.first, count: piece.count };
        // Most chunks are complete, so a single call suffices for each of them.
        let runs = match piece.runs.is_empty().then(|| lend(whole, target, &self.limits, link, device)) {
            Some(Ok(())) => {
                piece.runs.push(whole);
                return;
            }
            _ => missing(piece, target),
        };
        for run in runs {
            match lend(run, target, &self.limits, link, device) {
                Ok(()) => piece.runs.push(run),
                Err(error) => {
                    self.refused = self.refused.saturating_add(1);
                    if vmm_glue::worth_logging(self.refused) {
                        let (gpa, size) = (run.gpa(), run.size());
                        tracing::warn!(gpa, size, error, "the device cannot access part of the domain's memory");
                    }
                }
            }
        }
    }
}

/// Splits a range at multiples of `most`.
fn cut(range: Range<u64>, most: u64) -> impl Iterator<Item = Piece> {
    let mut first = range.start;
    std::iter::from_fn(move || {
        let rest = range.end.checked_sub(first).filter(|rest| *rest != 0)?;
        let count = most.saturating_sub(first.checked_rem(most)?).min(rest);
        let piece = Piece { first, count, runs: Vec::new() };
        first = first.saturating_add(count);
        Some(piece)
    })
}

/// Returns the runs of a chunk that are present and not mapped yet.
fn missing(piece: &Piece, target: &dyn Target) -> Vec<Run> {
    let present = target.present(piece.first, usize::try_from(piece.count).unwrap_or(0)).unwrap_or_default();
    let lent =
        |frame: u64| piece.runs.iter().any(|run| (run.first..run.first.saturating_add(run.count)).contains(&frame));
    let mut runs: Vec<Run> = Vec::new();
    for frame in (piece.first..).zip(present).filter(|(_, there)| *there).map(|(frame, _)| frame) {
        if lent(frame) {
            continue;
        }
        match runs.last_mut().filter(|run| run.first.saturating_add(run.count) == frame) {
            Some(run) => run.count = run.count.saturating_add(1),
            None => runs.push(Run { first: frame, count: 1 }),
        }
    }
    runs
}

fn lend(
    run: Run,
    target: &dyn Target,
    limits: &MemoryLimits,
    link: &Link,
    device: &mut dyn Device,
) -> Result<(), String> {
    let gone = |error: io::Error| error.to_string();
    let mapping = target.map(run.first, usize::try_from(run.count).unwrap_or(0)).map_err(gone)?;
    let region = link.memory().add_mapping(run.gpa(), Arc::new(mapping), limits).map_err(|error| error.to_string())?;
    device.dma_map(&region).map_err(|error| {
        link.memory().remove(run.gpa());
        error.to_string()
    })
}

fn withdraw(run: Run, link: &Link, device: &mut dyn Device) {
    // Remove the region from the table first, so that no thread finds it while the device ends its accesses to the
    // region.
    let region = link.memory().remove(run.gpa());
    device.dma_unmap(run.gpa(), run.size());
    drop(region);
}

fn gauge(link: &Link) {
    use std::sync::atomic::Ordering::Relaxed;
    let table = link.memory().snapshot();
    link.counters().dma_regions.store(u64::try_from(table.regions().len()).unwrap_or(u64::MAX), Relaxed);
    link.counters().dma_bytes.store(table.mapped_bytes(), Relaxed);
}
