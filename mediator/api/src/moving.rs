//! Moves of virtual machines between cards, saved virtual machines, and drained cards.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Body of `POST /v1/vms/NAME/move` and `POST /v1/tenants/NAME/move`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MoveTo {
    /// Name of the target card; by default, the daemon's policy selects another card.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub card: Option<String>,
}

/// Response to `POST /v1/vms/NAME/move`, sent after the virtual machine has resumed on the other card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Moved {
    /// Name of the virtual machine.
    pub vm: String,
    /// Name of the previous card.
    pub from: String,
    /// Name of the new card.
    pub to: String,
    /// Time that the guest and the VMM were paused, in ms.
    pub pause_ms: u64,
    /// Durations of the phases of the pause.
    pub pause: PauseParts,
    /// Size of the copied memory, in MiB.
    pub memory_mib: u64,
    /// Total duration of the move, in ms.
    pub total_ms: u64,
}

/// Response to `POST /v1/tenants/NAME/move`, sent after the tenant and its programs have moved to the other card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TenantMoved {
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the previous card.
    pub from: String,
    /// Name of the new card.
    pub to: String,
    /// Number of programs that have moved.
    pub programs: usize,
    /// Time that the programs spent without a card, in ms.
    pub pause_ms: u64,
    /// Parts of the move.
    pub phases: TenantMovePhases,
    /// Size of the tenant's memory in chunks, in MiB.
    pub memory_mib: u64,
    /// Total duration of the move, in ms. The memory returns to the card while the programs run.
    pub total_ms: u64,
}

/// Parts of a tenant's move, in us. All except `leave_us` are parts of the pause, for the program that took longest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TenantMovePhases {
    /// Time to evict the memory while the programs run, until all programs have left the previous card, in us.
    pub leave_us: u64,
    /// Time to connect the programs to the new card's owner, in us.
    pub connect_us: u64,
    /// Time for NVIDIA's checkpoint: to stop a program's calls, and to copy its remaining memory from the card, in us.
    pub checkpoint_us: u64,
    /// Time to restore a program on the new card, in us.
    pub restore_us: u64,
    /// Time to map the remaining chunks after the restore, in us.
    pub adopt_us: u64,
}

/// Durations of the phases in which a virtual machine is paused during a move, in us.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PauseParts {
    /// Time to quiesce the VMM connection, in us.
    pub rest_us: u64,
    /// Time to drain work from the engines and to save its state, in us.
    pub still_us: u64,
    /// Time to compare the memory and to copy the differences, in us.
    pub memory_us: u64,
    /// Time to recreate the virtual machine and its page tables on the target card, in us.
    pub anew_us: u64,
    /// Time to resume the connection, in us.
    pub go_on_us: u64,
}

/// Response to `POST /v1/vms/NAME/restore`, sent after the vGPU has been restored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Restored {
    /// Name of the virtual machine.
    pub vm: String,
    /// Name of the virtual machine's card.
    pub card: String,
    /// Size of the restored memory, in MiB.
    pub memory_mib: u64,
    /// Time that the guest and the VMM were paused, in ms.
    pub pause_ms: u64,
}

/// Response to `POST /v1/cards/NAME/drain`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DrainReport {
    /// Name of the drained card, which accepts no new virtual machines or tenants.
    pub card: String,
    /// Moved virtual machines, in order.
    pub moved: Vec<Moved>,
    /// Tenants that were moved, in order.
    #[serde(default)]
    pub tenants: Vec<TenantMoved>,
    /// Virtual machines and tenants that remain on the card, and continue to run.
    pub left: Vec<Left>,
}

/// Virtual machine or tenant that remains on the drained card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Left {
    /// Name of the virtual machine or tenant.
    pub vm: String,
    /// Human-readable reason, with the remedy.
    pub why: String,
}
