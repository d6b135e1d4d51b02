//! Virtual machines that move between cards, and cards that are drained.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The body of `POST /v1/vms/NAME/move`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MoveTo {
    /// The card; another one by the daemon's policy if none is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub card: Option<String>,
}

/// The answer to `POST /v1/vms/NAME/move`: a virtual machine that goes on with another card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Moved {
    /// The virtual machine.
    pub vm: String,
    /// The card that it had.
    pub from: String,
    /// The card that it has.
    pub to: String,
    /// Time for which its guest and its VMM waited, in ms.
    pub pause_ms: u64,
    /// The same by its parts.
    pub pause: PauseParts,
    /// MiB that were copied.
    pub memory_mib: u64,
    /// Time that all of it took, in ms.
    pub total_ms: u64,
}

/// Parts of the time for which a virtual machine waited while it moved, in us.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PauseParts {
    /// Its VMM's connection came to rest.
    pub rest_us: u64,
    /// Its work left the engines, and was written down.
    pub still_us: u64,
    /// Its memory was compared, and what differed copied.
    pub memory_us: u64,
    /// It was made anew on the other card, with its page tables.
    pub anew_us: u64,
    /// Its connection went on.
    pub go_on_us: u64,
}

/// The answer to `POST /v1/vms/NAME/restore`: a virtual machine whose vGPU goes on from what was saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Restored {
    /// The virtual machine.
    pub vm: String,
    /// Its card.
    pub card: String,
    /// MiB of its memory that have come.
    pub memory_mib: u64,
    /// Time for which its guest and its VMM waited, in ms.
    pub pause_ms: u64,
}

/// The answer to `POST /v1/cards/NAME/drain`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DrainReport {
    /// The card, which takes nobody new from now on.
    pub card: String,
    /// The virtual machines that have moved, in this order.
    pub moved: Vec<Moved>,
    /// The virtual machines and tenants that are still there, and go on as before.
    pub left: Vec<Left>,
}

/// A virtual machine that could not leave its card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Left {
    /// The virtual machine, or the tenant of a CUDA card.
    pub vm: String,
    /// Reason, and what to do.
    pub why: String,
}
