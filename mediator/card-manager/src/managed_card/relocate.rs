//! Moves a VM's chunks between the card and host memory while the VM continues. Implements the executor of
//! [`tenancy::relocation`] for VMs.
//!
//! 1. The destinations are reserved, and the host allocates pages for those in host memory.
//! 2. The VM's channels are stopped and leave the engines. The VM's CPUs are not affected: work that they submit waits
//!    in the rings, and their writes go to the chunks' old locations and are recorded.
//! 3. The mediator's own channels copy the chunks in batches.
//! 4. When a batch has been copied, pages that were written in the meantime are copied again, under the VM's lock and
//!    the card's lock. Copies of later batches continue during this time. Then the chunks switch to their new
//!    locations, the shadow entries that refer to them are rewritten, and the card's TLBs are flushed.
//! 5. The channels resume.
//!
//! Neither lock is held during a wait.

use super::{CardState, GuestEvents, ManagedCard};
use crate::ManagerError;
use bringup::CardError;
use card_memory::{
    COPIER, Chunk, Copier, CopyId, Dirty, Job, LEAVE_LIMIT, RESET_LIMIT, Ranges, Relocated, Source, Wanted,
    allocate_parallel,
};
use channels::Pause;
use nvspec::addr::SMALL_PAGE;
use nvspec::fifo::VirtualChannelId;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tenancy::relocation::{Action, User};
use vram::{Ended, GuestVramAddr, HostAddr, Move, Place, Step, TenantId, Tier, VramAddr};

/// Interval at which channels that must leave the engines are polled. The card has no interrupt for this event.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Time that the engines may spend without progress before the CPU copies the rest.
// TIMEOUT: allows for a copy of 512 KiB behind a queue of guest copies. The watchdog handles hung channels of the
// mediator.
const STILL_LIMIT: Duration = Duration::from_secs(20);
/// Interval between checks for progress.
const STILL_LOOK: Duration = Duration::from_secs(1);
/// Number of bytes that the CPU copies per critical section of the card's lock if the engines have failed.
const BY_HAND: u64 = 64 << 10;

/// Maximum total size of the chunks that switch locations in one critical section, in bytes. A larger chunk switches
/// alone.
const COMMIT_BYTES: u64 = 2 << 20;
/// Number of pages copied again per critical section of the card's lock.
const AGAIN_PAGES: usize = 8;

/// A batch of copies in progress on the engines.
struct InFlight {
    batch: u64,
    chunks: Vec<Chunk>,
    /// The copies; `None` if the engines accept no copies.
    copies: Option<CopyId>,
}

impl ManagedCard {
    /// Moves chunks of `vm`. Returns when the chunks have moved or are known to stay.
    pub fn relocate(&self, vm: TenantId, steps: &[Step]) -> Relocated {
        let _one_at_a_time = self.moving.lock();
        let mut done = Relocated::default();
        // The card may have been handed over or closed while this thread waited.
        let holder = if self.over() { None } else { self.holder(vm) };
        let Some(holder) = holder else {
            done.stayed = steps.len() as u32;
            return done;
        };
        let (reserved, rebooked) = self.reserve_moves(vm, steps);
        done.rebooked = rebooked;
        self.find_pages(&reserved);
        let began = Instant::now();
        let moves = self.fill(vm, reserved);
        done.stayed = (steps.len() - moves.len()) as u32 - rebooked;
        if moves.is_empty() {
            return done;
        }
        self.lock().begin_moves(vm, &moves);
        self.carry_out_moves(&*holder, vm, &mut done);
        self.lock().memory.forget_user(vm);
        done.suspended_ns = nanoseconds(began.elapsed());
        done
    }

