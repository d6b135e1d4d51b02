//! One VM on a card: its vGPU, wired to the card.
//!
//! Parts, each of which knows only those before it: `memory` (what the VM has, and its address spaces), `work` (its channels,
//! as the mediator knows them), `pv` (the interface of a guest that knows us), `pending` and `write_wait` (what waits for
//! memory), `backend` (these brought together for the card: what registers mean), `device` (what the vfio-user server calls),
//! `batches` (what such a guest's batches do), `saved` (a VM that goes on in another process), `moving` (on another card), `saving` (from a stream of bytes), `events` (what the card tells), `counters` (what the operator sees), `status` (without waiting for it).
//!
//! Lock order: `locks::rank`.
//!
//! What it does not do: know the configuration file or the admin API; the daemon converts.

mod backend;
mod batches;
mod counters;
mod counts;
mod device;
mod events;
mod memory;
mod migrating;
mod moving;
mod pending;
mod polling;
pub mod pv;
mod saved;
mod saving;
mod status;
mod work;
mod write_wait;

pub use self::pv::PvSettings;
pub use device::{MediatedDevice, MediatedVm, Settings};
pub use moving::{Left, Parts};
pub use saved::SavedSide;
pub use saving::{Coming, Saving};

/// The way in which the apertures BAR1 and BAR3, and PRAMIN, are served to the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Apertures {
    /// Each access is a message.
    Trapped,
    /// The VMM maps most of them, and accesses there are none.
    Remapped,
}
