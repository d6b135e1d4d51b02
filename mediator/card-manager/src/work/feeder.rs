//! Feeds the scheduler of a card with events, and carries out its decisions.
//!
//! A doorbell puts a submission into a channel's ring on the card ([`channels::Channels::pull`]) and is an arrival
//! here; when its turn comes, on any thread, the card may fetch it. Its completion record marks its end, with the
//! card's time.
//!
//! A submission that cannot run does not block others. It is an arrival only once the guest has enabled and listed its
//! channel. A submission that started and then waits, for a semaphore or because its channel was stopped, leaves the
//! engine to others once the card reports that no engine works for its channel. Until then it is charged and its limit
//! applies, regardless of the guest's register writes; a stopped channel is asked to leave the engine. When it may run
//! again, it resumes in its [turn](super::descheduled).
//!
//! A channel is killed only after the engine confirms that it is running it.

use super::descheduled::Why;
use super::needs::Needs;
use super::schedule::{LOOK_NS, Schedule, Stage, TrackedSubmission};
use crate::alarm::Alarm;
use crate::tenants::GuestEvent;
use channels::{Presence, Submission};
use nvspec::fifo::{ChannelId, VirtualChannelId, engine};
use sched::{Channel, Config, Decision, Engine, Event, Nanos, Ticket, VgpuParams};
use std::collections::{BTreeSet, VecDeque};
use vram::TenantId;

/// Time before a submission is seen to wait no more for which it is charged at most, in ns: several looks.
const UNSEEN_NS: u64 = 5_000_000;

/// Maximum words in a submission that counts as a fence after work: nouveau's is a semaphore release and an interrupt.
const BRIEF_WORDS: u32 = 16;

/// Reports events to a card's scheduler and carries out its decisions: the state of a card, under its lock.
///
/// The methods without a body query the card; tests implement them with a card of their own.
pub trait Feeder {
    /// The alarm that brings the interrupt thread back.
    type Alarm: Alarm;

    /// The scheduler and its known submissions.
    fn schedule(&mut self) -> &mut Schedule<Self::Alarm>;

    /// The card's time. The time never goes back.
    fn card_time(&self) -> Nanos;

    /// Returns true if a channel may run, now or in its turn: neither guest nor mediator has stopped it.
    fn wants(&self, channel: ChannelId) -> bool;

    /// Returns where a channel is, according to the card.
    fn presence(&mut self, channel: ChannelId) -> Presence;

    /// Returns true if a channel's semaphore wait blocks the method unit for other channels.
    fn holds(&mut self, channel: ChannelId) -> bool;

    /// Returns true if a channel is kept off an engine that another VM holds, so that it cannot poll its semaphore; the
    /// card's report about the channel dates from its last run.
    fn is_shut_out(&self, _channel: ChannelId) -> bool {
        false
    }

    /// Returns true if a channel is [shut out](Self::is_shut_out) and its VM will not get the engine for other work
    /// soon.
    fn is_left_out(&self, _channel: ChannelId) -> bool {
        false
    }

    /// Returns whether a channel's VM has PGRAPH to itself while the channel has work on the card, whichever engine
    /// that is for.
    fn closes_graphics(&self, _channel: ChannelId) -> bool {
        false
    }

    /// Returns true if a channel's PGRAPH context setting matches the needs of this work.
    fn is_ready_for(&self, _channel: ChannelId, _needs: Needs) -> bool {
        true
    }

    /// Makes a channel [ready](Self::is_ready_for) that has no work on the card. `false` if it is still to leave an
    /// engine.
    fn make_ready(&mut self, _channel: ChannelId, _needs: Needs) -> bool {
        true
    }

    /// Returns how long a VM with work on other engines has blocked PGRAPH since the last call, with the VM and the
    /// start.
    fn take_kept(&mut self) -> Option<(TenantId, Nanos)> {
        None
    }

    /// Returns the channel that an engine works for, according to the card.
    fn occupant(&mut self, engine: Engine) -> Option<ChannelId>;

    /// Returns a value that changes while the channel makes progress.
    fn progress(&mut self, channel: ChannelId) -> u64;

    /// Asks the card to take a channel off its engines.
    fn ask_to_leave(&mut self, channel: ChannelId);

    /// Keeps a channel off the card, or lets it back.
    fn withhold(&mut self, channel: ChannelId, descheduled: bool);

    /// Returns which engines a channel can work on, by its contexts.
    fn engines_of(&self, channel: ChannelId) -> [bool; Engine::COUNT];

