//! Model of the card as seen by the feeder, and of the related state of the mediator. All threads wait for changes to
//! the model. The model's clock advances when work completes or the timer expires.

use crate::GuestEvent;
use crate::alarm::Alarm;
use crate::work::card_view::CardView;
use crate::work::feeder::Feeder;
use crate::work::needs::Needs;
use crate::work::schedule::{LOOK_NS, Schedule, Stage};
use channels::{Presence, Submission};
use nvspec::fifo::{ChannelId, VirtualChannelId};
use sched::{Config, Engine, Nanos, Place};
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use vram::TenantId;

/// Selects an element, as part of the checker's schedule.
pub(super) fn choose<T>(from: &[T]) -> Option<&T> {
    if from.is_empty() { None } else { from.get(thread_rng().gen_range(0..from.len())) }
}

/// A channel on the card.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) vm: TenantId,
    pub(super) engine: Engine,
    /// Engine that executes the channel's methods if the channel also has a context for another engine.
    pub(super) works_on: Option<Engine>,
    /// Set if the guest has enabled the channel.
    pub(super) enabled: bool,
    /// Set if the mediator has descheduled the channel.
    descheduled: bool,
    /// Set if the channel waits for a semaphore.
    pub(super) acquires: bool,
    /// Set if the channel blocks the method unit while it waits.
    holds: bool,
    /// Submissions pulled from the guest but not started, each with its length in ns, or `None` if it never completes.
    waiting: VecDeque<(Submission, Option<u64>)>,
}

/// Work on the card.
#[derive(Debug)]
struct Work {
    channel: ChannelId,
    submission: Submission,
    started: u64,
    length: Option<u64>,
}

/// State of the hardware.
#[derive(Debug, Default)]
pub(super) struct Hardware {
    clock: u64,
    /// Time at which the timer expires.
    alarm: Option<u64>,
    pub(super) expired: bool,
    pub(super) signalled: bool,
    /// Set if an interrupt was raised and has not been serviced yet.
    raised: bool,
    pub(super) stopped: bool,
    pub(super) rings: BTreeMap<ChannelId, Ring>,
    engines: [VecDeque<Work>; Engine::COUNT],
    /// Work that each engine has started, which continues even if its channel changes.
    begun: [Option<(ChannelId, Submission)>; Engine::COUNT],
    last_end: [u64; Engine::COUNT],
    busy: [u64; Engine::COUNT],
    /// Completion records that the mediator has not seen, with their card times, sorted by time.
    records: Vec<(ChannelId, Submission, u64)>,
    /// Submission whose completion record the mediator did not trust.
    doubted: Option<Submission>,
    deferred: bool,
    /// Number of submissions in flight per VM, as counted by the guest.
    unfinished: BTreeMap<TenantId, usize>,
    /// VMs with completions that no interrupt has signalled yet.
    news: BTreeSet<TenantId>,
    /// VMs whose guests have received an interrupt.
    pub(super) interrupted: BTreeSet<TenantId>,
    removed: BTreeSet<TenantId>,
}

/// The hardware, which all threads share.
#[derive(Clone, Default)]
pub(super) struct Card(Arc<(Mutex<Hardware>, Condvar)>);

impl Card {
    /// Returns the current hardware state.
    pub(super) fn look(&self) -> MutexGuard<'_, Hardware> {
        self.0.0.lock().expect("no thread has panicked")
    }

    /// Changes the hardware state, and wakes all waiting threads.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Hardware) -> T) -> T {
        let result = change(&mut self.look());
        self.0.1.notify_all();
        result
    }

    /// Waits until `answer` returns a value. Returns `None` if the test has ended.
    pub(super) fn wait<T>(&self, mut answer: impl FnMut(&mut Hardware) -> Option<T>) -> Option<T> {
        let mut hardware = self.look();
        loop {
            if hardware.stopped {
                return None;
            }
            if let Some(answer) = answer(&mut hardware) {
                return Some(answer);
            }
            hardware = self.0.1.wait(hardware).expect("no thread has panicked");
        }
    }

    /// Runs an engine thread, which executes runnable submissions until the test ends.
    pub(super) fn work(&self) {
        while self.wait(Hardware::run_one).is_some() {
            self.0.1.notify_all();
        }
    }

    /// Runs the timer thread. The timer expires at its set time, or later if other threads delay it.
    pub(super) fn expire(&self) {
        let mut expire = |hardware: &mut Hardware| {
            // The timer expires only after all work that ends earlier has completed.
            hardware.alarm.filter(|at| hardware.next_end().is_none_or(|end| end > *at))?;
            hardware.clock = hardware.clock.max(hardware.alarm.take()?);
            hardware.expired = true;
            Some(())
        };
        while self.wait(&mut expire).is_some() {
            self.0.1.notify_all();
            // Yield to threads that do not wait for this one.
            shuttle::thread::yield_now();
        }
    }
}

