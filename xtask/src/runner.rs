//! Runs tests in parallel, each in its own process, and measures each of them.
//!
//! With separate processes, the runner can measure each test's duration and the CPU time of all its processes. The CPU
//! time is comparable even on a busy host. Tests of different programs can also run concurrently.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::ops::AddAssign;
use std::os::unix::fs::FileExt;
use std::process::Child;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use crate::programs::Program;
use crate::tally::Tally;
use crate::watch;

/// Number of ticks per second in the CPU times of `/proc`. This is the same on every Linux.
const TICKS_PER_SECOND: u64 = 100;

/// Maximum number of lines repeated at the end of a run after the first line of each panic or error.
const REASON_LINES: usize = 6;
/// Maximum number of repeated lines per test.
const REASONS_LINES: usize = 20;
/// Maximum number of characters per repeated line.
const REASON_CHARS: usize = 400;

/// Prefix of output lines that are shown even if the test passes.
const REPORT: &str = "REPORT ";

/// A test, and the program that contains it.
pub struct Test<'a> {
    pub program: &'a Program,
    pub name: String,
    pub load: Load,
}

/// CPUs that a test uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Uses this number of CPUs, or all CPUs of the test run if it has fewer.
    Processors(usize),
    /// Uses almost no CPU time, because the test mostly waits. One such test at a time runs in addition to the other
    /// tests.
    Waits,
}

/// Measured times of a test.
#[derive(Clone, Debug)]
pub struct Taken {
    /// Package, target and name of the test.
    pub test: String,
    /// Target of the program. For an integration test, this is the name of its suite.
    pub target: String,
    pub passed: bool,
    /// Elapsed time.
    pub elapsed: Duration,
    /// CPU time of the test process and of the children that it reaped.
    pub cpu: Duration,
}

/// Outcome of several tests.
#[derive(Debug, Default)]
pub struct Outcome {
    pub tally: Tally,
    pub taken: Vec<Taken>,
    pub failures: Vec<Failure>,
}

/// A failed test, and the reason.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Package, target and name of the test.
    pub test: String,
    /// Target of the program.
    pub target: String,
    /// Output lines that explain the failure.
    pub why: Vec<String>,
}

impl AddAssign for Outcome {
    fn add_assign(&mut self, more: Self) {
        self.tally += more.tally;
        self.taken.extend(more.taken);
        self.failures.extend(more.failures);
    }
}

impl Outcome {
    /// Returns the part of the outcome for one target's programs.
    pub fn of_target(&self, target: &str) -> Self {
        let taken: Vec<Taken> = self.taken.iter().filter(|taken| taken.target == target).cloned().collect();
        let mut tally = Tally::default();
        taken.iter().for_each(|taken| tally += Tally::one(taken.passed));
        let failures = self.failures.iter().filter(|failure| failure.target == target).cloned().collect();
        Self { tally, taken, failures }
    }

    /// Returns the sum of the tests' CPU times.
    pub fn cpu(&self) -> Duration {
        self.taken.iter().map(|taken| taken.cpu).sum()
    }
}

/// Test queue, and the number of free CPUs. Tests start in order, except that tests that mostly wait may overtake tests
/// that need CPUs.
struct Queue {
    waiting: VecDeque<usize>,
    working: VecDeque<(usize, usize)>,
    free: usize,
    /// Set unless a test that mostly waits is running.
    quiet: bool,
}

