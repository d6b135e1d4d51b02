//! Tenants of CUDA cards in the admin API.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{VmMemorySettings, VmTime, WaitReason, WorkState};
use config::{Labels, OnRemove, OnStuck};
use sched::groups::Sharing;

/// Response to `GET /v1/tenants`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TenantList {
    /// All tenants, sorted by name.
    pub tenants: Vec<Tenant>,
}

/// Program of a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Program {
    /// Process ID, as seen by the card's owner.
    pub pid: u32,
    /// Name of the program.
    pub name: String,
    /// Guest program served by this process, if the tenant is a virtual machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<ServedProgram>,
}

/// Guest program that a worker on the host serves. The guest chooses the name and process ID.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServedProgram {
    /// Name of the program; empty if the guest's kernel does not report it.
    pub name: String,
    /// Process ID in the guest, if the program's library reported it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// State of a tenant of a CUDA card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Tenant {
    /// Name of the tenant.
    pub name: String,
    /// Name of the tenant's card; the first one if it has several.
    pub card: String,
    /// Names of all cards of a tenant with several cards, in the order of its configuration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cards: Vec<String>,
    /// Name of the profile from which the tenant was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// True if the card's owner responds and programs can be served.
    pub served: bool,
    /// Path of the tenant's socket; that of the first card if it has several.
    pub socket: PathBuf,
    /// Socket paths of a tenant with several cards, in the order of the cards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sockets: Vec<PathBuf>,
    /// State on each card of a tenant with several cards, in the order of the cards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub card_states: Vec<TenantCard>,
    /// Size of the memory visible to the tenant's programs, in MiB.
    pub vram_mib: u64,
    /// Memory settings of the tenant: a `[tenant.memory]` table.
    pub memory: VmMemorySettings,
    /// Scheduling settings of the tenant: a `[tenant.time]` table.
    pub time: VmTime,
    /// Name of the tenant's share group; empty without a group.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub share_group: String,
    /// Mode in which the tenant's share group may share the card.
    #[serde(default)]
    pub sharing: Sharing,
    /// State of the share group; absent without a group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_state: Option<GroupState>,
    /// Policy for a program that does not respond.
    #[serde(default)]
    pub on_stuck: OnStuck,
    /// Policy for the tenant's programs when the tenant is removed.
    #[serde(default)]
    pub on_remove: OnRemove,
    /// Programs of the tenant.
    pub programs: Vec<Program>,
    /// Memory of the tenant on the card, in bytes.
    pub on_card_bytes: u64,
    /// Memory of the tenant on the host, in bytes.
    pub in_host_bytes: u64,
    /// Card time charged to the tenant, in ns.
    pub used_ns: u64,
    /// Time within the tenant's turns during which its work was in flight, measured by events on the card, in ns.
    pub busy_ns: u64,
    /// Part of the busy time during which only copies were in flight, in ns.
    pub copy_ns: u64,
    /// Received share in the last second, in permille.
    pub received_permille: u32,
    /// Entitled share while all tenants compete for the card, in permille.
    pub entitled_permille: u32,
    /// Number of counted submissions; submissions are not counted while the tenant is alone.
    pub launches: u64,
    /// 99th percentile of the waits for a turn, in ns.
    pub wait_p99_ns: u64,
    /// State of the tenant's work.
    #[serde(default)]
    pub state: WorkState,
    /// Human-readable reason why the work waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Machine-readable reason why the work waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_reason: Option<WaitReason>,
    /// Total time that the tenant has waited for memory quanta, in ns.
    #[serde(default)]
    pub quantum_wait_ns: u64,
    /// Number of unresponsive programs that were killed.
    pub killed: u64,
    /// Number of unresponsive programs that could not be killed; they run without a connection, turns or memory.
    #[serde(default)]
    pub kill_failures: u64,
    /// Number of unresponsive programs that were suspended.
    #[serde(default)]
    pub suspended: u64,
    /// Programs most recently killed or suspended because they did not respond, oldest first, at most 4.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub given_up: Vec<GivenUp>,
    /// Time by which the current turn has exceeded its slice while others share the card, in ns.
    #[serde(default)]
    pub overrun_ns: u64,
    /// Processes with unaccounted card memory, as reported by NVML. This memory is charged to the tenant.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unaccounted: Vec<Unaccounted>,
    /// Card memory that the tenant has freed but that is still in use, in bytes. It is charged to the tenant until it
    /// is free.
    #[serde(default)]
    pub kept_bytes: u64,
    /// Part of the unaccounted and kept memory that exceeds the tenant's quota, in bytes.
    #[serde(default)]
    pub over_quota_bytes: u64,
    /// Number of turns that exceeded their time limit.
    #[serde(default)]
    pub strikes: u32,
    /// True if the tenant gets no turns until it is released.
    #[serde(default)]
    pub quarantined: bool,
    /// Labels for orchestrators.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

impl Tenant {
    /// Returns the socket path of each card, in the order of the cards.
    #[must_use]
    pub fn all_sockets(&self) -> &[PathBuf] {
        if self.sockets.is_empty() { std::slice::from_ref(&self.socket) } else { &self.sockets }
    }

    /// Returns the names of the tenant's cards, separated by commas.
    #[must_use]
    pub fn all_cards(&self) -> String {
        if self.cards.is_empty() { self.card.clone() } else { self.cards.join(",") }
    }

