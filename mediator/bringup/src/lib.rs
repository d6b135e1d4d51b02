//! Takes a card over: from power-on to where channels can be bound.
//!
//! Parts: [`start`] (units, in the order of a driver's probe), `load` (firmware), [`layout`] (the mediator's fixed structures in VRAM), [`memory`]
//! (windows into VRAM, and barriers), [`golden`] (what a new context holds), [`CardError`].
//!
//! What it does not do: know VMs, channels in use, or who gets what; `owner` does.

mod error;
pub mod golden;
pub mod layout;
mod load;
pub mod memory;
pub mod start;

pub use error::CardError;
