//! The VM's lock and the inbox beside it, which the card's interrupt thread and the VM's own threads share.
//!
//! The interrupt thread serves all VMs of a card and waits for none. It leaves its event in the inbox and tries the lock;
//! if that is taken, whoever holds it empties the inbox when it lets go. What came between its last look and the release
//! found the lock taken still, so it looks once more behind that.

use super::GuestEvent;
use super::inbox::Inbox;
use locks::{Guard, Locks, Mutex, Real, rank};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

/// Takes events up.
pub trait Recipient {
    /// Shows an event to the guest. Called with the lock held.
    fn take_up(&mut self, event: GuestEvent);

    /// The lock is about to be released.
    fn leave(&mut self) {}
}

/// A recipient, its lock, and what waits for it.
#[derive(Debug)]
pub struct Mailbox<R, L: Locks = Real> {
    locked: Mutex<rank::Vm, R, L>,
    inbox: Mutex<rank::Inbox, Inbox, L>,
    /// A panic has left the recipient half changed.
    torn: AtomicBool,
}

/// The lock, held. What was left in the inbox meanwhile is taken up before it is released.
pub struct Held<'a, R: Recipient, L: Locks = Real> {
    mailbox: &'a Mailbox<R, L>,
    /// Always there, but for the end of [`Drop::drop`].
    guard: Option<Guard<'a, rank::Vm, R, L>>,
    /// The thread was panicking when it took the lock.
    unwinding: bool,
}

impl<R: Recipient, L: Locks> Mailbox<R, L> {
    /// With an empty inbox.
    pub fn new(recipient: R) -> Self {
        Self { locked: Mutex::new(recipient), inbox: Mutex::default(), torn: AtomicBool::new(false) }
    }

    /// Waits for the lock.
    ///
    /// # Panics
    /// When the recipient is [torn](Self::is_torn): its thread ends by that, and others ask before.
    #[track_caller]
    pub fn lock(&self) -> Held<'_, R, L> {
        let held = self.lock_torn();
        // PANIC: nothing may be served on what is half changed. The VM's thread has a catch around it.
        assert!(!self.is_torn() || held.unwinding, "an earlier panic has left the VM half changed");
        held
    }

    /// Waits for the lock, whatever it guards, to take the rest down.
    #[track_caller]
    pub fn lock_torn(&self) -> Held<'_, R, L> {
        Held::new(self, self.locked.lock())
    }

    /// Takes the lock if nobody holds it and what it guards is whole.
    #[track_caller]
    pub fn try_lock(&self) -> Option<Held<'_, R, L>> {
        self.locked.try_lock().map(|guard| Held::new(self, guard)).filter(|_| !self.is_torn())
    }

    /// Returns whether a panic has dropped the lock: what it guards may be half changed.
    pub fn is_torn(&self) -> bool {
        self.torn.load(Ordering::Acquire)
    }

    /// Has an event taken up, now or by whoever holds the lock. Never waits for that.
    pub fn deliver(&self, event: GuestEvent) {
        self.inbox.lock().push(event);
        // If nobody holds the lock, it is the end of this guard that takes it up.
        drop(self.try_lock());
    }

    /// Events that found no room since the VM was made.
    pub fn lost(&self) -> u64 {
        self.inbox.lock().lost()
    }

    /// A statement of its own, so that the inbox is not held while an event is taken up.
    fn next(&self) -> Option<GuestEvent> {
        self.inbox.lock().pop()
    }

    /// Returns whether no event waits.
    pub fn is_empty(&self) -> bool {
        self.inbox.lock().is_empty()
    }
}

impl<'a, R: Recipient, L: Locks> Held<'a, R, L> {
    fn new(mailbox: &'a Mailbox<R, L>, guard: Guard<'a, rank::Vm, R, L>) -> Self {
        Self { mailbox, guard: Some(guard), unwinding: std::thread::panicking() }
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
        if std::thread::panicking() && !self.unwinding {
            self.mailbox.torn.store(true, Ordering::Release);
        }
        if std::thread::panicking() || self.mailbox.is_torn() {
            // Nothing more is done with it.
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
            // What came between the look and the release found the lock taken, and is left to this thread.
            if !self.mailbox.is_empty() {
                self.guard = self.mailbox.locked.try_lock();
            }
        }
    }
}

/// Marks a recipient as torn unless it is whole when this goes; declared after the lock's guard, it goes before it.
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

    /// Counts what it takes up, and panics at interrupts of engine 9.
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
        assert_eq!(mailbox.lock_torn().taken, 0, "nothing is done with what is half changed");
    }

    #[test]
    fn panic_while_an_event_is_taken_up_leaves_the_vm_out_of_service() {
        let mailbox = Mailbox::<_, Real>::new(Counting::default());
        mailbox.deliver(GuestEvent::Memory);
        assert!(panics(|| mailbox.deliver(GuestEvent::NonStall { engine: 9 })));
        assert!(mailbox.is_torn());
        mailbox.deliver(GuestEvent::Memory);
        assert_eq!(mailbox.lock_torn().taken, 2);
    }

    #[test]
    fn recipient_is_told_before_the_lock_is_released() {
        let mailbox = Mailbox::<_, Real>::new(Counting::default());
        assert_eq!(mailbox.lock().left, 0);
        assert_eq!(mailbox.lock().left, 1);
    }
}