    /// Returns a card name and a description of the turns for each card of a tenant with several cards.
    pub fn cards_in_words(&self) -> impl Iterator<Item = (&str, String)> {
        self.card_states.iter().map(|state| {
            let TenantCard { turns, cancelled, gather_ns, rest_ns, on_card_bytes, .. } = state;
            let (gathered, rested) = (gather_ns / 1_000_000, rest_ns / 1_000_000);
            let words = format!(
                "{turns} turns, {cancelled} cancelled, {gathered} ms ready too early, {rested} ms without work, {} MiB",
                on_card_bytes >> 20
            );
            (state.card.as_str(), if state.served { words } else { "NOT SERVED".to_owned() })
        })
    }

    /// Describes the tenant's share group, and how the tenant shares the card within the group. Returns `None` without
    /// a group.
    #[must_use]
    pub fn sharing_in_words(&self) -> Option<String> {
        if self.share_group.is_empty() {
            return None;
        }
        let group = format!("{}, {}", self.share_group, self.sharing.name());
        let Some(state) = &self.group_state else { return Some(group) };
        if let Some(why) = &state.mps_error {
            return Some(format!("{group}: turns: {why}"));
        }
        Some(match (state.together, state.takes_part) {
            (false, _) => format!("{group}: turns"),
            (true, false) if state.mps == MpsState::Starting => format!("{group}: turns until its MPS server serves"),
            (true, true) => format!("{group}: together"),
            (true, false) if state.not_clients.is_empty() => format!("{group}: turns, no program is an MPS client"),
            (true, false) => {
                let programs = state.not_clients.iter().map(|one| format!("{} ({})", one.name, one.pid));
                let programs: Vec<_> = programs.collect();
                format!("{group}: turns until the next start of {}: no MPS client", programs.join(" "))
            }
        })
    }
}

/// State on one card of a tenant with several cards. The tenant's turns begin and end on all of its cards together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TenantCard {
    /// Name of the card.
    pub card: String,
    /// True if the card's owner responds.
    pub served: bool,
    /// Names of the tenant's cards whose owners are unreachable from this card's owner. In the meantime, the tenant
    /// gets no turns.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreachable: Vec<String>,
    /// True if the tenant has work on this card.
    pub has_work: bool,
    /// True if this card is available to the tenant, or in use by it.
    pub is_ready: bool,
    /// Memory of the tenant on the card, in bytes.
    pub on_card_bytes: u64,
    /// Memory of the tenant on the host, in bytes.
    pub in_host_bytes: u64,
    /// Time on this card charged to the tenant, in ns.
    pub used_ns: u64,
    /// Received share of this card in the last second, in permille.
    pub received_permille: u32,
    /// Number of turns.
    pub turns: u64,
    /// Number of turns cancelled because other cards were not free in time.
    pub cancelled: u64,
    /// Time that this card, while available to the tenant, waited for the tenant's other cards, in ns. It is charged to
    /// the tenant.
    pub gather_ns: u64,
    /// Longest such wait for the tenant's other cards, in ns.
    pub longest_gather_ns: u64,
    /// Time within the tenant's turns during which it had no work on this card, in ns.
    pub rest_ns: u64,
    /// 99th percentile of the waits for a turn, in ns.
    pub wait_p99_ns: u64,
}

/// Process of a tenant with unaccounted card memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Unaccounted {
    /// Process ID on the daemon's host.
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// Unaccounted memory, in bytes.
    pub bytes: u64,
}

/// A program that was killed or suspended because it did not respond.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GivenUp {
    /// Process ID, as seen by the card's owner.
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// Human-readable reason.
    pub why: String,
}

/// State of a tenant's share group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GroupState {
    /// The strictest mode of the group's members.
    pub sharing: Sharing,
    /// True if the members' programs use the card at the same time, if they can.
    pub together: bool,
    /// True if this tenant uses the card at the same time as other members.
    pub takes_part: bool,
    /// Programs of this tenant that are not clients of the card's MPS server. While they use the card, turns are
    /// exclusive. A program becomes a client only when it starts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_clients: Vec<Program>,
    /// State of the group's MPS server.
    #[serde(default)]
    pub mps: MpsState,
    /// Reason why no server is available.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps_error: Option<String>,
    /// Value of `CUDA_MPS_PIPE_DIRECTORY` that makes new programs of the tenant clients; absent if the group needs no
    /// server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps_pipes: Option<PathBuf>,
}

/// State of the MPS server of a share group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MpsState {
    /// The group needs no server, because a member only accepts turns.
    #[default]
    Unused,
    /// The server is being started.
    Starting,
    /// Programs that start now become clients.
    Serves,
    /// No server is available, and the start is retried. All programs take turns.
    Unavailable,
}

/// Body of `PATCH /v1/tenants/NAME`: the keys and tables to change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TenantPatch {
    /// Size of the memory visible to the tenant's programs, in MiB. If lowered, programs keep the memory that they
    /// already use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vram_mib: Option<u64>,
    /// Keys of `[tenant.memory]`.
    pub memory: serde_json::Map<String, serde_json::Value>,
    /// Keys of `[tenant.time]`.
    pub time: serde_json::Map<String, serde_json::Value>,
    /// Name of the share group; an empty name means no group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_group: Option<String>,
    /// Mode in which the tenant's share group may share the card.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sharing: Option<Sharing>,
    /// Policy for a program that does not respond.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_stuck: Option<OnStuck>,
    /// Policy for the tenant's programs when the tenant is removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_remove: Option<OnRemove>,
}
