//! Translates guest page tables to validated shadow page tables.
//!
//! The invariant: **no entry that the card can reach from a shadow directory names a frame that [`Frames`] has not
//! granted**, for each 4 KiB of it. The guest's tables are read once for each synchronisation, into memory of our own;
//! the checked entries are the written ones.
//!
//! Parts:
//! - [`AddressSpaces`]: all guest address spaces of a VM and their shadows on the card (`spaces`, `space`, `table`,
//!   `mirror`, `split`, and `shared`, the common state of a VM's spaces);
//! - `pages`: which pages of guest VRAM hold tables, and which of these pages the GPU can write;
//! - `reverse`: which table pages name which guest memory;
//! - [`ApertureTlb`]: the walk of the guest's own tables for trapped accesses to BAR1 and BAR3, with a cache;
//! - `translate`: one guest entry in, its shadow or a [`Denial`] out;
//! - the traits that a user implements: [`GuestMemory`], [`Frames`], [`ShadowMemory`], together [`World`].
//!
//! The unit of reading is a page (4 KiB) of a directory or table. A page is *pending* when it may differ from its last
//! read: it was never read, the CPU has written it ([`AddressSpaces::written`]), the GPU can write it because a live
//! entry of any space of the VM maps it writable, or could until just now, the CPU can write it unseen
//! ([`AddressSpaces::unseen`]), or it is in guest RAM, where writes are not trapped. A page counts as writable for the
//! GPU until the card's TLBs have been flushed after the last such entry was removed.
//!
//! A space is *settled* when all changes that its guest announced were read; its pages are then not checked before work
//! runs. A flush announces changes, and so does a write that is trapped or reported by the user
//! ([`AddressSpaces::announced`]); the crate does not search for unseen and unannounced changes.
//!
//! A flush must take effect at once only where permissions can be lost: on pending pages with live shadow entries. In
//! [`Mode::LazyAdd`], the other changes wait for [`AddressSpaces::prepare`] unless work is running. A new entry in a
//! large-page table hides the entries of the small-page table there; that is not a loss, for the guest still maps the
//! hidden pages.
//!
//! A large page whose 4 KiB pages are not contiguous for the card (some of them in host memory, or RAM in several
//! parts) cannot be one entry. It is *split*: 32 small entries replace the large one, in our own small-page table
//! (`split`). The directory entry names this table instead of the shadow of the guest's small-page table, if any: the
//! hardware looks there when there is no large entry.
//!
//! Not supported: comptags (every compressed kind is replaced by its uncompressed counterpart), 64 KiB large pages.
//!
//! Limits that hold for any guest: a directory has 8192 entries; a space scans a table once, for any number of entries
//! that name it; tables beyond [`Limits::table_bytes`] are not created; there are [`MAX_SPACES`] spaces. A directory
//! that is its own table, or tables in guest RAM, are tables like any other: only the meaning of their bytes as entries
//! counts.
//!
//! The crate uses no locks, no threads and no clock.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

mod aperture;
mod bits;
mod host;
mod ids;
mod mirror;
mod mode;
mod moved;
mod pages;
mod report;
mod reverse;
mod shared;
mod space;
mod spaces;
mod split;
mod table;
mod translate;
mod world;

#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    reason = "a model of small numbers, for tests"
)]
mod model;

pub use aperture::{ApertureTlb, Mapping, WalkFault};
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::fuzz;
pub use host::{HOST_BASE, HOST_PAGES, HostPage, SHARED_BASE, SHARED_PAGES};
pub use ids::{GuestRange, MAX_SPACES, SpaceId};
pub use mode::{Mode, UnknownMode};
pub use nvspec::addr::Place;
pub use report::{Denial, Denials, SyncReport};
pub use shared::Limits;
pub use spaces::{AddressSpaces, NoMemory, RELINK_PIECES, SavedSpaces, Withdrawal};
pub use world::{Parts, World};

use nvspec::addr::{Gpa, GuestVramAddr, Iova, VramAddr};

/// The guest has no memory at this address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no such guest memory")]
pub struct Unreadable;

/// Reads the guest's tables and instance blocks.
pub trait GuestMemory {
    /// Fills `data` from `place` on.
    ///
    /// # Errors
    /// If any byte is outside the guest's memory; the content of `data` is then undefined.
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), Unreadable>;
}

/// Place of a page of guest VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// In card memory.
    Vram(VramAddr),
    /// In host memory that is mapped for the card, readable and writable, at this I/O address.
    Host(Iova),
}

/// Grants frames: the VM's memory, and its current place for the card.
pub trait Frames {
    /// Returns the frame of the `len` bytes of guest VRAM at `address`: all of them belong to the VM and are contiguous
    /// in one memory. `len` is 4 KiB or 128 KiB. A large page that is not contiguous, or not aligned for the card, is
    /// requested in parts of 4 KiB.
    fn vram(&mut self, address: GuestVramAddr, len: u64) -> Option<Frame>;

    /// Returns the I/O address of the `len` bytes of guest RAM at `address`: all of them registered (for writing, if
    /// `write`), and contiguous. `len` is 4 KiB or 128 KiB. A region's I/O address should equal its guest address
    /// modulo 128 KiB, else its large pages cost 32 entries each.
    fn ram(&mut self, address: Gpa, len: u64, write: bool) -> Option<Iova>;
}

/// The card's memory for shadow tables. Nothing here may be reachable by any guest. The implementer must record a
/// failure of the card; the shadow continues as if the write had happened.
pub trait ShadowMemory {
    /// Allocates `bytes`, zeroed and aligned to 4 KiB. `None` if there is no memory.
    fn alloc(&mut self, bytes: u64) -> Option<VramAddr>;

    /// Frees the memory that [`Self::alloc`] returned for `bytes`.
    fn free(&mut self, address: VramAddr, bytes: u64);

    /// Writes whole entries.
    fn write(&mut self, address: VramAddr, data: &[u8]);
}
