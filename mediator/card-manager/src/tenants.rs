//! Events and alarms that the card manager stores for its VMs.
//!
//! Parts: `events` (events of the card), [`mailbox`] and `inbox` (events for a VM whose lock is held), `alarms`
//! (guests' timers).

mod alarms;
mod events;
mod inbox;
pub mod mailbox;

pub(crate) use alarms::GuestAlarms;
pub use events::GuestEvent;