impl Queue {
    fn new(tests: &[Test<'_>], processors: usize) -> Self {
        let (mut waiting, mut working) = (VecDeque::new(), VecDeque::new());
        for (at, test) in tests.iter().enumerate() {
            match test.load {
                Load::Waits => waiting.push_back(at),
                Load::Processors(count) => working.push_back((at, count.clamp(1, processors))),
            }
        }
        Self { waiting, working, free: processors, quiet: true }
    }

    /// Removes the next test that may start now. Returns its index and its number of CPUs.
    fn start(&mut self) -> Option<(usize, usize)> {
        if let Some(at) = self.quiet.then(|| self.waiting.pop_front()).flatten() {
            self.quiet = false;
            return Some((at, 0));
        }
        let next = self.working.pop_front_if(|(_, count)| *count <= self.free)?;
        self.free -= next.1;
        Some(next)
    }

    /// Releases the CPUs of a finished test.
    fn end(&mut self, processors: usize) {
        self.free += processors;
        self.quiet |= processors == 0;
    }

    fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.working.is_empty()
    }
}

/// Parameters of a test run.
#[derive(Clone, Copy, Debug)]
pub struct Manner<'a> {
    /// Total number of CPUs for tests.
    pub at_once: usize,
    /// Time limit per test. A test that exceeds it is killed and fails. Like all test time limits, it is multiplied by
    /// `GPU_MEDIATOR_TIME_SCALE`.
    pub limit: Duration,
    /// Additional environment variables for the tests.
    pub variables: &'a [(&'a str, &'a OsStr)],
    /// True to run at full scale, through [`FULL_VARIABLE`].
    pub full: bool,
}

/// Environment variable that makes tests run their full workloads. `tests::scale` reads it.
const FULL_VARIABLE: &str = "GPU_MEDIATOR_FULL";

/// Returns true if a test runs only at full scale, because it is in a module named `full`.
pub fn is_full_scale(test: &str) -> bool {
    test.split("::").any(|module| module == "full")
}

