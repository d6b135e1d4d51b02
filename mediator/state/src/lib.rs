//! The saved state of a card and its VMs.
//!
//! Each crate saves its own part, and checks it alone. Here is what the parts are together: which of them make a card and a VM
//! ([`SavedCard`]), in one file ([`SavedCard::write`], [`SavedCard::read`]); and what they must say of each other, or a file
//! whose parts are each sound could still give one VM what is another's ([`SavedCard::restore`]):
//! - the same VMs are in all parts, each with as much VRAM for its guest as it has chunks;
//! - each chunk of the mediator's is one pool's, and what address spaces have on the card is in their own VM's;
//! - a channel uses the shadow of a directory of its own VM's;
//! - the channels that a guest sees bound are those that are bound, or were refused.
//!
//! The memory of the card, of the host and of guests is not here: parts name it, and whoever restores them brings it. All
//! channels must be off the engines when a card is saved, and its TLBs are to be flushed when it is restored; then each
//! address space is prepared before anything of it runs.
//!
//! The owner of a card and a VM save what is their own beside it (`owner`, `vgpu`), and so do the connections of VMMs (`vmm-glue`), and
//! segments that VMs share (`card-memory`, `vgpu`).

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
use vram::{SavedBalancer, SavedChunks, SavedPool, SavedQuanta, VmId};

/// State that the mediator keeps of a card.
#[derive(Debug)]
pub struct SavedCard {
    /// Table of who has which chunk.
    pub chunks: SavedChunks,
    /// Policy of which chunks move.
    pub balancer: SavedBalancer,
    /// Order in which VMs take turns.
    pub quanta: SavedQuanta,
    /// The physical channels.
    pub channels: SavedChannels,
    /// The scheduler.
    pub scheduler: SavedScheduler,
    /// Pages of the mediator's own, that are no VM's.
    pub pool: SavedPool,
    /// Pages of segments that VMs share, by who has made them; they are in a part of `card-memory`'s.
    pub segments: Vec<(VmId, SavedPool)>,
    /// The VMs, by number.
    pub vms: Vec<SavedVm>,
}

/// State that it keeps of a VM.
#[derive(Debug)]
pub struct SavedVm {
    /// Its number.
    pub vm: VmId,
    /// Its registers.
    pub gpu: SavedVGpu,
    /// Its address spaces.
    pub spaces: SavedSpaces,
    /// Page tables that are kept for it, if it knows the paravirtual interface.
    pub tables: Option<SavedTables>,
    /// Pages of the card with its shadow tables.
    pub pool: SavedPool,
}
