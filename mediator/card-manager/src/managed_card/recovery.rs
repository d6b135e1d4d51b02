//! Recovery from channel faults, and removal of channels that must leave the card.

use super::scrubber::SCRUBBER;
use super::{CardState, ManagedCard};
use crate::tenants::GuestEvent;
use crate::work::departures::Remedy;
use crate::work::schedule::LOOK_NS;
use bringup::start::restart_engine;
use card::Card;
use card_memory::COPIER;
use channels::{RunState, Stuck};
use nvspec::fifo::{ChannelId, VirtualChannelId, engine};
use nvspec::mmu::fault;
use nvspec::regs::pfifo;
use std::sync::Arc;
use std::time::Duration;
use vram::TenantId;

/// Interval between polls of departing channels by a thread that holds no lock.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

impl CardState {
    /// Ends one channel of a VM.
    ///
    /// # Errors
    /// Returns [`Stuck`] if the channel has not left its engines yet. In this case, the channel is departing, and its
    /// VM is notified once the channel has left ([`GuestEvent::Left`]).
    pub fn end_channel(&mut self, vm: TenantId, channel: VirtualChannelId) -> Result<(), Stuck> {
        self.feeder().complete();
        let physical = self.work.channels().physical(vm, channel);
        let ended = self.work.channels_mut().unbind(self.memory.card_mut(), vm, channel);
        self.departs(vm, physical, ended);
        ended
    }

    /// Makes a channel leave its engines, and resets an engine if the channel does not leave it. The channel may be
    /// scheduled again later.
    pub fn clear_engines(&mut self, vm: TenantId, channel: VirtualChannelId) {
        let Some(physical) = self.work.channels().physical(vm, channel) else { return };
        if self.work.channels_mut().kick(self.memory.card_mut(), physical).is_err() {
            let now_ns = self.now_ns();
            self.work.departures_mut().begin(vm, physical, false, now_ns);
            self.look_soon();
        }
    }

    /// Removes a channel from the card permanently. Its number stays reserved until [`Self::end_channel`].
    ///
    /// # Errors
    /// Returns [`Stuck`] if the channel has not left its engines yet. In this case, the channel is departing.
    pub fn retire_channel(&mut self, vm: TenantId, channel: VirtualChannelId) -> Result<(), Stuck> {
        self.feeder().complete();
        let physical = self.work.channels().physical(vm, channel);
        let retired = self.work.channels_mut().retire(self.memory.card_mut(), vm, channel);
        if vm == COPIER
            && let (_, Some(copier)) = self.memory.vram_and_copier()
        {
            tracing::error!(
                ?channel,
                "the mediator's own channel has failed; the CPU moves memory until the copy engines are retried"
            );
            copier.breaks();
        }
        if vm == SCRUBBER {
            let now = self.now_ns();
            self.scrubber.iter_mut().for_each(|scrubber| scrubber.breaks(now));
            tracing::error!("the mediator's channel on PGRAPH has failed; it will be bound again");
        }
        self.departs(vm, physical, retired);
        retired
    }

    /// Same as [`Self::retire_channel`], for a channel that the card must no longer run. If the channel does not leave
    /// an engine, the engine is reset, because the channel's work is no longer charged.
    pub(crate) fn retire_now(&mut self, vm: TenantId, channel: VirtualChannelId) {
        let physical = self.work.channels().physical(vm, channel);
        let retired = self.retire_channel(vm, channel);
        if let (Err(_), Some(physical)) = (retired, physical)
            && self.work.departures_mut().discharge(physical)
        {
            self.feeder().channel_ended(vm, physical);
        }
    }

    /// Retires a channel that occupies `engine` without progress. Unless the engine has switched to another channel in
    /// the meantime, resets it immediately, because waiting would only delay other VMs.
    pub fn kill_channel(&mut self, vm: TenantId, channel: VirtualChannelId, engine: u32) {
        let card = Arc::clone(self.vram().memory.card());
        let disabled = card.read32(pfifo::SCHED_DISABLE::OFFSET);
        let physical = self.work.channels().physical(vm, channel);
        // The engine must not schedule any work between the check and the reset.
        card.write32(pfifo::SCHED_DISABLE::OFFSET, disabled | 1 << engine);
        if physical.is_some_and(|physical| holds(&*card, engine, physical))
            && let Err(error) = restart_engine(&*card, &self.firmware, engine)
        {
            tracing::error!(engine, %error, "an engine does not restart after a reset");
        }
        self.retire_now(vm, channel);
        card.write32(pfifo::SCHED_DISABLE::OFFSET, disabled);
    }

