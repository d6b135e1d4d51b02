//! Events and decisions of the scheduler.

use crate::config::Config;
use crate::params::VgpuParams;
use serde::{Deserialize, Serialize};

pub use crate::engine::Engine;
pub use tenant::TenantId;

/// Submission number, which is assigned by the feeder and never reused. The scheduler returns it in decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Ticket(pub u64);

/// Channel of a vGPU, numbered by the feeder. The scheduler only compares these numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Channel(pub u32);

/// Time on the feeder's monotonic clock, in ns.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Returns the time `ns` nanoseconds after this one.
    #[must_use]
    pub const fn after(self, ns: u64) -> Self {
        Self(self.0.saturating_add(ns))
    }

    /// Returns the number of nanoseconds since `earlier`, or 0 if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// An event. Events for an unknown vGPU or submission are counted and otherwise ignored, because a vGPU or channel may
/// end while an event is in transit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A vGPU was created.
    Added {
        /// Number of the new vGPU.
        vgpu: TenantId,
        /// Settings of the vGPU.
        params: VgpuParams,
    },
    /// A vGPU and all its submissions were removed. The card no longer executes its work.
    Removed {
        /// Number of the removed vGPU.
        vgpu: TenantId,
    },
    /// A vGPU has a submission to run.
    Arrival {
        /// vGPU of the submission.
        vgpu: TenantId,
        /// Channel of the submission.
        channel: Channel,
        /// Engine of the channel.
        engine: Engine,
        /// Ticket of the submission.
        ticket: Ticket,
    },
    /// A submission that started on another card has arrived. It is not on this card yet, and waits until it is
    /// [requeued](Self::Requeued).
    Adopted {
        /// vGPU of the submission.
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
    /// A started submission waits for something other than the engine, such as a semaphore, or for the guest to enable
    /// the channel. In the meantime, other submissions may use the engine.
    Waiting {
        /// Ticket of the submission.
        ticket: Ticket,
    },
    /// A waiting submission continues, because the card has resumed it by itself.
    Resumed {
        /// Ticket of the submission.
        ticket: Ticket,
    },
    /// A submission no longer waits, but is off the card. The scheduler must requeue it before its vGPU's other work
    /// and start it again.
    Requeued {
        /// Ticket of the submission.
        ticket: Ticket,
    },
    /// A waiting submission has used the engine, and now waits again or has ended. It is charged for this use.
    Moved {
        /// Ticket of the submission.
        ticket: Ticket,
        /// Last time at which the submission was known to be idle.
        since: Nanos,
    },
    /// The waiting submissions have shared an engine with the running one, because the card switches between all of
    /// them. Each submission is charged an equal part of the time since `since`.
    Shared {
        /// Shared engine.
        engine: Engine,
        /// Start of the shared time.
        since: Nanos,
    },
    /// A vGPU without a submission on an engine has blocked it, because its work elsewhere had to end before other
    /// vGPUs could use the engine. The time since `since` is charged to the vGPU, not to the submissions that wait for
    /// the engine.
    Kept {
        /// Blocked engine.
        engine: Engine,
        /// vGPU that blocked the engine.
        vgpu: TenantId,
        /// Start of the blocked time, or of the part that has not been reported yet.
        since: Nanos,
    },
    /// The card was queried because of an overrun, and reported that this channel has the engine.
    Occupied {
        /// Queried engine.
        engine: Engine,
        /// Owner of the channel.
        vgpu: TenantId,
        /// Channel that has the engine.
        channel: Channel,
    },
    /// The card was queried because of an overrun, and reported that the submission that has the engine in the accounts
    /// has had it for less time than recorded.
    Unoccupied {
        /// Queried engine.
        engine: Engine,
        /// Time since which this submission has had the engine, or `None` if it does not have the engine now.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        since: Option<Nanos>,
    },
    /// A vGPU's channel was killed because it had an engine for longer than its run time limit. This counts towards
    /// quarantine.
    Struck {
        /// Owner of the channel.
        vgpu: TenantId,
        /// Engine that the channel had.
        engine: Engine,
    },
    /// A started submission has ended. The ends on one engine are reported in order.
    Completed {
        /// Ticket of the submission.
        ticket: Ticket,
        /// End time according to the card, converted to the feeder's clock, or `None` if the card does not report it.
        ended: Option<Nanos>,
    },
    /// A submission is void, because there was no work for its doorbell. It may have been started already.
    Withdrawn {
        /// Ticket of the submission.
        ticket: Ticket,
    },
    /// A channel was removed from the card together with its queued work and its work in flight. Submissions that ended
    /// earlier must be reported first. The running submission is charged until now.
    ChannelEnded {
        /// Owner of the channel.
        vgpu: TenantId,
        /// Channel that was removed.
        channel: Channel,
    },
    /// The settings of a vGPU have changed.
    Changed {
        /// vGPU whose settings have changed.
        vgpu: TenantId,
        /// New settings.
        params: VgpuParams,
    },
    /// Settings other than a vGPU's own determine its share, because it uses the time of several vGPUs that wait for
    /// their memory. Its own settings do not change.
    Competes {
        /// vGPU whose share the settings determine.
        vgpu: TenantId,
        /// New settings, or `None` for the vGPU's own settings.
        params: Option<VgpuParams>,
    },
    /// The card's policy or its parameters have changed. Queued work and work in flight are kept.
    Configured(Config),
    /// The operator has released a vGPU from quarantine, which also clears its strikes.
    Released {
        /// vGPU that was released.
        vgpu: TenantId,
    },
    /// The time returned by [`Scheduler::next_wakeup`](crate::Scheduler::next_wakeup) has been reached.
    Tick,
}

/// A decision of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// Start the submission on the card now.
    Start(Ticket),
    /// According to the accounts, the submission has exceeded its vGPU's run time limit. The feeder must query the card
    /// for the channel that has the engine. If this is the submission's channel, the feeder removes the channel from
    /// the card, notifies the guest, and sends [`Event::ChannelEnded`] and [`Event::Struck`]. Otherwise, it sends
    /// [`Event::Occupied`] or [`Event::Unoccupied`].
    Kill {
        /// Owner of the channel.
        vgpu: TenantId,
        /// Channel to kill.
        channel: Channel,
        /// Engine of the channel.
        engine: Engine,
        /// Submission that exceeded the limit.
        ticket: Ticket,
        /// Run time of the submission so far, in ns.
        ran_ns: u64,
    },
    /// The vGPU has reached the maximum number of strikes. Its work must not start until the vGPU is released. The
    /// operator should be notified.
    Quarantined {
        /// Quarantined vGPU.
        vgpu: TenantId,
        /// Time at which the quarantine expires, or `None` if only the operator can end it.
        until: Option<Nanos>,
    },
    /// A quarantine has ended. The operator should be notified.
    Released {
        /// vGPU whose quarantine has ended.
        vgpu: TenantId,
    },
}

/// State of a submission that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The submission is queued and has not been started.
    Queued,
    /// The submission was started, and is running or queued on the engine.
    OnEngine,
    /// The submission was started, but waits for something other than an engine.
    Aside,
}
