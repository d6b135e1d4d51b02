//! Why the chunk table does not do what it was asked.

use crate::{GuestAddr, VmId};

/// Why the table does not do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A chunk's size is a power of two from 128 KiB to 64 MiB.
    #[error("chunk size {0:#x} is not a power of two from 0x20000 to 0x4000000 bytes")]
    ChunkSize(u64),
    /// The card has no whole chunk, or more than can be counted.
    #[error("{0:#x} bytes of VRAM are no number of chunks that can be managed")]
    CardSize(u64),
    /// There is no such amount of VRAM left that is not promised to someone else.
    #[error(
        "{wanted} chunks of VRAM are wanted, {free} are free and {to_scrub} more will be after scrubbing, of which {promised} are promised to others"
    )]
    Full {
        /// Chunks wanted.
        wanted: u64,
        /// Chunks free.
        free: u32,
        /// Chunks without an owner that are not zeroed yet.
        to_scrub: u32,
        /// Chunks without an owner that back the reservations of others.
        promised: u32,
    },
    /// There is enough, once chunks are zeroed: take scrub work and ask again. When there is no scrub work to take,
    /// someone else is at it.
    #[error("{short} chunks of VRAM must be scrubbed first")]
    NeedsScrub {
        /// Chunks that are missing.
        short: u32,
    },
    /// A VM without VRAM is none.
    #[error("a VM needs at least one byte of VRAM")]
    Empty,
    /// More VRAM for a VM than a map is kept for.
    #[error("{0:#x} bytes of VRAM for a VM are more than 0x10000000000")]
    Advertised(u64),
    /// That VM has its VRAM already.
    #[error("VM {0} has VRAM already")]
    Exists(VmId),
    /// No VM of that number has VRAM.
    #[error("VM {0} has no VRAM")]
    NoSuchVm(VmId),
    /// The address is behind the VRAM that the VM's guest has.
    #[error("{address} is outside of the VRAM of VM {vm}")]
    OutOfRange {
        /// The VM.
        vm: VmId,
        /// The address asked for.
        address: GuestAddr,
    },
}
