//! Moves one VM to another card of the same host while other VMs continue.
//!
//! While the guest still runs, the VM's memory is evicted to host memory ([`ManagedCard::empty`]). The other card
//! borrows this memory, and the rest is copied to it ([`ManagedCard::copy_ahead`]). Then the VM is suspended
//! ([`ManagedCard::suspend`]): its channels leave the engines, and their state on this card is copied
//! ([`Halted::depart`]). Memory that was not borrowed, and that differs on the target, is also copied
//! ([`Suspended::copy_memory`]). The other card, on which the VM has already been created and
//! [held](CardState::hold_still), receives the channels ([`CardState::arrive`]) and resumes the VM. Until then, this
//! card's state does not change. If a step fails, the guard is dropped, and the VM continues on this card. Finally, the
//! other card copies the borrowed memory ([`ManagedCard::copy_borrowed_memory`]).

use super::{CardState, ManagedCard};
use crate::ManagerError;
use crate::work::card_view::CardView;
use crate::work::descheduled::Why;
use crate::work::needs::Needs;
use crate::work::schedule::{Stage, TrackedSubmission};
use card::DmaMemory;
use channels::{Arrived, MoveError, Moving, Pause, SavedMoving};
use locks::rank;
use nvspec::addr::VramAddr;
use nvspec::fifo::VirtualChannelId;
use saved_state::Invalid;
use sched::{Channel, Engine, Event, Ticket};
use std::collections::BTreeSet;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;
use vram::{GuestVramAddr, HostAddr, Lookup, Place, Step, TenantId, Tier, To};

/// Number of bytes evicted to host memory at a time. The guest's work is stopped during the copy.
const BATCH_BYTES: u64 = 8 << 20;
/// Maximum number of passes over the VM's chunks, to find those that have returned to the card or are new on it.
const MAX_CHECK_ROUNDS: u32 = 3;
/// Maximum number of bytes written per critical section of a card's lock.
const BYTES_PER_LOCK_HOLD: u64 = 256 << 10;
/// Number of bytes compared at a time, and copied if they differ. The buffers for both sides fit into a CPU cache.
const COMPARED: u64 = 64 << 10;
/// Maximum number of threads that copy a VM's memory.
const THREADS: usize = 4;
/// Maximum number of strikes that move with a VM. It exceeds the number needed for any quarantine.
const STRIKES_MAX: u32 = 1024;

/// A VM's channels and strikes, which move together with its own state and memory.
#[derive(Debug)]
pub struct Departing {
    channels: Moving,
    /// Number of submissions that exceeded their time limit.
    strikes: u32,
}

impl Departing {
    /// Saves the channels and the strikes.
    ///
    /// # Errors
    /// Returns an error if the channels are invalid.
    pub fn save(&self) -> Result<(SavedMoving, u32), ManagerError> {
        let Self { channels, strikes } = self;
        Ok((channels.save()?, *strikes))
    }

    /// Raises the number of strikes to at least that of the replaced VM.
    #[must_use]
    pub fn struck(self, strikes: u32) -> Self {
        Self { strikes: self.strikes.max(strikes), ..self }
    }

    /// Subtracts the receiving VM's own strikes.
    #[must_use]
    pub fn beyond(self, strikes: u32) -> Self {
        Self { strikes: self.strikes.saturating_sub(strikes), ..self }
    }

    /// Restores the channels and the strikes.
    ///
    /// # Errors
    /// Returns an error if the channels are invalid.
    pub fn restored(channels: SavedMoving, strikes: u32) -> Result<Self, ManagerError> {
        Invalid::unless(strikes <= STRIKES_MAX, || format!("{strikes} strikes exceed the maximum of a VM"))?;
        Ok(Self { channels: channels.restored()?, strikes })
    }
}

/// A VM whose work is stopped until this value is dropped.
#[must_use = "the VM continues when this is dropped"]
pub struct Halted {
    host: Arc<ManagedCard>,
    vm: TenantId,
    /// Set if the VM must not resume.
    stays: bool,
}

