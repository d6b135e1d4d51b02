//! Locks of `shuttle`, and its ways to choose which thread runs next at each of them. A schedule in which all threads
//! wait for each other fails the test, and so does one that does not end; what is printed then replays it
//! (`shuttle::replay`).

use crate::{Held, Locks};
use shuttle::scheduler::{DfsScheduler, PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::{Mutex, MutexGuard};
use shuttle::{Config, MaxSteps, Runner};

/// The checker's.
#[derive(Clone, Copy, Debug)]
pub struct Checked;

shuttle::thread_local! {
    static HELD: Held = Held::new();
}

impl Locks for Checked {
    // What a checked thread waits for is not time.
    const MEASURES: bool = false;
    type Mutex<T> = Mutex<T>;
    type Guard<'a, T: 'a> = MutexGuard<'a, T>;

    fn mutex<T>(value: T) -> Mutex<T> {
        Mutex::new(value)
    }

    fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().expect("no thread has panicked")
    }

    fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
        mutex.try_lock().ok()
    }

    fn with_held(act: impl FnOnce(&Held)) {
        let _ = HELD.try_with(act);
    }
}

/// Seed of each run's choices: the same schedules each time.
const SEED: u64 = 0x5eed;
/// Points at which PCT has another thread run than the most important one.
const CHANGES: usize = 4;
/// Choices of a schedule; one with more is taken to go on for ever.
const MOST_CHOICES: usize = 50_000;
/// Multiplies how many schedules are tried.
const TIMES: &str = "INTERLEAVINGS";

fn run(scheduler: impl Scheduler + 'static, body: fn()) -> usize {
    let mut config = Config::new();
    config.stack_size = 256 << 10;
    config.max_steps = MaxSteps::FailAfter(MOST_CHOICES);
    Runner::new(scheduler, config).run(body)
}

/// Runs `body` under so many schedules (times what the environment says), half of them with threads chosen at random,
/// half by PCT, which finds what takes few but unlikely changes of threads.
///
/// # Panics
/// When `body` does, when its threads wait for each other, or when a schedule does not end.
pub fn try_schedules(count: usize, body: fn()) {
    let times = std::env::var(TIMES).ok().map_or(1, |times| times.parse().expect("a number"));
    let half = count.div_ceil(2) * times;
    assert_eq!(run(RandomScheduler::new_from_seed(SEED, half), body), half);
    assert_eq!(run(PctScheduler::new_from_seed(SEED, CHANGES, half), body), half);
}

/// Runs `body` under all schedules there are, and returns how many.
///
/// # Panics
/// As [`try_schedules`], and when there are more than `most`.
pub fn try_all_schedules(most: usize, body: fn()) -> usize {
    let count = run(DfsScheduler::new(Some(most), false), body);
    assert!(count < most, "not all schedules were tried");
    count
}
