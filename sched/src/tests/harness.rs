//! A simulated card that executes the scheduler's decisions. It keeps its own records of each ticket's state and each
//! engine's busy time.

use crate::{Channel, Config, Decision, Engine, Event, Nanos, Scheduler, TenantId, Ticket, VgpuParams};
use std::collections::{BTreeMap, VecDeque};

/// State of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Queued,
    Started,
    Done,
    Dropped,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub(super) ticket: Ticket,
    pub(super) vgpu: TenantId,
    pub(super) channel: Channel,
    pub(super) engine: Engine,
    pub(super) length: u64,
}

/// An engine's submissions with the times at which the card received them, and the end time of the previous submission.
#[derive(Clone, Debug, Default)]
struct Unit {
    work: VecDeque<(u64, Work)>,
    last_end: u64,
}

impl Unit {
    /// Returns the start time and the length of the first submission.
    fn first(&self) -> Option<(u64, u64)> {
        self.work.front().map(|(given, work)| (self.last_end.max(*given), work.length))
    }
}

pub(super) struct Harness {
    pub(super) scheduler: Scheduler,
    pub(super) now: u64,
    pub(super) fates: BTreeMap<Ticket, (Fate, Work)>,
    pub(super) busy: [u64; Engine::COUNT],
    units: [Unit; Engine::COUNT],
    /// Work that waits for something other than its engine.
    pub(super) aside: Vec<Work>,
    tickets: u64,
    /// Delay from the end of a submission to its observation, in ns.
    pub(super) latency: u64,
}

impl Harness {
    pub(super) fn new(config: Config) -> Self {
        let scheduler = Scheduler::new(config, Nanos(0)).unwrap();
        let units = Default::default();
        Self {
            scheduler,
            now: 0,
            fates: BTreeMap::new(),
            busy: [0; 3],
            units,
            aside: Vec::new(),
            tickets: 0,
            latency: 0,
        }
    }

    pub(super) fn add(&mut self, vgpu: u32, params: VgpuParams) {
        self.feed(Event::Added { vgpu: TenantId(vgpu), params });
    }

    /// Sends an event to the scheduler, executes its decisions, and returns them.
    pub(super) fn feed(&mut self, event: Event) -> Vec<Decision> {
        let mut decisions = Vec::new();
        self.scheduler.event(Nanos(self.now), event, &mut decisions);
        for decision in &decisions {
            let Decision::Start(ticket) = decision else { continue };
            let (fate, work) = self.fates.get_mut(ticket).expect("the ticket is known");
            assert_eq!(*fate, Fate::Queued, "{ticket:?} is started twice or after it was dropped");
            *fate = Fate::Started;
            self.units[work.engine.index()].work.push_back((self.now, *work));
        }
        decisions
    }

    pub(super) fn arrive(&mut self, vgpu: u32, channel: u32, engine: Engine, length: u64) -> Vec<Decision> {
        self.tickets += 1;
        let (vgpu, channel, ticket) = (TenantId(vgpu), Channel(channel), Ticket(self.tickets));
        let fate = if self.scheduler.params(vgpu).is_some() { Fate::Queued } else { Fate::Dropped };
        self.fates.insert(ticket, (fate, Work { ticket, vgpu, channel, engine, length }));
        self.feed(Event::Arrival { vgpu, channel, engine, ticket })
    }

    /// Returns the time at which the end of a submission is next observed, and the submission's engine.
    pub(super) fn next_end(&self) -> Option<(u64, Engine)> {
        let end = |engine: Engine| {
            let (since, length) = self.units[engine.index()].first()?;
            Some((since + length + self.latency, engine))
        };
        Engine::ALL.into_iter().filter_map(end).min_by_key(|(at, _)| *at)
    }

    /// Processes the next end or wakeup if it is not after `limit`. Returns the event and the scheduler's decisions.
    pub(super) fn step(&mut self, limit: u64) -> Option<(Event, Vec<Decision>)> {
        let end = self.next_end();
        let wakeup = self.scheduler.next_wakeup().map(|at| at.0.max(self.now));
        let end_first = end.filter(|(at, _)| wakeup.is_none_or(|wakeup| *at <= wakeup));
        let event = match end_first {
            Some((at, engine)) if at <= limit => {
                self.now = at.max(self.now);
                self.end(engine)
            }
            None if wakeup? <= limit => {
                self.now = wakeup?;
                Event::Tick
            }
            _ => return None,
        };
        let decisions = self.feed(event);
        Some((event, decisions))
    }

    fn end(&mut self, engine: Engine) -> Event {
        let unit = &mut self.units[engine.index()];
        let (since, length) = unit.first().expect("the unit has started work");
        unit.last_end = since + length;
        self.busy[engine.index()] += length;
        let ended = Some(Nanos(unit.last_end));
        let (_, work) = unit.work.pop_front().expect("the unit has work");
        self.fates.get_mut(&work.ticket).expect("the work was submitted").0 = Fate::Done;
        Event::Completed { ticket: work.ticket, ended }
    }

