//! A guest-visible vGPU: PCI configuration space, virtual registers, and the effects of accesses.
//!
//! The vGPU is a pure model that has no threads, performs no I/O, and does not access other VMs. It accesses memory,
//! channels, engines, the clock and the interrupt line through [`Backend`], using guest addresses and numbers. The
//! mediator reports the card's events as [`events`]. This crate cannot access registers of the physical card.
//!
//! Modules:
//! - [`backend`]: interface to the mediator
//! - [`config`]: configuration of a vGPU; [`pci`]: configuration space, also of passed-through cards
//! - [`policy`]: policy of each register, which is denied by default; [`denied`]: counts of denied accesses
//! - [`vgpu`]: dispatches accesses and events; [`blocks`]: registers with side effects; [`storage`]: registers without
//!   side effects; [`interrupt`]: MSI with rearming, and INTx; [`access`]: byte lanes
//!
//! The crate does not model: the display; video decoding; thermal sensors and clocks (their registers only store
//! values); performance counters; falcon code; zero-bandwidth clears and compression tags, which are stored but unused;
//! the peephole; 64 KiB large pages; and MMIO access faults (denied accesses are counted for the operator, but raise no
//! interrupt in the guest).
//!
//! Sources: see [`nvspec`], and the register accesses of nouveau in Linux 6.1 and 6.12.

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
