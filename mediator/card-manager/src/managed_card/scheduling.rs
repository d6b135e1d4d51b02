//! The scheduler's interface to the card: its inputs, and the effects of its decisions.

use super::CardState;
use super::scrubber::{SCRUBBER, Scrubber};
use crate::alarm::TimerAlarm;
use crate::work::card_view::CardView;
use crate::work::feeder::Feeder;
use crate::work::needs::Needs;
use crate::work::number_of;
use crate::work::schedule::{LOOK_NS, Schedule};
use card_memory::COPIER;
use channels::{Presence, Submission};
use nvspec::fifo::{ChannelId, VirtualChannelId};
use residue::Tenancy;
use sched::{Engine, Nanos};
use vram::TenantId;

/// Initial interval between polls for the departure of PGRAPH's tenant, which the card does not report, in ns. PGRAPH
/// may idle in the meantime. A channel between two submissions leaves within a fraction of this time.
const LEAVES_NS: u64 = 50_000;

impl CardState {
    /// Returns the feeder of the card's scheduler.
    pub fn feeder(&mut self) -> Feeder<'_, Self> {
        Feeder::new(self)
    }

    /// Returns the card time, which never decreases.
    #[must_use]
    pub fn card_time(&self) -> Nanos {
        self.clock.card_time()
    }
}

impl CardView for CardState {
    type Alarm = TimerAlarm;

    fn schedule(&mut self) -> &mut Schedule {
        self.work.schedule_mut()
    }

    fn card_time(&self) -> Nanos {
        self.clock.card_time()
    }

    fn wants(&self, channel: ChannelId) -> bool {
        self.work.channels().wants(channel)
    }

    fn presence(&mut self, channel: ChannelId) -> Presence {
        self.work.channels_mut().presence(self.memory.card_mut(), channel)
    }

    fn holds(&mut self, channel: ChannelId) -> bool {
        self.work.channels_mut().holds(self.memory.card_mut(), channel)
    }

    fn is_shut_out(&self, channel: ChannelId) -> bool {
        self.work.channels().is_shut_out(channel)
    }

    fn is_left_out(&self, channel: ChannelId) -> bool {
        let comes = |scrubber: &Scrubber| {
            let owner = self.work.channels().by_physical(channel);
            owner.is_some_and(|(vm, _)| scrubber.tenancy.is_wanted_by(vm))
        };
        self.is_shut_out(channel) && !self.scrubber.as_ref().is_some_and(comes)
    }

    fn closes_graphics(&self, channel: ChannelId) -> bool {
        let [graphics, ..] = self.work.channels().contexts(channel);
        self.scrubber.is_some() && graphics
    }

    fn is_ready_for(&self, channel: ChannelId, needs: Needs) -> bool {
        let channels = self.work.channels();
        match needs {
            Needs::Graphics => !channels.only_copies(channel),
            Needs::Copies(_) => {
                self.scrubber.is_none() || channels.only_copies(channel) || !channels.has_graphics(channel)
            }
            Needs::Host => true,
        }
    }

    fn make_ready(&mut self, channel: ChannelId, needs: Needs) -> bool {
        let only_copies = matches!(needs, Needs::Copies(_));
        self.work.channels_mut().set_only_copies(self.memory.card_mut(), channel, only_copies)
    }

    fn occupant(&mut self, engine: Engine) -> Option<ChannelId> {
        self.work.channels_mut().occupant(self.memory.card_mut(), number_of(engine))
    }

    fn progress(&mut self, channel: ChannelId) -> u64 {
        self.work.channels_mut().progress(self.memory.card_mut(), channel)
    }

    fn ask_to_leave(&mut self, channel: ChannelId) {
        self.work.channels_mut().ask_to_leave(self.memory.card_mut(), channel);
    }

    fn withhold(&mut self, channel: ChannelId, descheduled: bool) {
        self.work.channels_mut().withhold(self.memory.card_mut(), channel, descheduled);
        if !descheduled {
            self.wants_graphics(channel);
        }
    }

    fn engines_of(&self, channel: ChannelId) -> [bool; Engine::COUNT] {
        self.work.channels().contexts(channel)
    }

    fn owner(&self, channel: ChannelId) -> Option<(TenantId, VirtualChannelId)> {
        let (vm, channel) = self.work.channels().by_physical(channel)?;
        Some((vm, channel))
    }

    fn start(&mut self, channel: ChannelId, submission: Submission) -> bool {
        let started = self.work.channels_mut().start(self.memory.card_mut(), channel, submission);
        if started {
            self.wants_graphics(channel);
        }
        started
    }

    fn suppress_completion_irq(&mut self, channel: ChannelId, submission: Submission) -> bool {
        let changing = self.still || self.scrubber.as_ref().is_some_and(|scrubber| scrubber.tenancy.is_changing());
        !changing && self.work.channels_mut().suppress_completion_irq(self.memory.card_mut(), channel, submission)
    }

    fn needs_ends(&self, channel: ChannelId) -> bool {
        !self.work.channels().is_shallow(channel)
    }

    fn take_ended(&mut self) -> Vec<(Submission, Option<Nanos>)> {
        let now_ns = self.now_ns();
        // With a single VM, forged records cannot harm another VM.
        let shared = self.vms.len() > 1;
        let Self { memory, work, .. } = self;
        let mut completions = work.channels_mut().completed(memory.card_mut(), now_ns, shared);
        work.count_ended(completions.iter().map(|ended| ended.vm));
        if let (vram, Some(copier)) = memory.vram_and_copier() {
            for completion in completions.extract_if(.., |completion| completion.vm == COPIER) {
                copier.completed(vram, work.channels_mut(), now_ns, completion.submission);
            }
        }
        for completion in completions.extract_if(.., |completion| completion.vm == SCRUBBER).collect::<Vec<_>>() {
            self.graphics_cleared(completion.submission);
        }
        completions.into_iter().map(|ended| (ended.submission, ended.card_time_ns.map(Nanos))).collect()
    }

    fn deferred_ns(&self) -> Option<u64> {
        let tenancy = self.scrubber.as_ref().map(|scrubber| &scrubber.tenancy);
        let leaves_since = tenancy.and_then(Tenancy::leaves_since);
        if leaves_since.is_some_and(|since| self.now_ns().saturating_sub(since) < LOOK_NS) {
            return Some(LEAVES_NS);
        }
        let changing = tenancy.is_some_and(Tenancy::is_changing)
            || self.scrubber.as_ref().is_some_and(Scrubber::is_awaited_elsewhere);
        let deferred = changing || self.work.channels().is_deferred() || self.work.departures().any_leaving(None);
        deferred.then_some(LOOK_NS)
    }

    fn hand_over(&mut self) -> Option<(TenantId, Nanos)> {
        self.change_hands();
        self.scrubber.as_mut()?.keeping.take()
    }

    fn kill(&mut self, vm: TenantId, channel: VirtualChannelId, engine: Engine) {
        self.kill_channel(vm, channel, number_of(engine));
    }
}
