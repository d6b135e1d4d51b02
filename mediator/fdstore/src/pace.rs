//! Limits the rate at which one VMM causes messages to the service manager. Otherwise, a VMM that constantly maps and
//! unmaps memory would keep the host's service manager busy.
//!
//! Messages are never dropped, because the next daemon could then not resume the VMM's connection. Instead, a VMM that
//! exceeds the limit waits.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Number of messages permitted in a burst. A starting VMM causes about thirty.
const BURST_MESSAGES: u32 = 128;
/// Interval between permitted messages after a burst.
const MESSAGE_INTERVAL: Duration = Duration::from_millis(60);

/// Message rate limit for one VMM.
#[derive(Debug)]
pub(crate) struct Pace(Mutex<Bucket>);

/// Token bucket; each token permits one message.
#[derive(Debug)]
struct Bucket {
    left: u32,
    filled: Instant,
}

impl Bucket {
    fn new(now: Instant) -> Self {
        Self { left: BURST_MESSAGES, filled: now }
    }

    /// Adds the tokens earned since the last call.
    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.filled).as_millis() / MESSAGE_INTERVAL.as_millis();
        let new = u32::try_from(passed).unwrap_or(u32::MAX).min(BURST_MESSAGES);
        self.left = self.left.saturating_add(new).min(BURST_MESSAGES);
        // When the bucket is full, drop the rest of the interval.
        self.filled = if self.left == BURST_MESSAGES { now } else { self.filled + MESSAGE_INTERVAL * new };
    }

    /// Takes one token, or returns the time until the next one is available.
    fn take(&mut self, now: Instant) -> Result<(), Duration> {
        self.fill(now);
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => Err((self.filled + MESSAGE_INTERVAL).saturating_duration_since(now)),
        }
    }
}

impl Pace {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Bucket::new(Instant::now())))
    }

    /// Locks the bucket. The lock is held for only a few instructions, without calls or waits.
    fn bucket(&self) -> MutexGuard<'_, Bucket> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a message may be sent. Only the VMM's own thread waits.
    pub(crate) fn wait(&self) {
        loop {
            let taken = self.bucket().take(Instant::now());
            match taken {
                Ok(()) => return,
                // TIMEOUT: at most one interval, after which a message is permitted.
                Err(wait) => std::thread::sleep(wait),
            }
        }
    }

    /// Returns true if less than half of a burst is available.
    pub(crate) fn is_busy(&self) -> bool {
        let mut bucket = self.bucket();
        bucket.fill(Instant::now());
        bucket.left < BURST_MESSAGES / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_goes_at_once_and_then_one_in_an_interval() {
        let begin = Instant::now();
        let mut bucket = Bucket::new(begin);
        for _ in 0..BURST_MESSAGES {
            assert_eq!(bucket.take(begin), Ok(()));
        }
        assert_eq!(bucket.take(begin), Err(MESSAGE_INTERVAL));
        // The VMM causes messages constantly for ten seconds.
        let steps = 100_000;
        let sent =
            (0..steps).filter(|step| bucket.take(begin + Duration::from_secs(10) * *step / steps).is_ok()).count();
        let most = usize::try_from(Duration::from_secs(10).as_millis() / MESSAGE_INTERVAL.as_millis()).unwrap();
        assert!(sent <= most && sent + 2 >= most, "{sent} of {most}");
        // After a quiet period, the VMM may cause another burst of the same size, but not a larger one.
        let later = begin + Duration::from_secs(3600);
        assert_eq!((0..2 * BURST_MESSAGES).filter(|_| bucket.take(later).is_ok()).count(), BURST_MESSAGES as usize);
    }

    #[test]
    fn a_vmm_beyond_the_bound_waits_and_loses_nothing() {
        let pace = Pace::new();
        let begin = Instant::now();
        (0..BURST_MESSAGES).for_each(|_| pace.wait());
        assert!(pace.is_busy());
        (0..3).for_each(|_| pace.wait());
        assert!(begin.elapsed() >= MESSAGE_INTERVAL * 2, "{:?}", begin.elapsed());
    }
}
