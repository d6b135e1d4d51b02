//! Sleeping and waking on both sides, without lost wake-ups.
//!
//! Before it sleeps, a side announces this, executes a fence, and checks the words for which it waits once more; it
//! sleeps only if they have not changed. The other side changes the words, executes a fence, and wakes the sleeper if
//! it sees the announcement. So at least one side sees the other's store.

use crate::layout::control;
use crate::words::Words;

/// Announces that the worker is about to sleep. Before it sleeps, the worker must check its rings once more.
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
    // A full fence: the word is read after the announcement.
    control.add(control::WAITING, 1);
    while control.load(offset) < value && sleep() {}
    control.add(control::WAITING, u64::MAX);
}
