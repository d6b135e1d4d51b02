//! The saved state of a card and its VMs.
//!
//! Each crate saves and validates its own part. This crate combines the parts of a card and its VMs ([`SavedCard`]) in
//! one file ([`SavedCard::write`], [`SavedCard::read`]), and checks their consistency ([`SavedCard::restore`]).
//! Otherwise, a file with individually valid parts could grant a VM the resources of another VM. The checks are:
//! - All parts contain the same VMs, and each VM has the number of chunks that its VRAM size requires.
//! - Each of the mediator's chunks belongs to exactly one pool, and the pages of an address space belong to the pool of
//!   its VM.
//! - Each channel uses a shadow directory of its own VM.
//! - Each channel that a guest sees as bound is either bound, or was rejected.
//!
//! The saved state refers to the memory of the card, the host and the guests, but does not include it; the caller of
//! the restore provides this memory. All channels must be off the engines when a card is saved. After a restore, the
//! card's TLBs must be flushed, and each address space must be prepared before its channels run.
//!
//! Other crates save the remaining state: of the card manager and its VMs (`card-manager`, `vgpu`), of connections to
//! VMMs (`vmm-glue`), and of segments shared by VMs (`card-memory`, `vgpu`).

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

mod agree;
mod file;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
mod memory;
mod restore;
#[cfg(test)]
mod sample;

#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::fuzz;
pub use restore::{RestoredCard, RestoredVm, Surroundings, VmSurroundings};
pub use tenancy::SavedTenancy;

use channels::SavedChannels;
use devmodel::SavedVGpu;
use pv::SavedTables;
use shadow_pt::SavedSpaces;
use vram::{SavedBalancer, SavedChunks, SavedPool, TenantId};

/// Saved form of a card.
#[derive(Debug)]
pub struct SavedCard {
    /// Chunk owners.
    pub chunks: SavedChunks,
    /// State of the policy that selects chunks to move.
    pub balancer: SavedBalancer,
    /// State of the scheduler and of the VMs' memory quanta.
    pub tenancy: SavedTenancy,
    /// Physical channels.
    pub channels: SavedChannels,
    /// Pages of the mediator itself.
    pub pool: SavedPool,
    /// Pages of shared segments, by creator. `card-memory` saves the segments themselves.
    pub segments: Vec<(TenantId, SavedPool)>,
    /// VMs in ascending order of their numbers.
    pub vms: Vec<SavedVm>,
}

/// Saved form of a VM.
#[derive(Debug)]
pub struct SavedVm {
    /// VM number.
    pub vm: TenantId,
    /// Registers of the vGPU.
    pub gpu: SavedVGpu,
    /// Address spaces of the VM.
    pub spaces: SavedSpaces,
    /// Page tables that the mediator maintains for a VM with the paravirtual interface.
    pub tables: Option<SavedTables>,
    /// Card memory pages of the VM's shadow tables.
    pub pool: SavedPool,
}
