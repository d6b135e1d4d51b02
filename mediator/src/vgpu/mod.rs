//! One mediated VM: its vGPU, wired to the card.
//!
//! Parts: `device` (what the vfio-user server calls), `backend` (what the vGPU's registers mean for the card), `channels`
//! (from instance block and doorbell to the card), `named` (which memory work names), `aperture` (CPU accesses to guest
//! VRAM, by BAR1, BAR3 and PRAMIN), `patience` (how they wait for memory), `spaces` (shadow page tables), `ram` (guest RAM
//! as the card sees it), `remap`, `moves`, `window` (apertures that the VMM maps), `inbox` (what the interrupt thread
//! leaves), `mailbox` (who takes that up), `pv` (what a guest that knows us may use), `rig` (feature `test-rig`: VMs
//! without a VMM, and a small driver).
//!
//! Lock order: the vGPU (`device`'s `Core`), then the card ([`crate::host::HostCard::lock`]).

mod aperture;
mod backend;
mod channels;
mod device;
mod inbox;
#[cfg(test)]
mod interleavings;
pub(crate) mod mailbox;
mod moves;
mod named;
mod patience;
pub(crate) mod pv;
pub(crate) mod ram;
mod remap;
#[cfg(any(test, feature = "test-rig"))]
pub mod rig;
mod spaces;
#[cfg(test)]
mod tests;
mod window;

pub use device::{MediatedDevice, MediatedVm, Settings};
pub use pv::PvSettings;
