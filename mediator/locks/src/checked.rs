//! `shuttle`'s locks, and strategies that choose the next thread at each lock operation. A schedule in which all
//! threads wait for each other fails the test, as does an endless one. The printed schedule can be replayed later
//! (`shuttle::replay`).

use crate::{HeldRanks, Locks};
use shuttle::scheduler::{DfsScheduler, PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::{Mutex, MutexGuard};
use shuttle::{Config, MaxSteps, Runner};

/// The checker's family of locks.
#[derive(Clone, Copy, Debug)]
pub struct Checked;

shuttle::thread_local! {
    static HELD: HeldRanks = HeldRanks::new();
}

impl Locks for Checked {
    // Hold times under the checker are meaningless.
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

    fn with_held(act: impl FnOnce(&HeldRanks)) {
        let _ = HELD.try_with(act);
    }
}

/// Seed of the random choices, so that every run has the same schedules.
const SEED: u64 = 0x5eed;
/// Number of priority change points in a PCT schedule.
const CHANGES: usize = 4;
/// Maximum number of choices per schedule. A longer schedule counts as endless.
const MOST_CHOICES: usize = 50_000;
/// Environment variable that multiplies the number of schedules.
const TIMES: &str = "INTERLEAVINGS";

fn run(scheduler: impl Scheduler + 'static, body: fn()) -> usize {
    let mut config = Config::new();
    config.stack_size = 256 << 10;
    config.max_steps = MaxSteps::FailAfter(MOST_CHOICES);
    Runner::new(scheduler, config).run(body)
}

/// Runs `body` under `count` schedules, multiplied by the factor in the environment. Half of the schedules choose
/// threads randomly. The other half use PCT, which finds failures that need few but unlikely thread switches.
///
/// # Panics
/// Panics if `body` panics, if its threads deadlock, or if a schedule does not end.
pub fn try_schedules(count: usize, body: fn()) {
    let times = std::env::var(TIMES).ok().map_or(1, |times| times.parse().expect("a number"));
    let half = count.div_ceil(2) * times;
    assert_eq!(run(RandomScheduler::new_from_seed(SEED, half), body), half);
    assert_eq!(run(PctScheduler::new_from_seed(SEED, CHANGES, half), body), half);
}

/// Runs `body` under all possible schedules, and returns their number.
///
/// # Panics
/// Panics for the same reasons as [`try_schedules`], and if there are more than `most` schedules.
pub fn try_all_schedules(most: usize, body: fn()) -> usize {
    let count = run(DfsScheduler::new(Some(most), false), body);
    assert!(count < most, "not all schedules were tried");
    count
}
