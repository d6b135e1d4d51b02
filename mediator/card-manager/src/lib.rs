//! Card manager: allocates VRAM and channels to VMs, and routes the card's interrupts. `bringup` initializes the card
//! beforehand.
//!
//! Modules, each of which only uses earlier ones: `alarm` (timers); `tenants` (card events for VMs, and the mailbox
//! that queues a VM's events until the VM handles them); `work` (channels and their schedule); and `managed_card`,
//! which combines these with the card's memory ([`card_memory`]) and contains the card's state, threads, interrupts,
//! recovery, and relocation.
//!
//! Lock order: `locks::rank`. The interrupt thread acquires the card's lock, collects the events, releases the lock,
//! and only then calls VMs.
//!
//! The crate does not depend on VMMs, guest registers, the configuration file or the admin API.

mod alarm;
#[cfg(test)]
mod interleavings;
mod managed_card;
mod tenants;
mod work;

pub use bringup::start::CardInfo;
pub use card_memory::balance::Division;
pub use card_memory::chaos::Chaos;
pub use card_memory::{
    Accesses, CardVram, Counted, Looks, ManagerError, Moved, Ranges, Relocated, Words, balance, holdings, iova,
    segments, shortage,
};
pub use managed_card::{
    CardState, Departing, GuestEvents, Halted, Handed, ManagedCard, Reopened, SavedHost, Share, Sharing, Standstill,
    Suspended,
};
pub use tenants::{GuestEvent, mailbox};
pub use work::needs::Needs;
pub use work::push_buffer::{Bindings, Reader};
pub use work::{overdue, time, usage};
