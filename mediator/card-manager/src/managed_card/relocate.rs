//! Moves chunks of a VM between the card and host memory, while the VM continues.
//!
//! 1. The destinations are reserved, and the host allocates pages for destinations in host memory.
//! 2. The VM's channels are stopped and leave the engines. Its CPUs do not notice: work of their doorbells waits in the
//!    rings; their writes go to the old location of the chunks, and are recorded.
//! 3. The mediator's own channels copy all chunks.
//! 4. Under the VM's lock and the card's lock, pages that were written meanwhile are copied again, the chunks change
//!    places, the shadow entries that name them are rewritten, and the card's TLBs are flushed.
//! 5. The channels resume.
//!
//! Neither lock is held while waiting.

use super::{CardState, GuestEvents, ManagedCard};
use crate::ManagerError;
use bringup::CardError;
use card_memory::{COPIER, Copier, Dirty, Job, Ranges, Relocated, Source, Wanted, allocate_parallel};
use channels::Pause;
use nvspec::addr::SMALL_PAGE;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use vram::{Ended, GuestVramAddr, HostAddr, Move, Place, Step, TenantId, VramAddr};

/// Time limit for a VM's work to leave the engines.
// TIMEOUT: twice the limit of the watchdog, which ends hung work unless the operator has switched it off.
const LEAVE_LIMIT: Duration = Duration::from_nanos(2 * channels::HANG_LIMIT_NS);
/// Additional time limit after the VM's engines were reset.
// TIMEOUT: an engine has no work after a reset. Only the mover waits for this limit.
const RESET_LIMIT: Duration = Duration::from_secs(1);
/// Poll interval for channels to leave their engines. The card has no interrupt for this.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Time limit for the engines to make progress before the CPU copies the rest.
// TIMEOUT: covers a part of 512 KiB after a queue of guests' copies. The watchdog handles hung channels of the
// mediator.
const STILL_LIMIT: Duration = Duration::from_secs(20);
/// Interval at which the progress is checked.
const STILL_LOOK: Duration = Duration::from_secs(1);
/// Number of bytes that the CPU copies under one hold of the card's lock, if the engines fail.
const BY_HAND: u64 = 64 << 10;

/// Total size of the chunks that change places under one hold of the locks, in bytes, unless one chunk is larger.
const COMMIT_BYTES: u64 = 2 << 20;
/// Number of pages that are copied again under one hold of the card's lock.
const AGAIN_PAGES: usize = 8;

impl ManagedCard {
    /// Moves chunks of `vm`. Returns when the chunks have moved, or are known to stay.
    pub fn relocate(&self, vm: TenantId, steps: &[Step]) -> Relocated {
        let _one_at_a_time = self.moving.lock();
        let mut done = Relocated::default();
        if self.over() {
            // The card was given away or closed while this thread waited.
            done.stayed = steps.len() as u32;
            return done;
        }
        let Some(holder) = self.holder(vm) else {
            done.stayed = steps.len() as u32;
            return done;
        };
        let (reserved, rebooked) = self.reserve_moves(vm, steps);
        done.rebooked = rebooked;
        self.find_pages(&reserved);
        let began = Instant::now();
        let moves = self.begin_moves(vm, reserved);
        done.stayed = (steps.len() - moves.len()) as u32 - rebooked;
        if moves.is_empty() {
            return done;
        }
        let copied = if self.vacate(vm) {
            let copying = Instant::now();
            // Wait for the last writes of the VM's engines to the old location.
            let arrived = self.lock().vram().memory.barrier().map_err(ManagerError::from);
            let copied = arrived.and_then(|()| self.copy(&moves));
            done.copied_ns = nanoseconds(copying.elapsed());
            copied
        } else {
            Err(CardError::Unresponsive("a VM's channels do not leave its engines").into())
        };
        match copied {
            Ok(()) => {
                moves.iter().for_each(|chunk| self.copy_again(vm, chunk));
                // Other threads need the card's lock between two commits.
                let chunks = moves.first().map_or(1, |chunk| (COMMIT_BYTES / chunk.bytes).max(1)) as usize;
                moves.chunks(chunks).for_each(|moves| self.commit(&*holder, vm, moves, &mut done));
            }
            Err(error) => {
                tracing::error!(%vm, %error, "memory of a VM stays where it is");
                self.lock().abort_moves(vm, &moves);
                done.stayed += moves.len() as u32;
            }
        }
        self.lock().go_on(vm);
        done.suspended_ns = nanoseconds(began.elapsed());
        done
    }

