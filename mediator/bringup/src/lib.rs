//! Brings up a card, from power-on to the point where channels can be bound.
//!
//! Modules: [`start`] (starts units in the order of a driver's probe), `load` (loads firmware), [`layout`] (the
//! mediator's fixed structures in VRAM), [`memory`] (VRAM access through windows, and barriers), [`golden`] (the
//! initial context image), [`CardError`].
//!
//! The crate does not manage VMs, active channels, or resource ownership; `card-manager` does.

mod error;
pub mod golden;
pub mod layout;
mod load;
pub mod memory;
pub mod start;

pub use error::CardError;
