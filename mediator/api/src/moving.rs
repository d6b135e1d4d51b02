//! Virtual machines that move between cards, and cards that are drained.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The body of `POST /v1/vms/NAME/move` and `POST /v1/tenants/NAME/move`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MoveTo {
    /// Target card; by default, another card that the daemon's policy chooses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub card: Option<String>,
}

/// The response to `POST /v1/vms/NAME/move`: the virtual machine has continued on another card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Moved {
    /// The virtual machine.
    pub vm: String,
    /// Previous card.
    pub from: String,
    /// New card.
    pub to: String,
    /// Time for which the guest and the VMM were paused, in ms.
    pub pause_ms: u64,
    /// Parts of the pause.
    pub pause: PauseParts,
    /// Copied MiB.
    pub memory_mib: u64,
    /// Total time of the move, in ms.
    pub total_ms: u64,
}

/// The response to `POST /v1/tenants/NAME/move`: the tenant and its programs use another card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TenantMoved {
    /// The tenant.
    pub tenant: String,
    /// Previous card.
    pub from: String,
    /// New card.
    pub to: String,
    /// Number of programs that have moved.
    pub programs: usize,
    /// Time for which the programs had no card, in ms.
    pub pause_ms: u64,
    /// MiB of memory in chunks.
    pub memory_mib: u64,
    /// Total time of the move, in ms. The memory returns to the card while the programs run.
    pub total_ms: u64,
}

/// Phases of a virtual machine's pause during a move, in us.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PauseParts {
    /// Quiescing the connection to the VMM.
    pub rest_us: u64,
    /// Draining the work from the engines, and serializing it.
    pub still_us: u64,
    /// Comparing the memory, and copying the differences.
    pub memory_us: u64,
    /// Recreating the virtual machine and its page tables on the target card.
    pub anew_us: u64,
    /// Resuming the connection.
    pub go_on_us: u64,
}

/// The response to `POST /v1/vms/NAME/restore`: the vGPU was restored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Restored {
    /// The virtual machine.
    pub vm: String,
    /// Card of the virtual machine.
    pub card: String,
    /// MiB of restored memory.
    pub memory_mib: u64,
    /// Time for which the guest and the VMM were paused, in ms.
    pub pause_ms: u64,
}

/// The response to `POST /v1/cards/NAME/drain`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DrainReport {
    /// Drained card, which accepts no further virtual machines and tenants.
    pub card: String,
    /// Virtual machines that were moved, in order.
    pub moved: Vec<Moved>,
    /// Tenants that were moved, in order.
    #[serde(default)]
    pub tenants: Vec<TenantMoved>,
    /// Virtual machines and tenants that remain on the card, and continue to run.
    pub left: Vec<Left>,
}

/// A virtual machine or tenant that remains on the drained card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Left {
    /// Name of the virtual machine or tenant.
    pub vm: String,
    /// Reason, with the remedy.
    pub why: String,
}
