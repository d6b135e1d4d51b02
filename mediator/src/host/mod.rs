//! The owner of a card: brings it up, gives VMs their share of VRAM and channels, routes its interrupts.
//!
//! Parts: [`bring_up`] (initialisation), [`layout`] (the mediator's fixed structures in VRAM), [`memory`] (windows into
//! VRAM), [`iova`] (I/O addresses), [`interrupts`] (the card's interrupt tree, and whom it concerns), [`registry`]
//! (VMs and their events), `recovery` (channels that faulted or do not leave the card), `schedule` (whose turn it is), `feeder`
//! (what the scheduler is told, and what comes of it), `alarm` (when it is called), `turn` (what the interrupt thread does),
//! [`usage`] (what of that the operator sees), [`time`] (the card's clock).
//!
//! Lock order: a vGPU's own lock, then [`HostCard::lock`]. The interrupt thread takes the card's lock, collects what is
//! to be delivered, releases it, and only then calls VMs.

mod alarm;
pub mod balance;
pub mod bell;
pub mod bring_up;
pub mod copier;
mod error;
mod feeder;
#[cfg(test)]
mod interleavings;
pub mod interrupts;
pub mod iova;
pub mod layout;
pub mod memory;
pub mod mover;
mod own_space;
pub mod pinned;
mod recovery;
pub mod registry;
pub mod relocate;
mod schedule;
pub mod time;
mod turn;
pub mod usage;
mod vram;

pub use balance::Division;
pub use error::HostError;
pub use feeder::Feeder;
pub use interrupts::{GuestEvent, GuestEvents};
pub use registry::{HostCard, HostState, Share, Sharing};
pub use relocate::{Ranges, Relocated};
pub use schedule::Schedule;
pub use vram::CardVram;