impl Hardware {
    /// Returns the earliest completion time of the work that engines have started.
    fn next_end(&self) -> Option<u64> {
        let end = |engine: Engine| {
            let (channel, submission) = self.begun[engine.index()]?;
            let mut works = self.engines[engine.index()].iter();
            let work = works.find(|work| (work.channel, work.submission) == (channel, submission))?;
            Some(work.started.max(self.last_end[engine.index()]) + work.length?)
        };
        Engine::ALL.into_iter().filter_map(end).min()
    }

    /// Starts or completes one submission, if possible.
    pub(super) fn run_one(&mut self) -> Option<()> {
        let Self { rings, engines, begun, .. } = self;
        let runs = |work: &Work| {
            rings.get(&work.channel).is_some_and(|ring| ring.enabled && !ring.descheduled && !ring.acquires)
        };
        let able: Vec<_> = Engine::ALL
            .into_iter()
            .filter_map(|engine| {
                let (works, begun) = (&engines[engine.index()], begun[engine.index()]);
                let under_way = |work: &Work| Some((work.channel, work.submission)) == begun;
                let at = works.iter().position(|work| if begun.is_some() { under_way(work) } else { runs(work) })?;
                // Endless work keeps occupying the engine.
                (begun.is_none() || works[at].length.is_some()).then_some((engine, at))
            })
            .collect();
        let (engine, at) = choose(&able).copied()?;
        if self.begun[engine.index()].take().is_none() {
            let work = self.engines[engine.index()].get(at)?;
            self.begun[engine.index()] = Some((work.channel, work.submission));
            return Some(());
        }
        let work = self.engines[engine.index()].remove(at)?;
        let (began, length) = (work.started.max(self.last_end[engine.index()]), work.length?);
        let end = began + length;
        self.clock = self.clock.max(end);
        self.last_end[engine.index()] = end;
        self.busy[engine.index()] += length;
        self.records.push((work.channel, work.submission, end));
        let vm = self.rings[&work.channel].vm;
        self.finish(vm, 1);
        self.news.insert(vm);
        (self.raised, self.signalled) = (true, true);
        Some(())
    }

    /// Advances the clock by `ns` ns.
    pub(super) fn pass(&mut self, ns: u64) {
        self.clock += ns;
    }

    fn finish(&mut self, vm: TenantId, count: usize) {
        *self.unfinished.get_mut(&vm).expect("the VM has submitted work") -= count;
    }

    /// Adds a guest submission to a channel, which must exist.
    pub(super) fn submit(&mut self, channel: ChannelId, submission: Submission, length: Option<u64>) {
        let ring = self.rings.get_mut(&channel).expect("the channel is bound");
        ring.waiting.push_back((submission, length));
        *self.unfinished.entry(ring.vm).or_default() += 1;
    }

    /// Removes a channel from the card, with all of its work.
    fn unbind(&mut self, channel: ChannelId) {
        let Some(ring) = self.rings.remove(&channel) else { return };
        let mut count = ring.waiting.len();
        for (engine, begun) in self.engines.iter_mut().zip(&mut self.begun) {
            let before = engine.len();
            engine.retain(|work| work.channel != channel);
            count += before - engine.len();
            *begun = begun.filter(|(of, _)| *of != channel);
        }
        if count > 0 {
            self.finish(ring.vm, count);
        }
    }

    /// Adds a channel for a VM.
    pub(super) fn bind(&mut self, channel: ChannelId, vm: TenantId, engine: Engine) {
        let holds = thread_rng().gen_bool(0.5);
        let ring = Ring {
            vm,
            engine,
            works_on: None,
            enabled: true,
            descheduled: false,
            acquires: false,
            holds,
            waiting: VecDeque::new(),
        };
        assert!(self.rings.insert(channel, ring).is_none());
    }

    /// Returns true if all of a VM's submissions have completed, as counted by the guest.
    pub(super) fn is_done(&self, vm: TenantId) -> bool {
        self.unfinished.get(&vm).is_none_or(|count| *count == 0)
    }

    /// Returns true if an engine has started a channel's work.
    pub(super) fn has_begun(&self, channel: ChannelId) -> bool {
        self.begun.iter().flatten().any(|(of, _)| *of == channel)
    }

    /// Returns true if a VM was removed.
    pub(super) fn is_removed(&self, vm: TenantId) -> bool {
        self.removed.contains(&vm)
    }

    /// Returns true if the mediator has noticed that all work has completed.
    pub(super) fn is_seen(&self) -> bool {
        self.records.is_empty()
    }

