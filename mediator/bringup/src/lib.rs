//! Brings up a card, from power-on to the point where channels can be bound.
//!
//! Modules: [`start`] (starts units, in the order of a driver's probe), `load` (loads firmware), [`layout`] (the
//! mediator's fixed structures in VRAM), [`memory`] (windows to VRAM, and barriers), [`golden`] (initial contents of a
//! context), [`CardError`].
//!
//! The crate does not manage VMs, channels in use, or the owners of resources; `card-manager` does.

mod error;
pub mod golden;
pub mod layout;
mod load;
pub mod memory;
pub mod start;

pub use error::CardError;
