//! Guest page tables in, validated shadow page tables out.
//!
//! The invariant: **no entry that the card can reach from a shadow directory names a frame that [`Frames`] has not
//! granted**, for each 4 KiB of it. The guest's tables are read once for each synchronisation, into memory of our own;
//! what is checked is what is written.
//!
//! Parts:
//! - [`AddressSpaces`]: all guest address spaces of a VM and their shadows on the card (`spaces`, `space`, `table`,
//!   `mirror`, `split`, and `shared`, what the spaces of a VM have in common);
//! - `pages`: which pages of guest VRAM hold tables, and which of those the GPU itself can write;
//! - `reverse`: which table pages name which guest memory;
//! - [`ApertureTlb`]: the walk of the guest's own tables for trapped accesses to BAR1 and BAR3, with a cache;
//! - `translate`: one guest entry in, its shadow or a [`Denial`] out;
//! - the traits that a user implements: [`GuestMemory`], [`Frames`], [`ShadowMemory`], together [`World`].
//!
//! What is looked at again is a page (4 KiB) of a directory or table. A page is *pending* when it may differ from what was
//! read last: it was never read, the CPU has written it ([`AddressSpaces::written`]), the GPU can write it because a live
//! entry of any space of the VM maps it writable, or could until just now, the CPU can write it without our seeing it
//! ([`AddressSpaces::unseen`]), or it lies in guest RAM, where nobody sees writes. A page counts as writable for the GPU until the card's TLBs have been flushed after the last such entry went.
//!
//! A space is *settled* when nothing that its guest has announced is still to be read; then nobody looks at its pages for work. A flush
//! announces, a write that is seen, and what the user knows of ([`AddressSpaces::announced`]); what changes unseen and is not announced is not
//! looked for.
//!
//! A flush must take effect at once only where something can be lost: on pending pages with live shadow entries. In
//! [`Mode::LazyAdd`] the others wait for [`AddressSpaces::prepare`], unless work runs already. A new entry in a large-page
//! table hides what the small-page table has there; that is not a loss, for the guest still names what is hidden.
//!
//! A large page whose 4 KiB pages lie apart for the card (some of them in host memory, or RAM in pieces) cannot be one
//! entry. The large entry is left out then, and 32 small ones stand in for it, in a small-page table of ours (`split`) that
//! the directory entry names instead of the shadow of the guest's small-page table, whether that exists or not: the
//! hardware looks there when there is no large entry.
//!
//! Not here: comptags (every compressed kind becomes its counterpart without), 64 KiB large pages.
//!
//! Bounds, whatever the guest writes: a directory has 8192 entries; a space scans a table once however many entries name
//! it; tables beyond [`Limits::table_bytes`] are not made; there are [`MAX_SPACES`] spaces. A directory that is its own
//! table, or tables in guest RAM, are tables like any other: what counts is what their bytes mean as entries.
//!
//! No locks, no threads, no time.

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

/// The guest's memory cannot be read there: outside of what the guest has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no such guest memory")]
pub struct Unreadable;

/// Reads the guest's tables and instance blocks.
pub trait GuestMemory {
    /// Fills `data` from `place` on.
    ///
    /// # Errors
    /// When any byte lies outside of what the guest has; `data` may then hold anything.
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), Unreadable>;
}

/// Place of a page of guest VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// In the card's memory.
    Vram(VramAddr),
    /// In host memory that is mapped for the card, to read and to write, at this I/O address.
    Host(Iova),
}

/// Grants frames: what the VM owns, and where it lies for the card now.
pub trait Frames {
    /// Returns where the `len` bytes of guest VRAM at `address` lie: all of them the VM's, in one piece, on one side.
    /// `len` is 4 KiB or 128 KiB. A large page that is not in one piece, or not aligned for the card, is asked for by 4
    /// KiB.
    fn vram(&mut self, address: GuestVramAddr, len: u64) -> Option<Frame>;

    /// The I/O address of the `len` bytes of guest RAM at `address`: all of them registered (for writing, if `write`), in
    /// one piece. `len` is 4 KiB or 128 KiB. A region's I/O address should equal its guest address modulo 128 KiB, else its
    /// large pages cost 32 entries each.
    fn ram(&mut self, address: Gpa, len: u64, write: bool) -> Option<Iova>;
}

/// The card's memory for shadow tables. Nothing here may be reachable by any guest. A failure of the card is the
/// implementer's to remember; the shadow goes on as if the write had happened.
pub trait ShadowMemory {
    /// Allocates `bytes`, zeroed and aligned to 4 KiB. `None` when there is none.
    fn alloc(&mut self, bytes: u64) -> Option<VramAddr>;

    /// Frees what [`Self::alloc`] returned for `bytes`.
    fn free(&mut self, address: VramAddr, bytes: u64);

    /// Writes. `data` is whole entries.
    fn write(&mut self, address: VramAddr, data: &[u8]);
}
