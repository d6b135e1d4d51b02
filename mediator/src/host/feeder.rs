//! Which submission the card gets when: the scheduler of a card, told what happens, and what it decides carried out.
//!
//! A doorbell puts a submission into a channel's ring on the card ([`channels::Channels::pull`]) and is an arrival here;
//! when its turn comes, on whichever thread brings that about, the card may fetch it. The end of it is its completion
//! record, with the card's time.
//!
//! A submission that cannot run does not hold up others. One whose channel the guest has not enabled or listed is no
//! arrival before it has; one that started and then waits (for a semaphore, or since its guest stopped the channel) leaves
//! the engine to others. The latter is looked for while someone waits for an engine, and if it holds the others up all the
//! same, its channel [rests](super::rest).

use super::alarm::{Alarm, TimerAlarm};
use super::copier::COPIER;
use super::interrupts::GuestEvent;
use super::registry::HostState;
use super::schedule::{Held, Schedule, Stage};
use super::time;
use channels::Submission;
use nvspec::fifo::{ChannelId, VirtualChannelId, engine};
use sched::{Channel, Config, Decision, Engine, Event, Nanos, Ticket, VgpuId, VgpuParams};
use std::collections::{BTreeMap, VecDeque};
use vram::VmId;

/// Who tells a card's scheduler what happens, and does what it decides: the state of a card, under its lock.
///
/// What the card does is asked for by the methods without a body; tests have a card of their own behind them.
pub trait Feeder {
    /// What brings the interrupt thread back.
    type Alarm: Alarm;

    /// The scheduler, with what is known of its submissions.
    fn schedule(&mut self) -> &mut Schedule<Self::Alarm>;

    /// The card's time. It never goes back.
    fn card_time(&self) -> Nanos;

    /// Whether the card may schedule a channel.
    fn may_run(&self, channel: ChannelId) -> bool;

    /// Whether a channel that may run waits for a semaphore.
    fn acquires(&mut self, channel: ChannelId) -> bool;

    /// The engine whose time a channel's work is charged to.
    fn engine_of(&self, channel: ChannelId) -> Engine;

    /// Whose a channel of the card is, and as what its guest knows it.
    fn owner(&self, channel: ChannelId) -> Option<(VmId, VirtualChannelId)>;

    /// Lets the card fetch a submission, with those of the channel that came before. `false` when there is none any more.
    fn start(&mut self, channel: ChannelId, submission: Submission) -> bool;

    /// Submissions that have ended since the last call, with the card's time of that if it is known.
    fn take_ended(&mut self) -> Vec<(Submission, Option<Nanos>)>;

    /// Whether the last call of [`Self::take_ended`] is to be repeated soon, without an interrupt.
    fn is_deferred(&self) -> bool;

    /// Takes a channel that holds an engine for too long off the card, and says so ([`Self::channel_ended`]).
    fn kill(&mut self, vm: VmId, channel: VirtualChannelId, engine: Engine);

    /// Has channels rest that wait and hold others up, and lets one of them look again.
    fn rest_and_rouse(&mut self);

    /// A VM takes part, with a share of the card's time.
    fn schedule_vm(&mut self, vm: VmId, params: VgpuParams) {
        self.feed([Event::Added { vgpu: vgpu(vm), params }]);
    }

    /// Nothing of a VM is on the card any more.
    fn unschedule_vm(&mut self, vm: VmId) {
        self.schedule().held.retain(|_, held| held.vm != vm);
        self.schedule().resting.forget(|of, _| of == vm);
        self.feed([Event::Removed { vgpu: vgpu(vm) }]);
    }

    /// Changes what a VM may have, from now on.
    fn set_share(&mut self, vm: VmId, params: VgpuParams) {
        self.feed([Event::Changed { vgpu: vgpu(vm), params }]);
    }

    /// Changes how the card is shared, from now on. What waits and what runs goes on.
    fn set_scheduler(&mut self, config: Config) {
        self.feed([Event::Configured(config)]);
    }

    /// Lets a VM out of quarantine.
    fn release_vm(&mut self, vm: VmId) {
        self.feed([Event::Released { vgpu: vgpu(vm) }]);
    }

