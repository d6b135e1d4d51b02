//! Quiesces the card, so that no VM's channel is on an engine, completed work has been reported, and no memory moves.
//! The card can then be saved or handed over.
//!
//! Guests keep running. Work that they submit waits in the rings, and their writes to memory take effect. They notice
//! only that work takes longer.

use super::scrubber::Scrubber;
use super::{CardState, ManagedCard};
use crate::ManagerError;
use crate::tenants::GuestEvent;
use crate::work::{engine_numbered, number_of};
use channels::Pause;
use locks::rank;
use nvspec::fifo::VirtualChannelId;
use sched::Engine;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use vram::TenantId;

/// Additional time limit after hung channels were killed.
// TIMEOUT: an engine is idle after a reset, and departures time out after a quarter of a second.
const KILLED_LIMIT: Duration = Duration::from_secs(1);
/// Interval between polls of departing channels. The card has no interrupt for a channel's departure.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// A card that is quiesced until this value is dropped.
#[must_use = "the card continues when this is dropped"]
pub struct Standstill<'a> {
    pub(super) host: &'a ManagedCard,
    _no_moves: locks::Guard<'a, rank::Moving, ()>,
}

impl ManagedCard {
    /// Makes the work of all VMs leave the engines. A channel that has not left within `limit` is killed as hung, and
    /// its guest is notified. The wait for the other channels then continues. The caller must not hold a lock.
    ///
    /// # Errors
    /// Returns an error if a channel still does not leave the card. In this case, the card continues.
    pub fn stand_still(&self, limit: Duration) -> Result<Standstill<'_>, ManagerError> {
        let still = Standstill { host: self, _no_moves: self.moving.lock() };
        let vms: Vec<TenantId> = {
            let mut state = self.lock();
            state.still = true;
            state.vms.keys().copied().collect()
        };
        // Release the lock between VMs.
        for vm in &vms {
            let mut state = self.lock();
            state.keep_still(*vm);
            let CardState { memory, work, .. } = &mut *state;
            work.channels_mut().vacate(memory.card_mut(), *vm);
            state.feeder().look_at_waits(Some(*vm));
        }
        self.await_rest(limit, CardState::stays)?;
        if self.lock().work.departures().any_kept_at_all() {
            return Err(ManagerError::NotStill);
        }
        Ok(still)
    }

    /// Waits until `stays` returns `None`, and notifies guests of completed work. A channel that has not left within
    /// `limit` is killed as hung.
    ///
    /// # Errors
    /// Returns an error if a channel still does not leave the card.
    pub(super) fn await_rest(
        &self,
        limit: Duration,
        stays: impl Fn(&mut CardState) -> Option<Vec<(TenantId, VirtualChannelId)>>,
    ) -> Result<(), ManagerError> {
        let began = Instant::now();
        loop {
            let Some(stays) = stays(&mut self.lock()) else { break };
            if began.elapsed() > limit + KILLED_LIMIT {
                tracing::error!(?stays, "some channels do not leave the engines");
                return Err(ManagerError::NotStill);
            }
            if began.elapsed() > limit {
                stays.into_iter().for_each(|(vm, channel)| self.hangs(vm, channel));
            }
            locks::sleep(POLL_INTERVAL);
        }
        self.tell_ended();
        Ok(())
    }

    /// Kills a channel that has not left within its limit, and notifies its guest.
    fn hangs(&self, vm: TenantId, channel: VirtualChannelId) {
        let told = self.lock().kill_hung(vm, channel);
        told.into_iter().for_each(|event| self.deliver(vm, event));
    }

    /// Notifies guests of completed work. No work runs, so the card raises no more interrupts.
    pub(super) fn tell_ended(&self) {
        let events = {
            let mut state = self.lock();
            state.feeder().complete();
            let (_, mut events) = state.service();
            events.extend(state.work.schedule_mut().take_outbox());
            events
        };
        events.into_iter().for_each(|(vm, event)| self.deliver(vm, event));
    }
}

impl CardState {
    /// Returns true if the card is quiesced or being quiesced.
    #[must_use]
    pub fn stands_still(&self) -> bool {
        self.still
    }

    /// Stops a VM's channels if the card is quiesced or this VM is held. Otherwise, ends this pause.
    pub(super) fn keep_still(&mut self, vm: TenantId) {
        let still = self.still || self.held.contains(&vm);
        self.work.channels_mut().pause(self.memory.card_mut(), vm, Pause::Standstill, still);
    }

    /// Returns the channels that are still on their engines, excluding departing ones. Returns `None` only if the
    /// departing channels have also left and PGRAPH is not being cleared.
    fn stays(&mut self) -> Option<Vec<(TenantId, VirtualChannelId)>> {
        self.look_at_departures();
        let vms: BTreeSet<TenantId> = self.vms.keys().copied().collect();
        let mut stays = Vec::new();
        for vm in vms {
            let left = self.work.channels_mut().vacating(self.memory.card_mut(), vm);
            stays.extend(left.into_iter().map(|channel| (vm, channel)));
        }
        let clears = self.scrubber.as_ref().is_some_and(Scrubber::is_busy);
        (!stays.is_empty() || clears || self.work.departures().any_leaving(None)).then_some(stays)
    }

    /// Kills a channel that does not leave its engine. Returns the event for its guest, if the guest must be notified.
    fn kill_hung(&mut self, vm: TenantId, channel: VirtualChannelId) -> Option<GuestEvent> {
        let physical = self.work.channels().physical(vm, channel)?;
        let on = Engine::ALL
            .into_iter()
            .map(number_of)
            .find(|engine| self.work.channels_mut().occupant(self.memory.card_mut(), *engine) == Some(physical));
        let Some(engine) = on else {
            // No engine executes this channel. Resetting the engines that it occupies is enough, and its guest need not
            // be notified.
            self.reset_engines_of(physical);
            return None;
        };
        tracing::warn!(%vm, ?channel, engine, "a channel does not leave its engine, so the card is not quiescent");
        self.kill_channel(vm, channel, engine);
        if let Some(engine) = engine_numbered(engine) {
            self.feeder().feed([sched::Event::Struck { vgpu: vm, engine }]);
        }
        Some(GuestEvent::Hang { engine, channel })
    }

    pub(super) fn move_again(&mut self) {
        self.still = false;
        for vm in self.vms.keys().copied().collect::<Vec<_>>() {
            self.keep_still(vm);
            self.feeder().look_at_waits(Some(vm));
        }
        // Let channels that ran without their PGRAPH contexts use PGRAPH again.
        self.want_graphics_again();
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