    /// Returns the VM of a channel of the card, and the guest's number of the channel.
    fn owner(&self, channel: ChannelId) -> Option<(TenantId, VirtualChannelId)>;

    /// Lets the card fetch a submission and the channel's earlier ones. Returns `false` if it no longer exists.
    fn start(&mut self, channel: ChannelId, submission: Submission) -> bool;

    /// Suppresses the interrupt at the end of a submission. `false` when it does all the same.
    fn suppress_completion_irq(&mut self, _channel: ChannelId, _submission: Submission) -> bool {
        false
    }

    /// Returns true if a channel has so much work that its completions must be noticed immediately.
    fn needs_ends(&self, _channel: ChannelId) -> bool {
        false
    }

    /// Returns the submissions that ended since the last call, with the card's time of the end if known.
    fn take_ended(&mut self) -> Vec<(Submission, Option<Nanos>)>;

    /// Returns the time in ns until the timer must expire, unless another event comes first: [`Self::take_ended`] must
    /// be called again then, or a channel must still leave the card.
    fn deferred_ns(&self) -> Option<u64>;

    /// A channel with work on the card may continue.
    fn returns(&mut self, _channel: ChannelId) {}

    /// Lets an engine that one VM has at a time change hands, if it is to.
    fn hand_over(&mut self) {}

    /// Takes a channel that holds an engine for too long off the card, and reports it through [`Self::channel_ended`].
    fn kill(&mut self, vm: TenantId, channel: VirtualChannelId, engine: Engine);

    /// Adds a VM with a share of the card's time.
    fn schedule_vm(&mut self, vm: TenantId, params: VgpuParams) {
        self.feed([Event::Added { vgpu: vm, params }]);
    }

    /// Nothing of a VM is on the card any more.
    fn unschedule_vm(&mut self, vm: TenantId) {
        self.schedule().forget(|held| held.vm == vm);
        self.schedule().descheduled.forget(|of, _| of == vm);
        self.schedule().descheduled.hops.forget(vm);
        self.schedule().told.remove(&vm);
        self.feed([Event::Removed { vgpu: vm }]);
    }

    /// Changes the share of a VM from now on.
    fn set_share(&mut self, vm: TenantId, params: VgpuParams) {
        self.feed([Event::Changed { vgpu: vm, params }]);
    }

    /// Changes the policy of the card from now on. Waiting and running work continues.
    fn set_scheduler(&mut self, config: Config) {
        self.feed([Event::Configured(config)]);
    }

    /// Lets a VM out of quarantine.
    fn release_vm(&mut self, vm: TenantId) {
        self.feed([Event::Released { vgpu: vm }]);
    }

    /// A submission of this many words was added to a physical channel's ring, and starts when its turn comes.
    fn arrived(&mut self, vm: TenantId, channel: ChannelId, submission: Submission, words: u32, needs: Needs) {
        let ticket = Ticket(submission.0);
        let needs = self.joined(ticket, channel, needs);
        let runs = self.wants(channel)
            && !self.schedule().descheduled.contains(channel)
            && self.may_follow(ticket, channel, needs);
        let stage = if runs { Stage::Queued } else { Stage::Parked };
        let arrived = self.card_time();
        let engines = self.engines_of(channel);
        let unobserved = runs && self.is_unobserved(vm, channel, engines, needs) && !self.needs_ends(channel);
        let irq_suppressed = unobserved && self.suppress_completion_irq(channel, submission);
        let brief = words <= BRIEF_WORDS;
        let held = TrackedSubmission {
            vm,
            channel,
            stage,
            arrived,
            seen: None,
            hopped: false,
            on_engine: None,
            irq_suppressed,
            brief,
            needs,
        };
        let schedule = self.schedule();
        schedule.held.insert(ticket, held);
        schedule.note_engines(channel, engines);
        if runs {
            let arrival = self.arrival(ticket, vm, channel, needs);
            self.feed([arrival]);
        }
    }

    /// Returns the needs of a submission after the others on its channel. All copies in flight are booked on one
    /// engine, so that they run in order.
    fn joined(&mut self, ticket: Ticket, channel: ChannelId, needs: Needs) -> Needs {
        let before = self.schedule().before(ticket, channel).next_back().map(|held| held.needs);
        match (before, needs) {
            (Some(before @ Needs::Copies(_)), Needs::Copies(_)) => before,
            (_, needs) => needs,
        }
    }

