//! State and upgrades of the daemon.

use serde::{Deserialize, Serialize};

/// Response to `GET /v1/daemon`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct DaemonInfo {
    /// Version of the program.
    pub version: String,
    /// Process ID of the daemon.
    pub pid: u32,
    /// Number of upgrades since a daemon was first started for these virtual machines.
    pub upgrades: u64,
    /// Time at which this daemon took over from its predecessor, in UTC, in RFC 3339 format with milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgraded_at: Option<String>,
    /// Duration for which virtual machines were paused when this daemon took over, in ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upgrade_pause_ms: Option<u64>,
    /// Number of failed upgrades, after which this daemon continued.
    #[serde(default)]
    pub upgrade_failures: u64,
}

/// Response to `POST /v1/daemon/upgrade`, sent after the next daemon has taken over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Upgraded {
    /// Process ID of the new daemon.
    pub pid: u32,
}
