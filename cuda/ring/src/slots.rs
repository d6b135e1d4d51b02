//! Slots for replies. Each guest thread has a slot.

use crate::layout::control;
use crate::words::Words;

/// Maximum number of data words of a reply in a slot. Longer replies are stored in areas.
pub const INLINE_WORDS: usize = 5;

/// Returns the offset of a slot's sequence number, which counts its replies.
pub const fn sequence(slot: u16) -> u64 {
    control::SLOTS + slot as u64 * control::SLOT_BYTES
}

/// Returns the offset of the word for a reply's result. The upper half of the word is the number of data words.
pub const fn result(slot: u16) -> u64 {
    sequence(slot) + 8
}

/// Returns the offset of a reply's first data word.
pub const fn data(slot: u16) -> u64 {
    sequence(slot) + 16
}

/// Returns the offset of the word for errors of calls without a reply. The guest clears it.
pub const fn deferred(slot: u16) -> u64 {
    sequence(slot) + 56
}

/// Returns the offset of an area.
pub const fn area(number: u16) -> u64 {
    control::AREAS + number as u64 * control::AREA_BYTES
}

/// Completes a reply and makes it visible. Its `words` data words must already be in the slot or in an area.
pub fn answer(control: &impl Words, slot: u16, count: u64, code: i32, words: usize) {
    control.store(result(slot), u64::from(code.cast_unsigned()) | (words as u64) << 32);
    control.store(sequence(slot), count);
}
