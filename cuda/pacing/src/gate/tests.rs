//! Tests the gate with several threads.

use super::*;

#[test]
fn slice_end_during_relocation_wakes_waiter_to_notify_owner() {
    let gate = Gate::new();
    assert!(gate.close(ORDER, None));
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let held = gate.hold();
            (held.wait(), held.wait())
        });
        while !gate.is_held() {
            std::thread::yield_now();
        }
        assert!(!gate.is_told(), "the owner is not notified of waits for a relocation");
        assert!(gate.close(NO_SLICE, None));
        gate.open(ORDER);
        let since = Instant::now();
        // TIMEOUT: reached only if the test fails.
        while !gate.is_told() && since.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
        gate.open(NO_SLICE);
        assert_eq!(thread.join().expect("wakes"), (Wake::NotifyOwner, Wake::Opened));
    });
    assert!(!gate.is_held());
}

#[test]
fn no_thread_is_within_a_closed_gate() {
    let gate = Gate::new();
    let (within, entries, end) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let pass = || {
        loop {
            if let Some(stripe) = gate.pass() {
                return stripe;
            }
            let held = gate.hold();
            while held.wait() != Wake::Opened {}
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !end.load(Ordering::SeqCst) {
                    let stripe = pass();
                    within.fetch_add(1, Ordering::SeqCst);
                    entries.fetch_add(1, Ordering::SeqCst);
                    within.fetch_sub(1, Ordering::SeqCst);
                    gate.done(stripe);
                }
            });
        }
        for _ in 0..50 {
            assert!(gate.close(ORDER, None));
            assert_eq!(within.load(Ordering::SeqCst), 0);
            let before = entries.load(Ordering::SeqCst);
            std::thread::yield_now();
            assert_eq!(entries.load(Ordering::SeqCst), before, "a thread passed the closed gate");
            gate.open(ORDER);
        }
        end.store(true, Ordering::SeqCst);
    });
    let stripe = pass();
    let soon = Instant::now();
    assert!(!gate.close(ORDER, Some(soon)), "a thread is inside");
    gate.done(stripe);
    assert!(gate.close(ORDER, Some(soon)));
    gate.open(ORDER);
}

#[test]
fn orders_of_several_cards_close_gate_independently() {
    let gate = Gate::new();
    let (first, last) = (order_of(0), order_of(MAX_CARDS - 1));
    assert_eq!((first | last | ORDER | NO_SLICE | EXPORT).count_ones(), 5, "each reason has a bit");
    for reason in [ORDER, first, last] {
        assert!(gate.close(reason, None));
    }
    gate.open(first);
    gate.open(ORDER);
    assert!(gate.is_closed() && !gate.opens_without(ORDER) && gate.opens_without(last));
    gate.open(last);
    assert!(gate.pass().is_some());
}

#[test]
fn step_lets_one_waiting_submission_pass_a_closed_gate() {
    let gate = Gate::new();
    let passed = AtomicU64::new(0);
    assert!(gate.close(NO_SLICE, None));
    let submit = || {
        loop {
            if let Some(stripe) = gate.pass() {
                passed.fetch_add(1, Ordering::SeqCst);
                return gate.done(stripe);
            }
            let held = gate.hold();
            while held.wait() == Wake::NotifyOwner {}
        }
    };
    let limit = Duration::from_secs(20);
    gate.step(limit);
    assert_eq!(gate.pass(), None, "a step without a waiting submission has ended");
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(submit)).collect();
        for steps in 1..=2 {
            while (gate.held.load(Ordering::SeqCst) as u64) < 4 - steps {
                std::thread::yield_now();
            }
            gate.step(limit);
            assert!(gate.close(NO_SLICE, None), "the submission has completed");
            assert_eq!(passed.load(Ordering::SeqCst), steps);
        }
        // A step does not override a relocation of chunks.
        assert!(gate.close(ORDER, None));
        gate.step(Duration::from_millis(10));
        assert_eq!(passed.load(Ordering::SeqCst), 2);
        assert!(gate.close(NO_SLICE, None));
        gate.open(ORDER | NO_SLICE);
        threads.into_iter().for_each(|thread| thread.join().expect("passes"));
    });
    assert_eq!(passed.load(Ordering::SeqCst), 3);
    assert!(gate.close(NO_SLICE, None) && !gate.is_told());
}
