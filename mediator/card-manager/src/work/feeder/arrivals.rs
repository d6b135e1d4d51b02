//! Submissions between their doorbells and the scheduler's queue.

use super::Feeder;
use crate::work::card_view::CardView;
use crate::work::needs::Needs;
use crate::work::schedule::{LOOK_NS, Stage, TrackedSubmission};
use channels::Submission;
use nvspec::fifo::ChannelId;
use sched::{Channel, Engine, Event, Ticket};
use std::collections::BTreeSet;
use vram::TenantId;

/// Maximum length of a submission that counts as a fence after other work, in dwords. nouveau's fence is a semaphore
/// release and an interrupt.
const BRIEF_WORDS: u32 = 16;

impl<C: CardView> Feeder<'_, C> {
    /// Records a submission of `words` dwords that was added to a physical channel's ring, and queues it if it can run.
    /// The scheduler starts the submission in a slice of its VM.
    pub fn arrived(&mut self, vm: TenantId, channel: ChannelId, submission: Submission, words: u32, needs: Needs) {
        let ticket = Ticket(submission.0);
        let needs = self.joined(ticket, channel, needs);
        let runs = self.card.wants(channel)
            && !self.schedule().descheduled.contains(channel)
            && self.may_follow(ticket, channel, needs);
        let stage = if runs { Stage::Queued } else { Stage::Parked };
        let arrived = self.card.card_time();
        let engines = self.card.engines_of(channel);
        let unobserved = runs && self.is_unobserved(vm, channel, engines, needs) && !self.card.needs_ends(channel);
        let irq_suppressed = unobserved && self.card.suppress_completion_irq(channel, submission);
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

    /// Returns a submission's needs. If this submission and the previous one on the channel need only copy engines,
    /// returns the needs of the previous one, so that the copies are booked on one engine and run in order.
    fn joined(&mut self, ticket: Ticket, channel: ChannelId, needs: Needs) -> Needs {
        let before = self.schedule().before(ticket, channel).next_back().map(|held| held.needs);
        match (before, needs) {
            (Some(before @ Needs::Copies(_)), Needs::Copies(_)) => before,
            (_, needs) => needs,
        }
    }

    /// Returns true if no earlier submission on the channel is parked, and the state of the channel's PGRAPH context
    /// matches the submission's needs. Changes the state if necessary, but only if all earlier submissions have
    /// completed.
    pub(super) fn may_follow(&mut self, ticket: Ticket, channel: ChannelId, needs: Needs) -> bool {
        let first = self.schedule().before(ticket, channel).next().is_none();
        let parked = self.schedule().before(ticket, channel).any(|held| held.stage == Stage::Parked);
        !parked && (self.card.is_ready_for(channel, needs) || first && self.card.make_ready(channel, needs))
    }

    /// Queues submissions that waited for earlier ones on their channels, and appends the events for the scheduler.
    pub(super) fn unpark(&mut self, events: &mut Vec<Event>) {
        let parked = self.schedule().held.iter().filter(|(_, held)| held.stage == Stage::Parked);
        let parked: Vec<(Ticket, TrackedSubmission)> = parked.map(|(ticket, held)| (*ticket, *held)).collect();
        let mut stay = BTreeSet::new();
        for (ticket, held) in parked {
            let channel = held.channel;
            if stay.contains(&channel) {
                continue;
            }
            let runs = self.card.wants(channel) && !self.schedule().descheduled.contains(channel);
            if runs && self.may_follow(ticket, channel, held.needs) {
                events.push(self.arrival(ticket, held.vm, channel, held.needs));
                self.schedule().held.insert(ticket, TrackedSubmission { stage: Stage::Queued, ..held });
            } else {
                stay.insert(channel);
            }
        }
    }

    /// Returns true if a runnable channel must leave an engine before its next work can receive a slice.
    pub(super) fn any_unready(&mut self) -> bool {
        let mut seen = BTreeSet::new();
        let first = self.schedule().held.values().filter(|held| seen.insert(held.channel));
        let parked: Vec<ChannelId> =
            first.filter(|held| held.stage == Stage::Parked).map(|held| held.channel).collect();
        parked.into_iter().any(|channel| self.card.wants(channel))
    }

    /// Returns true if no VM waits for the completion of a submission of this VM, and this completion is expected soon.
    /// Its own interrupt would then be useless, because the completion is noticed at the guest's interrupt or by a
    /// poll.
    fn is_unobserved(
        &mut self,
        vm: TenantId,
        channel: ChannelId,
        engines: [bool; Engine::COUNT],
        needs: Needs,
    ) -> bool {
        let now = self.card.card_time();
        let engine = self.books_on(channel, engines, needs);
        let schedule = self.schedule();
        schedule.waiting == 0 && schedule.scheduler.is_brief_and_alone(vm, engine, now, LOOK_NS)
    }

    /// Returns the engine on which a channel's next work waits for a slice. If [PGRAPH is
    /// closed](CardView::closes_graphics) for the channel, no other VM may use PGRAPH while the channel has work on the
    /// card. The work then waits for a slice on PGRAPH, and is charged on the engine that the card reports. Work that
    /// needs only copy engines waits only for the first one that it uses.
    fn books_on(&mut self, channel: ChannelId, engines: [bool; Engine::COUNT], needs: Needs) -> Engine {
        if self.card.closes_graphics(channel) {
            return Engine::Compute;
        }
        match needs {
            Needs::Copies(engine) if engines.get(engine.index()) == Some(&true) => engine,
            Needs::Graphics | Needs::Copies(_) | Needs::Host => self.schedule().engine_for(channel, engines),
        }
    }

    /// Returns the event for a submission that can run.
    pub(super) fn arrival(&mut self, ticket: Ticket, vm: TenantId, channel: ChannelId, needs: Needs) -> Event {
        let engines = self.card.engines_of(channel);
        let engine = self.books_on(channel, engines, needs);
        Event::Arrival { vgpu: vm, channel: Channel(channel.0.into()), engine, ticket }
    }
}