/// A VM whose work is stopped, and whose memory does not move, until this value is dropped.
#[must_use = "the VM continues when this is dropped"]
pub struct Suspended<'a> {
    // The fields are dropped in order, so the VM resumes before its memory may move again.
    halted: Halted,
    _no_moves: locks::Guard<'a, rank::Moving, ()>,
}

impl Suspended<'_> {
    /// Lets the card's memory move again, except the memory of the VM that has moved to another card. The other card
    /// may have borrowed that memory. The VM's work stays stopped.
    pub fn gone(self) -> Halted {
        let Self { halted, _no_moves } = self;
        halted.host.lock().vram_mut().chunks.freeze(halted.vm);
        halted
    }
}

impl std::ops::Deref for Suspended<'_> {
    type Target = Halted;

    fn deref(&self) -> &Halted {
        &self.halted
    }
}

impl ManagedCard {
    /// Moves a VM's memory from the card to host memory while the VM works, as long as slots are free. The memory does
    /// not return to the card before [`Self::stays`] is called. Returns the number of bytes evicted.
    pub fn empty(&self, vm: TenantId) -> u64 {
        self.lock().memory.set_migrating(vm, true);
        let mut left = 0;
        for _ in 0..MAX_CHECK_ROUNDS {
            let (on_card, chunk) = {
                let state = self.lock();
                let bytes = state.vram().chunks.vm_bytes(vm).unwrap_or(0);
                (state.memory().movable(vm, GuestVramAddr(0), bytes, true), state.vram().chunks.chunk_bytes())
            };
            let before = left;
            for batch in on_card.chunks((BATCH_BYTES / chunk).max(1) as usize) {
                let steps: Vec<Step> = batch.iter().map(|index| Step { vm, index: *index, to: To::Host }).collect();
                let done = self.relocate_counted(vm, &steps);
                left += done.bytes;
                if !done.has_effect() {
                    return left;
                }
            }
            if left == before {
                break;
            }
        }
        left
    }

    /// Makes VM `its` of card `to` borrow or copy a VM's memory while the VM works. `its` must have no memory yet. The
    /// copy may miss concurrent writes ([`Suspended::copy_memory`]). Returns the number of bytes that are copied,
    /// either now or when the memory is returned.
    ///
    /// # Errors
    /// Returns an error if the other card has too little memory, or if one of the cards does not respond.
    pub fn copy_ahead(&self, vm: TenantId, to: &ManagedCard, its: TenantId) -> Result<u64, ManagerError> {
        let (chunks, bytes) = {
            let state = self.lock();
            (state.chunks_of(vm), state.chunk_bytes())
        };
        let rest = self.lend(vm, &chunks, to, its)?;
        let lent = (chunks.len() - rest.len()) as u64 * bytes;
        Ok(lent + self.carry(vm, rest, to, its, &Known::Zeros)?)
    }

    /// Permits a VM's memory to return to the card, because the VM stays on this card.
    pub fn stays(&self, vm: TenantId) {
        self.lock().memory.set_migrating(vm, false);
        self.look_again();
    }

    /// Makes a VM's work leave the engines. A channel that has not left within `limit` is killed as hung, and its guest
    /// is notified. The caller must not hold a lock.
    ///
    /// # Errors
    /// Returns an error if a channel still does not leave the card. In this case, the VM continues.
    pub fn suspend(self: &Arc<Self>, vm: TenantId, limit: Duration) -> Result<Suspended<'_>, ManagerError> {
        let no_moves = self.moving.lock();
        Ok(Suspended { halted: self.halt(vm, limit)?, _no_moves: no_moves })
    }

    /// Same as [`Self::suspend`], but other VMs' memory may still move, as may the VM's own memory at an operator's
    /// request.
    ///
    /// # Errors
    /// Returns the same errors as [`Self::suspend`].
    pub fn halt(self: &Arc<Self>, vm: TenantId, limit: Duration) -> Result<Halted, ManagerError> {
        let halted = Halted { host: Arc::clone(self), vm, stays: false };
        if let Some(why) = self.failure() {
            return Err(ManagerError::Failed { why: why.to_owned() });
        }
        self.lock().hold_still(vm, true);
        self.await_rest(limit, |state| state.stays_of(vm))?;
        if self.lock().work.departures().any_kept(vm) {
            return Err(ManagerError::NotStill);
        }
        Ok(halted)
    }
}