    /// Removes all of a VM's channels from the card, and prevents the VM from binding new ones. Channels that are still
    /// on the card depart later.
    pub(crate) fn quiesce(&mut self, vm: TenantId) {
        self.feeder().complete();
        let stuck = self.work.channels_mut().destroy_vm(self.memory.card_mut(), vm);
        self.feeder().unschedule_vm(vm);
        self.forget_graphics(vm);
        let now_ns = self.now_ns();
        stuck.into_iter().for_each(|stuck| self.work.departures_mut().begin(vm, stuck.channel, false, now_ns));
    }

    /// Records the departure of a VM's channel, given the result of its removal.
    fn departs(&mut self, vm: TenantId, physical: Option<ChannelId>, left: Result<(), Stuck>) {
        let Some(physical) = physical else { return };
        let now_ns = self.now_ns();
        match left {
            Ok(()) if self.work.departures().contains(physical) => self.departed(vm, physical),
            Ok(()) => self.feeder().channel_ended(vm, physical),
            Err(_) => {
                self.work.departures_mut().begin(vm, physical, true, now_ns);
                self.look_soon();
            }
        }
    }

    /// Completes the departure of a channel that has left its engines.
    fn departed(&mut self, vm: TenantId, physical: ChannelId) {
        let stuck = self.work.channels().run_state(physical) == RunState::Stuck;
        let lingers = stuck && !self.work.channels_mut().let_go(self.memory.card_mut(), physical);
        if self.work.departures_mut().leave(physical, lingers) {
            self.feeder().channel_ended(vm, physical);
        }
        if stuck && self.vms.contains_key(&vm) {
            self.work.schedule_mut().post(vm, GuestEvent::Left);
        }
        self.free_removed(vm);
    }

    /// Frees the memory of a removed VM once its last channel has left the card.
    fn free_removed(&mut self, vm: TenantId) {
        if !self.removed.contains(&vm) || self.work.channels().has_stuck(vm) {
            return;
        }
        self.removed.remove(&vm);
        tracing::info!(%vm, "the card has released the channels of a removed VM; the VM's memory is free");
        if let Err(error) = self.memory.destroy_vm(vm) {
            tracing::error!(%vm, %error, "cannot free the memory of a removed VM");
        }
        // The memory is scrubbed on demand or by the mover.
        self.vram().wakeup.ring();
    }

    /// Polls the departing channels, with a bounded number of accesses per channel. Must be called repeatedly until no
    /// channel is departing.
    pub(crate) fn look_at_departures(&mut self) {
        let now_ns = self.now_ns();
        for (physical, vm) in self.work.departures_mut().due(now_ns) {
            if self.work.channels_mut().kick(self.memory.card_mut(), physical).is_ok() {
                self.departed(vm, physical);
                continue;
            }
            match self.work.departures_mut().stays(physical, now_ns) {
                None => {}
                Some(Remedy::Reset) => self.reset_engines_of(physical),
                Some(Remedy::GiveUp) => {
                    tracing::error!(%vm, channel = physical.0, "a channel does not leave the card despite engine resets; its memory \
                        is kept until the channel has left or the card is reset");
                    if self.work.departures_mut().discharge(physical) {
                        self.feeder().channel_ended(vm, physical);
                    }
                }
            }
        }
    }

    /// Returns true if one of a VM's channels has not left its engines yet.
    #[must_use]
    pub(crate) fn is_departing(&self, vm: TenantId) -> bool {
        self.work.departures().any_leaving(Some(vm))
    }

    /// Returns a VM's channels that have left, but whose work areas are still mapped. The VM must unmap the work areas
    /// and then call [`Self::free_left`].
    pub fn take_left(&mut self, vm: TenantId) -> Vec<ChannelId> {
        self.work.departures_mut().take_left(vm)
    }

    /// Frees a departed channel's number after the card has lost access to its work area.
    pub fn free_left(&mut self, physical: ChannelId) {
        self.work.channels_mut().unstrand(physical);
        self.work.channels_mut().let_go(self.memory.card_mut(), physical);
    }

