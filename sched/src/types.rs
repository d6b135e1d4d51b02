//! Events and decisions.

use crate::config::Config;
use crate::params::VgpuParams;
use serde::{Deserialize, Serialize};

pub use crate::engine::Engine;
pub use tenant::TenantId;

/// One submission: a number that the feeder chooses and never reuses, and that the scheduler returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Ticket(pub u64);

/// A channel of a vGPU, in the feeder's numbering. The scheduler only compares them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Channel(pub u32);

/// Time in nanoseconds of the feeder's clock, which never goes back.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Returns the time this many nanoseconds later.
    #[must_use]
    pub const fn after(self, ns: u64) -> Self {
        Self(self.0.saturating_add(ns))
    }

    /// Returns the nanoseconds since `earlier`; 0 if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// An event. An event with an unknown name is counted and has no other effect, because a vGPU or a channel may end
/// while an event about it is in transit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A vGPU was created.
    Added {
        /// The vGPU.
        vgpu: TenantId,
        /// Its parameters.
        params: VgpuParams,
    },
    /// A vGPU was removed, with all its submissions: none of its work runs on the card.
    Removed {
        /// The vGPU.
        vgpu: TenantId,
    },
    /// A vGPU has a submission to run.
    Arrival {
        /// The vGPU that it belongs to.
        vgpu: TenantId,
        /// Its channel.
        channel: Channel,
        /// The engine that the channel works on.
        engine: Engine,
        /// The submission, by its ticket.
        ticket: Ticket,
    },
    /// A submission that had begun on another card has arrived: it is off the card, and waits. It is
    /// [requeued](Self::Requeued) when it can resume.
    Adopted {
        /// The vGPU that it belongs to.
        vgpu: TenantId,
        /// Its channel.
        channel: Channel,
        /// The engine that the channel works on.
        engine: Engine,
        /// The submission, by its ticket.
        ticket: Ticket,
    },
    /// The card has received the work of [`Decision::Start`]. Gives a more exact start; optional.
    Started {
        /// The submission, by its ticket.
        ticket: Ticket,
    },
    /// A submission that was started waits for something other than the engine: a semaphore, or its guest to enable its
    /// channel. Others may use the engine in the meantime.
    Waiting {
        /// The submission, by its ticket.
        ticket: Ticket,
    },
    /// It no longer waits: the card has resumed it by itself.
    Resumed {
        /// The submission, by its ticket.
        ticket: Ticket,
    },
    /// It no longer waits, but is off the card: queue it again, before anything else of its vGPU. It is then started a
    /// second time.
    Requeued {
        /// The submission, by its ticket.
        ticket: Ticket,
    },
    /// It still waits (or has ended), and has worked in between. That is charged.
    Moved {
        /// The submission, by its ticket.
        ticket: Ticket,
        /// Time of its last known idleness since it began to wait.
        since: Nanos,
    },
    /// The waiting submissions have shared an engine with the running one: the card switches between all of them. Each
    /// is charged for an equal part of the time since then.
    Shared {
        /// The engine.
        engine: Engine,
        /// Start of that time.
        since: Nanos,
    },
    /// A vGPU has kept an engine from the others since then without a submission of its own there: its work elsewhere
    /// had to end before they could use the engine. It is charged for that; the submissions that wait there are not.
    Kept {
        /// The engine.
        engine: Engine,
        /// The vGPU.
        vgpu: TenantId,
        /// Start of that time, or of its unreported part.
        since: Nanos,
    },
    /// An engine works for a channel, according to the card's answer about an overrun.
    Occupied {
        /// The engine.
        engine: Engine,
        /// The vGPU that it belongs to.
        vgpu: TenantId,
        /// The channel.
        channel: Channel,
    },
    /// The submission that the accounts have on an engine has not had it for that long, according to the card's answer
    /// about an overrun.
    Unoccupied {
        /// The engine.
        engine: Engine,
        /// Time at which the first submission was seen to have it; from now on without.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        since: Option<Nanos>,
    },
    /// A channel of a vGPU held an engine for longer than its limit, and was killed for that. Counts towards
    /// quarantine.
    Struck {
        /// The vGPU that it belongs to.
        vgpu: TenantId,
        /// The engine.
        engine: Engine,
    },
    /// A submission that was started has ended. Ends on one engine are reported in order.
    Completed {
        /// The submission, by its ticket.
        ticket: Ticket,
        /// Time of its end according to the card, on the feeder's clock; `None` if the card does not report it.
        ended: Option<Nanos>,
    },
    /// A submission is void: its doorbell had no work left. It may have been started or not.
    Withdrawn {
        /// The submission, by its ticket.
        ticket: Ticket,
    },
    /// A channel is off the card, with all of its queued work and work in flight. Report its submissions that ended
    /// earlier first; the one that the engine was working on is charged up to now.
    ChannelEnded {
        /// The vGPU that it belongs to.
        vgpu: TenantId,
        /// The channel.
        channel: Channel,
    },
    /// Parameters of a vGPU have changed.
    Changed {
        /// The vGPU.
        vgpu: TenantId,
        /// The parameters from now on.
        params: VgpuParams,
    },
    /// A vGPU competes with these settings instead of its own, because it has the time of several vGPUs that wait for
    /// their memory. Its own settings do not change.
    Competes {
        /// The vGPU.
        vgpu: TenantId,
        /// The settings with which it competes from now on; `None` for its own.
        params: Option<VgpuParams>,
    },
    /// The card's policy or its parameters have changed. Queued work and work in flight are kept.
    Configured(Config),
    /// The operator releases a vGPU from quarantine, and clears its strikes.
    Released {
        /// The vGPU.
        vgpu: TenantId,
    },
    /// The time named by [`Scheduler::next_wakeup`](crate::Scheduler::next_wakeup) has arrived.
    Tick,
}

/// Decision of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// Submit the submission to the card now.
    Start(Ticket),
    /// According to the accounts the submission has run for longer than its vGPU's limit. Query which channel has the
    /// engine on the card. If it is this one: take it off the card, notify the guest, and send [`Event::ChannelEnded`]
    /// and [`Event::Struck`]. Else send [`Event::Occupied`] or [`Event::Unoccupied`].
    Kill {
        /// The vGPU that it belongs to.
        vgpu: TenantId,
        /// The channel.
        channel: Channel,
        /// The engine.
        engine: Engine,
        /// The submission that ran too long.
        ticket: Ticket,
        /// Its run time so far, in ns.
        ran_ns: u64,
    },
    /// The vGPU has had its last strike: do not start its work until it is released. Show this to the operator.
    Quarantined {
        /// The vGPU.
        vgpu: TenantId,
        /// Time at which the timer releases it; `None` when only the operator does.
        until: Option<Nanos>,
    },
    /// The quarantine has ended. Show this to the operator.
    Released {
        /// The vGPU.
        vgpu: TenantId,
    },
}

/// Place of a submission that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It waits for a slice.
    Queued,
    /// The engine works on it, or has it queued.
    OnEngine,
    /// The card has it, but it waits for something other than an engine.
    Aside,
}