impl Halted {
    /// Notifies the card's VMs of completed work. No more work of this VM completes afterwards.
    pub fn notify_ended_work(&self) {
        self.host.tell_ended();
    }

    /// Copies the state of the VM's channels on this card without changing it.
    ///
    /// # Errors
    /// Returns [`ManagerError::Unsettled`] while a channel is leaving the card, [`ManagerError::Stays`] if the VM has
    /// created a segment, or an error if the card does not respond.
    pub fn depart(&self) -> Result<Departing, ManagerError> {
        let (host, vm) = (&self.host, self.vm);
        let state = &mut *host.lock();
        if state.memory.segments_of(vm) {
            return Err(ManagerError::Stays("it has created a segment that may be shared with other address spaces"));
        }
        // Wait until the last writes of the VM's engines have arrived.
        state.vram().memory.barrier()?;
        let strikes = state.scheduler().strikes(vm).map_or(0, |(strikes, _)| strikes);
        let CardState { memory, work, .. } = state;
        let channels = work.channels().moving(memory.card_mut(), vm);
        let channels = channels.ok_or(ManagerError::Unsettled("a channel is leaving the card"))?;
        Ok(Departing { channels, strikes })
    }

    /// Returns the VM's number of strikes.
    #[must_use]
    pub fn strikes(&self) -> u32 {
        self.host.lock().scheduler().strikes(self.vm).map_or(0, |(strikes, _)| strikes)
    }

    /// Returns the size of a chunk in bytes.
    #[must_use]
    pub fn chunk_bytes(&self) -> u64 {
        self.host.lock().chunk_bytes()
    }

    /// Returns the start addresses of the VM's placed chunks.
    #[must_use]
    pub fn chunks(&self) -> Vec<GuestVramAddr> {
        self.host.lock().chunks_of(self.vm)
    }

    /// Reads `data` from a range within one chunk of the VM's memory. Returns `false` if the chunk is unplaced.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    pub fn read(&self, at: GuestVramAddr, data: &mut [u8]) -> Result<bool, ManagerError> {
        let state = &mut *self.host.lock();
        let Some(from) = state.place_of(self.vm, at) else { return Ok(false) };
        state.vram_mut().read_at(from, data)?;
        Ok(true)
    }

    /// Prevents the VM's work from resuming on this card.
    pub fn stays(mut self) {
        self.stays = true;
    }
}

impl Suspended<'_> {
    /// Copies the VM's memory to VM `its` of card `to`, except parts that are equal on both cards. Returns the number
    /// of bytes copied.
    ///
    /// # Errors
    /// Returns an error if the other card has too little memory, or if one of the cards does not respond.
    pub fn copy_memory(&self, to: &ManagedCard, its: TenantId) -> Result<u64, ManagerError> {
        let chunks = self.chunks();
        let same = self.host.part(self.vm, &chunks, to, its)?;
        let others = chunks.iter().copied().filter(|at| !same.contains(&at.0)).collect();
        let copied = self.host.carry(self.vm, others, to, its, &Known::Something)?;
        self.host.take_back(chunks, to, its)?;
        Ok(copied)
    }
}

impl Drop for Halted {
    fn drop(&mut self) {
        if !self.stays && self.host.failure().is_none() {
            self.host.lock().hold_still(self.vm, false);
        }
    }
}

/// Known contents of the target memory.
enum Known {
    Zeros,
    Something,
}

/// One end of a copy, in host-visible memory or card memory.
enum End {
    Memory(DmaMemory, usize),
    Card(Place),
}

impl End {
    fn from_place(state: &CardState, place: Place) -> Self {
        let memory = match place {
            Place::Host(at) => state.vram().pinned.memory(at),
            Place::Card(_) => None,
        };
        memory.map_or(Self::Card(place), |(memory, offset)| Self::Memory(memory, offset))
    }

