//! The daemon itself.

use serde::{Deserialize, Serialize};

/// The answer to `GET /v1/daemon`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct DaemonInfo {
    /// Version of the program.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Daemons that have gone on with the same virtual machines before this one.
    pub upgrades: u64,
    /// Time in UTC at which this daemon took over from the one before, as RFC 3339 with milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgraded_at: Option<String>,
    /// Time for which the virtual machines waited when this daemon went on with them, in ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upgrade_pause_ms: Option<u64>,
    /// Upgrades that were asked of this daemon, and in which it has gone on itself.
    #[serde(default)]
    pub upgrade_failures: u64,
}

/// The answer to `POST /v1/daemon/upgrade`: another daemon goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Upgraded {
    /// The process of the next daemon.
    pub pid: u32,
}
