//! Sharing of a card's time in the admin API.

use std::collections::BTreeMap;

use sched::Engine;
use serde::{Deserialize, Serialize};

use super::{Durations, WaitReason, WorkState};

/// A virtual machine's share of its card's time: a `[vm.time]` table with all keys.
pub use config::TimeShare as VmTime;

/// Response to `GET /v1/schedulers`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SchedulerList {
    /// Cards with a scheduler, sorted by name: all cards except those passed through to a virtual machine.
    pub schedulers: Vec<CardScheduler>,
}

/// Response to `GET /v1/cards/NAME/scheduler`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct CardScheduler {
    /// Name of the card.
    pub card: String,
    /// Scheduler settings of the card: a `[card.scheduler]` table with all keys.
    pub settings: sched::Config,
    /// Length of the last complete window, over which `received_permille` and `busy_permille` are measured, in ms.
    pub window_ms: u64,
    /// Number of queued submissions.
    pub queued: u64,
    /// Number of submissions on the card.
    pub in_flight: u64,
    /// Use of each engine.
    pub engines: BTreeMap<Engine, EngineUse>,
    /// Virtual machines that share the card, sorted by name.
    pub vms: Vec<VmShare>,
}

/// Use of an engine by all virtual machines together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct EngineUse {
    /// Time for which the engine was busy since the mediator took over the card, in ns.
    pub busy_ns: u64,
    /// Part of the busy time used by virtual machines that have since been removed, in ns.
    pub departed_ns: u64,
    /// Fraction of the window in which the engine was busy with current virtual machines' work, in permille.
    pub busy_permille: u32,
}

/// A virtual machine's use of a card's time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct VmShare {
    /// Name of the virtual machine.
    pub vm: String,
    /// Scheduling settings of the virtual machine.
    pub time: VmTime,
    /// Entitled share of each engine while all virtual machines of the card compete, in permille; 0 in quarantine.
    pub entitled_permille: u32,
    /// Entitled share of the copy engines, in permille, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies_entitled_permille: Option<u32>,
    /// Number of the virtual machine's queued submissions.
    pub queued: u64,
    /// Number of the virtual machine's submissions on the card.
    pub in_flight: u64,
    /// Number of submissions that exceeded their time limit since the virtual machine was added or last released.
    pub strikes: u32,
    /// Incomplete submissions older than one second, oldest first, at most 8.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overdue: Vec<Overdue>,
    /// Quarantine of the virtual machine, during which its work is not started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quarantine: Option<Quarantine>,
    /// State of the virtual machine's work.
    #[serde(default)]
    pub state: WorkState,
    /// Human-readable reason why the work waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Machine-readable reason why the work waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_reason: Option<WaitReason>,
    /// The virtual machine's use of each engine.
    pub engines: BTreeMap<Engine, VmEngine>,
}

/// Overdue submission.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Overdue {
    /// Number of the guest's channel.
    pub channel: u32,
    /// Engine of the submission.
    pub engine: Engine,
    /// Human-readable reason why the submission waits.
    pub waits_for: String,
    /// Age of the submission in ms, measured by the card's clock.
    pub age_ms: u64,
}

/// A quarantine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Quarantine {
    /// Remaining time of the quarantine, in ms; absent if only an operator ends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ends_in_ms: Option<u64>,
}

/// Submissions of a virtual machine to an engine, and its use of the engine, since the virtual machine was added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct VmEngine {
    /// Used engine time, in ns.
    pub used_ns: u64,
    /// Engine time used in the window, in permille of the window. A submission is charged when it completes, so a
    /// submission longer than the window results in more than 1000.
    pub received_permille: u32,
    /// Number of submissions that arrived.
    pub arrived: u64,
    /// Number of started submissions.
    pub started: u64,
    /// Number of completed submissions.
    pub completed: u64,
    /// Number of submissions that were withdrawn, or discarded with their channel.
    pub dropped: u64,
    /// Number of submissions whose channel was killed.
    pub killed: u64,
    /// Duration of the longest submission, in ns.
    pub longest_ns: u64,
    /// Remaining budget, in ns; negative if overdrawn, and 0 for policies without budgets.
    pub credit_ns: i64,
    /// Use in excess of the share, in ns; negative if below the share.
    pub beyond_ns: i64,
    /// Distribution of submissions' waits from arrival to start.
    pub wait: Durations,
}

/// Response to `GET /v1/cards/NAME/scheduler/history`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SchedulerHistory {
    /// Name of the card.
    pub card: String,
    /// Current time of the card's clock, in ns.
    pub now_ns: u64,
    /// Time span covered by the response, in ms.
    pub since_ms: u64,
    /// Length of a sampling interval, in ms.
    pub interval_ms: u64,
    /// Virtual machines that share the card, sorted by name.
    pub vms: Vec<VmHistory>,
}

/// A virtual machine's use of a card over time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct VmHistory {
    /// Name of the virtual machine.
    pub vm: String,
    /// Entitled share of each engine while all virtual machines of the card compete, in permille.
    pub entitled_permille: u32,
    /// Entitled share of the copy engines, in permille, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies_entitled_permille: Option<u32>,
    /// Samples in chronological order; intervals without use are omitted.
    pub samples: Vec<UseSample>,
}

/// A virtual machine's use of a card in one interval.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct UseSample {
    /// Start of the interval on the card's clock, in ns.
    pub from_ns: u64,
    /// Engine time charged in this interval, by engine, in ns. A submission is charged when it completes.
    pub used_ns: BTreeMap<Engine, u64>,
}
