//! Handling of a failed card. A card fails if a thread panics while it changes the card's state, or if one of the
//! card's own threads exits.
//!
//! The tenants' shared state may then be inconsistent, so it is no longer used. The card is reset, which stops all work
//! and all of the card's accesses to host memory. The clients of the card's VMs are disconnected. From then on, any
//! thread that acquires the card's lock panics. The panic ends a VM's thread, and the VM is reported as failed. Other
//! cards continue ([decision 115](../../../docs/decisions/115-panics.md)).

use super::{CardState, ManagedCard};
use card::InterruptMode;
use locks::{Condvar, Guard, rank};
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Weak;
use std::time::Duration;

/// Guard of the card's state. The card fails if a panic drops this value.
pub struct StateGuard<'a> {
    host: &'a ManagedCard,
    state: Guard<'a, rank::Card, CardState>,
    /// Set if the thread was already panicking when it acquired the lock. In this case, dropping the guard does not
    /// make the card fail.
    unwinding: bool,
}

impl<'a> StateGuard<'a> {
    /// # Panics
    /// Panics if the card has failed, unless the thread is already panicking: a second panic would abort the daemon.
    pub(crate) fn new(host: &'a ManagedCard, state: Guard<'a, rank::Card, CardState>) -> Self {
        let unwinding = std::thread::panicking();
        if let Some(why) = host.failure().filter(|_| !unwinding) {
            drop(state);
            if host.is_given_away() {
                // Handing over the card is not a bug, so the thread exits without a message.
                std::panic::resume_unwind(Box::new("the card was given away"));
            }
            // PANIC: the state under the lock is inconsistent. Every thread that reaches this code catches panics.
            panic!("the card has failed: {why}");
        }
        Self { host, state, unwinding }
    }

    /// Releases the lock to a waiting thread, and then reacquires it. Use this for work with many short critical
    /// sections. Without this call, the sections would act as one long section, because a running thread reacquires the
    /// lock before a sleeping thread wakes.
    ///
    /// # Panics
    /// Panics if the card has failed in the meantime.
    pub fn give_way(&mut self) {
        self.state.give_way();
        // PANIC: the state under the lock is inconsistent, as in `new`.
        assert!(self.unwinding || self.host.failure().is_none(), "the card has failed");
    }

    /// Releases the lock until `condition` is notified or `limit` has passed, and then reacquires it.
    ///
    /// # Panics
    /// Panics if the card has failed in the meantime.
    pub(crate) fn wait_for(&mut self, condition: &Condvar, limit: Duration) {
        condition.wait_for(&mut self.state, limit);
        // PANIC: the state under the lock is inconsistent, as in `new`.
        assert!(self.host.failure().is_none(), "the card has failed");
    }
}

impl Deref for StateGuard<'_> {
    type Target = CardState;

    fn deref(&self) -> &CardState {
        &self.state
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut CardState {
        &mut self.state
    }
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        if !self.unwinding && std::thread::panicking() {
            // Mark the card as failed before the lock is released, so that waiting threads notice the failure.
            self.host.fail("a thread panicked while it changed the card's state");
        }
    }
}

impl ManagedCard {
    /// Returns the reason for the card's failure, if it has failed.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Marks the card as failed unless it already is. The card's threads then take it out of service.
    pub(crate) fn fail(&self, why: &str) {
        if self.failure.set(why.to_owned()).is_ok() {
            self.wake_threads();
        }
    }

    /// Removes all work from a failed card, and notifies its VMs.
    fn shut_out(&self) {
        let why = self.failure().unwrap_or_default();
        tracing::error!(why, "a card has failed; the card and its VMs are out of service; restart the daemon");
        self.card().set_interrupt(InterruptMode::Msi, None);
        self.card().reset();
        for vm in self.tenants() {
            vm.card_failed();
        }
    }
}

/// Runs the body of one of the card's threads. When the body returns or panics, the card fails, unless the card is
/// being closed. The first thread to exit takes the card out of service.
pub(crate) fn watched(host: &Weak<ManagedCard>, name: &str, body: impl FnOnce()) {
    let ended = catch_unwind(AssertUnwindSafe(body));
    let Some(host) = host.upgrade().filter(|host| !host.stopping()) else { return };
    let how = if ended.is_ok() { "has exited" } else { "has panicked" };
    host.fail(&format!("its thread `{name}` {how}"));
    if host.begin_shutting_out() {
        host.shut_out();
    }
}