    /// Executes the steps of a VM's relocation until none remain.
    fn carry_out_moves(&self, holder: &dyn GuestEvents, vm: TenantId, done: &mut Relocated) {
        let (mut wanted, mut copying) = (Vec::new(), VecDeque::new());
        let (mut current, mut copies_began) = (0, None);
        loop {
            let (action, is_over) = {
                let mut state = self.lock();
                let (relocations, _) = state.memory.relocations();
                (relocations.take_action(), !relocations.has_order(vm))
            };
            match action {
                Some(Action::Quiesce { user, order, .. }) => {
                    current = order;
                    self.lock().keep_from_running(user);
                }
                Some(Action::Force { user }) => self.lock().force_off(user),
                Some(Action::Copy { batch, chunks, .. }) => wanted.push((batch, chunks)),
                Some(Action::Remap { user, order, chunks, .. }) => {
                    self.written(vm, &chunks).iter().for_each(|chunk| self.copy_again(vm, chunk));
                    let ended = self.commit(holder, vm, &chunks, done);
                    self.lock().has_remapped(user, order, &ended);
                }
                Some(Action::Ended { chunks, moved: false }) => {
                    self.lock().abort_moves(vm, &chunks);
                    done.stayed += chunks.len() as u32;
                }
                // The accounts were updated together with the mapping.
                Some(Action::Ended { moved: true, .. }) => {}
                Some(Action::Resume { user, .. } | Action::Cancelled { user, .. }) => self.lock().go_on(user),
                Some(Action::GiveUp { user, .. }) => {
                    tracing::error!(vm = %user, "memory of a VM cannot move: its channels do not leave the engines");
                    self.lock().memory.relocations().0.cancel(user);
                }
                None if !wanted.is_empty() => {
                    copies_began.get_or_insert_with(Instant::now);
                    copying.extend(self.submit_copies(std::mem::take(&mut wanted)));
                }
                None => match copying.pop_front() {
                    Some(first) => {
                        let copied = self.await_copies(&first, &mut copying);
                        if let Err(error) = &copied {
                            tracing::error!(%vm, %error, "memory of a VM cannot move");
                        }
                        done.copied_ns = copies_began.map_or(0, |began: Instant| nanoseconds(began.elapsed()));
                        self.lock().has_copied(first.batch, copied.is_ok());
                    }
                    None if is_over => return,
                    None => self.await_quiet(vm, current),
                },
            }
        }
    }

    /// Checks once whether a VM's channels have left the engines, and sleeps if they have not.
    fn await_quiet(&self, vm: TenantId, order: u32) {
        {
            let state = &mut *self.lock();
            let now = state.now_ns();
            if state.stays_on(vm).is_none() {
                // Wait until the last writes of the VM's engines to the old location have arrived.
                let arrived = state.vram().memory.barrier();
                let (relocations, chunks) = state.memory.relocations();
                if let Err(error) = arrived {
                    tracing::error!(%vm, %error, "memory of a VM cannot move");
                    return relocations.declined(now, vm, order);
                }
                return relocations.quiet(chunks, vm, order);
            }
            state.memory.relocations().0.tick(now);
        }
        locks::sleep(POLL_INTERVAL);
    }

    /// Returns the object to notify when a VM's memory moves, or `None` if the memory must stay in place.
    fn holder(&self, vm: TenantId) -> Option<Arc<dyn GuestEvents>> {
        let mut state = self.lock();
        let holder = state.vms.get(&vm).and_then(Weak::upgrade);
        if holder.is_none() {
            state.vram_mut().chunks.freeze(vm);
        }
        holder
    }

    /// Reserves the destinations, and omits chunks that cannot move. Also returns the number of steps that needed no
    /// copy. Releases the card's lock between chunks and between the parts of a scrub.
    fn reserve_moves(&self, vm: TenantId, steps: &[Step]) -> (Vec<Move>, u32) {
        let (mut moves, mut rebooked) = (Vec::new(), 0);
        for step in steps.iter().copied().filter(|step| step.vm == vm) {
            let begun = loop {
                // Both operations need the same critical section. Otherwise, another thread could scrub the last chunk
                // in between.
                let state = &mut *self.lock();
                let vram = state.vram_mut();
                match vram.chunks.start(step) {
                    Err(vram::Error::NeedsScrub { .. }) if vram.scrub_piece().unwrap_or(false) => {}
                    begun => break begun,
                }
            };
            match begun {
                Ok(Some(chunk)) => moves.push(chunk),
                // Only the accounts have changed.
                Ok(None) => rebooked += 1,
                Err(error) => tracing::debug!(%vm, chunk = step.index, %error, "a chunk cannot move"),
            }
        }
        (moves, rebooked)
    }

