//! `cargo xtask package`: builds the Debian packages, and RPMs with the same files.
//!
//! Parts: `spec` (the packages), `recipe` (how to build a package), `symbols` (debug symbols), `tree` (file layout),
//! `rpm` (the other format), `check` (checks a finished package).
//!
//! Builds are reproducible: file timestamps equal the time of the last commit (or `SOURCE_DATE_EPOCH`), names are
//! sorted, and root owns all files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::run::{cargo, root, shown, target};

mod check;
mod recipe;
mod rpm;
mod spec;
mod symbols;
#[cfg(test)]
mod tests;
mod tree;

use recipe::Recipe;
use spec::{DAEMON, GDEV, GUEST, KUBERNETES, Spec};

/// Command-line options.
#[derive(Args)]
pub struct PackageArgs {
    /// Use the programs in this folder instead of building them in release mode.
    #[arg(long, value_name = "DIR")]
    binaries: Option<PathBuf>,
    /// Output folder; by default the folder `package` next to the builds.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Build the packages twice and also as RPMs, and check their contents.
    #[arg(long)]
    check: bool,
    /// Also build RPMs.
    #[arg(long)]
    rpm: bool,
    /// Build only the daemon's package, without its debug symbol package.
    #[arg(long)]
    daemon: bool,
    /// Do not compress the packages.
    #[arg(long)]
    fast: bool,
}

/// Builds the packages, and prints their paths. Returns true if they pass the checks.
pub fn run(args: &PackageArgs) -> Result<bool> {
    let binaries = match &args.binaries {
        Some(folder) => folder.clone(),
        None => {
            let packages = [
                "mediatord",
                "mediatorctl",
                "cuda-owner",
                "cuda-shim",
                "cuda-worker",
                "cuda-guest",
                "render-node",
                "slurm-plugin",
                "fleet-dra",
                "fleet-kubevirt",
                "gdev-c",
                "gdev-driver-api",
                "gdev-crypt",
            ];
            let mut build = cargo(&["build", "--release"]);
            build.args(packages.map(|name| format!("--package={name}")));
            if !shown(&mut build)? {
                bail!("the programs do not build");
            }
            target().join("release")
        }
    };
    let out = args.out.clone().unwrap_or_else(|| target().join("package"));
    let recipe = Recipe { binaries, version: env!("CARGO_PKG_VERSION").to_owned(), epoch: epoch()?, fast: args.fast };
    let mut problems = Vec::new();
    let specs = if args.daemon { &[DAEMON][..] } else { &[DAEMON, KUBERNETES, GUEST, GDEV] };
    for spec in specs {
        problems.extend(made(spec, &recipe, args, &out)?);
    }
    for problem in &problems {
        eprintln!("package: {problem}");
    }
    if args.check {
        println!("check package ... {}", if problems.is_empty() { "ok" } else { "FAILED" });
    }
    Ok(problems.is_empty())
}

/// Builds a package in all requested formats, and prints the paths. Returns the problems found by the checks.
fn made(spec: &Spec, recipe: &Recipe, args: &PackageArgs, out: &Path) -> Result<Vec<String>> {
    let package = recipe.make(spec, out)?;
    println!("{}", package.display());
    let rpm = if args.rpm || args.check { Some(recipe.make_rpm(spec, out)?) } else { None };
    if let Some(rpm) = &rpm {
        println!("{}", rpm.display());
    }
    if !args.daemon {
        println!("{}", recipe.make_symbols(spec, out)?.display());
    }
    if !args.check {
        return Ok(Vec::new());
    }
    let again = recipe.make(spec, &out.join("again"))?;
    let mut problems = check::problems(spec, &package, &again)?;
    if let Some(rpm) = &rpm {
        problems.extend(rpm::problems(spec, rpm, &recipe.make_rpm(spec, &out.join("again"))?)?);
    }
    Ok(problems)
}

/// Returns the time of the last commit in seconds since 1970, unless the environment overrides it.
fn epoch() -> Result<u64> {
    let text = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(text) => text,
        Err(_) => {
            let text = output(Command::new("git").current_dir(root()).args(["log", "-1", "--format=%ct"]))?;
            String::from_utf8_lossy(&text).into_owned()
        }
    };
    text.trim().parse().context("set SOURCE_DATE_EPOCH to seconds since 1970")
}

/// Runs a program, and returns its standard output. Fails unless the program succeeds.
fn output(command: &mut Command) -> Result<Vec<u8>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {name}"))?;
    if !output.status.success() {
        bail!("{name} failed ({}):\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(output.stdout)
}

/// Returns the sorted names of a folder's entries.
fn names(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut names = entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<std::io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}
