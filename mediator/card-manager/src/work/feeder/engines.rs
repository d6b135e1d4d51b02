//! Channels on the engines, and submissions that occupy an engine for too long.

use super::Feeder;
use crate::tenants::GuestEvent;
use crate::work::card_view::CardView;
use channels::Presence;
use nvspec::fifo::{ChannelId, engine};
use sched::{Channel, Engine, Event, Nanos};
use vram::TenantId;

impl<C: CardView> Feeder<'_, C> {
    /// Records the channels that the busy engines are executing. A submission's limit covers only the time that it was
    /// observed on the engine. The accounts may also include time that it spent waiting for a semaphore, or for another
    /// channel to leave the engine.
    ///
    /// Returns the events for the scheduler. A channel with contexts for several engines is booked on the engine on
    /// which it was last observed, although its methods select the engine. Once it is observed on another engine, it is
    /// charged for that engine instead of the channel that was booked there.
    pub(super) fn look_at_engines(&mut self) -> Vec<Event> {
        let now = self.card.card_time();
        let everywhere = self.schedule().any_of_several();
        let looked = Engine::ALL.into_iter().filter(|engine| everywhere || self.schedule().scheduler.is_busy(*engine));
        let looked: Vec<Engine> = looked.collect();
        let occupants: Vec<(Engine, ChannelId)> =
            looked.into_iter().filter_map(|engine| Some((engine, self.card.occupant(engine)?))).collect();
        let channels: Vec<ChannelId> = occupants.iter().map(|(_, channel)| *channel).collect();
        self.schedule().note_occupants(&channels, now);
        let mut moved = Vec::new();
        for (engine, channel) in occupants {
            if self.schedule().is_elsewhere(channel, engine)
                && let Some((vm, _)) = self.card.owner(channel)
            {
                moved.push(Event::Occupied { engine, vgpu: vm, channel: Channel(channel.0.into()) });
            }
        }
        moved
    }

    /// Returns the time from which a channel's occupancy of an engine is counted. Returns `None` if its VM has no
    /// limit, or if the limit has been reached.
    fn has_it_since(&mut self, vm: TenantId, channel: ChannelId) -> Option<Nanos> {
        let now = self.card.card_time();
        let since = self.schedule().seen_since(channel, now)?;
        let limit = self.schedule().scheduler.params(vm)?.max_run_ns?;
        (now.since(since) < limit).then_some(since)
    }

    /// Kills a channel that is suspected of an overrun, if the card confirms that the channel has occupied the engine
    /// up to its limit. Otherwise, corrects the scheduler's accounts.
    pub(super) fn handle_overrun(
        &mut self,
        vm: TenantId,
        channel: ChannelId,
        engine: Engine,
        ran_ns: u64,
        told: &mut Vec<Event>,
    ) {
        match self.card.occupant(engine) {
            Some(other) if other != channel => {
                let Some((vm, _)) = self.card.owner(other) else {
                    return told.push(Event::Unoccupied { engine, since: None });
                };
                told.extend(self.schedule().bring_back(other));
                told.push(Event::Occupied { engine, vgpu: vm, channel: Channel(other.0.into()) });
            }
            None if self.card.presence(channel) != Presence::Works => {
                told.push(Event::Unoccupied { engine, since: None });
                self.look_at_channel(channel, told);
            }
            _ => {
                if let since @ Some(_) = self.has_it_since(vm, channel) {
                    return told.push(Event::Unoccupied { engine, since });
                }
                let Some((_, guest_channel)) = self.card.owner(channel) else { return };
                let ran_ms = ran_ns / 1_000_000;
                tracing::warn!(%vm, channel = ?guest_channel, ?engine, ran_ms, "a submission exceeds its time limit");
                self.card.kill(vm, guest_channel, engine);
                // The interrupt thread notifies the guest.
                self.schedule().post(vm, GuestEvent::Hang { engine: number_of(engine), channel: guest_channel });
                told.push(Event::Struck { vgpu: vm, engine });
            }
        }
    }
}

/// Returns the engine with the given number on the card, if its time is shared.
pub(crate) fn engine_numbered(number: u32) -> Option<Engine> {
    Engine::ALL.into_iter().find(|engine| number_of(*engine) == number)
}

/// Returns an engine's number on the card.
pub(crate) fn number_of(engine: Engine) -> u32 {
    match engine {
        Engine::Compute => engine::GR,
        Engine::Copy0 => engine::CE0,
        Engine::Copy1 => engine::CE1,
    }
}
