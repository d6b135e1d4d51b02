//! Reports the times of a test run.

use std::time::Duration;

use crate::runner::{Failure, Taken};
use crate::suites::Ran;

/// Number of slowest tests shown.
const SHOWN_TESTS: usize = 10;

/// Prints the slowest tests, the failed tests with their reasons, and each suite's counts. The most important part
/// comes last.
pub fn print(suites: &[Ran]) {
    let mut taken: Vec<&Taken> = suites.iter().flat_map(|suite| &suite.outcome.taken).collect();
    taken.sort_by_key(|taken| std::cmp::Reverse(taken.elapsed));
    if taken.len() > 1 {
        println!("the slowest tests");
        for Taken { test, elapsed, cpu, .. } in taken.into_iter().take(SHOWN_TESTS) {
            println!("  {}  {test}", seconds(*elapsed, *cpu));
        }
    }
    for Failure { test, why, .. } in suites.iter().flat_map(|suite| &suite.outcome.failures) {
        println!("FAILED {test}");
        why.iter().for_each(|line| println!("    {line}"));
    }
    println!("suites");
    for Ran { name, outcome, elapsed, cpu } in suites {
        println!("  {name:8} {}  {}", seconds(*elapsed, *cpu), outcome.tally);
    }
}

fn seconds(elapsed: Duration, cpu: Duration) -> String {
    format!("{:7.1} s, CPU {:7.1} s", elapsed.as_secs_f64(), cpu.as_secs_f64())
}
