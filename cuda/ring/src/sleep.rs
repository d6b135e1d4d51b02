//! Sleeping and waking on both sides without lost wake-ups.
//!
//! Before it sleeps, a side announces the sleep, executes a fence, and rechecks the words that it waits for. It sleeps
//! only if these words have not changed. The other side changes the words, executes a fence, and wakes the sleeper if
//! it sees the announcement. Therefore, at least one side sees the other side's store.

use crate::layout::control;
use crate::words::Words;

/// Announces that the worker is about to sleep. The worker must then recheck its rings before it sleeps. Afterwards, it
/// must withdraw the announcement with [`awake`].
pub fn announce_sleep(control: &impl Words) {
    control.store(control::ASLEEP, 1);
    // The next load from the rings must not be reordered before this store.
    control.fence();
}

/// Withdraws the announcement made by [`announce_sleep`].
pub fn awake(control: &impl Words) {
    control.store(control::ASLEEP, 0);
}

/// Returns true if a guest thread has announced a wait. Must be called after a change of words that a thread may wait
/// for.
pub fn must_notify(control: &impl Words) -> bool {
    // The load of the number of waiting threads must not be reordered before the change.
    control.fence();
    control.load(control::WAITING) != 0
}

/// Announces a wait and calls `sleep` until the word at `offset` is at least `value` or `sleep` returns false.
pub fn wait(control: &impl Words, offset: u64, value: u64, mut sleep: impl FnMut() -> bool) {
    // The addition is a full fence, because the word must be read after the announcement.
    control.add(control::WAITING, 1);
    while control.load(offset) < value && sleep() {}
    control.add(control::WAITING, u64::MAX);
}
