//! A card's memory: whose it is, where it lies, and what moves.
//!
//! Parts: [`vram`] (guests' memory wherever it lies), [`pinned`] (host memory for
//! it), `pages` (where the host finds that), [`iova`] (I/O addresses), [`balance`] (who gives and who gets), [`holdings`] (what
//! of that the operator sees), [`refusals`] (what nobody got), `wants` (who waits, and what the mediator needs itself), `moved`
//! (what moves, and has), `wakeup` (what wakes the thread that moves it), [`copier`] and `own_space` (the mediator's own
//! channels, and their address space), [`chaos`] (what moves without a reason, for tests), [`segments`] (what several address
//! spaces share).

pub mod balance;
pub mod chaos;
pub(crate) mod copier;
pub mod holdings;
pub mod iova;
mod moved;
mod own_space;
mod pages;
pub(crate) mod pinned;
pub mod refusals;
pub mod segments;
mod vram;
mod wakeup;
mod wants;

pub use self::vram::CardVram;
pub(crate) use self::vram::{Dirty, SCRUB_PIECE};
pub(crate) use copier::{COPIER, Copier, Job, NoMemory, OwnRing, RING_LOG2, bind, own_pages};
pub use moved::{Moved, Ranges, Relocated};
pub(crate) use moved::{Plan, Planned};
pub(crate) use own_space::{OwnSpace, va};
pub(crate) use pages::{found, found_beside};
pub(crate) use wakeup::Wakeup;
pub use wants::Looks;
pub(crate) use wants::{FIRST_BYTES, LOOK};

use ::vram::{Place, VmId};
use balance::{Divider, Division};
use bringup::memory::CardMemory;
use chaos::Dice;
use iova::IovaSpace;
use segments::Segments;
use std::collections::BTreeMap;

/// A card's memory, with its owners.
pub(crate) struct Memory {
    vram: CardVram,
    iova: IovaSpace,
    /// The mover of memory, if there is where to.
    copier: Option<Copier>,
    /// Division among the VMs.
    divider: Divider,
    /// Moves without a reason.
    dice: Dice,
    /// Promises that room is being made for: nobody gets back what was moved for them.
    promising: u32,
    /// Memory that several address spaces share.
    segments: Segments,
    /// Moves of VMs' memory.
    moved: BTreeMap<VmId, Moved>,
    /// Places that chunks have left, of the relocation that was committed last.
    left: Vec<Place>,
}

impl Memory {
    pub(crate) fn new(vram: CardVram, iova: IovaSpace, copier: Option<Copier>, division: &Division) -> Self {
        Self {
            vram,
            iova,
            copier,
            divider: Divider::new(division),
            dice: Dice::default(),
            promising: 0,
            segments: Segments::default(),
            moved: BTreeMap::new(),
            left: Vec::new(),
        }
    }

    /// Guests' memory wherever it lies.
    pub(crate) fn vram(&self) -> &CardVram {
        &self.vram
    }

    /// As [`Self::vram`], to change it.
    pub(crate) fn vram_mut(&mut self) -> &mut CardVram {
        &mut self.vram
    }

    /// The card, for its channels.
    pub(crate) fn card_mut(&mut self) -> &mut CardMemory {
        &mut self.vram.memory
    }

    /// I/O virtual addresses.
    pub(crate) fn iova(&self) -> &IovaSpace {
        &self.iova
    }

    /// As [`Self::iova`], to change them.
    pub(crate) fn iova_mut(&mut self) -> &mut IovaSpace {
        &mut self.iova
    }

    /// Returns the mover of memory, if there is where to.
    pub(crate) fn copier(&self) -> Option<&Copier> {
        self.copier.as_ref()
    }

    /// As [`Self::copier`], to change it, with what it moves.
    pub(crate) fn vram_and_copier(&mut self) -> (&mut CardVram, Option<&mut Copier>) {
        (&mut self.vram, self.copier.as_mut())
    }

    /// Returns the divider.
    pub(crate) fn divider(&self) -> &Divider {
        &self.divider
    }

    /// Room is being made for a promise, or no more.
    pub(crate) fn promise(&mut self, begins: bool) {
        self.promising = if begins { self.promising.saturating_add(1) } else { self.promising.saturating_sub(1) };
    }

    /// Returns whether room is being made for a promise.
    #[cfg(any(test, feature = "test-rig"))]
    pub(crate) fn makes_room(&self) -> bool {
        self.promising != 0
    }

    /// Forgets a VM that is removed: nobody is told any more what of it has moved, so that what the card does not let go of
    /// stays where it is.
    pub(crate) fn dismiss(&mut self, vm: VmId) {
        self.iova.dismiss(vm);
        self.forget_segments(vm);
        self.moved.remove(&vm);
        self.vram.chunks.freeze(vm);
        self.vram.forget(vm);
    }

    /// Takes a VM's memory back, with what is known about it.
    ///
    /// # Errors
    /// When there is no such VM.
    pub(crate) fn destroy_vm(&mut self, vm: VmId) -> Result<(), ::vram::Error> {
        self.vram.chunks.destroy_vm(vm)?;
        self.divider.balancer.forget_vm(vm);
        Ok(())
    }

    /// A relocation begins.
    pub(crate) fn forget_left(&mut self) {
        self.left.clear();
    }

    /// A chunk has left a place.
    pub(crate) fn leave(&mut self, place: Place) {
        self.left.push(place);
    }

    /// The card's TLBs may still lead to where the chunks were that have just moved: it goes to nobody.
    pub(crate) fn quarantine_left(&mut self) {
        for place in std::mem::take(&mut self.left) {
            self.vram.chunks.quarantine(place);
        }
    }
}
