//! Mistakes put into the code on purpose, each of which the tests must notice: `cargo xtask mutations`.
//!
//! Each one takes away something that isolation rests on: a bound, one 4 KiB piece of a check, a flush. The sources are
//! copied, one mistake is made in the copy, and the tests of that crate must fail there (by a failed test, not by failing
//! to build). Only pure crates are mutated, so that this takes a minute or two.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::run::{cargo, root, target};
use crate::tally::Reader;

/// A mistake.
struct Mutation {
    name: &'static str,
    /// What it takes away.
    what: &'static str,
    package: &'static str,
    file: &'static str,
    /// Found exactly once in the file.
    from: &'static str,
    to: &'static str,
}

const MUTATIONS: [Mutation; 0] = [];

/// Makes each mistake in turn; says whether all were noticed.
pub fn run(filter: Option<&str>) -> Result<bool> {
    let copy = copy_sources()?;
    // Without a mistake the tests pass, else a failure would say nothing.
    let mut packages: Vec<_> = MUTATIONS.iter().map(|mutation| mutation.package).collect();
    packages.sort_unstable();
    packages.dedup();
    for package in packages {
        ensure!(tests_pass(&copy, package)?, "the tests of {package} fail without any mutation");
    }
    let mut missed = 0;
    for mutation in MUTATIONS.iter().filter(|mutation| filter.is_none_or(|filter| mutation.name.contains(filter))) {
        let Mutation { name, what, package, file, from, to } = mutation;
        let path = copy.join(file);
        let text = fs::read_to_string(&path).with_context(|| format!("mutation {name}: {file}"))?;
        let count = text.matches(from).count();
        ensure!(count == 1, "mutation {name}: {file} has {count} places like `{from}`, one is expected");
        fs::write(&path, text.replacen(from, to, 1))?;
        let passed = tests_pass(&copy, package);
        fs::write(&path, &text)?;
        let noticed = !passed?;
        println!("mutation {name}: {what}: {}", if noticed { "noticed" } else { "MISSED" });
        missed += u32::from(!noticed);
    }
    println!("{} mutations, {missed} missed", MUTATIONS.len());
    Ok(missed == 0)
}

/// Whether the tests of a package pass in the copy. An error if it does not build.
fn tests_pass(copy: &Path, package: &str) -> Result<bool> {
    let cargo = |args: &[&str]| {
        let mut command = cargo(args);
        command.current_dir(copy).env("CARGO_TARGET_DIR", target().join("mutations-build"));
        command
    };
    let built = cargo(&["test", "--quiet", "--package", package, "--no-run"]).status()?;
    ensure!(built.success(), "{package} does not build with the mutation");
    // One failure is enough.
    let output = cargo(&["test", "--package", package, "--", "--test-threads=2"]).stderr(Stdio::null()).output()?;
    let mut reader = Reader::default();
    String::from_utf8_lossy(&output.stdout).lines().for_each(|line| reader.line(line));
    Ok(reader.finish(output.status.success()).good())
}

/// Copies what git tracks, as it is in the working tree.
fn copy_sources() -> Result<PathBuf> {
    let copy = target().join("mutations");
    if copy.exists() {
        fs::remove_dir_all(&copy).with_context(|| format!("cannot remove {}", copy.display()))?;
    }
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .context("git ls-files")?;
    if !listed.status.success() {
        bail!("git ls-files: {}", String::from_utf8_lossy(&listed.stderr));
    }
    for name in listed.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let name = Path::new(std::str::from_utf8(name).context("a file name that is no UTF-8")?);
        let (from, to) = (root().join(name), copy.join(name));
        // What is deleted but not committed yet is listed all the same.
        if from.is_file() {
            fs::create_dir_all(to.parent().context("a file without a folder")?)?;
            fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        }
    }
    Ok(copy)
}
