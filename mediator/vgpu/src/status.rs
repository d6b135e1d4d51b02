//! A VM's status for operators. Reading it never waits for the VM's lock.

use super::device::MediatedVm;
use card_manager::Words;
use std::sync::atomic::Ordering;
use std::time::Duration;
use vm_device::DeviceStatus;

/// Maximum number of polls for a new status while the VM is locked.
// TIMEOUT: an access by a guest takes far less time, and an operator does not notice the delay.
const MAX_POLLS: u32 = 10;
const POLL_INTERVAL: Duration = Duration::from_millis(1);

impl MediatedVm {
    /// Returns the VM's status. Waits a few milliseconds for a busy VM, but never for its lock. If the VM is busy for
    /// longer, returns the last published status, and a later call returns a newer one.
    #[must_use]
    pub fn status(&self) -> DeviceStatus {
        self.board.wanted.store(true, Ordering::Relaxed);
        for _ in 0..MAX_POLLS {
            if let Some(core) = self.core.try_lock() {
                self.board.publish(core.status());
            }
            if !self.board.wanted.load(Ordering::Relaxed) {
                break;
            }
            locks::sleep(POLL_INTERVAL);
        }
        let mut status = self.board.latest.lock().clone();
        let (moved, noise, words) = match self.host.failure() {
            Some(_) => (None, None, Words::default()),
            None => {
                let host = self.host.lock();
                let moved = host.memory().moved(self.vm).map(|moved| (moved.suspensions.count(), moved.sum.moved));
                (moved, Some(host.noise_of(self.vm)), host.vram().words_of(self.vm))
            }
        };
        let (caused, pauses) = noise.unwrap_or_default();
        let (relocations, chunks_moved) = moved.unwrap_or_default();
        let counts = [
            ("memory_relocations", relocations),
            ("memory_chunks_moved", u64::from(chunks_moved)),
            ("events_lost", self.core.lost()),
            ("interrupts_caused", caused),
            ("interrupt_pauses", pauses),
            ("vram_words_read", words.read),
            ("vram_words_written", words.written),
        ];
        status.counters.extend(counts.map(|(name, count)| (name.to_owned(), count)));
        status
    }

    /// Returns the last published status.
    #[cfg(feature = "test-rig")]
    #[must_use]
    pub fn published(&self) -> DeviceStatus {
        self.board.latest.lock().clone()
    }
}
