//! Events and decisions.

use crate::config::Config;
use crate::params::VgpuParams;
use serde::{Deserialize, Serialize};

pub use crate::engine::Engine;
pub use tenant::TenantId;

/// Number of a submission. The feeder chooses the value and never reuses it; the scheduler returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Ticket(pub u64);

/// A channel of a vGPU, in the feeder's numbering. The scheduler only compares channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Channel(pub u32);

/// Time in nanoseconds of the feeder's clock, which never goes backwards.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Returns the time `ns` nanoseconds later.
    #[must_use]
    pub const fn after(self, ns: u64) -> Self {
        Self(self.0.saturating_add(ns))
    }

    /// Returns the number of nanoseconds since `earlier`; 0 if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// An event. An event that names an unknown vGPU or submission is counted and otherwise ignored, because a vGPU or
/// channel may end while an event about it is in transit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A vGPU was created.
    Added {
        /// The vGPU.
        vgpu: TenantId,
        /// The parameters of the vGPU.
        params: VgpuParams,
    },
    /// A vGPU was removed with all its submissions, and the card no longer runs its work.
    Removed {
        /// The vGPU.
        vgpu: TenantId,
    },
    /// A vGPU has a submission to run.
    Arrival {
        /// Owner of the submission.
        vgpu: TenantId,
        /// Its channel.
        channel: Channel,
        /// The engine that runs the channel's work.
        engine: Engine,
        /// The submission, by its ticket.
        ticket: Ticket,
    },
    /// A submission that began on another card has arrived. The submission is off the card and waits. The submission is
    /// [requeued](Self::Requeued) when it can resume.
    Adopted {
        /// Owner of the submission.
        vgpu: TenantId,
        /// Its channel.
        channel: Channel,
        /// The engine that runs the channel's work.
        engine: Engine,
        /// The submission, by its ticket.
        ticket: Ticket,
    },
    /// The card has received the work of [`Decision::Start`]. This event is optional and gives a more exact start time.
    Started {
        /// The submission, by its ticket.
        ticket: Ticket,
    },
    /// A started submission waits for something other than the engine: for a semaphore, or for its guest to enable the
    /// channel. Other submissions may use the engine in the meantime.
    Waiting {
        /// The submission, by its ticket.
        ticket: Ticket,
    },
    /// The submission no longer waits: the card has resumed it by itself.
    Resumed {
        /// The submission, by its ticket.
        ticket: Ticket,
    },
    /// The submission no longer waits, but is off the card. The scheduler must queue it again before other work of its
    /// vGPU, and start it a second time.
    Requeued {
        /// The submission, by its ticket.
        ticket: Ticket,
    },
    /// The submission has worked since it began to wait, and now waits again or has ended. That work is charged.
    Moved {
        /// The submission, by its ticket.
        ticket: Ticket,
        /// Last time at which the submission is known to have been idle.
        since: Nanos,
    },
    /// The waiting submissions have shared an engine with the running one, because the card switches between all of
    /// them. Each of these submissions is charged for an equal part of the time since then.
    Shared {
        /// The engine.
        engine: Engine,
        /// Time since which the submissions have shared the engine.
        since: Nanos,
    },
    /// A vGPU without a submission on an engine has blocked the engine since `since`, because its work elsewhere had to
    /// end before other vGPUs could use the engine. The vGPU is charged for that time; the submissions waiting for the
    /// engine are not.
    Kept {
        /// The engine.
        engine: Engine,
        /// The vGPU.
        vgpu: TenantId,
        /// Start of that time, or of the part that has not been reported yet.
        since: Nanos,
    },
    /// The card was queried because of an overrun, and answered that an engine works for this channel.
    Occupied {
        /// The engine.
        engine: Engine,
        /// Owner of the channel.
        vgpu: TenantId,
        /// The channel.
        channel: Channel,
    },
    /// The card was queried because of an overrun, and answered that the submission that has the engine in the accounts
    /// has had it for less time than recorded.
    Unoccupied {
        /// The engine.
        engine: Engine,
        /// Time since which the first submission has had the engine; `None` if it does not have the engine now.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        since: Option<Nanos>,
    },
    /// A channel of a vGPU held an engine for longer than its limit, and was therefore killed. Counts towards
    /// quarantine.
    Struck {
        /// Owner of the channel.
        vgpu: TenantId,
        /// The engine.
        engine: Engine,
    },
    /// A submission that was started has ended. The ends of submissions on one engine are reported in order.
    Completed {
        /// The submission, by its ticket.
        ticket: Ticket,
        /// End time according to the card, on the feeder's clock; `None` if the card does not report it.
        ended: Option<Nanos>,
    },
    /// A submission is void, because its doorbell left no work to do. The submission may have been started already.
    Withdrawn {
        /// The submission, by its ticket.
        ticket: Ticket,
    },
    /// A channel is off the card, with all of its queued work and work in flight. Submissions that ended earlier must
    /// be reported first. The submission that the engine was working on is charged up to now.
    ChannelEnded {
        /// Owner of the channel.
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
    /// A vGPU competes with these settings instead of its own, because it uses the time of several vGPUs that wait for
    /// their memory. Its own settings do not change.
    Competes {
        /// The vGPU.
        vgpu: TenantId,
        /// The settings with which the vGPU competes from now on; `None` for its own settings.
        params: Option<VgpuParams>,
    },
    /// The card's policy or its parameters have changed. Queued work and work in flight are kept.
    Configured(Config),
    /// The operator has released a vGPU from quarantine, which also clears its strikes.
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
    /// According to the accounts, the submission has run for longer than its vGPU's limit. The feeder must query the
    /// card for the channel that has the engine. If it is the submission's channel, the feeder takes the channel off
    /// the card, notifies the guest, and sends [`Event::ChannelEnded`] and [`Event::Struck`]. Otherwise it sends
    /// [`Event::Occupied`] or [`Event::Unoccupied`].
    Kill {
        /// Owner of the channel.
        vgpu: TenantId,
        /// The channel.
        channel: Channel,
        /// The engine.
        engine: Engine,
        /// The submission that ran too long.
        ticket: Ticket,
        /// Run time of the submission so far, in ns.
        ran_ns: u64,
    },
    /// The vGPU has reached the maximum number of strikes. Its work must not be started until the vGPU is released. The
    /// operator should be notified.
    Quarantined {
        /// The vGPU.
        vgpu: TenantId,
        /// Time at which the quarantine ends by itself; `None` if only the operator ends it.
        until: Option<Nanos>,
    },
    /// The quarantine has ended. The operator should be notified.
    Released {
        /// The vGPU.
        vgpu: TenantId,
    },
}

/// State of a submission that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The submission is queued and waits for its start.
    Queued,
    /// The engine works on the submission, or has it queued.
    OnEngine,
    /// The card has the submission, which waits for something other than an engine.
    Aside,
}
