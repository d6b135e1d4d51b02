//! Tenants of CUDA cards, as the admin API shows them.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{VmMemorySettings, VmTime, WaitReason, WorkState};
use config::{Labels, OnRemove, OnStuck};
use sched::groups::Sharing;

/// The response to `GET /v1/tenants`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TenantList {
    /// The tenants by name.
    pub tenants: Vec<Tenant>,
}

/// A program of a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Program {
    /// Process ID, as seen by the card's owner.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// Program in the guest for which this process works, if the tenant is a virtual machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<ServedProgram>,
}

/// A program in a guest that a worker on the host serves. Name and process ID are the guest's choice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServedProgram {
    /// Name of the program; empty if the guest's kernel does not send it.
    pub name: String,
    /// Process ID in the guest, if the program's library sent it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// A tenant of a CUDA card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Tenant {
    /// Its name.
    pub name: String,
    /// Card that the tenant shares; the first one if it has several.
    pub card: String,
    /// All cards of a tenant with several cards, in the order of its configuration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cards: Vec<String>,
    /// Profile from which the tenant was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// True if the card's owner responds, so that programs can be served.
    pub served: bool,
    /// Path of the tenant's socket; that of the first card if it has several.
    pub socket: PathBuf,
    /// Path of the socket for each card of a tenant with several cards, in the order of the cards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sockets: Vec<PathBuf>,
    /// State of each card of a tenant with several cards, in the order of the cards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub card_states: Vec<TenantCard>,
    /// MiB of memory that the tenant's programs see.
    pub vram_mib: u64,
    /// Share of the card's memory: a `[tenant.memory]` table.
    pub memory: VmMemorySettings,
    /// Share of the card's time: a `[tenant.time]` table.
    pub time: VmTime,
    /// Name of the share group; empty without a group.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub share_group: String,
    /// Mode in which the tenant's group may share the card.
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
    /// Bytes of the tenant's memory on the card.
    pub on_card_bytes: u64,
    /// Bytes of the tenant's memory in host memory.
    pub in_host_bytes: u64,
    /// Card time charged to the tenant, in ns.
    pub used_ns: u64,
    /// Time in the tenant's turns in which its work was in flight, measured by the card's events, in ns.
    pub busy_ns: u64,
    /// Part of the busy time in which only copies were in flight, in ns.
    pub copy_ns: u64,
    /// Received share of the last second, in thousandths.
    pub received_permille: u32,
    /// Entitled share while all tenants compete for the card, in thousandths.
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
    /// The same reason, for programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_reason: Option<WaitReason>,
    /// Time for which the tenant has waited for quanta of the card's memory, in ns.
    #[serde(default)]
    pub quantum_wait_ns: u64,
    /// Number of programs that were killed because they did not respond.
    pub killed: u64,
    /// Number of programs that were given up but could not be killed: they run without connection, turns and memory.
    #[serde(default)]
    pub kill_failures: u64,
    /// Number of programs that were suspended because they did not respond.
    #[serde(default)]
    pub suspended: u64,
    /// Last programs that were given up, which means killed or suspended, oldest first, at most 4.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub given_up: Vec<GivenUp>,
    /// Time by which the current turn has exceeded its slice while others share the card, in ns.
    #[serde(default)]
    pub overrun_ns: u64,
    /// Processes with memory of the card outside the tenant's account, as NVML reports. It is charged to the tenant.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unaccounted: Vec<Unaccounted>,
    /// Memory of the card that the tenant has freed but that is still in use, in bytes. It is charged to the tenant
    /// until it is free.
    #[serde(default)]
    pub kept_bytes: u64,
    /// Part of this unaccounted and kept memory that exceeds the tenant's quota, in bytes.
    #[serde(default)]
    pub over_quota_bytes: u64,
    /// Number of turns over their time limit.
    #[serde(default)]
    pub strikes: u32,
    /// True if the tenant gets no turn until it is released.
    #[serde(default)]
    pub quarantined: bool,
    /// Labels for placement software.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

impl Tenant {
    /// Returns the path of the socket for each card, in the order of the cards.
    #[must_use]
    pub fn all_sockets(&self) -> &[PathBuf] {
        if self.sockets.is_empty() { std::slice::from_ref(&self.socket) } else { &self.sockets }
    }

    /// Returns the names of the tenant's cards, with commas between them.
    #[must_use]
    pub fn all_cards(&self) -> String {
        if self.cards.is_empty() { self.card.clone() } else { self.cards.join(",") }
    }

    /// Describes the turns on each card of a tenant with several cards, with the name of the card.
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

    /// Describes the tenant's share group, and the way in which the tenant shares the card within the group. Returns
    /// `None` without a group.
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

/// State of one card of a tenant with several cards. Its turns begin and end on all of its cards together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TenantCard {
    /// Name of the card.
    pub card: String,
    /// True if the card's owner responds.
    pub served: bool,
    /// Cards of the tenant whose owners the card's owner cannot reach. The tenant gets no turn meanwhile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreachable: Vec<String>,
    /// True if the tenant has work on this card.
    pub has_work: bool,
    /// True if this card is free for the tenant, or the tenant uses it.
    pub is_ready: bool,
    /// Bytes of the tenant's memory on the card.
    pub on_card_bytes: u64,
    /// Bytes of the tenant's memory in host memory.
    pub in_host_bytes: u64,
    /// Time of this card charged to the tenant, in ns.
    pub used_ns: u64,
    /// Received share of this card in the last second, in thousandths.
    pub received_permille: u32,
    /// Number of turns.
    pub turns: u64,
    /// Number of turns that did not begin, because other cards were not free in time.
    pub cancelled: u64,
    /// Time for which this card was free for the tenant and waited for its other cards, in ns. It is charged to the
    /// tenant.
    pub gather_ns: u64,
    /// Longest such wait, in ns.
    pub longest_gather_ns: u64,
    /// Time in the tenant's turns for which it had no work on this card, in ns.
    pub rest_ns: u64,
    /// 99th percentile of the waits for a turn, in ns.
    pub wait_p99_ns: u64,
}

/// A process of a tenant with memory of the card outside the tenant's account.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Unaccounted {
    /// Process ID on the daemon's host.
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// Bytes outside the account.
    pub bytes: u64,
}

/// A program of a tenant that was given up.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GivenUp {
    /// Process ID, as seen by the card's owner.
    pub pid: u32,
    /// Its name.
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
    /// Programs of this tenant that are not clients of the card's MPS server. While they use it, turns are exclusive. A
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

/// The body of `PATCH /v1/tenants/NAME`: tables with the keys to change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TenantPatch {
    /// MiB of memory that the tenant's programs see. Programs keep the memory that they have beyond a lower value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vram_mib: Option<u64>,
    /// Keys of `[tenant.memory]`.
    pub memory: serde_json::Map<String, serde_json::Value>,
    /// Keys of `[tenant.time]`.
    pub time: serde_json::Map<String, serde_json::Value>,
    /// Name of the share group; an empty name means no group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_group: Option<String>,
    /// Mode in which the tenant's group may share the card.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sharing: Option<Sharing>,
    /// Policy for a program that does not respond.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_stuck: Option<OnStuck>,
    /// Policy for the tenant's programs when the tenant is removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_remove: Option<OnRemove>,
}
