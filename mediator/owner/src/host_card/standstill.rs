//! The card stands still: no channel of a VM is on an engine, what has ended is told, and no memory moves. For its state to
//! be written down, or handed over.
//!
//! Guests go on: what they ring for waits in their rings, what they write is where it is. They see that their work takes
//! longer, and nothing else.

use super::scrubber::Scrubber;
use super::{HostCard, HostState};
use crate::tenants::GuestEvent;
use crate::work::{engine_numbered, number_of};
use crate::{Feeder, HostError};
use channels::Pause;
use locks::rank;
use nvspec::fifo::VirtualChannelId;
use sched::Engine;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use vram::VmId;

/// Time that it may take more once the channels that hang are killed.
// TIMEOUT: an engine that was reset has no work, and departures give up by themselves after a quarter of a second.
const KILLED_LIMIT: Duration = Duration::from_secs(1);
/// Time between two looks whether all have left. The card has no interrupt for that.
const LOOK: Duration = Duration::from_micros(50);

/// A card that stands still while this lives.
#[must_use = "the card goes on when this is dropped"]
pub struct Standstill<'a> {
    pub(super) host: &'a HostCard,
    _no_moves: locks::Guard<'a, rank::Moving, ()>,
}

impl HostCard {
    /// Has the work of all VMs leave the engines. A channel that has not within `limit` hangs: it is killed, its guest is
    /// told, and the others are waited for. Without any lock.
    ///
    /// # Errors
    /// When the card keeps a channel all the same; it goes on then.
    pub fn stand_still(&self, limit: Duration) -> Result<Standstill<'_>, HostError> {
        let still = Standstill { host: self, _no_moves: self.moving.lock() };
        let vms: Vec<VmId> = {
            let mut state = self.lock();
            state.still = true;
            state.vms.keys().copied().collect()
        };
        // The lock is free between two of them.
        for vm in &vms {
            let mut state = self.lock();
            state.keep_still(*vm);
            let HostState { memory, work, .. } = &mut *state;
            work.channels_mut().vacate(memory.card_mut(), *vm);
            state.look_at_waits(Some(*vm));
        }
        self.await_rest(limit, HostState::stays)?;
        if self.lock().work.departures().any_kept_at_all() {
            return Err(HostError::NotStill);
        }
        Ok(still)
    }

    /// Waits until nothing is left of what `stays` names, and tells guests what has ended. A channel that has not left within `limit` hangs,
    /// and is killed.
    ///
    /// # Errors
    /// When the card keeps one all the same.
    pub(super) fn await_rest(
        &self,
        limit: Duration,
        stays: impl Fn(&mut HostState) -> Option<Vec<(VmId, VirtualChannelId)>>,
    ) -> Result<(), HostError> {
        let began = Instant::now();
        loop {
            let Some(stays) = stays(&mut self.lock()) else { break };
            if began.elapsed() > limit + KILLED_LIMIT {
                tracing::error!(?stays, "channels do not stand still");
                return Err(HostError::NotStill);
            }
            if began.elapsed() > limit {
                stays.into_iter().for_each(|(vm, channel)| self.hangs(vm, channel));
            }
            locks::sleep(LOOK);
        }
        self.tell_ended();
        Ok(())
    }

    /// A channel has not left within its limit.
    fn hangs(&self, vm: VmId, channel: VirtualChannelId) {
        let told = self.lock().kill_hung(vm, channel);
        told.into_iter().for_each(|event| self.deliver(vm, event));
    }

    /// Tells guests what has ended. The card raises nothing more afterwards, since nothing is at work.
    pub(super) fn tell_ended(&self) {
        let events = {
            let mut state = self.lock();
            state.complete();
            let (_, mut events) = state.service();
            events.extend(state.work.schedule_mut().take_outbox());
            events
        };
        events.into_iter().for_each(|(vm, event)| self.deliver(vm, event));
    }
}

impl HostState {
    /// Returns whether the card stands still, or is about to.
    #[must_use]
    pub fn stands_still(&self) -> bool {
        self.still
    }

    /// Keeps a VM's channels from running, if the card stands still or somebody holds this VM.
    pub(super) fn keep_still(&mut self, vm: VmId) {
        let still = self.still || self.held.contains(&vm);
        self.work.channels_mut().pause(self.memory.card_mut(), vm, Pause::Standstill, still);
    }

    /// Channels that are still to leave their engines, or `None` when nothing is: among those that depart none is named.
    fn stays(&mut self) -> Option<Vec<(VmId, VirtualChannelId)>> {
        self.look_at_departures();
        let vms: BTreeSet<VmId> = self.vms.keys().copied().collect();
        let mut stays = Vec::new();
        for vm in vms {
            let left = self.work.channels_mut().vacating(self.memory.card_mut(), vm);
            stays.extend(left.into_iter().map(|channel| (vm, channel)));
        }
        let clears = self.scrubber.as_ref().is_some_and(Scrubber::is_busy);
        (!stays.is_empty() || clears || self.work.departures().any_leaving(None)).then_some(stays)
    }

    /// Kills a channel wherever it is at work, and returns what its guest is told.
    fn kill_hung(&mut self, vm: VmId, channel: VirtualChannelId) -> Option<GuestEvent> {
        let physical = self.work.channels().physical(vm, channel)?;
        let on = Engine::ALL
            .into_iter()
            .map(number_of)
            .find(|engine| self.work.channels_mut().occupant(self.memory.card_mut(), *engine) == Some(physical));
        let Some(engine) = on else {
            // No engine works for it: a reset of what holds it does, and its guest need not hear of it.
            self.reset_engines_of(physical);
            return None;
        };
        tracing::warn!(%vm, ?channel, engine, "a channel does not leave its engine for the card to stand still");
        self.kill_channel(vm, channel, engine);
        if let Some(engine) = engine_numbered(engine) {
            self.feed([sched::Event::Struck { vgpu: vm, engine }]);
        }
        Some(GuestEvent::Hang { engine, channel })
    }

    pub(super) fn move_again(&mut self) {
        self.still = false;
        for vm in self.vms.keys().copied().collect::<Vec<_>>() {
            self.keep_still(vm);
            self.look_at_waits(Some(vm));
        }
        self.change_hands();
    }
}

impl Drop for Standstill<'_> {
    fn drop(&mut self) {
        if self.host.failure().is_none() {
            self.host.lock().move_again();
        }
    }
}
