//! Saved form of the work on a card, excluding its channels and its scheduler, which are saved separately.

use super::Work;
use super::departures::Departures;
use super::descheduled::{DescheduledChannels, WakeAllowance, Why};
use super::interrupt_rate::{Caused, InterruptRateLimit};
use super::needs::Needs;
use super::schedule::{Schedule, Stage, TrackedSubmission};
use crate::ManagerError;
use crate::alarm::TimerAlarm;
use channels::{Channels, Pause};
use nvspec::fifo::ChannelId;
use saved_state::{Invalid, ascend};
use sched::{Engine, Nanos, Place, Scheduler, Ticket};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use vram::TenantId;

/// Saved form of the work on a card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedWork {
    /// Submissions in flight, by number.
    held: Vec<SavedHeld>,
    /// Physical channel number, VM, and reason of each descheduled channel.
    descheduled: Vec<(u8, u32, SavedWhy)>,
    /// Resting channels, in the order of their next polls.
    resting: Vec<u8>,
    next_look: u64,
    /// VM number, and time until which the VM's hop allowance is used up.
    hops: Vec<(u32, u64)>,
    /// Channels that could run on several engines, each with the engine on which it was last observed.
    several: Vec<(u8, Option<u8>)>,
    looked: u64,
    /// Interrupt accounts of VMs.
    noise: Vec<SavedNoise>,
    ended: u64,
}

/// Saved form of a submission in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedHeld {
    ticket: u64,
    vm: u32,
    channel: u8,
    stage: SavedStage,
    arrived: u64,
    seen: Option<(u64, u64)>,
    hopped: bool,
    on_engine: Option<u64>,
}

/// Stage of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum SavedStage {
    Parked,
    Queued,
    Started,
    Waiting,
    Descheduled,
    Again,
}

/// Reason why a channel is descheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum SavedWhy {
    Stopped,
    Rests,
    Queued,
}

/// Interrupts caused by a VM. The state of the VM's channels shows whether the VM is paused because of these
/// interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedNoise {
    vm: u32,
    lately: u32,
    total: u64,
    pauses: u64,
}

impl Work {
    /// Saves the work.
    ///
    /// # Errors
    /// Returns an error if the work is not quiescent.
    pub(crate) fn save(&self) -> Result<SavedWork, ManagerError> {
        let Self {
            // The channels are saved separately.
            channels: _,
            departures,
            schedule,
            noise: InterruptRateLimit(noise),
            ended,
        } = self;
        let Schedule {
            // The scheduler is saved separately.
            scheduler: _,
            held,
            // The next process sets the alarm again.
            alarm: _,
            armed: _,
            outbox,
            // The next process counts the waiting submissions again.
            waiting: _,
            descheduled: DescheduledChannels { channels, resting, next, hops: WakeAllowance(hops) },
            // Derived from the scheduler's state.
            barred: _,
            several,
            looked,
            // The next process may repeat these log messages.
            told: _,
            // A running recording ends here.
            recording: _,
        } = schedule;
        if !departures.is_empty() || !outbox.is_empty() {
            return Err(ManagerError::Unsettled("a channel is leaving the card"));
        }
        let noise = noise.iter().map(|(vm, caused)| {
            let Caused { lately, total, paused: _, pauses } = *caused;
            SavedNoise { vm: vm.0, lately, total, pauses }
        });
        let several = several.iter().map(|(channel, engine)| {
            let engine = engine.map(|engine| u8::try_from(engine.index()).unwrap_or(u8::MAX));
            (channel.0, engine)
        });
        Ok(SavedWork {
            held: held.iter().map(|(ticket, held)| held.save(*ticket)).collect(),
            descheduled: channels.iter().map(|(channel, (vm, why))| (channel.0, vm.0, (*why).into())).collect(),
            resting: resting.iter().map(|channel| channel.0).collect(),
            next_look: next.0,
            hops: hops.iter().map(|(vm, paid)| (vm.0, paid.0)).collect(),
            several: several.collect(),
            looked: looked.0,
            noise: noise.collect(),
            ended: *ended,
        })
    }
}

impl SavedWork {
    /// Restores the saved work, with the card's channels and their scheduler.
    ///
    /// # Errors
    /// Returns an error if the saved state is invalid or inconsistent with these channels.
    pub(crate) fn restored(
        self,
        channels: Channels,
        scheduler: Scheduler,
        alarm: TimerAlarm,
    ) -> Result<Work, ManagerError> {
        self.check(&channels, &scheduler)?;
        let Self { held, descheduled, resting, next_look, hops, several, looked, noise, ended } = self;
        let mut schedule = Schedule::new(*scheduler.config(), alarm)?;
        schedule.scheduler = scheduler;
        schedule.held = held.iter().map(SavedHeld::restored).collect();
        schedule.waiting = held.iter().filter(|held| held.stage == SavedStage::Waiting).count();
        let barred = schedule.held.iter().filter(|(ticket, held)| {
            held.stage == Stage::Started && schedule.scheduler.place(**ticket) == Some(Place::Aside)
        });
        schedule.barred = barred.map(|(ticket, _)| *ticket).collect();
        let of_channel = |(channel, vm, why): (u8, u32, SavedWhy)| (ChannelId(channel), (TenantId(vm), why.into()));
        schedule.descheduled = DescheduledChannels {
            channels: descheduled.into_iter().map(of_channel).collect(),
            resting: resting.into_iter().map(ChannelId).collect::<VecDeque<_>>(),
            next: Nanos(next_look),
            hops: WakeAllowance(hops.into_iter().map(|(vm, paid)| (TenantId(vm), Nanos(paid))).collect()),
        };
        let engine = |number: u8| Engine::ALL.get(usize::from(number)).copied();
        schedule.several =
            several.into_iter().map(|(channel, seen)| (ChannelId(channel), seen.and_then(engine))).collect();
        schedule.looked = Nanos(looked);
        let noise = noise.into_iter().map(|SavedNoise { vm, lately, total, pauses }| {
            let vm = TenantId(vm);
            (vm, Caused { lately, total, paused: channels.is_paused(vm, Pause::InterruptRateLimit), pauses })
        });
        let noise = InterruptRateLimit(noise.collect());
        Ok(Work { channels, departures: Departures::default(), schedule, noise, ended })
    }

