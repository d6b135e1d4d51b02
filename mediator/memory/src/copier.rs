//! The mediator's own channels, one per copy engine. They move chunks between the card and host memory, and zero card
//! memory.
//!
//! These channels share the card's engines with guest channels. They belong to a pseudo-VM that represents the
//! mediator. The scheduler does not manage them, because VMs wait for their copies.

use super::own_space::{OwnSpace, va};
use super::vram::CardVram;
use crate::ManagerError;
use bringup::CardError;
use channels::{Bind, Channels, GuestInstance, GuestMemory, GuestRing, Parts, Submission, Unmapped, Unreadable};
use locks::Condvar;
use nvspec::addr::{GpuVa, GuestVramAddr, SMALL_PAGE, VramAddr};
use nvspec::class::ce90b5::{self as methods, exec};
use nvspec::fifo::{ChannelId, GpEntry, HeaderOp, MethodHeader, VirtualChannelId, engine, host_method};
use nvspec::mmu::Rights;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use vram::{PagePool, Place, TenantId};

/// The mediator's VM ID in [`Channels`]. No operator's VM has this ID.
pub const COPIER: TenantId = TenantId::MEDIATOR;

/// Number of bytes that an engine copies before it may switch to another channel.
const COPY_PIECE_BYTES: u64 = 512 << 10;
/// Line length of a copy in bytes. The engine copies rectangles.
const LINE: u64 = 16 << 10;
/// Number of push buffer dwords per piece: a header and eight dwords, and a header and one dword.
const PIECE_WORDS: u64 = 11;
/// Number of dwords at the start of a push buffer, which bind the object.
const FIRST_WORDS: u64 = 2;
/// Size of a lane's push buffer in bytes.
const PUSH_BYTES: u64 = 2 * SMALL_PAGE;
/// Maximum number of submissions in flight per lane. While the completion of one is handled, the engine executes the
/// next one. Each has its own part of the push buffer.
const MAX_SUBMISSIONS_IN_FLIGHT: usize = 2;
/// Size of a submission's part of the push buffer, in bytes.
const SUBMISSION_BYTES: u64 = PUSH_BYTES / MAX_SUBMISSIONS_IN_FLIGHT as u64;
/// Maximum number of pieces per submission. It is small, so that the first chunks complete long before the last ones.
const MAX_PIECES_PER_SUBMISSION: usize = 8;
const _: () = assert!(MAX_PIECES_PER_SUBMISSION as u64 <= (SUBMISSION_BYTES / 4 - FIRST_WORDS) / PIECE_WORDS);
/// Log2 of the number of entries in a lane's ring.
pub const RING_LOG2: u32 = 4;
/// Log2 of the maximum number of copies that the CPU performs before failed engines are retried.
const RESTS_MAX_LOG2: u32 = 8;
/// Ring address in the instance block. The mediator reads the entries from its own memory.
const RING_VA: GpuVa = GpuVa(SMALL_PAGE);
/// Subchannel to which drivers bind copy engines.
const SUBCHANNEL: u8 = 4;
/// Data of SET_OBJECT for copy engines 0 and 1: the class, and the engine number in the upper bits.
const OBJECTS: [u32; 2] = [0x4_90b5, 0x5_90b8];

/// ID of a group of copies that were requested together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CopyId(u64);

/// Source of a copy.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// Memory at the given location.
    Place(Place),
    /// Zeros.
    Zeros,
}

/// A requested copy.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// Source of the data.
    pub from: Source,
    /// Destination of the data.
    pub to: Place,
    /// Size in bytes, a multiple of 128 KiB.
    pub bytes: u64,
}

/// A piece of a copy.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Group of the copy.
    group: CopyId,
    /// Source address; `None` for zeros.
    from: Option<GpuVa>,
    to: GpuVa,
    bytes: u64,
}

/// A copy engine and the mediator's channel on it.
struct Lane {
    object: u32,
    channel: VirtualChannelId,
    physical: ChannelId,
    push: VramAddr,
    ring: [u64; 1 << RING_LOG2],
    put: u32,
    /// Submissions in flight and their pieces, oldest first.
    in_flight: VecDeque<(Submission, Vec<Piece>)>,
}

