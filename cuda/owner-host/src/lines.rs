//! Limits the rate of log lines that programs can cause, separately for each cause.

use std::collections::BTreeMap;

/// Maximum number of lines in a burst.
const AT_ONCE: u64 = 10;
/// Interval after which one more line may be written, in ns.
const EACH_NS: u64 = 6_000_000_000;
/// Maximum number of tracked causes. For one more cause, the cause whose last line is the oldest is dropped.
const CAUSES_MOST: usize = 1024;

#[derive(Clone, Copy, Debug)]
struct Count {
    /// Time in ns at which the full burst is available again. A line is omitted if this time is too far in the future.
    until: u64,
    left_out: u64,
}

/// Rate limits of log lines, keyed by cause.
#[derive(Debug)]
pub struct Lines<C>(BTreeMap<C, Count>);

impl<C> Default for Lines<C> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<C: Copy + Ord> Lines<C> {
    /// Returns the number of lines omitted since the last one if a line with this cause may be written at `now`.
    pub fn may_write(&mut self, cause: C, now: u64) -> Option<u64> {
        if !self.0.contains_key(&cause) && self.0.len() >= CAUSES_MOST {
            let quietest = self.0.iter().min_by_key(|(_, count)| count.until).map(|(&cause, _)| cause);
            if let Some(cause) = quietest {
                self.0.remove(&cause);
            }
        }
        let count = self.0.entry(cause).or_insert(Count { until: now, left_out: 0 });
        let until = count.until.max(now) + EACH_NS;
        if until - now > AT_ONCE * EACH_NS {
            count.left_out += 1;
            return None;
        }
        count.until = until;
        Some(std::mem::take(&mut count.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_rate_limit_applies_only_to_its_cause() {
        let mut lines = Lines::default();
        let (one, two) = (1, 2);
        let written = (0..1000).filter(|_| lines.may_write(one, 5).is_some()).count();
        assert_eq!(written as u64, AT_ONCE);
        assert_eq!(lines.may_write(two, 5), Some(0));
        assert_eq!(lines.may_write(one, 5 + EACH_NS), Some(1000 - AT_ONCE), "the number of omitted lines is reported");
        assert_eq!(lines.may_write(one, 6 + EACH_NS), None);
        assert_eq!(lines.may_write(one, 1000 * EACH_NS), Some(1));
    }

    #[test]
    fn users_without_number_take_no_memory_without_bound() {
        let mut lines = Lines::default();
        for user in 0..10 * CAUSES_MOST as u32 {
            assert_eq!(lines.may_write(user, u64::from(user)), Some(0));
        }
        assert_eq!(lines.0.len(), CAUSES_MOST);
    }
}
