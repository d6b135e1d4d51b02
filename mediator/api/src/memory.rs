//! Memory of cards, and its use, in the admin API. Sizes are in bytes.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Durations;

pub use config::{CardMemory as CardMemorySettings, VmMemory as VmMemorySettings};

/// Response to `GET /v1/memory`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryList {
    /// Cards whose memory is shared, sorted by name: all cards except those passed through to a virtual machine.
    pub memories: Vec<CardMemory>,
}

/// Response to `GET /v1/cards/NAME/memory`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CardMemory {
    /// Name of the card.
    pub card: String,
    /// Settings of the card: a `[card.memory]` table with all keys.
    pub settings: CardMemorySettings,
    /// Size of a chunk, the unit of allocation and relocation, in bytes.
    pub chunk_bytes: u64,
    /// Total size of the card's memory in bytes.
    pub card_bytes: u64,
    /// Card memory used by the mediator, in bytes.
    pub mediator_bytes: u64,
    /// Card memory that is neither used nor guaranteed, in bytes.
    pub spare_bytes: u64,
    /// Free memory that is not zeroed yet, in bytes.
    pub to_scrub_bytes: u64,
    /// Card and host memory that must stay unused, because the card may still access it for its previous user, in
    /// bytes.
    pub quarantined_bytes: u64,
    /// Number of bytes zeroed since the mediator took over the card.
    pub scrubbed_bytes: u64,
    /// Part of the reserve that holds evicted chunks, in bytes.
    pub reserve_used_bytes: u64,
    /// Limit on pinned host memory, in bytes.
    pub host_budget_bytes: u64,
    /// Pinned host memory and windows, in bytes.
    pub host_used_bytes: u64,
    /// Part of `host_used_bytes` used by windows of VMs with CUDA programs.
    #[serde(default)]
    pub windows_bytes: u64,
    /// Number of bytes moved from the card to host memory since the mediator took over the card.
    pub moved_out_bytes: u64,
    /// Number of bytes moved from host memory to the card since the mediator took over the card.
    pub moved_in_bytes: u64,
    /// Number of memory quanta started since the mediator took over the card.
    pub turns: u64,
    /// Measured copy rate between card and host, in bytes per second; 0 before the first copy.
    pub copy_bytes_per_second: u64,
    /// Current memory quantum, while virtual machines alternate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<Turn>,
    /// Virtual machines that share the card, sorted by name.
    pub vms: Vec<VmMemory>,
}

impl CardMemory {
    /// Describes the limit that prevents moves of a virtual machine's memory to the card or to host memory, with the
    /// remedy. Returns `None` if the virtual machine is not on this card.
    #[must_use]
    pub fn why_stayed(&self, name: &str, to_card: bool) -> Option<String> {
        let Self { card, settings, host_used_bytes, host_budget_bytes, chunk_bytes, .. } = self;
        let vm = self.vms.iter().find(|vm| vm.vm == name)?;
        if to_card {
            let at_quota = vm.on_card_bytes.saturating_add(*chunk_bytes) > vm.quota_bytes;
            return Some(match at_quota {
                true => format!(
                    "VM `{name}` has reached its quota of {} MiB on the card; raise the quota",
                    vm.quota_bytes >> 20
                ),
                false => format!("card `{card}` has {} MiB free; other VMs use the rest", self.spare_bytes >> 20),
            });
        }
        if settings.host_mib == 0 {
            return Some(format!(
                "card `{card}` has no host memory: `memory.host_mib` is 0; set it in the configuration file, and \
                 restart the daemon"
            ));
        }
        if host_used_bytes.saturating_add(*chunk_bytes) > *host_budget_bytes {
            let (used, budget) = (host_used_bytes >> 20, host_budget_bytes >> 20);
            return Some(format!(
                "host memory of card `{card}` is full: {used} of {budget} MiB; raise `memory.host_mib` of the card"
            ));
        }
        Some(format!("VM `{name}` has reached its swap cap, or its memory is already being moved"))
    }
}

/// Quantum during which one virtual machine has a card's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Turn {
    /// Virtual machine whose quantum it is.
    pub holder: String,
    /// All virtual machines that alternate, including the holder.
    pub members: Vec<String>,
    /// Length of the quantum, in ms.
    pub quantum_ms: u64,
}