    /// Returns the object to notify of moves of a VM's memory. Without such an object, the VM's memory is frozen.
    fn holder(&self, vm: TenantId) -> Option<Arc<dyn GuestEvents>> {
        let mut state = self.lock();
        let holder = state.vms.get(&vm).and_then(Weak::upgrade);
        if holder.is_none() {
            state.vram_mut().chunks.freeze(vm);
        }
        holder
    }

    /// Reserves the destinations. Chunks that cannot move are omitted. Also returns the number of steps that needed no
    /// copy. The card's lock is released between two chunks, and between the parts of a scrub.
    fn reserve_moves(&self, vm: TenantId, steps: &[Step]) -> (Vec<Move>, u32) {
        let (mut moves, mut rebooked) = (Vec::new(), 0);
        for step in steps.iter().copied().filter(|step| step.vm == vm) {
            let begun = loop {
                // Both steps happen under one lock: otherwise another thread could scrub the last chunk in between.
                let state = &mut *self.lock();
                let vram = state.vram_mut();
                match vram.chunks.start(step) {
                    Err(vram::Error::NeedsScrub { .. }) if vram.scrub_piece().unwrap_or(false) => {}
                    begun => break begun,
                }
            };
            match begun {
                Ok(Some(chunk)) => moves.push(chunk),
                // Only the accounts changed.
                Ok(None) => rebooked += 1,
                Err(error) => tracing::debug!(%vm, chunk = step.index, %error, "a chunk does not move"),
            }
        }
        (moves, rebooked)
    }

    /// Stops the VM's channels, and makes them leave the engines. Chunks whose destination has no memory are omitted.
    fn begin_moves(&self, vm: TenantId, mut moves: Vec<Move>) -> Vec<Move> {
        moves.retain(|chunk| {
            let mut state = self.lock();
            let filled = if let Place::Host(at) = chunk.to { state.vram_mut().pinned.fill(at) } else { Ok(()) };
            if let Err(error) = &filled {
                tracing::warn!(%vm, %error, "a chunk stays on the card");
                state.vram_mut().chunks.abort_move(chunk.id);
            }
            filled.is_ok()
        });
        if !moves.is_empty() {
            self.lock().set_moving(vm, &moves);
        }
        moves
    }

