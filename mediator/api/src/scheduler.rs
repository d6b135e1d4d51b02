//! A card's time and how it is shared, as the admin API shows it.

use std::collections::BTreeMap;

use sched::Engine;
use serde::{Deserialize, Serialize};

use super::{Durations, WaitReason, WorkState};

/// A virtual machine's share of its card's time: a `[vm.time]` table with all keys.
pub use config::TimeShare as VmTime;

/// The response to `GET /v1/schedulers`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SchedulerList {
    /// The cards with a scheduler, by name: all cards except those passed through to a virtual machine.
    pub schedulers: Vec<CardScheduler>,
}

/// The response to `GET /v1/cards/NAME/scheduler`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct CardScheduler {
    /// The card.
    pub card: String,
    /// Settings of the card: a `[card.scheduler]` table with all keys.
    pub settings: sched::Config,
    /// Length of the window over which `received_permille` and `busy_permille` are measured: the last complete one.
    pub window_ms: u64,
    /// Number of queued submissions.
    pub queued: u64,
    /// Number of submissions on the card.
    pub in_flight: u64,
    /// The engines.
    pub engines: BTreeMap<Engine, EngineUse>,
    /// The virtual machines that share the card, by name.
    pub vms: Vec<VmShare>,
}

/// Use of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct EngineUse {
    /// Time for which the engine was busy since the mediator took over the card, in ns.
    pub busy_ns: u64,
    /// Part of the busy time that removed virtual machines have used, in ns.
    pub departed_ns: u64,
    /// Part of the window in which the engine was busy for present virtual machines, in thousandths.
    pub busy_permille: u32,
}

/// A virtual machine's use of a card's time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct VmShare {
    /// The virtual machine.
    pub vm: String,
    /// Settings of the virtual machine's share.
    pub time: VmTime,
    /// Entitled share of each engine while all virtual machines of the card compete, in thousandths; 0 in quarantine.
    pub entitled_permille: u32,
    /// Entitled share of the copy engines, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies_entitled_permille: Option<u32>,
    /// Number of the virtual machine's queued submissions.
    pub queued: u64,
    /// Number of the virtual machine's submissions on the card.
    pub in_flight: u64,
    /// Number of submissions over their time limit since the virtual machine was added or last released.
    pub strikes: u32,
    /// Unfinished submissions that are older than one second, oldest first, at most 8.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overdue: Vec<Overdue>,
    /// Quarantine, during which none of the virtual machine's work is started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quarantine: Option<Quarantine>,
    /// State of the virtual machine's work.
    #[serde(default)]
    pub state: WorkState,
    /// Human-readable reason why the work waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// The same reason, for programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_reason: Option<WaitReason>,
    /// Use of each engine.
    pub engines: BTreeMap<Engine, VmEngine>,
}

/// An overdue submission.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Overdue {
    /// Number of the channel in the guest.
    pub channel: u32,
    /// Engine of the submission.
    pub engine: Engine,
    /// Human-readable reason why the submission waits.
    pub waits_for: String,
    /// Age of the submission, in ms of the card's clock.
    pub age_ms: u64,
}

/// A quarantine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Quarantine {
    /// Remaining time of the quarantine, in ms; absent if only an operator ends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ends_in_ms: Option<u64>,
}

/// Submissions of a virtual machine to an engine, and use of the engine, since the virtual machine was added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct VmEngine {
    /// Time used, in ns.
    pub used_ns: u64,
    /// Time used in the window, in thousandths of the window. A submission is charged when it ends, so a submission
    /// longer than the window counts as more than 1000.
    pub received_permille: u32,
    /// Number of submissions that arrived.
    pub arrived: u64,
    /// Number of submissions that were started.
    pub started: u64,
    /// Number of submissions that ended.
    pub completed: u64,
    /// Number of submissions that were withdrawn, or dropped with their channel.
    pub dropped: u64,
    /// Number of submissions whose channel was killed.
    pub killed: u64,
    /// Time used by the longest submission, in ns.
    pub longest_ns: u64,
    /// Remaining budget, in ns; negative if overdrawn, and 0 with policies without budgets.
    pub credit_ns: i64,
    /// Use above the share, in ns; negative if below the share.
    pub beyond_ns: i64,
    /// Time that submissions waited for their start.
    pub wait: Durations,
}

/// The response to `GET /v1/cards/NAME/scheduler/history`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SchedulerHistory {
    /// The card.
    pub card: String,
    /// Present time on the card's clock, in ns.
    pub now_ns: u64,
    /// Time span that the response covers, in ms.
    pub since_ms: u64,
    /// Length of a sample's interval, in ms.
    pub interval_ms: u64,
    /// The virtual machines that share the card, by name.
    pub vms: Vec<VmHistory>,
}

/// Use of a virtual machine over time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct VmHistory {
    /// The virtual machine.
    pub vm: String,
    /// Entitled share of each engine while all virtual machines of the card compete, in thousandths.
    pub entitled_permille: u32,
    /// Entitled share of the copy engines, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies_entitled_permille: Option<u32>,
    /// Samples in order of time; intervals without use are omitted.
    pub samples: Vec<UseSample>,
}

/// Use of a virtual machine in one interval.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct UseSample {
    /// Start of the interval, on the card's clock, in ns.
    pub from_ns: u64,
    /// Time charged in this interval, by engine, in ns. A submission is charged when it ends.
    pub used_ns: BTreeMap<Engine, u64>,
}
