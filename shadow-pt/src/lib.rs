//! Translates guest page tables to validated shadow page tables.
//!
//! The invariant: **no entry that the card can reach from a shadow directory maps 4 KiB that [`Frames`] has not
//! granted**. The guest's tables are read once for each synchronisation, into the crate's own memory, and exactly the
//! checked entries are written.
//!
//! Parts:
//! - [`AddressSpaces`]: all guest address spaces of a VM and their shadows on the card (`spaces`, `space`, `table`,
//!   `mirror`, `split`, and `shared`, the common state of a VM's spaces);
//! - `pages`: the pages of guest VRAM that hold tables, and which of them the GPU can write;
//! - `reverse`: maps guest memory to the table pages that name it;
//! - [`ApertureTlb`]: walks the guest's own tables for trapped accesses to BAR1 and BAR3, with a cache;
//! - `translate`: converts one guest entry to its shadow or a [`Denial`];
//! - the traits that a user implements: [`GuestMemory`], [`Frames`] and [`ShadowMemory`], which together form
//!   [`World`].
//!
//! The unit of reading is a page (4 KiB) of a directory or table. A page is *pending* when it may differ from its last
//! read: it was never read, the CPU has written it ([`AddressSpaces::written`]), the GPU can write it because a live
//! entry of any space of the VM maps it writable, or could until recently, the CPU can write it unseen
//! ([`AddressSpaces::unseen`]), or it is in guest RAM, where writes are not trapped. A page counts as writable for the
//! GPU until the card's TLBs have been flushed after the last such entry was removed.
//!
//! A space is *settled* when all changes announced by its guest were read; its pages are then not checked before work
//! runs. Changes are announced by a flush, by a trapped write, and by the user ([`AddressSpaces::announced`]); the
//! crate does not search for unseen and unannounced changes.
//!
//! A flush must take effect immediately only where permissions can be lost: on pending pages with live shadow entries.
//! In [`Mode::LazyAdd`], the other changes wait for [`AddressSpaces::prepare`] unless work is running. A new entry in a
//! large-page table hides the entries of the small-page table for the same addresses; this is not a loss, because the
//! guest still maps the hidden pages.
//!
//! A large page whose 4 KiB pages are not contiguous for the card (some of them in host memory, or RAM in several
//! parts) cannot be one entry. It is *split*: 32 small entries replace the large one, in the crate's own small-page
//! table (`split`). The directory entry names this table instead of the shadow of the guest's small-page table, if any:
//! the hardware uses it where no large entry exists.
//!
//! Not supported are comptags (every compressed kind is replaced by its uncompressed counterpart) and 64 KiB large
//! pages.
//!
//! Limits that hold for any guest: a directory has 8192 entries; a space scans each table once, regardless of the
//! number of entries that name it; tables beyond [`Limits::table_bytes`] are not created; a VM has at most
//! [`MAX_SPACES`] spaces. A directory that is its own table, or tables in guest RAM, are tables like any other: only
//! the meaning of their bytes as entries counts.
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
    /// The page is in card memory.
    Vram(VramAddr),
    /// The page is in host memory that is mapped for the card at this I/O address, readable and writable.
    Host(Iova),
}

/// Grants frames: the VM's memory, and its current location for the card.
pub trait Frames {
    /// Returns the frame of the `len` bytes of guest VRAM at `address`: if all of them belong to the VM and are
    /// contiguous in one memory. `len` is 4 KiB or 128 KiB. A large page that is not contiguous, or not aligned for the
    /// card, is requested in parts of 4 KiB.
    fn vram(&mut self, address: GuestVramAddr, len: u64) -> Option<Frame>;

    /// Returns the I/O address of the `len` bytes of guest RAM at `address`: if all of them are registered (for
    /// writing, if `write`) and contiguous. `len` is 4 KiB or 128 KiB. A region's I/O address should equal its guest
    /// address modulo 128 KiB, otherwise each of its large pages costs 32 entries.
    fn ram(&mut self, address: Gpa, len: u64, write: bool) -> Option<Iova>;
}

/// The card's memory for shadow tables. Guests must not be able to reach this memory. The implementer must record a
/// failure of the card; the shadow continues as if the write had happened.
pub trait ShadowMemory {
    /// Allocates `bytes`, zeroed and aligned to 4 KiB. Returns `None` if no memory is available.
    fn alloc(&mut self, bytes: u64) -> Option<VramAddr>;

    /// Frees the memory that [`Self::alloc`] returned for `bytes`.
    fn free(&mut self, address: VramAddr, bytes: u64);

    /// Writes whole entries.
    fn write(&mut self, address: VramAddr, data: &[u8]);
}