    /// Makes the host allocate pages for destinations in host memory. Omits chunks whose allocation fails.
    fn fill(&self, vm: TenantId, mut moves: Vec<Move>) -> Vec<Move> {
        moves.retain(|chunk| {
            let mut state = self.lock();
            let filled = if let Place::Host(at) = chunk.to { state.vram_mut().pinned.fill(at) } else { Ok(()) };
            if let Err(error) = &filled {
                tracing::warn!(%vm, %error, "a chunk stays on the card");
                state.vram_mut().chunks.abort_move(chunk.id);
            }
            filled.is_ok()
        });
        moves
    }

    /// Returns those chunks of a batch that the VM's CPUs have written since the moves began.
    fn written(&self, vm: TenantId, chunks: &[Chunk]) -> Vec<Chunk> {
        let state = self.lock();
        let is_written = |chunk: &&Chunk| {
            let dirty = state.vram().copied.get(&(vm, u64::from(chunk.index)));
            dirty.is_some_and(|dirty| !dirty.is_empty())
        };
        chunks.iter().filter(is_written).copied().collect()
    }

    /// Copies pages again if they were written after their copy, so that only a few are left for the commit. Releases
    /// the lock between parts. The number of rounds is limited, because the VM may keep writing.
    fn copy_again(&self, vm: TenantId, chunk: &Chunk) {
        let bytes = self.lock().chunk_bytes();
        for _ in 0..bytes / SMALL_PAGE / AGAIN_PAGES as u64 {
            let mut state = self.lock();
            let Some(dirty) = state.vram_mut().copied.get_mut(&(vm, u64::from(chunk.index))) else { return };
            let pages = dirty.take(AGAIN_PAGES);
            let last = pages.len() < AGAIN_PAGES;
            for page in pages {
                if let Err(error) = state.copy_by_hand(chunk, page, SMALL_PAGE) {
                    tracing::debug!(%vm, %error, "a page will be copied again later");
                    if let Some(dirty) = state.vram_mut().copied.get_mut(&(vm, u64::from(chunk.index))) {
                        dirty.mark(page, SMALL_PAGE);
                    }
                    return;
                }
            }
            if last {
                return;
            }
        }
    }

    /// Makes the host allocate the pages of destinations. This takes a long time, but does not delay any VM, because
    /// the VM still runs and the card's lock is not held. Failed allocations are retried under the lock, and errors are
    /// reported then.
    fn find_pages(&self, chunks: &[Move]) {
        let lacking: Vec<(HostAddr, Wanted)> = {
            let state = self.lock();
            let pinned = &state.vram().pinned;
            let lacking = chunks.iter().filter_map(|chunk| match chunk.to {
                Place::Host(at) => Some((at, pinned.lacks(at)?)),
                Place::Card(_) => None,
            });
            lacking.collect()
        };
        let (places, wanted): (Vec<HostAddr>, Vec<Wanted>) = lacking.into_iter().unzip();
        for (at, found) in places.into_iter().zip(allocate_parallel(&wanted)) {
            let given = found.and_then(|memory| self.lock().vram_mut().pinned.give(at, memory));
            if let Err(error) = given {
                tracing::debug!(%error, "no pages are available for a slot of host memory");
            }
        }
    }

    /// Waits until no channel of a stopped VM is on an engine, and resets engines that a channel does not leave in
    /// time. Returns false if a channel still does not leave.
    pub(super) fn vacate(&self, vm: TenantId) -> bool {
        let began = Instant::now();
        loop {
            {
                let state = &mut *self.lock();
                let Some(left) = state.stays_on(vm) else { return true };
                if began.elapsed() > LEAVE_LIMIT + RESET_LIMIT {
                    tracing::error!(%vm, ?left, "channels stay on the card");
                    return false;
                }
                if began.elapsed() > LEAVE_LIMIT {
                    state.force_off(vm);
                }
            }
            locks::sleep(POLL_INTERVAL);
        }
    }

