//! The work on a card: its channels and their schedule.
//!
//! Modules: [`schedule`] (the scheduler and its submissions), [`feeder`] (sends events to the scheduler and executes
//! its decisions), [`card_view`] (the feeder's interface to the card), `descheduled` (work kept off the card),
//! `departures` (channels that are leaving the card), `interrupt_rate` (interrupts caused by VMs), [`needs`] (engines
//! that a submission needs), [`push_buffer`] (derives these engines from a submission's methods), `recording`
//! (recordings of the scheduler), [`usage`] (data for operators), [`overdue`] (submissions that do not complete, with
//! reasons), `saved` (saved state), and [`time`] (the card's clock).

pub(crate) mod card_view;
pub(crate) mod departures;
pub(crate) mod descheduled;
pub(crate) mod feeder;
mod interrupt_rate;
pub mod needs;
pub mod overdue;
pub mod push_buffer;
mod recording;
mod saved;
pub(crate) mod schedule;
pub mod time;
pub mod usage;

pub(crate) use feeder::{engine_numbered, number_of};
pub(crate) use saved::SavedWork;

use channels::Channels;
use departures::Departures;
use interrupt_rate::InterruptRateLimit;
use schedule::Schedule;
use vram::TenantId;

/// Channels, and their schedule.
pub(crate) struct Work {
    channels: Channels,
    /// Channels that are leaving the card.
    departures: Departures,
    schedule: Schedule,
    /// Accounts of the interrupts caused by VMs.
    noise: InterruptRateLimit,
    /// Number of completed submissions, including the mediator's own.
    ended: u64,
}

impl Work {
    pub(crate) fn new(channels: Channels, schedule: Schedule) -> Self {
        Self { channels, departures: Departures::default(), schedule, noise: InterruptRateLimit::default(), ended: 0 }
    }

    /// Returns the physical channels.
    pub(crate) fn channels(&self) -> &Channels {
        &self.channels
    }

    /// Like [`Self::channels`], but mutable.
    pub(crate) fn channels_mut(&mut self) -> &mut Channels {
        &mut self.channels
    }

    /// Returns the schedule.
    pub(crate) fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Like [`Self::schedule`], but mutable.
    pub(crate) fn schedule_mut(&mut self) -> &mut Schedule {
        &mut self.schedule
    }

    /// Returns the channels that are leaving the card.
    pub(crate) fn departures(&self) -> &Departures {
        &self.departures
    }

    /// Like [`Self::departures`], but mutable.
    pub(crate) fn departures_mut(&mut self) -> &mut Departures {
        &mut self.departures
    }

    /// Returns the accounts of interrupts caused by VMs.
    pub(crate) fn noise(&self) -> &InterruptRateLimit {
        &self.noise
    }

    /// Like [`Self::noise`], but mutable.
    pub(crate) fn noise_mut(&mut self) -> &mut InterruptRateLimit {
        &mut self.noise
    }

    /// Returns the number of completed submissions.
    pub(crate) fn ended(&self) -> u64 {
        self.ended
    }

    /// Counts completed submissions, given their VMs.
    pub(crate) fn count_ended(&mut self, vms: impl Iterator<Item = TenantId>) {
        for vm in vms {
            self.ended = self.ended.saturating_add(1);
            self.noise.ended(vm);
        }
    }
}
