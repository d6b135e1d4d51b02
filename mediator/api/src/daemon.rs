//! The daemon itself.

use serde::{Deserialize, Serialize};

/// The response to `GET /v1/daemon`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct DaemonInfo {
    /// Version of the program.
    pub version: String,
    /// Process ID of the daemon.
    pub pid: u32,
    /// Number of earlier daemons that served the same virtual machines; each was replaced by an upgrade.
    pub upgrades: u64,
    /// Time in UTC at which this daemon took over from its predecessor, as RFC 3339 with milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgraded_at: Option<String>,
    /// Time for which the virtual machines were paused when this daemon took over, in ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upgrade_pause_ms: Option<u64>,
    /// Number of upgrades of this daemon that failed, after which it continued.
    #[serde(default)]
    pub upgrade_failures: u64,
}

/// The response to `POST /v1/daemon/upgrade`: another daemon has taken over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Upgraded {
    /// Process ID of the next daemon.
    pub pid: u32,
}
