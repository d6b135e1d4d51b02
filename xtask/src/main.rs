//! The entry point for setup, demo, tests, benchmarks and lints: `cargo xtask COMMAND`.
//!
//! Parts:
//! - [`check`]: all checks that do not run tests: format, clippy, rustdoc, house lints ([`lints`], [`orphans`],
//!   [`rooms`], [`counts`], [`language`]), crate layers and licences ([`layers`])
//! - [`suites`]: the test suites, with their counts ([`tally`]) and [`times`]; [`programs`] builds their programs,
//!   [`runner`] runs them, [`watch`] kills hanging tests, [`fuzz`] is one of the suites, and [`background`] runs
//!   preparations in parallel
//! - [`guests`]: commands that need guests: the creation of images, the demo, and the benchmarks
//! - [`mutations`]: mutation testing with deliberate mistakes that the tests must detect
//! - [`load`]: busy loops during tests or measurements
//! - `docs`: parts of the documentation that are generated from code (the `doc-pages` crate)
//! - [`package`]: the Debian packages
//! - [`run`]: child processes
//!
//! The program does not install anything. The `images` crate creates the guest images in a cache folder.

mod background;
mod benches;
mod check;
mod counts;
mod cuda;
mod fuzz;
mod guests;
mod language;
mod layers;
mod lints;
mod load;
mod mutations;
mod orphans;
mod package;
mod programs;
mod python;
mod release;
mod rooms;
mod run;
mod runner;
mod suites;
mod tally;
mod times;
mod watch;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Set-up, demo, test, bench and lint of gpu-mediator")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Checks format, clippy, rustdoc, house lints, crate layers and licences.
    Check {
        /// Skip compilation and formatting: run only house lints, layers and licences, which takes a second.
        #[arg(long)]
        lints: bool,
    },
    /// Print the number of words that make comments hard to read, per package.
    Language {
        /// Write decreased counts to the budget file `xtask/language.toml`.
        #[arg(long)]
        lower: bool,
        /// Print this number of sentences from comments, chosen by the seed, for human review.
        #[arg(long, value_name = "COUNT", conflicts_with = "lower")]
        sample: Option<usize>,
        /// Seed of the sample: the same seed and sources yield the same sentences.
        #[arg(long, default_value_t = 1, requires = "sample")]
        seed: u64,
    },
    /// Run one test suite, or all of them.
    Test(TestArgs),
    /// Run benchmarks, and print each metric with its baseline and target.
    Bench {
        /// Name of a benchmark; all if omitted.
        name: Option<String>,
        /// Only print the benchmarks' names, their requirements, and the figures that they reproduce.
        #[arg(long, exclusive = true)]
        list: bool,
        /// Run every benchmark, each with its own file in the folder given by `--json`.
        #[arg(long, requires = "json", conflicts_with_all = ["name", "only"])]
        all: bool,
        /// Also write the metrics to this file.
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// Measured time of each part of `isolation` in seconds.
        #[arg(long, value_name = "N")]
        seconds: Option<u64>,
        /// Number of rounds of each part of `pv`.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        rounds: Option<u32>,
        /// Run only attacks of `isolation` (or other parts) whose names contain one of these comma-separated words.
        #[arg(long, value_name = "PART")]
        only: Option<String>,
        /// Keep the results in the file given by `--json`, and measure the missing ones.
        #[arg(long, requires = "json")]
        resume: bool,
        /// Measure while this number of busy loops run.
        #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=i64::from(load::MAX_LOOPS)))]
        beside_load: u32,
        /// Measure `mediatord` and `mediatorctl` in this folder, built from another commit, with this commit's
        /// benchmark.
        #[arg(long, value_name = "FOLDER")]
        programs: Option<PathBuf>,
    },
    /// Make deliberate mistakes in a copy of the sources, and check that the tests detect each mistake.
    Mutations {
        /// Run only mutations whose name contains one of these words, or whose package has one of these names.
        filters: Vec<String>,
        /// Skip mistakes that were detected in earlier runs.
        #[arg(long)]
        resume: bool,
        /// Number of mistakes to test concurrently. The tests without a mistake run under the same load.
        #[arg(long, value_name = "N", default_value_t = 1)]
        jobs: usize,
    },
    /// Write the parts of the documentation that are generated from code: tables and pictures.
    Docs,
    /// Build the Debian packages.
    Package(package::PackageArgs),
    /// Generate the Python client from the API description, and pack it as a wheel. Print the path of the wheel, and
    /// the folder with the packages that it needs.
    PythonClient {
        /// Output folder of the wheel.
        #[arg(long, value_name = "FOLDER")]
        out: Option<std::path::PathBuf>,
    },
    /// Print the folder of the Python packages that render and validate the Helm chart, and install them if necessary.
    HelmTools,
    /// Boot two guests on one card, run the copy workloads in both, and verify every byte.
    Demo {
        /// Arguments of the demo.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Make sure that QEMU, the guest kernels, the paravirtual drivers, the initramfs and Prometheus exist.
    Setup {
        /// Resolve the package versions again, even if older versions are cached.
        #[arg(long)]
        refresh: bool,
    },
}

