//! State of the work of a tenant or virtual machine.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// State of the work of a tenant or virtual machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkState {
    /// The tenant or virtual machine has no work.
    #[default]
    Idle,
    /// Work is running.
    Working,
    /// Work waits; see `waits_for` for the reason.
    Waiting,
    /// The programs are stopped by a signal, a debugger or the cgroup freezer.
    Stopped,
    /// The tenant or virtual machine is quarantined: its work is not started until it is released.
    Quarantined,
    /// The owner of the card does not respond, because it is restarting or has failed.
    Unserved,
}

/// Reason why work waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WaitReason {
    /// Kind of the reason.
    pub kind: WaitKind,
    /// Tenant or virtual machine that has the memory quantum, or the card that is not free yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
}

/// Kind of reason why work waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WaitKind {
    /// Another tenant or virtual machine has the time slice.
    Slice,
    /// Another tenant or virtual machine has the memory quantum.
    MemoryQuantum,
    /// The memory of the tenant or virtual machine is being moved.
    MemoryMove,
    /// There is not enough memory.
    Memory,
    /// The programs are stopped.
    Stopped,
    /// The tenant or virtual machine is quarantined.
    Quarantine,
    /// The owner of the card does not respond.
    Owner,
    /// Another card of the tenant, named in `holder`, is not free yet.
    Card,
}

impl From<WaitKind> for WaitReason {
    fn from(kind: WaitKind) -> Self {
        Self { kind, holder: None }
    }
}

impl WaitReason {
    /// Describes the reason, without details that change during a wait.
    #[must_use]
    pub fn in_words(&self) -> String {
        match (self.kind, &self.holder) {
            (WaitKind::Slice, _) => "a slice".to_owned(),
            (WaitKind::MemoryQuantum, Some(holder)) => format!("memory quantum of `{holder}`"),
            (WaitKind::MemoryQuantum, None) => "a memory quantum".to_owned(),
            (WaitKind::MemoryMove, _) => "a move of its memory".to_owned(),
            (WaitKind::Memory, _) => "memory".to_owned(),
            (WaitKind::Stopped, _) => "its stopped programs".to_owned(),
            (WaitKind::Quarantine, _) => "its release from quarantine".to_owned(),
            (WaitKind::Owner, _) => "the owner of its card".to_owned(),
            (WaitKind::Card, _) => "another one of its cards".to_owned(),
        }
    }
}

impl WorkState {
    /// All states.
    pub const ALL: [Self; 6] =
        [Self::Idle, Self::Working, Self::Waiting, Self::Stopped, Self::Quarantined, Self::Unserved];

    /// Returns the name of the state in the API.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Working => "working",
            Self::Waiting => "waiting",
            Self::Stopped => "stopped",
            Self::Quarantined => "quarantined",
            Self::Unserved => "unserved",
        }
    }
}