    /// Makes the scheduler tick within [`LOOK_NS`].
    fn look_soon(&mut self) {
        let now = self.card_time();
        self.work.schedule_mut().arm(now, Some(LOOK_NS));
    }

    /// Resets the engines that execute a channel and do not release it. Other channels' contexts are in memory, so no
    /// other work is lost.
    pub(crate) fn reset_engines_of(&mut self, physical: ChannelId) {
        let card = Arc::clone(self.vram().memory.card());
        let disabled = card.read32(pfifo::SCHED_DISABLE::OFFSET);
        for unit in 0..engine::COUNT {
            // The engine must not schedule any work between the check and the reset.
            card.write32(pfifo::SCHED_DISABLE::OFFSET, disabled | 1 << unit);
            if holds(&*card, unit, physical) {
                tracing::error!(
                    channel = physical.0,
                    engine = unit,
                    "an engine does not release a channel, so it is reset"
                );
                if let Err(error) = restart_engine(&*card, &self.firmware, unit) {
                    tracing::error!(engine = unit, %error, "an engine does not restart after a reset");
                }
            }
            card.write32(pfifo::SCHED_DISABLE::OFFSET, disabled);
        }
    }

    /// Removes a faulted channel (if its owner is known) from the card, and lets its engine continue with other
    /// channels. The stopped engine is reset, as in nouveau (`gf100_fifo_recover_work`). Acknowledging the error would
    /// make the scheduler use the engine again, but would not repair it. An engine that already executes another
    /// channel is not reset.
    pub(crate) fn recover(&mut self, card: &dyn Card, channel: Option<(TenantId, VirtualChannelId)>, unit: u32) {
        let engine = match unit {
            fault::unit::GR => Some(engine::GR),
            fault::unit::CE0 => Some(engine::CE0),
            fault::unit::CE1 => Some(engine::CE1),
            _ => None,
        };
        let mask = engine.map_or(0, |engine| 1 << engine);
        let disabled = card.read32(pfifo::SCHED_DISABLE::OFFSET);
        card.write32(pfifo::SCHED_DISABLE::OFFSET, disabled | mask);
        let physical = channel.and_then(|(vm, channel)| self.work.channels().physical(vm, channel));
        if let Some(engine) = engine
            && stopped(card, engine, physical)
            && let Err(error) = restart_engine(card, &self.firmware, engine)
        {
            tracing::error!(engine, %error, "an engine does not restart after the reset due to a fault");
        }
        if let Some((vm, channel)) = channel {
            self.retire_now(vm, channel);
        }
        card.write32(pfifo::SCHED_ENABLE_ACK::OFFSET, mask);
        card.write32(pfifo::SCHED_DISABLE::OFFSET, disabled & !mask);
    }
}

impl ManagedCard {
    /// Waits, for a limited number of polls and without a lock, until each of a VM's departing channels has left or is
    /// known to stay. The caller must not hold a VM's lock.
    pub fn wait_departed(&self, vm: TenantId) {
        loop {
            {
                let mut state = self.lock();
                state.look_at_departures();
                if !state.is_departing(vm) {
                    // After this, the VM's memory may be wiped and assigned to another VM.
                    if let Err(error) = state.vram().memory.barrier() {
                        tracing::error!(%vm, %error, "the last writes of a VM's channels may arrive late");
                    }
                    return;
                }
            }
            locks::sleep(POLL_INTERVAL);
        }
    }
}

/// Returns true if an engine that raised a fault is still stopped: the scheduler waits for the acknowledgement, or the
/// faulted channel is on the engine. Returns false if the engine was reset in the meantime and may execute another
/// channel.
fn stopped(card: &dyn Card, unit: u32, channel: Option<ChannelId>) -> bool {
    let waits = card.read32(pfifo::SCHED_ENABLE_ACK::OFFSET) & 1 << unit != 0;
    waits || channel.is_some_and(|channel| holds(card, unit, channel))
}

/// Returns true if a channel is on an engine.
fn holds(card: &dyn Card, unit: u32, channel: ChannelId) -> bool {
    let status = card.read32(pfifo::ENGINE_STATUS::at(unit));
    pfifo::ENGINE_STATUS::BUSY.is_set(status) && pfifo::ENGINE_STATUS::CHANNEL.get(status) == u32::from(channel.0)
}
