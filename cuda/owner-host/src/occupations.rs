//! Records which processes occupy the card without a turn, according to the owner's polls of NVML.

use std::collections::{BTreeMap, VecDeque};

/// Number of polls at which a process must occupy the card to prove that it bypasses the gate.
const MIN_POLLS: usize = 2;

/// A sequence of polls at which a process occupied the card. The process had no turn during this sequence.
#[derive(Debug)]
struct Occupation {
    /// Time of the first poll, in ns.
    since: u64,
    /// Times of the last polls in ns, at most [`MIN_POLLS`].
    last: VecDeque<u64>,
    /// Number of turns of the process, for detecting turns between two polls.
    turns: u64,
}

/// Processes that occupied the card at the last poll and had no turn.
#[derive(Debug, Default)]
pub struct Occupations(BTreeMap<u32, Occupation>);

impl Occupations {
    /// Records a poll at `now`, in ns. `processes` contains the PIDs of the processes that occupy the card without a
    /// turn, each with its number of turns so far.
    pub fn polled(&mut self, now: u64, processes: impl Iterator<Item = (u32, u64)>) {
        let mut before = std::mem::take(&mut self.0);
        for (pid, turns) in processes {
            let new = || Occupation { since: now, last: VecDeque::new(), turns };
            let mut occupation = before.remove(&pid).filter(|row| row.turns == turns).unwrap_or_else(new);
            occupation.last.push_back(now);
            if occupation.last.len() > MIN_POLLS {
                occupation.last.pop_front();
            }
            self.0.insert(pid, occupation);
        }
    }

    /// Returns true if a process has occupied the card at all polls for longer than `limit_ns`.
    #[must_use]
    pub fn exceeds(&self, pid: u32, limit_ns: u64, now: u64) -> bool {
        self.proven(pid).is_some_and(|row| now.saturating_sub(row.since) > limit_ns)
    }

    /// Returns true if the last `MIN_POLLS` polls at which a process occupied the card were all after `begin`, in ns.
    #[must_use]
    pub fn is_since(&self, pid: u32, begin: u64) -> bool {
        self.proven(pid).is_some_and(|row| row.last.iter().all(|time| *time > begin))
    }

    fn proven(&self, pid: u32) -> Option<&Occupation> {
        self.0.get(&pid).filter(|row| row.last.len() == MIN_POLLS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_with_turn_between_polls_starts_again() {
        let mut occupations = Occupations::default();
        occupations.polled(10, [(1, 0), (2, 0)].into_iter());
        assert!(!occupations.exceeds(1, 0, 15), "one poll proves nothing");
        occupations.polled(20, [(1, 0), (2, 1)].into_iter());
        assert!(occupations.exceeds(1, 9, 20) && !occupations.exceeds(1, 10, 20));
        assert!(!occupations.exceeds(2, 0, 20), "it had a turn between the polls");
        assert!(occupations.is_since(1, 9) && !occupations.is_since(1, 10));
        occupations.polled(30, [(2, 1)].into_iter());
        assert!(!occupations.exceeds(1, 0, 30) && occupations.exceeds(2, 9, 30));
    }
}