    /// A submission is in the ring of a VM's physical channel, to be started when its turn comes.
    fn arrived(&mut self, vm: VmId, channel: ChannelId, submission: Submission) {
        let ticket = Ticket(submission.0);
        let runs = self.may_run(channel);
        let stage = if runs { Stage::Queued } else { Stage::Parked };
        self.schedule().held.insert(ticket, Held { vm, channel, stage });
        if runs {
            self.feed([self.arrival(ticket, vm, channel)]);
        }
    }

    /// The event of a submission that may run.
    fn arrival(&self, ticket: Ticket, vm: VmId, channel: ChannelId) -> Event {
        let engine = self.engine_of(channel);
        Event::Arrival { vgpu: vgpu(vm), channel: Channel(channel.0.into()), engine, ticket }
    }

    /// A physical channel is off the card, with all that it had. What of it had ended before was [completed](Self::complete).
    fn channel_ended(&mut self, vm: VmId, channel: ChannelId) {
        self.schedule().held.retain(|_, held| held.channel != channel);
        self.schedule().resting.forget(|_, of| of == channel);
        self.feed([Event::ChannelEnded { vgpu: vgpu(vm), channel: Channel(channel.0.into()) }]);
    }

    /// Looks which submissions have ended.
    fn complete(&mut self) {
        let mut ended = self.take_ended();
        // Those of one engine in their order; without a time it has ended by now.
        ended.sort_by_key(|(_, at)| at.unwrap_or(Nanos(u64::MAX)));
        let held = &mut self.schedule().held;
        let events: Vec<Event> = ended
            .into_iter()
            .map(|(submission, ended)| (Ticket(submission.0), ended))
            .filter(|(ticket, _)| held.remove(ticket).is_some())
            .map(|(ticket, ended)| Event::Completed { ticket, ended })
            .collect();
        if events.is_empty() && self.is_deferred() {
            let now = self.card_time();
            self.schedule().arm(now, true);
        }
        self.feed(events);
    }

    /// The timer has expired.
    fn tick(&mut self) {
        self.schedule().disarm();
        // What has ended by now has not run for too long.
        if self.is_deferred() || self.schedule().scheduler.in_flight() > 0 {
            self.complete();
        }
        if self.schedule().is_contended() {
            self.rest_and_rouse();
            self.look_at_waits(None);
        }
        self.feed([Event::Tick]);
    }

