//! The vGPU that a guest sees: PCI configuration space, virtual registers, and the effect of each access.
//!
//! The vGPU is a pure model, without threads, I/O or other VMs. Memory, channels, engines, the clock and the interrupt
//! line are accessed through [`Backend`], in the guest's own terms; the card's reports arrive as [`events`]. This crate
//! cannot access registers of the physical card.
//!
//! Parts:
//! - [`backend`]: the interface to the mediator;
//! - [`config`]: the description of a vGPU; [`pci`]: configuration space, also of a card in passthrough;
//! - [`policy`]: one line for each register, with denial as the default; [`denied`] counts denials;
//! - [`vgpu`]: dispatch of accesses and events; [`blocks`]: registers with behaviour, [`storage`]: registers without
//!   behaviour; [`interrupt`]: MSI with re-arm, INTx; [`access`]: byte lanes.
//!
//! The crate does not model: display; video decoding; thermal sensors and clocks, whose registers are plain storage;
//! performance counters; the code of any falcon; zero-bandwidth clears and compression tags (stored, never used); the
//! peephole; 64 KiB large pages; memory-mapped access faults (a refused access is counted for the operator and does not
//! raise an interrupt in the guest).
//!
//! Sources: see [`nvspec`], and the accesses of Linux's nouveau (6.1, 6.12).

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
