//! One VM goes from this card to another one of the same host, while the others go on with theirs.
//!
//! Before it stops, its memory leaves the card for host memory, and its guest works on from there ([`HostCard::empty`]). Then it is
//! suspended ([`HostCard::suspend`]): its channels leave the engines, and what this card holds of them is copied
//! ([`Suspended::depart`]), as is its memory ([`Suspended::copy_memory`]). The other card has made it a VM already, which is
//! [held](HostState::hold_still), takes the channels in ([`HostState::arrive`]), and lets it go on. Until then nothing has changed here:
//! when anything fails, the guard is dropped, and it goes on where it was.

use super::{HostCard, HostState};
use crate::work::schedule::{Held, Stage};
use crate::work::withheld::Why;
use crate::{Feeder, HostError};
use channels::{Arrived, MoveError, Moving, Pause, SavedMoving};
use locks::rank;
use nvspec::addr::VramAddr;
use saved_state::Invalid;
use sched::{Channel, Engine, Event, Ticket};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vram::{GuestAddr, Lookup, Place, Step, Tier, To, VmId};

/// Time that it may take more once the channels that hang are killed.
// TIMEOUT: as for a card that stands still.
const KILLED_LIMIT: Duration = Duration::from_secs(1);
/// Time between two looks whether all have left. The card has no interrupt for that.
const LOOK: Duration = Duration::from_micros(50);
/// Bytes that leave the card for host memory at a time: its guest's work stands still for as long as they are copied.
const BATCH_BYTES: u64 = 8 << 20;
/// Times that what is on the card again, or new there, is looked for.
const ROUNDS: u32 = 3;
/// Bytes that are copied with a card's lock held once.
const PIECE: u64 = 256 << 10;
/// Most strikes that come along: more than lead to any quarantine.
const STRIKES_MAX: u32 = 1024;

/// Channels and strikes of a VM, which go along with it beside what is its own and its memory.
#[derive(Debug)]
pub struct Departing {
    channels: Moving,
    /// Submissions beyond their limit.
    strikes: u32,
}

impl Departing {
    /// Writes it down: the channels, and the strikes.
    ///
    /// # Errors
    /// When the channels are none that could come anywhere.
    pub fn save(&self) -> Result<(SavedMoving, u32), HostError> {
        let Self { channels, strikes } = self;
        Ok((channels.save()?, *strikes))
    }

    /// With the strikes of somebody who makes room for it, if those are more.
    #[must_use]
    pub fn struck(self, strikes: u32) -> Self {
        Self { strikes: self.strikes.max(strikes), ..self }
    }

    /// As it was.
    ///
    /// # Errors
    /// When the channels are none that there can be.
    pub fn restored(channels: SavedMoving, strikes: u32) -> Result<Self, HostError> {
        Invalid::unless(strikes <= STRIKES_MAX, || format!("{strikes} strikes are more than any VM has"))?;
        Ok(Self { channels: channels.restored()?, strikes })
    }
}

/// A VM whose work stands still while this lives.
#[must_use = "the VM goes on when this is dropped"]
pub struct Halted {
    host: Arc<HostCard>,
    vm: VmId,
}

/// A VM whose work stands still, and whose memory does not move, while this lives.
#[must_use = "the VM goes on when this is dropped"]
pub struct Suspended<'a> {
    // Dropped first.
    halted: Halted,
    _no_moves: locks::Guard<'a, rank::Moving, ()>,
}

impl Suspended<'_> {
    /// Lets memory of the card move again. The VM's work stands still as before.
    pub fn halted(self) -> Halted {
        self.halted
    }
}

impl std::ops::Deref for Suspended<'_> {
    type Target = Halted;

    fn deref(&self) -> &Halted {
        &self.halted
    }
}

