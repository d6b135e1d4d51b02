//! Events and decisions.

use crate::config::Config;
use crate::params::VgpuParams;
use serde::{Deserialize, Serialize};

pub use crate::engine::Engine;
pub use tenant::TenantId;

/// Number of a submission, assigned by the feeder and never reused. The scheduler returns it in decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Ticket(pub u64);

/// Channel of a vGPU, numbered by the feeder. The scheduler only compares channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Channel(pub u32);

/// Time of the feeder's monotonic clock in nanoseconds.
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

/// An event. Events with an unknown vGPU or submission are counted but otherwise ignored, because a vGPU or channel may
/// end while an event is in transit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A vGPU was created.
    Added {
        /// vGPU.
        vgpu: TenantId,
        /// Parameters of the vGPU.
        params: VgpuParams,
    },
    /// A vGPU was removed with all its submissions. The card no longer executes its work.
    Removed {
        /// vGPU.
        vgpu: TenantId,
    },
    /// A vGPU has a submission to run.
    Arrival {
        /// Owner of the submission.
        vgpu: TenantId,
        /// Channel of the submission.
        channel: Channel,
        /// Engine of the channel.
        engine: Engine,
        /// Ticket of the submission.
        ticket: Ticket,
    },
    /// A submission that started on another card has arrived. It is off the card and waits until it is
    /// [requeued](Self::Requeued).
    Adopted {
        /// Owner of the submission.
        vgpu: TenantId,
        /// Channel of the submission.
        channel: Channel,
        /// Engine of the channel.
        engine: Engine,
        /// Ticket of the submission.
        ticket: Ticket,
    },
    /// The card has received the work of [`Decision::Start`]. This event is optional and provides a more exact start
    /// time.
    Started {
        /// Ticket of the submission.
        ticket: Ticket,
    },
    /// A started submission waits for something other than the engine: for a semaphore, or until its guest enables the
    /// channel. In the meantime, other submissions may use the engine.
    Waiting {
        /// Ticket of the submission.
        ticket: Ticket,
    },
    /// The submission no longer waits because the card has resumed it by itself.
    Resumed {
        /// Ticket of the submission.
        ticket: Ticket,
    },
    /// The submission no longer waits but is off the card. The scheduler must requeue it before other work of its vGPU
    /// and start it again.
    Requeued {
        /// Ticket of the submission.
        ticket: Ticket,
    },
    /// The submission has used the engine since it started to wait, and now waits again or has ended. This use is
    /// charged.
    Moved {
        /// Ticket of the submission.
        ticket: Ticket,
        /// Last time at which the submission was certainly idle.
        since: Nanos,
    },
    /// The waiting submissions have shared an engine with the running one, because the card switches between all of
    /// them. Each submission is charged for an equal part of this time.
    Shared {
        /// Engine.
        engine: Engine,
        /// Start of this time.
        since: Nanos,
    },
    /// A vGPU without a submission on an engine has blocked the engine since `since`, because its work elsewhere had to
    /// end before other vGPUs could use the engine. This time is charged to the vGPU, not to the submissions that wait
    /// for the engine.
    Kept {
        /// Engine.
        engine: Engine,
        /// vGPU.
        vgpu: TenantId,
        /// Start of this time, or of the part that was not reported yet.
        since: Nanos,
    },
    /// The card was queried because of an overrun. According to the card, this channel has the engine.
    Occupied {
        /// Engine.
        engine: Engine,
        /// Owner of the channel.
        vgpu: TenantId,
        /// Channel.
        channel: Channel,
    },
    /// The card was queried because of an overrun. According to the card, the submission that has the engine in the
    /// accounts has had it for less time than recorded.
    Unoccupied {
        /// Engine.
        engine: Engine,
        /// Time since which the first submission has had the engine, or `None` if it does not have the engine now.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        since: Option<Nanos>,
    },
    /// A channel of a vGPU was killed because it had an engine for longer than its limit. This counts towards
    /// quarantine.
    Struck {
        /// Owner of the channel.
        vgpu: TenantId,
        /// Engine.
        engine: Engine,
    },
    /// A started submission has ended. Ends on one engine are reported in order.
    Completed {
        /// Ticket of the submission.
        ticket: Ticket,
        /// End time according to the card, on the feeder's clock, or `None` if the card does not report it.
        ended: Option<Nanos>,
    },
    /// A submission is invalid because there was no work for its doorbell. It may have been started already.
    Withdrawn {
        /// Ticket of the submission.
        ticket: Ticket,
    },
    /// A channel is off the card, with all of its queued work and work in flight. Submissions that ended earlier must
    /// be reported first. The running submission is charged until now.
    ChannelEnded {
        /// Owner of the channel.
        vgpu: TenantId,
        /// Channel.
        channel: Channel,
    },
    /// The parameters of a vGPU have changed.
    Changed {
        /// vGPU.
        vgpu: TenantId,
        /// New parameters.
        params: VgpuParams,
    },
    /// A vGPU competes with settings other than its own, because it uses the time of several vGPUs that wait for their
    /// memory. Its own settings do not change.
    Competes {
        /// vGPU.
        vgpu: TenantId,
        /// New settings for competition, or `None` for its own settings.
        params: Option<VgpuParams>,
    },
    /// The card's policy or its parameters have changed. Queued work and work in flight are kept.
    Configured(Config),
    /// The operator has released a vGPU from quarantine. Its strikes are also cleared.
    Released {
        /// vGPU.
        vgpu: TenantId,
    },
    /// The time of [`Scheduler::next_wakeup`](crate::Scheduler::next_wakeup) has been reached.
    Tick,
}

/// Decision of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// Start the submission on the card now.
    Start(Ticket),
    /// According to the accounts, the submission has run for longer than its vGPU's limit. The feeder must query the
    /// card for the channel that has the engine. If it is the submission's channel, the feeder removes the channel from
    /// the card, notifies the guest, and sends [`Event::ChannelEnded`] and [`Event::Struck`]. Otherwise, it sends
    /// [`Event::Occupied`] or [`Event::Unoccupied`].
    Kill {
        /// Owner of the channel.
        vgpu: TenantId,
        /// Channel.
        channel: Channel,
        /// Engine.
        engine: Engine,
        /// Submission that exceeded the limit.
        ticket: Ticket,
        /// Run time of the submission so far, in ns.
        ran_ns: u64,
    },
    /// The vGPU has reached the maximum number of strikes. Its work must not be started until the vGPU is released. The
    /// operator should be notified.
    Quarantined {
        /// vGPU.
        vgpu: TenantId,
        /// Time at which the quarantine expires, or `None` if only the operator ends it.
        until: Option<Nanos>,
    },
    /// The quarantine has ended. The operator should be notified.
    Released {
        /// vGPU.
        vgpu: TenantId,
    },
}

/// State of a submission that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The submission is queued and waits for its start.
    Queued,
    /// The submission is running or queued on the engine.
    OnEngine,
    /// The submission is on the card, but waits for something other than an engine.
    Aside,
}
