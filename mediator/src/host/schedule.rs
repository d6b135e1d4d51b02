//! Which submission the card gets when: the scheduler of a card, told what happens, and what it decides carried out.
//!
//! A doorbell puts a submission into a channel's ring on the card ([`Channels::pull`]) and is an arrival here; when its turn
//! comes, on whichever thread brings that about, the card may fetch it. The end of it is its completion record, with the
//! card's time.
//!
//! A submission that cannot run does not hold up others. One whose channel the guest has not enabled or listed is no
//! arrival before it has; one that started and then waits (for a semaphore, or since its guest stopped the channel) leaves
//! the engine to others. The latter is looked for while someone waits for an engine, and if it holds the others up all the same,
//! its channel [rests](super::rest).

use super::interrupts::GuestEvent;
use super::record::Recording;
use super::registry::HostState;
use super::rest::Resting;
use super::{HostError, time};
use channels::{Channels, Submission};
use nvspec::fifo::{ChannelId, VirtualChannelId, engine};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use sched::{Channel, Config, Decision, Engine, Event, Nanos, Scheduler, Ticket, VgpuId, VgpuParams};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::OwnedFd;
use vmm_sys_util::eventfd::EventFd;
use vram::VmId;

/// Time between two looks at what is in flight, while something waits for its turn. As long as BAND waits for a VM.
const LOOK_NS: u64 = 500_000;

const NS_PER_S: u64 = 1_000_000_000;

/// Where a submission is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
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
struct Held {
    vm: VmId,
    channel: ChannelId,
    stage: Stage,
}

/// A card's scheduler and what it knows the submissions by.
pub struct Schedule {
    scheduler: Scheduler,
    /// By number, which is the order in which they came.
    held: BTreeMap<Ticket, Held>,
    /// Expires when the scheduler is to be called.
    timer: OwnedFd,
    /// When it does, if it was set and has not expired.
    armed: Option<Nanos>,
    /// Wakes the interrupt thread, which delivers what is in the outbox.
    wake: EventFd,
    outbox: Vec<(VmId, GuestEvent)>,
    /// By how many ns the card's clock is ahead of the host's.
    ahead_ns: i64,
    /// Submissions that wait for something else than an engine, as of the last look.
    waiting: usize,
    /// Channels that are off the card since they held others up.
    pub(super) resting: Resting,
    /// What an operator wants to have written down.
    pub(super) recording: Option<Recording>,
}

impl Schedule {
    pub(super) fn new(config: Config, wake: EventFd) -> Result<Self, HostError> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)
            .map_err(|error| HostError::Refused(format!("no timer for the scheduler: {error}")))?;
        let scheduler = Scheduler::new(config, Nanos(0)).map_err(|error| HostError::Refused(error.to_string()))?;
        Ok(Self {
            scheduler,
            held: BTreeMap::new(),
            timer,
            armed: None,
            wake,
            outbox: Vec::new(),
            ahead_ns: 0,
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

    /// Another descriptor of the timer, to wait for.
    pub(super) fn timer_fd(&self) -> std::io::Result<OwnedFd> {
        self.timer.try_clone()
    }

    /// Events for guests that came about since the last call.
    pub(super) fn take_outbox(&mut self) -> Vec<(VmId, GuestEvent)> {
        std::mem::take(&mut self.outbox)
    }

    /// Has the timer expire when the scheduler wants to be called, or when what is in flight is to be looked at. `deferred`:
    /// an end is to be looked for.
    fn arm(&mut self, now: Nanos, deferred: bool) {
        let look = (deferred || self.is_contended()).then(|| now.after(LOOK_NS));
        let Some(next) = self.scheduler.next_wakeup().into_iter().chain(look).min() else { return };
        // To be called too early costs less than to set the timer for each submission.
        if self.armed.is_some_and(|armed| armed <= next) {
            return;
        }
        // A time of zero would switch it off.
        let in_ns = next.since(now).max(1);
        let it_value = Timespec {
            tv_sec: i64::try_from(in_ns / NS_PER_S).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(in_ns % NS_PER_S).unwrap_or(0),
        };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value };
        match timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once) {
            Ok(_) => self.armed = Some(next),
            Err(error) => tracing::error!(%error, "the scheduler's timer cannot be set; work may start late"),
        }
    }

    /// The timer has expired: it is silent until it is set anew.
    fn disarm(&mut self) {
        self.armed = None;
        let mut expirations = [0; 8];
        // There is nothing to read if it was set anew since it woke the interrupt thread.
        if let Err(error) = rustix::io::read(&self.timer, &mut expirations).map(drop)
            && error != rustix::io::Errno::AGAIN
        {
            tracing::error!(%error, "the scheduler's timer cannot be read");
        }
    }

    /// Whether what is in flight is to be looked at: something waits for its turn because of it, or it may be held up by what
    /// was set aside.
    fn is_contended(&self) -> bool {
        self.scheduler.in_flight() > 0 && (self.waiting > 0 || self.scheduler.queued() > 0) || !self.resting.is_empty()
    }

    /// Channels with a submission that was set aside, each once, with their VMs.
    pub(super) fn waiting_channels(&self) -> BTreeSet<(VmId, ChannelId)> {
        let waiting = self.held.values().filter(|held| held.stage == Stage::Waiting);
        waiting.map(|held| (held.vm, held.channel)).collect()
    }
}

