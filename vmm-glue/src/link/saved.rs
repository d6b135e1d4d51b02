//! Saved form of a link's client memory and interrupts.

use saved_state::Invalid;
use serde::{Deserialize, Serialize};

use super::{ClientInfo, Link};
use crate::interrupts::SavedInterrupts;
use vmm_memory::descriptors::{Given, Giving, ParkError};
use vmm_memory::memory::{MemoryLimits, SavedRegion};

/// Maximum number of messages to which a client may still reply, across consecutive processes.
const UNANSWERED_MAX: usize = 1024;

/// Number of the latest messages to which a client may still reply after a kill. It exceeds the number of messages in
/// flight.
const MAX_UNANSWERED: u16 = 64;

/// Saved client memory and interrupts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedLink {
    memory: Vec<SavedRegion>,
    interrupts: SavedInterrupts,
    /// IDs of messages to which the client may still reply.
    unanswered: Vec<u16>,
}

impl SavedLink {
    /// Adapts the saved form to a new device: clears the pending interrupts, and treats the last [`MAX_UNANSWERED`]
    /// messages before `next_id` as unanswered, because the process does not know which replies have arrived.
    pub(crate) fn renew(&mut self, next_id: u64) {
        let next = u16::try_from(next_id & 0xffff).unwrap_or(0);
        self.unanswered = (1..=MAX_UNANSWERED).map(|before| next.wrapping_sub(before)).collect();
        self.interrupts.quiet();
    }
}

impl Link {
    /// Saves the client's memory and interrupts.
    pub(crate) fn save(&self, giving: &mut Giving<'_>) -> Result<SavedLink, ParkError> {
        let memory = self.memory().save(giving)?;
        Ok(SavedLink { memory, interrupts: self.interrupts().save(giving)?, unanswered: self.dma().unanswered() })
    }

    /// Restores the client's memory and interrupts into this link, which must be new.
    pub(crate) fn restore(
        &self,
        saved: SavedLink,
        given: &Given,
        limits: &MemoryLimits,
        client: ClientInfo,
    ) -> Result<(), ParkError> {
        let SavedLink { memory, interrupts, unanswered } = saved;
        Invalid::unless(unanswered.len() <= UNANSWERED_MAX, || {
            format!("{} messages are unanswered", unanswered.len())
        })?;
        self.dma().forget(unanswered);
        self.memory().restore(memory, given, limits, self.wake())?;
        self.interrupts().restore(interrupts, given)?;
        self.set_client(Some(client));
        // Restart the memory sharing check, because its progress is not saved.
        self.check_shared();
        Ok(())
    }
}
