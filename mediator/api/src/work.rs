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
