//! Metrics of the hold times of locks that VMs share.

use super::scheduler::{Seconds, head};
use ::locks::{Holds, Measured, holds};
use std::fmt::Write;

/// Upper bounds of the histogram's buckets, in ns.
const BOUNDS: [u64; 9] = [1_000, 10_000, 50_000, 100_000, 500_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000];

/// Appends all lock metrics.
pub(super) fn samples(text: &mut String) {
    let all: Vec<(&str, Holds)> = Measured::ALL.into_iter().map(|kind| (kind.name(), holds(kind))).collect();
    let help = "Time for which the locks of all VMs and of all cards were held, by `lock`: `vm`, `card`; holds may be counted as up to one eighth longer";
    let name = head(text, "lock_hold_seconds", "histogram", help);
    for (lock, holds) in &all {
        for bound in BOUNDS {
            let count = holds.at_most(bound);
            let _ = writeln!(text, "{name}_bucket{{lock=\"{lock}\",le=\"{}\"}} {count}", Seconds(bound));
        }
        let _ = writeln!(text, "{name}_bucket{{lock=\"{lock}\",le=\"+Inf\"}} {}", holds.count());
        let _ = writeln!(text, "{name}_sum{{lock=\"{lock}\"}} {}", Seconds(holds.sum_ns()));
        let _ = writeln!(text, "{name}_count{{lock=\"{lock}\"}} {}", holds.count());
    }
    let name = head(
        text,
        "lock_hold_longest_seconds",
        "gauge",
        "Longest hold of such a lock since the daemon started, by `lock`",
    );
    for (lock, holds) in &all {
        let _ = writeln!(text, "{name}{{lock=\"{lock}\"}} {}", Seconds(holds.longest_ns()));
    }
    let help = "Holds of such a lock for more than 50 us, by `lock` and `at`, the source location that took the lock";
    let name = head(text, "lock_long_holds_total", "counter", help);
    for (lock, holds) in &all {
        for (at, long) in holds.long() {
            let (file, line) = (at.file(), at.line());
            let _ = writeln!(text, "{name}{{lock=\"{lock}\",at=\"{file}:{line}\"}} {}", long.count);
        }
    }
}
