//! A card's memory and its use, in the form of the admin API. Sizes are bytes.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Durations;

pub use config::{CardMemory as CardMemorySettings, VmMemory as VmMemorySettings};

/// The answer to `GET /v1/memory`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryList {
    /// The cards whose memory is divided now, by name: those that no virtual machine has by passthrough.
    pub memories: Vec<CardMemory>,
}

/// The answer to `GET /v1/cards/NAME/memory`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CardMemory {
    /// The card.
    pub card: String,
    /// Its settings: a `[card.memory]` table, with all its keys.
    pub settings: CardMemorySettings,
    /// The unit in which memory is given away and moved.
    pub chunk_bytes: u64,
    /// All of the card's memory.
    pub card_bytes: u64,
    /// Bytes that the mediator uses of it.
    pub mediator_bytes: u64,
    /// Bytes that are neither used nor promised.
    pub spare_bytes: u64,
    /// Bytes without an owner that are still to be zeroed.
    pub to_scrub_bytes: u64,
    /// Memory of the card and of the host that stays out of use, since the card may still reach it for its last owner.
    pub quarantined_bytes: u64,
    /// Bytes that were zeroed since the mediator has the card.
    pub scrubbed_bytes: u64,
    /// Bytes of the reserve that hold evicted chunks.
    pub reserve_used_bytes: u64,
    /// Host memory that may be pinned.
    pub host_budget_bytes: u64,
    /// Host memory that is pinned.
    pub host_used_bytes: u64,
    /// Bytes that were moved from the card to host memory since the mediator has the card.
    pub moved_out_bytes: u64,
    /// Bytes that were moved back.
    pub moved_in_bytes: u64,
    /// Turns that have begun since then.
    pub turns: u64,
    /// Bytes per second of copies between card and host, as measured; 0 before the first.
    pub copy_bytes_per_second: u64,
    /// The turn that goes on, while virtual machines take turns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<Turn>,
    /// The virtual machines that share it, by name.
    pub vms: Vec<VmMemory>,
}

impl CardMemory {
    /// Returns the limit for which memory of a virtual machine stays where it is, instead of moving to the card or to
    /// host memory, with the remedy; `None` if the card has no such virtual machine.
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

/// A turn with a card's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Turn {
    /// The virtual machine that works.
    pub holder: String,
    /// All who take turns, the holder included.
    pub members: Vec<String>,
    /// Length of a turn, in ms.
    pub quantum_ms: u64,
}

/// Places of a virtual machine's memory. `on_card + in_reserve + in_host + unbacked` make `advertised`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VmMemory {
    /// The virtual machine.
    pub vm: String,
    /// Its settings: a `[vm.memory]` table.
    pub settings: VmMemorySettings,
    /// VRAM that its guest sees.
    pub advertised_bytes: u64,
    /// Bytes that lie on the card.
    pub on_card_bytes: u64,
    /// Bytes that lie on the card, in the reserve: they count as in host memory.
    pub in_reserve_bytes: u64,
    /// Bytes that lie in host memory.
    pub in_host_bytes: u64,
    /// Bytes that the guest has never used.
    pub unbacked_bytes: u64,
    /// Bytes that move now.
    pub moving_bytes: u64,
    /// Bytes that the guest's CPU reaches without the mediator seeing it, under apertures that the VMM maps.
    pub cpu_visible_bytes: u64,
    /// Bytes that it is sure to get on the card.
    pub guarantee_bytes: u64,
    /// Bytes that it may have on the card at most.
    pub quota_bytes: u64,
    /// Bytes of the card that it is entitled to now, by all who want it.
    pub entitled_bytes: u64,
    /// Bytes that are pinned to the card.
    pub pinned_bytes: u64,
    /// Most that it ever had on the card.
    pub on_card_peak_bytes: u64,
    /// Most that it ever had in host memory.
    pub in_host_peak_bytes: u64,
    /// Bytes that had their first place in host memory.
    pub born_in_host_bytes: u64,
    /// Bytes that were moved from the card to host memory.
    pub moved_out_bytes: u64,
    /// Bytes that were moved back.
    pub moved_in_bytes: u64,
    /// Times that its work was suspended for that.
    pub relocations: u64,
    /// Time for which its work was suspended, all together, in ns.
    pub suspended_ns: u64,
    /// The longest of these, in ns.
    pub suspended_longest_ns: u64,
    /// Lengths of these times.
    pub suspensions: Durations,
    /// Time that the copies took, in ns.
    pub copied_ns: u64,
    /// Submissions that waited for memory.
    pub memory_waits: u64,
    /// Submissions that waited in vain.
    pub memory_denied: u64,
    /// Total time for which its work has waited for memory, in ns: for its quanta, and for chunks, of submissions whose
    /// wait has ended.
    pub memory_waited_ns: u64,
    /// Bytes that found no place when they were wanted first, by the limit that was in the way: `card` and `quota` keep
    /// from the card, `host_budget` and `swap_cap` from host memory as well.
    pub refused_bytes: BTreeMap<String, u64>,
}

/// A range of a guest's VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Range {
    /// First byte.
    pub start: u64,
    /// Bytes.
    pub bytes: u64,
}

/// The body of `POST /v1/vms/NAME/memory/evict` and `/return`: what is to move. All that can, when nothing is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MoveRequest {
    /// MiB at most, rounded up to whole chunks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mib: Option<u64>,
    /// Only what lies in this range.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<Range>,
}

/// The answer: what has moved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MoveReport {
    /// Bytes that lie elsewhere now.
    pub moved_bytes: u64,
    /// Bytes that stay, for want of room or since they were on their way already.
    pub stayed_bytes: u64,
    /// Time for which the virtual machine's work was suspended, in ns.
    pub suspended_ns: u64,
    /// Why memory stays, with the remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The answer of `POST /v1/vms/NAME/memory/accesses`: how often a guest's VRAM was accessed in that time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AccessProfile {
    /// The unit of the counts.
    pub counted: Counted,
    /// Ranges that were accessed at all, by address.
    pub ranges: Vec<Accessed>,
}

/// Units in which accesses are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Counted {
    /// Bursts of the card's engines, on a card that counts them.
    Bursts,
    /// Times that submissions name memory there: what kernels reach by pointers is not among it.
    Submissions,
}

/// A range that was accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Accessed {
    /// The range: a chunk.
    pub range: Range,
    /// Number of accesses.
    pub count: u64,
}

/// The body of `POST /v1/vms/NAME/memory/hints`: what somebody knows of ranges of a guest's VRAM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Hints {
    /// One after the other. When one is refused, those before it hold.
    pub hints: Vec<Hint>,
}

/// A hint about a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Hint {
    /// The range; the chunks that it touches.
    pub range: Range,
    /// They stay on the card, or not any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<bool>,
    /// With `victims = "priority"` the lowest goes first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u8>,
    /// With `victims = "profiled"`: how often they are accessed, in any unit that all of the guest's have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accesses: Option<u32>,
}
