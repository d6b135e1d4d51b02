//! One entry point for set-up, demo, test, bench and lint: `cargo xtask COMMAND`.
//!
//! Parts:
//! - [`check`]: everything that needs no run: format, clippy, rustdoc, house lints ([`lints`], [`orphans`]), crate layers
//!   and licences ([`layers`]);
//! - [`suites`]: the test suites and their counts ([`tally`]); [`fuzz`] is one of them;
//! - [`guests`]: what needs guests: the images, the daemon's release build, demo and bench;
//! - [`mutations`]: mistakes made on purpose that the tests must notice;
//! - [`package`]: the Debian package;
//! - [`run`]: child processes.
//!
//! It does not install anything; the crate `images` makes what guests need in a cache folder.

mod check;
mod fuzz;
mod guests;
mod layers;
mod lints;
mod mutations;
mod orphans;
mod package;
mod run;
mod suites;
mod tally;

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
    /// Format, clippy, rustdoc, house lints, crate layers and licences.
    Check {
        /// Leave out what compiles or formats: only house lints, layers and licences, in a second.
        #[arg(long)]
        lints: bool,
    },
    /// Run one test suite, or all of them.
    Test(TestArgs),
    /// Measure, and print each metric beside its baseline and target.
    Bench {
        /// The group of metrics; all without it.
        name: Option<String>,
        /// Also write the metrics to this file.
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
    },
    /// Make mistakes in copies of the sources, and see that the tests notice each one.
    Mutations {
        /// Only those whose name contains this.
        filter: Option<String>,
    },
    /// Make the Debian package.
    Package(package::PackageArgs),
    /// Boot two guests on one card, run the copy workloads in both and verify every byte.
    Demo {
        /// Handed to the demo.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Make sure that QEMU, the guest kernels, the paravirtual drivers, the initramfs and Prometheus exist.
    Setup {
        /// Look the package versions up anew, even if older ones are in the cache.
        #[arg(long)]
        refresh: bool,
    },
}

#[derive(Args)]
struct TestArgs {
    /// The suite to run; all without it.
    #[arg(long)]
    suite: Option<suites::Suite>,
    /// How long each fuzz target runs, in seconds.
    #[arg(long, value_name = "N", default_value_t = 10)]
    fuzz_seconds: u32,
    /// Guest tests at the same time; by default one for each two CPUs.
    #[arg(long, value_name = "N")]
    guest_threads: Option<usize>,
    /// Run only the tests whose name contains this.
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Check { lints } => check::run(lints),
        Command::Test(args) => suites::run(&args),
        Command::Bench { name, json } => guests::bench(name.as_deref(), json.as_deref()),
        Command::Mutations { filter } => mutations::run(filter.as_deref()),
        Command::Package(args) => package::run(&args),
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

fn setup(refresh: bool) -> Result<()> {
    let images = images::ensure_with(&images::Progress::stderr(), refresh)?;
    println!("QEMU {}", images.qemu.version);
    for kernel in &images.kernels {
        images::ensure_paravirtual(&kernel.name, &images::Progress::stderr())?;
        println!("kernel {}: {}, stock and paravirtual", kernel.name, kernel.release);
    }
    images::ensure_monitoring(&images::Progress::stderr(), refresh)?;
    println!("Prometheus and its proxy");
    Ok(())
}
