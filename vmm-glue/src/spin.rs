//! Polls briefly for the next message before sleeping.

use std::time::{Duration, Instant};

/// Maximum polling credit.
const MAX_CREDIT: u32 = 8;
/// Minimum number of consecutive short sleeps after which polling resumes. The initial number is twice this minimum.
const MIN_STREAK: u32 = 16;
const MAX_STREAK: u32 = 1024;

/// Decides whether to poll for messages before sleeping.
///
/// Polling that finds a message earns credit. Polling that finds no message, or that uses a CPU needed by other
/// threads, costs credit. Without credit, the thread sleeps immediately until enough consecutive sleeps have been
/// shorter than a polling interval. Each time the credit runs out, the number of short sleeps required to resume
/// polling doubles, up to a limit. Full credit resets this number.
#[derive(Debug)]
pub struct Spin {
    length: Duration,
    credit: u32,
    /// Number of consecutive short sleeps.
    streak: u32,
    /// Number of consecutive short sleeps after which polling resumes.
    needed: u32,
    /// Start of the sleep before the next message, or `None` if the thread has not stopped polling for it.
    slept: Option<Instant>,
}

impl Spin {
    /// Creates a state that polls for `length`, but at most for one millisecond.
    pub fn new(length: Duration) -> Self {
        let length = length.min(Duration::from_millis(1));
        Self { length, credit: MAX_CREDIT / 2, streak: 0, needed: MIN_STREAK, slept: None }
    }

    /// Returns the deadline of polling that starts at `now`, or `None` if the thread should not poll.
    pub fn deadline(&mut self, now: Instant) -> Option<Instant> {
        if self.length.is_zero() {
            return None;
        }
        if self.credit == 0 || self.slept.is_some() {
            self.slept.get_or_insert(now);
            return None;
        }
        now.checked_add(self.length)
    }

    /// Records that a message arrived at `now` while polling until `deadline`.
    pub fn hit(&mut self, now: Instant, deadline: Instant) {
        if now > deadline.checked_add(self.length).unwrap_or(deadline) {
            return self.lose();
        }
        self.credit = self.credit.saturating_add(1).min(MAX_CREDIT);
        if self.credit == MAX_CREDIT {
            self.needed = MIN_STREAK;
        }
    }

    /// Records that no message had arrived by `now`.
    pub fn miss(&mut self, now: Instant) {
        self.lose();
        self.slept = Some(now);
    }

    fn lose(&mut self) {
        self.credit = self.credit.saturating_sub(1);
        if self.credit == 0 {
            self.streak = 0;
            self.needed = self.needed.saturating_mul(2).min(MAX_STREAK);
        }
    }

    /// Records that a sleep ended at `now`. `message` is true if a client message ended it.
    pub fn woke(&mut self, message: bool, now: Instant) {
        if !message {
            return;
        }
        let Some(slept) = self.slept.take() else { return };
        if self.credit != 0 {
            return;
        }
        self.streak =
            if now.saturating_duration_since(slept) < self.length { self.streak.saturating_add(1) } else { 0 };
        if self.streak >= self.needed {
            self.streak = 0;
            self.credit = MAX_CREDIT / 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPIN_TIME: Duration = Duration::from_millis(1);

    /// Polls unsuccessfully until polling stops. Returns the number of polls.
    fn give_up(spin: &mut Spin) -> u32 {
        let now = Instant::now();
        let mut rounds = 0;
        while spin.deadline(now).is_some() {
            spin.miss(now);
            assert!(spin.deadline(now).is_none(), "poll once per message");
            sleep(spin, Duration::from_secs(1));
            rounds += 1;
        }
        rounds
    }

    fn sleep(spin: &mut Spin, length: Duration) {
        let slept = Instant::now();
        spin.slept = Some(slept);
        spin.woke(true, slept.checked_add(length).unwrap());
    }

    /// Sleeps briefly until polling resumes. Returns the number of sleeps.
    fn come_back(spin: &mut Spin) -> u32 {
        (1..10_000)
            .find(|_| {
                sleep(spin, Duration::ZERO);
                spin.deadline(Instant::now()).is_some()
            })
            .unwrap()
    }

    #[test]
    fn useless_spinning_stops_and_resumes_with_growing_delay() {
        let mut spin = Spin::new(SPIN_TIME);
        assert_eq!(give_up(&mut spin), MAX_CREDIT / 2);
        assert_eq!(come_back(&mut spin), 2 * MIN_STREAK);
        give_up(&mut spin);
        assert_eq!(come_back(&mut spin), 4 * MIN_STREAK);
        for _ in 0..20 {
            give_up(&mut spin);
            come_back(&mut spin);
        }
        give_up(&mut spin);
        assert_eq!(come_back(&mut spin), MAX_STREAK);
    }

    #[test]
    fn useful_spinning_continues() {
        let mut spin = Spin::new(SPIN_TIME);
        for _ in 0..100 {
            let now = Instant::now();
            let deadline = spin.deadline(now).unwrap();
            spin.hit(now, deadline);
        }
        assert_eq!(give_up(&mut spin), MAX_CREDIT);
        assert_eq!(come_back(&mut spin), 2 * MIN_STREAK);
    }

    #[test]
    fn spinning_on_a_processor_that_others_use_is_given_up() {
        let mut spin = Spin::new(SPIN_TIME);
        let now = Instant::now();
        let late = now.checked_add(10 * SPIN_TIME).unwrap();
        let rounds =
            (0..100).take_while(|_| spin.deadline(now).map(|deadline| spin.hit(late, deadline)).is_some()).count();
        assert_eq!(rounds, MAX_CREDIT as usize / 2);
    }

    #[test]
    fn other_wakes_do_not_start_a_spin() {
        let mut spin = Spin::new(SPIN_TIME);
        let now = Instant::now();
        assert!(spin.deadline(now).is_some());
        spin.miss(now);
        spin.woke(false, now);
        assert!(spin.deadline(now).is_none());
    }

    #[test]
    fn zero_turns_spinning_off() {
        assert!(Spin::new(Duration::ZERO).deadline(Instant::now()).is_none());
    }
}
