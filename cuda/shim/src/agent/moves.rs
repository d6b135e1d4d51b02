//! Moves the program to another card: the program leaves its card at the owner's request, and the other card's owner
//! makes the driver restore it there.
//!
//! Between the two owners, the gate is closed and all chunks are unmapped. The chunks are in host memory, and the
//! program keeps their descriptors, so either owner can serve it next.
//!
//! UNSAFETY: queries the card's UUID from the driver.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::time::{Duration, Instant};

use cuda_protocol::{
    End, FromOwner, FromTenant, LinkError, MAX_SEEN, Obstacle, RECONNECT_MS, VERSION_VISIBLE_CARDS, Welcome,
};

use super::Agent;
use crate::descriptors::{ChunkDescriptor, Connection};
use crate::driver::{self, SUCCESS};
use crate::gate;
use crate::link::Terms;
use crate::log::report;
use program_cards::identities;

/// Interval between a program's attempts to connect to an owner after it has left its card.
// TIMEOUT: the daemon hands a tenant over within milliseconds, and the program waits meanwhile.
const LEFT_RETRY: Duration = Duration::from_millis(5);
/// Time without an owner after which a program that has left its card continues on that card.
// TIMEOUT: the daemon abandons a move earlier, and the first owner then serves the program again.
const LEFT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the work in flight of a program that runs without an owner and must leave its card.
// TIMEOUT: the limit is the same as for an owner's orders.
const QUIET_TIMEOUT: Duration = Duration::from_secs(2);

/// State of a program that moves to another card.
#[derive(Debug, Default)]
pub(super) struct Departure {
    /// Time when the program left its card.
    left: Option<Instant>,
    /// Card that the program was on when it requested a move from an owner, until the owner replies. Cached, because
    /// the driver may have suspended the program meanwhile, and a call could block.
    asked_on: Option<[u8; 16]>,
    /// Time until which a program that could not move stays on its card.
    stays_until: Option<Instant>,
    /// Card to which the driver has moved the program, but on which the program cannot import its chunks.
    unusable: Option<[u8; 16]>,
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

/// Imports a chunk and releases it. Returns the driver's result.
fn import_result(chunk: &ChunkDescriptor) -> c_int {
    let (mut handle, source) = (0, chunk.as_fd().as_raw_fd() as usize as *mut c_void);
    // SAFETY: the pointer is valid. For POSIX descriptors, type 1, the source is the descriptor's number.
    unsafe {
        let result = driver::mem_import(&raw mut handle, source, 1);
        if result == SUCCESS {
            driver::mem_release(handle);
        }
        result
    }
}

/// Reports the cards that the driver sees.
pub(super) fn tell_seen(connection: &Connection, version: u16, terms: &Terms) {
    if version >= VERSION_VISIBLE_CARDS && !terms.seen.is_empty() {
        let uuids = terms.seen.iter().take(MAX_SEEN).copied().collect();
        // Ignore errors: without this message, the program merely cannot move.
        let _ = connection.send(&FromTenant::Sees { uuids }, &[]);
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
        identities::uuid(i32::try_from(ordinal).ok()?)
    }

    /// Leaves the current card for a new owner's card. Returns the UUID of that card if the owner now makes the driver
    /// move the program, `Some(None)` if it is already there, or `None` if the connection must be abandoned.
    pub(super) fn set_out(&mut self, connection: &Connection, welcome: &Welcome) -> Option<Option<[u8; 16]>> {
        let (Some(target), true) = (welcome.cards.first(), self.shim.is_single()) else { return Some(None) };
        if self.departure.asked_on.is_none() {
            let Some(uuid) = self.uuid() else { return Some(None) };
            let is_here = uuid == target.uuid;
            if is_here && self.departure.unusable != Some(uuid) {
                return Some(None);
            }
            let stays = self.departure.stays_until.is_some_and(|until| Instant::now() < until);
            let may = !is_here && !stays && welcome.version >= VERSION_VISIBLE_CARDS;
            if !may || self.try_leave(Instant::now() + QUIET_TIMEOUT).is_err() {
                let _ = connection.send(&FromTenant::Goodbye(End::Leaving), &[]);
                return None;
            }
            self.departure.asked_on = Some(uuid);
        }
        let uuid = self.departure.asked_on?;
        connection.send(&FromTenant::Elsewhere { uuid }, &[]).ok().map(|()| Some(target.uuid))
    }

    /// Waits until the driver has moved the program to the card `target`. Returns true if the program is there and can
    /// import `sample`, one of its chunks.
    pub(super) fn wait_for_driver(
        &mut self,
        connection: &Connection,
        target: [u8; 16],
        sample: Option<&ChunkDescriptor>,
    ) -> bool {
        loop {
            match connection.receive().map(|received| received.message) {
                Ok(FromOwner::Fetched) => break,
                // The owner has let the program continue on its current card.
                Ok(FromOwner::Goodbye(End::Moved)) => {
                    self.departure.asked_on = None;
                    return false;
                }
                Ok(FromOwner::Goodbye(_)) | Err(_) => return false,
                Ok(_) => {}
            }
        }
        self.departure.asked_on = None;
        if self.uuid() != Some(target) {
            return false;
        }
        self.card.contexts.bind();
        let code = sample.map_or(SUCCESS, import_result);
        self.departure.unusable = (code != SUCCESS).then_some(target);
        if code != SUCCESS {
            report!("chunks cannot be imported on the other card: CUDA error {code}");
            let _ = connection.send(&FromTenant::Unusable { code }, &[]);
            // Closing the connection with unread messages would discard this message.
            while !matches!(connection.receive().map(|received| received.message), Ok(FromOwner::Goodbye(_)) | Err(_)) {
            }
        }
        code == SUCCESS
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
            // The waiting threads have notified only the previous owner. Ignore errors: a later owner is notified too.
            let _ = self.connection.send(&FromTenant::Waiting { card: 0 }, &[]);
        }
    }

    /// Ends the program's departure: lets other threads use the memory, and removes the reason for closing the gate.
    /// The chunks are mapped again before the gate opens.
    fn return_home(&mut self) {
        if self.departure.left.take().is_some() {
            self.memory().attach();
            self.open(self.card, gate::ORDER);
        }
    }

    /// Lets the program run on its card without an owner, if no owner has served it in time and no owner is moving it.
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
