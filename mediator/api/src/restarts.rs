//! Restarts of the workers of guest programs that use CUDA.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Body of `POST /v1/vms/NAME/workers/restart`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RestartWorkers {
    /// Process ID of a program in the guest; by default, all programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// Response to `POST /v1/vms/NAME/workers/restart`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WorkerRestarts {
    /// Name of the virtual machine.
    pub vm: String,
    /// Programs that were selected for a worker restart.
    pub programs: Vec<WorkerRestart>,
}

/// Program that was selected for a worker restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WorkerRestart {
    /// Name of the program, chosen by the guest.
    pub name: String,
    /// Process ID in the guest, if known, chosen by the guest.
    pub pid: Option<u32>,
    /// Time until the program continued in a new worker, in ms; absent if it did not.
    pub pause_ms: Option<u64>,
    /// Reason why the program does not continue in a new worker. Unless stated otherwise, the program has not exited.
    pub why: Option<String>,
}
