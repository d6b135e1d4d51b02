//! Access between a program's cards.
//!
//! Work on one card may use another card's chunks: kernels if peer access is enabled, and copies at any time. Such work
//! must not be in flight while these chunks move. A program that has never used another card's memory is quiesced only
//! on the card whose chunks move; any other program is quiesced on all its cards.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Replacements of memory in progress.
#[derive(Debug, Default)]
struct Replacements {
    /// Set once work on a card may use another card's memory.
    possible: bool,
    /// For each card, number of replacements in progress that quiesce only that card.
    alone: [u32; cuda_pacing::gate::MAX_CARDS],
}

/// Determines on which of its cards a program must be quiesced while memory is replaced.
#[derive(Debug, Default)]
pub struct CrossAccess {
    /// Set once work on a card may use another card's memory, and all memory is mapped.
    ready: AtomicBool,
    replacements: Mutex<Replacements>,
    ended: Condvar,
    /// Held by the thread that prepares the cross-card access.
    preparing: Mutex<()>,
}

impl CrossAccess {
    fn lock(&self) -> MutexGuard<'_, Replacements> {
        self.replacements.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if a card's work may use another card's memory.
    #[inline]
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst)
    }

    /// Permits each card's work to use the other cards' memory. First waits for all replacements that quiesce only one
    /// card, and then calls `map` to map all memory.
    pub fn allow(&self, map: impl FnOnce()) {
        let _one = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_ready() {
            return;
        }
        let mut state = self.lock();
        while state.alone.iter().any(|count| *count > 0) {
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.possible = true;
        drop(state);
        map();
        self.ready.store(true, Ordering::SeqCst);
    }

    /// Records that memory of a card is about to be replaced. Returns true if the program must be quiesced on all its
    /// cards. The caller must call [`Self::end`] after the replacement.
    pub fn begin(&self, card: usize) -> bool {
        let mut state = self.lock();
        if !state.possible
            && let Some(count) = state.alone.get_mut(card)
        {
            *count += 1;
        }
        state.possible
    }

    /// Records the end of a replacement.
    pub fn end(&self, card: usize) {
        let mut state = self.lock();
        if let Some(count) = state.alone.get_mut(card) {
            *count = count.saturating_sub(1);
        }
        self.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cross_access_waits_for_moves_on_one_card() {
        let cross = CrossAccess::default();
        assert!(!cross.begin(1), "no other card uses the memory");
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| cross.allow(|| assert!(cross.lock().possible, "moves now need all cards")));
            // The other thread is waiting, or is about to wait.
            for _ in 0..1000 {
                std::thread::yield_now();
                assert!(!cross.is_ready() && !cross.lock().possible);
            }
            cross.end(1);
            thread.join().expect("continues after the move");
        });
        assert!(cross.is_ready());
        assert!(cross.begin(0), "from now on, all cards must be quiesced");
        cross.end(0);
    }
}
