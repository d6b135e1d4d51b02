//! The owner of a card: brings it up, gives VMs their share of VRAM and channels, routes its interrupts.
//!
//! Parts: [`bring_up`] (initialisation), [`layout`] (the mediator's fixed structures in VRAM), [`memory`] (windows into
//! VRAM), [`iova`] (I/O addresses), [`interrupts`] (the card's interrupt tree, and whom it concerns), [`registry`]
//! (VMs and their events), `recovery` (channels that faulted or do not leave the card), `schedule` (whose turn it is), `rest` (who waits and holds others up),
//! `record` (what it was told and decided), [`usage`] (what of that the operator sees), [`time`] (the card's clock).
//!
//! Lock order: a vGPU's own lock, then [`HostCard::lock`]. The interrupt thread takes the card's lock, collects what is
//! to be delivered, releases it, and only then calls VMs.

pub mod bring_up;
mod error;
pub mod interrupts;
pub mod iova;
pub mod layout;
pub mod memory;
mod record;
mod recovery;
pub mod registry;
mod rest;
mod schedule;
pub mod time;
pub mod usage;

pub use error::HostError;
pub use interrupts::{GuestEvent, GuestEvents};
pub use registry::{CardVram, HostCard, HostState, Share};
pub use schedule::Schedule;