impl HostCard {
    /// Has a VM's memory leave the card for host memory, as far as there is room, while it works on. Nothing of it comes back before
    /// [`Self::stays`]. Returns the bytes that have left.
    pub fn empty(&self, vm: VmId) -> u64 {
        self.lock().memory.travel(vm, true);
        let mut left = 0;
        for _ in 0..ROUNDS {
            let (on_card, chunk) = {
                let state = self.lock();
                let bytes = state.vram().chunks.vm_bytes(vm).unwrap_or(0);
                (state.memory().movable(vm, GuestAddr(0), bytes, true), state.vram().chunks.chunk_bytes())
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

    /// Has card `to` find places for the memory of a VM, which is VM `its` there, while the VM works on.
    ///
    /// # Errors
    /// When the other card has no room.
    pub fn announce(&self, vm: VmId, to: &HostCard, its: VmId) -> Result<(), HostError> {
        let chunks = self.lock().chunks_of(vm);
        chunks.into_iter().try_for_each(|at| to.receive(its, at).map(drop))
    }

    /// A VM does not leave: its memory may come back to the card.
    pub fn stays(&self, vm: VmId) {
        self.lock().memory.travel(vm, false);
        self.look_again();
    }

    /// Has the work of a VM leave the engines. A channel that has not within `limit` hangs: it is killed, and its guest is told. Without
    /// any lock.
    ///
    /// # Errors
    /// When the card keeps a channel all the same; the VM goes on then.
    pub fn suspend(self: &Arc<Self>, vm: VmId, limit: Duration) -> Result<Suspended<'_>, HostError> {
        let no_moves = self.moving.lock();
        Ok(Suspended { halted: self.halt(vm, limit)?, _no_moves: no_moves })
    }

    /// As [`Self::suspend`], while memory of other VMs may go on moving, and the VM's where an operator wants it.
    ///
    /// # Errors
    /// As [`Self::suspend`].
    pub fn halt(self: &Arc<Self>, vm: VmId, limit: Duration) -> Result<Halted, HostError> {
        let halted = Halted { host: Arc::clone(self), vm };
        if let Some(why) = self.failure() {
            return Err(HostError::Failed { why: why.to_owned() });
        }
        self.lock().hold_still(vm, true);
        let began = Instant::now();
        loop {
            let Some(stays) = self.lock().stays_of(vm) else { break };
            if began.elapsed() > limit + KILLED_LIMIT {
                tracing::error!(%vm, ?stays, "a VM does not stand still");
                return Err(HostError::NotStill);
            }
            if began.elapsed() > limit {
                stays.into_iter().for_each(|channel| self.hangs(vm, channel));
            }
            locks::sleep(LOOK);
        }
        self.tell_ended();
        if self.lock().work.departures().any_kept(vm) {
            return Err(HostError::NotStill);
        }
        Ok(halted)
    }
}

impl Halted {
    /// Tells the VM what has ended. Nothing ends from then on.
    pub fn settle(&self) {
        self.host.tell_ended();
    }

    /// Copies what this card holds of the VM's channels. Nothing changes here.
    ///
    /// # Errors
    /// [`HostError::Unsettled`] when something is under way; when the card does not answer.
    pub fn depart(&self) -> Result<Departing, HostError> {
        let (host, vm) = (&self.host, self.vm);
        let state = &mut *host.lock();
        if state.memory.segments_of(vm) {
            return Err(HostError::Stays("it has made a segment that other address spaces may share"));
        }
        // What its engines wrote before they were left.
        state.vram().memory.barrier()?;
        let strikes = state.scheduler().strikes(vm).map_or(0, |(strikes, _)| strikes);
        let HostState { memory, work, .. } = state;
        let channels = work.channels().moving(memory.card_mut(), vm);
        let channels = channels.ok_or(HostError::Unsettled("a channel leaves the card"))?;
        Ok(Departing { channels, strikes })
    }

    /// Strikes of the VM.
    #[must_use]
    pub fn strikes(&self) -> u32 {
        self.host.lock().scheduler().strikes(self.vm).map_or(0, |(strikes, _)| strikes)
    }

    /// Bytes of a chunk.
    #[must_use]
    pub fn chunk_bytes(&self) -> u64 {
        self.host.lock().chunk_bytes()
    }

    /// Begins of the VM's chunks that have a place.
    #[must_use]
    pub fn chunks(&self) -> Vec<GuestAddr> {
        self.host.lock().chunks_of(self.vm)
    }

    /// Reads `data` of the VM's memory, which is within a chunk; `false` if that has no place (any more).
    ///
    /// # Errors
    /// When the card does not answer.
    pub fn read(&self, at: GuestAddr, data: &mut [u8]) -> Result<bool, HostError> {
        let state = &mut *self.host.lock();
        let Some(from) = state.place_of(self.vm, at) else { return Ok(false) };
        state.vram_mut().read_at(from, data)?;
        Ok(true)
    }

    /// Copies the VM's memory to what is VM `its` of card `to`, which has none of it yet. Returns the bytes.
    ///
    /// # Errors
    /// When the other card has no room, or one of them does not answer.
    pub fn copy_memory(&self, to: &HostCard, its: VmId) -> Result<u64, HostError> {
        let here = self.host.lock().chunk_bytes();
        let there = to.lock().chunk_bytes();
        let mut data = vec![0; PIECE.min(here).min(there) as usize];
        let mut copied = 0;
        for at in self.chunks() {
            for offset in (0..here).step_by(data.len()) {
                let at = GuestAddr(at.0 + offset);
                if !self.read(at, &mut data)? {
                    continue;
                }
                let place = to.receive(its, at)?;
                // A new chunk holds zeros.
                if data.iter().any(|byte| *byte != 0) {
                    to.lock().vram_mut().write_at(place, &data)?;
                }
                copied += data.len() as u64;
            }
        }
        Ok(copied)
    }
}

impl Drop for Halted {
    fn drop(&mut self) {
        if self.host.failure().is_none() {
            self.host.lock().hold_still(self.vm, false);
        }
    }
}

impl HostCard {
    /// Writes memory of a VM that comes from elsewhere, and has nothing but zeros there yet.
    ///
    /// # Errors
    /// When it is none of the VM's, when there is no room for it, or the card does not answer.
    pub fn write_received(&self, vm: VmId, at: GuestAddr, data: &[u8]) -> Result<(), HostError> {
        let chunk = self.lock().chunk_bytes();
        let mut rest = (at, data);
        while !rest.1.is_empty() {
            let (at, data) = rest;
            let left = chunk.saturating_sub(at.0.checked_rem(chunk).unwrap_or(0));
            let (now, later) = data.split_at_checked(left.min(PIECE) as usize).unwrap_or((data, &[]));
            let place = self.receive(vm, at)?;
            self.lock().vram_mut().write_at(place, now)?;
            rest = (GuestAddr(at.0.saturating_add(now.len() as u64)), later);
        }
        Ok(())
    }

    /// Gives guest memory that comes from another card a place, zeroed: in host memory, or where there is none left on the card. The
    /// card's lock is free between the pieces of what is scrubbed for it.
    fn receive(&self, vm: VmId, at: GuestAddr) -> Result<Place, HostError> {
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
            // The host finds pages with the card's lock free.
            let wanted = self.lock().vram().pinned.lacks(slot);
            if let Some(wanted) = wanted {
                let memory = wanted.find()?;
                self.lock().vram_mut().pinned.give(slot, memory)?;
            }
            self.lock().vram_mut().pinned.fill(slot)?;
        }
        let place = self.lock().place_of(vm, at);
        place.ok_or(HostError::Unsettled("a chunk has lost its place"))
    }
}

impl HostState {
    /// Keeps a VM's channels from running, has them leave the engines, and leaves its memory where it is; or lets all of that go on.
    pub fn hold_still(&mut self, vm: VmId, held: bool) {
        let held = held || self.still;
        self.work.channels_mut().pause(self.memory.card_mut(), vm, Pause::Standstill, held);
        if held {
            self.work.channels_mut().vacate(self.memory.card_mut(), vm);
        }
        self.look_at_waits(Some(vm));
    }

