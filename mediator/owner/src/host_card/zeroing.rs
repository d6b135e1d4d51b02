//! Memory that nobody has is zeroed: by the copy engines where they are to do it and do, by the CPU otherwise.

use super::HostCard;
use crate::HostError;
use card_memory::{Job, Source};
use vram::Place;

impl HostCard {
    /// Scrubs what nobody has, as the thread that moves memory does after each relocation.
    pub fn scrub(&self) {
        while self.zero_by_engines(true) {}
        while self.lock().vram_mut().scrub_piece().unwrap_or(false) {}
    }

    /// Scrubs what a VM has left. Where the engines do that the mover has them do it when it is woken: here a VM's lock may be held.
    ///
    /// # Errors
    /// When the card does not answer.
    pub(super) fn scrub_left(&self) -> Result<(), HostError> {
        // The card's lock is held for a piece only.
        while !self.engines_zero && self.lock().vram_mut().scrub_piece()? {}
        Ok(())
    }

    /// Has the engines zero chunks of the card that nobody has: all, or those that are kept zeroed ahead. False when there are none,
    /// or the CPU is to do it.
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
        tracing::warn!(%error, "memory is zeroed by the CPU");
        // An engine that is at work still would write to what is a guest's by then.
        match self.stop_copier(&places) {
            Ok(()) => self.lock().vram_mut().engines_have_failed(),
            Err(_) => self.lock().vram_mut().engines_keep(),
        }
        false
    }
}
