//! A card's time and how it is shared, as the admin API shows it.

use std::collections::BTreeMap;

use sched::Engine;
use serde::{Deserialize, Serialize};

use super::{Durations, WaitReason, WorkState};

/// A virtual machine's share of its card's time: a `[vm.time]` table, with all its keys.
pub use config::TimeShare as VmTime;

/// The answer to `GET /v1/schedulers`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SchedulerList {
    /// The cards that have a scheduler now, by name: those that no virtual machine has by passthrough.
    pub schedulers: Vec<CardScheduler>,
}

/// The answer to `GET /v1/cards/NAME/scheduler`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct CardScheduler {
    /// The card.
    pub card: String,
    /// Its settings: a `[card.scheduler]` table, with all its keys.
    pub settings: sched::Config,
    /// The time over which `received_permille` and `busy_permille` are taken: the last one that is over.
    pub window_ms: u64,
    /// Submissions that wait for their turn.
    pub queued: u64,
    /// Submissions on the card.
    pub in_flight: u64,
    /// The engines.
    pub engines: BTreeMap<Engine, EngineUse>,
    /// The virtual machines that share it, by name.
    pub vms: Vec<VmShare>,
}

/// Use of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct EngineUse {
    /// Time that it has been busy since the card was taken over, in ns.
    pub busy_ns: u64,
    /// Of that, what was used by virtual machines that are gone, in ns.
    pub departed_ns: u64,
    /// Part of the window in which it was busy for virtual machines that are there, in thousandths.
    pub busy_permille: u32,
}

/// A virtual machine's part in a card's time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct VmShare {
    /// The virtual machine.
    pub vm: String,
    /// Its share of time.
    pub time: VmTime,
    /// Its part of each engine while all virtual machines of the card want it, in thousandths; 0 in quarantine.
    pub entitled_permille: u32,
    /// The same of the copy engines, where that is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies_entitled_permille: Option<u32>,
    /// Its submissions that wait for their turn.
    pub queued: u64,
    /// Its submissions on the card.
    pub in_flight: u64,
    /// Its submissions that ran for too long, since it was added or released last.
    pub strikes: u32,
    /// Its submissions that were made more than a second ago and have not ended, oldest first, at most 8.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overdue: Vec<Overdue>,
    /// Why nothing of it is started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quarantine: Option<Quarantine>,
    /// State of its work.
    #[serde(default)]
    pub state: WorkState,
    /// Human-readable reason that its work is waiting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// The same reason, for programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_reason: Option<WaitReason>,
    /// Its use of each engine.
    pub engines: BTreeMap<Engine, VmEngine>,
}

/// A submission that was made long ago.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Overdue {
    /// The guest's number of its channel.
    pub channel: u32,
    /// The engine that it is for.
    pub engine: Engine,
    /// Reason for which it waits, in words.
    pub waits_for: String,
    /// Its age, in ms of the card's clock.
    pub age_ms: u64,
}

/// A quarantine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Quarantine {
    /// Time after which it ends by itself, in ms from now; absent when only the operator ends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ends_in_ms: Option<u64>,
}

/// Submissions of a virtual machine to an engine, and its use of it, since it was added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct VmEngine {
    /// Time used, in ns.
    pub used_ns: u64,
    /// Time used in the window, in thousandths of it. A submission is charged when it ends, so one that is longer than
    /// the window shows as more than the whole.
    pub received_permille: u32,
    /// Submissions that arrived.
    pub arrived: u64,
    /// Submissions that were started.
    pub started: u64,
    /// Submissions that ended.
    pub completed: u64,
    /// Submissions that came to nothing: withdrawn, or gone with their channel.
    pub dropped: u64,
    /// Submissions for which a channel was killed.
    pub killed: u64,
    /// Time used by the longest submission, in ns.
    pub longest_ns: u64,
    /// Budget that is left, in ns; less than 0 when it is overdrawn, 0 with policies that have none.
    pub credit_ns: i64,
    /// Use beyond its share, in ns; less than 0 when it has had less.
    pub beyond_ns: i64,
    /// Time that its submissions waited for their start.
    pub wait: Durations,
}

/// The answer to `GET /v1/cards/NAME/scheduler/history`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SchedulerHistory {
    /// The card.
    pub card: String,
    /// The card's clock now, in ns.
    pub now_ns: u64,
    /// Time that the answer goes back, in ms.
    pub since_ms: u64,
    /// Length of the interval that a sample is of, in ms.
    pub interval_ms: u64,
    /// The virtual machines that share the card, by name.
    pub vms: Vec<VmHistory>,
}

/// Use of a virtual machine over time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct VmHistory {
    /// The virtual machine.
    pub vm: String,
    /// Its part of each engine while all virtual machines of the card want it, in thousandths.
    pub entitled_permille: u32,
    /// The same of the copy engines, where that is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies_entitled_permille: Option<u32>,
    /// In order of time; intervals in which it used nothing are left out.
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