    /// Leaves a VM's memory where it is, for it comes from another card; or lets it move.
    pub fn travels(&mut self, vm: VmId, travels: bool) {
        self.memory.travel(vm, travels);
    }

    /// Channels of a VM that are still to leave their engines, or `None` when nothing is.
    fn stays_of(&mut self, vm: VmId) -> Option<Vec<nvspec::fifo::VirtualChannelId>> {
        self.look_at_departures();
        let left = self.work.channels_mut().vacating(self.memory.card_mut(), vm);
        (!left.is_empty() || self.work.departures().any_leaving(Some(vm))).then_some(left)
    }

    /// Begins of a VM's chunks that have a place.
    fn chunks_of(&self, of: VmId) -> Vec<GuestAddr> {
        let chunks = &self.vram().chunks;
        let advertised = chunks.vms().find(|(vm, _)| *vm == of).map_or(0, |(_, account)| account.advertised);
        let all = (0..advertised).map(|index| chunks.guest_address(index));
        all.filter(|at| chunks.is_placed(of, *at) == Some(true)).collect()
    }

    fn chunk_bytes(&self) -> u64 {
        self.vram().chunks.chunk_bytes()
    }

    /// Place of a byte of guest VRAM, if it has one.
    fn place_of(&self, vm: VmId, at: GuestAddr) -> Option<Place> {
        match self.vram().chunks.lookup(vm, at, 1) {
            Lookup::Placed(place) => Some(place),
            Lookup::Unplaced | Lookup::Split | Lookup::Outside => None,
        }
    }

