//! Progress of processes that move between the cards of two owners.

use cuda_control::ArrivalTimes;

/// Progress of a process that moves to another card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// The process uses this card.
    Stays,
    /// The process was asked to leave.
    Asked,
    /// The process has unmapped its chunks.
    Left,
}

/// Progress of a tenant that moves to another card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// The request must be repeated, for the given reason.
    Waits(String),
    /// All programs of the tenant have unmapped their chunks. Contains their process IDs.
    Left(Vec<u32>),
}

/// A process's move to this card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Time in ns at which the process asked to be moved.
    since: u64,
    /// Durations of the driver's checkpoint and restore, in microseconds.
    driver_us: [u64; 2],
    times: Option<ArrivalTimes>,
}

impl Arrival {
    /// Begins a move at the time `since`, in ns.
    #[must_use]
    pub fn new(since: u64) -> Self {
        Self { since, driver_us: [0; 2], times: None }
    }

    /// Records the durations of the driver's checkpoint and restore, in microseconds.
    pub fn set_driver_times(&mut self, checkpoint_us: u64, restore_us: u64) {
        self.driver_us = [checkpoint_us, restore_us];
    }

    /// Records that the process is on this card and that its chunks are mapped, at the time `clock` in ns.
    pub fn complete(&mut self, pid: u32, chunks: u64, clock: u64) {
        let (arrive_us, [checkpoint_us, restore_us]) = (clock.saturating_sub(self.since) / 1000, self.driver_us);
        self.times.get_or_insert(ArrivalTimes { pid, checkpoint_us, restore_us, arrive_us, chunks });
    }

    /// Returns the times of the move, once it is complete.
    #[must_use]
    pub fn times(&self) -> Option<ArrivalTimes> {
        self.times
    }
}
