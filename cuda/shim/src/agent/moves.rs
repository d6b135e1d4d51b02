//! Moves the program to another card: the program leaves its card at the owner's request, and the other card's owner
//! makes the driver restore it there.
//!
//! Between the two owners, the gate is closed and all chunks are unmapped. The chunks are in host memory, and the
//! program keeps their descriptors, so either owner can serve it next.
//!
//! UNSAFETY: queries the card's UUID from the driver.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::time::{Duration, Instant};

use cuda_protocol::{End, FromOwner, FromTenant, LinkError, Obstacle, RECONNECT_MS, VERSION_MOVES, Welcome};

use super::Agent;
use crate::descriptors::Connection;
use crate::driver::{self, SUCCESS};
use crate::gate;
use crate::log::report;

/// Interval at which a program that has left its card tries to connect to an owner.
// TIMEOUT: the daemon hands a tenant over within milliseconds, and the program waits meanwhile.
const LEFT_RETRY: Duration = Duration::from_millis(20);
/// Time without an owner after which a program that has left its card resumes there.
// TIMEOUT: the daemon cancels a move earlier, and the first owner then serves the program again.
const LEFT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the work in flight of a program that runs without an owner and must leave its card.
// TIMEOUT: the same as for owners' orders.
const QUIET_TIMEOUT: Duration = Duration::from_secs(2);

/// State of a program that moves to another card.
#[derive(Debug, Default)]
pub(super) struct Departure {
    /// Time when the program left its card.
    left: Option<Instant>,
    /// Card that the program was on when it requested a move from an owner, until the owner replies. Cached, because
    /// the driver may have suspended the program meanwhile, and a call could block.
    asked_on: Option<[u8; 16]>,
    /// Time until when a program that could not move stays on its card.
    stays_until: Option<Instant>,
}

impl Departure {
    /// Returns true if the program has unmapped its chunks.
    pub(super) fn has_left(&self) -> bool {
        self.left.is_some()
    }

    /// Returns the interval between attempts to connect to an owner.
    pub(super) fn retry_interval(&self) -> Duration {
        if self.has_left() { LEFT_RETRY } else { Duration::from_millis(RECONNECT_MS) }
    }
}

impl Agent {
    /// Leaves the card at the owner's request.
    pub(super) fn leave(&mut self, patience_us: u32) -> Result<(), LinkError> {
        let left = self.try_leave(Instant::now() + Duration::from_micros(patience_us.into()));
        self.connection.send(&FromTenant::Left { obstacle: left.err() }, &[])
    }

    /// Closes the gate and unmaps all chunks, or returns the obstacle and changes nothing.
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
        // All work has completed. Ignore errors: if the connection fails, the next owner grants another turn.
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

    /// Returns the UUID of the program's current card, or `None` if the driver call fails.
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

    /// Makes a new owner move the program to its card, if the program is elsewhere. Returns false if this fails. The
    /// connection is then unusable.
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

    /// Resumes the program on the card of the owner that now serves it.
    pub(super) fn arrive(&mut self) {
        if let Some(uuid) = self.uuid() {
            self.card.link.set_moved_to(uuid);
        }
        let waits = self.departure.left.is_some() && self.card.gate.is_held();
        self.return_home();
        self.departure.stays_until = None;
        if waits {
            // The waiting threads have only notified the previous owner. Ignore errors: a later owner is notified too.
            let _ = self.connection.send(&FromTenant::Waiting { card: 0 }, &[]);
        }
    }

    /// Clears the reason why the gate is closed. The chunks are mapped again before the gate opens.
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
