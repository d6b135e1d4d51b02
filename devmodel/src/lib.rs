//! The vGPU that a guest sees: PCI configuration space, virtual registers, and what each access to them means.
//!
//! It is a pure model: no threads, no I/O, no other VMs. Whatever concerns memory, channels, engines, the clock or the
//! interrupt line goes through [`Backend`], in the guest's own terms; what the card reports comes back as [`events`].
//! No register of the physical card can be reached from here.
//!
//! Parts:
//! - [`backend`]: the seam to the mediator;
//! - [`config`]: what a vGPU is made from; [`pci`]: configuration space, also of a card that is passed through;
//! - [`policy`]: one line for each register, refusing by default; [`denied`] counts what was refused;
//! - [`vgpu`]: dispatch of accesses and events; [`blocks`]: the registers that have behaviour, [`storage`]: those that
//!   have none; [`interrupt`]: MSI with re-arm, INTx; [`access`]: byte lanes.
//!
//! What it does not model: display, video decoding, thermal sensors and clocks beyond storage, performance counters,
//! the code of any falcon, zero-bandwidth clears and compression tags (stored, never used), the peephole, the larger
//! of the two page-table formats' sizes (64 KiB pages), memory-mapped access faults (a refused access is counted for
//! the operator and raises no interrupt in the guest).
//!
//! Sources: see [`nvspec`]; what Linux's nouveau (6.1, 6.12) reads and writes.

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

pub use backend::{Aperture, Backend, ChannelState, Denied, EngineStatus, InterruptLine, NoMemory, Place, Unwritten};
pub use config::{ConfigError, VGpuConfig};
pub use events::{CopyError, EngineError, GraphError, MmuFault, PbdmaError, SmError};
pub use pci::{PciConfig, PciEvents, PciIdentity};
pub use vgpu::{SavedVGpu, VGpu};

#[cfg(test)]
mod tests;