    /// Checks that each submission is in flight on its channel, that the scheduler has no other submissions, and that
    /// each descheduled channel belongs to its VM.
    fn check(&self, channels: &Channels, scheduler: &Scheduler) -> Result<(), Invalid> {
        let Self { held, descheduled, resting, hops, several, noise, .. } = self;
        let ordered = ascend(held.iter().map(|held| held.ticket))
            && ascend(descheduled.iter().map(|(channel, ..)| channel))
            && ascend(hops.iter().map(|(vm, _)| vm))
            && ascend(several.iter().map(|(channel, _)| channel))
            && ascend(noise.iter().map(|noise| noise.vm));
        Invalid::unless(ordered, || "work is not in order".into())?;
        let in_flight: BTreeMap<u64, (TenantId, ChannelId)> =
            channels.flights().map(|(vm, channel, submission)| (submission.0, (vm, channel))).collect();
        for SavedHeld { ticket, vm, channel, .. } in held {
            let own = in_flight.get(ticket) == Some(&(TenantId(*vm), ChannelId(*channel)));
            Invalid::unless(own, || format!("submission {ticket} of VM {vm} is not in flight on its channel"))?;
        }
        let known: BTreeMap<u64, u32> = held.iter().map(|held| (held.ticket, held.vm)).collect();
        let stray = scheduler.tickets().find(|(vm, ticket)| known.get(&ticket.0) != Some(&vm.0));
        Invalid::unless(stray.is_none(), || format!("the scheduler contains work that does not exist: {stray:?}"))?;
        for (channel, vm, _) in descheduled {
            let bound = channels.by_physical(ChannelId(*channel)).map(|(vm, _)| vm.0);
            Invalid::unless(bound == Some(*vm), || {
                format!("channel {channel} is descheduled, but does not belong to VM {vm}")
            })?;
        }
        let rest: BTreeSet<u8> = resting.iter().copied().collect();
        let resting_are = descheduled.iter().filter(|(.., why)| *why == SavedWhy::Rests).map(|(channel, ..)| *channel);
        Invalid::unless(rest.len() == resting.len() && rest.into_iter().eq(resting_are), || {
            "the descheduled channels differ from the saved list".into()
        })?;
        let engines = several.iter().filter_map(|(_, engine)| *engine);
        Invalid::unless(engines.into_iter().all(|engine| usize::from(engine) < Engine::COUNT), || {
            "a channel was observed on an engine that does not exist".into()
        })
    }
}

impl TrackedSubmission {
    fn save(&self, ticket: Ticket) -> SavedHeld {
        let Self { vm, channel, stage, arrived, seen, hopped, on_engine, irq_suppressed: _, brief: _, needs: _ } =
            *self;
        SavedHeld {
            ticket: ticket.0,
            vm: vm.0,
            channel: channel.0,
            stage: stage.into(),
            arrived: arrived.0,
            seen: seen.map(|(at, progress)| (at.0, progress)),
            hopped,
            on_engine: on_engine.map(|at| at.0),
        }
    }
}

impl SavedHeld {
    fn restored(&self) -> (Ticket, TrackedSubmission) {
        let Self { ticket, vm, channel, stage, arrived, seen, hopped, on_engine } = *self;
        let held = TrackedSubmission {
            vm: TenantId(vm),
            channel: ChannelId(channel),
            stage: stage.into(),
            arrived: Nanos(arrived),
            seen: seen.map(|(at, progress)| (Nanos(at), progress)),
            hopped,
            on_engine: on_engine.map(Nanos),
            // The interrupt may have been suppressed. Assume so, because polling for the completion is cheap.
            irq_suppressed: true,
            brief: false,
            // Saving the card has restored the channel's PGRAPH context.
            needs: Needs::Graphics,
        };
        (Ticket(ticket), held)
    }
}

impl From<Stage> for SavedStage {
    fn from(stage: Stage) -> Self {
        match stage {
            Stage::Parked => Self::Parked,
            Stage::Queued => Self::Queued,
            Stage::Started => Self::Started,
            Stage::Waiting => Self::Waiting,
            Stage::Descheduled => Self::Descheduled,
            Stage::Again => Self::Again,
        }
    }
}

impl From<SavedStage> for Stage {
    fn from(saved: SavedStage) -> Self {
        match saved {
            SavedStage::Parked => Self::Parked,
            SavedStage::Queued => Self::Queued,
            SavedStage::Started => Self::Started,
            SavedStage::Waiting => Self::Waiting,
            SavedStage::Descheduled => Self::Descheduled,
            SavedStage::Again => Self::Again,
        }
    }
}

impl From<Why> for SavedWhy {
    fn from(why: Why) -> Self {
        match why {
            Why::Stopped => Self::Stopped,
            Why::Rests => Self::Rests,
            Why::Queued => Self::Queued,
        }
    }
}

impl From<SavedWhy> for Why {
    fn from(saved: SavedWhy) -> Self {
        match saved {
            SavedWhy::Stopped => Self::Stopped,
            SavedWhy::Rests => Self::Rests,
            SavedWhy::Queued => Self::Queued,
        }
    }
}
