//! Events and alarms that the card's owner leaves for its VMs.
//!
//! Parts: `events` (what happens on the card), [`mailbox`] and `inbox` (events for a VM whose lock is taken), `alarms` (of
//! guests' timers).

mod alarms;
mod events;
mod inbox;
pub mod mailbox;

pub(crate) use alarms::GuestAlarms;
pub use events::GuestEvent;