#[derive(Args)]
struct TestArgs {
    /// The suite to run; all suites by default.
    #[arg(long)]
    suite: Option<suites::Suite>,
    /// Time per fuzz target in seconds.
    #[arg(long, value_name = "N", default_value_t = 10)]
    fuzz_seconds: u32,
    /// Number of CPUs for concurrent guest tests; by default all CPUs, but at most 8. A test may occupy several of
    /// them.
    #[arg(long, value_name = "N")]
    guest_threads: Option<usize>,
    /// Test with this number of concurrent busy loops.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=i64::from(load::MAX_LOOPS)))]
    beside_load: u32,
    /// Run at full scale: also run the tests in modules named `full`, and run all other tests with their full
    /// workloads.
    #[arg(long)]
    full: bool,
    /// Run only tests whose names contain this text.
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Check { lints } => check::run(lints),
        Command::Language { sample: Some(count), seed, .. } => sample_language(count, seed).map(|()| true),
        Command::Language { lower, .. } => report_language(lower).map(|()| true),
        Command::Test(args) => suites::run(&args),
        Command::Bench { list: true, .. } => {
            print!("{}", benches::list());
            Ok(true)
        }
        Command::Bench { name, list: false, all, json, seconds, rounds, only, resume, beside_load, programs } => {
            let options = guests::BenchOptions { json, seconds, rounds, only, all, resume, beside_load, programs };
            guests::bench(name.as_deref(), &options)
        }
        Command::Mutations { filters, resume, jobs } => mutations::run(&filters, resume, jobs),
        Command::Docs => write_pages(),
        Command::Package(args) => package::run(&args),
        Command::PythonClient { out } => python::client(out.as_deref()),
        Command::HelmTools => python::helm(),
        Command::Demo { args } => guests::demo(&args),
        Command::Setup { refresh } => setup(refresh).map(|()| true),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn sample_language(count: usize, seed: u64) -> Result<()> {
    let files = lints::files(&run::root())?;
    language::sample(&files, count, seed).iter().for_each(|sentence| println!("{sentence}"));
    Ok(())
}

fn report_language(lower: bool) -> Result<()> {
    language::report(&layers::metadata("Cargo.toml")?, &lints::files(&run::root())?, lower)
}

/// Runs the tests for generated parts of the documentation in write mode.
fn write_pages() -> Result<bool> {
    check::generated_pages(true)
}

fn setup(refresh: bool) -> Result<()> {
    let images = images::ensure_all(&images::Progress::stderr(), refresh)?;
    println!("QEMU {}", images.qemu.version);
    for kernel in &images.kernels {
        println!("kernel {}: {}, stock and paravirtual", kernel.name, kernel.release);
    }
    println!("Prometheus and its proxy, and a Debian system");
    Ok(())
}
