//! Channels that faulted, and channels that do not leave the card.

use super::bring_up::restart_engine;
use super::copier::COPIER;
use super::registry::HostState;
use super::{Feeder, HostError};
use card::Card;
use channels::{RunState, Stuck};
use nvspec::fifo::{ChannelId, VirtualChannelId, engine};
use nvspec::mmu::fault;
use nvspec::regs::pfifo;
use std::sync::Arc;
use vram::VmId;

/// Polls for a preemption to end once its engine was reset; each poll is a bus read of about a microsecond.
const POLLS: u32 = 100_000;

impl HostState {
    /// Ends one channel of a VM. Its engine is reset if the card does not let go of it otherwise.
    ///
    /// # Errors
    /// [`Stuck`] when not even that helps: the card may still use what the channel's page tables name.
    pub fn end_channel(&mut self, vm: VmId, channel: VirtualChannelId) -> Result<(), Stuck> {
        self.complete();
        let physical = self.channels.physical(channels::VmId(vm.0), channel);
        let ended = self.channels.unbind(&mut self.vram.memory, channels::VmId(vm.0), channel);
        if let Some(physical) = physical {
            self.channel_ended(vm, physical);
        }
        ended.or_else(|stuck| self.unstick(stuck))
    }

    /// Takes a channel off its engines now, by a reset of the engine if the card does not let go of it otherwise; it may be
    /// scheduled again.
    ///
    /// # Errors
    /// [`Stuck`] as for [`Self::end_channel`].
    pub fn clear_engines(&mut self, vm: VmId, channel: VirtualChannelId) -> Result<(), Stuck> {
        let cleared = self.channels.clear_engines(&mut self.vram.memory, channels::VmId(vm.0), channel);
        cleared.or_else(|stuck| self.unstick(stuck))
    }

    /// Takes a channel off the card for good, and keeps its number from others until [`Self::end_channel`]. Its engine is
    /// reset if the card does not let go of it otherwise.
    ///
    /// # Errors
    /// [`Stuck`] as for [`Self::end_channel`].
    pub fn retire_channel(&mut self, vm: VmId, channel: VirtualChannelId) -> Result<(), Stuck> {
        self.complete();
        let physical = self.channels.physical(channels::VmId(vm.0), channel);
        let retired = self.channels.retire(&mut self.vram.memory, channels::VmId(vm.0), channel);
        let retired = retired.or_else(|stuck| self.unstick(stuck));
        if vm.0 == COPIER.0
            && let Some(copier) = &mut self.copier
        {
            tracing::error!(?channel, "the mediator's own channel has failed; from now on memory is moved by the CPU");
            copier.breaks();
        }
        if let Some(physical) = physical {
            self.channel_ended(vm, physical);
        }
        retired
    }

    /// Retires a channel that holds `engine` and makes no progress: the engine is reset at once, since waiting for it to let
    /// go would only hold the others up.
    ///
    /// # Errors
    /// [`Stuck`] as for [`Self::end_channel`].
    pub fn kill_channel(&mut self, vm: VmId, channel: VirtualChannelId, engine: u32) -> Result<(), Stuck> {
        let card = Arc::clone(self.vram.memory.card());
        let disabled = card.read32(pfifo::SCHED_DISABLE::OFFSET);
        card.write32(pfifo::SCHED_DISABLE::OFFSET, disabled | 1 << engine);
        if let Err(error) = restart_engine(&*card, engine) {
            tracing::error!(engine, %error, "an engine that was reset does not start");
        }
        let retired = self.retire_channel(vm, channel);
        card.write32(pfifo::SCHED_DISABLE::OFFSET, disabled);
        retired
    }

    /// Takes all channels of a VM off the card and gives it no more.
    ///
    /// # Errors
    /// [`Stuck`] as for [`Self::end_channel`].
    pub fn quiesce(&mut self, vm: VmId) -> Result<(), Stuck> {
        self.complete();
        let stuck = self.channels.destroy_vm(&mut self.vram.memory, channels::VmId(vm.0));
        self.unschedule_vm(vm);
        stuck.into_iter().try_for_each(|stuck| self.unstick(stuck))
    }

    /// Resets the engines that hold a channel which does not leave them. Others have their channels' contexts in memory,
    /// so no other work is lost.
    ///
    /// # Errors
    /// The same [`Stuck`] when the card still does not let go.
    pub fn unstick(&mut self, stuck: Stuck) -> Result<(), Stuck> {
        let card = Arc::clone(self.vram.memory.card());
        let disabled = card.read32(pfifo::SCHED_DISABLE::OFFSET);
        for unit in 0..engine::COUNT {
            // Nothing is scheduled there between the look and the reset.
            card.write32(pfifo::SCHED_DISABLE::OFFSET, disabled | 1 << unit);
            if holds(&*card, unit, stuck.channel) {
                tracing::error!(
                    channel = stuck.channel.0,
                    engine = unit,
                    "an engine does not end its work and is reset"
                );
                if let Err(error) = restart_engine(&*card, unit) {
                    tracing::error!(engine = unit, %error, "an engine that was reset does not start");
                }
            }
            card.write32(pfifo::SCHED_DISABLE::OFFSET, disabled);
        }
        // A preemption of another channel may have been asked for since.
        card.write32(pfifo::PREEMPT::OFFSET, pfifo::PREEMPT::CHANNEL.of(stuck.channel.0.into()));
        if !(0..POLLS).any(|_| !pfifo::PREEMPT::PENDING.is_set(card.read32(pfifo::PREEMPT::OFFSET))) {
            tracing::error!(%stuck, "resetting engines did not help; what the channel reaches is kept until the card is reset");
            return Err(stuck);
        }
        if self.channels.run_state(stuck.channel) == RunState::Stuck {
            self.channels.let_go(&mut self.vram.memory, stuck.channel);
        }
        Ok(())
    }

    /// Takes a channel that faulted (if it is known whose it is) off the card, and lets its engine go on with others.
    pub(super) fn recover(
        &mut self,
        card: &dyn Card,
        channel: Option<(VmId, VirtualChannelId)>,
        unit: u32,
    ) -> Result<(), HostError> {
        let engine = match unit {
            fault::unit::GR => Some(engine::GR),
            fault::unit::CE0 => Some(engine::CE0),
            fault::unit::CE1 => Some(engine::CE1),
            _ => None,
        };
        let mask = engine.map_or(0, |engine| 1 << engine);
        let disabled = card.read32(pfifo::SCHED_DISABLE::OFFSET);
        card.write32(pfifo::SCHED_DISABLE::OFFSET, disabled | mask);
        let stopped = channel.map_or(Ok(()), |(vm, channel)| self.retire_channel(vm, channel));
        card.write32(pfifo::SCHED_ENABLE_ACK::OFFSET, mask);
        card.write32(pfifo::SCHED_DISABLE::OFFSET, disabled & !mask);
        stopped.map_err(|error| HostError::Refused(error.to_string()))
    }
}

/// Whether an engine works for a channel.
fn holds(card: &dyn Card, unit: u32, channel: ChannelId) -> bool {
    let status = card.read32(pfifo::ENGINE_STATUS::at(unit));
    pfifo::ENGINE_STATUS::BUSY.is_set(status) && pfifo::ENGINE_STATUS::CHANNEL.get(status) == u32::from(channel.0)
}