    /// Copies pages again that were written since their copy, in parts with the lock released in between, so that few
    /// pages are left for the commit. The number of rounds is limited, because the VM may continue to write.
    fn copy_again(&self, vm: TenantId, chunk: &Move) {
        for _ in 0..chunk.bytes / SMALL_PAGE / AGAIN_PAGES as u64 {
            let mut state = self.lock();
            let Some(dirty) = state.vram_mut().copied.get_mut(&(vm, u64::from(chunk.index))) else { return };
            let pages = dirty.take(AGAIN_PAGES);
            let last = pages.len() < AGAIN_PAGES;
            for page in pages {
                if let Err(error) = state.copy_by_hand(chunk, page, SMALL_PAGE) {
                    tracing::debug!(%vm, %error, "a page is copied again later");
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

    /// Makes the host allocate the pages of destinations, which takes long but delays no VM: the VM still works, and
    /// the card's lock is free. A failed allocation is tried again under the lock, and reported then.
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
                tracing::debug!(%error, "no pages for a slot of host memory");
            }
        }
    }

    /// Waits until no channel of a stopped VM is on an engine.
    pub(super) fn vacate(&self, vm: TenantId) -> bool {
        let began = Instant::now();
        loop {
            {
                let state = &mut *self.lock();
                state.look_at_departures();
                let left = state.work.channels_mut().vacating(state.memory.card_mut(), vm);
                if left.is_empty() && !state.is_departing(vm) {
                    return true;
                }
                if began.elapsed() > LEAVE_LIMIT + RESET_LIMIT {
                    tracing::error!(%vm, ?left, "channels stay on the card");
                    return false;
                }
                if began.elapsed() > LEAVE_LIMIT {
                    // The watchdog may notify the VM's guest; this code needs only the engine.
                    let first = left.first().and_then(|channel| state.work.channels().physical(vm, *channel));
                    first.into_iter().for_each(|physical| state.reset_engines_of(physical));
                }
            }
            locks::sleep(POLL_INTERVAL);
        }
    }

    /// Copies the chunks with the engines or, if the engines fail, with the CPU.
    fn copy(&self, moves: &[Move]) -> Result<(), ManagerError> {
        let by_engine = self.copy_by_engine(moves);
        by_engine.or_else(|error| {
            tracing::warn!(%error, "chunks are copied by the CPU");
            // An engine that still works would later write to memory that may belong to a guest by then.
            let to: Vec<Place> = moves.iter().map(|chunk| chunk.to).collect();
            self.stop_copier(&to)?;
            moves.iter().try_for_each(|chunk| {
                (0..chunk.bytes).step_by(BY_HAND as usize).try_for_each(|at| {
                    let len = BY_HAND.min(chunk.bytes - at);
                    self.lock().copy_by_hand(chunk, at, len)
                })
            })
        })
    }

    /// Takes the mediator's own channels off the card, if they exist, so that they write nothing later. If they do not
    /// leave, their targets `places` stay out of use.
    pub(super) fn stop_copier(&self, places: &[Place]) -> Result<(), ManagerError> {
        {
            let mut state = self.lock();
            let lanes = state.memory.copier().map(Copier::channels).unwrap_or_default();
            for channel in lanes {
                // The code below waits for the channels that have not left yet.
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

    fn copy_by_engine(&self, moves: &[Move]) -> Result<(), ManagerError> {
        let job = |chunk: &Move| Job { from: Source::Place(chunk.from), to: chunk.to, bytes: chunk.bytes };
        self.have_done(|_| moves.iter().map(job).collect())
    }

    /// Makes the engines do the jobs that `wanted` returns, and waits until they are complete.
    pub(super) fn have_done(&self, wanted: impl FnOnce(&mut CardState) -> Vec<Job>) -> Result<(), ManagerError> {
        let mut guard = self.lock();
        let jobs = wanted(&mut guard);
        if jobs.is_empty() {
            return Ok(());
        }
        let dead = || ManagerError::from(CardError::Unresponsive("the copy engines do not move memory"));
        let now = guard.now_ns();
        guard.revive_copier();
        let CardState { memory, work, .. } = &mut *guard;
        let (vram, copier) = memory.vram_and_copier();
        let copier = copier.ok_or_else(dead)?;
        let ended = copier.ended();
        let copies = copier.submit(vram, work.channels_mut(), now, &jobs)?;
        let mut seen = (copier.pieces(), Instant::now());
        loop {
            let (_, copier) = guard.memory.vram_and_copier();
            let copier = copier.ok_or_else(dead)?;
            let states: Option<Vec<bool>> = copies.iter().map(|copy| copier.has_ended(*copy)).collect();
            if copier.pieces() != seen.0 {
                seen = (copier.pieces(), Instant::now());
            }
            match states {
                None => return Err(dead()),
                Some(states) if states.iter().all(|ended| *ended) => return Ok(()),
                Some(_) if seen.1.elapsed() > STILL_LIMIT => return Err(dead()),
                Some(_) => {}
            }
            guard.wait_for(&ended, STILL_LOOK);
        }
    }

    /// Switches the chunks to their copies.
    fn commit(&self, holder: &dyn GuestEvents, vm: TenantId, moves: &[Move], done: &mut Relocated) {
        let mut commit = |state: &mut CardState| {
            let ranges = state.commit_moves(vm, moves);
            let moved = ranges.len() as u32;
            done.moved += moved;
            done.bytes += ranges.iter().map(|(_, bytes)| bytes).sum::<u64>();
            done.stayed += moves.len() as u32 - moved;
            ranges
        };
        if let Err(error) = holder.relocated(&mut commit) {
            tracing::error!(%vm, %error, "the card may use guest memory where it does not lie any more; what lay there \
                stays out of use until the card is reset");
        }
    }
}

impl CardState {
    /// Stops the VM's channels, makes them leave the engines, and starts to record writes to the chunks.
    fn set_moving(&mut self, vm: TenantId, moves: &[Move]) {
        for chunk in moves {
            self.vram_mut().copied.insert((vm, u64::from(chunk.index)), Dirty::new(chunk.bytes));
        }
        self.keep_from_running(vm);
    }

    /// Stops the VM's channels, and makes them leave the engines, so that its memory can move.
    pub(super) fn keep_from_running(&mut self, vm: TenantId) {
        self.work.channels_mut().pause(self.memory.card_mut(), vm, Pause::Memory, true);
        self.work.channels_mut().vacate(self.memory.card_mut(), vm);
        self.feeder().look_at_waits(Some(vm));
    }

    /// Commits the new places of moved chunks. Returns their ranges.
    fn commit_moves(&mut self, vm: TenantId, moves: &[Move]) -> Ranges {
        let mut ranges = Vec::new();
        self.memory.forget_left();
        for chunk in moves {
            let dirty = self.vram_mut().copied.remove(&(vm, u64::from(chunk.index)));
            let again: Vec<u64> = dirty.iter().flat_map(Dirty::pages).collect();
            let copied = again.into_iter().try_for_each(|page| self.copy_by_hand(chunk, page, SMALL_PAGE));
            if let Err(error) = copied {
                tracing::error!(%vm, %error, "a chunk stays where it is");
                self.vram_mut().chunks.abort_move(chunk.id);
                continue;
            }
            if self.vram_mut().chunks.commit_move(chunk.id) == Ended::Committed {
                self.memory.leave(chunk.from);
                ranges.push((GuestVramAddr(u64::from(chunk.index) * chunk.bytes), chunk.bytes));
            }
        }
        ranges
    }

    /// Quarantines the old places of chunks that have just moved, because the card's TLBs may still have translations
    /// to these places.
    pub fn quarantine_left(&mut self) {
        self.memory.quarantine_left();
    }

    fn abort_moves(&mut self, vm: TenantId, moves: &[Move]) {
        for chunk in moves {
            self.vram_mut().copied.remove(&(vm, u64::from(chunk.index)));
            self.vram_mut().chunks.abort_move(chunk.id);
        }
    }

    /// Binds the mediator's own channels again, if they have failed and a retry is due.
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
            Ok(()) => tracing::info!("the copy engines are tried again for memory that moves"),
            Err(error) => tracing::warn!(%error, "the copy engines cannot be tried again for memory that moves"),
        }
    }

    /// Undoes [`Self::keep_from_running`].
    pub(super) fn go_on(&mut self, vm: TenantId) {
        self.work.channels_mut().pause(self.memory.card_mut(), vm, Pause::Memory, false);
        self.feeder().look_at_waits(Some(vm));
    }

    fn copy_by_hand(&mut self, chunk: &Move, at: u64, len: u64) -> Result<(), ManagerError> {
        let mut data = vec![0; len as usize];
        self.vram_mut().read_at(beyond(chunk.from, at), &mut data)?;
        self.vram_mut().write_at(beyond(chunk.to, at), &data)
    }
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