    /// Returns the time that an engine has spent on completed submissions, in ns.
    pub(super) fn busy(&self, engine: Engine) -> u64 {
        self.busy[engine.index()]
    }

    /// Returns true if the timer is armed or has expired.
    fn is_armed(&self) -> bool {
        self.alarm.is_some() || self.expired
    }
}

impl Alarm for Card {
    fn set(&mut self, in_ns: u64) -> io::Result<()> {
        self.change(|hardware| {
            hardware.alarm = Some(hardware.clock + in_ns);
            hardware.expired = false;
        });
        Ok(())
    }

    fn silence(&mut self) -> io::Result<()> {
        self.change(|hardware| hardware.expired = false);
        Ok(())
    }

    fn wake(&mut self) -> io::Result<()> {
        self.change(|hardware| hardware.signalled = true);
        Ok(())
    }
}

/// The mediator's state for the card, protected by the card's lock.
pub(super) struct State {
    pub(super) schedule: Schedule<Card>,
    card: Card,
    submissions: u64,
    /// Time of the last clock read, used as the start time of submissions that start afterwards.
    read: Cell<u64>,
}

impl State {
    pub(super) fn new(config: Config, card: Card) -> Self {
        let schedule = Schedule::new(config, card.clone()).expect("the configuration is valid");
        Self { schedule, card, submissions: 0, read: Cell::new(0) }
    }

    /// Returns the feeder of the card's scheduler.
    pub(super) fn feeder(&mut self) -> Feeder<'_, Self> {
        Feeder::new(self)
    }

    /// Changes the hardware state.
    pub(super) fn change(&self, change: impl FnOnce(&mut Hardware)) {
        self.card.change(change);
    }

    /// Handles a doorbell, unless the channel no longer exists.
    pub(super) fn ring(&mut self, vm: TenantId, channel: ChannelId, length: Option<u64>) {
        if !self.card.look().rings.contains_key(&channel) {
            return;
        }
        let submission = Submission(self.submissions);
        self.submissions += 1;
        self.card.change(|hardware| hardware.submit(channel, submission, length));
        self.feeder().arrived(vm, channel, submission, u32::MAX, Needs::Graphics);
    }

    /// Makes one pass through the interrupt tree. Returns a flag that is true if an interrupt was pending, and the
    /// events to deliver.
    pub(super) fn service(&mut self) -> (bool, Vec<(TenantId, GuestEvent)>) {
        if !self.card.change(|hardware| std::mem::take(&mut hardware.raised)) {
            return (false, Vec::new());
        }
        self.feeder().complete();
        let news = self.card.change(|hardware| std::mem::take(&mut hardware.news));
        (true, news.into_iter().map(|vm| (vm, GuestEvent::NonStall { engine: 0 })).collect())
    }

    /// Models `CardState::retire_channel`.
    pub(super) fn end_channel(&mut self, vm: TenantId, channel: ChannelId) {
        self.feeder().complete();
        self.card.change(|hardware| hardware.unbind(channel));
        self.feeder().channel_ended(vm, channel);
    }

    /// Models `CardState::quiesce`.
    pub(super) fn remove_vm(&mut self, vm: TenantId) {
        self.feeder().complete();
        self.card.change(|hardware| {
            let of_vm = |(channel, ring): (&ChannelId, &Ring)| (ring.vm == vm).then_some(*channel);
            let channels: Vec<_> = hardware.rings.iter().filter_map(of_vm).collect();
            channels.into_iter().for_each(|channel| hardware.unbind(channel));
            hardware.removed.insert(vm);
        });
        self.feeder().unschedule_vm(vm);
    }

    /// Checks the state whenever the card's lock is released: the timer is armed if submissions are queued, and the
    /// records and the scheduler agree on each submission.
    pub(super) fn check(&self) {
        for (ticket, held) in &self.schedule.held {
            let expected = match held.stage {
                Stage::Parked => None,
                Stage::Queued | Stage::Again => Some(Place::Queued),
                Stage::Started => Some(Place::OnEngine),
                Stage::Waiting | Stage::Descheduled => Some(Place::Aside),
            };
            assert_eq!(self.schedule.scheduler().place(*ticket), expected, "{ticket:?}: {held:?}");
        }
        let queued = self.schedule.scheduler().queued();
        assert!(
            queued == 0 || self.card.look().is_armed(),
            "{queued} submissions are queued, but the timer is not armed"
        );
    }
}

impl CardView for State {
    type Alarm = Card;

    fn schedule(&mut self) -> &mut Schedule<Card> {
        &mut self.schedule
    }

    fn card_time(&self) -> Nanos {
        self.read.set(self.card.look().clock);
        Nanos(self.read.get())
    }