    /// Reads at offset `at`. Does not need the card's lock for host-visible memory.
    fn read(&self, host: &ManagedCard, at: u64, data: &mut [u8]) -> Result<(), ManagerError> {
        match self {
            Self::Memory(memory, offset) => {
                let slice = memory.slice(offset + at as usize, data.len()).map_err(beyond)?;
                slice.copy_to(data);
                Ok(())
            }
            Self::Card(place) => host.lock().vram_mut().read_at(behind(*place, at), data),
        }
    }

    /// Writes at offset `at`.
    fn write(&self, host: &ManagedCard, at: u64, data: &[u8]) -> Result<(), ManagerError> {
        match self {
            Self::Memory(memory, offset) => {
                let slice = memory.slice(offset + at as usize, data.len()).map_err(beyond)?;
                slice.copy_from(data);
                Ok(())
            }
            Self::Card(place) => host.lock().vram_mut().write_at(behind(*place, at), data),
        }
    }
}

fn behind(place: Place, by: u64) -> Place {
    match place {
        Place::Host(at) => Place::Host(HostAddr(at.0 + by)),
        Place::Card(at) => Place::Card(VramAddr(at.0 + by)),
    }
}

fn beyond(error: impl std::fmt::Display) -> ManagerError {
    Invalid::new(format_args!("memory to copy: {error}")).into()
}

impl ManagedCard {
    /// Copies chunks of a VM to VM `its` of card `to`, except parts that are equal on both cards. Returns the number of
    /// bytes copied.
    fn carry(
        &self,
        vm: TenantId,
        chunks: Vec<GuestVramAddr>,
        to: &ManagedCard,
        its: TenantId,
        known: &Known,
    ) -> Result<u64, ManagerError> {
        let here = self.lock().chunk_bytes();
        let there = to.lock().chunk_bytes();
        let bytes = here.min(there);
        let parts: Vec<GuestVramAddr> = chunks
            .iter()
            .flat_map(|at| (0..here).step_by(bytes as usize).map(|offset| GuestVramAddr(at.0 + offset)))
            .collect();
        let copied = AtomicU64::new(0);
        let each = |at: &GuestVramAddr| -> Result<(), ManagerError> {
            let Some(from) = self.place_now(vm, *at) else { return Ok(()) };
            let place = to.receive(its, *at)?;
            let into = End::from_place(&to.lock(), place);
            copied.fetch_add(copy(self, &from, to, &into, bytes, known)?, Ordering::Relaxed);
            Ok(())
        };
        let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(THREADS);
        let share = parts.len().div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            let runs: Vec<_> =
                parts.chunks(share).map(|share| scope.spawn(move || share.iter().try_for_each(each))).collect();
            // Wait for all threads, even after an error.
            let ended: Vec<_> = runs.into_iter().map(ScopedJoinHandle::join).collect();
            ended.into_iter().try_for_each(|run| run.unwrap_or(Err(ManagerError::OutOfService)))
        })?;
        Ok(copied.into_inner())
    }

    fn place_now(&self, vm: TenantId, at: GuestVramAddr) -> Option<End> {
        let state = self.lock();
        state.place_of(vm, at).map(|place| End::from_place(&state, place))
    }

    /// Zeroes chunks of VM `its` of card `to` that were copied, but that the VM on this card has freed since.
    fn take_back(&self, chunks: Vec<GuestVramAddr>, to: &ManagedCard, its: TenantId) -> Result<(), ManagerError> {
        let here = self.lock().chunk_bytes();
        let has: BTreeSet<u64> = chunks.into_iter().map(|at| at.0).collect();
        let (places, there) = {
            let state = to.lock();
            (state.chunks_of(its), state.chunk_bytes())
        };
        let parts =
            places.iter().flat_map(|at| (0..there).step_by(here.min(there) as usize).map(|offset| at.0 + offset));
        for part in parts.filter(|part| !has.contains(&(part - part % here))) {
            for at in (part..part + here.min(there)).step_by(BYTES_PER_LOCK_HOLD as usize) {
                let bytes = BYTES_PER_LOCK_HOLD.min(part + here.min(there) - at);
                to.lock().vram_mut().guest_zero(its, GuestVramAddr(at), bytes)?;
            }
        }
        Ok(())
    }

    /// Writes memory of a VM that arrives from another card or in a stream. The memory must be zeroed beforehand.
    ///
    /// # Errors
    /// Returns an error if the memory does not belong to the VM, if no memory is free, or if the card does not respond.
    pub fn write_received(&self, vm: TenantId, at: GuestVramAddr, data: &[u8]) -> Result<(), ManagerError> {
        let chunk = self.lock().chunk_bytes();
        let mut rest = (at, data);
        while !rest.1.is_empty() {
            let (at, data) = rest;
            let left = chunk.saturating_sub(at.0.checked_rem(chunk).unwrap_or(0));
            let (now, later) = data.split_at_checked(left.min(BYTES_PER_LOCK_HOLD) as usize).unwrap_or((data, &[]));
            let place = self.receive(vm, at)?;
            self.lock().vram_mut().write_at(place, now)?;
            rest = (GuestVramAddr(at.0.saturating_add(now.len() as u64)), later);
        }
        Ok(())
    }

    /// Returns the location of guest memory that arrives from another card. If there is none yet, allocates zeroed
    /// memory: host memory, or card memory if no host memory is free. Releases the card's lock between the parts of a
    /// scrub.
    pub(super) fn receive(&self, vm: TenantId, at: GuestVramAddr) -> Result<Place, ManagerError> {
        if let Some(place) = self.lock().place_of(vm, at) {
            return Ok(place);
        }
        let mut tier = Tier::Host;
        let place = loop {
            let state = &mut *self.lock();
            let vram = state.vram_mut();
            let index = vram.chunks.index(vm, at).ok_or(vram::Error::NoSuchVm(vm))?;
            match vram.chunks.receive(vm, index, tier) {
                Ok(place) => break place,
                Err(vram::Error::NeedsScrub { .. }) if vram.scrub_piece()? => {}
                Err(vram::Error::Full { .. }) if tier == Tier::Host => tier = Tier::Card,
                Err(error) => return Err(error.into()),
            }
        };
        if let Place::Host(slot) = place {
            // Let the host allocate pages without the card's lock held.
            let wanted = self.lock().vram().pinned.lacks(slot);
            if let Some(wanted) = wanted {
                let memory = wanted.find()?;
                self.lock().vram_mut().pinned.give(slot, memory)?;
            }
            self.lock().vram_mut().pinned.fill(slot)?;
        }
        let place = self.lock().place_of(vm, at);
        place.ok_or(ManagerError::Unsettled("a chunk was unplaced"))
    }
}

