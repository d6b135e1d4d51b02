//! Tests the mailbox under schedules that a checker selects: all schedules for a few threads, and thousands of
//! schedules for more threads.

use crate::GuestEvent;
use crate::tenants::mailbox::{Mailbox, Recipient};
use locks::checked::{Checked, try_all_schedules, try_schedules};
use nvspec::fifo::VirtualChannelId;
use shuttle::sync::Arc;
use shuttle::thread::{self, JoinHandle};

/// A guest that counts register accesses, and records each event as its delivering thread and its sequence number.
#[derive(Debug, Default)]
struct Guest {
    events: Vec<(u32, u32)>,
    accesses: u32,
}

impl Recipient for Guest {
    fn take_up(&mut self, event: GuestEvent) {
        let GuestEvent::Pbdma { unit, data, .. } = event else { panic!("{event:?} was never delivered") };
        self.events.push((unit, data));
        // Stand-in for a guest access that acquires the card's lock.
        thread::yield_now();
    }
}

type Shared = Arc<Mailbox<Guest, Checked>>;

fn mailbox() -> Shared {
    Arc::new(Mailbox::new(Guest::default()))
}

/// Starts a thread that delivers distinct events.
fn deliver(mailbox: &Shared, from: u32, count: u32) -> JoinHandle<()> {
    let mailbox = Arc::clone(mailbox);
    thread::spawn(move || {
        for data in 0..count {
            mailbox.deliver(GuestEvent::Pbdma { channel: VirtualChannelId(1), unit: from, intr: 1, method: 0, data });
        }
    })
}

/// Starts a thread that accesses registers, as a VM's own thread does.
fn access(mailbox: &Shared, count: u32) -> JoinHandle<()> {
    let mailbox = Arc::clone(mailbox);
    thread::spawn(move || {
        for _ in 0..count {
            mailbox.lock().accesses += 1;
        }
    })
}

/// Joins all threads, and checks that each event was handled exactly once, in the order in which its thread delivered
/// it.
fn ended(mailbox: &Shared, threads: Vec<JoinHandle<()>>, deliverers: u32, each: u32, accesses: u32) {
    threads.into_iter().for_each(|thread| thread.join().expect("the thread ends normally"));
    // Check before locking again, because locking would handle the remaining events.
    assert!(mailbox.is_empty(), "an event was not handled");
    let guest = mailbox.lock();
    for from in 0..deliverers {
        let of_this: Vec<_> = guest.events.iter().filter(|(unit, _)| *unit == from).map(|(_, data)| *data).collect();
        assert_eq!(of_this, (0..each).collect::<Vec<_>>());
    }
    assert_eq!((guest.events.len(), guest.accesses), ((deliverers * each) as usize, accesses));
}

#[test]
fn no_schedule_of_one_access_loses_an_event() {
    let count = try_all_schedules(1_000_000, || {
        let mailbox = mailbox();
        let threads = vec![deliver(&mailbox, 0, 1), access(&mailbox, 1)];
        ended(&mailbox, threads, 1, 1, 1);
    });
    eprintln!("{count} schedules");
    assert!(count > 100);
}

#[test]
fn events_from_many_threads_are_handled_once_and_in_order() {
    try_schedules(4000, || {
        let mailbox = mailbox();
        let mut threads: Vec<_> = (0..3).map(|from| deliver(&mailbox, from, 3)).collect();
        threads.extend((0..3).map(|_| access(&mailbox, 2)));
        ended(&mailbox, threads, 3, 3, 6);
    });
}

#[test]
fn delivery_waits_for_no_lock() {
    try_schedules(1000, || {
        let mailbox = mailbox();
        let held = mailbox.lock();
        let threads: Vec<_> = (0..2).map(|from| deliver(&mailbox, from, 2)).collect();
        // This join would deadlock if a delivering thread waited for the lock.
        threads.into_iter().for_each(|thread| thread.join().expect("the thread ends normally"));
        assert!(held.events.is_empty());
        drop(held);
        ended(&mailbox, Vec::new(), 2, 2, 0);
    });
}
