//! Sleeping and waking on both sides, without lost wake-ups.
//!
//! Before a side sleeps, it announces this, executes a fence, and checks the words that it waits for once more. The
//! side sleeps only if these words have not changed. The other side changes the words, executes a fence, and wakes the
//! sleeper if it sees the announcement. Therefore, at least one side sees the other side's store.

use crate::layout::control;
use crate::words::Words;

/// Announces that the worker is about to sleep. The worker must then check its rings once more before it sleeps.
/// Afterwards, it must end the announcement with [`awake`].
pub fn announce_sleep(control: &impl Words) {
    control.store(control::ASLEEP, 1);
    // The next load from the rings must not happen before this store.
    control.fence();
}

/// Ends the announcement of [`announce_sleep`].
pub fn awake(control: &impl Words) {
    control.store(control::ASLEEP, 0);
}

/// Returns true if a guest thread sleeps. Call this after a change of words for which a thread may wait.
pub fn must_notify(control: &impl Words) -> bool {
    // The load of the number of sleepers must not happen before the change.
    control.fence();
    control.load(control::WAITING) != 0
}

/// Calls `sleep` until the word at `offset` is at least `value`, or `sleep` returns false. Announces the wait.
pub fn wait(control: &impl Words, offset: u64, value: u64, mut sleep: impl FnMut() -> bool) {
    // This is a full fence, because the word must be read after the announcement.
    control.add(control::WAITING, 1);
    while control.load(offset) < value && sleep() {}
    control.add(control::WAITING, u64::MAX);
}
