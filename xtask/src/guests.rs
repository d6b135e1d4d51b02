//! Commands that need guests: the images; for the demo and the benchmarks, the daemon's release build.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::background::{Background, Priority};
use crate::load::BusyLoops;
use crate::run::{cargo, shown, target};

/// Tells the harness where `mediatord` and `mediatorctl` are.
pub const BIN_VARIABLE: &str = "GPU_MEDIATOR_BIN_DIR";

/// Benchmarks that boot nothing: no image and no daemon is made for them.
const WITHOUT_GUESTS: [&str; 9] =
    ["shadow", "compute", "sched-sim", "swap", "evict", "doorbells", "lockhold", "costs", "pictures"];

/// Starts to make all that guests need. The paravirtual drivers, which are compiled, take most of it.
pub fn images() -> Background {
    Background::start(Priority::Equal, || {
        let made = images::ensure_all(&images::Progress::stderr(), false).map(drop);
        made.context("what the guests need could not be made")
    })
}

/// Makes the images and builds the daemon for release; returns the folder with its programs.
fn release() -> Result<PathBuf> {
    images::ensure(&images::Progress::stderr()).context("what the guests need could not be made")?;
    if !shown(&mut cargo(&["build", "--release", "--package", "mediatord", "--package", "mediatorctl", "--bins"]))? {
        bail!("mediatord does not build");
    }
    // What a machine of `tests::nest` gets beside them.
    if !shown(&mut cargo(&["build", "--release", "--package", "rig", "--examples"]))? {
        bail!("the programs of the rig do not build");
    }
    Ok(target().join("release"))
}

/// Runs the demo; says whether all was verified.
pub fn demo(args: &[String]) -> Result<bool> {
    let mut command = program("demo")?;
    shown(command.args(args))
}

/// Wishes of the caller of a benchmark.
pub struct Wishes {
    /// File for the figures.
    pub json: Option<PathBuf>,
    pub seconds: Option<u64>,
    pub rounds: Option<u32>,
    pub only: Option<String>,
    /// Makes every benchmark in a file of its own, in the folder that `json` is.
    pub all: bool,
    /// Keeps what the file has.
    pub resume: bool,
    /// Busy loops beside it.
    pub beside_load: u32,
    /// Folder with another build's `mediatord` and `mediatorctl`, which are measured instead of this one's.
    pub programs: Option<PathBuf>,
}

/// Runs the benchmarks; says whether they could be made.
pub fn bench(name: Option<&str>, wishes: &Wishes) -> Result<bool> {
    let Wishes { json, seconds, rounds, only, all, resume, beside_load, programs } = wishes;
    if name == Some("cuda") {
        return crate::cuda::bench(json.as_deref());
    }
    if name == Some("neighbours") {
        return crate::cuda::bench_neighbours(wishes);
    }
    let mut command =
        if name.is_some_and(|name| WITHOUT_GUESTS.contains(&name)) { built("bench")? } else { program("bench")? };
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
        // The program may run in another folder than the user.
        let json = std::path::absolute(json).with_context(|| format!("path {}", json.display()))?;
        command.arg("--json").arg(json);
    }
    let _loops = BusyLoops::start(*beside_load);
    shown(&mut command)
}

/// A program of the crate `tests`, built for release, that will find what it needs.
fn program(name: &str) -> Result<Command> {
    let binaries = release()?;
    let mut command = built(name)?;
    command.env(BIN_VARIABLE, binaries);
    Ok(command)
}

/// A program of the crate `tests`, built for release.
fn built(name: &str) -> Result<Command> {
    if !shown(&mut cargo(&["build", "--release", "--package", "tests", "--bin", name]))? {
        bail!("the program {name} does not build");
    }
    Ok(Command::new(target().join("release").join(name)))
}
