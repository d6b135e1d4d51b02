//! A card's memory as it is saved, but for the table of its chunks and the policies of who gives and who gets.

use super::balance::Divider;
use super::iova::{Claims, IovaSpace, SavedIova};
use super::pinned::{PinnedPool, SavedSlots};
use super::{CardVram, Memory, found};
use crate::HostError;
use card::Card;
use nvspec::addr::{Iova, SMALL_PAGE};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::sync::Arc;
use vram::{ChunkTable, Lookup, PagePool, Place, VmId};

/// The memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedMemory {
    iova: SavedIova,
    /// I/O address of the page that barriers write to.
    barrier: u64,
    slots: SavedSlots,
    /// Turns that have begun.
    turns: u64,
}

/// Parts of a memory that was saved.
pub struct Restored {
    /// I/O addresses.
    pub iova: IovaSpace,
    /// Those of them that somebody has still to claim.
    pub claims: Claims,
    /// Place of the page that barriers write to.
    pub barrier: Iova,
    /// Host memory.
    pub pinned: PinnedPool,
    /// Turns at memory that there were.
    pub turns: u64,
}

impl Memory {
    /// Writes the memory down. Nothing of it moves.
    pub fn save(&self) -> SavedMemory {
        let Self {
            vram,
            iova,
            barrier,
            // It is a part of the card's.
            own: _,
            // They are bound anew.
            copier: _,
            // Most of it is parts of the card's, or a setting.
            divider,
            dice: _,
            // Nobody is being added.
            promising: _,
            // They are a part of their own.
            segments: _,
            // Nobody goes to another card at the time.
            travelling: _,
            // Statistics, which begin anew.
            moved: _,
            left: _,
        } = self;
        let CardVram {
            // The way into it is found again.
            memory: _,
            pinned,
            // It is a part of the card's.
            chunks: _,
            // Nothing is being copied.
            copied: _,
            // Who lacks memory asks again, since its page tables are read again.
            unmet: _,
            // How chunks come and go is learnt anew.
            born: _,
            short: _,
            wants: _,
            watches: _,
            over_bus: _,
            // Whoever wants one asks the next owner.
            records: _,
            touched: _,
            // It is done again.
            zeroing: _,
            refusals: _,
            wakeup: _,
            // A statistic, which begins anew.
            words: _,
        } = vram;
        SavedMemory { iova: iova.save(), barrier: barrier.0, slots: pinned.save(), turns: divider.turns() }
    }

    /// The file that host memory for chunks lies in, for another process.
    pub fn host_file(&self) -> Option<&Arc<File>> {
        self.vram.pinned.file()
    }

    /// Returns whether another process could go on with the memory.
    pub fn is_shared(&self) -> bool {
        self.vram.pinned.is_shared()
    }

    /// Gives the mediator's own channels' memory back: none of them is bound.
    pub fn give_back_own(&mut self) {
        let Self { vram, own, .. } = self;
        own.release_all(&mut vram.chunks);
    }

    /// The memory of a card of which all is known.
    pub fn restored(vram: CardVram, iova: IovaSpace, barrier: Iova, own: PagePool, divider: Divider) -> Self {
        Self { own, ..Self::new(vram, iova, barrier, divider) }
    }
}

impl SavedMemory {
    /// The parts of the memory, mapped for `card`, which has nothing of it. Chunks have `chunk_bytes` bytes.
    ///
    /// # Errors
    /// When they are none that there can be, or the host does not map them.
    pub fn restored(self, card: &Arc<dyn Card>, chunk_bytes: u64, file: Option<File>) -> Result<Restored, HostError> {
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

/// Checks that each chunk of a VM's that lies in host memory has some.
pub fn check_places(chunks: &ChunkTable, pinned: &PinnedPool) -> Result<(), Invalid> {
    let lacks = |vm: VmId, index: u32| match chunks.lookup(vm, chunks.guest_address(index), 1) {
        Lookup::Placed(Place::Host(at)) => !pinned.has(at),
        Lookup::Placed(Place::Card(_)) | Lookup::Unplaced | Lookup::Split | Lookup::Outside => false,
    };
    for (vm, account) in chunks.vms() {
        let without = (0..account.advertised).find(|index| lacks(vm, *index));
        Invalid::unless(without.is_none(), || {
            format!("guest chunk {without:?} of VM {vm} lies in host memory that there is not")
        })?;
    }
    Ok(())
}
