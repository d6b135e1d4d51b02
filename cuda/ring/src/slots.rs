//! Slots for answers. Each guest thread has a slot.

use crate::layout::control;
use crate::words::Words;

/// Maximum number of words of an answer in a slot. A longer answer is stored in an area.
pub const INLINE_WORDS: usize = 5;

/// Returns the offset of a slot's sequence, which counts its answers.
pub const fn sequence(slot: u16) -> u64 {
    control::SLOTS + slot as u64 * control::SLOT_BYTES
}

/// Returns the offset of the word for the result of an answer; its upper half counts the words of data.
pub const fn result(slot: u16) -> u64 {
    sequence(slot) + 8
}

/// Returns the offset of the first word of an answer's data.
pub const fn data(slot: u16) -> u64 {
    sequence(slot) + 16
}

/// Returns the offset of the word for the error of a call that has no answer. The guest clears it.
pub const fn deferred(slot: u16) -> u64 {
    sequence(slot) + 56
}

/// Returns the offset of an area.
pub const fn area(number: u16) -> u64 {
    control::AREAS + number as u64 * control::AREA_BYTES
}

/// Completes an answer and makes it visible. Its data, which has `count` words, is already in the slot or in an area.
pub fn answer(control: &impl Words, slot: u16, count: u64, code: i32, words: usize) {
    control.store(result(slot), u64::from(code.cast_unsigned()) | (words as u64) << 32);
    control.store(sequence(slot), count);
}
