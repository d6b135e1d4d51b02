//! Result lines: `RESULT name=... ok=... bytes=... copies=... channels=... seconds=...`, followed by further key-value
//! pairs and, on failure, the error.
//!
//! Values other than the error contain no spaces. The error is quoted.
//!
//! If requested, the end times of kernels are printed before the result line: `ENDS at_us=... after_us=...,...` in
//! microseconds of the card's clock. The first time in a line is absolute. All others are relative to the previous
//! time.

use std::time::Instant;

use anyhow::Result;
use serde_json::{Value, json};

use crate::Test;
use crate::options::Options;
use crate::rig::{Counts, Rig};
use crate::tests::Facts;

/// Runs a test and prints its result line. Returns true if the test succeeded.
pub fn run(rig: &Rig, options: &Options, test: &Test) -> bool {
    let (before, began) = (rig.counts(), Instant::now());
    let outcome = (test.run)(rig, options);
    let after = rig.counts();
    let counts = Counts {
        bytes: after.bytes - before.bytes,
        copies: after.copies - before.copies,
        channels: after.channels - before.channels,
    };
    print(test.name, counts, began.elapsed().as_secs_f64(), &outcome);
    outcome.is_ok()
}

/// Prints a result line or, if `json` is true, a JSON object with the same values.
pub fn print_as(json: bool, name: &str, counts: Counts, seconds: f64, outcome: &Result<Facts>) {
    if json {
        println!("{}", object(name, counts, seconds, outcome));
    } else {
        print(name, counts, seconds, outcome);
    }
}

/// Returns the result as a JSON object. Facts that are unsigned integers become numbers, and others strings.
fn object(name: &str, counts: Counts, seconds: f64, outcome: &Result<Facts>) -> Value {
    let Counts { bytes, copies, channels } = counts;
    let mut object = json!({
        "name": name, "ok": outcome.is_ok(), "bytes": bytes, "copies": copies, "channels": channels, "seconds": seconds,
    });
    match outcome {
        Ok(facts) => facts.iter().for_each(|(name, value)| {
            object[*name] = value.parse::<u64>().map_or_else(|_| json!(value), |number| json!(number));
        }),
        Err(error) => object["error"] = json!(format!("{error:#}")),
    }
    object
}

/// Maximum number of end times per line.
const ENDS: usize = 200;

/// Prints the end times of kernels. `ends` is in nanoseconds.
pub fn print_ends(ends: &[u64]) {
    ends.chunks(ENDS).for_each(|some| println!("{}", line_of_ends(some)));
}

fn line_of_ends(ends: &[u64]) -> String {
    let us = |end: &u64| end / 1000;
    let after: Vec<String> = ends.windows(2).map(|two| us(&two[1]).wrapping_sub(us(&two[0])).to_string()).collect();
    format!("ENDS at_us={} after_us={}", ends.first().map_or(0, us), after.join(","))
}

/// Prints a result line.
pub fn print(name: &str, counts: Counts, seconds: f64, outcome: &Result<Facts>) {
    println!("{}", line(name, counts, seconds, outcome));
}

fn line(name: &str, counts: Counts, seconds: f64, outcome: &Result<Facts>) -> String {
    let Counts { bytes, copies, channels } = counts;
    let ok = outcome.is_ok();
    let mut line =
        format!("RESULT name={name} ok={ok} bytes={bytes} copies={copies} channels={channels} seconds={seconds:.3}");
    match outcome {
        Ok(facts) => facts.iter().for_each(|(name, value)| line.push_str(&format!(" {name}={value}"))),
        Err(error) => line.push_str(&format!(" error={:?}", format!("{error:#}"))),
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTS: Counts = Counts { bytes: 12, copies: 3, channels: 1 };

    #[test]
    fn good_result_has_counts_and_facts() {
        let facts = Ok(vec![("engine", "m2mf".to_owned())]);
        assert_eq!(
            line("copy", COUNTS, 1.5, &facts),
            "RESULT name=copy ok=true bytes=12 copies=3 channels=1 seconds=1.500 engine=m2mf"
        );
    }

    #[test]
    fn objects_hold_the_same() {
        let facts = Ok(vec![("size", "64x64".to_owned()), ("init_us", "17".to_owned())]);
        assert_eq!(
            object("madd", COUNTS, 1.5, &facts).to_string(),
            r#"{"bytes":12,"channels":1,"copies":3,"init_us":17,"name":"madd","ok":true,"seconds":1.5,"size":"64x64"}"#
        );
        let bad = object("madd", COUNTS, 1.5, &Err(anyhow::anyhow!("wrong")));
        assert_eq!((&bad["ok"], &bad["error"]), (&json!(false), &json!("wrong")));
    }

    #[test]
    fn ends_line_lists_intervals_between_ends() {
        assert_eq!(line_of_ends(&[5_000_999, 5_001_000, 7_000_000]), "ENDS at_us=5000 after_us=1,1999");
        assert_eq!(line_of_ends(&[1_234]), "ENDS at_us=1 after_us=");
    }

    #[test]
    fn bad_result_ends_with_the_quoted_error_on_one_line() {
        let outcome = Err(anyhow::anyhow!("byte \"3\"\nis wrong").context("copying"));
        let line = line("copy", COUNTS, 0.0, &outcome);
        assert!(line.starts_with("RESULT name=copy ok=false bytes=12 "));
        assert!(line.ends_with(r#" error="copying: byte \"3\"\nis wrong""#), "{line}");
        assert_eq!(line.lines().count(), 1);
    }
}
