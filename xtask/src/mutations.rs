//! Mistakes put into the code on purpose, each of which the tests must notice: `cargo xtask mutations`.
//!
//! Each one takes away something that isolation rests on: a bound, one 4 KiB piece of a check, a flush. The sources are
//! copied, one mistake is made in the copy, and the tests of that crate must fail there (by a failed test, not by failing
//! to build). Only crates are mutated whose tests need no guest, and only those of their tests run that are meant to notice,
//! so that this takes some minutes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::run::{cargo, root, target};
use crate::tally::{Reader, Tally};

mod list;

use list::mutations;

/// A mistake.
struct Mutation {
    name: &'static str,
    /// The check that it takes away.
    what: &'static str,
    /// Package whose tests are to notice; the file may be of a crate below.
    package: &'static str,
    file: &'static str,
    /// Found exactly once in the file.
    from: &'static str,
    to: &'static str,
    /// Only tests whose name contains this run; all with an empty one.
    tests: &'static str,
}

/// Makes each mistake in turn; says whether all were noticed.
pub fn run(filters: &[String]) -> Result<bool> {
    let is_like = |mutation: &Mutation, filter: &str| mutation.name.contains(filter) || mutation.package == filter;
    for filter in filters {
        ensure!(
            mutations().any(|mutation| is_like(mutation, filter)),
            "no mutation has a name or package like `{filter}`"
        );
    }
    let wanted: Vec<_> = mutations()
        .filter(|mutation| filters.is_empty() || filters.iter().any(|filter| is_like(mutation, filter)))
        .collect();
    let copy = copy_sources()?;
    // Without a mistake the same tests pass, else a failure would say nothing.
    let tests: BTreeSet<_> = wanted.iter().map(|mutation| (mutation.package, mutation.tests)).collect();
    for (package, filter) in tests {
        let tally = test(&copy, package, filter)?;
        ensure!(tally.good() && tally.passed > 0, "{package}, `{filter}`: not good without any mutation: {tally}");
        println!("{package}, `{filter}`, without a mutation: {tally}");
    }
    let mut missed = 0;
    for mutation in &wanted {
        let noticed = is_noticed(&copy, mutation).with_context(|| format!("mutation {}", mutation.name))?;
        println!("mutation {}: {}: {}", mutation.name, mutation.what, if noticed { "noticed" } else { "MISSED" });
        missed += u32::from(!noticed);
    }
    println!("{} mutations, {missed} missed", wanted.len());
    Ok(missed == 0)
}

/// Makes the mistake, runs the tests, and undoes it.
fn is_noticed(copy: &Path, mutation: &Mutation) -> Result<bool> {
    let Mutation { package, file, from, to, tests, .. } = *mutation;
    let path = copy.join(file);
    let text = fs::read_to_string(&path).with_context(|| file.to_owned())?;
    let count = text.matches(from).count();
    ensure!(count == 1, "{file} has {count} places like `{from}`, one is expected");
    fs::write(&path, text.replacen(from, to, 1))?;
    let tally = test(copy, package, tests);
    fs::write(&path, &text)?;
    let tally = tally?;
    ensure!(tally != Tally::default(), "{package} has no test like `{tests}`");
    Ok(!tally.good())
}

/// Runs the tests of a package with names like `filter` in the copy. An error if it does not build.
fn test(copy: &Path, package: &str, filter: &str) -> Result<Tally> {
    let cargo = |args: &[&str]| {
        let mut command = cargo(args);
        command.current_dir(copy).env("CARGO_TARGET_DIR", target().join("mutations-build"));
        // The compiler warns of what a mistake leaves unused.
        command.stderr(Stdio::null());
        command
    };
    // Programs of these tests load libraries that no dependency names.
    let of_rig = package == "cuda-rig";
    let features: &[&str] = if of_rig { &["--features", "libraries"] } else { &[] };
    if of_rig {
        let beside = ["cuda-front", "cuda-fake", "cuda-owner", "mediatord", "mediatorctl"];
        let packages: Vec<_> = beside.iter().flat_map(|name| ["--package", name]).collect();
        let built = cargo(&[&["build", "--quiet"][..], &packages].concat()).status()?;
        ensure!(built.success(), "what {package} loads does not build");
    }
    let tests = [&["--package", package, "--tests"], features].concat();
    let built = cargo(&[&["test", "--quiet", "--no-run"][..], &tests].concat()).status()?;
    ensure!(built.success(), "{package} does not build");
    let run = [&["test"][..], &tests, &["--", "--test-threads=2", filter]].concat();
    let output = cargo(&run).output()?;
    let mut reader = Reader::default();
    String::from_utf8_lossy(&output.stdout).lines().for_each(|line| reader.line(line));
    Ok(reader.finish(output.status.success()))
}

