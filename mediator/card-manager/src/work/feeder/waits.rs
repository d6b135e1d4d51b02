//! Submissions that wait on the card, and channels that are kept off it.

use super::Feeder;
use crate::work::card_view::CardView;
use crate::work::descheduled::Why;
use crate::work::schedule::{Schedule, Stage, TrackedSubmission};
use channels::Presence;
use nvspec::fifo::ChannelId;
use sched::{Engine, Event, Nanos, Ticket};

/// Maximum time charged before the end of a submission's wait is noticed, in ns: ten poll intervals.
const UNSEEN_NS: u64 = 5_000_000;

impl<C: CardView> Feeder<'_, C> {
    /// Returns the event for a submission that has made progress since the poll at `since` found it waiting. Returns
    /// `None` without such a poll.
    pub(super) fn moved_since(&self, ticket: Ticket, since: Option<Nanos>) -> Option<Event> {
        // Limit the time, because the feeder does not poll while no VM waits for the engine.
        let earliest = self.card.card_time().0.saturating_sub(UNSEEN_NS);
        Some(Event::Moved { ticket, since: since?.max(Nanos(earliest)) })
    }

    /// Detects a channel's submissions that have become able or unable to run, and appends the events for the
    /// scheduler.
    pub(super) fn look_at_channel(&mut self, channel: ChannelId, events: &mut Vec<Event>) {
        let wants = self.card.wants(channel);
        self.look_at_leaver(channel, events);
        match self.schedule().descheduled.reason(channel) {
            Some(Why::Stopped) if wants => return self.queue_again(channel, events),
            Some(_) => return,
            None => {}
        }
        let with_card = self.schedule().first_of(channel, &[Stage::Started, Stage::Waiting]);
        let presence = with_card.map(|_| self.card.presence(channel));
        let leaves = presence.is_some() && !wants;
        if leaves && presence == Some(Presence::Works) {
            // Until the channel has left, it is charged and its limit applies.
            self.card.ask_to_leave(channel);
        }
        let off = leaves && presence != Some(Presence::Works);
        if off {
            self.set_aside(channel, false);
        }
        // A channel is known to wait only after it has polled its semaphore, so the state of a readmitted channel is
        // unknown until it reaches the card.
        let shut_out = self.card.is_shut_out(channel);
        let waits = presence == Some(Presence::Acquires) && !shut_out;
        let progress = if waits { self.card.progress(channel) } else { 0 };
        let now = self.card.card_time();
        let of_it = self.schedule().held.iter().filter(|(_, held)| held.channel == channel);
        let of_it: Vec<(Ticket, TrackedSubmission)> = of_it.map(|(ticket, held)| (*ticket, *held)).collect();
        for (ticket, mut held) in of_it {
            match held.stage {
                Stage::Parked if wants && self.may_follow(ticket, channel, held.needs) => {
                    held.stage = Stage::Queued;
                    events.push(self.arrival(ticket, held.vm, channel, held.needs));
                }
                Stage::Started if off || waits => {
                    held.stage = if off { Stage::Descheduled } else { Stage::Waiting };
                    (held.seen, held.on_engine) = (Some((now, progress)), None);
                    if !self.schedule().barred.remove(&ticket) {
                        events.push(Event::Waiting { ticket });
                    }
                }
                Stage::Waiting if off || waits => {
                    let moved = off || held.seen.is_some_and(|(_, before)| before != progress);
                    if moved {
                        events.extend(self.moved_since(ticket, held.seen.map(|(since, _)| since)));
                    }
                    held.stage = if off { Stage::Descheduled } else { Stage::Waiting };
                    held.seen = Some((now, progress));
                    let hops = &mut self.schedule().descheduled.hops;
                    held.hopped |= moved && !hops.allow(held.vm, now);
                }
                Stage::Waiting if !shut_out => {
                    events.extend(self.moved_since(ticket, held.seen.map(|(since, _)| since)));
                    held.stage = Stage::Started;
                    events.push(Event::Resumed { ticket });
                }
                Stage::Parked | Stage::Started | Stage::Waiting | Stage::Queued | Stage::Descheduled | Stage::Again => {
                    continue;
                }
            }
            self.schedule().held.insert(ticket, held);
        }
    }

    /// Removes copies from the copy engines' accounts while their channel is off the card, because their VM would
    /// otherwise be charged for the wait. Restores them when the VM uses PGRAPH again. Appends the events for the
    /// scheduler.
    pub(super) fn look_at_barred(&mut self, events: &mut Vec<Event>) {
        let schedule = self.schedule();
        let Schedule { held, barred, .. } = schedule;
        barred.retain(|ticket| held.get(ticket).is_some_and(|held| held.stage == Stage::Started));
        for channel in schedule.channels_at(&[Stage::Started]).into_keys() {
            let shut_out = self.card.is_shut_out(channel);
            let off = shut_out && self.card.presence(channel) != Presence::Works;
            let schedule = self.schedule();
            let of_it =
                schedule.held.iter().filter(|(_, held)| (held.channel, held.stage) == (channel, Stage::Started));
            for ticket in of_it.map(|(ticket, _)| *ticket).collect::<Vec<_>>() {
                let copies = |engine| engine != Engine::Compute;
                if off && schedule.scheduler.engine_of(ticket).is_some_and(copies) {
                    schedule.barred.insert(ticket);
                    events.push(Event::Waiting { ticket });
                } else if !shut_out && schedule.barred.remove(&ticket) {
                    events.push(Event::Resumed { ticket });
                }
            }
        }
    }

    /// Removes a descheduled channel's work from the engines' accounts once no engine executes the channel. Until then,
    /// requests that the channel leave.
    fn look_at_leaver(&mut self, channel: ChannelId, events: &mut Vec<Event>) {
        let descheduled = self.schedule().descheduled.contains(channel);
        if !descheduled || self.schedule().first_of(channel, &[Stage::Started]).is_none() {
            return;
        }
        if self.card.presence(channel) == Presence::Works {
            self.card.ask_to_leave(channel);
        } else {
            self.schedule().withhold_started(channel, events);
        }
    }

    /// Keeps a channel off the card until its next slice. `rests` is true if the channel waits for a semaphore.
    fn set_aside(&mut self, channel: ChannelId, rests: bool) {
        let why = if rests { Why::Rests } else { Why::Stopped };
        let now = self.card.card_time();
        let vm = self.schedule().held.values().find(|held| held.channel == channel).map(|held| held.vm);
        let Some(vm) = vm else { return };
        self.schedule().descheduled.insert(vm, channel, why, now);
        self.card.withhold(channel, true);
    }

    /// Queues a descheduled channel, which resumes in its slice.
    fn queue_again(&mut self, channel: ChannelId, events: &mut Vec<Event>) {
        let now = self.card.card_time();
        let schedule = self.schedule();
        let Some(ticket) = schedule.first_of(channel, &[Stage::Descheduled]) else { return };
        let Some(held) = schedule.held.get_mut(&ticket) else { return };
        held.stage = Stage::Again;
        let vm = held.vm;
        schedule.descheduled.insert(vm, channel, Why::Queued, now);
        events.push(Event::Requeued { ticket });
    }

    /// Lets a channel return to the card with all of its started work.
    pub(super) fn let_back(&mut self, channel: ChannelId, events: &mut Vec<Event>) {
        self.schedule().descheduled.remove(channel);
        self.card.withhold(channel, false);
        for (ticket, held) in &mut self.schedule().held {
            if held.channel == channel && held.stage == Stage::Descheduled {
                held.stage = Stage::Started;
                events.push(Event::Resumed { ticket: *ticket });
            }
        }
        self.look_at_channel(channel, events);
    }

    /// Readmits channels whose work on the card has completed. If only the submission that waited has completed, queues
    /// the next one for a slice.
    pub(super) fn release_idle(&mut self, events: &mut Vec<Event>) {
        let all: Vec<ChannelId> = self.schedule().descheduled.channels().map(|(channel, _)| channel).collect();
        for channel in all {
            let schedule = self.schedule();
            let queued = schedule.descheduled.reason(channel) == Some(Why::Queued);
            if schedule.first_of(channel, &[Stage::Descheduled, Stage::Again]).is_none() {
                self.let_back(channel, events);
            } else if queued && schedule.first_of(channel, &[Stage::Again]).is_none() {
                self.queue_again(channel, events);
            }
        }
    }

    /// Returns true if a channel that waits for a semaphore needs a slice to poll it.
    pub(super) fn any_left_out(&mut self) -> bool {
        let waiting: Vec<ChannelId> = self.schedule().waiting_channels().collect();
        waiting.into_iter().any(|channel| self.card.is_left_out(channel))
    }

    /// Deschedules waiting channels that block others, are left out, or have worked too often between waits. Lets the
    /// next resting channel poll if a poll is due, or all resting channels if the card has no other work.
    pub(super) fn rest_and_rouse(&mut self) {
        let now = self.card.card_time();
        let wanted = self.schedule().scheduler.in_flight() > 0;
        let mut events = Vec::new();
        for (channel, vm) in self.schedule().channels_at(&[Stage::Waiting]) {
            let hopped = |held: &TrackedSubmission| held.channel == channel && held.hopped;
            let hopped = self.schedule().held.values().any(hopped);
            let holds_up = wanted && (hopped || self.card.holds(channel));
            if !holds_up && !self.card.is_left_out(channel) {
                continue;
            }
            tracing::debug!(%vm, channel = channel.0, hopped, holds_up, "a waiting channel is descheduled");
            self.set_aside(channel, true);
            self.schedule().withhold_started(channel, &mut events);
        }
        while let Some(channel) = self.schedule().descheduled.wake_next(now, wanted) {
            if self.card.wants(channel) {
                self.queue_again(channel, &mut events);
            }
        }
        self.feed(events);
    }
}
