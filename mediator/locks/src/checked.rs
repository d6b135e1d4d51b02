//! `shuttle`'s locks, and schedulers that select the next thread at each lock operation. A deadlock or livelock fails
//! the test. The printed schedule can be replayed (`shuttle::replay`).

use crate::{HeldRanks, Locks};
use shuttle::scheduler::{DfsScheduler, PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::{Mutex, MutexGuard};
use shuttle::{Config, MaxSteps, Runner};

/// The lock family of the checker.
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

/// Seed of the random scheduler, which makes all schedules reproducible.
const SEED: u64 = 0x5eed;
/// Number of priority change points in a PCT schedule.
const CHANGES: usize = 4;
/// Maximum number of scheduling decisions per schedule. A longer schedule counts as a livelock.
const MOST_CHOICES: usize = 50_000;
/// Environment variable that multiplies the number of schedules.
const TIMES: &str = "INTERLEAVINGS";

fn run(scheduler: impl Scheduler + 'static, body: fn()) -> usize {
    let mut config = Config::new();
    config.stack_size = 256 << 10;
    config.max_steps = MaxSteps::FailAfter(MOST_CHOICES);
    Runner::new(scheduler, config).run(body)
}

/// Runs `body` under `count` schedules, multiplied by the factor in [`TIMES`]. Half of the schedules are random. The
/// other half use PCT, which finds failures that need only a few specific preemptions.
///
/// # Panics
/// Panics if `body` panics, or if a schedule deadlocks or does not terminate.
pub fn try_schedules(count: usize, body: fn()) {
    let times = std::env::var(TIMES).ok().map_or(1, |times| times.parse().expect("the factor is a number"));
    let half = count.div_ceil(2) * times;
    assert_eq!(run(RandomScheduler::new_from_seed(SEED, half), body), half);
    assert_eq!(run(PctScheduler::new_from_seed(SEED, CHANGES, half), body), half);
}

/// Runs `body` under every possible schedule, and returns the number of schedules.
///
/// # Panics
/// Panics for the same reasons as [`try_schedules`], or if there are `most` or more schedules.
pub fn try_all_schedules(most: usize, body: fn()) -> usize {
    let count = run(DfsScheduler::new(Some(most), false), body);
    assert!(count < most, "more than {most} schedules exist");
    count
}