/// The mediator's channels, and their queue of copies.
pub struct Copier {
    space: OwnSpace,
    /// Address of a line of zeros that is never overwritten.
    zeros: VramAddr,
    lanes: Vec<Lane>,
    /// Pieces of the queued submissions, grouped by submission.
    waiting: VecDeque<Vec<Piece>>,
    /// Number of incomplete pieces of each group.
    left: BTreeMap<CopyId, usize>,
    groups: u64,
    /// Total number of completed pieces.
    pieces: u64,
    /// Set if a channel has failed. No copies are performed until [`Self::revive`].
    broken: bool,
    /// Number of failures since the last completed copy.
    breaks: u32,
    /// Number of copies that the CPU performs before the next revival.
    rests: u32,
    ended: Arc<Condvar>,
}

/// Ring of the mediator's own channel, which guests cannot write.
pub struct OwnRing<'a>(pub &'a [u64]);

impl GuestRing for OwnRing<'_> {
    fn read(&mut self, va: GpuVa, data: &mut [u8]) -> Result<(), Unmapped> {
        let first = va.0.checked_sub(RING_VA.0).ok_or(Unmapped)? as usize / 8;
        for (bytes, at) in data.chunks_mut(8).zip(first..) {
            bytes.copy_from_slice(&self.0.get(at).ok_or(Unmapped)?.to_le_bytes()[..bytes.len()]);
        }
        Ok(())
    }
}

/// Empty guest memory. The mediator's channels use only the card's instance block.
pub struct NoMemory;

impl GuestMemory for NoMemory {
    fn read(&mut self, _: channels::Place, _: &mut [u8]) -> Result<(), Unreadable> {
        Err(Unreadable)
    }
}

impl Copier {
    /// Binds a channel on each copy engine. `pool` provides memory for page tables and push buffers.
    ///
    /// # Errors
    /// Returns an error if the card has too little memory or too few channels, or if it does not respond.
    pub fn new(vram: &mut CardVram, channels: &mut Channels, pool: &mut PagePool) -> Result<Self, ManagerError> {
        let space = OwnSpace::new(vram, pool)?;
        channels.add_vm(COPIER, OBJECTS.len() as u32);
        channels.trust(COPIER);
        let zeros = vram.alloc(pool, LINE)?;
        let mut copier = Self {
            space,
            zeros,
            lanes: Vec::new(),
            waiting: VecDeque::new(),
            left: BTreeMap::new(),
            groups: 0,
            pieces: 0,
            broken: false,
            breaks: 0,
            rests: 0,
            ended: Arc::new(Condvar::default()),
        };
        for (number, object) in (0u8..).zip(OBJECTS) {
            let push = vram.alloc(pool, PUSH_BYTES)?;
            copier.add_lane(vram, channels, VirtualChannelId(number), push, object)?;
        }
        copier.start(vram, channels);
        Ok(copier)
    }

    /// Permits the card to schedule the channels.
    fn start(&self, vram: &mut CardVram, channels: &mut Channels) {
        let list = self.channels();
        let mut own = Parts { card: &mut vram.memory, guest: &mut NoMemory };
        for channel in &list {
            channels.enable(&mut own, COPIER, *channel, true);
        }
        channels.submit_runlist(&mut own, COPIER, &list);
    }

    /// Returns true if failed channels must be [revived](Self::revive) before a copy. Must be called before each copy.
    /// A copy on a failed engine waits for the hang limit, so the engines are retried at growing intervals after
    /// repeated failures.
    pub fn is_due(&mut self) -> bool {
        self.rests = self.rests.saturating_sub(1);
        self.broken && self.rests == 0
    }

    /// Rebinds all channels after they were unbound, and drops their queued copies.
    ///
    /// # Errors
    /// Returns an error if the card has no free channels or does not respond. In this case, the copier stays failed.
    pub fn revive(&mut self, vram: &mut CardVram, channels: &mut Channels) -> Result<(), ManagerError> {
        self.rests = 1 << self.breaks.min(RESTS_MAX_LOG2);
        self.waiting.clear();
        self.left.clear();
        for lane in &mut self.lanes {
            for (index, ..) in own_pages(channels, lane.physical) {
                self.space.unmap_work(vram, index)?;
            }
            lane.in_flight.clear();
            lane.put = 0;
            lane.physical = bind(&mut self.space, vram, channels, COPIER, lane.channel, lane.engine())?;
        }
        self.start(vram, channels);
        self.broken = false;
        Ok(())
    }

