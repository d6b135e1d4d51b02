//! What a virtual machine may have of a card's memory, as flags.

use clap::Args;
use vram::OnFull;

use crate::config::VmMemory;

/// Flags of `vm add`.
#[derive(Clone, Debug, Args)]
pub(super) struct MemoryFlags {
    /// MiB of the card that it may have at most
    #[arg(long, value_name = "MIB")]
    quota_mib: Option<u64>,
    /// MiB of the card that it is sure to get
    #[arg(long, value_name = "MIB")]
    guarantee_mib: Option<u64>,
    /// MiB of host memory that it may have at most
    #[arg(long, value_name = "MIB")]
    swap_cap_mib: Option<u64>,
    /// Its part of the card's memory while that is short, against the others' weights
    #[arg(long, value_name = "WEIGHT")]
    memory_weight: Option<u32>,
    /// What happens when the card has no memory for it: swap, queue or refuse
    #[arg(long, value_name = "POLICY")]
    on_full: Option<OnFull>,
    /// Milliseconds that work waits under queue before its channel faults
    #[arg(long, value_name = "MS")]
    queue_ms: Option<u64>,
}

impl From<MemoryFlags> for VmMemory {
    fn from(flags: MemoryFlags) -> Self {
        let MemoryFlags { quota_mib, guarantee_mib, swap_cap_mib, memory_weight: weight, on_full, queue_ms } = flags;
        Self { quota_mib, guarantee_mib, swap_cap_mib, weight, on_full, queue_ms }
    }
}
