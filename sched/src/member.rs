//! State of a vGPU in a lane: its queue, its work in flight, and its cap's token bucket.

use crate::config::{MS, PERMILLE};
use crate::params::VgpuParams;
use crate::types::{Channel, Engine, Nanos, Ticket};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Time in which an empty bucket of a cap fills up, in ns. Caps are enforced over this time.
const CAP_NS: u64 = 30 * MS;

/// Expected length of a vGPU's first submission, in ns. This is a conservative value.
const UNKNOWN_NS: u64 = MS;

/// A queued submission.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Queued {
    pub(crate) ticket: Ticket,
    pub(crate) channel: Channel,
    pub(crate) engine: Engine,
    pub(crate) arrived: Nanos,
    /// Sequence number of the submission.
    pub(crate) order: u64,
    /// True if the submission has already been started once.
    #[serde(default)]
    pub(crate) again: bool,
}

/// A vGPU in a lane.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Member {
    pub(crate) params: VgpuParams,
    pub(crate) queue: VecDeque<Queued>,
    /// Number of the vGPU's submissions in flight on the card.
    pub(crate) in_flight: u32,
    /// Time at which the end of the vGPU's last submission was observed.
    pub(crate) last_seen: Option<Nanos>,
    /// Expected length of the vGPU's next submission, which is the recent maximum, in ns.
    pub(crate) expected: u64,
    /// True if the vGPU is quarantined, so that its work must not start.
    pub(crate) held: bool,
    pub(crate) bucket: Bucket,
}

impl Member {
    pub(crate) fn new(params: VgpuParams, held: bool, now: Nanos) -> Self {
        let bucket = Bucket { level: 0, at: now };
        Self { params, queue: VecDeque::new(), in_flight: 0, last_seen: None, expected: UNKNOWN_NS, held, bucket }
    }

    /// Returns true if a submission of the vGPU may start.
    pub(crate) fn ready(&self) -> bool {
        !self.queue.is_empty()
            && !self.held
            && (self.params.cap_permille == PERMILLE || self.bucket.level >= self.ahead())
    }

    /// Returns the expected use of the submissions in flight, which is not charged to the bucket yet, in thousandths of
    /// a nanosecond.
    pub(crate) fn ahead(&self) -> i128 {
        i128::from(self.expected) * i128::from(self.in_flight) * i128::from(PERMILLE)
    }

    /// Returns true if the vGPU is not held, and has work or had work in the last `ns` ns.
    pub(crate) fn active(&self, now: Nanos, ns: u64) -> bool {
        !self.held
            && (!self.queue.is_empty()
                || self.in_flight > 0
                || self.last_seen.is_some_and(|seen| now.since(seen) <= ns))
    }
}

/// Token bucket that enforces a cap. It fills at the rate of the cap, and use drains it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Bucket {
    /// Fill level, in thousandths of a nanosecond.
    pub(crate) level: i128,
    pub(crate) at: Nanos,
}

impl Bucket {
    pub(crate) fn fill(&mut self, cap_permille: u32, now: Nanos) {
        let full = i128::from(CAP_NS) * i128::from(cap_permille);
        let flow = i128::from(now.since(self.at)) * i128::from(cap_permille);
        *self = Self { level: (self.level + flow).min(full), at: now };
    }

    pub(crate) fn take(&mut self, used: u64) {
        self.level -= i128::from(used) * i128::from(PERMILLE);
    }

    /// Returns the time at which the fill level reaches zero.
    pub(crate) fn opens(&self, cap_permille: u32) -> Nanos {
        let missing = (-self.level).max(0).div_euclid(i128::from(cap_permille.max(1))) + 1;
        self.at.after(u64::try_from(missing).unwrap_or(u64::MAX))
    }
}