    fn add_lane(
        &mut self,
        vram: &mut CardVram,
        channels: &mut Channels,
        channel: VirtualChannelId,
        push: VramAddr,
        object: u32,
    ) -> Result<(), ManagerError> {
        let engine = if channel.0 == 0 { engine::CE0 } else { engine::CE1 };
        let physical = bind(&mut self.space, vram, channels, COPIER, channel, engine)?;
        let ring = [0; 1 << RING_LOG2];
        self.lanes.push(Lane { object, channel, physical, push, ring, put: 0, in_flight: VecDeque::new() });
        Ok(())
    }

    /// Returns the total number of completed pieces, which grows while the engines make progress.
    #[must_use]
    pub fn pieces(&self) -> u64 {
        self.pieces
    }

    /// Returns the condition variable that is signalled when a group of copies has ended or the channels have failed.
    #[must_use]
    pub fn ended(&self) -> Arc<Condvar> {
        Arc::clone(&self.ended)
    }

    /// Queues groups of jobs and distributes each group evenly among the engines. Returns one ID per group.
    ///
    /// The submissions of a group are chosen now rather than when an engine becomes free. Otherwise, the rest of the
    /// queue would be divided each time, and the last submissions would be small. Each submission costs an interrupt.
    ///
    /// # Errors
    /// Returns an error if the engines have failed.
    pub fn submit(
        &mut self,
        vram: &mut CardVram,
        channels: &mut Channels,
        now: u64,
        work: &[Vec<Job>],
    ) -> Result<Vec<CopyId>, ManagerError> {
        if self.broken {
            return Err(CardError::Unresponsive("the copy engines do not move memory").into());
        }
        let mut groups = Vec::new();
        for jobs in work {
            let group = CopyId(self.groups);
            self.groups += 1;
            let pieces: Vec<Piece> = jobs.iter().flat_map(|job| pieces(job, group)).collect();
            if !pieces.is_empty() {
                self.left.insert(group, pieces.len());
                let most = per_submission(pieces.len(), self.lanes.len());
                self.waiting.extend(pieces.chunks(most).map(<[Piece]>::to_vec));
            }
            groups.push(group);
        }
        self.feed(vram, channels, now)?;
        Ok(groups)
    }

    /// Returns true if a group of copies has completed, false if it is still in progress, or `None` if it never
    /// completes.
    #[must_use]
    pub fn has_ended(&self, group: CopyId) -> Option<bool> {
        match (self.left.contains_key(&group), self.broken) {
            (true, true) => None,
            (left, _) => Some(!left),
        }
    }

    /// Handles the completion of a submission on one of the mediator's own channels.
    pub fn completed(&mut self, vram: &mut CardVram, channels: &mut Channels, now: u64, submission: Submission) {
        let take = |lane: &mut Lane| {
            let at = lane.in_flight.iter().position(|(known, _)| *known == submission)?;
            lane.in_flight.remove(at)
        };
        let Some((_, pieces)) = self.lanes.iter_mut().find_map(take) else { return };
        self.pieces += pieces.len() as u64;
        self.breaks = 0;
        let mut has_ended = false;
        for piece in pieces {
            if let Some(left) = self.left.get_mut(&piece.group) {
                *left -= 1;
                if *left == 0 {
                    self.left.remove(&piece.group);
                    has_ended = true;
                }
            }
        }
        if let Err(error) = self.feed(vram, channels, now) {
            tracing::error!(%error, "the copy engines that move memory make no progress");
            self.breaks();
        }
        // Do not wake threads earlier, because they would delay the completions of other submissions.
        if has_ended {
            self.ended.notify_all();
        }
    }

