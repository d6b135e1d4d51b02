//! Moves the program to another card: it leaves its card on request of the owner, and the owner of the other card makes
//! the driver restore it there.
//!
//! Between the two owners, the gate is closed and all chunks are unmapped. The chunks are in host memory, and the
//! program keeps their descriptors, so any owner can serve it next, also the first one.
//!
//! UNSAFETY: queries the driver's card.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::time::{Duration, Instant};

use cuda_protocol::{End, FromOwner, FromTenant, LinkError, Obstacle, RECONNECT_MS, VERSION_MOVES, Welcome};

use super::Agent;
use crate::descriptors::Connection;
use crate::driver::{self, SUCCESS};
use crate::gate;
use crate::log::report;

/// Interval at which a program that has left its card looks for an owner.
// TIMEOUT: the daemon passes a tenant on within milliseconds, and the program waits meanwhile.
const LEFT_RETRY: Duration = Duration::from_millis(20);
/// Time without an owner after which a program that has left its card continues there.
// TIMEOUT: the daemon gives up a move earlier, and the first owner serves the program again then.
const LEFT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the work of a program that runs without an owner and must leave its card.
// TIMEOUT: as for orders of an owner.
const QUIET_TIMEOUT: Duration = Duration::from_secs(2);

/// State of a program that moves to another card.
#[derive(Debug, Default)]
pub(super) struct Departure {
    /// Time at which the program left its card.
    left: Option<Instant>,
    /// Card of the program when it asked an owner to move it, until the owner answers. The driver may have suspended
    /// the program meanwhile, so a call could block.
    asked_on: Option<[u8; 16]>,
    /// Time before which a program that could not move does not leave its card again.
    stays_until: Option<Instant>,
}

impl Departure {
    /// Returns true if the program has unmapped its chunks.
    pub(super) fn has_left(&self) -> bool {
        self.left.is_some()
    }

    /// Returns the time between two attempts to reach an owner.
    pub(super) fn retry_interval(&self) -> Duration {
        if self.has_left() { LEFT_RETRY } else { Duration::from_millis(RECONNECT_MS) }
    }
}

impl Agent {
    /// Leaves the card on request of the owner.
    pub(super) fn leave(&mut self, patience_us: u32) -> Result<(), LinkError> {
        let left = self.try_leave(Instant::now() + Duration::from_micros(patience_us.into()));
        self.connection.send(&FromTenant::Left { obstacle: left.err() }, &[])
    }

    /// Closes the gate and unmaps all chunks. Changes nothing if this is not possible.
    fn try_leave(&mut self, deadline: Instant) -> Result<(), Obstacle> {
        if self.departure.has_left() {
            return Ok(());
        }
        if !self.shim.is_single() {
            return Err(Obstacle::Cards);
        }
        if self.order.is_some() {
            return Err(Obstacle::Busy);
        }
        let card = self.card;
        let quiet = card.gate.close(gate::ORDER, Some(deadline)) && self.shim.drain(card, Some(deadline));
        let left = if quiet { self.detach() } else { Err(Obstacle::Busy) };
        if left.is_err() {
            self.open(card, gate::ORDER);
            return left;
        }
        self.departure.left = Some(Instant::now());
        // All work has ended. If the connection fails, the next owner grants another turn.
        let _ = self.stop();
        Ok(())
    }

    fn detach(&self) -> Result<(), Obstacle> {
        self.card.contexts.bind();
        // Return the empty chunks, so that they need not be moved.
        self.memory().begin_to_empty();
        self.memory().give_up_empty();
        let was_connected = self.card.link.is_connected();
        if !self.card.link.hold_requests() {
            return Err(Obstacle::Busy);
        }
        let detached = self.memory().detach();
        if detached.is_err() && was_connected {
            self.card.link.resume_requests(&self.connection);
        }
        detached
    }

    /// Returns the UUID of the card on which the program is; `None` if the driver does not tell.
    fn uuid(&self) -> Option<[u8; 16]> {
        let devices = &self.card.link.terms()?.devices;
        let ordinal = devices.iter().position(|card| *card == Some(0))?;
        let (mut device, mut uuid) = (0, [0; 16]);
        // SAFETY: the pointers are valid.
        let result = unsafe {
            driver::device_get(&raw mut device, i32::try_from(ordinal).ok()?);
            driver::device_get_uuid(&raw mut uuid, device)
        };
        (result == SUCCESS).then_some(uuid)
    }

    /// Makes sure that the program is on the card of a new owner. Returns false if it is not; the connection is then of
    /// no use.
    pub(super) fn come_to(&mut self, connection: &Connection, welcome: &Welcome) -> bool {
        let (Some(target), true) = (welcome.cards.first(), self.shim.is_single()) else { return true };
        if welcome.version < VERSION_MOVES {
            return true;
        }
        if self.departure.asked_on.is_none() {
            match self.uuid() {
                Some(uuid) if uuid != target.uuid => {
                    let stays = self.departure.stays_until.is_some_and(|until| Instant::now() < until);
                    if stays || self.try_leave(Instant::now() + QUIET_TIMEOUT).is_err() {
                        let _ = connection.send(&FromTenant::Goodbye(End::Leaving), &[]);
                        return false;
                    }
                    self.departure.asked_on = Some(uuid);
                }
                _ => return true,
            }
        }
        let Some(uuid) = self.departure.asked_on else { return true };
        if connection.send(&FromTenant::Elsewhere { uuid }, &[]).is_err() {
            return false;
        }
        loop {
            match connection.receive().map(|received| received.message) {
                Ok(FromOwner::Fetched) => break,
                // The owner has let the program continue on its card.
                Ok(FromOwner::Goodbye(End::Moved)) => {
                    self.departure.asked_on = None;
                    return false;
                }
                Ok(FromOwner::Goodbye(_)) | Err(_) => return false,
                Ok(_) => {}
            }
        }
        self.departure.asked_on = None;
        self.uuid() == Some(target.uuid)
    }

    /// Lets the program continue with the owner that serves it now.
    pub(super) fn arrive(&mut self) {
        if let Some(uuid) = self.uuid() {
            self.card.link.set_moved_to(uuid);
        }
        let waits = self.departure.left.is_some() && self.card.gate.is_held();
        self.return_home();
        self.departure.stays_until = None;
        if waits {
            // The threads have notified the previous owner. If the connection has ended, the next owner hears of them.
            let _ = self.connection.send(&FromTenant::Waiting { card: 0 }, &[]);
        }
    }

    /// Maps the chunks again when the gate opens next, and removes the reason for which it is closed.
    fn return_home(&mut self) {
        if self.departure.left.take().is_some() {
            self.memory().attach();
            self.open(self.card, gate::ORDER);
        }
    }

    /// Lets the program run on its card without an owner, if none has served it in time.
    pub(super) fn return_late(&mut self) {
        let is_late = self.departure.left.is_some_and(|left| left.elapsed() >= LEFT_TIMEOUT);
        if !is_late || self.departure.asked_on.is_some() {
            return;
        }
        report!("no owner has served the program since it left its card");
        self.departure.stays_until = Some(Instant::now() + LEFT_TIMEOUT);
        self.return_home();
        self.open(self.card, gate::NO_SLICE | gate::ORDER);
    }
}