/// The engine whose time a channel's work is charged to: that of its only context, PGRAPH when it has several or none.
fn engine_of(channels: &Channels, channel: ChannelId) -> Engine {
    match channels.contexts(channel) {
        [false, true, false] => Engine::Copy0,
        [false, false, true] => Engine::Copy1,
        _ => Engine::Compute,
    }
}

/// The card's number of an engine.
fn number_of(engine: Engine) -> u32 {
    match engine {
        Engine::Compute => engine::GR,
        Engine::Copy0 => engine::CE0,
        Engine::Copy1 => engine::CE1,
    }
}

/// A VM as the scheduler numbers it.
pub(super) fn vgpu(vm: VmId) -> VgpuId {
    VgpuId(vm.0)
}

impl HostState {
    /// A VM takes part, with a share of the card's time.
    pub(super) fn schedule_vm(&mut self, vm: VmId, params: VgpuParams) {
        self.feed([Event::Added { vgpu: vgpu(vm), params }]);
    }

    /// Nothing of a VM is on the card any more.
    pub(super) fn unschedule_vm(&mut self, vm: VmId) {
        self.schedule.held.retain(|_, held| held.vm != vm);
        self.schedule.resting.forget(|of, _| of == vm);
        self.feed([Event::Removed { vgpu: vgpu(vm) }]);
    }

    /// Changes what a VM may have, from now on.
    pub fn set_share(&mut self, vm: VmId, params: VgpuParams) {
        self.feed([Event::Changed { vgpu: vgpu(vm), params }]);
    }

    /// Changes how the card is shared, from now on. What waits and what runs goes on.
    pub fn set_scheduler(&mut self, config: Config) {
        self.feed([Event::Configured(config)]);
    }

    /// Lets a VM out of quarantine.
    pub fn release_vm(&mut self, vm: VmId) {
        self.feed([Event::Released { vgpu: vgpu(vm) }]);
    }

    /// A submission is in the ring of a VM's physical channel, to be started when its turn comes.
    pub fn arrived(&mut self, vm: VmId, channel: ChannelId, submission: Submission) {
        let ticket = Ticket(submission.0);
        let runs = self.channels.may_run(channel);
        let stage = if runs { Stage::Queued } else { Stage::Parked };
        self.schedule.held.insert(ticket, Held { vm, channel, stage });
        if runs {
            self.feed([self.arrival(ticket, vm, channel)]);
        }
    }

    fn arrival(&self, ticket: Ticket, vm: VmId, channel: ChannelId) -> Event {
        let engine = engine_of(&self.channels, channel);
        Event::Arrival { vgpu: vgpu(vm), channel: Channel(channel.0.into()), engine, ticket }
    }

    /// A physical channel is off the card, with all that it had. What of it had ended before was [completed](Self::complete).
    pub(super) fn channel_ended(&mut self, vm: VmId, channel: ChannelId) {
        self.schedule.held.retain(|_, held| held.channel != channel);
        self.schedule.resting.forget(|_, of| of == channel);
        self.feed([Event::ChannelEnded { vgpu: vgpu(vm), channel: Channel(channel.0.into()) }]);
    }

    /// Looks which submissions have ended.
    pub(super) fn complete(&mut self) {
        let now_ns = self.now_ns();
        // Where one VM is alone, no one else pays for what it forges.
        let shared = self.vms.len() > 1;
        let mut completions = self.channels.completed(&mut self.vram.memory, now_ns, shared);
        // Those of one engine in their order; without a time it has ended by now.
        completions.sort_by_key(|completion| completion.card_time_ns.unwrap_or(u64::MAX));
        let events: Vec<Event> = completions
            .iter()
            .map(|completion| (Ticket(completion.submission.0), completion.card_time_ns.map(Nanos)))
            .filter(|(ticket, _)| self.schedule.held.remove(ticket).is_some())
            .map(|(ticket, ended)| Event::Completed { ticket, ended })
            .collect();
        if events.is_empty() && self.channels.is_deferred() {
            let now = self.card_time();
            self.schedule.arm(now, true);
        }
        self.feed(events);
    }

    /// The card's time, by the host's clock and what was between them when [`Self::set_clock`] was called last.
    pub(super) fn card_time(&self) -> Nanos {
        Nanos(self.now_ns().saturating_add_signed(self.schedule.ahead_ns))
    }

