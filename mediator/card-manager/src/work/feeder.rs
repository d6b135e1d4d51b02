//! Sends events to a card's scheduler, and executes its decisions.
//!
//! A doorbell adds a submission to a channel's ring on the card ([`channels::Channels::pull`]), and the submission
//! arrives at the feeder. After a thread has started it in its slice, the card may fetch it. Its completion record
//! contains the card's timestamp.
//!
//! A submission that cannot run does not block others: it arrives only once the guest has enabled and listed its
//! channel. A started submission may wait, for a semaphore or because its channel was stopped. It releases the engine
//! once the card reports that no engine executes its channel. Until then, it is charged and its limit applies,
//! regardless of the guest's register writes. If its channel was stopped, the feeder requests that the channel leave
//! the engine. When the submission can run again, it resumes in a [slice](super::descheduled).
//!
//! Modules: `arrivals` (submissions before they are queued), `waits` (submissions and channels that cannot run), and
//! `engines` (channels on the engines, and overruns).
//!
//! A channel is killed only if the engine confirms that it is executing the channel.

mod arrivals;
mod engines;
mod waits;

pub(crate) use engines::{engine_numbered, number_of};

use super::card_view::CardView;
use super::schedule::{LOOK_NS, Schedule, Stage};
use channels::Submission;
use nvspec::fifo::ChannelId;
use sched::{Channel, Config, Decision, Engine, Event, Nanos, Ticket, VgpuParams};
use std::collections::VecDeque;
use vram::TenantId;

/// Reports events to a card's scheduler and executes its decisions.
#[derive(Debug)]
pub struct Feeder<'a, C> {
    card: &'a mut C,
}

impl<'a, C: CardView> Feeder<'a, C> {
    /// Creates a feeder, to be used while the card's lock is held.
    pub(crate) fn new(card: &'a mut C) -> Self {
        Self { card }
    }

    /// Returns the scheduler and its known submissions.
    fn schedule(&mut self) -> &mut Schedule<C::Alarm> {
        self.card.schedule()
    }

    /// Adds a VM with a share of the card's time.
    pub(crate) fn schedule_vm(&mut self, vm: TenantId, params: VgpuParams) {
        self.feed([Event::Added { vgpu: vm, params }]);
    }

    /// Removes a VM from the scheduler, because it was removed from the card.
    pub(crate) fn unschedule_vm(&mut self, vm: TenantId) {
        self.schedule().forget(|held| held.vm == vm);
        self.schedule().descheduled.forget(|of, _| of == vm);
        self.schedule().descheduled.hops.forget(vm);
        self.schedule().told.remove(&vm);
        self.feed([Event::Removed { vgpu: vm }]);
    }

    /// Changes a VM's share of the card's time from now on.
    pub fn set_share(&mut self, vm: TenantId, params: VgpuParams) {
        self.feed([Event::Changed { vgpu: vm, params }]);
    }

    /// Changes the scheduler's settings from now on. Queued and running work is kept.
    pub fn set_scheduler(&mut self, config: Config) {
        self.feed([Event::Configured(config)]);
    }

    /// Releases a VM from quarantine.
    pub fn release_vm(&mut self, vm: TenantId) {
        self.feed([Event::Released { vgpu: vm }]);
    }

    /// Removes the work of a physical channel that has ended and left the card. Work that ended earlier was already
    /// [completed](Self::complete).
    pub(crate) fn channel_ended(&mut self, vm: TenantId, channel: ChannelId) {
        self.schedule().forget(|held| held.channel == channel);
        self.schedule().several.remove(&channel);
        self.schedule().descheduled.forget(|_, of| of == channel);
        self.feed([Event::ChannelEnded { vgpu: vm, channel: Channel(channel.0.into()) }]);
    }

    /// Detects submissions that have completed, and reports them.
    pub(crate) fn complete(&mut self) {
        let mut ended = self.card.take_ended();
        // Completions on one engine are in order. Those without a time occurred before now, and are sorted last.
        ended.sort_by_key(|(_, at)| at.unwrap_or(Nanos(u64::MAX)));
        let mut events = Vec::new();
        for (submission, ended) in ended {
            let ticket = Ticket(submission.0);
            let Some(held) = self.schedule().held.remove(&ticket) else { continue };
            let since = held.seen.filter(|_| held.stage == Stage::Waiting).map(|(since, _)| since);
            events.extend(self.moved_since(ticket, since));
            events.push(Event::Completed { ticket, ended });
        }
        self.release_idle(&mut events);
        self.unpark(&mut events);
        let kept = self.card.hand_over();
        self.look_at_barred(&mut events);
        if let Some((vgpu, since)) = kept {
            events.push(Event::Kept { engine: Engine::Compute, vgpu, since });
        }
        let deferred = self.next_look_ns();
        if events.is_empty() && deferred.is_some() {
            let now = self.card.card_time();
            self.schedule().arm(now, deferred);
        }
        self.feed(events);
    }

