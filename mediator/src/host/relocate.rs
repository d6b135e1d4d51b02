//! Moves chunks of a VM between the card and host memory, while the VM goes on.
//!
//! 1. The destinations are reserved, and the host finds pages for those in its memory.
//! 2. The VM's channels are kept from running and leave the engines; its CPUs see nothing of that: what they ring for waits in
//!    their rings, what they write goes to where the chunks still are, and is remembered.
//! 3. The mediator's own channels copy all chunks.
//! 4. With the VM's lock and the card's: pages that were written meanwhile are copied again, the chunks change places, the
//!    shadow entries that name them are written anew, the card's TLBs forget the old ones.
//! 5. The channels go on.
//!
//! Neither lock is held while anything is waited for.

use super::copier::{COPIER, Copier, Job};
use super::registry::{HostCard, HostState};
use super::vram::Dirty;
use super::{Feeder, HostError, pages};
use channels::Pause;
use nvspec::addr::SMALL_PAGE;
use std::sync::Weak;
use std::time::{Duration, Instant};
use vram::{CardAddr, Ended, GuestAddr, HostAddr, Move, Place, Step, VmId};

/// How long a VM's work may take to leave the engines.
// TIMEOUT: twice the watchdog's own limit, which ends what hangs unless the operator has switched it off.
const LEAVE_LIMIT: Duration = Duration::from_nanos(2 * channels::HANG_LIMIT_NS);
/// Time between two looks whether it has. The card has no interrupt for that.
const LOOK: Duration = Duration::from_micros(50);
/// How long a copy may take before the engines count as dead.
// TIMEOUT: a chunk of 64 MiB at the 100 MiB/s of the slowest bus imaginable, behind a queue of guests' copies.
const COPY_LIMIT: Duration = Duration::from_secs(20);
/// Bytes that are copied by the CPU with the card's lock held, when the engines do not.
const BY_HAND: u64 = 64 << 10;

/// What has become of a VM's memory that was to move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Relocated {
    /// Chunks that lie elsewhere now.
    pub moved: u32,
    /// Chunks that stay where they were.
    pub stayed: u32,
    /// Bytes that were copied.
    pub bytes: u64,
    /// How long the VM's channels did not run, in ns.
    pub suspended_ns: u64,
    /// How long the copies took, in ns.
    pub copied_ns: u64,
}

/// Ranges of guest VRAM that lie elsewhere than before.
pub type Ranges = Vec<(GuestAddr, u64)>;

