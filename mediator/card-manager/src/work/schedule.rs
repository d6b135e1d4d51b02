//! A card's scheduler, and the records of submissions in flight that [`Feeder`](super::feeder::Feeder) uses.

use super::descheduled::DescheduledChannels;
use super::needs::Needs;
use crate::alarm::{Alarm, TimerAlarm};
use crate::tenants::GuestEvent;
use nvspec::fifo::ChannelId;
use sched::{Config, ConfigError, Engine, Event, Nanos, Scheduler, Ticket};
use std::collections::{BTreeMap, BTreeSet};
use vram::TenantId;

/// Poll interval for work in flight while other work waits for a slice, in ns. Equals BAND's wait for a VM.
pub(crate) const LOOK_NS: u64 = 500_000;

/// Stage of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The channel may not run, and the submission was not passed to the scheduler.
    Parked,
    /// The submission waits for a slice.
    Queued,
    /// The submission is on the card.
    Started,
    /// The submission is on the card and waits for a semaphore; no engine executes its channel.
    Waiting,
    /// The submission is on the card, but its channel is [descheduled](super::descheduled).
    Descheduled,
    /// The submission waits for a slice in which its work on the card can resume.
    Again,
}

/// A submission in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrackedSubmission {
    pub(crate) vm: TenantId,
    pub(crate) channel: ChannelId,
    pub(crate) stage: Stage,
    /// Time at which the guest submitted the work, on the card's clock.
    pub(crate) arrived: Nanos,
    /// Time of the last poll that found the submission waiting for a semaphore, and its progress at that time.
    pub(crate) seen: Option<(Nanos, u64)>,
    /// Set if the channel has worked between waits more often than permitted.
    pub(crate) hopped: bool,
    /// Time at which the submission was first observed on an engine, plus any later time that it spent off the engines.
    pub(crate) on_engine: Option<Nanos>,
    /// Set if the submission's completion raises no interrupt.
    pub(crate) irq_suppressed: bool,
    /// Set if the submission has only a few dwords, like a fence after other work.
    pub(crate) brief: bool,
    /// Engines that the submission needs, as far as its push buffers show.
    pub(crate) needs: Needs,
}

/// A card's scheduler, and the submissions in flight.
pub struct Schedule<A = TimerAlarm> {
    pub(crate) scheduler: Scheduler,
    /// Submissions in flight. Tickets are in order of arrival.
    pub(crate) held: BTreeMap<Ticket, TrackedSubmission>,
    /// Alarm that expires when the scheduler must run.
    pub(crate) alarm: A,
    /// Expiry time of the alarm if it is armed.
    pub(super) armed: Option<Nanos>,
    pub(crate) outbox: Vec<(TenantId, GuestEvent)>,
    /// Number of submissions that were waiting for a semaphore at the last poll.
    pub(crate) waiting: usize,
    /// Channels whose work is kept off the card.
    pub(crate) descheduled: DescheduledChannels,
    /// Submissions on the card with channels that are kept off PGRAPH until their VM uses PGRAPH again. They are not
    /// booked on any engine in the scheduler.
    pub(crate) barred: BTreeSet<Ticket>,
    /// Channels that could run on several engines, each with the engine on which it was last observed.
    pub(crate) several: BTreeMap<ChannelId, Option<Engine>>,
    /// Time of the last poll of the channels on the engines.
    pub(super) looked: Nanos,
    /// VMs whose overdue work was logged, with the time of the log message.
    pub(crate) told: BTreeMap<TenantId, Nanos>,
    /// Recording started by the operator, if any.
    pub(crate) recording: Option<sched::trace::Recording>,
}

impl<A: Alarm> Schedule<A> {
    /// Creates the schedule of a card without VMs.
    ///
    /// # Errors
    /// Returns an error if a setting is out of bounds.
    pub(crate) fn new(config: Config, alarm: A) -> Result<Self, ConfigError> {
        let scheduler = Scheduler::new(config, Nanos(0))?;
        Ok(Self {
            scheduler,
            held: BTreeMap::new(),
            alarm,
            armed: None,
            outbox: Vec::new(),
            waiting: 0,
            descheduled: DescheduledChannels::default(),
            barred: BTreeSet::new(),
            several: BTreeMap::new(),
            looked: Nanos(0),
            told: BTreeMap::new(),
            recording: None,
        })
    }

    /// Returns the scheduler.
    #[must_use]
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Returns each VM's numbers of queued submissions and of submissions on the card.
    pub(crate) fn counts(&self) -> BTreeMap<TenantId, (usize, usize)> {
        let mut counts: BTreeMap<TenantId, (usize, usize)> = BTreeMap::new();
        for held in self.held.values() {
            let (queued, in_flight) = counts.entry(held.vm).or_default();
            match held.stage {
                Stage::Parked => {}
                Stage::Queued | Stage::Again => *queued += 1,
                Stage::Started | Stage::Waiting | Stage::Descheduled => *in_flight += 1,
            }
        }
        counts
    }