    /// Handles the timer's expiry.
    pub(crate) fn tick(&mut self) {
        self.schedule().disarm();
        // Complete work first, because work that has ended did not exceed its limit.
        if self.next_look_ns().is_some() || self.schedule().scheduler.in_flight() > 0 {
            self.complete();
        }
        if self.schedule().is_contended() || self.any_left_out() {
            self.rest_and_rouse();
            self.look_at_waits(None);
        }
        self.feed([Event::Tick]);
    }

    /// Detects submissions, of one VM or of all VMs, that have become able or unable to run.
    pub fn look_at_waits(&mut self, vm: Option<TenantId>) {
        if vm.is_none() {
            // Skip this step after guests' register writes, because reading the card delays other VMs.
            let moved = self.look_at_engines();
            self.feed(moved);
        }
        let stages = [Stage::Parked, Stage::Started, Stage::Waiting];
        let mut channels = self.schedule().channels_at(&stages);
        channels.extend(self.schedule().descheduled.channels());
        let mut events = Vec::new();
        for (channel, _) in channels.into_iter().filter(|(_, of)| vm.is_none_or(|vm| vm == *of)) {
            self.look_at_channel(channel, &mut events);
        }
        self.release_idle(&mut events);
        let schedule = self.schedule();
        schedule.waiting = schedule.held.values().filter(|held| held.stage == Stage::Waiting).count();
        self.feed(events);
    }

    /// Returns the time until the next poll that was not requested by the scheduler, in ns, if any.
    fn next_look_ns(&mut self) -> Option<u64> {
        let deferred =
            self.card.deferred_ns().or_else(|| (self.any_left_out() || self.any_unready()).then_some(LOOK_NS));
        let now = self.card.card_time();
        deferred.or_else(|| self.schedule().hushed_look_ns(now))
    }

    /// Reports events to the scheduler and executes its decisions, until it makes no more decisions.
    pub(crate) fn feed(&mut self, events: impl IntoIterator<Item = Event>) {
        let mut events: VecDeque<Event> = events.into_iter().collect();
        if events.is_empty() {
            return;
        }
        let now = self.card.card_time();
        let mut decisions = Vec::new();
        while let Some(event) = events.pop_front() {
            let schedule = self.schedule();
            schedule.scheduler.event(now, event, &mut decisions);
            if let Some(recording) = &mut schedule.recording {
                recording.note(now, event, &decisions);
            }
            for decision in decisions.drain(..) {
                self.carry_out(decision, &mut events);
            }
        }
        let deferred = self.next_look_ns();
        self.schedule().arm(now, deferred);
    }

    /// Executes a decision, and appends the resulting events to `events` for the scheduler.
    fn carry_out(&mut self, decision: Decision, events: &mut VecDeque<Event>) {
        let mut told = Vec::new();
        match decision {
            Decision::Start(ticket) => self.start_submission(ticket, &mut told),
            Decision::Kill { vgpu, channel, engine, ran_ns, .. } => {
                let Ok(physical) = u8::try_from(channel.0).map(ChannelId) else { return };
                self.handle_overrun(vgpu, physical, engine, ran_ns, &mut told);
            }
            Decision::Quarantined { vgpu, until } => {
                tracing::warn!(
                    vm = vgpu.0,
                    ?until,
                    "a VM is quarantined because too many of its submissions ran for too long"
                );
            }
            Decision::Released { vgpu } => tracing::info!(vm = vgpu.0, "a VM was released from quarantine"),
        }
        events.extend(told);
    }

    /// Starts a submission in its slice.
    fn start_submission(&mut self, ticket: Ticket, told: &mut Vec<Event>) {
        let descheduled = Event::Withdrawn { ticket };
        let Some(held) = self.schedule().held.get_mut(&ticket) else { return told.push(descheduled) };
        let (channel, again, brief) = (held.channel, held.stage == Stage::Again, held.brief && !held.irq_suppressed);
        held.stage = Stage::Started;
        if again {
            return self.let_back(channel, told);
        }
        if !self.card.start(channel, Submission(ticket.0)) {
            return told.push(descheduled);
        }
        // The end of the work before this fence is noticed together with the end of the fence, so one interrupt is
        // enough for both.
        if brief
            && let Some(before) = self.schedule().started_before(ticket, channel)
            && self.card.suppress_completion_irq(channel, Submission(before.0))
            && let Some(held) = self.schedule().held.get_mut(&before)
        {
            held.irq_suppressed = true;
        }
        // Earlier work of the channel must resume first.
        if self.schedule().descheduled.contains(channel)
            && let Some(held) = self.schedule().held.get_mut(&ticket)
        {
            held.stage = Stage::Descheduled;
            told.push(Event::Waiting { ticket });
        }
    }
}
