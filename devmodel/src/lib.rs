//! The vGPU that a guest sees: PCI configuration space, virtual registers, and the effects of accesses.
//!
//! The vGPU is a pure model without threads, without I/O, and without knowledge of other VMs. It uses memory, channels,
//! engines, the clock and the interrupt line through [`Backend`], in the guest's own terms; the card's reports arrive
//! as [`events`]. This crate cannot access registers of the physical card.
//!
//! Parts:
//! - [`backend`]: the interface to the mediator
//! - [`config`]: the description of a vGPU; [`pci`]: configuration space, also for a passed-through card
//! - [`policy`]: one line per register, with denial as the default; [`denied`]: counts denials
//! - [`vgpu`]: dispatches accesses and events; [`blocks`]: registers with behaviour; [`storage`]: registers without
//!   behaviour; [`interrupt`]: MSI with re-arm, and INTx; [`access`]: byte lanes
//!
//! The crate does not model: the display; video decoding; thermal sensors and clocks, whose registers only store
//! values; performance counters; the code of any falcon; zero-bandwidth clears and compression tags (stored, but never
//! used); the peephole; 64 KiB large pages; memory-mapped access faults (a refused access is counted for the operator,
//! and raises no interrupt in the guest).
//!
//! Sources: see [`nvspec`], and the accesses that nouveau makes in Linux 6.1 and 6.12.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

pub mod access;
pub mod backend;
pub mod blocks;
pub mod config;
pub mod denied;
pub mod events;
pub mod interrupt;
pub mod pci;
pub mod policy;
pub mod storage;
pub mod vgpu;

pub use backend::{
    Aperture, Backend, ChannelState, Denied, EngineStatus, InterruptLine, NoMemory, Place, WriteFailure,
};
pub use config::{ConfigError, VGpuConfig};
pub use events::{CopyError, EngineError, GraphError, MmuFault, PbdmaError, SmError};
pub use pci::{PciConfig, PciEvents, PciIdentity};
pub use vgpu::{SavedVGpu, VGpu};

#[cfg(test)]
mod tests;
