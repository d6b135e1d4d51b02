//! Settings for tenants and for processes of no tenant, in the form that the state machine uses.

use cuda_control::Gang;
use sched::VgpuParams;
use sched::groups::Sharing;
use vram::Limits;

/// Action on an unresponsive process that has a turn or memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnStuck {
    /// Kill the process.
    #[default]
    Kill,
    /// Suspend the process through the driver if possible; otherwise kill it.
    Suspend,
}

/// The operator's settings for a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantSpec {
    /// Name that programs use to select the tenant.
    pub name: String,
    /// ID of the user whose processes may belong to this tenant, in addition to those of root.
    pub uid: Option<u32>,
    /// Memory size that the tenant sees, in bytes.
    pub memory_bytes: u64,
    /// Size in bytes of the memory window of the tenant's virtual machine, or 0 without a window. The window counts as
    /// host memory of the card.
    pub window_bytes: u64,
    /// Limits of the tenant's memory on the card and in host memory, in chunks.
    pub limits: Limits,
    /// The tenant's scheduling settings.
    pub time: VgpuParams,
    /// Action on an unresponsive program.
    pub on_stuck: OnStuck,
    /// Group of tenants whose programs may use the card concurrently.
    pub share_group: Option<ShareGroup>,
    /// The tenant's cards, if it has several.
    pub gang: Option<Gang>,
}

/// Membership in a share group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareGroup {
    /// Name of the group.
    pub name: String,
    /// Kind of sharing that the tenant accepts. The strictest kind that any member accepts applies to the group.
    pub sharing: Sharing,
    /// User ID of the tenant's programs, if known. An MPS server serves one user.
    pub user: Option<u32>,
}

/// Action on processes that use the card without the owner, and on a tenant's processes whose unaccounted memory
/// exceeds the tenant's limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnStranger {
    /// Only report these processes.
    #[default]
    Report,
    /// Kill these processes, if the owner is permitted to.
    Kill,
}

/// A tenant's process that uses card memory beyond its account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unaccounted {
    /// Process ID.
    pub pid: u32,
    /// Name of the process's program.
    pub program: String,
    /// Bytes in excess of the account.
    pub bytes: u64,
}
