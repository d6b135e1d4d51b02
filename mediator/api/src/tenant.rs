//! Tenants of CUDA cards, as the admin API shows them.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{VmMemorySettings, VmTime, WaitReason, WorkState};
use config::{Labels, OnRemove, OnStuck};
use sched::groups::Sharing;

/// The answer to `GET /v1/tenants`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TenantList {
    /// The tenants by name.
    pub tenants: Vec<Tenant>,
}

/// A program of a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Program {
    /// Its process, as the owner of the card sees it.
    pub pid: u32,
    /// Its name.
    pub name: String,
}

/// A tenant of a CUDA card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Tenant {
    /// Its name.
    pub name: String,
    /// The card that it shares.
    pub card: String,
    /// The profile that it was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The card's owner answers: programs can be served.
    pub served: bool,
    /// Path of its socket.
    pub socket: PathBuf,
    /// MiB of memory that its programs see.
    pub vram_mib: u64,
    /// Part of the card's memory: a `[tenant.memory]` table.
    pub memory: VmMemorySettings,
    /// Part of the card's time: a `[tenant.time]` table.
    pub time: VmTime,
    /// Name of its share group; empty for a tenant on its own.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub share_group: String,
    /// Mode of its group that it accepts.
    #[serde(default)]
    pub sharing: Sharing,
    /// State of its group; absent without a group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_state: Option<GroupState>,
    /// Policy for a program that does not answer.
    #[serde(default)]
    pub on_stuck: OnStuck,
    /// Policy for its programs when it is removed.
    #[serde(default)]
    pub on_remove: OnRemove,
    /// Its programs.
    pub programs: Vec<Program>,
    /// Memory on the card.
    pub on_card_bytes: u64,
    /// Memory of it that lies on the host.
    pub in_host_bytes: u64,
    /// Time of the card that it was charged, in ns.
    pub used_ns: u64,
    /// Of its turns, the time in which its work was in flight, by the card's events, in ns.
    pub busy_ns: u64,
    /// Of that, the time in which only copies were, in ns.
    pub copy_ns: u64,
    /// Time received in the last second, in thousandths.
    pub received_permille: u32,
    /// Part that it is entitled to while all want the card, in thousandths.
    pub entitled_permille: u32,
    /// Submissions that were counted; none are while it is alone.
    pub launches: u64,
    /// 99 of 100 turns were waited for no longer than this, in ns.
    pub wait_p99_ns: u64,
    /// State of its work.
    #[serde(default)]
    pub state: WorkState,
    /// Human-readable reason that its work is waiting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// The same reason, for programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_reason: Option<WaitReason>,
    /// Time that it has waited for its quanta of the card's memory, in ns.
    #[serde(default)]
    pub quantum_wait_ns: u64,
    /// Programs that were killed since they did not answer.
    pub killed: u64,
    /// Programs that were given up and could not be killed: they go on without connection, turns and memory.
    #[serde(default)]
    pub kill_failures: u64,
    /// Programs that were suspended since they did not answer.
    #[serde(default)]
    pub suspended: u64,
    /// Its last programs that were given up, oldest first, at most 4: they were killed or suspended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub given_up: Vec<GivenUp>,
    /// Time for which its turn has run on after its slice, while others share the card with it, in ns.
    #[serde(default)]
    pub overrun_ns: u64,
    /// Its processes that have memory of the card past its account, as NVML tells. It is charged for that.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unaccounted: Vec<Unaccounted>,
    /// Memory of the card that it gave back and that something keeps, in bytes. It is charged for that as long as it is
    /// so.
    #[serde(default)]
    pub kept_bytes: u64,
    /// Memory of both that is more than it may have, in bytes.
    #[serde(default)]
    pub over_quota_bytes: u64,
    /// Turns beyond their limit.
    #[serde(default)]
    pub strikes: u32,
    /// It gets no turn until it is released.
    #[serde(default)]
    pub quarantined: bool,
    /// Words of whoever places work.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

/// A process of a tenant with memory of the card past its account.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Unaccounted {
    /// Its number, as the daemon's host has it.
    pub pid: u32,
    /// Name of its program.
    pub program: String,
    /// Bytes past the account.
    pub bytes: u64,
}

/// A program of a tenant that was given up.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GivenUp {
    /// Its process, as the owner of the card sees it.
    pub pid: u32,
    /// Its name.
    pub program: String,
    /// The reason, in words.
    pub why: String,
}

/// State of a tenant's share group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GroupState {
    /// The strictest mode of the group's members.
    pub sharing: Sharing,
    /// True if the members use the card at the same time, as far as their programs can.
    pub together: bool,
    /// True if this tenant does.
    pub takes_part: bool,
    /// Its programs that are not clients of the card's MPS server: while they use the card, it has exclusive turns. A
    /// program is a client from its start, so this changes only with its next start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_clients: Vec<Program>,
    /// State of the group's MPS server.
    #[serde(default)]
    pub mps: MpsState,
    /// Reason that no server serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps_error: Option<String>,
    /// Value of `CUDA_MPS_PIPE_DIRECTORY` with which the tenant's next programs become clients; absent if the group
    /// needs no server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps_pipes: Option<PathBuf>,
}

/// State of the MPS server of a share group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MpsState {
    /// The group needs none: a member only accepts turns.
    #[default]
    Unused,
    /// It is being started.
    Starting,
    /// Programs that start now become clients.
    Serves,
    /// None serves; it is tried again. All programs take turns.
    Unavailable,
}

/// The body of `PATCH /v1/tenants/NAME`: tables with the keys that are to change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TenantPatch {
    /// Keys of `[tenant.memory]`.
    pub memory: serde_json::Map<String, serde_json::Value>,
    /// Keys of `[tenant.time]`.
    pub time: serde_json::Map<String, serde_json::Value>,
    /// Name of its share group; empty for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_group: Option<String>,
    /// Mode of its group that it accepts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sharing: Option<Sharing>,
    /// Policy for a program that does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_stuck: Option<OnStuck>,
    /// Policy for its programs when it is removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_remove: Option<OnRemove>,
}
