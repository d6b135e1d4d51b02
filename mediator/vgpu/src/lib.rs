//! One VM on a card: its vGPU, wired to the card.
//!
//! Parts, each of which uses only those before it: `memory` (its memory and address spaces), `work` (the mediator's
//! record of its channels), `pv` (the paravirtual interface), `pending` and `write_wait` (waits for memory), `backend`
//! (combines these for the card: effects of registers), `device` (called by the vfio-user server), `batches` (effects
//! of a paravirtual guest's batches), `saved` (a VM that continues in another process), `moving` (on another card),
//! `saving` (from a stream of bytes), `events` (events of the card), `counters` (the operator's view), `status` (that
//! view without a wait).
//!
//! Lock order: `locks::rank`.
//!
//! It does not know the configuration file or the admin API; the daemon converts.

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

/// The way in which the apertures BAR1 and BAR3, and PRAMIN, are served to the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Apertures {
    /// Each access is a message.
    Trapped,
    /// The VMM maps most of them; accesses to the mapped part are not messages.
    Remapped,
}
