//! Ownership and placement of VRAM in chunks, and the mapping from guest VRAM to the memory that backs it.
//!
//! Contents:
//! - [`ChunkTable`]: tracks the owner and state of each chunk of VRAM and host memory, maps guest VRAM to both,
//!   enforces VMs' limits ([`Limits`]), keeps their accounts ([`VmSummary`]), and tracks moves between the two
//!   memories;
//! - [`PagePool`]: allocates power-of-two multiples of 4 KiB in chunks that the mediator owns;
//! - [`Balancer`]: plans evictions and returns of chunks, based on fair shares and victim policies ([`balance`],
//!   [`victim`]);
//! - [`Quanta`]: decides when VMs with working sets that do not fit together take turns using the card's memory.
//!
//! None of these performs I/O: they do not access memory, and callers pass the time. The caller zeroes chunks
//! ([`ChunkTable::take_scrub_work`]) and reports the result. Until then, a chunk has no new owner. The caller also
//! copies chunks between [`ChunkTable::start`] and [`ChunkTable::commit_move`].
//!
//! # Words
//! A *guest chunk* is a chunk of the VRAM that the guest sees, identified by its index in that VRAM. Its *place* is a
//! card chunk or a *host slot*, which is one chunk of pinned host memory. An unplaced chunk has no place. Slot N starts
//! at N times the chunk size in the linear pool ([`HostAddr`]).
//!
//! A guest chunk gets a place at its first use ([`ChunkTable::place`]). Until then, it reads as zeros. [`ChunkTable`]
//! documents VMs' guarantees, the mediator's share, and the assignment of all other chunks. Code outside this crate
//! must not assume that adjacent guest chunks are adjacent on the card.
//!
//! Page table formats do not depend on chunks and are defined elsewhere. `shadow-pt` uses this crate for translations.

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
pub use quanta::{Change, Done, Lead, Mode, Quanta, QuantaConfig, QuantumState, SavedQuanta, Turn, WorkingSet};

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
