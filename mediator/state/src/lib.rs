//! The saved state of a card and its VMs.
//!
//! Each crate saves its own part, and checks only this part. This crate combines the parts of a card and of a VM
//! ([`SavedCard`]) in one file ([`SavedCard::write`], [`SavedCard::read`]), and makes the checks between them
//! ([`SavedCard::restore`]). Without these checks, a file whose parts are all valid could give one VM the resources of
//! another VM:
//! - the same VMs are in all parts, and each VM has the number of chunks that its guest's VRAM needs;
//! - each of the mediator's chunks belongs to one pool, and pages of address spaces belong to their own VM's pool;
//! - a channel uses the shadow of a directory of its own VM;
//! - each channel that a guest sees as bound is bound, or was refused.
//!
//! The memory of the card, of the host and of guests is not included. The parts refer to this memory, and the caller of
//! the restore provides it. All channels must be off the engines when a card is saved, and its TLBs must be flushed
//! when it is restored. Each address space must then be prepared before its channels run.
//!
//! The owner of a card and a VM save their own state separately (`card-manager`, `vgpu`); so do the connections of VMMs
//! (`vmm-glue`) and the segments that VMs share (`card-memory`, `vgpu`).

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

use channels::SavedChannels;
use devmodel::SavedVGpu;
use pv::SavedTables;
use sched::SavedScheduler;
use shadow_pt::SavedSpaces;
use vram::{SavedBalancer, SavedChunks, SavedPool, SavedQuanta, TenantId};

/// The mediator's state of a card.
#[derive(Debug)]
pub struct SavedCard {
    /// Table of the owners of chunks.
    pub chunks: SavedChunks,
    /// Policy that chooses the chunks to move.
    pub balancer: SavedBalancer,
    /// State of the VMs' quanta.
    pub quanta: SavedQuanta,
    /// The physical channels.
    pub channels: SavedChannels,
    /// The scheduler.
    pub scheduler: SavedScheduler,
    /// Pages that belong to the mediator, not to a VM.
    pub pool: SavedPool,
    /// Pages of segments that VMs share, by creator. The segments themselves are in a part of `card-memory`.
    pub segments: Vec<(TenantId, SavedPool)>,
    /// The VMs, sorted by number.
    pub vms: Vec<SavedVm>,
}

/// The mediator's state of a VM.
#[derive(Debug)]
pub struct SavedVm {
    /// Number of the VM.
    pub vm: TenantId,
    /// Registers of the vGPU.
    pub gpu: SavedVGpu,
    /// Address spaces of the VM.
    pub spaces: SavedSpaces,
    /// Page tables that the mediator keeps for the VM, if it uses the paravirtual interface.
    pub tables: Option<SavedTables>,
    /// Pages of the card that contain the VM's shadow tables.
    pub pool: SavedPool,
}