/// Brings the copy to what git tracks, as it is in the working tree. Files that are the same are left alone, so that a second run
/// compiles what has changed only; one that a run was killed over is not the same.
fn copy_sources() -> Result<PathBuf> {
    let copy = target().join("mutations");
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .context("git ls-files")?;
    if !listed.status.success() {
        bail!("git ls-files: {}", String::from_utf8_lossy(&listed.stderr));
    }
    let mut names = BTreeSet::new();
    for name in listed.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let name = Path::new(std::str::from_utf8(name).context("a file name that is no UTF-8")?);
        let (from, to) = (root().join(name), copy.join(name));
        // What is deleted but not committed yet is listed all the same.
        if from.is_file() {
            bring(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
            names.insert(name.to_owned());
        }
    }
    remove_others(&copy, &copy, &names)?;
    Ok(copy)
}

/// Copies a file, unless its copy is the same.
fn bring(from: &Path, to: &Path) -> std::io::Result<()> {
    let same = fs::read(to).is_ok_and(|copied| fs::read(from).is_ok_and(|text| text == copied));
    if !same {
        to.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::copy(from, to)?;
    }
    Ok(())
}

/// Removes the files of a folder of the copy that are not among `names`.
fn remove_others(copy: &Path, folder: &Path, names: &BTreeSet<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(copy, &path, names)?;
        } else if path.strip_prefix(copy).is_ok_and(|name| !names.contains(name)) {
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_that_is_the_same_is_left_alone_and_one_that_is_not_is_made_so() {
        let folder = tempfile::tempdir().unwrap();
        let (from, copy) = (folder.path().join("from"), folder.path().join("copy"));
        let to = copy.join("a/b.rs");
        fs::write(&from, "good").unwrap();
        bring(&from, &to).unwrap();
        let before = fs::metadata(&to).unwrap().modified().unwrap();
        bring(&from, &to).unwrap();
        assert_eq!(fs::metadata(&to).unwrap().modified().unwrap(), before);
        fs::write(&to, "a mistake that a killed run has left").unwrap();
        fs::write(copy.join("gone.rs"), "").unwrap();
        bring(&from, &to).unwrap();
        remove_others(&copy, &copy, &BTreeSet::from(["a/b.rs".into()])).unwrap();
        assert_eq!(fs::read_to_string(&to).unwrap(), "good");
        assert!(!copy.join("gone.rs").exists());
    }

    #[test]
    fn each_mutation_has_its_place() {
        let metadata = crate::layers::metadata("Cargo.toml").unwrap();
        let packages: BTreeSet<_> = metadata.workspace_packages().iter().map(|package| package.name.as_str()).collect();
        for Mutation { name, file, from, to, package, .. } in mutations() {
            let text = fs::read_to_string(root().join(file)).unwrap();
            assert_eq!(text.matches(from).count(), 1, "{name}: `{from}` in {file}");
            let manifest = root().join(file.split("/src/").next().unwrap()).join("Cargo.toml");
            assert!(from != to && manifest.is_file(), "{name}");
            assert!(packages.contains(package), "{name}: there is no package {package}");
        }
        let names: BTreeSet<_> = mutations().map(|mutation| mutation.name).collect();
        assert_eq!(names.len(), mutations().count());
    }
}
