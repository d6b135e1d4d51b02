//! Restarts of the workers of guest programs that use CUDA.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The body of `POST /v1/vms/NAME/workers/restart`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RestartWorkers {
    /// Process ID of a program in the guest; by default, all programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// The response to `POST /v1/vms/NAME/workers/restart`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WorkerRestarts {
    /// The virtual machine.
    pub vm: String,
    /// The programs.
    pub programs: Vec<WorkerRestart>,
}

/// A program whose worker was to be restarted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WorkerRestart {
    /// Name of the program. Chosen by the guest.
    pub name: String,
    /// Process ID in the guest, if known. Chosen by the guest.
    pub pid: Option<u32>,
    /// Time until the program continued in a new worker, in ms; absent if it does not.
    pub pause_ms: Option<u64>,
    /// Reason why it does not continue in a new worker. Unless the reason says otherwise, the program continues in its
    /// worker.
    pub why: Option<String>,
}
