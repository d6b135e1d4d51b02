//! State of the work of a tenant or a virtual machine.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// State of the work of a tenant or a virtual machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkState {
    /// It has no work.
    #[default]
    Idle,
    /// Its work runs.
    Working,
    /// Its work waits; `waits_for` has the reason.
    Waiting,
    /// Its programs are stopped by a signal, a debugger or a freezer.
    Stopped,
    /// None of its work is started until it is released.
    Quarantined,
    /// The owner of its card does not answer: it restarts, or has failed.
    Unserved,
}

/// Reason for which work waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WaitReason {
    /// The kind of the reason.
    pub kind: WaitKind,
    /// The holder of the quantum of the card's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
}

/// Kinds of reasons for which work waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WaitKind {
    /// Others have the card.
    Slice,
    /// Another one has the quantum of the card's memory.
    MemoryQuantum,
    /// Its own memory moves.
    MemoryMove,
    /// It lacks memory.
    Memory,
    /// Its programs are stopped.
    Stopped,
    /// It is quarantined.
    Quarantine,
    /// The owner of its card does not answer.
    Owner,
}

impl From<WaitKind> for WaitReason {
    fn from(kind: WaitKind) -> Self {
        Self { kind, holder: None }
    }
}

impl WaitReason {
    /// Describes the reason without the parts that change during a wait.
    #[must_use]
    pub fn in_words(&self) -> String {
        match (self.kind, &self.holder) {
            (WaitKind::Slice, _) => "a slice".to_owned(),
            (WaitKind::MemoryQuantum, Some(holder)) => format!("memory quantum of `{holder}`"),
            (WaitKind::MemoryQuantum, None) => "a memory quantum".to_owned(),
            (WaitKind::MemoryMove, _) => "its memory, which moves".to_owned(),
            (WaitKind::Memory, _) => "memory".to_owned(),
            (WaitKind::Stopped, _) => "its programs, which are stopped".to_owned(),
            (WaitKind::Quarantine, _) => "its release from quarantine".to_owned(),
            (WaitKind::Owner, _) => "the owner of its card".to_owned(),
        }
    }
}

impl WorkState {
    /// All states.
    pub const ALL: [Self; 6] =
        [Self::Idle, Self::Working, Self::Waiting, Self::Stopped, Self::Quarantined, Self::Unserved];

    /// Returns the name in the API.
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
