//! Saves what is behind a link: the client's memory and its interrupts.

use saved_state::Invalid;
use serde::{Deserialize, Serialize};

use super::{ClientInfo, Link};
use crate::interrupts::SavedInterrupts;
use crate::memory::{MemoryLimits, SavedRegion};
use crate::parked::{Given, Giving, ParkError};

/// Most messages that a client may answer still: those of a few processes, one after the other.
const UNANSWERED_MAX: usize = 1024;

/// The client's memory and interrupts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedLink {
    memory: Vec<SavedRegion>,
    interrupts: SavedInterrupts,
    /// Numbers of messages that the client may answer still.
    unanswered: Vec<u16>,
}

impl Link {
    /// Writes down what the client has lent and attached.
    pub(crate) fn save(&self, giving: &mut Giving) -> Result<SavedLink, ParkError> {
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
