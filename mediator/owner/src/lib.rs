//! The owner of a card, which `bringup` takes over for it: gives VMs their share of VRAM and channels, routes its interrupts.
//!
//! Parts: [`iova`] (I/O addresses), [`interrupts`] (the card's interrupt tree, and whom it concerns), [`registry`]
//! (VMs and their events), `recovery` (channels that faulted or are to leave the card), `departures` (those that have not left yet), `schedule` (whose turn it is), `feeder`
//! (what the scheduler is told, and what comes of it), `alarm` (when it is called), `turn` (what the interrupt thread does),
//! `rest` (who waits and holds others up), `record` (what it was told and decided), [`usage`] (what of that the operator
//! sees), [`overdue`] (what submissions wait for that do not end), [`time`] (the card's clock), [`mailbox`] and `inbox` (what the interrupt thread leaves for a VM whose lock is taken),
//! `failure` (what a panic has left half changed), `scrubber` (PGRAPH is cleared between tenants).
//!
//! Of memory: `vram` (guests' memory wherever it lies), [`pinned`] (host memory for it), `pages` (where the host finds that),
//! [`balance`] (who gives and who gets), [`holdings`] (what of that the operator sees), [`refusals`] (what nobody got),
//! [`shortage`] (how limits are told), `wants` (who waits, and what the mediator needs itself), [`mover`] (the thread that moves it) and [`bell`] (what wakes that), [`relocate`] (one
//! VM's chunks change places), [`copier`] and `own_space` (the mediator's own channels, and their address space), [`chaos`]
//! (what moves without a reason, for tests), [`segments`] (what several address spaces share).
//!
//! Lock order: `locks::rank`. The interrupt thread takes the card's lock, collects what is
//! to be delivered, releases it, and only then calls VMs.
//!
//! What it does not do: know a VMM, a guest's registers, the configuration file or the admin API.

mod alarm;
pub mod balance;
pub mod bell;
pub mod chaos;
pub mod copier;
mod departures;
mod error;
mod failure;
mod feeder;
mod guest_alarms;
pub mod holdings;
mod inbox;
#[cfg(test)]
mod interleavings;
pub mod interrupts;
pub mod iova;
pub mod mailbox;
pub mod mover;
mod noise;
pub mod overdue;
mod own_space;
mod pages;
pub mod pinned;
mod record;
mod recovery;
pub mod refusals;
pub mod registry;
pub mod relocate;
mod rest;
mod schedule;
mod scrubber;
pub mod segments;
pub mod shortage;
pub mod time;
mod turn;
pub mod usage;
mod vram;
mod wants;

pub use self::vram::CardVram;
pub use balance::Division;
pub use chaos::Chaos;
pub use error::HostError;
pub use feeder::Feeder;
pub use interrupts::{GuestEvent, GuestEvents};
pub use registry::{HostCard, HostState, Share, Sharing};
pub use relocate::{Ranges, Relocated};
pub use schedule::Schedule;
pub use wants::Looks;
