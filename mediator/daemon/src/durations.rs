//! Counts of durations.

use sched::Histogram;

use api::{Bucket, Durations};

/// Upper ends of the buckets in which durations are shown, in ns: from 10 us to 30 s, about three times longer each.
const BUCKETS: [u64; 14] = {
    let mut ends = [0; 14];
    let (mut index, mut end) = (0, 10_000);
    while index < ends.len() {
        (ends[index], ends[index + 1]) = (end, 3 * end);
        (index, end) = (index + 2, 10 * end);
    }
    ends
};

/// As the admin API has them.
pub(super) fn shown(of: &Histogram) -> Durations {
    Durations {
        count: of.count(),
        sum_ns: of.sum(),
        mean_ns: of.mean(),
        p50_ns: of.quantile(500),
        p99_ns: of.quantile(990),
        max_ns: of.max(),
        buckets: BUCKETS.map(|at_most_ns| Bucket { at_most_ns, count: of.at_most(at_most_ns) }).into(),
    }
}
