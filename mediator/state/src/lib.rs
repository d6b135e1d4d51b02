//! The saved state of a card and its VMs.
//!
//! Each crate saves its own part, and validates only this part. This crate combines the parts of a card and its VMs
//! ([`SavedCard`]) in one file ([`SavedCard::write`], [`SavedCard::read`]), and checks their consistency
//! ([`SavedCard::restore`]). Without these checks, a file with valid parts could give one VM the resources of another:
//! - all parts contain the same VMs, and each VM has the number of chunks that its guest's VRAM requires;
//! - each of the mediator's chunks belongs to one pool, and the pages of an address space belong to the pool of its VM;
//! - a channel uses a shadow directory of its own VM;
//! - each channel that a guest sees as bound is either bound, or was rejected.
//!
//! The saved state does not include the memory of the card, the host or the guests. The parts refer to this memory, and
//! the caller of the restore provides it. When a card is saved, all of its channels must be off the engines. When it is
//! restored, its TLBs must be flushed, and each address space must be prepared before its channels run.
//!
//! Other parts are saved elsewhere: those of the card's owner and its VMs (`card-manager`, `vgpu`), of connections to
//! VMMs (`vmm-glue`), and of segments that VMs share (`card-memory`, `vgpu`).

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

/// Saved state of a card.
#[derive(Debug)]
pub struct SavedCard {
    /// Owners of all chunks.
    pub chunks: SavedChunks,
    /// State of the policy that selects chunks to move.
    pub balancer: SavedBalancer,
    /// State of the scheduler and of the VMs' memory quanta.
    pub tenancy: SavedTenancy,
    /// Physical channels.
    pub channels: SavedChannels,
    /// Pages of the mediator itself.
    pub pool: SavedPool,
    /// Pages of shared segments, by creator. The segments themselves are saved by `card-memory`.
    pub segments: Vec<(TenantId, SavedPool)>,
    /// VMs, sorted by number.
    pub vms: Vec<SavedVm>,
}

/// Saved state of a VM.
#[derive(Debug)]
pub struct SavedVm {
    /// VM number.
    pub vm: TenantId,
    /// Registers of the vGPU.
    pub gpu: SavedVGpu,
    /// Address spaces of the VM.
    pub spaces: SavedSpaces,
    /// Page tables that the mediator manages for a VM with the paravirtual interface.
    pub tables: Option<SavedTables>,
    /// Pages of card memory for the VM's shadow tables.
    pub pool: SavedPool,
}
