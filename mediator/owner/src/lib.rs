//! The owner of a card, which `bringup` takes over for it: gives VMs their share of VRAM and channels, routes its interrupts.
//!
//! Parts, each of which knows only those before it: [`shortage`] (limits, and how they are told), `alarm` (timers), `tenants`
//! (what happens on the card that concerns a VM, and the box that it lies in until the VM takes it), `memory` (whose memory it is,
//! where it lies, what moves), `work` (channels and their schedule), `host_card` (all of that together: the card's state, its
//! threads, interrupts, recovery and relocation).
//!
//! Lock order: `locks::rank`. The interrupt thread takes the card's lock, collects what is
//! to be delivered, releases it, and only then calls VMs.
//!
//! What it does not do: know a VMM, a guest's registers, the configuration file or the admin API.

mod alarm;
mod error;
mod host_card;
#[cfg(test)]
mod interleavings;
mod memory;
pub mod shortage;
mod tenants;
mod work;

pub use bringup::start::read_vbios;
pub use error::HostError;
pub use host_card::{GuestEvents, HostCard, HostState, Share, Sharing};
pub use memory::balance::Division;
pub use memory::chaos::Chaos;
pub use memory::{CardVram, Looks, Moved, Ranges, Relocated, balance, holdings, iova, segments};
pub use tenants::{GuestEvent, mailbox};
pub use work::feeder::Feeder;
pub use work::{overdue, time, usage};
