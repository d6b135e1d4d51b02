//! Rate limit for page moves in a VM's mapped apertures.
//!
//! A single register write or flush by a guest can move all pages of an aperture. Moving a page occupies the card's
//! lock and the bus, which other VMs need. Therefore, each VM has a page budget, which suffices for the start of a
//! driver. Once the budget is exhausted, the next move waits in the VM's own thread, without holding a lock.

/// Number of pages that a VM can move in a burst: all of its apertures, plus about 60 moves of the window. This
/// suffices for several driver starts.
const BURST_PAGES: u64 = 1 << 16;
/// Growth of the budget in pages per second. Permits 64 window moves per second, each with 256 pages out and 256 pages
/// in.
const PAGES_PER_SECOND: u64 = 1 << 15;
/// Maximum wait time of one move in ns. Moving all apertures takes less time.
// TIMEOUT: QEMU times out a request after 5 s, and a daemon upgrade waits for 4 s.
const MAX_WAIT_NS: u64 = 2_000_000_000;
const SECOND_NS: u64 = 1_000_000_000;

/// A VM's page budget, which a single move can overdraw.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    /// Time in ns at which the budget will be full if no more pages are moved.
    full_at: u64,
}

impl Pace {
    /// Returns the earliest start time of the next move in ns, or `None` if it may start immediately.
    #[must_use]
    pub fn wait_until(&self, now: u64) -> Option<u64> {
        let ready_at = self.full_at.saturating_sub(cost_ns(BURST_PAGES));
        (ready_at > now).then(|| ready_at.min(now.saturating_add(MAX_WAIT_NS)))
    }

    /// Charges moved pages to the budget.
    pub fn charge(&mut self, now: u64, pages: u64) {
        let most = now.saturating_add(cost_ns(BURST_PAGES)).saturating_add(MAX_WAIT_NS);
        self.full_at = self.full_at.max(now).saturating_add(cost_ns(pages)).min(most);
    }
}

/// Returns the time in ns in which the budget grows by `pages`.
fn cost_ns(pages: u64) -> u64 {
    pages.saturating_mul(SECOND_NS / PAGES_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_are_free_up_to_the_burst_and_then_as_fast_as_the_rate() {
        let mut pace = Pace::default();
        let mut moved = 0;
        while pace.wait_until(0).is_none() {
            pace.charge(0, 512);
            moved += 512;
        }
        assert!((BURST_PAGES..=BURST_PAGES + 512).contains(&moved), "{moved}");
        // The guest moves its window as often as the budget permits, for ten seconds.
        let (mut now, mut moves) = (0, 0);
        while now < 10 * SECOND_NS {
            now = pace.wait_until(now).unwrap_or(now);
            pace.charge(now, 512);
            moves += 1;
        }
        assert!((638..=642).contains(&moves), "{moves}");
        assert_eq!(pace.wait_until(now + 60 * SECOND_NS), None, "the budget of an idle guest is full");
    }

    #[test]
    fn no_move_waits_for_longer_than_a_vmm_does() {
        let mut pace = Pace::default();
        pace.charge(0, u64::MAX);
        assert_eq!(pace.wait_until(0), Some(MAX_WAIT_NS));
        assert_eq!(pace.wait_until(MAX_WAIT_NS), None);
    }
}
