//! Zeroes free memory with the copy engines if configured and functional, and otherwise with the CPU.

use super::ManagedCard;
use crate::ManagerError;
use card_memory::{Job, Source};
use vram::Place;

impl ManagedCard {
    /// Scrubs free memory. The mover does this after each relocation.
    pub fn scrub(&self) {
        while self.zero_by_engines(true) {}
        while self.lock().vram_mut().scrub_piece().unwrap_or(false) {}
    }

    /// Scrubs memory that a VM has freed. If the engines zero memory, leaves it to the mover, because the caller may
    /// hold a VM's lock.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    pub(super) fn scrub_left(&self) -> Result<(), ManagerError> {
        // Hold the card's lock for only one part at a time.
        while !self.engines_zero && self.lock().vram_mut().scrub_piece()? {}
        Ok(())
    }

    /// Zeroes free card chunks with the engines: all of them, or only enough for the reserve of zeroed chunks. Returns
    /// false if no chunk needs zeroing or the CPU must zero the chunks.
    pub(super) fn zero_by_engines(&self, all: bool) -> bool {
        if !self.engines_zero {
            return false;
        }
        let _one_at_a_time = self.moving.lock();
        if self.over() {
            return false;
        }
        let mut places: Vec<Place> = Vec::new();
        let done = self.have_done(|state| {
            let work = state.vram_mut().take_for_engines(all);
            places = work.iter().map(|work| work.place).collect();
            work.iter().map(|work| Job { from: Source::Zeros, to: work.place, bytes: work.bytes }).collect()
        });
        let Err(error) = done else {
            self.lock().vram_mut().engines_have_zeroed();
            return !places.is_empty();
        };
        tracing::warn!(%error, "the copy engines failed; the CPU zeroes memory instead");
        // An engine that is still running could write to the memory after it has been assigned to a guest.
        match self.stop_copier(&places) {
            Ok(()) => self.lock().vram_mut().engines_have_failed(),
            Err(_) => self.lock().vram_mut().engines_keep(),
        }
        false
    }
}
