//! The owner of a card, which `bringup` takes over for it: gives VMs their share of VRAM and channels, routes its interrupts.
//!
//! Parts, each of which knows only those before it: `alarm` (timers), `tenants` (what happens on the card that concerns a VM, and
//! the box that it lies in until the VM takes it), `work` (channels and their schedule), `host_card` (all of that together with
//! the card's memory, [`card_memory`]: the card's state, its threads, interrupts, recovery and relocation).
//!
//! Lock order: `locks::rank`. The interrupt thread takes the card's lock, collects what is
//! to be delivered, releases it, and only then calls VMs.
//!
//! What it does not do: know a VMM, a guest's registers, the configuration file or the admin API.

mod alarm;
mod host_card;
#[cfg(test)]
mod interleavings;
mod tenants;
mod work;

pub use bringup::start::CardInfo;
pub use card_memory::balance::Division;
pub use card_memory::chaos::Chaos;
pub use card_memory::{
    Accesses, CardVram, Counted, HostError, Looks, Moved, Ranges, Relocated, Words, balance, holdings, iova, segments,
    shortage,
};
pub use host_card::{
    Departing, GuestEvents, Halted, Handed, HostCard, HostState, Reopened, SavedHost, Share, Sharing, Standstill,
    Suspended,
};
pub use tenants::{GuestEvent, mailbox};
pub use work::feeder::Feeder;
pub use work::{overdue, time, usage};