    /// Handles a hang or fault of one of the mediator's channels. No copy completes until [`Self::revive`].
    pub fn breaks(&mut self) {
        if !std::mem::replace(&mut self.broken, true) {
            self.breaks = self.breaks.saturating_add(1);
            self.rests = 1 << self.breaks.min(RESTS_MAX_LOG2);
        }
        self.waiting.clear();
        self.ended.notify_all();
    }

    /// Returns the mediator's channels.
    #[must_use]
    pub fn channels(&self) -> Vec<VirtualChannelId> {
        self.lanes.iter().map(|lane| lane.channel).collect()
    }

    /// Passes the queued submissions to the lanes.
    fn feed(&mut self, vram: &mut CardVram, channels: &mut Channels, now: u64) -> Result<(), ManagerError> {
        let Self { space, zeros, lanes, waiting, .. } = self;
        let zeros = va(Place::Card(vram::VramAddr(zeros.0)));
        if waiting.is_empty() || lanes.iter().all(Lane::is_full) {
            return Ok(());
        }
        space.flush(vram)?;
        for depth in 0..MAX_SUBMISSIONS_IN_FLIGHT {
            for lane in lanes.iter_mut().filter(|lane| lane.in_flight.len() == depth) {
                let Some(pieces) = waiting.pop_front() else { return Ok(()) };
                lane.submit(vram, channels, now, pieces, zeros)?;
            }
        }
        Ok(())
    }
}

/// Returns the mediator's pages that a channel's address space must map.
pub fn own_pages(channels: &Channels, physical: ChannelId) -> Vec<(u32, VramAddr, Rights)> {
    let layout = channels.layout();
    layout
        .work_pages(physical, physical.into())
        .into_iter()
        .chain(layout.image_pages(physical, physical.into()))
        .collect()
}

/// Binds a mediator channel with a context for only one engine.
pub fn bind(
    space: &mut OwnSpace,
    vram: &mut CardVram,
    channels: &mut Channels,
    vm: TenantId,
    channel: VirtualChannelId,
    engine: u32,
) -> Result<ChannelId, ManagerError> {
    // The address of the context is not used.
    let contexts = [engine::GR, engine::CE0, engine::CE1].map(|unit| (unit == engine).then_some(GpuVa(0)));
    // The mediator has no guest VRAM at this address, so the card reads nothing there.
    let nowhere = channels::Place::Vram(GuestVramAddr(0));
    let guest = GuestInstance {
        userd: GuestVramAddr(u64::from(channel.0) * SMALL_PAGE),
        gp_base: RING_VA,
        gp_entries_log2: RING_LOG2,
        gp_get: 0,
        gp_put: 0,
        directory: nowhere,
        contexts,
    };
    let bind = Bind { instance: nowhere, guest: &guest, directory: space.directory() };
    let physical = channels.bind(&mut vram.memory, vm, channel, bind)?;
    for (index, page, rights) in own_pages(channels, physical) {
        space.map_work(vram, index, page, rights)?;
    }
    space.flush(vram)?;
    Ok(physical)
}

impl Lane {
    fn is_full(&self) -> bool {
        self.in_flight.len() >= MAX_SUBMISSIONS_IN_FLIGHT
    }

    fn engine(&self) -> u32 {
        if self.channel.0 == 0 { engine::CE0 } else { engine::CE1 }
    }

    fn submit(
        &mut self,
        vram: &mut CardVram,
        channels: &mut Channels,
        now: u64,
        pieces: Vec<Piece>,
        zeros: GpuVa,
    ) -> Result<(), ManagerError> {
        let rectangles = pieces.iter().flat_map(|piece| rectangle(piece, zeros));
        let words: Vec<u32> = to(host_method::SET_OBJECT, &[self.object]).into_iter().chain(rectangles).collect();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        // The other part of the push buffer contains the previous submission.
        let at = self.push.0 + u64::from(self.put) % MAX_SUBMISSIONS_IN_FLIGHT as u64 * SUBMISSION_BYTES;
        vram.memory.write(VramAddr(at), &bytes)?;
        let push = va(Place::Card(vram::VramAddr(at)));
        let entry = GpEntry::new().with_address_dwords(push.0 >> 2).with_dwords(words.len() as u32);
        self.ring[self.put as usize] = entry.into();
        self.put = (self.put + 1) % (1 << RING_LOG2);
        let memory = &mut vram.memory;
        let doorbell = channels
            .doorbell(&mut Parts { card: memory, guest: &mut NoMemory }, COPIER, self.channel, self.put)
            .map_err(ManagerError::OwnDoorbell)?;
        let pulled = channels
            .pull(&mut Parts { card: memory, guest: &mut OwnRing(&self.ring) }, doorbell, now)
            .map_err(|error| ManagerError::OwnRing(error.fault))?;
        let submission = pulled.submission.ok_or(ManagerError::OwnRingStill)?;
        self.in_flight.push_back((submission, pieces));
        channels.start(memory, self.physical, submission);
        Ok(())
    }
}

