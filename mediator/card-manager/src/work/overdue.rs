//! Submissions that arrived long ago and have not completed, and the reason for each wait. Shown by `mediatorctl sched
//! show` and in the log.

use super::Work;
use super::descheduled::Why;
use super::schedule::{Stage, TrackedSubmission};
use channels::{Hindrance, Pause};
use nvspec::fifo::{ChannelId, VirtualChannelId};
use sched::{Engine, Nanos, Quarantine};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use vram::TenantId;

/// Age at which a submission counts as overdue, in ns.
const OVERDUE_NS: u64 = 1_000_000_000;
/// Minimum time between log lines about the same VM, in ns. Guests can cause such lines.
const QUIET_NS: u64 = 10_000_000_000;
/// Maximum number of submissions shown per VM.
const MAX_SHOWN_PER_VM: usize = 8;

/// Reason why a submission has not completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// The guest has disabled the channel, removed it from the runlist or masked the engines.
    Guest,
    /// The VM's memory is being moved.
    Memory,
    /// Another VM holds the quantum for memory on the card.
    MemoryTurn,
    /// The VM has caused more interrupts than permitted, and is paused until the next check.
    Interrupts,
    /// The whole card is quiesced.
    Standstill,
    /// The scheduler has not started the submission.
    Turn,
    /// The VM is in quarantine.
    Quarantine,
    /// A semaphore has not been released.
    Semaphore,
    /// The engine has not completed the work.
    Engine,
    /// The channel has ended, and none of its work is running.
    Ended,
}

impl fmt::Display for Awaited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Guest => "its guest to enable and list its channel",
            Self::Memory => "its VM's memory to be moved",
            Self::MemoryTurn => "its VM's turn to have its memory on the card",
            Self::Interrupts => "its VM's interrupt rate to drop",
            Self::Standstill => "the card to resume",
            Self::Turn => "its turn",
            Self::Quarantine => "the end of its VM's quarantine",
            Self::Semaphore => "a semaphore",
            Self::Engine => "the engine to complete its work",
            Self::Ended => "its channel to be removed",
        })
    }
}

/// A submission that arrived at least a second ago and has not completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overdue {
    /// Guest channel number.
    pub channel: VirtualChannelId,
    /// Engine of the submission.
    pub engine: Engine,
    /// Reason why the submission has not completed.
    pub awaited: Awaited,
    /// Age of the submission in ns, on the card's clock.
    pub age_ns: u64,
}

impl Work {
    /// Returns a VM's oldest overdue submissions, oldest first.
    pub(crate) fn overdue(&self, vm: TenantId, now: Nanos) -> Vec<Overdue> {
        let of_it = self.schedule.held.values().filter(|held| held.vm == vm);
        let late = of_it.filter(|held| now.since(held.arrived) >= OVERDUE_NS);
        let shown = late.filter_map(|held| {
            let (_, channel) = self.channels.by_physical(held.channel)?;
            let engine = self.schedule.engine_for(held.channel, self.channels.contexts(held.channel));
            Some(Overdue { channel, engine, awaited: self.awaited(held), age_ns: now.since(held.arrived) })
        });
        shown.take(MAX_SHOWN_PER_VM).collect()
    }

    fn awaited(&self, held: &TrackedSubmission) -> Awaited {
        let hindered = self.channels.hindrance(held.channel).map(of_hindrance);
        let quarantined = || {
            let state = self.schedule.scheduler.strikes(held.vm).map(|(_, state)| state);
            state.is_some_and(|state| state != Quarantine::Free)
        };
        match held.stage {
            Stage::Parked => hindered.unwrap_or(Awaited::Turn),
            Stage::Queued | Stage::Again if quarantined() => Awaited::Quarantine,
            Stage::Queued | Stage::Again => hindered.unwrap_or(Awaited::Turn),
            Stage::Waiting => Awaited::Semaphore,
            Stage::Descheduled => {
                hindered.unwrap_or(if self.rests(held.channel) { Awaited::Semaphore } else { Awaited::Turn })
            }
            Stage::Started => Awaited::Engine,
        }
    }

    /// Returns, for each VM, the number of submissions on channels that are stopped because memory is being moved or is
    /// scarce.
    pub(crate) fn stopped_for_memory(&self) -> BTreeMap<TenantId, usize> {
        let mut stopped = BTreeMap::new();
        for held in self.schedule.held.values().filter(|held| held.stage == Stage::Parked) {
            if matches!(self.awaited(held), Awaited::Memory | Awaited::MemoryTurn) {
                *stopped.entry(held.vm).or_default() += 1;
            }
        }
        stopped
    }

    /// Returns true if a descheduled channel waits for a semaphore.
    fn rests(&self, channel: ChannelId) -> bool {
        self.schedule.descheduled.reason(channel) == Some(Why::Rests)
    }

    /// Logs why each VM's oldest overdue submission waits, at most once per VM every ten seconds.
    pub(crate) fn tell_overdue(&mut self, now: Nanos) {
        let late = self.schedule.held.values().filter(|held| now.since(held.arrived) >= OVERDUE_NS);
        let vms: BTreeSet<TenantId> = late.map(|held| held.vm).collect();
        for vm in vms {
            let told = self.schedule.told.get(&vm);
            if told.is_some_and(|told| now.since(*told) < QUIET_NS) {
                continue;
            }
            let Some(Overdue { channel, engine, awaited, age_ns }) = self.overdue(vm, now).first().copied() else {
                continue;
            };
            self.schedule.told.insert(vm, now);
            let (age_ms, engine) = (age_ns / 1_000_000, engine.name());
            tracing::info!(%vm, ?channel, engine, age_ms, "a submission waits for {awaited}");
        }
    }
}

fn of_hindrance(hindrance: Hindrance) -> Awaited {
    match hindrance {
        Hindrance::Guest | Hindrance::Paused(Pause::Guest) => Awaited::Guest,
        Hindrance::Paused(Pause::Memory) => Awaited::Memory,
        Hindrance::Paused(Pause::Turn) => Awaited::MemoryTurn,
        Hindrance::Paused(Pause::InterruptRateLimit) => Awaited::Interrupts,
        Hindrance::Paused(Pause::Standstill) => Awaited::Standstill,
        Hindrance::Ended => Awaited::Ended,
    }
}