    /// Submits batches of chunk copies to the engines.
    fn submit_copies(&self, batches: Vec<(u64, Vec<Chunk>)>) -> Vec<InFlight> {
        let mut state = self.lock();
        let bytes = state.chunk_bytes();
        let job = |chunk: &Chunk| Job { from: Source::Place(chunk.from), to: chunk.to, bytes };
        let jobs: Vec<Vec<Job>> = batches.iter().map(|(_, chunks)| chunks.iter().map(job).collect()).collect();
        let mut copies = state.submit_jobs(&jobs).unwrap_or_default().into_iter();
        batches.into_iter().map(|(batch, chunks)| InFlight { batch, chunks, copies: copies.next() }).collect()
    }

    /// Waits for a batch. If the engines fail, the CPU copies this batch and the `later` batches.
    fn await_copies(&self, first: &InFlight, later: &mut VecDeque<InFlight>) -> Result<(), ManagerError> {
        let by_engine = first.copies.ok_or_else(dead).and_then(|copies| self.await_jobs(copies));
        by_engine.or_else(|error| {
            tracing::warn!(%error, "the copy engines failed; the CPU copies chunks");
            // An engine that is still running could write to the memory after it has been assigned to a guest.
            let batches = std::iter::once(first).chain(later.iter());
            let to: Vec<Place> = batches.flat_map(|batch| &batch.chunks).map(|chunk| chunk.to).collect();
            let stopped = self.stop_copier(&to);
            // Do not wait for the engines again for the later batches.
            later.iter_mut().for_each(|batch| batch.copies = None);
            stopped?;
            let bytes = self.lock().chunk_bytes();
            first.chunks.iter().try_for_each(|chunk| {
                (0..bytes).step_by(BY_HAND as usize).try_for_each(|at| {
                    let len = BY_HAND.min(bytes - at);
                    self.lock().copy_by_hand(chunk, at, len)
                })
            })
        })
    }

    /// Removes the mediator's own channels, if any, from the card, so that they can no longer write. If they do not
    /// leave, quarantines their targets `places`.
    pub(super) fn stop_copier(&self, places: &[Place]) -> Result<(), ManagerError> {
        {
            let mut state = self.lock();
            let lanes = state.memory.copier().map(Copier::channels).unwrap_or_default();
            for channel in lanes {
                // Ignore the error for a channel that has not left yet, because the wait below covers it.
                let _ = state.retire_channel(COPIER, channel);
            }
        }
        self.wait_departed(COPIER);
        let mut state = self.lock();
        let arrived = state.vram().memory.barrier();
        if let (false, Ok(())) = (state.work.departures().any_kept(COPIER), arrived) {
            return Ok(());
        }
        places.iter().for_each(|place| state.vram_mut().chunks.quarantine(*place));
        Err(ManagerError::OwnChannelsStay)
    }

    /// Makes the engines execute the jobs that `wanted` returns, and waits until the jobs are complete.
    pub(super) fn have_done(&self, wanted: impl FnOnce(&mut CardState) -> Vec<Job>) -> Result<(), ManagerError> {
        let copies = {
            let mut state = self.lock();
            let jobs = wanted(&mut state);
            if jobs.is_empty() { Vec::new() } else { state.submit_jobs(&[jobs])? }
        };
        copies.into_iter().try_for_each(|copies| self.await_jobs(copies))
    }

    /// Waits until the engines have completed a group of jobs. Returns an error if they make no progress for too long.
    fn await_jobs(&self, copies: CopyId) -> Result<(), ManagerError> {
        let mut guard = self.lock();
        let ended = guard.memory.copier().ok_or_else(dead)?.ended();
        let mut seen = (None, Instant::now());
        loop {
            let copier = guard.memory.copier().ok_or_else(dead)?;
            if seen.0 != Some(copier.pieces()) {
                seen = (Some(copier.pieces()), Instant::now());
            }
            match copier.has_ended(copies) {
                None => return Err(dead()),
                Some(true) => return Ok(()),
                Some(false) if seen.1.elapsed() > STILL_LIMIT => return Err(dead()),
                Some(false) => {}
            }
            guard.wait_for(&ended, STILL_LOOK);
        }
    }

