//! Relocations of VMs' chunks in progress. CUDA cards use the same state machine.

use super::Memory;
use std::time::Duration;
use tenancy::Residency;
use tenancy::relocation::{self, Config};
use vram::{ChunkTable, Place, TenantId};

/// Time limit for a VM's work to leave the engines.
// TIMEOUT: twice the limit of the watchdog, which kills hung work unless the operator has disabled it.
pub const LEAVE_LIMIT: Duration = Duration::from_nanos(2 * channels::HANG_LIMIT_NS);
/// Additional time limit after the VM's engines were reset.
// TIMEOUT: an engine is idle after a reset, and only the mover waits.
pub const RESET_LIMIT: Duration = Duration::from_secs(1);
/// Maximum total size of the chunks that are remapped together while later chunks are copied, in bytes. A larger chunk
/// is remapped alone.
const BATCH_BYTES: u64 = 8 << 20;

/// A VM's chunk that is moving.
pub type Chunk = relocation::Chunk<Place>;
/// All relocations of VMs' memory on a card.
pub type Relocations = relocation::Relocations<TenantId, Place>;
/// State machine for VMs' memory on a card.
pub type Machine = tenancy::Machine<TenantId, Place>;

/// Creates the state machine for a card on which no memory is moving. The machine does not limit a VM's batches,
/// because plans limit them.
pub(super) fn machine(residency: Residency, chunk_bytes: u64) -> Machine {
    let nanoseconds = |limit: Duration| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
    let limits = Config {
        batch_chunks: usize::try_from(BATCH_BYTES / chunk_bytes).unwrap_or(usize::MAX).max(1),
        batches_most: usize::MAX,
        batches_few: usize::MAX,
        answer_ns: nanoseconds(LEAVE_LIMIT),
        force_ns: Some(nanoseconds(RESET_LIMIT)),
    };
    Machine::new(residency, limits)
}

impl Memory {
    /// Returns the relocations and the chunk table.
    pub fn relocations(&mut self) -> (&mut Relocations, &ChunkTable) {
        (&mut self.divider.machine.relocations, &self.vram.chunks)
    }

    /// Removes the relocation state of a VM that was removed. If an order is in progress, its executor calls this
    /// function after the order has ended.
    pub fn forget_user(&mut self, vm: TenantId) {
        let relocations = &mut self.divider.machine.relocations;
        if self.vram.chunks.vm_bytes(vm).is_none() && !relocations.has_order(vm) {
            relocations.forget(vm);
        }
    }
}
