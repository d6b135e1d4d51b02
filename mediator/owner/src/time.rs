//! The card's clock.

use card::Card;
use nvspec::regs::ptimer;

/// Nanoseconds of the card's own clock, which its semaphores are stamped with.
#[must_use]
pub fn now_ns(card: &dyn Card) -> u64 {
    let high = card.read32(ptimer::TIME_1::OFFSET);
    let low = card.read32(ptimer::TIME_0::OFFSET);
    let again = card.read32(ptimer::TIME_1::OFFSET);
    // The halves belong together unless the low one has wrapped between, once in four seconds, and begun anew.
    let low = if again == high { low } else { card.read32(ptimer::TIME_0::OFFSET) };
    u64::from(again) << 32 | u64::from(low)
}