/// Returns the maximum number of pieces per submission, chosen so that a group is distributed evenly among all lanes.
fn per_submission(pieces: usize, lanes: usize) -> usize {
    pieces.div_ceil(lanes.max(1)).clamp(1, MAX_PIECES_PER_SUBMISSION)
}

/// Returns the pieces of a job.
fn pieces(job: &Job, group: CopyId) -> impl Iterator<Item = Piece> {
    let Job { from, to, bytes } = *job;
    (0..bytes).step_by(COPY_PIECE_BYTES as usize).map(move |at| Piece {
        group,
        from: match from {
            Source::Place(place) => Some(va(place).offset(at)),
            Source::Zeros => None,
        },
        to: va(to).offset(at),
        bytes: COPY_PIECE_BYTES.min(bytes - at),
    })
}

/// Returns push buffer dwords that write data to consecutive methods.
fn to(method: u32, data: &[u32]) -> Vec<u32> {
    let header = MethodHeader::to(HeaderOp::Increasing, SUBCHANNEL, method, data.len() as u16);
    std::iter::once(header.into()).chain(data.iter().copied()).collect()
}

/// Returns the methods that copy a piece: a rectangle of consecutive lines on both sides, or with the line `zeros`
/// repeated as the source.
fn rectangle(piece: &Piece, zeros: GpuVa) -> Vec<u32> {
    let line = LINE.min(piece.bytes) as u32;
    let lines = (piece.bytes / u64::from(line)) as u32;
    let (from, pitch) = piece.from.map_or((zeros, 0), |from| (from, line));
    let halves = |va: GpuVa| [(va.0 >> 32) as u32, va.0 as u32];
    let ([from_high, from], [to_high, to_low]) = (halves(from), halves(piece.to));
    let mut words = to(methods::SRC_ADDRESS_HIGH, &[from_high, from, to_high, to_low, pitch, line, line, lines]);
    words.extend(to(methods::EXEC, &[exec::SRC_LINEAR.mask() | exec::DST_LINEAR.mask()]));
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the sizes of the submissions for a group of pieces on two lanes.
    fn sizes(pieces: usize) -> Vec<usize> {
        vec![(); pieces].chunks(per_submission(pieces, 2)).map(<[()]>::len).collect()
    }

    #[test]
    fn groups_are_divided_evenly_into_few_submissions() {
        assert_eq!(sizes(1), [1]);
        assert_eq!(sizes(4), [2, 2], "a chunk of 2 MiB uses both engines");
        assert_eq!(sizes(5), [3, 2]);
        assert_eq!(sizes(16), [8, 8], "a batch of 8 MiB");
        assert_eq!(sizes(64), [8; 8], "no small submissions at the end");
    }

    #[test]
    fn jobs_become_pieces_that_cover_them() {
        let to = Place::Card(vram::VramAddr(0));
        let job = Job { from: Source::Zeros, to, bytes: 2 * COPY_PIECE_BYTES + SMALL_PAGE };
        let all: Vec<Piece> = pieces(&job, CopyId(3)).collect();
        assert_eq!(all.iter().map(|piece| piece.bytes).sum::<u64>(), job.bytes);
        assert_eq!(all.len(), 3);
        assert!(all.iter().all(|piece| piece.group == CopyId(3) && piece.from.is_none()));
        assert_eq!(all.last().map(|piece| piece.to), Some(va(to).offset(2 * COPY_PIECE_BYTES)));
    }
}
