//! A VM's lock and its inbox, shared by the card's interrupt thread and the VM's own threads.
//!
//! The interrupt thread serves all VMs of a card and never waits for a VM. It adds its event to the inbox, and tries
//! to acquire the lock. If another thread holds the lock, that thread drains the inbox before it releases the lock. An
//! event may arrive after this last check and before the release, so the holder checks once more after the release.

use super::GuestEvent;
use super::inbox::Inbox;
use locks::{Guard, Locks, Mutex, Real, rank};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

/// An object that handles events.
pub trait Recipient {
    /// Reports an event to the guest. The caller holds the lock.
    fn take_up(&mut self, event: GuestEvent);

    /// Called before the lock is released.
    fn leave(&mut self) {}
}

/// A recipient, its lock, and its queued events.
#[derive(Debug)]
pub struct Mailbox<R, L: Locks = Real> {
    locked: Mutex<rank::Vm, R, L>,
    inbox: Mutex<rank::Inbox, Inbox, L>,
    /// Set if a panic may have left the recipient inconsistent.
    torn: AtomicBool,
}

/// Guard of the lock. It handles queued events before it releases the lock.
pub struct MailboxGuard<'a, R: Recipient, L: Locks = Real> {
    mailbox: &'a Mailbox<R, L>,
    /// Guard of the recipient, present until the end of [`Drop::drop`].
    guard: Option<Guard<'a, rank::Vm, R, L>>,
    /// Set if the thread was already panicking when it acquired the lock.
    unwinding: bool,
}

impl<R: Recipient, L: Locks> Mailbox<R, L> {
    /// Creates a mailbox with an empty inbox.
    pub fn new(recipient: R) -> Self {
        Self { locked: Mutex::new(recipient), inbox: Mutex::default(), torn: AtomicBool::new(false) }
    }

    /// Acquires the lock, and waits for it if necessary.
    ///
    /// # Panics
    /// Panics if the recipient is [torn](Self::is_torn). The panic ends the VM's own thread. Other threads check for
    /// this state first.
    #[track_caller]
    pub fn lock(&self) -> MailboxGuard<'_, R, L> {
        let held = self.lock_torn();
        // PANIC: inconsistent state must not be used. The VM's thread catches panics.
        assert!(!self.is_torn() || held.unwinding, "an earlier panic left the VM in an inconsistent state");
        held
    }

    /// Acquires the lock even if the recipient is torn, so that the VM can be removed.
    #[track_caller]
    pub fn lock_torn(&self) -> MailboxGuard<'_, R, L> {
        MailboxGuard::new(self, self.locked.lock())
    }

    /// Acquires the lock if it is free and the recipient is not torn.
    #[track_caller]
    pub fn try_lock(&self) -> Option<MailboxGuard<'_, R, L>> {
        self.locked.try_lock().map(|guard| MailboxGuard::new(self, guard)).filter(|_| !self.is_torn())
    }

    /// Returns true if a panic has released the lock, so the recipient may be inconsistent.
    pub fn is_torn(&self) -> bool {
        self.torn.load(Ordering::Acquire)
    }

    /// Queues an event, which this thread or the lock holder handles. Never waits for the lock.
    pub fn deliver(&self, event: GuestEvent) {
        self.inbox.lock().push(event);
        // If the lock is free, dropping this guard handles the event.
        drop(self.try_lock());
    }

    /// Returns the number of errors dropped since the VM was created, because the inbox was full.
    pub fn lost(&self) -> u64 {
        self.inbox.lock().lost()
    }

    /// Removes and returns the next event. This is a separate function so that the inbox is unlocked while the event is
    /// handled.
    fn next(&self) -> Option<GuestEvent> {
        self.inbox.lock().pop()
    }

    /// Returns true if no event is queued.
    pub fn is_empty(&self) -> bool {
        self.inbox.lock().is_empty()
    }
}

impl<'a, R: Recipient, L: Locks> MailboxGuard<'a, R, L> {
    fn new(mailbox: &'a Mailbox<R, L>, guard: Guard<'a, rank::Vm, R, L>) -> Self {
        Self { mailbox, guard: Some(guard), unwinding: std::thread::panicking() }
    }
}

impl<R: Recipient, L: Locks> Deref for MailboxGuard<'_, R, L> {
    type Target = R;

    fn deref(&self) -> &R {
        self.guard.as_deref().expect("held until dropped")
    }
}

impl<R: Recipient, L: Locks> DerefMut for MailboxGuard<'_, R, L> {
    fn deref_mut(&mut self) -> &mut R {
        self.guard.as_deref_mut().expect("held until dropped")
    }
}

impl<R: Recipient, L: Locks> Drop for MailboxGuard<'_, R, L> {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.unwinding {
            self.mailbox.torn.store(true, Ordering::Release);
        }
        if std::thread::panicking() || self.mailbox.is_torn() {
            // The recipient is no longer used.
            return;
        }
        while let Some(mut recipient) = self.guard.take() {
            let mut torn = Tearing { torn: &self.mailbox.torn, whole: false };
            while let Some(event) = self.mailbox.next() {
                recipient.take_up(event);
            }
            recipient.leave();
            torn.whole = true;
            drop(torn);
            drop(recipient);
            // An event may have arrived after the check and before the release. In this case, this thread must handle
            // it.
            if !self.mailbox.is_empty() {
                self.guard = self.mailbox.locked.try_lock();
            }
        }
    }
}

/// Marks a recipient as torn if a panic drops this value. It is declared after the lock's guard, and is therefore
/// dropped first.
struct Tearing<'a> {
    torn: &'a AtomicBool,
    whole: bool,
}

impl Drop for Tearing<'_> {
    fn drop(&mut self) {
        if !self.whole {
            self.torn.store(true, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// A recipient that counts handled events, and panics on interrupts of engine 9.
    #[derive(Default)]
    struct Counting {
        taken: u32,
        left: u32,
    }

    impl Recipient for Counting {
        fn take_up(&mut self, event: GuestEvent) {
            self.taken += 1;
            assert_ne!(event, GuestEvent::NonStall { engine: 9 });
        }

        fn leave(&mut self) {
            self.left += 1;
        }
    }

    fn panics(act: impl FnOnce()) -> bool {
        catch_unwind(AssertUnwindSafe(act)).is_err()
    }

    #[test]
    fn panic_with_the_lock_held_leaves_the_vm_out_of_service() {
        let mailbox = Mailbox::<_, Real>::new(Counting::default());
        assert!(panics(|| {
            let _held = mailbox.lock();
            panic!("injected");
        }));
        assert!(mailbox.is_torn() && mailbox.try_lock().is_none());
        assert!(panics(|| drop(mailbox.lock())));
        mailbox.deliver(GuestEvent::Memory);
        assert_eq!(mailbox.lock_torn().taken, 0, "a torn recipient must not handle events");
    }

    #[test]
    fn panic_while_event_is_handled_takes_vm_out_of_service() {
        let mailbox = Mailbox::<_, Real>::new(Counting::default());
        mailbox.deliver(GuestEvent::Memory);
        assert!(panics(|| mailbox.deliver(GuestEvent::NonStall { engine: 9 })));
        assert!(mailbox.is_torn());
        mailbox.deliver(GuestEvent::Memory);
        assert_eq!(mailbox.lock_torn().taken, 2);
    }

    #[test]
    fn recipient_is_notified_before_unlock() {
        let mailbox = Mailbox::<_, Real>::new(Counting::default());
        assert_eq!(mailbox.lock().left, 0);
        assert_eq!(mailbox.lock().left, 1);
    }
}
