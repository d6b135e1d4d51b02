//! Sleeping and waking on both sides, without a lost wake-up.
//!
//! Each side announces that it sleeps, orders the announcement before another look at the words that it waits for, and
//! sleeps only if they have not changed. The other side changes the words, orders the change before a look at the
//! announcement, and wakes the sleeper. Of two such sides at least one sees the other's store.

use crate::layout::control;
use crate::words::Words;

/// Announces that the worker sleeps. It must look at its rings once more before it does, and end the announcement with
/// [`awake`].
pub fn announce_sleep(control: &impl Words) {
    control.store(control::ASLEEP, 1);
    // The next look at the rings must not happen before the store.
    control.fence();
}

/// Ends the announcement of [`announce_sleep`].
pub fn awake(control: &impl Words) {
    control.store(control::ASLEEP, 0);
}

/// Returns true if a guest thread sleeps, after words have changed that it may wait for.
pub fn must_notify(control: &impl Words) -> bool {
    // The look at the sleepers must not happen before the change.
    control.fence();
    control.load(control::WAITING) != 0
}

/// Calls `sleep` until the word at `offset` is at least `value`, or `sleep` returns false. Announces the wait.
pub fn wait(control: &impl Words, offset: u64, value: u64, mut sleep: impl FnMut() -> bool) {
    // A full fence: the word is read after the announcement.
    control.add(control::WAITING, 1);
    while control.load(offset) < value && sleep() {}
    control.add(control::WAITING, u64::MAX);
}