    /// Returns the time until the next poll for work that raises no interrupt, if the card has any, in ns. The interval
    /// grows with the age of the work, which may be waiting for its guest.
    pub(crate) fn hushed_look_ns(&self, now: Nanos) -> Option<u64> {
        let irq_suppressed = self
            .held
            .values()
            .filter(|held| held.irq_suppressed && matches!(held.stage, Stage::Started | Stage::Waiting));
        irq_suppressed.map(|held| (now.since(held.arrived) / 8).max(LOOK_NS)).min()
    }

    /// Queues an event, and makes the interrupt thread deliver it.
    pub(crate) fn post(&mut self, vm: TenantId, event: GuestEvent) {
        self.outbox.push((vm, event));
        if let Err(error) = self.alarm.wake() {
            tracing::error!(%error, "cannot wake the card's interrupt thread");
        }
    }

    /// Returns and clears the guest events posted since the last call.
    pub(crate) fn take_outbox(&mut self) -> Vec<(TenantId, GuestEvent)> {
        std::mem::take(&mut self.outbox)
    }

    /// Arms the alarm for the scheduler's next wake-up or for the next poll of work in flight. `deferred` is the time
    /// until another poll is due, in ns.
    pub(crate) fn arm(&mut self, now: Nanos, deferred: Option<u64>) {
        let contended = self.is_contended().then_some(LOOK_NS);
        let look = deferred.into_iter().chain(contended).min().map(|ns| now.after(ns));
        let Some(next) = self.scheduler.next_wakeup().into_iter().chain(look).min() else { return };
        // A wake-up that is too early costs less than setting the timer for each submission.
        if self.armed.is_some_and(|armed| armed <= next) {
            return;
        }
        match self.alarm.set(next.since(now)) {
            Ok(()) => self.armed = Some(next),
            Err(error) => tracing::error!(%error, "cannot set the scheduler's timer; work may start late"),
        }
    }

    /// Clears the expired alarm, which does not expire again until it is armed again.
    pub(crate) fn disarm(&mut self) {
        self.armed = None;
        if let Err(error) = self.alarm.silence() {
            tracing::error!(%error, "cannot read the scheduler's timer");
        }
    }

    /// Returns true if the card must be polled: work in flight delays other work, a resting channel waits for its next
    /// poll, or the engine of work in flight must be observed.
    pub(crate) fn is_contended(&self) -> bool {
        self.scheduler.in_flight() > 0 && (self.waiting > 0 || self.scheduler.queued() > 0)
            || self.descheduled.any_rests()
            || self.scheduler.in_flight() > 1 && self.any_of_several()
    }

    /// Records, at the arrival of work, whether a channel's work can run on several engines.
    pub(crate) fn note_engines(&mut self, channel: ChannelId, engines: [bool; Engine::COUNT]) {
        if engines.iter().filter(|can| **can).count() > 1 {
            self.several.entry(channel).or_default();
        } else {
            self.several.remove(&channel);
        }
    }

    /// Returns the engine on which a channel's work is booked. If the channel could run on several engines and was
    /// observed on one, this is the engine on which it was last observed. Otherwise, it is the channel's first engine.
    pub(crate) fn engine_for(&self, channel: ChannelId, engines: [bool; Engine::COUNT]) -> Engine {
        let seen = self.several.get(&channel).copied().flatten();
        let first = || Engine::ALL.into_iter().find(|engine| engines[engine.index()]);
        seen.or_else(first).unwrap_or(Engine::Compute)
    }

    /// Returns true if a channel that could run on several engines has work on the card.
    pub(crate) fn any_of_several(&self) -> bool {
        let works = |held: &TrackedSubmission| held.stage == Stage::Started && self.several.contains_key(&held.channel);
        !self.several.is_empty() && self.held.values().any(works)
    }

    /// Records that an engine executes a channel. Returns true if the channel could run on several engines and is
    /// booked on another one.
    pub(crate) fn is_elsewhere(&mut self, channel: ChannelId, engine: Engine) -> bool {
        let Some(seen) = self.several.get_mut(&channel) else { return false };
        *seen = Some(engine);
        let Some(ticket) = self.first_of(channel, &[Stage::Started]) else { return false };
        self.scheduler.engine_of(ticket).is_some_and(|booked| booked != engine)
    }