/// Copies `bytes` bytes, except parts that are already equal. Returns the number of bytes copied.
fn copy(
    host: &ManagedCard,
    from: &End,
    to: &ManagedCard,
    into: &End,
    bytes: u64,
    known: &Known,
) -> Result<u64, ManagerError> {
    let mut data = vec![0; COMPARED.min(bytes) as usize];
    let mut other = vec![0; data.len()];
    let mut copied = 0;
    for at in (0..bytes).step_by(data.len()) {
        from.read(host, at, &mut data)?;
        if matches!(known, Known::Something) {
            into.read(to, at, &mut other)?;
        }
        if data != other {
            into.write(to, at, &data)?;
            copied += data.len() as u64;
        }
    }
    Ok(copied)
}

impl CardState {
    /// Stops a VM's channels, and requests that they leave the engines, if `held` is true. Otherwise, lets them run
    /// again unless the card is quiesced.
    pub fn hold_still(&mut self, vm: TenantId, held: bool) {
        if held {
            self.held.insert(vm);
        } else {
            self.held.remove(&vm);
        }
        let held = held || self.still;
        self.work.channels_mut().pause(self.memory.card_mut(), vm, Pause::Standstill, held);
        if held {
            self.work.channels_mut().vacate(self.memory.card_mut(), vm);
        }
        self.feeder().look_at_waits(Some(vm));
    }

    /// Pins a VM's memory in place while the VM arrives from another card, or permits the memory to move again.
    pub fn travels(&mut self, vm: TenantId, travels: bool) {
        self.memory.set_migrating(vm, travels);
    }