    /// Switches the chunks to their copies in groups, and releases the locks between groups for other threads. Returns
    /// a flag for each chunk, which is true if the move has ended because the chunk has moved or no longer exists.
    fn commit(&self, holder: &dyn GuestEvents, vm: TenantId, chunks: &[Chunk], done: &mut Relocated) -> Vec<bool> {
        let group = (COMMIT_BYTES / self.lock().chunk_bytes()).max(1) as usize;
        let mut ended = Vec::new();
        for chunks in chunks.chunks(group) {
            let mut ends = Vec::new();
            let mut commit = |state: &mut CardState| {
                let ranges = state.commit_moves(vm, chunks, &mut ends);
                done.moved += ranges.len() as u32;
                done.bytes += ranges.iter().map(|(_, bytes)| bytes).sum::<u64>();
                ranges
            };
            if let Err(error) = holder.relocated(&mut commit) {
                tracing::error!(%vm, %error, "the card may still use an old location of guest memory; that memory \
                    stays unusable until the card is reset");
            }
            ends.resize(chunks.len(), false);
            ended.extend(ends);
        }
        ended
    }
}

impl CardState {
    /// Begins moves, and starts recording writes to their chunks.
    fn begin_moves(&mut self, vm: TenantId, moves: &[Move]) {
        let now = self.now_ns();
        for chunk in moves {
            self.vram_mut().copied.insert((vm, u64::from(chunk.index)), Dirty::new(chunk.bytes));
        }
        // Never kill a VM because its memory cannot move.
        let user = User { id: vm, tenant: vm, run_limit_ns: None };
        let (relocations, chunks) = self.memory.relocations();
        for &Move { id, vm, index, from, to, bytes: _ } in moves {
            let tier = if to.card().is_some() { Tier::Card } else { Tier::Host };
            let chunk = Chunk { id: Some(id), tenant: vm, index, position: u64::from(index), from, to };
            relocations.add(user, tier, chunk, false);
        }
        relocations.submit(chunks, now);
    }

    /// Returns a stopped VM's channels that are on an engine, or `None` if none is on an engine or about to leave one.
    fn stays_on(&mut self, vm: TenantId) -> Option<Vec<VirtualChannelId>> {
        self.look_at_departures();
        let left = self.work.channels_mut().vacating(self.memory.card_mut(), vm);
        (!left.is_empty() || self.is_departing(vm)).then_some(left)
    }

    fn has_copied(&mut self, batch: u64, done: bool) {
        let now = self.now_ns();
        let (relocations, chunks) = self.memory.relocations();
        // The duration is measured over all concurrent batches, not here.
        relocations.copied(chunks, now, batch, done, 0);
    }

    /// Reports the moves of a batch that have ended: their chunks are at the destinations or no longer exist.
    fn has_remapped(&mut self, vm: TenantId, order: u32, ended: &[bool]) {
        let now = self.now_ns();
        let (relocations, chunks) = self.memory.relocations();
        let moved = |at: usize| ended.get(at).copied().unwrap_or(false);
        if relocations.remapped(chunks, now, vm, order, moved).is_err() {
            tracing::error!(%vm, "chunks were remapped twice");
        }
    }

    /// Resets the engines that execute the first remaining channel of a VM. The watchdog notifies the guest.
    fn force_off(&mut self, vm: TenantId) {
        let first = self
            .stays_on(vm)
            .unwrap_or_default()
            .first()
            .and_then(|channel| self.work.channels().physical(vm, *channel));
        first.into_iter().for_each(|physical| self.reset_engines_of(physical));
    }

    /// Submits groups of jobs to the copy engines.
    fn submit_jobs(&mut self, jobs: &[Vec<Job>]) -> Result<Vec<CopyId>, ManagerError> {
        let now = self.now_ns();
        self.revive_copier();
        let CardState { memory, work, .. } = self;
        let (vram, copier) = memory.vram_and_copier();
        copier.ok_or_else(dead)?.submit(vram, work.channels_mut(), now, jobs)
    }

