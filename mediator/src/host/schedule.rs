//! A card's scheduler, and what the mediator knows of the submissions that have not ended. What is done with it is
//! [`Feeder`](super::Feeder)'s.

use super::alarm::{Alarm, TimerAlarm};
use super::interrupts::GuestEvent;
use super::record::Recording;
use super::rest::Resting;
use nvspec::fifo::ChannelId;
use sched::{Config, ConfigError, Nanos, Scheduler, Ticket};
use std::collections::{BTreeMap, BTreeSet};
use vram::VmId;

/// Time between two looks at what is in flight, while something waits for its turn. As long as BAND waits for a VM.
const LOOK_NS: u64 = 500_000;

/// Where a submission is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its channel may not run, and the scheduler does not know of it.
    Parked,
    /// It waits for its turn.
    Queued,
    /// The card has it.
    Started,
    /// The card has it, and it waits for something else than an engine.
    Waiting,
}

/// A submission that has not ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    pub(super) vm: VmId,
    pub(super) channel: ChannelId,
    pub(super) stage: Stage,
}

/// A card's scheduler and what it knows the submissions by.
pub struct Schedule<A = TimerAlarm> {
    pub(super) scheduler: Scheduler,
    /// By number, which is the order in which they came.
    pub(super) held: BTreeMap<Ticket, Held>,
    /// Expires when the scheduler is to be called.
    pub(super) alarm: A,
    /// When it does, if it was set and has not expired.
    armed: Option<Nanos>,
    outbox: Vec<(VmId, GuestEvent)>,
    /// Submissions that wait for something else than an engine, as of the last look.
    pub(super) waiting: usize,
    /// Channels that are off the card since they held others up.
    pub(super) resting: Resting,
    /// What an operator wants to have written down.
    pub(super) recording: Option<Recording>,
}

impl<A: Alarm> Schedule<A> {
    /// Of a card without VMs.
    ///
    /// # Errors
    /// When a setting is out of its bounds.
    pub(super) fn new(config: Config, alarm: A) -> Result<Self, ConfigError> {
        let scheduler = Scheduler::new(config, Nanos(0))?;
        Ok(Self {
            scheduler,
            held: BTreeMap::new(),
            alarm,
            armed: None,
            outbox: Vec::new(),
            waiting: 0,
            resting: Resting::default(),
            recording: None,
        })
    }

    /// The scheduler, to look at.
    #[must_use]
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// How many submissions of each VM wait for their turn, and how many the card has.
    pub(super) fn counts(&self) -> BTreeMap<VmId, (usize, usize)> {
        let mut counts: BTreeMap<VmId, (usize, usize)> = BTreeMap::new();
        for held in self.held.values() {
            let (queued, in_flight) = counts.entry(held.vm).or_default();
            match held.stage {
                Stage::Parked => {}
                Stage::Queued => *queued += 1,
                Stage::Started | Stage::Waiting => *in_flight += 1,
            }
        }
        counts
    }

    /// Has the interrupt thread deliver an event.
    pub(super) fn post(&mut self, vm: VmId, event: GuestEvent) {
        self.outbox.push((vm, event));
        if let Err(error) = self.alarm.wake() {
            tracing::error!(%error, "the card's interrupt thread cannot be woken");
        }
    }

    /// Events for guests that came about since the last call.
    pub(super) fn take_outbox(&mut self) -> Vec<(VmId, GuestEvent)> {
        std::mem::take(&mut self.outbox)
    }

    /// Has the alarm go off when the scheduler wants to be called, or when what is in flight is to be looked at. `deferred`:
    /// an end is to be looked for.
    pub(super) fn arm(&mut self, now: Nanos, deferred: bool) {
        let look = (deferred || self.is_contended()).then(|| now.after(LOOK_NS));
        let Some(next) = self.scheduler.next_wakeup().into_iter().chain(look).min() else { return };
        // To be called too early costs less than to set the timer for each submission.
        if self.armed.is_some_and(|armed| armed <= next) {
            return;
        }
        match self.alarm.set(next.since(now)) {
            Ok(()) => self.armed = Some(next),
            Err(error) => tracing::error!(%error, "the scheduler's timer cannot be set; work may start late"),
        }
    }

    /// The alarm has gone off: it is silent until it is set anew.
    pub(super) fn disarm(&mut self) {
        self.armed = None;
        if let Err(error) = self.alarm.silence() {
            tracing::error!(%error, "the scheduler's timer cannot be read");
        }
    }

    /// Whether what is in flight is to be looked at: something waits for its turn because of it, or it may be held up by what
    /// was set aside.
    pub(super) fn is_contended(&self) -> bool {
        self.scheduler.in_flight() > 0 && (self.waiting > 0 || self.scheduler.queued() > 0) || !self.resting.is_empty()
    }

    /// Channels with a submission that was set aside, each once, with their VMs.
    pub(super) fn waiting_channels(&self) -> BTreeSet<(VmId, ChannelId)> {
        let waiting = self.held.values().filter(|held| held.stage == Stage::Waiting);
        waiting.map(|held| (held.vm, held.channel)).collect()
    }
}