    /// Looks how far the card's clock is ahead of the host's. To be called often enough for what they may differ in speed:
    /// a ten-thousandth is 10 us in 100 ms.
    pub(super) fn set_clock(&mut self) {
        let card = time::now_ns(&**self.vram.memory.card());
        let host = self.now_ns();
        self.schedule.ahead_ns = i64::try_from(i128::from(card) - i128::from(host)).unwrap_or(0);
    }

    /// The timer has expired.
    pub(super) fn tick(&mut self) {
        self.schedule.disarm();
        if self.channels.is_deferred() {
            self.complete();
        }
        if self.schedule.is_contended() {
            self.rest_and_rouse();
            self.look_at_waits(None);
        }
        self.feed([Event::Tick]);
    }

    /// Sees which submissions (of a VM, or of all) can run that could not, and the other way round.
    pub fn look_at_waits(&mut self, vm: Option<VmId>) {
        let Self { vram, channels, schedule, .. } = self;
        let mut seen: BTreeMap<ChannelId, (bool, bool)> = BTreeMap::new();
        let mut changed = Vec::new();
        let concerned = |held: &Held| vm.is_none_or(|vm| vm == held.vm) && held.stage != Stage::Queued;
        for (ticket, held) in schedule.held.iter_mut().filter(|(_, held)| concerned(held)) {
            let (runs, acquires) = *seen.entry(held.channel).or_insert_with(|| {
                let runs = channels.may_run(held.channel);
                (runs, runs && channels.acquires(&mut vram.memory, held.channel))
            });
            let stage = match held.stage {
                Stage::Parked if runs => Stage::Queued,
                Stage::Started if !runs || acquires => Stage::Waiting,
                Stage::Waiting if runs && !acquires => Stage::Started,
                same => same,
            };
            if std::mem::replace(&mut held.stage, stage) != stage {
                changed.push((*ticket, *held));
            }
        }
        schedule.waiting = schedule.held.values().filter(|held| held.stage == Stage::Waiting).count();
        let events: Vec<Event> = changed
            .into_iter()
            .map(|(ticket, Held { vm, channel, stage })| match stage {
                Stage::Waiting => Event::Waiting { ticket },
                Stage::Started => Event::Resumed { ticket },
                Stage::Queued | Stage::Parked => self.arrival(ticket, vm, channel),
            })
            .collect();
        self.feed(events);
    }

    /// Tells the scheduler, and does what it decides, and so on until it has nothing more to say.
    fn feed(&mut self, events: impl IntoIterator<Item = Event>) {
        let mut events: VecDeque<Event> = events.into_iter().collect();
        if events.is_empty() {
            return;
        }
        let now = self.card_time();
        let mut decisions = Vec::new();
        while let Some(event) = events.pop_front() {
            self.schedule.scheduler.event(now, event, &mut decisions);
            if let Some(recording) = &mut self.schedule.recording {
                recording.note(now, event, &decisions);
            }
            for decision in decisions.drain(..) {
                events.extend(self.carry_out(decision));
            }
        }
        self.schedule.arm(now, self.channels.is_deferred());
    }

    /// Returns what the scheduler is to be told of it.
    fn carry_out(&mut self, decision: Decision) -> Option<Event> {
        match decision {
            Decision::Start(ticket) => {
                let Some(held) = self.schedule.held.get_mut(&ticket) else {
                    return Some(Event::Withdrawn { ticket });
                };
                held.stage = Stage::Started;
                let channel = held.channel;
                let started = self.channels.start(&mut self.vram.memory, channel, Submission(ticket.0));
                (!started).then_some(Event::Withdrawn { ticket })
            }
            Decision::Kill { channel, engine, ran_ns, .. } => {
                let physical = ChannelId(u8::try_from(channel.0).ok()?);
                let (vm, channel) = self.channels.by_physical(physical)?;
                let ran_ms = ran_ns / 1_000_000;
                tracing::warn!(vm = vm.0, ?channel, ?engine, ran_ms, "a submission runs for longer than it may");
                self.kill(VmId(vm.0), channel, number_of(engine));
                None
            }
            Decision::Quarantined { vgpu, until } => {
                tracing::warn!(vm = vgpu.0, ?until, "a VM is quarantined: its submissions ran for too long, too often");
                None
            }
            Decision::Released { vgpu } => {
                tracing::info!(vm = vgpu.0, "a VM is out of quarantine");
                None
            }
        }
    }

    /// Kills a channel that holds an engine; its guest is told by the interrupt thread.
    fn kill(&mut self, vm: VmId, channel: VirtualChannelId, engine: u32) {
        if let Err(error) = self.kill_channel(vm, channel, engine) {
            tracing::error!(%vm, ?channel, %error, "a channel that was killed stays on the card");
        }
        self.schedule.outbox.push((vm, GuestEvent::Hang { engine, channel }));
        if let Err(error) = self.schedule.wake.write(1) {
            tracing::error!(%error, "the card's interrupt thread cannot be woken");
        }
    }
}