    /// Takes in the channels of a VM that comes from another card, and is [held](Self::hold_still) here. `directory` says which directory
    /// takes the place of one there. Its address spaces must map the pages of the channels before it goes on.
    ///
    /// # Errors
    /// When there are too few channels, or they are none that this card can have; nothing has changed then.
    pub fn arrive(
        &mut self,
        vm: VmId,
        Departing { channels, strikes }: Departing,
        directory: impl Fn(VramAddr) -> Option<VramAddr>,
    ) -> Result<(), HostError> {
        let HostState { memory, work, .. } = self;
        let arrived = work.channels_mut().arrive(memory.card_mut(), vm, channels, directory);
        let arrived = arrived.map_err(|error| match error {
            MoveError::Bind(error) => HostError::Bind(error),
            MoveError::Invalid(why) => HostError::Saved(why),
        })?;
        let mut events: Vec<Event> =
            (0..strikes).map(|_| Event::Struck { vgpu: vm, engine: Engine::Compute }).collect();
        for channel in arrived {
            events.extend(self.adopt(vm, &channel));
        }
        self.feed(events);
        Ok(())
    }

    /// Notes a channel's submissions: those that have begun wait for their turn, as those of a channel that was stopped.
    fn adopt(&mut self, vm: VmId, arrived: &Arrived) -> Vec<Event> {
        let now = self.card_time();
        let physical = arrived.physical;
        let engines = self.engines_of(physical);
        let schedule = self.work.schedule_mut();
        let mut events = Vec::new();
        for (submission, began) in &arrived.flights {
            let ticket = Ticket(submission.0);
            let stage = if *began { Stage::Withheld } else { Stage::Parked };
            let held = Held { vm, channel: physical, stage, arrived: now, seen: None, hopped: false, on_engine: None };
            schedule.held.insert(ticket, held);
            schedule.note_engines(physical, engines);
            if *began {
                let engine = schedule.engine_for(physical, engines);
                events.push(Event::Adopted { vgpu: vm, channel: Channel(physical.0.into()), engine, ticket });
            }
        }
        if !events.is_empty() {
            schedule.withheld.insert(vm, physical, Why::Stopped, now);
        }
        events
    }
}
