//! A card's memory: whose it is, where it lies, and what moves.
//!
//! Parts: [`shortage`] (limits, and how they are told), `vram` (guests' memory wherever it lies), [`pinned`] (host memory for it),
//! `accesses` (records of how often guests' memory is), `pages` (where the host finds that), [`iova`] (I/O addresses), [`balance`] (who gives and who gets), [`holdings`] (what of that
//! the operator sees), [`refusals`] (what nobody got), `wants` (who waits, and what the mediator needs itself), `moved` (what
//! moves, and has), `saved` (how it is written down), `wakeup` (what wakes the thread that moves it), `zeroing`
//! (what becomes free, for the next to have it) with `zeroed` (how far that is), `copier` and `own_space` (the
//! mediator's own channels, and their address space), [`chaos`] (what moves without a reason, for tests), [`segments`] (what
//! several address spaces share).
//!
//! What it does not do: know threads, a schedule, or what of a VM runs; `owner` has all of that.

mod accesses;
pub mod balance;
pub mod chaos;
mod copier;
mod error;
pub mod holdings;
pub mod iova;
mod moved;
mod own_space;
mod pages;
pub mod pinned;
pub mod refusals;
mod saved;
pub mod segments;
pub mod shortage;
mod vram;
mod wakeup;
mod wants;
mod zeroed;
mod zeroing;

pub use self::vram::{CardVram, Dirty, Words};
pub use accesses::{Accesses, Counted};
pub use copier::{COPIER, Copier, Job, NoMemory, OwnRing, RING_LOG2, Source, bind, own_pages};
pub use error::HostError;
pub use moved::{Moved, Plan, Planned, Ranges, Relocated};
pub use own_space::{OwnSpace, va};
pub use pages::{Wanted, found, found_beside};
pub use saved::{Restored, SavedMemory, check_places};
pub use wakeup::Wakeup;
pub use wants::{FIRST_BYTES, LOOK, Looks};
pub use zeroing::SCRUB_PIECE;

use ::vram::{PagePool, Place, VmId};
use balance::Divider;
use bringup::memory::CardMemory;
use channels::Channels;
use chaos::Dice;
use iova::IovaSpace;
use nvspec::addr::Iova;
use segments::Segments;
use std::collections::{BTreeMap, BTreeSet};

/// Most card memory for page tables, code and push buffers of the mediator's own channels, in bytes: with large chunks, one for
/// each of them would be dear. A card of 6 GiB and as much host memory need less than 3 MiB.
pub(crate) const OWN_BYTES: u64 = 64 << 20;

/// A card's memory, with its owners.
pub struct Memory {
    vram: CardVram,
    iova: IovaSpace,
    /// Place of the page that barriers write to.
    barrier: Iova,
    /// The card's memory that the mediator's own channels have.
    own: PagePool,
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
    /// VMs that go to another card, or come from one: nothing of their memory moves but for that.
    travelling: BTreeSet<VmId>,
    /// Moves of VMs' memory.
    moved: BTreeMap<VmId, Moved>,
    /// Places that chunks have left, of the relocation that was committed last.
    left: Vec<Place>,
}

impl Memory {
    /// Memory that nothing moves yet ([`Self::start_copier`]).
    pub fn new(vram: CardVram, iova: IovaSpace, barrier: Iova, divider: Divider) -> Self {
        Self {
            vram,
            iova,
            barrier,
            own: PagePool::new(OWN_BYTES),
            copier: None,
            divider,
            dice: Dice::default(),
            promising: 0,
            segments: Segments::default(),
            travelling: BTreeSet::new(),
            moved: BTreeMap::new(),
            left: Vec::new(),
        }
    }

    /// Guests' memory wherever it lies.
    pub fn vram(&self) -> &CardVram {
        &self.vram
    }

    /// As [`Self::vram`], to change it.
    pub fn vram_mut(&mut self) -> &mut CardVram {
        &mut self.vram
    }

    /// The card, for its channels.
    pub fn card_mut(&mut self) -> &mut CardMemory {
        &mut self.vram.memory
    }

    /// I/O virtual addresses.
    pub fn iova(&self) -> &IovaSpace {
        &self.iova
    }

    /// As [`Self::iova`], to change them.
    pub fn iova_mut(&mut self) -> &mut IovaSpace {
        &mut self.iova
    }

    /// The card, and the memory there that the mediator's own channels have.
    pub fn vram_and_own(&mut self) -> (&mut CardVram, &mut PagePool) {
        (&mut self.vram, &mut self.own)
    }

    /// The card's memory that the mediator's own channels have.
    pub fn own(&self) -> &PagePool {
        &self.own
    }

    /// Binds the channels that move memory, if there is where to, or if they are to zero the card's.
    ///
    /// # Errors
    /// When the card has no memory or no channels left, or does not answer.
    pub fn start_copier(&mut self, channels: &mut Channels, zeroes: bool) -> Result<(), HostError> {
        let Self { vram, own, copier, .. } = self;
        if zeroes || vram.has_host_memory() {
            *copier = Some(Copier::new(vram, channels, own)?);
        }
        Ok(())
    }

    /// Returns the mover of memory, if there is where to.
    pub fn copier(&self) -> Option<&Copier> {
        self.copier.as_ref()
    }

    /// As [`Self::copier`], to change it, with what it moves.
    pub fn vram_and_copier(&mut self) -> (&mut CardVram, Option<&mut Copier>) {
        (&mut self.vram, self.copier.as_mut())
    }

    /// Returns the divider.
    pub fn divider(&self) -> &Divider {
        &self.divider
    }

    /// Room is being made for a promise, or no more.
    pub fn promise(&mut self, begins: bool) {
        self.promising = if begins { self.promising.saturating_add(1) } else { self.promising.saturating_sub(1) };
    }

    /// Returns whether room is being made for a promise.
    #[cfg(any(test, feature = "test-rig"))]
    pub fn makes_room(&self) -> bool {
        self.promising != 0
    }

    /// A VM goes to another card or comes from one, so that nothing of its memory moves by itself; or no more.
    pub fn travel(&mut self, vm: VmId, travels: bool) {
        if travels {
            self.travelling.insert(vm);
        } else {
            self.travelling.remove(&vm);
        }
    }

    /// Returns whether a VM has made segments.
    pub fn segments_of(&self, vm: VmId) -> bool {
        self.segments.of(vm).1 != 0
    }

    /// Forgets a VM that is removed: nobody is told any more what of it has moved, so that what the card does not let go of
    /// stays where it is.
    pub fn dismiss(&mut self, vm: VmId) {
        self.iova.dismiss(vm);
        self.forget_segments(vm);
        self.moved.remove(&vm);
        self.travelling.remove(&vm);
        self.vram.chunks.freeze(vm);
        self.vram.forget(vm);
        self.vram.records.forget(vm);
    }

    /// Takes a VM's memory back, with what is known about it.
    ///
    /// # Errors
    /// When there is no such VM.
    pub fn destroy_vm(&mut self, vm: VmId) -> Result<(), ::vram::Error> {
        self.vram.chunks.destroy_vm(vm)?;
        self.divider.balancer.forget_vm(vm);
        Ok(())
    }

    /// A relocation begins.
    pub fn forget_left(&mut self) {
        self.left.clear();
    }

    /// A chunk has left a place.
    pub fn leave(&mut self, place: Place) {
        self.left.push(place);
    }

    /// The card's TLBs may still lead to where the chunks were that have just moved: it goes to nobody.
    pub fn quarantine_left(&mut self) {
        for place in std::mem::take(&mut self.left) {
            self.vram.chunks.quarantine(place);
        }
    }
}
