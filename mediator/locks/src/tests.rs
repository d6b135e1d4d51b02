//! Tests the lock order and the measurements, with the daemon's and the checker's locks.

use super::*;
use crate::checked::{Checked, try_schedules};
use crate::rank::{Card, Moving, ORDER, Vm, Wakeup};
use std::panic::{AssertUnwindSafe, catch_unwind};

fn message(act: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(act)).expect_err("the call did not panic");
    panic.downcast_ref::<String>().cloned().unwrap_or_default()
}

#[test]
fn a_lock_out_of_order_panics_before_it_is_waited_for() {
    let (vm, card) = (Mutex::<Vm, _>::new(1), Mutex::<Card, _>::new(2));
    let held = card.lock();
    assert_eq!(
        message(|| drop(vm.lock())),
        "lock order: Vm is taken while Card is held; see the order in `locks::rank`"
    );
    // Acquiring two different locks of the same rank also violates the order.
    let other = Mutex::<Card, _>::new(3);
    assert!(message(|| drop(other.lock())).starts_with("lock order: Card is taken while Card"));
    drop(held);
    let both = (vm.lock(), card.lock());
    assert_eq!((*both.0, *both.1), (1, 2));
    // Locks can be released in any order.
    let (first, second) = both;
    drop(first);
    drop(second);
    drop(vm.lock());
}

#[test]
fn a_lock_that_is_tried_counts_as_held() {
    let (vm, card) = (Mutex::<Vm, _>::new(()), Mutex::<Card, _>::new(()));
    let held = card.try_lock().expect("the lock is held");
    assert!(message(|| drop(vm.lock())).contains("while Card is held"));
    drop(held);
    drop(vm.lock());
}

#[test]
fn a_thread_that_holds_a_card_does_not_wait() {
    let (moving, card) = (Mutex::<Moving, _>::new(()), Mutex::<Card, _>::new(()));
    let moves = moving.lock();
    sleep(Duration::ZERO);
    let held = card.lock();
    assert_eq!(
        message(|| sleep(Duration::ZERO)),
        "lock order: a thread waits while it holds Card; release it before waiting"
    );
    drop((held, moves));
    sleep(Duration::ZERO);
}

#[test]
fn a_condition_is_waited_for_with_its_own_lock_only() {
    let (card, bell, woken) = (Mutex::<Card, _>::new(()), Mutex::<Wakeup, _>::new(()), Condvar::default());
    let mut rung = bell.lock();
    woken.wait_for(&mut rung, Duration::ZERO);
    drop(rung);
    let held = card.lock();
    let mut rung = bell.lock();
    assert!(message(|| woken.wait_for(&mut rung, Duration::ZERO)).contains("holds Card"));
    drop((rung, held));
}

#[test]
fn the_checker_keeps_the_order_for_each_of_its_threads() {
    try_schedules(100, || {
        let vm = shuttle::sync::Arc::new(Mutex::<Vm, _, Checked>::new(0));
        let card = shuttle::sync::Arc::new(Mutex::<Card, _, Checked>::new(0));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (vm, card) = (shuttle::sync::Arc::clone(&vm), shuttle::sync::Arc::clone(&card));
                shuttle::thread::spawn(move || {
                    *card.lock() += 1;
                    let mut vm = vm.lock();
                    *card.lock() += 1;
                    *vm += 1;
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().expect("the thread panicked"));
        assert_eq!((*vm.lock(), *card.lock()), (2, 4));
    });
}

#[test]
#[should_panic(expected = "Vm is taken while Card is held")]
fn the_checker_finds_a_lock_out_of_order_in_any_schedule() {
    try_schedules(2, || {
        let (vm, card) = (Mutex::<Vm, _, Checked>::new(0), Mutex::<Card, _, Checked>::new(0));
        let _held = card.lock();
        let _ = vm.lock();
    });
}

#[test]
fn holds_are_counted_while_a_lock_lives_and_after() {
    let before = holds(Measured::Card).count();
    let card = Mutex::<Card, _>::new(());
    drop(card.lock());
    drop(card.try_lock());
    assert_eq!(card.holds().count(), 2);
    assert!(holds(Measured::Card).count() >= before + 2);
    drop(card);
    assert!(holds(Measured::Card).count() >= before + 2);
    assert_eq!(Mutex::<Wakeup, _>::new(()).holds(), Holds::default());
}

#[test]
fn condvar_wait_splits_lock_hold_in_two() {
    let (card, woken) = (Mutex::<Card, _>::new(()), Condvar::default());
    let mut held = card.lock();
    woken.wait_for(&mut held, Duration::ZERO);
    drop(held);
    assert_eq!(card.holds().count(), 2);
}

#[test]
fn lock_that_allows_waiting_orders_before_locks_that_do_not() {
    const { assert!(Moving::MAY_WAIT && Moving::POSITION < Vm::POSITION && Vm::POSITION < Card::POSITION) };
    const { assert!(!Vm::MAY_WAIT && !Card::MAY_WAIT) };
    assert_eq!(ORDER[Card::POSITION as usize], "Card");
}
