//! A VM on a card: connects the VM's vGPU to the card.
//!
//! Modules, each of which uses only earlier ones:
//! - `memory`: the VM's memory and address spaces
//! - `work`: the mediator's records of the VM's channels
//! - `pv`: the paravirtual interface
//! - `pending` and `write_wait`: waits for memory
//! - `backend`: combines these for the card, and implements the side effects of registers
//! - `device`: the device that the vfio-user server calls
//! - `batches`: implements the effects of a paravirtual guest's batches
//! - `saved`: hands a VM over to another process
//! - `moving`: moves a VM to another card
//! - `saving`: saves a VM as a byte stream
//! - `events`: handles card events
//! - `counters` and `status`: the operator's view, which never waits for the VM
//!
//! Lock order: `locks::rank`.
//!
//! The crate does not depend on the configuration file or on the admin API; the daemon converts their types.

mod backend;
mod batches;
mod counters;
mod counts;
mod deferred;
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

/// Way in which the apertures BAR1 and BAR3, and PRAMIN, are served to the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Apertures {
    /// Each access is a message.
    Trapped,
    /// The VMM maps most of each aperture. Accesses to this part cause no messages.
    Remapped,
}