impl HostCard {
    /// Moves chunks of `vm`. Returns when they have moved, or stay.
    pub fn relocate(&self, vm: VmId, steps: &[Step]) -> Relocated {
        let _one_at_a_time = self.moving.lock();
        let mut done = Relocated::default();
        let reserved = self.lock().reserve_moves(vm, steps);
        self.find_pages(&reserved);
        let began = Instant::now();
        let moves = self.lock().begin_moves(vm, reserved);
        done.stayed = (steps.len() - moves.len()) as u32;
        if moves.is_empty() {
            return done;
        }
        let copied = if self.vacate(vm) {
            let copying = Instant::now();
            let copied = self.copy(&moves);
            done.copied_ns = nanoseconds(copying.elapsed());
            copied
        } else {
            Err(HostError::Unresponsive("a VM's channels do not leave its engines"))
        };
        match copied {
            Ok(()) => self.commit(vm, &moves, &mut done),
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

    /// Has the host find pages for where chunks go, which takes it long and nobody waits for: the VM still works, and the
    /// card's lock is free. What fails here is tried again with the lock held, and fails there.
    fn find_pages(&self, chunks: &[Move]) {
        let lacking: Vec<(HostAddr, usize)> = {
            let pinned = &self.lock().vram.pinned;
            let lacking = chunks.iter().filter_map(|chunk| match chunk.to {
                Place::Host(at) => Some((at, pinned.lacks(at)?)),
                Place::Card(_) => None,
            });
            lacking.collect()
        };
        let sizes: Vec<usize> = lacking.iter().map(|(_, bytes)| *bytes).collect();
        for ((at, _), found) in lacking.into_iter().zip(pages::found_beside(&sizes)) {
            let given = found.and_then(|memory| self.lock().vram.pinned.give(at, memory));
            if let Err(error) = given {
                tracing::debug!(%error, "no pages for a slot of host memory");
            }
        }
    }

    /// Waits until nothing of a VM that is kept from running is on an engine.
    fn vacate(&self, vm: VmId) -> bool {
        let began = Instant::now();
        loop {
            let left = {
                let state = &mut *self.lock();
                state.channels.vacating(&mut state.vram.memory, channels::VmId(vm.0))
            };
            let Some(first) = left.first().copied() else { return true };
            if began.elapsed() < LEAVE_LIMIT {
                std::thread::sleep(LOOK);
                continue;
            }
            // Its guest is told by the watchdog, if by anyone; here only the engine is needed.
            if let Err(error) = self.lock().clear_engines(vm, first) {
                tracing::error!(%vm, channel = ?first, %error, "a channel stays on the card");
                return false;
            }
        }
    }

    /// Copies the chunks, by the engines or, where those fail, by hand.
    fn copy(&self, moves: &[Move]) -> Result<(), HostError> {
        let by_engine = self.copy_by_engine(moves);
        by_engine.or_else(|error| {
            tracing::warn!(%error, "chunks are copied by the CPU");
            // An engine that is at work still would write to what is a guest's by then.
            self.lock().stop_copier()?;
            moves.iter().try_for_each(|chunk| {
                (0..chunk.bytes).step_by(BY_HAND as usize).try_for_each(|at| {
                    let len = BY_HAND.min(chunk.bytes - at);
                    self.lock().copy_by_hand(chunk, at, len)
                })
            })
        })
    }

    fn copy_by_engine(&self, moves: &[Move]) -> Result<(), HostError> {
        let jobs = moves.iter().map(|chunk| Job { from: chunk.from, to: chunk.to, bytes: chunk.bytes });
        let jobs: Vec<_> = jobs.collect();
        let mut guard = self.lock();
        let dead = || HostError::Unresponsive("the copy engines do not move memory");
        let now = guard.now_ns();
        let HostState { vram, channels, copier, .. } = &mut *guard;
        let copier = copier.as_mut().ok_or_else(dead)?;
        let ended = copier.ended();
        let copies = copier.submit(vram, channels, now, &jobs)?;
        let began = Instant::now();
        loop {
            let copier = guard.copier.as_mut().ok_or_else(dead)?;
            let states: Option<Vec<bool>> = copies.iter().map(|copy| copier.has_ended(*copy)).collect();
            match states {
                None => return Err(dead()),
                Some(states) if states.iter().all(|ended| *ended) => return Ok(()),
                Some(_) if began.elapsed() > COPY_LIMIT => {
                    copier.breaks();
                    return Err(dead());
                }
                Some(_) => {}
            }
            ended.wait_for(&mut guard, COPY_LIMIT);
        }
    }

    /// The copies stand for the chunks from now on.
    fn commit(&self, vm: VmId, moves: &[Move], done: &mut Relocated) {
        let target = self.lock().vms.get(&vm).and_then(Weak::upgrade);
        let Some(target) = target else {
            self.lock().abort_moves(vm, moves);
            done.stayed += moves.len() as u32;
            return;
        };
        let mut commit = |state: &mut HostState| {
            let ranges = state.commit_moves(vm, moves);
            (done.moved, done.bytes) = (ranges.len() as u32, ranges.iter().map(|(_, bytes)| bytes).sum());
            done.stayed += moves.len() as u32 - done.moved;
            ranges
        };
        if let Err(error) = target.relocated(&mut commit) {
            tracing::error!(%vm, %error, "the card may use guest memory where it does not lie any more");
        }
    }

    /// Scrubs what nobody has, as the thread that moves memory does after each relocation.
    pub fn scrub(&self) {
        while self.lock().vram.scrub_piece().unwrap_or(false) {}
    }
}

impl HostState {
    /// Reserves the destinations. Chunks that cannot move are left out.
    fn reserve_moves(&mut self, vm: VmId, steps: &[Step]) -> Vec<Move> {
        let mut moves = Vec::new();
        for step in steps.iter().copied().filter(|step| step.vm == vm) {
            let begun = loop {
                match self.vram.chunks.start(step) {
                    Err(vram::Error::NeedsScrub { .. }) if self.vram.scrub_one().unwrap_or(false) => {}
                    begun => break begun,
                }
            };
            match begun {
                Ok(Some(chunk)) => moves.push(chunk),
                // Only the accounts changed.
                Ok(None) => {}
                Err(error) => tracing::debug!(%vm, chunk = step.index, %error, "a chunk does not move"),
            }
        }
        moves
    }

    /// Keeps the VM's channels from running, and has them leave the engines. Chunks whose destination has no memory are left
    /// out.
    fn begin_moves(&mut self, vm: VmId, mut moves: Vec<Move>) -> Vec<Move> {
        moves.retain(|chunk| {
            let filled = if let Place::Host(at) = chunk.to { self.vram.pinned.fill(at) } else { Ok(()) };
            if let Err(error) = &filled {
                tracing::warn!(%vm, %error, "a chunk stays on the card");
                self.vram.chunks.abort_move(chunk.id);
            }
            filled.is_ok()
        });
        for chunk in &moves {
            self.vram.copied.insert((vm, u64::from(chunk.index)), Dirty::new(chunk.bytes));
        }
        if !moves.is_empty() {
            let id = channels::VmId(vm.0);
            self.channels.pause(&mut self.vram.memory, id, Pause::Memory, true);
            self.channels.vacate(&mut self.vram.memory, id);
            self.look_at_waits(Some(vm));
        }
        moves
    }

    /// Chunks that have moved are where they have moved to; returns which they are.
    fn commit_moves(&mut self, vm: VmId, moves: &[Move]) -> Ranges {
        let mut ranges = Vec::new();
        for chunk in moves {
            let dirty = self.vram.copied.remove(&(vm, u64::from(chunk.index)));
            let again: Vec<u64> = dirty.iter().flat_map(Dirty::pages).collect();
            let copied = again.into_iter().try_for_each(|page| self.copy_by_hand(chunk, page, SMALL_PAGE));
            if let Err(error) = copied {
                tracing::error!(%vm, %error, "a chunk stays where it is");
                self.vram.chunks.abort_move(chunk.id);
                continue;
            }
            if self.vram.chunks.commit_move(chunk.id) == Ended::Committed {
                ranges.push((GuestAddr(u64::from(chunk.index) * chunk.bytes), chunk.bytes));
            }
        }
        ranges
    }

    fn abort_moves(&mut self, vm: VmId, moves: &[Move]) {
        for chunk in moves {
            self.vram.copied.remove(&(vm, u64::from(chunk.index)));
            self.vram.chunks.abort_move(chunk.id);
        }
    }

    /// Takes the mediator's own channels off the card, if it has any: nothing that they were asked to copy is written later.
    fn stop_copier(&mut self) -> Result<(), HostError> {
        let lanes = self.copier.as_ref().map(Copier::channels).unwrap_or_default();
        let stopped = lanes.into_iter().try_for_each(|channel| self.retire_channel(VmId(COPIER.0), channel));
        stopped.map_err(|stuck| HostError::Refused(stuck.to_string()))
    }

    fn go_on(&mut self, vm: VmId) {
        self.channels.pause(&mut self.vram.memory, channels::VmId(vm.0), Pause::Memory, false);
        self.look_at_waits(Some(vm));
    }

    fn copy_by_hand(&mut self, chunk: &Move, at: u64, len: u64) -> Result<(), HostError> {
        let mut data = vec![0; len as usize];
        self.vram.read_at(beyond(chunk.from, at), &mut data)?;
        self.vram.write_at(beyond(chunk.to, at), &data)
    }
}

fn beyond(place: Place, bytes: u64) -> Place {
    match place {
        Place::Card(CardAddr(at)) => Place::Card(CardAddr(at + bytes)),
        Place::Host(HostAddr(at)) => Place::Host(HostAddr(at + bytes)),
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
