//! Translates guest page tables into validated shadow page tables.
//!
//! The invariant: **no entry that the card can reach from a shadow directory maps a 4 KiB page that [`Frames`] has not
//! granted**. Each synchronisation reads the guest's tables once, into private memory, and writes exactly the entries
//! that it has validated.
//!
//! Modules:
//! - [`AddressSpaces`]: all guest address spaces of a VM and their shadows on the card (`spaces`, `space`, `table`,
//!   `mirror`, `split`; `shared` contains the state shared by all spaces of a VM)
//! - `pages`: guest VRAM pages that contain tables, and whether the GPU can write them
//! - `reverse`: maps guest memory to the table pages that refer to it
//! - [`ApertureTlb`]: walks the guest's own tables for trapped BAR1 and BAR3 accesses, with a cache
//! - `translate`: converts a guest entry to its shadow or to a [`Denial`]
//! - [`GuestMemory`], [`Frames`] and [`ShadowMemory`]: traits that the user implements, combined in [`World`]
//!
//! Tables are read in 4 KiB pages. A page of a directory or table is *pending* if it may differ from its last read:
//!
//! - it has never been read;
//! - the CPU has written it ([`AddressSpaces::written`]), or can write it without a trap ([`AddressSpaces::unseen`]);
//! - the GPU can write it, because a live entry of any of the VM's spaces maps it writable, or did so until recently;
//! - it is in guest RAM, where writes are not trapped.
//!
//! The GPU is assumed to be able to write a page until the card's TLBs are flushed after the last such entry is
//! removed.
//!
//! A space is *settled* when all changes announced by its guest have been read. Its pages are then not checked before
//! work runs. Flushes, trapped writes, and the user ([`AddressSpaces::announced`]) announce changes. The crate does not
//! search for changes that are neither trapped nor announced.
//!
//! A flush must take effect immediately only where permissions can be lost: on pending pages with live shadow entries.
//! In [`Mode::LazyAdd`], all other changes wait for [`AddressSpaces::prepare`], unless work is running. A new entry in
//! a large-page table hides the small-page entries for the same addresses. This is not a loss, because the guest still
//! maps the hidden pages.
//!
//! A large page cannot be a single entry if its 4 KiB pages are not contiguous for the card, because some are in host
//! memory, or because the RAM is in several parts. Such a page is *split*: 32 small entries in a small-page table of
//! this crate replace the large entry (`split`). The directory entry then refers to this table instead of the shadow of
//! the guest's small-page table, because the hardware uses the small-page table wherever there is no large entry.
//!
//! Not supported: compression tags (every compressed kind is replaced with its uncompressed counterpart) and 64 KiB
//! large pages.
//!
//! Limits that hold for any guest:
//!
//! - A directory has 8192 entries.
//! - A space scans each table only once, regardless of the number of entries that refer to it.
//! - Tables beyond [`Limits::table_bytes`] are not created.
//! - A VM has at most [`MAX_SPACES`] spaces.
//! - A directory that is its own table, and tables in guest RAM, need no special handling, because only the meaning of
//!   their bits as entries matters.
//!
//! The crate uses no locks, threads or clocks.

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
#[error("the guest has no memory at this address")]
pub struct Unreadable;

/// Reads the guest's tables and instance blocks.
pub trait GuestMemory {
    /// Fills `data` with memory starting at `place`.
    ///
    /// # Errors
    /// Returns an error if any byte is outside the guest's memory. In this case, the contents of `data` are
    /// unspecified.
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), Unreadable>;
}

/// Location of a guest VRAM page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The page is in card memory.
    Vram(VramAddr),
    /// The page is in host memory mapped for the card at this I/O address, readable and writable.
    Host(Iova),
}

/// Grants frames, based on the VM's memory and its current location.
pub trait Frames {
    /// Returns the frame of the `len` bytes of guest VRAM at `address`, if all of them belong to the VM and are
    /// contiguous in one memory. `len` is 4 KiB or 128 KiB. A large page that is not contiguous, or is misaligned for
    /// the card, is requested in 4 KiB parts.
    fn vram(&mut self, address: GuestVramAddr, len: u64) -> Option<Frame>;

    /// Returns the I/O address of the `len` bytes of guest RAM at `address`, if all of them are registered (for
    /// writing, if `write` is true) and contiguous. `len` is 4 KiB or 128 KiB. A region's I/O address should equal its
    /// guest address modulo 128 KiB. Otherwise, each of its large pages needs 32 entries.
    fn ram(&mut self, address: Gpa, len: u64, write: bool) -> Option<Iova>;
}

/// Card memory for shadow tables, which must be inaccessible to guests. If the card fails, the implementation must
/// record the failure; the shadow continues as if the write had happened.
pub trait ShadowMemory {
    /// Allocates `bytes` zeroed bytes, aligned to 4 KiB. Returns `None` if no memory is available.
    fn alloc(&mut self, bytes: u64) -> Option<VramAddr>;

    /// Frees `bytes` bytes allocated with [`Self::alloc`].
    fn free(&mut self, address: VramAddr, bytes: u64);

    /// Writes whole entries.
    fn write(&mut self, address: VramAddr, data: &[u8]);
}
