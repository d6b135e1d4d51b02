//! Handling of one wake-up of the card's interrupt thread.

use crate::tenants::GuestEvent;
use std::io;
use vram::TenantId;

/// Maximum number of passes through the interrupt tree per message. The thread then waits for the next message, instead
/// of spinning on a stuck status bit.
const MAX_ROUNDS_PER_MESSAGE: u32 = 64;

/// Reason why the thread was woken.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Woken {
    /// Set if the card has raised an interrupt, or if the outbox contains events.
    pub(crate) signalled: bool,
    /// Set if the scheduler's timer has expired.
    pub(crate) expired: bool,
}

/// Interface to the card that the thread serves. Each call acquires the card's lock if needed.
pub(crate) trait Served {
    /// Clears the signal, so that the card can send the next one.
    ///
    /// # Errors
    /// Returns an error if the signal cannot be read.
    fn acknowledge(&self) -> io::Result<()>;

    /// Makes one pass through the interrupt tree. Returns a flag that is true if any interrupt was pending, and the
    /// events to deliver.
    fn service(&self) -> (bool, Vec<(TenantId, GuestEvent)>);

    /// Handles the expiry of the scheduler's timer.
    fn tick(&self);

    /// Returns the guest events caused by the scheduler's decisions.
    fn take_outbox(&self) -> Vec<(TenantId, GuestEvent)>;

    /// Delivers an event to a VM if it still exists. Never waits for the VM.
    fn deliver(&self, vm: TenantId, event: GuestEvent);
}

/// Serves one wake-up.
///
/// Clears the signal before it reads and clears the card's status. Therefore, an edge in between causes a new message
/// instead of being lost.
///
/// # Errors
/// Returns an error if the signal cannot be read.
pub(crate) fn serve_wakeup(host: &impl Served, woken: Woken) -> io::Result<()> {
    let deliver =
        |events: Vec<(TenantId, GuestEvent)>| events.into_iter().for_each(|(vm, event)| host.deliver(vm, event));
    if woken.signalled {
        host.acknowledge()?;
        for _ in 0..MAX_ROUNDS_PER_MESSAGE {
            let (pending, events) = host.service();
            deliver(events);
            if !pending {
                break;
            }
        }
    }
    if woken.expired {
        host.tick();
    }
    deliver(host.take_outbox());
    Ok(())
}
