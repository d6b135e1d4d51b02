//! Commands that need guests. They create the images, and build the daemon in release mode for the demo and the
//! benchmarks.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::background::{Background, Priority};
use crate::benches;
use crate::load::BusyLoops;
use crate::run::{cargo, shown, target};

/// Environment variable with the folder of `mediatord` and `mediatorctl`, for the test harness.
pub const BIN_VARIABLE: &str = "GPU_MEDIATOR_BIN_DIR";

/// Starts creating all guest images. Most of the time is spent compiling the paravirtual drivers.
pub fn images() -> Background {
    Background::start(Priority::Equal, || {
        let made = images::ensure_all(&images::Progress::stderr(), false).map(drop);
        made.context("the files for the guests could not be created")
    })
}

/// Creates the images, and builds the daemon, its tool and the rig's programs in release mode. Returns the program
/// folder.
fn release() -> Result<PathBuf> {
    images::ensure(&images::Progress::stderr()).context("the files for the guests could not be created")?;
    if !shown(&mut cargo(&["build", "--release", "--package", "mediatord", "--package", "mediatorctl", "--bins"]))? {
        bail!("mediatord does not build");
    }
    // The machines in `tests::nest` need these additional programs.
    if !shown(&mut cargo(&["build", "--release", "--package", "rig", "--examples"]))? {
        bail!("the programs of the rig do not build");
    }
    Ok(target().join("release"))
}

/// Runs the demo. Returns true if all results were verified.
pub fn demo(args: &[String]) -> Result<bool> {
    let mut command = program("tests", "demo")?;
    shown(command.args(args))
}

/// Options of a benchmark.
pub struct BenchOptions {
    /// File for the results, or their folder if `all` is true.
    pub json: Option<PathBuf>,
    pub seconds: Option<u64>,
    pub rounds: Option<u32>,
    pub only: Option<String>,
    /// True to run every benchmark, each with its own file in the folder `json`.
    pub all: bool,
    /// True to keep the results that the file already contains, and to measure only the missing ones.
    pub resume: bool,
    /// Number of concurrent busy loops.
    pub beside_load: u32,
    /// Folder with `mediatord` and `mediatorctl` from another build, which are measured instead of this build's.
    pub programs: Option<PathBuf>,
}

/// Runs the benchmark `name`, or all benchmarks if it is `None`. Returns true on success.
pub fn bench(name: Option<&str>, options: &BenchOptions) -> Result<bool> {
    let BenchOptions { json, seconds, rounds, only, all, resume, beside_load, programs } = options;
    if let Some(name) = name {
        benches::check(name)?;
    }
    if name == Some("cuda") {
        return crate::cuda::bench(json.as_deref());
    }
    if let Some(name @ ("cards" | "disk" | "gaps" | "neighbours" | "together" | "vcuda")) = name {
        return crate::cuda::bench_with_options(name, options);
    }
    let mut command =
        if name.is_some_and(benches::needs_no_guests) { built("bench", "bench")? } else { program("bench", "bench")? };
    command.args(name);
    if let Some(programs) = programs {
        let programs = std::path::absolute(programs).with_context(|| format!("path {}", programs.display()))?;
        if !programs.join("mediatord").is_file() || !programs.join("mediatorctl").is_file() {
            bail!(
                "{} has no `mediatord` and `mediatorctl`: build them for release, and name the folder",
                programs.display()
            );
        }
        command.env(BIN_VARIABLE, programs);
    }
    if let Some(seconds) = seconds {
        command.arg("--seconds").arg(seconds.to_string());
    }
    if let Some(rounds) = rounds {
        command.arg("--rounds").arg(rounds.to_string());
    }
    if let Some(only) = only {
        command.args(["--only", only]);
    }
    if *all {
        command.arg("--all");
    }
    if *resume {
        command.arg("--resume");
    }
    if let Some(json) = json {
        // The program may run in a different folder than this process.
        let json = std::path::absolute(json).with_context(|| format!("path {}", json.display()))?;
        command.arg("--json").arg(json);
    }
    let _loops = BusyLoops::start(*beside_load);
    shown(&mut command)
}

/// Creates the images, and builds a package's program and the programs that it starts in release mode. Returns the
/// command that runs it, with [`BIN_VARIABLE`] set.
fn program(package: &str, name: &str) -> Result<Command> {
    let binaries = release()?;
    let mut command = built(package, name)?;
    command.env(BIN_VARIABLE, binaries);
    Ok(command)
}

/// Builds a package's program in release mode. Returns the command that runs it.
fn built(package: &str, name: &str) -> Result<Command> {
    if !shown(&mut cargo(&["build", "--release", "--package", package, "--bin", name]))? {
        bail!("the program {name} does not build");
    }
    Ok(Command::new(target().join("release").join(name)))
}
