//! Manages ownership and placement of the card's VRAM in chunks, and the locations of guest VRAM.
//!
//! Contents:
//! - [`ChunkTable`]: VRAM and host memory in chunks, each with one owner and one state; maps from guest VRAM to both
//!   memories; limits ([`Limits`]) and accounts ([`VmSummary`]) of VMs; moves between the two memories;
//! - [`PagePool`]: an allocator for blocks of 4 KiB times a power of two in chunks that the mediator owns;
//! - [`Balancer`]: plans moves of chunks: fair shares, victims, returns ([`balance`], [`victim`]);
//! - [`Quanta`]: decides when VMs whose working sets do not fit together take turns at using the card's memory.
//!
//! All of these are pure: they do not access memory, and the time is an argument. The caller zeroes chunks
//! ([`ChunkTable::take_scrub_work`]) and reports the result; until then, a chunk has no new owner. The caller also
//! copies chunks between [`ChunkTable::start`] and [`ChunkTable::commit_move`].
//!
//! # Words
//! A *guest chunk* is a chunk of the VRAM that the guest sees, identified by its index in that VRAM. Its *place* is a
//! chunk of the card or a *host slot*, which is pinned host memory of a chunk's size. An unplaced chunk has no place.
//! Slots are numbered. The start address of slot N in the linear pool is N times the chunk size ([`HostAddr`]).
//!
//! A guest chunk gets a place at its first use ([`ChunkTable::place`]); until then it reads as zeros. [`ChunkTable`]
//! documents the guarantees of VMs, the mediator's share, and the assignment of the other chunks. Code outside this
//! crate must not assume that adjacent guest chunks are adjacent on the card.
//!
//! Page-table formats are defined elsewhere and do not depend on chunks. `shadow-pt` requests translations from this
//! crate.

#![forbid(unsafe_code)]

pub mod balance;
mod chunks;
mod pool;
mod quanta;
pub mod victim;

pub use balance::{Balancer, SavedBalancer};
pub use chunks::{
    ADVERTISED_BYTES_MAX, CHUNK_BYTES_DEFAULT, CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, ChunkId, ChunkState, ChunkTable,
    Contents, Ended, Error, HostSummary, Limit, Limits, Lookup, Move, MoveId, OnFull, Place, Placed, Run, SavedChunks,
    ScrubWork, Step, Summary, Tier, To, UnclaimedChunks, VmSummary,
};
pub use pool::{Allocations, Block, PAGE_BYTES, PagePool, PoolError, SavedPool};
pub use quanta::{Change, Done, Mode, Quanta, QuantaConfig, SavedQuanta, Turn, WorkingSet};

/// Byte address in the pool of pinned host memory for evicted chunks: slot number times chunk size, plus an offset in
/// the slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostAddr(pub u64);

pub use nvspec::addr::{GuestVramAddr, VramAddr};
pub use tenant::TenantId;

impl std::fmt::Display for HostAddr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
