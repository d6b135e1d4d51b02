//! The gate under several threads.

use std::sync::MutexGuard;
use std::sync::atomic::AtomicU64;

use super::*;

#[test]
fn a_function_is_as_long_as_its_grid_is_large() {
    let keys = [[1, 1, 1], [2, 1, 1], [1, 2, 1], [1, 1, 2]].map(|grid| shaped(0x7f00_1000, grid));
    let all: std::collections::BTreeSet<_> = keys.into_iter().chain([shaped(0x7f00_1040, [1, 1, 1])]).collect();
    assert_eq!(all.len(), 5);
}

/// Locks the gate, and the measurements after it, for one test: they are global to the process.
pub fn one() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn slice_end_during_relocation_notifies_owner_of_waiter() {
    let _one = one();
    assert!(close(ORDER, None));
    let thread = std::thread::spawn(|| done(pass()));
    while !held() {
        std::thread::yield_now();
    }
    assert!(!told(), "a relocation is not worth a word");
    assert!(close(NO_SLICE, None));
    open(ORDER);
    let since = Instant::now();
    // TIMEOUT: only a failing test waits this long.
    while !told() && since.elapsed() < Duration::from_secs(20) {
        std::thread::yield_now();
    }
    let was_told = told();
    open(NO_SLICE);
    thread.join().expect("passes");
    assert!(was_told, "the thread waits for a turn that nobody asked for");
}

#[test]
fn no_thread_is_within_a_closed_gate() {
    let _one = one();
    static WITHIN: AtomicU64 = AtomicU64::new(0);
    static ENTRIES: AtomicU64 = AtomicU64::new(0);
    static END: AtomicBool = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !END.load(Ordering::SeqCst) {
                    let stripe = pass();
                    WITHIN.fetch_add(1, Ordering::SeqCst);
                    ENTRIES.fetch_add(1, Ordering::SeqCst);
                    WITHIN.fetch_sub(1, Ordering::SeqCst);
                    done(stripe);
                }
            });
        }
        for _ in 0..50 {
            assert!(close(ORDER, None));
            assert_eq!(WITHIN.load(Ordering::SeqCst), 0);
            let before = ENTRIES.load(Ordering::SeqCst);
            std::thread::yield_now();
            assert_eq!(ENTRIES.load(Ordering::SeqCst), before, "a thread went through a closed gate");
            open(ORDER);
        }
        END.store(true, Ordering::SeqCst);
    });
    let stripe = pass();
    let soon = Instant::now();
    assert!(!close(ORDER, Some(soon)), "a thread is within");
    done(stripe);
    assert!(close(ORDER, Some(soon)));
    open(ORDER);
}
