//! Saves what is behind a link: the client's memory and its interrupts.

use saved_state::Invalid;
use serde::{Deserialize, Serialize};

use super::{ClientInfo, Link};
use crate::interrupts::SavedInterrupts;
use crate::memory::{MemoryLimits, SavedRegion};
use crate::parked::{Given, Giving, ParkError};

/// Most messages that a client may answer still: those of a few processes, one after the other.
const UNANSWERED_MAX: usize = 1024;

/// Messages before the next one that a client may answer to a process that was killed: more than are on their way at a time.
const BEFORE: u16 = 64;

/// The client's memory and interrupts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedLink {
    memory: Vec<SavedRegion>,
    interrupts: SavedInterrupts,
    /// Numbers of messages that the client may answer still.
    unanswered: Vec<u16>,
}

impl SavedLink {
    /// As a new device wants it, whose process does not know how far the one before it came with messages up to `next_id`.
    pub(crate) fn renew(&mut self, next_id: u64) {
        let next = u16::try_from(next_id & 0xffff).unwrap_or(0);
        self.unanswered = (1..=BEFORE).map(|before| next.wrapping_sub(before)).collect();
        self.interrupts.quiet();
    }
}

impl Link {
    /// Writes down what the client has lent and attached.
    pub(crate) fn save(&self, giving: &mut Giving<'_>) -> Result<SavedLink, ParkError> {
        let memory = self.memory().save(giving)?;
        Ok(SavedLink { memory, interrupts: self.interrupts().save(giving)?, unanswered: self.dma().unanswered() })
    }

    /// Puts what the client had lent and attached behind this link, which is new.
    pub(crate) fn restore(
        &self,
        saved: SavedLink,
        given: &Given,
        (limits, client): (&MemoryLimits, ClientInfo),
    ) -> Result<(), ParkError> {
        let SavedLink { memory, interrupts, unanswered } = saved;
        Invalid::unless(unanswered.len() <= UNANSWERED_MAX, || {
            format!("{} messages are unanswered", unanswered.len())
        })?;
        self.dma().forget(unanswered);
        self.memory().restore(memory, given, limits, self.wake())?;
        self.interrupts().restore(interrupts, given)?;
        self.set_client(Some(client));
        // The check that was under way is not any more.
        self.check_shared();
        Ok(())
    }
}
