//! Distributions of durations in the admin API.

use sched::Histogram;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Distribution of durations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Durations {
    /// Number of durations.
    pub count: u64,
    /// Sum of all durations, in ns.
    pub sum_ns: u64,
    /// Mean duration, in ns.
    pub mean_ns: u64,
    /// Median duration, in ns, overestimated by at most one eighth.
    pub p50_ns: u64,
    /// 99th percentile, in ns, overestimated by at most one eighth.
    pub p99_ns: u64,
    /// Longest duration, in ns.
    pub max_ns: u64,
    /// Cumulative counts by upper bound.
    pub buckets: Vec<Bucket>,
}

/// Number of durations up to a bound. Durations less than one eighth below the bound may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Bucket {
    /// Upper bound of the durations, in ns.
    pub at_most_ns: u64,
    /// Number of durations.
    pub count: u64,
}

/// Upper bounds of the buckets in ns: from 10 us to 30 s, each about three times as high as the previous one.
const BUCKETS: [u64; 14] = {
    let mut ends = [0; 14];
    let (mut index, mut end) = (0, 10_000);
    while index < ends.len() {
        (ends[index], ends[index + 1]) = (end, 3 * end);
        (index, end) = (index + 2, 10 * end);
    }
    ends
};

impl From<&Histogram> for Durations {
    fn from(of: &Histogram) -> Self {
        Self {
            count: of.count(),
            sum_ns: of.sum(),
            mean_ns: of.mean(),
            p50_ns: of.quantile(500),
            p99_ns: of.quantile(990),
            max_ns: of.max(),
            buckets: BUCKETS.map(|at_most_ns| Bucket { at_most_ns, count: of.at_most(at_most_ns) }).into(),
        }
    }
}