/// Runs tests. Prints one line per test, the tests' reports, and the output of failed tests.
pub fn run(tests: &[Test<'_>], manner: &Manner<'_>) -> Result<Outcome> {
    let at_once = manner.at_once.max(1);
    let (queue, ended) = (Mutex::new(Queue::new(tests, at_once)), Condvar::new());
    let outcome = Mutex::new(Outcome::default());
    let next = || {
        let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match queue.start() {
                Some(next) => return Some(next),
                None if queue.is_empty() => return None,
                None => queue = ended.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        }
    };
    let work = || -> Result<()> {
        while let Some((at, processors)) = next() {
            let test = &tests[at];
            let ran = run_one(test, manner);
            queue.lock().unwrap_or_else(PoisonError::into_inner).end(processors);
            ended.notify_all();
            let (passed, taken, output) = ran?;
            let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
            let result = if passed { "ok" } else { "FAILED" };
            println!(
                "test {} ... {result} ({:.2} s, CPU {:.2} s)",
                taken.test,
                taken.elapsed.as_secs_f64(),
                taken.cpu.as_secs_f64()
            );
            if !passed {
                println!("{output}");
                let (test, target) = (taken.test.clone(), taken.target.clone());
                outcome.failures.push(Failure { test, target, why: reasons(&output) });
            }
            // Show a test's reports, such as its hardware and scale, even if it passes.
            let begin = format!("test {} ... ", test.name);
            let lines = output.lines().map(|line| line.strip_prefix(&begin).unwrap_or(line));
            lines.filter(|line| passed && line.starts_with(REPORT)).for_each(|line| println!("  {line}"));
            outcome.tally += Tally::one(passed);
            outcome.taken.push(taken);
        }
        Ok(())
    };
    thread::scope(|scope| {
        // One additional worker runs the tests that mostly wait.
        let workers: Vec<_> = (0..=at_once).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().map_err(|_| anyhow!("a thread that runs tests has panicked"))?)
    })?;
    Ok(outcome.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn run_one(test: &Test<'_>, manner: &Manner<'_>) -> Result<(bool, Taken, String)> {
    let Test { program, name, load: _ } = test;
    let output = tempfile::tempfile().context("a file for a test's output")?;
    let mut command = program.command();
    command.envs(manner.variables.iter().copied());
    if manner.full {
        command.env(FULL_VARIABLE, "1");
    } else {
        command.env_remove(FULL_VARIABLE);
    }
    // Do not capture output, because the output of a killed test matters most, and a passing test may also print a
    // report.
    command.args([name, "--exact", "--test-threads=1", "--nocapture"]);
    // Use a file, because a pipe would stay open while a process left behind by a test is running.
    command.stdout(output.try_clone()?).stderr(output.try_clone()?);
    let began = Instant::now();
    let mut child = command.spawn().with_context(|| format!("cannot start the test {name}"))?;
    let limit = watch::scaled(manner.limit);
    let ended = watch::ends_within(&child, limit)?;
    let stood = if ended { String::new() } else { watch::end(child.id()) };
    let cpu = cpu_at_end(&child)?;
    let status = child.wait().with_context(|| format!("waiting for the test {name}"))?;
    let test = format!("{}/{} {name}", program.package, program.target);
    let elapsed = began.elapsed();
    let mut text = written(&output).context("reading a test's output")?;
    if !ended {
        text.push_str(&format!(
            "it was still running after {} s, and was killed; its threads:\n{stood}",
            limit.as_secs()
        ));
    }
    let passed = status.success() && began_one(&text);
    if !passed && !status.success() {
        text.push_str(&format!("{status}\n"));
    }
    Ok((passed, Taken { test, target: program.target.clone(), passed, elapsed, cpu }, text))
}

/// Returns the current contents of a file that processes may still be writing to.
///
/// These processes share the file offset, so this function must not change it. Otherwise, a process left behind by a
/// test would overwrite the beginning of the file.
pub fn written(file: &File) -> io::Result<String> {
    let mut bytes = vec![0; usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX)];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns true if a program reports that it runs exactly one test. Given an unknown name, it would run no test and
/// succeed.
///
/// This report precedes all output of the test's threads. That output may be mixed with the program's last lines.
fn began_one(output: &str) -> bool {
    output.trim_start().starts_with("running 1 test\n")
}

/// Returns true if a line starts the reason for a failure. The reason may follow the test's name on the same line.
fn is_reason(line: &str) -> bool {
    line.contains(" panicked at ") || line.rsplit(" ... ").next().is_some_and(|line| line.starts_with("Error: "))
}

/// Extracts the reasons for a failure from a test's output: the first lines of each panic or error, without its
/// backtrace, and the exit status.
fn reasons(output: &str) -> Vec<String> {
    let mut lines = output.lines();
    let mut found = Vec::new();
    while let Some(line) = lines.find(|line| is_reason(line)) {
        let more = lines.clone().take_while(|line| !line.to_ascii_lowercase().starts_with("stack backtrace"));
        found.extend(std::iter::once(line).chain(more.take(REASON_LINES)).filter(|line| !line.is_empty()));
    }
    found.extend(output.lines().rev().find(|line| line.starts_with("exit status: ") || line.starts_with("signal: ")));
    found.into_iter().take(REASONS_LINES).map(|line| line.chars().take(REASON_CHARS).collect()).collect()
}

/// Waits for `child` to exit without reaping it. Returns its CPU time, including that of its reaped children.
fn cpu_at_end(child: &Child) -> Result<Duration> {
    let pid = Pid::from_child(child);
    waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).context("waiting for a test")?;
    let path = format!("/proc/{}/stat", child.id());
    let stat = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    cpu_of(&stat).with_context(|| format!("{path} has no CPU times: {stat}"))
}

/// Returns the CPU time of this process's reaped children.
pub fn cpu_of_children() -> Duration {
    fs::read_to_string("/proc/self/stat").ok().and_then(|stat| ticks(&stat, 2)).unwrap_or_default()
}

/// Parses the CPU time of a process and its reaped children from a line of `/proc/PID/stat`.
fn cpu_of(stat: &str) -> Option<Duration> {
    ticks(stat, 0)
}

/// Returns the sum of a process's CPU times starting at index `first`: its user and system time (0 and 1), and those of
/// its reaped children (2 and 3).
fn ticks(stat: &str, first: usize) -> Option<Duration> {
    // After the program name, which may contain any characters, eleven fields precede the times.
    let fields = stat.rsplit_once(") ")?.1.split(' ').skip(11).take(4);
    let ticks: Vec<u64> = fields.map(|field| field.parse().ok()).collect::<Option<_>>()?;
    let ticks: u64 = ticks.get(first..).filter(|ticks| !ticks.is_empty())?.iter().sum();
    Some(Duration::from_millis(ticks * 1000 / TICKS_PER_SECOND))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn reading_output_keeps_its_beginning_while_a_process_writes() {
        let output = tempfile::tempfile().expect("a file");
        let mut left = output.try_clone().expect("a descriptor");
        left.write_all(b"running 1 test\n").expect("written");
        assert_eq!(written(&output).expect("readable"), "running 1 test\n");
        left.write_all(b"log\n").expect("written");
        assert_eq!(written(&output).expect("readable"), "running 1 test\nlog\n");
    }

    #[test]
    fn reasons_are_reported_without_surrounding_output() {
        assert!(is_reason("test a::b ... Error: no port") && !is_reason("an Error: of theirs"));
        let output = "running 1 test\nnoise\nthread 'a' (7) panicked at src/a.rs:1:2:\nboth are 3\nstack backtrace:\n   0: x\n\
                      Error: no port\n\nCaused by:\n    it is taken\n\nStack backtrace:\n   0: y\nexit status: 101\n";
        let told = ["thread 'a' (7) panicked at src/a.rs:1:2:", "both are 3", "Error: no port", "Caused by:"];
        let told = told.into_iter().chain(["    it is taken", "exit status: 101"]);
        assert_eq!(reasons(output), told.collect::<Vec<_>>());
        assert_eq!(reasons(&"Error: a\n".repeat(99)).len(), REASONS_LINES);
    }

    #[test]
    fn output_that_a_thread_tears_is_still_that_of_one_test() {
        assert!(began_one(
            "\nrunning 1 test\ntest a ... 4: serve\nok\n >test result: ::okbalance\n. 1 passed; 0 failed\n"
        ));
        assert!(!began_one("\nrunning 0 tests\n\ntest result: ok. 0 passed; 0 failed; 0 ignored\n"));
        assert!(!began_one(""));
    }

    #[test]
    fn tests_start_in_order_and_one_that_waits_overtakes() {
        let mut queue =
            Queue { waiting: [7, 8].into(), working: [(0, 1), (1, 2), (2, 1)].into(), free: 2, quiet: true };
        assert_eq!((queue.start(), queue.start(), queue.start()), (Some((7, 0)), Some((0, 1)), None));
        queue.end(1);
        assert_eq!((queue.start(), queue.start()), (Some((1, 2)), None));
        queue.end(0);
        assert_eq!((queue.start(), queue.start()), (Some((8, 0)), None));
        queue.end(2);
        assert_eq!((queue.start(), queue.start(), queue.is_empty()), (Some((2, 1)), None, true));
    }

    #[test]
    fn module_full_marks_full_scale_tests() {
        assert!(is_full_scale("upgrade::full::guest_of_6_1_is_upgraded") && is_full_scale("full::boots"));
        assert!(!is_full_scale("upgrade::guest_is_upgraded_in_full") && !is_full_scale("fuller::boots"));
    }

    #[test]
    fn cpu_times_are_those_of_a_process_and_its_children() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 1 2 3 4 250 50 100 25 20 0 1 0 9 0 0";
        assert_eq!(cpu_of(stat), Some(Duration::from_millis(4250)));
        assert_eq!(ticks(stat, 2), Some(Duration::from_millis(1250)));
        assert_eq!(cpu_of("7 (a) S 1"), None);
    }
}