    /// Returns true if a submission's channel has, or lacks, its PGRAPH context as the submission needs it. That
    /// changes only when all earlier submissions of the channel have ended.
    fn may_follow(&mut self, ticket: Ticket, channel: ChannelId, needs: Needs) -> bool {
        let first = self.schedule().before(ticket, channel).next().is_none();
        let parked = self.schedule().before(ticket, channel).any(|held| held.stage == Stage::Parked);
        !parked && (self.is_ready_for(channel, needs) || first && self.make_ready(channel, needs))
    }

    /// Queues submissions that waited for earlier ones of their channels; appends the scheduler's events.
    fn unpark(&mut self, events: &mut Vec<Event>) {
        let parked = self.schedule().held.iter().filter(|(_, held)| held.stage == Stage::Parked);
        let parked: Vec<(Ticket, TrackedSubmission)> = parked.map(|(ticket, held)| (*ticket, *held)).collect();
        let mut stay = BTreeSet::new();
        for (ticket, held) in parked {
            let channel = held.channel;
            if stay.contains(&channel) {
                continue;
            }
            let runs = self.wants(channel) && !self.schedule().descheduled.contains(channel);
            if runs && self.may_follow(ticket, channel, held.needs) {
                events.push(self.arrival(ticket, held.vm, channel, held.needs));
                self.schedule().held.insert(ticket, TrackedSubmission { stage: Stage::Queued, ..held });
            } else {
                stay.insert(channel);
            }
        }
    }

    /// Returns whether a channel that may run is still to leave an engine before its next work can have its turn.
    fn any_unready(&mut self) -> bool {
        let mut seen = BTreeSet::new();
        let first = self.schedule().held.values().filter(|held| seen.insert(held.channel));
        let parked: Vec<ChannelId> =
            first.filter(|held| held.stage == Stage::Parked).map(|held| held.channel).collect();
        parked.into_iter().any(|channel| self.wants(channel))
    }

    /// Returns true if no VM waits for the end of a submission of this VM, and the end is expected soon: its interrupt
    /// would be an additional one for the guest. The end is found with the guest's own interrupt, or by a poll.
    fn is_unobserved(
        &mut self,
        vm: TenantId,
        channel: ChannelId,
        engines: [bool; Engine::COUNT],
        needs: Needs,
    ) -> bool {
        let now = self.card_time();
        let engine = self.books_on(channel, engines, needs);
        let schedule = self.schedule();
        schedule.waiting == 0 && schedule.scheduler.is_brief_and_alone(vm, engine, now, LOOK_NS)
    }

    /// Returns the engine whose turn a channel's next work waits for. If [PGRAPH is closed](Self::closes_graphics) for
    /// it, other VMs may not use PGRAPH while it is on the card, whatever engine it uses. It then waits for PGRAPH's
    /// turn, and is charged for the engine on which the card shows it. Work that needs copy engines only waits for the
    /// first that it uses.
    fn books_on(&mut self, channel: ChannelId, engines: [bool; Engine::COUNT], needs: Needs) -> Engine {
        if self.closes_graphics(channel) {
            return Engine::Compute;
        }
        match needs {
            Needs::Copies(engine) if engines.get(engine.index()) == Some(&true) => engine,
            Needs::Graphics | Needs::Copies(_) | Needs::Host => self.schedule().engine_for(channel, engines),
        }
    }

    /// The event of a submission that may run.
    fn arrival(&mut self, ticket: Ticket, vm: TenantId, channel: ChannelId, needs: Needs) -> Event {
        let engines = self.engines_of(channel);
        let engine = self.books_on(channel, engines, needs);
        Event::Arrival { vgpu: vm, channel: Channel(channel.0.into()), engine, ticket }
    }

    /// A physical channel is off the card with all its work. Work that ended before was [completed](Self::complete).
    fn channel_ended(&mut self, vm: TenantId, channel: ChannelId) {
        self.schedule().forget(|held| held.channel == channel);
        self.schedule().several.remove(&channel);
        self.schedule().descheduled.forget(|_, of| of == channel);
        self.feed([Event::ChannelEnded { vgpu: vm, channel: Channel(channel.0.into()) }]);
    }

    /// Looks which submissions have ended.
    fn complete(&mut self) {
        let mut ended = self.take_ended();
        // Ends on one engine are in order; an end without a time happened before now.
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
        self.hand_over();
        self.look_at_barred(&mut events);
        if let Some((vgpu, since)) = self.take_kept() {
            events.push(Event::Kept { engine: Engine::Compute, vgpu, since });
        }
        let deferred = self.next_look_ns();
        if events.is_empty() && deferred.is_some() {
            let now = self.card_time();
            self.schedule().arm(now, deferred);
        }
        self.feed(events);
    }

