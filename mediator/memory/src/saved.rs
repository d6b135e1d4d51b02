//! Saved form of a card's memory, excluding the chunk table and the policies for its division.

use super::balance::Divider;
use super::iova::{Claims, IovaSpace, SavedIova};
use super::pinned::{PinnedPool, SavedSlots};
use super::{CardVram, Memory, found};
use crate::ManagerError;
use card::Card;
use nvspec::addr::{Iova, SMALL_PAGE};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::sync::Arc;
use vram::{ChunkTable, Lookup, PagePool, Place, TenantId};

/// Saved form of a [`Memory`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedMemory {
    iova: SavedIova,
    /// I/O address of the page to which barriers write.
    barrier: u64,
    slots: SavedSlots,
    /// Number of quanta started.
    turns: u64,
}

/// Parts of a restored [`Memory`].
pub struct Restored {
    /// I/O addresses.
    pub iova: IovaSpace,
    /// I/O address ranges that have not been claimed yet.
    pub claims: Claims,
    /// I/O address of the page to which barriers write.
    pub barrier: Iova,
    /// Host memory.
    pub pinned: PinnedPool,
    /// Number of quanta started.
    pub turns: u64,
}

impl Memory {
    /// Saves the memory. No memory may be moving.
    pub fn save(&self) -> SavedMemory {
        let Self {
            vram,
            iova,
            barrier,
            // The card's saved state contains this pool.
            own: _,
            // The next process rebinds the channels.
            copier: _,
            // Most of this is saved with the card or comes from the settings.
            divider,
            dice: _,
            // No VM is being added.
            promising: _,
            // Segments are saved separately.
            segments: _,
            // No VM is moving to another card.
            travelling: _,
            // Statistics restart at 0.
            moved: _,
            left: _,
        } = self;
        let CardVram {
            // The next process sets this up again.
            memory: _,
            pinned,
            // The card's saved state contains the chunk table.
            chunks: _,
            // No chunk is being copied.
            copied: _,
            // VMs that lack memory request it again after the next process has reread their page tables.
            unmet: _,
            // The next process starts new records of chunks.
            born: _,
            short: _,
            wants: _,
            watches: _,
            over_bus: _,
            // Operators can start new records in the next process.
            records: _,
            touched: _,
            // The next process zeroes these chunks again.
            zeroing: _,
            refusals: _,
            wakeup: _,
            // Statistics restart at 0.
            words: _,
        } = vram;
        SavedMemory { iova: iova.save(), barrier: barrier.0, slots: pinned.save(), turns: divider.residency().begun() }
    }

    /// Returns the file with the host memory for chunks, to be passed to another process.
    pub fn host_file(&self) -> Option<&Arc<File>> {
        self.vram.pinned.file()
    }

    /// Returns true if another process could take over the memory.
    pub fn is_shared(&self) -> bool {
        self.vram.pinned.is_shared()
    }

    /// Frees the memory of the mediator's own channels, which must be unbound.
    pub fn give_back_own(&mut self) {
        let Self { vram, own, .. } = self;
        own.release_all(&mut vram.chunks);
    }

    /// Restores a card's memory from its parts.
    pub fn restored(vram: CardVram, iova: IovaSpace, barrier: Iova, own: PagePool, divider: Divider) -> Self {
        Self { own, ..Self::new(vram, iova, barrier, divider) }
    }
}

impl SavedMemory {
    /// Restores the parts of the memory, with chunks of `chunk_bytes` bytes, and maps them for `card`. None of them may
    /// be mapped yet.
    ///
    /// # Errors
    /// Returns an error if the saved state is invalid, or if the host cannot map it.
    pub fn restored(
        self,
        card: &Arc<dyn Card>,
        chunk_bytes: u64,
        file: Option<File>,
    ) -> Result<Restored, ManagerError> {
        let Self { iova, barrier, slots, turns } = self;
        let (mut iova, mut claims) = IovaSpace::restored(iova, &card.unmappable())?;
        let barrier = Iova(barrier);
        iova.claim(&mut claims, None, barrier, SMALL_PAGE)?;
        card.map_dma(barrier.0, found(SMALL_PAGE as usize)?)?;
        if slots.slots != 0 {
            let bytes = u64::from(slots.slots).saturating_mul(chunk_bytes);
            iova.claim(&mut claims, None, Iova(slots.base), bytes)?;
        }
        let pinned = PinnedPool::restored(slots, Arc::clone(card), chunk_bytes, file)?;
        Ok(Restored { iova, claims, barrier, pinned, turns })
    }
}

/// Checks that each of the VMs' chunks in host memory has a slot with memory.
pub fn check_places(chunks: &ChunkTable, pinned: &PinnedPool) -> Result<(), Invalid> {
    let lacks = |vm: TenantId, index: u32| match chunks.lookup(vm, chunks.guest_address(index), 1) {
        Lookup::Placed(Place::Host(at)) => !pinned.has(at),
        Lookup::Placed(Place::Card(_)) | Lookup::Unplaced | Lookup::Split | Lookup::Outside => false,
    };
    for (vm, account) in chunks.vms() {
        let without = (0..account.advertised).find(|index| lacks(vm, *index));
        Invalid::unless(without.is_none(), || {
            format!("guest chunk {without:?} of VM {vm} is in nonexistent host memory")
        })?;
    }
    Ok(())
}
