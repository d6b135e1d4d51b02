//! Card events and alarms for the VMs.
//!
//! Modules: `events` (card events), [`mailbox`] and `inbox` (events for a VM whose lock is held), and `alarms` (guests'
//! timers).

mod alarms;
mod events;
mod inbox;
pub mod mailbox;

pub(crate) use alarms::GuestAlarms;
pub use events::GuestEvent;
