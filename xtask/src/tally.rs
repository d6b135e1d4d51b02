//! Test counts, and a parser for the output of test programs.

use std::fmt;
use std::ops::AddAssign;

/// Numbers of passed and failed tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of passed tests.
    pub passed: u64,
    /// Number of failed tests, plus the number of programs that exited without a result.
    pub failed: u64,
}

impl Tally {
    /// Returns the counts of one test.
    pub fn one(passed: bool) -> Self {
        Self { passed: u64::from(passed), failed: u64::from(!passed) }
    }

    /// Returns true if there were no failures.
    pub fn good(self) -> bool {
        self.failed == 0
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

/// Parses the output of `cargo test` line by line.
#[derive(Debug, Default)]
pub struct Reader {
    tally: Tally,
    running: bool,
}

impl Reader {
    /// Parses one line.
    pub fn line(&mut self, line: &str) {
        if line.starts_with("running ") && (line.ends_with(" tests") || line.ends_with(" test")) {
            // If the previous program printed no result, it crashed.
            self.lost();
            self.running = true;
        } else if let Some(result) = line.strip_prefix("test result: ") {
            self.tally += Tally { passed: count(result, " passed"), failed: count(result, " failed") };
            self.running = false;
        }
    }

    /// Returns the counts. A crashed program counts as one failure. A failure of cargo also counts as one, if there is
    /// no other failure.
    pub fn finish(mut self, success: bool) -> Tally {
        self.lost();
        if !success && self.tally.good() {
            self.tally.failed += 1;
        }
        self.tally
    }

    fn lost(&mut self) {
        self.tally.failed += u64::from(std::mem::take(&mut self.running));
    }
}

/// Returns the number that precedes `word`, or 0.
fn count(text: &str, word: &str) -> u64 {
    let before = text.split(word).next().unwrap_or_default();
    before.rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, success: bool) -> Tally {
        let mut reader = Reader::default();
        text.lines().for_each(|l| reader.line(l));
        reader.finish(success)
    }

    #[test]
    fn results_of_several_programs_add_up() {
        let text = "running 3 tests\ntest a ... ok\ntest result: ok. 3 passed; 0 failed; 0 ignored\n\
                    running 1 test\ntest result: FAILED. 0 passed; 1 failed; 0 ignored; finished in 0.1s\n";
        assert_eq!(read(text, false), Tally { passed: 3, failed: 1 });
    }

    #[test]
    fn a_program_that_crashed_is_a_failure() {
        let text = "running 3 tests\nrunning 1 test\ntest result: ok. 1 passed; 0 failed\n";
        assert_eq!(read(text, false), Tally { passed: 1, failed: 1 });
        assert_eq!(read("running 3 tests\n", false), Tally { passed: 0, failed: 1 });
    }

    #[test]
    fn compile_failure_counts_as_a_failure() {
        assert_eq!(read("", false), Tally { passed: 0, failed: 1 });
        assert_eq!(read("", true), Tally::default());
    }

    #[test]
    fn the_final_line_is_the_promised_one() {
        assert_eq!(Tally { passed: 12, failed: 0 }.to_string(), "12 passed, 0 failed");
    }
}
