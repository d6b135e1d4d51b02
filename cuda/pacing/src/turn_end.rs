//! Times before the end of a turn's last work.

use std::time::Duration;

use cuda_protocol::{EARLY_US, Run};

/// Time that the next tenant's threads take to wake up. A turn's end is announced this long before the turn can end.
// TIMEOUT: waking a processor from a deep idle state takes up to 0.2 ms in a VM.
const WAKE_TIME: Duration = Duration::from_micros(200);

/// Interval at which the end of a turn's last work is estimated again until it is announced.
// TIMEOUT: the estimate is as inexact as this interval, and it applies for at most a turn's work in flight.
pub const ESTIMATE_INTERVAL: Duration = Duration::from_micros(25);

/// Like [`EARLY_US`], for a member of a share group with several members. No tenant's turn follows, but the length of
/// other members' work may be measured, and must not include this member's work.
// TIMEOUT: the reply of the owner takes longer.
const EARLY_IN_GROUP: Duration = Duration::from_micros(100);

/// Returns the time before the end of a turn's last work at which the turn can end.
#[must_use]
pub fn earliness(run: &Run) -> Duration {
    // Only members of share groups with several members report their use during a turn.
    if run.report_us > 0 { EARLY_IN_GROUP } else { Duration::from_micros(EARLY_US.into()) }
}

/// Returns the time before the end of a turn's last work at which the end is announced.
#[must_use]
pub fn announcement_lead(run: &Run) -> Duration {
    earliness(run) + WAKE_TIME
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_of_a_members_work_is_not_overlapped_by_others() {
        let run = Run { card: 0, turn: 1, length_us: 0, run_ahead_us: 1000, idle_us: 300, report_us: 0 };
        let member = Run { report_us: 2000, ..run };
        assert!(earliness(&member) < earliness(&run));
        assert!(announcement_lead(&member) > earliness(&member));
    }
}
