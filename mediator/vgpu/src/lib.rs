//! One VM on a card: its vGPU, wired to the card; or the card itself ([`passthrough`]).
//!
//! Parts: `device` (what the vfio-user server calls), `backend` (what the vGPU's registers mean for the card), `channels`
//! (from instance block and doorbell to the card), `named` (which memory work names), `aperture` (CPU accesses to guest
//! VRAM, by BAR1, BAR3 and PRAMIN), `patience` (how they wait for memory), `pending` (what else waits for it), `spaces` (shadow page tables), `ram` (guest RAM
//! as the card sees it), `remap`, `moves`, `window` (apertures that the VMM maps), `pv` (what a guest that knows us may
//! use), `status` (what the operator sees).
//!
//! Lock order: `locks::rank`.
//!
//! What it does not do: know the configuration file or the admin API; the daemon converts.

mod aperture;
mod backend;
mod channels;
mod counters;
mod device;
mod events;
mod moves;
mod named;
pub mod passthrough;
mod patience;
mod pending;
pub mod pv;
mod ram;
mod remap;
mod spaces;
mod status;
mod window;

pub use self::pv::PvSettings;
pub use device::{MediatedDevice, MediatedVm, Settings};
pub use status::{DeniedAccess, DeviceError, DeviceStatus, InterruptKind};

/// How the apertures BAR1 and BAR3 are served to the VMM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Apertures {
    /// Each access is a message.
    #[default]
    Trapped,
    /// The VMM maps most of both, and accesses there are none.
    Remapped,
}
