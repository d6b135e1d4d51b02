//! Owners of the pieces of the card's VRAM, and where each piece of a guest's VRAM lies.
//!
//! Parts:
//! - [`ChunkTable`]: VRAM and host memory in chunks, each with one owner and one state; the map from guest VRAM to both;
//!   what each VM may have ([`Limits`]) and has ([`VmSummary`]); moves between the two memories;
//! - [`PagePool`]: an allocator of 4 KiB pages and their powers of two inside chunks that the mediator owns;
//! - [`Balancer`]: which chunks move, and when: fair shares, victims, returns ([`balance`], [`victim`]);
//! - [`Quanta`]: when VMs whose working sets do not fit together take turns.
//!
//! All are pure: they touch no memory, and take the time as an argument. Zeroing is work that the caller takes ([`ChunkTable::take_scrub_work`]) and
//! reports done; until then a chunk has no next owner. A copy is the caller's work between
//! [`ChunkTable::start`] and [`ChunkTable::commit_move`].
//!
//! # Words
//! A *guest chunk* is a chunk of what a guest believes to be VRAM, by its index there. Its *place* is none, a chunk of the
//! card, or a *host slot*: a piece of pinned host memory of a chunk's size. Slots are numbered; slot N begins at N times the
//! bytes of a chunk in one linear pool ([`HostAddr`]).
//!
//! A guest chunk gets a place at its first use ([`ChunkTable::place`]); until then it reads as zeros. What a VM is sure to
//! get, what is left for the mediator and who competes for the rest stands at [`ChunkTable`]. Nothing outside this crate
//! may assume that neighbours for the guest are neighbours on the card.
//!
//! Not here: page-table formats, which know nothing of chunks (`shadow-pt` asks for a translation).

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
    ScrubWork, Step, Summary, Tier, To, Unclaimed, VmSummary,
};
pub use pool::{Allocations, Block, PAGE_BYTES, PagePool, PoolError, SavedPool};
pub use quanta::{Change, Done, Mode, Quanta, QuantaConfig, SavedQuanta, Turn};

/// Byte address in the card's VRAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CardAddr(pub u64);

/// Byte address in the pool of pinned host memory that chunks lie in when the card is full: a slot's number times the bytes
/// of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostAddr(pub u64);

/// Byte address in the VRAM that a guest believes to have; starts at 0 for every VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestAddr(pub u64);

pub use tenant::TenantId as VmId;

impl std::fmt::Display for CardAddr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl std::fmt::Display for HostAddr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl std::fmt::Display for GuestAddr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
