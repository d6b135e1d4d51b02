//! A card's memory and its use, in the form of the admin API. Sizes are bytes.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Durations;

pub use config::{CardMemory as CardMemorySettings, VmMemory as VmMemorySettings};

/// The response to `GET /v1/memory`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryList {
    /// The cards whose memory is shared, by name: all cards except those passed through to a virtual machine.
    pub memories: Vec<CardMemory>,
}

/// The response to `GET /v1/cards/NAME/memory`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CardMemory {
    /// The card.
    pub card: String,
    /// Settings of the card: a `[card.memory]` table with all keys.
    pub settings: CardMemorySettings,
    /// Unit of allocation and relocation, in bytes.
    pub chunk_bytes: u64,
    /// Total memory of the card, in bytes.
    pub card_bytes: u64,
    /// Bytes of the card that the mediator uses.
    pub mediator_bytes: u64,
    /// Bytes that are neither used nor guaranteed.
    pub spare_bytes: u64,
    /// Bytes without an owner that are not zeroed yet.
    pub to_scrub_bytes: u64,
    /// Bytes of the card and the host that stay unused, because the card may still access them for their last owner.
    pub quarantined_bytes: u64,
    /// Bytes that were zeroed since the mediator took over the card.
    pub scrubbed_bytes: u64,
    /// Bytes of the reserve that hold evicted chunks.
    pub reserve_used_bytes: u64,
    /// Maximum number of bytes of pinned host memory.
    pub host_budget_bytes: u64,
    /// Bytes of pinned host memory, and of windows.
    pub host_used_bytes: u64,
    /// Part of `host_used_bytes` for the windows of VMs whose programs use CUDA.
    #[serde(default)]
    pub windows_bytes: u64,
    /// Bytes that were moved from the card to host memory since the mediator took over the card.
    pub moved_out_bytes: u64,
    /// Bytes that were moved from host memory to the card.
    pub moved_in_bytes: u64,
    /// Number of memory quanta that have begun since the mediator took over the card.
    pub turns: u64,
    /// Measured rate of copies between card and host, in bytes per second; 0 before the first copy.
    pub copy_bytes_per_second: u64,
    /// The current memory quantum, while virtual machines alternate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<Turn>,
    /// The virtual machines that share the card, by name.
    pub vms: Vec<VmMemory>,
}

impl CardMemory {
    /// Returns the limit that keeps memory of a virtual machine from moving to the card or to host memory, with the
    /// remedy. Returns `None` if the card has no such virtual machine.
    #[must_use]
    pub fn why_stayed(&self, name: &str, to_card: bool) -> Option<String> {
        let Self { card, settings, host_used_bytes, host_budget_bytes, chunk_bytes, .. } = self;
        let vm = self.vms.iter().find(|vm| vm.vm == name)?;
        if to_card {
            let at_quota = vm.on_card_bytes.saturating_add(*chunk_bytes) > vm.quota_bytes;
            return Some(match at_quota {
                true => format!("VM `{name}` has its quota of {} MiB on the card; raise it", vm.quota_bytes >> 20),
                false => format!("card `{card}` has {} MiB free; other VMs have the rest", self.spare_bytes >> 20),
            });
        }
        if settings.host_mib == 0 {
            return Some(format!(
                "card `{card}` has no host memory for it: `memory.host_mib` is 0; set it in the configuration file, and \
                 restart the daemon"
            ));
        }
        if host_used_bytes.saturating_add(*chunk_bytes) > *host_budget_bytes {
            let (used, budget) = (host_used_bytes >> 20, host_budget_bytes >> 20);
            return Some(format!(
                "host memory of card `{card}` is full: {used} of {budget} MiB; raise `memory.host_mib` of the card"
            ));
        }
        Some(format!("VM `{name}` has reached its swap cap, or its memory is on its way already"))
    }
}

/// A time quantum in which one virtual machine has a card's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Turn {
    /// Virtual machine that has the quantum.
    pub holder: String,
    /// All virtual machines that alternate, including the holder.
    pub members: Vec<String>,
    /// Length of a quantum, in ms.
    pub quantum_ms: u64,
}