    /// Stops the VM's channels, and makes them leave the engines, so that its memory can move.
    pub(super) fn keep_from_running(&mut self, vm: TenantId) {
        self.work.channels_mut().pause(self.memory.card_mut(), vm, Pause::Memory, true);
        self.work.channels_mut().vacate(self.memory.card_mut(), vm);
        self.feeder().look_at_waits(Some(vm));
    }

    /// Commits the new locations of moved chunks. Returns the chunks' ranges. Appends to `ended` a flag for each chunk,
    /// which is true if the chunk's move has ended.
    fn commit_moves(&mut self, vm: TenantId, chunks: &[Chunk], ended: &mut Vec<bool>) -> Ranges {
        let mut ranges = Vec::new();
        let bytes = self.chunk_bytes();
        self.memory.forget_left();
        for chunk in chunks {
            let dirty = self.vram_mut().copied.remove(&(vm, u64::from(chunk.index)));
            let again: Vec<u64> = dirty.iter().flat_map(Dirty::pages).collect();
            let copied = again.into_iter().try_for_each(|page| self.copy_by_hand(chunk, page, SMALL_PAGE));
            let copied = copied.and_then(|()| chunk.id.ok_or_else(dead));
            ended.push(copied.is_ok());
            match copied {
                Err(error) => tracing::error!(%vm, %error, "a chunk stays at its old location"),
                Ok(id) => {
                    if self.vram_mut().chunks.commit_move(id) == Ended::Committed {
                        self.memory.leave(chunk.from);
                        ranges.push((GuestVramAddr(u64::from(chunk.index) * bytes), bytes));
                    }
                }
            }
        }
        ranges
    }

    /// Quarantines the old locations of chunks that have just moved, because the card's TLBs may still contain them.
    pub fn quarantine_left(&mut self) {
        self.memory.quarantine_left();
    }

    fn abort_moves(&mut self, vm: TenantId, chunks: &[Chunk]) {
        for chunk in chunks {
            self.vram_mut().copied.remove(&(vm, u64::from(chunk.index)));
            chunk.id.into_iter().for_each(|id| self.vram_mut().chunks.abort_move(id));
        }
    }

    /// Binds the mediator's own channels again if they have failed and a retry is due.
    fn revive_copier(&mut self) {
        if !self.memory.vram_and_copier().1.is_some_and(Copier::is_due) {
            return;
        }
        let lanes = self.memory.copier().map(Copier::channels).unwrap_or_default();
        let ended = lanes.into_iter().try_for_each(|channel| self.end_channel(COPIER, channel));
        let CardState { memory, work, .. } = self;
        let (vram, copier) = memory.vram_and_copier();
        let Some(copier) = copier else { return };
        let channels = work.channels_mut();
        let revived = ended.map_err(ManagerError::Stuck).and_then(|()| copier.revive(vram, channels));
        match revived {
            Ok(()) => tracing::info!("retrying the copy engines for memory moves"),
            Err(error) => tracing::warn!(%error, "cannot retry the copy engines for memory moves"),
        }
    }

    /// Undoes [`Self::keep_from_running`].
    pub(super) fn go_on(&mut self, vm: TenantId) {
        self.work.channels_mut().pause(self.memory.card_mut(), vm, Pause::Memory, false);
        self.feeder().look_at_waits(Some(vm));
    }

    fn copy_by_hand(&mut self, chunk: &Chunk, at: u64, len: u64) -> Result<(), ManagerError> {
        let mut data = vec![0; len as usize];
        self.vram_mut().read_at(beyond(chunk.from, at), &mut data)?;
        self.vram_mut().write_at(beyond(chunk.to, at), &data)
    }
}

fn dead() -> ManagerError {
    CardError::Unresponsive("the copy engines do not move memory").into()
}

fn beyond(place: Place, bytes: u64) -> Place {
    match place {
        Place::Card(VramAddr(at)) => Place::Card(VramAddr(at + bytes)),
        Place::Host(HostAddr(at)) => Place::Host(HostAddr(at + bytes)),
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
