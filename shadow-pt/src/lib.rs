//! Translates guest page tables into validated shadow page tables.
//!
//! The invariant: **no entry that the card can reach from a shadow directory maps a 4 KiB page that [`Frames`] has not
//! granted**. Each synchronization reads the guest's tables once, into private memory, and writes only entries that it
//! has validated.
//!
//! Modules:
//! - [`AddressSpaces`]: all guest address spaces of a VM and their shadows on the card (`spaces`, `space`, `table`,
//!   `mirror`, `split`; `shared` contains the VM's common state)
//! - `pages`: guest VRAM pages that contain tables, and whether the GPU can write them
//! - `reverse`: maps guest memory to the table pages that refer to it
//! - [`ApertureTlb`]: walks the guest's own tables for trapped BAR1 and BAR3 accesses, with a cache
//! - `translate`: converts a guest entry to its shadow or to a [`Denial`]
//! - [`GuestMemory`], [`Frames`] and [`ShadowMemory`]: traits that the crate's user implements, combined in [`World`]
//!
//! Tables are read in 4 KiB pages. A page of a directory or table is *pending* if it may have changed since it was last
//! read:
//!
//! - it has never been read;
//! - the CPU has written it ([`AddressSpaces::written`]), or can write it without a trap ([`AddressSpaces::unseen`]);
//! - the GPU can write it, because an entry of any of the VM's spaces maps it writable, or recently did;
//! - it is in guest RAM, where writes are not trapped.
//!
//! The GPU is assumed to be able to write a page until the card's TLBs are flushed after the removal of the last such
//! entry.
//!
//! A space is *settled* if all changes announced by its guest have been read. The pages of a settled space are not
//! checked before work runs. Flushes, trapped writes and the crate's user ([`AddressSpaces::announced`]) announce
//! changes. Changes that are neither trapped nor announced are not detected.
//!
//! A flush must take effect immediately only for pages that can lose permissions, which are pending pages with shadow
//! entries. In [`Mode::LazyAdd`], all other changes wait for [`AddressSpaces::prepare`], unless work is running. A new
//! entry in a large-page table hides the small-page entries for the same addresses. This is not considered a loss,
//! because the guest still maps the hidden pages.
//!
//! A single entry cannot map a large page if its 4 KiB pages are not contiguous for the card. Some of them may be in
//! host memory, or the RAM may consist of several regions. Such a page is *split*: 32 small entries in a small-page
//! table of this crate replace the large entry (`split`). The directory entry then refers to this table instead of the
//! shadow of the guest's small-page table. This works because the hardware uses the small-page table wherever the
//! large-page table has no valid entry.
//!
//! Not supported: compression tags (each compressed kind is replaced with its uncompressed counterpart), and large
//! pages of 64 KiB.
//!
//! Limits on the work that a guest can cause:
//!
//! - A directory contains 8192 entries.
//! - A space reads each table only once, regardless of the number of entries that refer to it.
//! - Tables that would exceed [`Limits::table_bytes`] are not created.
//! - A VM has at most [`MAX_SPACES`] spaces.
//!
//! Directories that are also tables, and tables in guest RAM, need no special handling, because a shadow depends only
//! on how their contents are interpreted.
//!
//! The crate does not use locks, threads or clocks.

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
    reason = "the numbers in the test model are small"
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
#[error("the guest has no memory at this address")]
pub struct Unreadable;

/// Access to the guest's tables and instance blocks.
pub trait GuestMemory {
    /// Reads guest memory at `place` into `data`.
    ///
    /// # Errors
    /// Returns an error if any byte is outside the guest's memory. The contents of `data` are then unspecified.
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), Unreadable>;
}

/// Location of a guest VRAM page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Card memory.
    Vram(VramAddr),
    /// Host memory, mapped for the card at this I/O address for reading and writing.
    Host(Iova),
}

/// Finds the current location of guest memory that the card may access.
pub trait Frames {
    /// Returns the frame of `len` bytes of guest VRAM at `address` if all of them belong to the VM and are contiguous,
    /// or `None` otherwise. `len` is 4 KiB or 128 KiB. The caller queries the 4 KiB pages of a large page separately if
    /// it is not contiguous or is misaligned for the card.
    fn vram(&mut self, address: GuestVramAddr, len: u64) -> Option<Frame>;

    /// Returns the I/O address of `len` bytes of guest RAM at `address` if all of them are registered (for writing, if
    /// `write` is true) and contiguous, or `None` otherwise. `len` is 4 KiB or 128 KiB. The I/O address of a region
    /// should equal its guest address modulo 128 KiB. Otherwise, each of its large pages needs 32 entries.
    fn ram(&mut self, address: Gpa, len: u64, write: bool) -> Option<Iova>;
}

/// Card memory that is inaccessible to guests, for shadow tables. The implementation must record card failures, because
/// callers proceed as if the write had succeeded.
pub trait ShadowMemory {
    /// Allocates `bytes` zeroed bytes, aligned to 4 KiB. Returns `None` if no memory is available.
    fn alloc(&mut self, bytes: u64) -> Option<VramAddr>;

    /// Frees `bytes` bytes allocated with [`Self::alloc`].
    fn free(&mut self, address: VramAddr, bytes: u64);

    /// Writes whole entries.
    fn write(&mut self, address: VramAddr, data: &[u8]);
}