/// Placement of a virtual machine's memory. `on_card + in_reserve + in_host + unbacked` equals `advertised`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VmMemory {
    /// The virtual machine.
    pub vm: String,
    /// Settings of the virtual machine: a `[vm.memory]` table.
    pub settings: VmMemorySettings,
    /// Bytes of VRAM that the guest sees.
    pub advertised_bytes: u64,
    /// Bytes on the card, without the reserve.
    pub on_card_bytes: u64,
    /// Bytes in the card's reserve, which count as host memory.
    pub in_reserve_bytes: u64,
    /// Bytes in host memory.
    pub in_host_bytes: u64,
    /// Bytes that the guest has never used.
    pub unbacked_bytes: u64,
    /// Bytes that are being moved.
    pub moving_bytes: u64,
    /// Bytes that the guest's CPU can access unseen by the mediator, through apertures that the VMM maps.
    pub cpu_visible_bytes: u64,
    /// Guaranteed bytes on the card.
    pub guarantee_bytes: u64,
    /// Maximum number of bytes on the card.
    pub quota_bytes: u64,
    /// Bytes of the card to which the virtual machine is now entitled, given the demand of the others.
    pub entitled_bytes: u64,
    /// Bytes that are pinned to the card.
    pub pinned_bytes: u64,
    /// Maximum number of bytes that were ever on the card.
    pub on_card_peak_bytes: u64,
    /// Maximum number of bytes that were ever in host memory.
    pub in_host_peak_bytes: u64,
    /// Bytes that were first placed in host memory.
    pub born_in_host_bytes: u64,
    /// Bytes that were moved from the card to host memory.
    pub moved_out_bytes: u64,
    /// Bytes that were moved from host memory to the card.
    pub moved_in_bytes: u64,
    /// Number of times that the virtual machine's work was suspended for moves.
    pub relocations: u64,
    /// Total time for which the work was suspended, in ns.
    pub suspended_ns: u64,
    /// Longest suspension, in ns.
    pub suspended_longest_ns: u64,
    /// Distribution of the suspensions.
    pub suspensions: Durations,
    /// Total time of the copies, in ns.
    pub copied_ns: u64,
    /// Number of submissions that waited for memory.
    pub memory_waits: u64,
    /// Number of submissions that waited for memory until the time limit, and failed.
    pub memory_denied: u64,
    /// Total time for which the work has waited for memory, in ns: for quanta, and for chunks by submissions whose wait
    /// has ended.
    pub memory_waited_ns: u64,
    /// Bytes that could not be placed on first use, by the limit that prevented it: `card` and `quota` apply to the
    /// card, and `host_budget` and `swap_cap` also to host memory.
    pub refused_bytes: BTreeMap<String, u64>,
}

/// A range of a guest's VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Range {
    /// Address of the first byte.
    pub start: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The body of `POST /v1/vms/NAME/memory/evict` and `/return`: memory to move. By default, all that can move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MoveRequest {
    /// Maximum amount in MiB, rounded up to whole chunks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mib: Option<u64>,
    /// Range that limits the move.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<Range>,
}

/// The response to these requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MoveReport {
    /// Bytes that were moved.
    pub moved_bytes: u64,
    /// Bytes that stay, because there is no room or because they were already being moved.
    pub stayed_bytes: u64,
    /// Time for which the virtual machine's work was suspended, in ns.
    pub suspended_ns: u64,
    /// Reason why memory stays, with the remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The response to `POST /v1/vms/NAME/memory/accesses`: counts of accesses to a guest's VRAM in that time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AccessProfile {
    /// Unit of the counts.
    pub counted: Counted,
    /// Ranges with at least one access, by address.
    pub ranges: Vec<Accessed>,
}

/// Units in which accesses are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Counted {
    /// Bursts of the card's engines, on cards that count them.
    Bursts,
    /// References from submissions; accesses of kernels through pointers are not counted.
    Submissions,
}

/// An accessed range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Accessed {
    /// Range of the chunk.
    pub range: Range,
    /// Number of accesses.
    pub count: u64,
}

/// The body of `POST /v1/vms/NAME/memory/hints`: hints about ranges of a guest's VRAM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Hints {
    /// Hints, applied in order. If one is refused, the earlier ones remain in effect.
    pub hints: Vec<Hint>,
}

/// A hint about a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Hint {
    /// Range; the hint applies to all chunks that overlap it.
    pub range: Range,
    /// True to pin the chunks to the card, false to unpin them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<bool>,
    /// Priority: with `victims = "priority"`, the lowest is evicted first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u8>,
    /// With `victims = "profiled"`: number of accesses, in any unit that is the same for all of the guest's hints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accesses: Option<u32>,
}