    /// Saves and restores the scheduler, and continues with the restored one.
    pub(super) fn restore(&mut self) {
        let bytes = postcard::to_allocvec(&self.scheduler.save()).unwrap();
        let saved = postcard::from_bytes(&bytes).unwrap();
        self.scheduler = Scheduler::restored(saved, Nanos(self.now)).unwrap();
        assert_eq!(postcard::to_allocvec(&self.scheduler.save()).unwrap(), bytes);
    }

    pub(super) fn pass(&mut self, ns: u64) {
        let until = self.now + ns;
        while self.step(until).is_some() {}
        self.now = until;
    }

    /// Reports all unobserved ends, as a feeder does before it reports the end of a channel.
    fn look(&mut self) {
        while let Some((_, engine)) = self.next_end().filter(|(at, _)| *at <= self.now + self.latency) {
            let event = self.end(engine);
            self.feed(event);
        }
    }

    /// Makes a submission on the card wait for something other than its engine.
    pub(super) fn stall(&mut self, ticket: Ticket) -> Vec<Decision> {
        self.look();
        for (unit, busy) in self.units.iter_mut().zip(&mut self.busy) {
            let Some(at) = unit.work.iter().position(|(_, work)| work.ticket == ticket) else { continue };
            let since = unit.first().map_or(self.now, |(since, _)| since);
            let Some((_, mut work)) = unit.work.remove(at) else { continue };
            if at == 0 {
                let used = self.now - since;
                work.length = work.length.saturating_sub(used).max(1);
                *busy += used;
                unit.last_end = self.now;
            }
            self.aside.push(work);
        }
        self.feed(Event::Waiting { ticket })
    }

    /// Resumes the first waiting submission, or completes it if `ended` is true.
    pub(super) fn go_on(&mut self, ended: bool) {
        if self.aside.is_empty() {
            return;
        }
        let work = self.aside.remove(0);
        let ticket = work.ticket;
        if ended {
            self.fates.get_mut(&ticket).expect("the work was submitted").0 = Fate::Done;
            self.feed(Event::Completed { ticket, ended: Some(Nanos(self.now)) });
        } else {
            self.look();
            self.units[work.engine.index()].work.push_back((self.now, work));
            self.feed(Event::Resumed { ticket });
        }
    }

    /// Requeues the first waiting submission.
    pub(super) fn requeue(&mut self) {
        if self.aside.is_empty() {
            return;
        }
        let work = self.aside.remove(0);
        let ticket = work.ticket;
        self.fates.insert(ticket, (Fate::Queued, work));
        self.feed(Event::Requeued { ticket });
    }

    /// Removes work from the card and the queues, as the end of a channel does.
    pub(super) fn take_off(&mut self, gone: impl Fn(&Work) -> bool) {
        for (unit, busy) in self.units.iter_mut().zip(&mut self.busy) {
            let first = unit.first();
            if let Some((since, _)) = first.filter(|_| unit.work.front().is_some_and(|(_, work)| gone(work))) {
                *busy += self.now - since;
                unit.last_end = self.now;
            }
            unit.work.retain(|(_, work)| !gone(work));
        }
        self.aside.retain(|work| !gone(work));
        for (fate, work) in self.fates.values_mut() {
            if matches!(fate, Fate::Queued | Fate::Started) && gone(work) {
                *fate = Fate::Dropped;
            }
        }
    }

    pub(super) fn end_channel(&mut self, vgpu: u32, channel: u32) -> Vec<Decision> {
        let (vgpu, channel) = (TenantId(vgpu), Channel(channel));
        self.look();
        self.take_off(|work| (work.vgpu, work.channel) == (vgpu, channel));
        self.feed(Event::ChannelEnded { vgpu, channel })
    }

    pub(super) fn remove(&mut self, vgpu: u32) -> Vec<Decision> {
        self.look();
        self.take_off(|work| work.vgpu == TenantId(vgpu));
        self.feed(Event::Removed { vgpu: TenantId(vgpu) })
    }

    /// Runs all pending work to completion. Fails if some work would never start.
    pub(super) fn drain(&mut self) {
        while !self.aside.is_empty() {
            self.go_on(false);
        }
        for _ in 0..1_000_000 {
            if self.step(u64::MAX).is_none() {
                break;
            }
        }
        let waits = self.fates.values().filter(|(fate, _)| matches!(fate, Fate::Queued | Fate::Started));
        assert_eq!(waits.count(), 0, "a submission was lost: {:#?}", self.scheduler);
    }

    /// Asserts that the scheduler's accounts match the card's records, and that all submissions have ended.
    pub(super) fn audit(&self) {
        for engine in Engine::ALL {
            let accounts = self.scheduler.vgpus().filter_map(|vgpu| self.scheduler.account(vgpu, engine));
            let accounts: Vec<_> = accounts.collect();
            let used: u64 = accounts.iter().map(|account| account.used).sum();
            let busy = self.busy[engine.index()];
            assert_eq!(used + self.scheduler.departed(engine), busy, "charges differ from the busy time of {engine:?}");
            assert_eq!(self.scheduler.busy(engine), busy);
            for account in accounts {
                assert_eq!(account.arrived, account.completed + account.dropped, "{account:?}");
                assert!(account.started <= account.arrived);
            }
        }
    }
}