    /// Returns a VM's channels that have not left their engines, excluding departing ones. Returns `None` only if the
    /// departing channels have also left.
    fn stays_of(&mut self, vm: TenantId) -> Option<Vec<(TenantId, VirtualChannelId)>> {
        self.look_at_departures();
        let left = self.work.channels_mut().vacating(self.memory.card_mut(), vm);
        let any = !left.is_empty() || self.work.departures().any_leaving(Some(vm));
        any.then(|| left.into_iter().map(|channel| (vm, channel)).collect())
    }

    /// Returns the start addresses of a VM's placed chunks.
    pub(super) fn chunks_of(&self, of: TenantId) -> Vec<GuestVramAddr> {
        let chunks = &self.vram().chunks;
        let advertised = chunks.vms().find(|(vm, _)| *vm == of).map_or(0, |(_, account)| account.advertised);
        let all = (0..advertised).map(|index| chunks.guest_address(index));
        all.filter(|at| chunks.is_placed(of, *at) == Some(true)).collect()
    }

    pub(super) fn chunk_bytes(&self) -> u64 {
        self.vram().chunks.chunk_bytes()
    }

    /// Returns the location of a byte of guest VRAM, if its chunk is placed.
    pub(super) fn place_of(&self, vm: TenantId, at: GuestVramAddr) -> Option<Place> {
        match self.vram().chunks.lookup(vm, at, 1) {
            Lookup::Placed(place) => Some(place),
            Lookup::Unplaced | Lookup::Split | Lookup::Outside => None,
        }
    }

    /// Adopts the channels of a VM that arrives from another card and is [held](Self::hold_still) on this card.
    /// `directory` maps old directories to new ones. The channels' pages must be mapped in the VM's address spaces
    /// before the VM resumes.
    ///
    /// # Errors
    /// Returns an error if too few channels are free, or if the channels are invalid for this card. In both cases,
    /// nothing is changed.
    pub fn arrive(
        &mut self,
        vm: TenantId,
        Departing { channels, strikes }: Departing,
        directory: impl Fn(VramAddr) -> Option<VramAddr>,
    ) -> Result<(), ManagerError> {
        let CardState { memory, work, .. } = self;
        let arrived = work.channels_mut().arrive(memory.card_mut(), vm, channels, directory);
        let arrived = arrived.map_err(|error| match error {
            MoveError::Bind(error) => ManagerError::Bind(error),
            MoveError::Invalid(why) => ManagerError::Saved(why),
        })?;
        let mut events: Vec<Event> =
            (0..strikes).map(|_| Event::Struck { vgpu: vm, engine: Engine::Compute }).collect();
        for channel in arrived {
            events.extend(self.adopt(vm, &channel));
        }
        self.feeder().feed(events);
        Ok(())
    }

    /// Records the submissions of an arrived channel. Submissions that were started wait for a slice, as on a stopped
    /// channel.
    fn adopt(&mut self, vm: TenantId, arrived: &Arrived) -> Vec<Event> {
        let now = self.card_time();
        let physical = arrived.physical;
        let engines = self.engines_of(physical);
        let schedule = self.work.schedule_mut();
        let mut events = Vec::new();
        for (submission, began) in &arrived.flights {
            let ticket = Ticket(submission.0);
            let stage = if *began { Stage::Descheduled } else { Stage::Parked };
            let held = TrackedSubmission {
                vm,
                channel: physical,
                stage,
                arrived: now,
                seen: None,
                hopped: false,
                on_engine: None,
                irq_suppressed: false,
                brief: false,
                needs: Needs::Graphics,
            };
            schedule.held.insert(ticket, held);
            schedule.note_engines(physical, engines);
            if *began {
                let engine = schedule.engine_for(physical, engines);
                events.push(Event::Adopted { vgpu: vm, channel: Channel(physical.0.into()), engine, ticket });
            }
        }
        if !events.is_empty() {
            schedule.descheduled.insert(vm, physical, Why::Stopped, now);
        }
        events
    }
}
