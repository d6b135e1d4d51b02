//! The card's clock.

use card::Card;
use nvspec::regs::ptimer;
use sched::Nanos;
use std::time::Instant;

/// Reads the card's own clock, which also timestamps semaphores, in ns.
#[must_use]
pub fn now_ns(card: &dyn Card) -> u64 {
    let high = card.read32(ptimer::TIME_1::OFFSET);
    let low = card.read32(ptimer::TIME_0::OFFSET);
    let again = card.read32(ptimer::TIME_1::OFFSET);
    // The two reads of the high half match unless the low half has wrapped in between, which it does every four
    // seconds.
    let low = if again == high { low } else { card.read32(ptimer::TIME_0::OFFSET) };
    u64::from(again) << 32 | u64::from(low)
}

/// Sets the card's clock to the host's clock, so that time does not go backwards for a VM from another card of the
/// host.
pub(crate) fn set(card: &dyn Card) {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let ns = now.tv_sec.unsigned_abs().saturating_mul(1_000_000_000).saturating_add(now.tv_nsec.unsigned_abs());
    let [low, high] = [ns, ns >> 32].map(|half| (half & u64::from(u32::MAX)) as u32);
    card.write32(ptimer::TIME_1::OFFSET, high);
    card.write32(ptimer::TIME_0::OFFSET, low);
}

/// The card's clock, relative to the host's.
#[derive(Debug)]
pub(crate) struct Clock {
    /// Host time at which this clock read `before_ns`.
    began: Instant,
    /// Time from the first takeover of the card until this clock was created, in ns.
    before_ns: u64,
    /// Offset of the card's clock from the host's clock, in ns.
    ahead_ns: i64,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self::since(0)
    }

    /// Creates a clock that currently reads `before_ns`.
    pub(crate) fn since(before_ns: u64) -> Self {
        Self { began: Instant::now(), before_ns, ahead_ns: 0 }
    }

    /// Returns the time since the card was taken over, on the host's clock, in ns.
    pub(crate) fn host_ns(&self) -> u64 {
        self.before_ns.saturating_add(u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Returns the card time: the host's clock plus the offset measured by the last call of [`Self::set`].
    pub(crate) fn card_time(&self) -> Nanos {
        Nanos(self.host_ns().saturating_add_signed(self.ahead_ns))
    }

    /// Measures the offset of the card's clock from the host's clock. Must be called often, because the clocks drift:
    /// one part in ten thousand is 10 us per 100 ms.
    pub(crate) fn set(&mut self, card: &dyn Card) {
        self.ahead_ns = i64::try_from(i128::from(now_ns(card)) - i128::from(self.host_ns())).unwrap_or(0);
    }
}