    /// Returns the progress of a submission that waited at the last poll and does not wait now.
    fn moved_since(&self, ticket: Ticket, since: Option<Nanos>) -> Option<Event> {
        // Does not poll while no VM waits for the engine.
        let earliest = self.card_time().0.saturating_sub(UNSEEN_NS);
        Some(Event::Moved { ticket, since: since?.max(Nanos(earliest)) })
    }

    /// The timer has expired.
    fn tick(&mut self) {
        self.schedule().disarm();
        // Work that has ended by now has not exceeded its limit.
        if self.next_look_ns().is_some() || self.schedule().scheduler.in_flight() > 0 {
            self.complete();
        }
        if self.schedule().is_contended() || self.any_left_out() {
            self.rest_and_rouse();
            self.look_at_waits(None);
        }
        self.feed([Event::Tick]);
    }

    /// Sees which submissions (of a VM, or of all) can run that could not, and the other way round.
    fn look_at_waits(&mut self, vm: Option<TenantId>) {
        if vm.is_none() {
            // Not called for each guest register write, because it reads the card, which delays other VMs.
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

    /// Finds the submissions of a channel that can run; appends the events for the scheduler.
    fn look_at_channel(&mut self, channel: ChannelId, events: &mut Vec<Event>) {
        let wants = self.wants(channel);
        self.look_at_leaver(channel, events);
        match self.schedule().descheduled.reason(channel) {
            Some(Why::Stopped) if wants => return self.queue_again(channel, events),
            Some(_) => return,
            None => {}
        }
        let with_card = self.schedule().first_of(channel, &[Stage::Started, Stage::Waiting]);
        let presence = with_card.map(|_| self.presence(channel));
        let leaves = presence.is_some() && !wants;
        if leaves && presence == Some(Presence::Works) {
            // It is charged, and has its limit, until it has left.
            self.ask_to_leave(channel);
        }
        let off = leaves && presence != Some(Presence::Works);
        if off {
            self.set_aside(channel, false);
        }
        // A channel's wait is known only after it has polled. The state is unknown for a channel that was let back but
        // is not on the card yet.
        let shut_out = self.is_shut_out(channel);
        let waits = presence == Some(Presence::Acquires) && !shut_out;
        let progress = if waits { self.progress(channel) } else { 0 };
        let now = self.card_time();
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

    /// Takes copies off the books of the copy engines while their channel is off the card, and puts them back when its
    /// VM has PGRAPH again; appends the scheduler's events. Otherwise the VM would be charged for the wait.
    fn look_at_barred(&mut self, events: &mut Vec<Event>) {
        let schedule = self.schedule();
        let Schedule { held, barred, .. } = schedule;
        barred.retain(|ticket| held.get(ticket).is_some_and(|held| held.stage == Stage::Started));
        for channel in schedule.channels_at(&[Stage::Started]).into_keys() {
            let shut_out = self.is_shut_out(channel);
            let off = shut_out && self.presence(channel) != Presence::Works;
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

    /// Removes a descheduled channel's work from the engines' accounts once no engine works for it.
    fn look_at_leaver(&mut self, channel: ChannelId, events: &mut Vec<Event>) {
        let descheduled = self.schedule().descheduled.contains(channel);
        if !descheduled || self.schedule().first_of(channel, &[Stage::Started]).is_none() {
            return;
        }
        if self.presence(channel) == Presence::Works {
            self.ask_to_leave(channel);
        } else {
            self.schedule().withhold_started(channel, events);
        }
    }

    /// Keeps a channel off the card until its turn comes again. `rests` means that it waits for a semaphore.
    fn set_aside(&mut self, channel: ChannelId, rests: bool) {
        let why = if rests { Why::Rests } else { Why::Stopped };
        let now = self.card_time();
        let vm = self.schedule().held.values().find(|held| held.channel == channel).map(|held| held.vm);
        let Some(vm) = vm else { return };
        self.schedule().descheduled.insert(vm, channel, why, now);
        self.withhold(channel, true);
    }

    /// A descheduled channel continues when its turn comes.
    fn queue_again(&mut self, channel: ChannelId, events: &mut Vec<Event>) {
        let now = self.card_time();
        let schedule = self.schedule();
        let Some(ticket) = schedule.first_of(channel, &[Stage::Descheduled]) else { return };
        let Some(held) = schedule.held.get_mut(&ticket) else { return };
        held.stage = Stage::Again;
        let vm = held.vm;
        schedule.descheduled.insert(vm, channel, Why::Queued, now);
        events.push(Event::Requeued { ticket });
    }

    /// Lets a channel back on the card, with all that it has there.
    fn let_back(&mut self, channel: ChannelId, events: &mut Vec<Event>) {
        self.schedule().descheduled.remove(channel);
        self.withhold(channel, false);
        self.returns(channel);
        for (ticket, held) in &mut self.schedule().held {
            if held.channel == channel && held.stage == Stage::Descheduled {
                held.stage = Stage::Started;
                events.push(Event::Resumed { ticket: *ticket });
            }
        }
        self.look_at_channel(channel, events);
    }

    /// Readmits channels whose work on the card has ended. If only the awaited submission has ended, the next one gets
    /// its turn.
    fn release_idle(&mut self, events: &mut Vec<Event>) {
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

    /// Returns true if a channel that waits for a semaphore needs its own turn to poll it.
    fn any_left_out(&mut self) -> bool {
        let waiting: Vec<ChannelId> = self.schedule().waiting_channels().collect();
        waiting.into_iter().any(|channel| self.is_left_out(channel))
    }

    /// Returns the time in ns until the next poll that the scheduler does not know of, if any.
    fn next_look_ns(&mut self) -> Option<u64> {
        let deferred = self.deferred_ns().or_else(|| (self.any_left_out() || self.any_unready()).then_some(LOOK_NS));
        let now = self.card_time();
        deferred.or_else(|| self.schedule().hushed_look_ns(now))
    }

    /// Deschedules waiting channels that block others, are left out, or have worked too often between their waits, and
    /// lets one descheduled channel poll again.
    fn rest_and_rouse(&mut self) {
        let now = self.card_time();
        let wanted = self.schedule().scheduler.in_flight() > 0;
        let mut events = Vec::new();
        for (channel, vm) in self.schedule().channels_at(&[Stage::Waiting]) {
            let hopped = |held: &TrackedSubmission| held.channel == channel && held.hopped;
            let hopped = self.schedule().held.values().any(hopped);
            let holds_up = wanted && (hopped || self.holds(channel));
            if !holds_up && !self.is_left_out(channel) {
                continue;
            }
            tracing::debug!(%vm, channel = channel.0, hopped, holds_up, "a channel that waits rests");
            self.set_aside(channel, true);
            self.schedule().withhold_started(channel, &mut events);
        }
        while let Some(channel) = self.schedule().descheduled.wake_next(now, wanted) {
            if self.wants(channel) {
                self.queue_again(channel, &mut events);
            }
        }
        self.feed(events);
    }

    /// Reports events to the scheduler and carries out its decisions, until it makes no more.
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
                self.carry_out(decision, &mut events);
            }
        }
        let deferred = self.next_look_ns();
        self.schedule().arm(now, deferred);
    }

    /// Appends the events for the scheduler.
    fn carry_out(&mut self, decision: Decision, events: &mut VecDeque<Event>) {
        let mut told = Vec::new();
        match decision {
            Decision::Start(ticket) => self.start_submission(ticket, &mut told),
            Decision::Kill { vgpu, channel, engine, ran_ns, .. } => {
                let Ok(physical) = u8::try_from(channel.0).map(ChannelId) else { return };
                self.handle_overrun(vgpu, physical, engine, ran_ns, &mut told);
            }
            Decision::Quarantined { vgpu, until } => {
                tracing::warn!(vm = vgpu.0, ?until, "a VM is quarantined: its submissions ran for too long, too often");
            }
            Decision::Released { vgpu } => tracing::info!(vm = vgpu.0, "a VM is out of quarantine"),
        }
        events.extend(told);
    }

    /// Starts a submission whose turn has come.
    fn start_submission(&mut self, ticket: Ticket, told: &mut Vec<Event>) {
        let descheduled = Event::Withdrawn { ticket };
        let Some(held) = self.schedule().held.get_mut(&ticket) else { return told.push(descheduled) };
        let (channel, again, brief) = (held.channel, held.stage == Stage::Again, held.brief && !held.irq_suppressed);
        held.stage = Stage::Started;
        if again {
            return self.let_back(channel, told);
        }
        if !self.start(channel, Submission(ticket.0)) {
            return told.push(descheduled);
        }
        // The end of the work before this fence is noticed with the fence's, so one interrupt serves both.
        if brief
            && let Some(before) = self.schedule().started_before(ticket, channel)
            && self.suppress_completion_irq(channel, Submission(before.0))
            && let Some(held) = self.schedule().held.get_mut(&before)
        {
            held.irq_suppressed = true;
        }
        // Earlier work of its channel must continue first.
        if self.schedule().descheduled.contains(channel)
            && let Some(held) = self.schedule().held.get_mut(&ticket)
        {
            held.stage = Stage::Descheduled;
            told.push(Event::Waiting { ticket });
        }
    }

    /// Records which channel each busy engine works for. A submission that exceeds its limit is killed only for the
    /// time that it was seen on the engine: the accounts include time that it may have waited for a semaphore or for
    /// another channel to leave the engine.
    ///
    /// Returns the events for the scheduler. A channel with contexts for several engines is booked on the engine that
    /// it was last seen on, while its methods decide where it works. Once it is found elsewhere, it is charged there
    /// instead of its neighbour on that engine.
    fn look_at_engines(&mut self) -> Vec<Event> {
        let now = self.card_time();
        let everywhere = self.schedule().any_of_several();
        let looked = Engine::ALL.into_iter().filter(|engine| everywhere || self.schedule().scheduler.is_busy(*engine));
        let looked: Vec<Engine> = looked.collect();
        let occupants: Vec<(Engine, ChannelId)> =
            looked.into_iter().filter_map(|engine| Some((engine, self.occupant(engine)?))).collect();
        let channels: Vec<ChannelId> = occupants.iter().map(|(_, channel)| *channel).collect();
        self.schedule().note_occupants(&channels, now);
        let mut moved = Vec::new();
        for (engine, channel) in occupants {
            if self.schedule().is_elsewhere(channel, engine)
                && let Some((vm, _)) = self.owner(channel)
            {
                moved.push(Event::Occupied { engine, vgpu: vm, channel: Channel(channel.0.into()) });
            }
        }
        moved
    }

    /// Returns the time since when a channel has had an engine, if that is less than its VM may have it.
    fn has_it_since(&mut self, vm: TenantId, channel: ChannelId) -> Option<Nanos> {
        let now = self.card_time();
        let since = self.schedule().seen_since(channel, now)?;
        let limit = self.schedule().scheduler.params(vm)?.max_run_ns?;
        (now.since(since) < limit).then_some(since)
    }

    /// Accounting only suspects an overrun; the card reports which channel holds the engine.
    fn handle_overrun(&mut self, vm: TenantId, channel: ChannelId, engine: Engine, ran_ns: u64, told: &mut Vec<Event>) {
        match self.occupant(engine) {
            Some(other) if other != channel => {
                let Some((vm, _)) = self.owner(other) else {
                    return told.push(Event::Unoccupied { engine, since: None });
                };
                told.extend(self.schedule().bring_back(other));
                told.push(Event::Occupied { engine, vgpu: vm, channel: Channel(other.0.into()) });
            }
            None if self.presence(channel) != Presence::Works => {
                told.push(Event::Unoccupied { engine, since: None });
                self.look_at_channel(channel, told);
            }
            _ => {
                if let since @ Some(_) = self.has_it_since(vm, channel) {
                    return told.push(Event::Unoccupied { engine, since });
                }
                let Some((_, guest_channel)) = self.owner(channel) else { return };
                let ran_ms = ran_ns / 1_000_000;
                tracing::warn!(%vm, channel = ?guest_channel, ?engine, ran_ms, "a submission runs for longer than it may");
                self.kill(vm, guest_channel, engine);
                // The interrupt thread notifies its guest.
                self.schedule().post(vm, GuestEvent::Hang { engine: number_of(engine), channel: guest_channel });
                told.push(Event::Struck { vgpu: vm, engine });
            }
        }
    }
}

/// The engine that has a number on the card, if it is one whose time is shared.
pub(crate) fn engine_numbered(number: u32) -> Option<Engine> {
    Engine::ALL.into_iter().find(|engine| number_of(*engine) == number)
}

/// The card's number of an engine.
pub(crate) fn number_of(engine: Engine) -> u32 {
    match engine {
        Engine::Compute => engine::GR,
        Engine::Copy0 => engine::CE0,
        Engine::Copy1 => engine::CE1,
    }
}
