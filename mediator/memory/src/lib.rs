//! A card's memory: its owners, its location, and its moves.
//!
//! Modules:
//! - [`shortage`]: messages about exhausted limits
//! - `vram`: guest memory, on the card and in host memory; [`pinned`]: host memory for chunks
//! - `accesses`: records of accesses to guest memory; `pages`: allocation of host memory; [`iova`]: I/O addresses
//! - [`balance`]: division among the VMs; [`holdings`]: the operator's view of it; [`refusals`]: denied requests
//! - `wants`: VMs that wait, and the mediator's own needs; `moved`: planned and completed moves; `saved`: saved state
//! - `wakeup`: wakes the thread that moves memory
//! - `zeroing`: zeroes free memory for its next owner; `zeroed`: progress of zeroing
//! - `copier` and `own_space`: the mediator's own channels, and their address space
//! - [`chaos`]: random moves for tests; [`segments`]: memory that several address spaces share
//!
//! The crate does not depend on threads, on a schedule, or on the VMs' work.

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
mod relocation;
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
pub use copier::{COPIER, Copier, CopyId, Job, NoMemory, OwnRing, RING_LOG2, Source, bind, own_pages};
pub use error::ManagerError;
pub use moved::{Moved, Plan, Planned, Ranges, Relocated};
pub use own_space::{OwnSpace, va};
pub use pages::{Wanted, allocate_parallel, found};
pub use relocation::{Chunk, LEAVE_LIMIT, Machine, RESET_LIMIT, Relocations};
pub use saved::{Restored, SavedMemory, check_places};
pub use wakeup::Wakeup;
pub use wants::{FIRST_BYTES, Looks, SCAN_INTERVAL};
pub use zeroing::SCRUB_PIECE;

use ::vram::{PagePool, Place, TenantId};
use balance::Divider;
use bringup::memory::CardMemory;
use channels::Channels;
use chaos::{Chaos, Dice};
use iova::IovaSpace;
use nvspec::addr::Iova;
use segments::Segments;
use std::collections::{BTreeMap, BTreeSet};

/// Maximum card memory for page tables, code and push buffers of the mediator's own channels, in bytes. The channels
/// share chunks, because separate large chunks would waste memory. A card with 6 GiB of VRAM and 6 GiB of host memory
/// needs less than 3 MiB.
pub(crate) const OWN_BYTES: u64 = 64 << 20;

/// A card's memory and its owners.
pub struct Memory {
    vram: CardVram,
    iova: IovaSpace,
    /// I/O address of the page to which barriers write.
    barrier: Iova,
    /// Card memory for the mediator's own channels.
    own: PagePool,
    /// Channels that move memory. They exist if memory can move or if they zero memory.
    copier: Option<Copier>,
    /// State for dividing the memory among the VMs.
    divider: Divider,
    /// Generator of random moves.
    dice: Dice,
    /// Number of guarantees for which memory is being freed. Evicted chunks do not return in the meantime.
    promising: u32,
    /// Memory shared by several address spaces.
    segments: Segments,
    /// VMs that are moving to or from another card. Their memory must not move for any other reason.
    travelling: BTreeSet<TenantId>,
    /// Totals of the moves of each VM's memory.
    moved: BTreeMap<TenantId, Moved>,
    /// Locations vacated by the last committed relocation.
    left: Vec<Place>,
}

impl Memory {
    /// Creates the memory. [`Self::start_copier`] starts its copier later.
    pub fn new(vram: CardVram, iova: IovaSpace, barrier: Iova, divider: Divider) -> Self {
        Self {
            vram,
            iova,
            barrier,
            own: PagePool::new(OWN_BYTES),
            copier: None,
            divider,
            dice: Dice::new(Chaos::default()),
            promising: 0,
            segments: Segments::default(),
            travelling: BTreeSet::new(),
            moved: BTreeMap::new(),
            left: Vec::new(),
        }
    }

    /// Returns guest memory, on the card and in host memory.
    pub fn vram(&self) -> &CardVram {
        &self.vram
    }

    /// Like [`Self::vram`], but mutable.
    pub fn vram_mut(&mut self) -> &mut CardVram {
        &mut self.vram
    }

