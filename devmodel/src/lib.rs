//! The guest-visible vGPU: PCI configuration space, virtual registers, and the effects of accesses.
//!
//! The vGPU is a pure model without threads, I/O, or knowledge of other VMs. It accesses memory, channels, engines, the
//! clock and the interrupt line through [`Backend`], in guest terms; the card's reports arrive as [`events`]. This
//! crate cannot access registers of the physical card.
//!
//! Modules:
//! - [`backend`]: the interface to the mediator
//! - [`config`]: the description of a vGPU; [`pci`]: configuration space, also of a passed-through card
//! - [`policy`]: one line per register, with denial by default; [`denied`]: counts denials
//! - [`vgpu`]: dispatches accesses and events; [`blocks`]: registers with behaviour; [`storage`]: registers without
//!   behaviour; [`interrupt`]: MSI with re-arm, and INTx; [`access`]: byte lanes
//!
//! The crate does not model: the display; video decoding; thermal sensors and clocks, whose registers only store
//! values; performance counters; falcon code; zero-bandwidth clears and compression tags (stored, but never used); the
//! peephole; 64 KiB large pages; MMIO access faults (a denied access is counted for the operator, but raises no
//! interrupt in the guest).
//!
//! Sources: see [`nvspec`], and the accesses by nouveau in Linux 6.1 and 6.12.

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
