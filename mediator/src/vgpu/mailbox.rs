//! What the card's interrupt thread and a VM's own threads share: the VM's lock, and the inbox beside it.
//!
//! The interrupt thread serves all VMs of a card and waits for none. It leaves its event in the inbox and tries the lock;
//! if that is taken, whoever holds it empties the inbox when it lets go. What came between its last look and the release
//! found the lock taken still, so it looks once more behind that.

use super::inbox::Inbox;
use crate::host::GuestEvent;
use crate::locks::{Locks, Real};
use std::ops::{Deref, DerefMut};

/// Who takes events up.
pub(crate) trait Recipient {
    /// Shows an event to the guest. Called with the lock held.
    fn take_up(&mut self, event: GuestEvent);
}

/// A recipient, its lock, and what waits for it.
#[derive(Debug)]
pub(crate) struct Mailbox<R, L: Locks = Real> {
    locked: L::Mutex<R>,
    /// A leaf: no other lock is taken while it is held.
    inbox: L::Mutex<Inbox>,
}

/// The lock, held. What was left in the inbox meanwhile is taken up before it is released.
pub(crate) struct Held<'a, R: Recipient, L: Locks = Real> {
    mailbox: &'a Mailbox<R, L>,
    /// Always there, but for the end of [`Drop::drop`].
    guard: Option<L::Guard<'a, R>>,
}

impl<R: Recipient, L: Locks> Mailbox<R, L> {
    /// With an empty inbox.
    pub(crate) fn new(recipient: R) -> Self {
        Self { locked: L::mutex(recipient), inbox: L::mutex(Inbox::default()) }
    }

    /// Waits for the lock.
    pub(crate) fn lock(&self) -> Held<'_, R, L> {
        Held { mailbox: self, guard: Some(L::lock(&self.locked)) }
    }

    /// Has an event taken up, now or by whoever holds the lock. Never waits for that.
    pub(crate) fn deliver(&self, event: GuestEvent) {
        L::lock(&self.inbox).push(event);
        // If nobody holds the lock, it is the end of this guard that takes it up.
        drop(L::try_lock(&self.locked).map(|guard| Held { mailbox: self, guard: Some(guard) }));
    }

    /// Events that found no room since the VM was made.
    pub(crate) fn lost(&self) -> u64 {
        L::lock(&self.inbox).lost()
    }

    /// A statement of its own, so that the inbox is not held while an event is taken up.
    fn next(&self) -> Option<GuestEvent> {
        L::lock(&self.inbox).pop()
    }

    /// Whether no event waits.
    pub(super) fn is_empty(&self) -> bool {
        L::lock(&self.inbox).is_empty()
    }
}

impl<R: Recipient, L: Locks> Deref for Held<'_, R, L> {
    type Target = R;

    fn deref(&self) -> &R {
        self.guard.as_deref().expect("held until dropped")
    }
}

impl<R: Recipient, L: Locks> DerefMut for Held<'_, R, L> {
    fn deref_mut(&mut self) -> &mut R {
        self.guard.as_deref_mut().expect("held until dropped")
    }
}

impl<R: Recipient, L: Locks> Drop for Held<'_, R, L> {
    fn drop(&mut self) {
        while let Some(mut recipient) = self.guard.take() {
            while let Some(event) = self.mailbox.next() {
                recipient.take_up(event);
            }
            drop(recipient);
            // What came between the look and the release found the lock taken, and is left to this thread.
            if !self.mailbox.is_empty() {
                self.guard = L::try_lock(&self.mailbox.locked);
            }
        }
    }
}