    /// Removes submissions that will never complete.
    pub(crate) fn forget(&mut self, gone: impl Fn(&TrackedSubmission) -> bool) {
        self.held.retain(|_, held| !gone(held));
        // Also remove the engines of these channels. The next user of a channel number reports its engines again.
        let Self { several, held, .. } = self;
        several.retain(|channel, _| held.values().any(|held| held.channel == *channel));
    }

    /// Returns the channel of each submission that waits for a semaphore. A channel may appear several times.
    pub(crate) fn waiting_channels(&self) -> impl Iterator<Item = ChannelId> + '_ {
        self.held.values().filter(|held| held.stage == Stage::Waiting).map(|held| held.channel)
    }

    /// Returns each channel that has a submission at one of these stages, with the channel's VM.
    pub(crate) fn channels_at(&self, stages: &[Stage]) -> BTreeMap<ChannelId, TenantId> {
        let held = self.held.values().filter(|held| stages.contains(&held.stage));
        held.map(|held| (held.channel, held.vm)).collect()
    }

    /// Returns true if any submission on these channels is at one of these stages.
    pub(crate) fn any_at(&self, stages: &[Stage], channels: &[ChannelId]) -> bool {
        self.held.values().any(|held| stages.contains(&held.stage) && channels.contains(&held.channel))
    }

    /// Returns a channel's first submission at one of these stages.
    pub(crate) fn first_of(&self, channel: ChannelId, stages: &[Stage]) -> Option<Ticket> {
        let mut held = self.held.iter();
        held.find(|(_, held)| held.channel == channel && stages.contains(&held.stage)).map(|(ticket, _)| *ticket)
    }

    /// Returns the submissions in flight on a channel that precede the given one.
    pub(crate) fn before(
        &self,
        ticket: Ticket,
        channel: ChannelId,
    ) -> impl DoubleEndedIterator<Item = &TrackedSubmission> {
        self.held.range(..ticket).map(|(_, held)| held).filter(move |held| held.channel == channel)
    }

    /// Returns the submission that precedes the given one on the same channel, if it is on the card and its completion
    /// raises an interrupt.
    pub(crate) fn started_before(&self, ticket: Ticket, channel: ChannelId) -> Option<Ticket> {
        let before = self.held.range(..ticket).rev().find(|(_, held)| held.channel == channel);
        before.filter(|(_, held)| held.stage == Stage::Started && !held.irq_suppressed).map(|(ticket, _)| *ticket)
    }

    /// Records that a channel's work is kept off the card, and appends the events for the scheduler.
    ///
    /// Submissions on an engine are deferred in the scheduler, too. Otherwise, they would stay there without ever
    /// completing, and would block the engine for all VMs.
    pub(crate) fn withhold_started(&mut self, channel: ChannelId, events: &mut Vec<Event>) {
        for (ticket, held) in self.held.iter_mut().filter(|(_, held)| held.channel == channel) {
            match held.stage {
                Stage::Started if self.barred.remove(ticket) => {}
                Stage::Started => events.push(Event::Waiting { ticket: *ticket }),
                Stage::Waiting => {}
                Stage::Parked | Stage::Queued | Stage::Descheduled | Stage::Again => continue,
            }
            (held.stage, held.hopped, held.on_engine) = (Stage::Descheduled, false, None);
        }
    }

    /// Records the channels that engines are executing. For all other channels, the time since the last poll does not
    /// count as time on an engine.
    pub(crate) fn note_occupants(&mut self, occupants: &[ChannelId], now: Nanos) {
        let elapsed = now.since(std::mem::replace(&mut self.looked, now));
        for held in self.held.values_mut().filter(|held| !occupants.contains(&held.channel)) {
            held.on_engine = held.on_engine.map(|since| since.after(elapsed));
        }
        for channel in occupants {
            self.seen_since(*channel, now);
        }
    }

    /// Returns the `on_engine` time of a channel's first started submission. Sets it to `now` if the submission was not
    /// observed on an engine before.
    pub(crate) fn seen_since(&mut self, channel: ChannelId, now: Nanos) -> Option<Nanos> {
        let ticket = self.first_of(channel, &[Stage::Started])?;
        self.held.get_mut(&ticket).map(|held| *held.on_engine.get_or_insert(now))
    }

    /// If all of a channel's work was waiting or descheduled, records that an engine executes the channel. Returns the
    /// event for the scheduler, if any.
    pub(crate) fn bring_back(&mut self, channel: ChannelId) -> Option<Event> {
        if self.first_of(channel, &[Stage::Started]).is_some() {
            return None;
        }
        let ticket = self.first_of(channel, &[Stage::Waiting, Stage::Descheduled])?;
        self.held.get_mut(&ticket)?.stage = Stage::Started;
        Some(Event::Resumed { ticket })
    }
}