/// Placement of a virtual machine's memory. `advertised_bytes` is the sum of `on_card_bytes`, `in_reserve_bytes`,
/// `in_host_bytes` and `unbacked_bytes`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VmMemory {
    /// Name of the virtual machine.
    pub vm: String,
    /// Memory settings of the virtual machine: a `[vm.memory]` table.
    pub settings: VmMemorySettings,
    /// Size of the VRAM visible to the guest, in bytes.
    pub advertised_bytes: u64,
    /// Memory on the card, excluding the reserve, in bytes.
    pub on_card_bytes: u64,
    /// Memory in the card's reserve, which counts as host memory, in bytes.
    pub in_reserve_bytes: u64,
    /// Memory on the host, in bytes.
    pub in_host_bytes: u64,
    /// Memory that the guest has never used, in bytes.
    pub unbacked_bytes: u64,
    /// Memory that is being moved, in bytes.
    pub moving_bytes: u64,
    /// Memory that the guest's CPU can access without the mediator noticing, through apertures mapped by the VMM, in
    /// bytes.
    pub cpu_visible_bytes: u64,
    /// Guaranteed card memory, in bytes.
    pub guarantee_bytes: u64,
    /// Limit on card memory, in bytes.
    pub quota_bytes: u64,
    /// Card memory to which the virtual machine is currently entitled, given the demand of the others, in bytes.
    pub entitled_bytes: u64,
    /// Memory pinned to the card, in bytes.
    pub pinned_bytes: u64,
    /// Peak amount of memory on the card, in bytes.
    pub on_card_peak_bytes: u64,
    /// Peak amount of memory on the host, in bytes.
    pub in_host_peak_bytes: u64,
    /// Memory that was first placed on the host, in bytes.
    pub born_in_host_bytes: u64,
    /// Number of bytes moved from the card to host memory.
    pub moved_out_bytes: u64,
    /// Number of bytes moved from host memory to the card.
    pub moved_in_bytes: u64,
    /// Number of times that the virtual machine's work was suspended for a move.
    pub relocations: u64,
    /// Total duration of the suspensions, in ns.
    pub suspended_ns: u64,
    /// Longest suspension, in ns.
    pub suspended_longest_ns: u64,
    /// Distribution of the suspensions.
    pub suspensions: Durations,
    /// Total duration of copies, in ns.
    pub copied_ns: u64,
    /// Number of submissions that had to wait for memory.
    pub memory_waits: u64,
    /// Number of submissions that failed because their wait for memory exceeded the time limit.
    pub memory_denied: u64,
    /// Total time that work has waited for memory, in ns: waits for quanta, and completed waits of submissions for
    /// chunks.
    pub memory_waited_ns: u64,
    /// Number of bytes that could not be placed on first use, keyed by the limit that prevented it: `card` and `quota`
    /// apply to the card, `host_budget` and `swap_cap` also to host memory.
    pub refused_bytes: BTreeMap<String, u64>,
}

/// Range of a guest's VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Range {
    /// Address of the first byte.
    pub start: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Body of `POST /v1/vms/NAME/memory/evict` and `/return`: memory to move; by default, all movable memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MoveRequest {
    /// Maximum amount in MiB, rounded up to whole chunks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mib: Option<u64>,
    /// Restricts the move to this range.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<Range>,
}

/// Response to requests that move memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MoveReport {
    /// Moved memory, in bytes.
    pub moved_bytes: u64,
    /// Memory that was not moved, because there was no space or because it was already being moved, in bytes.
    pub stayed_bytes: u64,
    /// Duration for which the virtual machine's work was suspended, in ns.
    pub suspended_ns: u64,
    /// Human-readable reason why memory was not moved, with the remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Response to `POST /v1/vms/NAME/memory/accesses`: the accesses to a guest's VRAM, counted for the requested time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AccessProfile {
    /// Unit of the counts.
    pub counted: Counted,
    /// Ranges with at least one access, sorted by address.
    pub ranges: Vec<Accessed>,
}

/// Unit in which accesses are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Counted {
    /// Bursts by the card's engines, on cards that count them.
    Bursts,
    /// References in submissions; accesses by kernels through pointers are not counted.
    Submissions,
}

/// A range with its number of accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Accessed {
    /// Address range of the chunk.
    pub range: Range,
    /// Number of accesses.
    pub count: u64,
}

/// Body of `POST /v1/vms/NAME/memory/hints`: hints about ranges of a guest's VRAM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Hints {
    /// Hints, applied in order. If one is rejected, the earlier ones remain in effect.
    pub hints: Vec<Hint>,
}

/// Hint about a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Hint {
    /// Range of the hint. The hint applies to all chunks that overlap this range.
    pub range: Range,
    /// True to pin the chunks to the card, false to unpin them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<bool>,
    /// Priority; with `victims = "priority"`, chunks with the lowest priority are evicted first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u8>,
    /// Number of accesses for `victims = "profiled"`, in any unit that is the same for all of the guest's hints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accesses: Option<u32>,
}