    fn wants(&self, channel: ChannelId) -> bool {
        self.card.look().rings.get(&channel).is_some_and(|ring| ring.enabled)
    }

    fn presence(&mut self, channel: ChannelId) -> Presence {
        let hardware = self.card.look();
        let works = hardware.begun.iter().flatten().any(|(of, _)| *of == channel);
        match hardware.rings.get(&channel) {
            _ if works => Presence::Works,
            Some(ring) if ring.acquires => Presence::Acquires,
            _ => Presence::Off,
        }
    }

    /// Returns true for channels that block the method unit while they wait for a semaphore.
    fn holds(&mut self, channel: ChannelId) -> bool {
        self.card.look().rings.get(&channel).is_some_and(|ring| ring.enabled && ring.acquires && ring.holds)
    }

    // This model does not clear PGRAPH between VMs, so it never keeps channels off PGRAPH, and their contexts do not
    // change.

    fn is_shut_out(&self, _: ChannelId) -> bool {
        false
    }

    fn is_left_out(&self, _: ChannelId) -> bool {
        false
    }

    fn closes_graphics(&self, _: ChannelId) -> bool {
        false
    }

    fn is_ready_for(&self, _: ChannelId, _: Needs) -> bool {
        true
    }

    fn make_ready(&mut self, _: ChannelId, _: Needs) -> bool {
        true
    }

    fn hand_over(&mut self) -> Option<(TenantId, Nanos)> {
        None
    }

    /// Returns false: every completion raises an interrupt.
    fn suppress_completion_irq(&mut self, _: ChannelId, _: Submission) -> bool {
        false
    }

    fn needs_ends(&self, _: ChannelId) -> bool {
        false
    }

    fn occupant(&mut self, engine: Engine) -> Option<ChannelId> {
        self.card.look().begun[engine.index()].map(|(channel, _)| channel)
    }

    /// Returns an arbitrary value: a waiting channel may or may not have made progress since the last call.
    fn progress(&mut self, _: ChannelId) -> u64 {
        thread_rng().gen_range(0..2)
    }

    /// Does nothing: before a channel leaves an engine, the engine completes the work that it has started.
    fn ask_to_leave(&mut self, _: ChannelId) {}

    fn withhold(&mut self, channel: ChannelId, descheduled: bool) {
        self.card.change(|hardware| {
            hardware.rings.get_mut(&channel).into_iter().for_each(|ring| ring.descheduled = descheduled);
        });
    }

    fn engines_of(&self, channel: ChannelId) -> [bool; Engine::COUNT] {
        let hardware = self.card.look();
        let ring = &hardware.rings[&channel];
        Engine::ALL.map(|engine| engine == ring.engine || Some(engine) == ring.works_on)
    }

    fn owner(&self, channel: ChannelId) -> Option<(TenantId, VirtualChannelId)> {
        self.card.look().rings.get(&channel).map(|ring| (ring.vm, VirtualChannelId(channel.0)))
    }

    fn start(&mut self, channel: ChannelId, submission: Submission) -> bool {
        let started = self.read.get();
        self.card.change(|hardware| {
            let Hardware { rings, engines, removed, .. } = hardware;
            let ring = rings.get_mut(&channel).expect("removed work is never started");
            assert!(!removed.contains(&ring.vm));
            let (next, length) = ring.waiting.pop_front().expect("no submission is started twice");
            assert_eq!(next, submission, "a channel's submissions start in order");
            let engine = &mut engines[ring.works_on.unwrap_or(ring.engine).index()];
            engine.push_back(Work { channel, submission, started, length });
        });
        true
    }

    fn take_ended(&mut self) -> Vec<(Submission, Option<Nanos>)> {
        self.card.change(|hardware| {
            let mut ended = std::mem::take(&mut hardware.records);
            hardware.deferred = false;
            // The last submission may have completed with a record that the mediator did not trust. The next poll
            // accepts it.
            let doubted = hardware.doubted;
            let doubts =
                |last: &mut (ChannelId, Submission, u64)| doubted != Some(last.1) && thread_rng().gen_bool(0.25);
            if let Some(last) = ended.pop_if(doubts) {
                (hardware.doubted, hardware.deferred) = (Some(last.1), true);
                hardware.records.push(last);
            }
            // Keep the order within each channel.
            ended.sort_by_key(|(channel, ..)| *channel);
            ended.into_iter().map(|(_, submission, at)| (submission, Some(Nanos(at)))).collect()
        })
    }

    fn deferred_ns(&self) -> Option<u64> {
        self.card.look().deferred.then_some(LOOK_NS)
    }

    fn kill(&mut self, vm: TenantId, channel: VirtualChannelId, _: Engine) {
        self.end_channel(vm, ChannelId(channel.0));
    }
}