    /// Returns access to the card, for its channels' registers.
    pub fn card_mut(&mut self) -> &mut CardMemory {
        &mut self.vram.memory
    }

    /// Returns the allocator of I/O virtual addresses.
    pub fn iova(&self) -> &IovaSpace {
        &self.iova
    }

    /// Like [`Self::iova`], but mutable.
    pub fn iova_mut(&mut self) -> &mut IovaSpace {
        &mut self.iova
    }

    /// Returns the guest memory, and the pool of card memory for the mediator's own channels.
    pub fn vram_and_own(&mut self) -> (&mut CardVram, &mut PagePool) {
        (&mut self.vram, &mut self.own)
    }

    /// Returns the pool of card memory for the mediator's own channels.
    pub fn own(&self) -> &PagePool {
        &self.own
    }

    /// Binds the channels that move memory, if any VM's memory can move or `zeroes` is true.
    ///
    /// # Errors
    /// Returns an error if the card has too little memory or too few channels, or does not respond.
    pub fn start_copier(&mut self, channels: &mut Channels, zeroes: bool) -> Result<(), ManagerError> {
        let Self { vram, own, copier, .. } = self;
        if zeroes || vram.has_host_memory() {
            *copier = Some(Copier::new(vram, channels, own)?);
        }
        Ok(())
    }

    /// Returns the copier, if there is one.
    pub fn copier(&self) -> Option<&Copier> {
        self.copier.as_ref()
    }

    /// Returns mutable references to the memory and the copier that moves it.
    pub fn vram_and_copier(&mut self) -> (&mut CardVram, Option<&mut Copier>) {
        (&mut self.vram, self.copier.as_mut())
    }

    /// Returns the state for dividing the memory among the VMs.
    pub fn divider(&self) -> &Divider {
        &self.divider
    }

    /// Increments the number of guarantees for which memory is being freed, or decrements it if `begins` is false.
    pub fn promise(&mut self, begins: bool) {
        self.promising = if begins { self.promising.saturating_add(1) } else { self.promising.saturating_sub(1) };
    }

    /// Returns true while memory is being freed for a guarantee.
    #[cfg(any(test, feature = "test-rig"))]
    pub fn makes_room(&self) -> bool {
        self.promising != 0
    }

    /// Records whether a VM is moving to or from another card. During this time, the VM's memory does not move for any
    /// other reason.
    pub fn set_migrating(&mut self, vm: TenantId, travels: bool) {
        if travels {
            self.travelling.insert(vm);
        } else {
            self.travelling.remove(&vm);
        }
    }

    /// Returns true if a VM has created a segment that still exists.
    pub fn segments_of(&self, vm: TenantId) -> bool {
        self.segments.bytes_and_count(vm).1 != 0
    }

    /// Removes the records of a VM that has left the card. Memory that cannot be reclaimed yet is frozen, because the
    /// VM's moves are no longer reported.
    pub fn dismiss(&mut self, vm: TenantId) {
        self.iova.dismiss(vm);
        self.forget_segments(vm);
        self.moved.remove(&vm);
        self.travelling.remove(&vm);
        self.vram.chunks.freeze(vm);
        self.vram.forget(vm);
        self.vram.records.forget(vm);
    }

    /// Reclaims a VM's memory, and drops the records of the VM.
    ///
    /// # Errors
    /// Returns an error if the VM does not exist.
    pub fn destroy_vm(&mut self, vm: TenantId) -> Result<(), ::vram::Error> {
        self.vram.chunks.destroy_vm(vm)?;
        self.divider.machine.residency.forget(vm);
        self.forget_user(vm);
        Ok(())
    }

    /// Clears the list of vacated locations before a new relocation starts.
    pub fn forget_left(&mut self) {
        self.left.clear();
    }

    /// Records that a chunk has vacated a location.
    pub fn leave(&mut self, place: Place) {
        self.left.push(place);
    }

    /// Quarantines the old locations of chunks that have just moved, because the card's TLBs may still contain them.
    pub fn quarantine_left(&mut self) {
        for place in std::mem::take(&mut self.left) {
            self.vram.chunks.quarantine(place);
        }
    }
}
