//! `cargo xtask test`: the suites, one after the other, each with its counts.

use std::thread::available_parallelism;

use anyhow::Result;
use clap::ValueEnum;

use crate::run::{cargo, lines, root};
use crate::tally::{Reader, Tally};
use crate::{TestArgs, fuzz, guests};

/// A test suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// What needs no guest: unit, property and integration tests of every crate.
    Unit,
    /// Real guests that behave.
    Guest,
    /// Guests and clients that do not.
    Hostile,
    /// Faults, kills and restarts at any time.
    Chaos,
    /// Fuzz targets, each for a bounded time.
    Fuzz,
}

impl Suite {
    fn name(self) -> String {
        self.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default()
    }
}

/// Runs the suite that was asked for, or all; says whether nothing failed.
pub fn run(args: &TestArgs) -> Result<bool> {
    let suites = args.suite.map_or_else(|| Suite::value_variants().to_vec(), |s| vec![s]);
    let mut total = Tally::default();
    let mut results = Vec::new();
    for suite in &suites {
        println!("suite {}", suite.name());
        // What keeps one suite from running is its failure, and the others go on.
        let tally = run_one(*suite, args).unwrap_or_else(|error| {
            eprintln!("error: suite {}: {error:#}", suite.name());
            Tally::one(false)
        });
        println!("{tally}");
        results.push((suite.name(), tally));
        total += tally;
    }
    if suites.len() > 1 {
        println!("all suites");
        for (name, tally) in results {
            println!("  {name:8} {tally}");
        }
        println!("{total}");
    }
    Ok(total.good())
}

fn run_one(suite: Suite, args: &TestArgs) -> Result<Tally> {
    match suite {
        Suite::Unit => {
            let mut command = cargo(&["test", "--workspace", "--no-fail-fast"]);
            cargo_test(command.args(args.filter.iter()))
        }
        Suite::Fuzz => fuzz::run(args),
        Suite::Guest | Suite::Hostile | Suite::Chaos => guest_suite(&suite.name(), args),
    }
}

/// The suites with guests: one integration test each, in `tests/tests`.
fn guest_suite(name: &str, args: &TestArgs) -> Result<Tally> {
    anyhow::ensure!(root().join(format!("tests/tests/{name}.rs")).exists(), "tests/tests/{name}.rs does not exist");
    let binaries = guests::prepare()?;
    // Of the whole workspace, so that what the unit suite has built is built with the same features.
    let mut command = cargo(&["test", "--workspace", "--features", "tests/vm", "--test", name, "--no-fail-fast"]);
    command.env(guests::BIN_VARIABLE, binaries);
    // An emulated guest uses a CPU, and the daemon and the software card another.
    let cpus = available_parallelism().map_or(1, usize::from);
    let threads = args.guest_threads.unwrap_or((cpus / 2).clamp(1, 8));
    command.args(args.filter.iter()).arg("--").arg(format!("--test-threads={threads}"));
    cargo_test(&mut command)
}

fn cargo_test(command: &mut std::process::Command) -> Result<Tally> {
    let mut reader = Reader::default();
    let status = lines(command, |line| reader.line(line))?;
    Ok(reader.finish(status.success()))
}