    /// Sees which submissions (of a VM, or of all) can run that could not, and the other way round.
    fn look_at_waits(&mut self, vm: Option<VmId>) {
        let concerned = |held: &Held| vm.is_none_or(|vm| vm == held.vm) && held.stage != Stage::Queued;
        let held = self.schedule().held.iter().filter(|(_, held)| concerned(held));
        let mut changed: Vec<(Ticket, Held)> = held.map(|(ticket, held)| (*ticket, *held)).collect();
        let mut seen: BTreeMap<ChannelId, (bool, bool)> = BTreeMap::new();
        changed.retain_mut(|(ticket, held)| {
            let (runs, acquires) = *seen.entry(held.channel).or_insert_with(|| {
                let runs = self.may_run(held.channel);
                (runs, runs && self.acquires(held.channel))
            });
            let stage = match held.stage {
                Stage::Parked if runs => Stage::Queued,
                Stage::Started if !runs || acquires => Stage::Waiting,
                Stage::Waiting if runs && !acquires => Stage::Started,
                same => same,
            };
            let changes = std::mem::replace(&mut held.stage, stage) != stage;
            if changes {
                self.schedule().held.insert(*ticket, *held);
            }
            changes
        });
        let schedule = self.schedule();
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
            let schedule = self.schedule();
            schedule.scheduler.event(now, event, &mut decisions);
            if let Some(recording) = &mut schedule.recording {
                recording.note(now, event, &decisions);
            }
            for decision in decisions.drain(..) {
                events.extend(self.carry_out(decision));
            }
        }
        let deferred = self.is_deferred();
        self.schedule().arm(now, deferred);
    }

    /// Returns what the scheduler is to be told of it.
    fn carry_out(&mut self, decision: Decision) -> Option<Event> {
        match decision {
            Decision::Start(ticket) => {
                let Some(held) = self.schedule().held.get_mut(&ticket) else {
                    return Some(Event::Withdrawn { ticket });
                };
                held.stage = Stage::Started;
                let channel = held.channel;
                let started = self.start(channel, Submission(ticket.0));
                (!started).then_some(Event::Withdrawn { ticket })
            }
            Decision::Kill { channel, engine, ran_ns, .. } => {
                let physical = ChannelId(u8::try_from(channel.0).ok()?);
                let (vm, channel) = self.owner(physical)?;
                let ran_ms = ran_ns / 1_000_000;
                tracing::warn!(%vm, ?channel, ?engine, ran_ms, "a submission runs for longer than it may");
                self.kill(vm, channel, engine);
                // Its guest is told by the interrupt thread.
                self.schedule().post(vm, GuestEvent::Hang { engine: number_of(engine), channel });
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
}

/// A VM as the scheduler numbers it.
pub(super) fn vgpu(vm: VmId) -> VgpuId {
    VgpuId(vm.0)
}

/// The card's number of an engine.
fn number_of(engine: Engine) -> u32 {
    match engine {
        Engine::Compute => engine::GR,
        Engine::Copy0 => engine::CE0,
        Engine::Copy1 => engine::CE1,
    }
}

impl HostState {
    /// Looks how far the card's clock is ahead of the host's. To be called often enough for what they may differ in speed:
    /// a ten-thousandth is 10 us in 100 ms.
    pub(super) fn set_clock(&mut self) {
        let card = time::now_ns(&**self.vram.memory.card());
        let host = self.now_ns();
        self.ahead_ns = i64::try_from(i128::from(card) - i128::from(host)).unwrap_or(0);
    }
}

impl Feeder for HostState {
    type Alarm = TimerAlarm;

    fn schedule(&mut self) -> &mut Schedule {
        &mut self.schedule
    }

    /// By the host's clock and what was between them when `HostState::set_clock` was called last.
    fn card_time(&self) -> Nanos {
        Nanos(self.now_ns().saturating_add_signed(self.ahead_ns))
    }

    fn may_run(&self, channel: ChannelId) -> bool {
        self.channels.may_run(channel)
    }

    fn acquires(&mut self, channel: ChannelId) -> bool {
        self.channels.acquires(&mut self.vram.memory, channel)
    }

    /// That of its only context, PGRAPH when it has several or none.
    fn engine_of(&self, channel: ChannelId) -> Engine {
        match self.channels.contexts(channel) {
            [false, true, false] => Engine::Copy0,
            [false, false, true] => Engine::Copy1,
            _ => Engine::Compute,
        }
    }

    fn owner(&self, channel: ChannelId) -> Option<(VmId, VirtualChannelId)> {
        let (vm, channel) = self.channels.by_physical(channel)?;
        Some((VmId(vm.0), channel))
    }

    fn start(&mut self, channel: ChannelId, submission: Submission) -> bool {
        self.channels.start(&mut self.vram.memory, channel, submission)
    }

    fn take_ended(&mut self) -> Vec<(Submission, Option<Nanos>)> {
        let now_ns = self.now_ns();
        // Where one VM is alone, no one else pays for what it forges.
        let shared = self.vms.len() > 1;
        let mut completions = self.channels.completed(&mut self.vram.memory, now_ns, shared);
        if let Some(copier) = &mut self.copier {
            for completion in completions.extract_if(.., |completion| completion.vm == COPIER) {
                copier.completed(&mut self.vram, &mut self.channels, now_ns, completion.submission);
            }
        }
        completions.into_iter().map(|ended| (ended.submission, ended.card_time_ns.map(Nanos))).collect()
    }

    fn is_deferred(&self) -> bool {
        self.channels.is_deferred()
    }

    fn rest_and_rouse(&mut self) {
        super::rest::rest_and_rouse(self);
    }

    fn kill(&mut self, vm: VmId, channel: VirtualChannelId, engine: Engine) {
        if let Err(error) = self.kill_channel(vm, channel, number_of(engine)) {
            tracing::error!(%vm, ?channel, %error, "a channel that was killed stays on the card");
        }
    }
}
