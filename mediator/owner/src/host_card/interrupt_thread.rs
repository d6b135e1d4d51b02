//! The card's interrupt thread, each time that it wakes.

use crate::tenants::GuestEvent;
use std::io;
use vram::VmId;

/// Rounds through the interrupt tree for one message before the thread waits for the next: a stuck status bit must not
/// spin.
const ROUNDS: u32 = 64;

/// Why the thread woke.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Woken {
    /// The card has raised an interrupt, or there is something in the outbox.
    pub(crate) signalled: bool,
    /// The scheduler's timer has expired.
    pub(crate) expired: bool,
}

/// The object that the thread serves. Each call takes the card's lock for itself, if it takes it at all.
pub(crate) trait Served {
    /// Takes the signal back, and lets the card raise the next.
    ///
    /// # Errors
    /// When the signal cannot be read.
    fn acknowledge(&self) -> io::Result<()>;

    /// One pass through the interrupt tree. Says whether anything was pending, and what to deliver.
    fn service(&self) -> (bool, Vec<(VmId, GuestEvent)>);

    /// The scheduler's timer has expired.
    fn tick(&self);

    /// Returns what the scheduler's decisions have for guests.
    fn take_outbox(&self) -> Vec<(VmId, GuestEvent)>;

    /// Gives an event to a VM, if it is still there. Never waits for the VM.
    fn deliver(&self, vm: VmId, event: GuestEvent);
}

/// Serves what the thread was woken for.
///
/// The signal is taken back first, then the card's status is read and cleared, so that an edge between the two brings a
/// new message instead of being lost.
///
/// # Errors
/// When the signal cannot be read.
pub(crate) fn serve_wakeup(host: &impl Served, woken: Woken) -> io::Result<()> {
    let deliver = |events: Vec<(VmId, GuestEvent)>| events.into_iter().for_each(|(vm, event)| host.deliver(vm, event));
    if woken.signalled {
        host.acknowledge()?;
        for _ in 0..ROUNDS {
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
