//! Mutation testing with deliberate mistakes, each of which must make a test fail: `cargo xtask mutations`.
//!
//! Each mistake removes something that isolation depends on: a bound, one 4 KiB part of a check, or a flush. The file
//! `mutations.toml` of a crate lists the mistakes for that crate ([`list`]). They are made in a copy of the sources,
//! where a test of the crate must then fail. A failed build does not count. Only crates whose tests need no guests are
//! mutated, and only the tests that should detect the mistake run.
//!
//! Most of the time is spent compiling, so all mistakes are compiled together. In the [`copy`], a function with a
//! mistake has both bodies, and an environment variable selects one of them ([`switch`], [`place`]). A mistake that is
//! not within one function, or that does not compile next to the correct body, is compiled separately. An undetected
//! mistake is also tried separately, because a test that clears the environment of its processes disables the switch.
//! [`trial`] builds and runs tests.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::layers::metadata;
use crate::programs::Program;
use crate::run::{root, target};

mod copy;
mod list;
mod place;
mod switch;
mod trial;

use list::mutations;
use switch::{Switched, switched};
use trial::{Build, Built, Verdict};

/// A deliberate mistake.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutation {
    name: String,
    /// Description of the mistake.
    what: String,
    /// Package with the tests that should detect the mistake: the crate that has the list by default, or a crate that
    /// depends on it.
    #[serde(default)]
    package: String,
    /// Path of the file to change, relative to the workspace root. In the list, it is relative to the crate's folder.
    file: String,
    /// Text to replace, which must occur exactly once in the file.
    from: String,
    to: String,
    /// Words that select tests: only tests whose names contain one of them run. If empty, all tests run.
    #[serde(default)]
    tests: String,
}

impl Mutation {
    /// Returns the words in `tests`, or a word that matches every name if `tests` is empty.
    fn filters(&self) -> Vec<&str> {
        if self.tests.is_empty() { vec![""] } else { self.tests.split_whitespace().collect() }
    }
}

/// Tries the mistakes that match one of `filters`, or all mistakes if it is empty. Returns true if tests detected all
/// of them. If `resume` is true, skips mistakes that were detected in earlier runs. Tests `jobs` mistakes concurrently.
pub fn run(filters: &[String], resume: bool, jobs: usize) -> Result<bool> {
    let all = mutations(&metadata("Cargo.toml")?)?;
    let is_like = |mutation: &Mutation, filter: &str| mutation.name.contains(filter) || mutation.package == filter;
    for filter in filters {
        ensure!(
            all.iter().any(|mutation| is_like(mutation, filter)),
            "no mutation has a name or package like `{filter}`"
        );
    }
    let record = Record::open(resume)?;
    let wanted: Vec<_> = all
        .iter()
        .filter(|mutation| filters.is_empty() || filters.iter().any(|filter| is_like(mutation, filter)))
        .filter(|mutation| !record.noticed.contains(mutation.name.as_str()))
        .collect();
    let packages: BTreeSet<_> = wanted.iter().map(|mutation| mutation.package.as_str()).collect();
    let (build, sources, programs) = build(&wanted, (!filters.is_empty()).then_some(&packages))?;
    let filters_of = |package: &str| -> Vec<&str> {
        let of_package = wanted.iter().filter(|mutation| mutation.package == package);
        of_package.flat_map(|mutation| mutation.filters()).collect::<BTreeSet<_>>().into_iter().collect()
    };
    // Report a filter without tests before any test runs, because all tests together take an hour.
    for package in &packages {
        build.concerned(&programs, package, &filters_of(package))?;
    }
    // The same tests must pass without a mistake. Otherwise, their failure would prove nothing.
    let limits = in_parallel(jobs, packages.iter().copied(), |package| {
        let filters = filters_of(package);
        let began = Instant::now();
        let verdict =
            trial::run(&build.concerned(&programs, package, &filters)?, &filters, None, trial::PROGRAM_TIMEOUT)?;
        ensure!(
            verdict.good() && verdict.tally.passed > 0,
            "{package}: the tests fail without any mutation: {verdict}"
        );
        println!("{package}, without a mutation: {verdict}");
        // A mistake often makes its test wait forever.
        Ok((package, trial::MIN_TIMEOUT.max(began.elapsed().saturating_mul(trial::TIMEOUT_FACTOR))))
    })?;
    let limits: BTreeMap<_, _> = limits.into_iter().collect();
    let mut missed: Vec<&str> = Vec::new();
    let limit_of = |mutation: &Mutation| limits.get(&*mutation.package).copied().unwrap_or(trial::PROGRAM_TIMEOUT);
    let alone = in_parallel(jobs, wanted.iter().copied(), |mutation| {
        let concerned = build.concerned(&programs, &mutation.package, &mutation.filters())?;
        let filters = mutation.filters();
        let is_noticed = sources.has_switch(mutation)
            && told(mutation, &trial::run(&concerned, &filters, Some(mutation), limit_of(mutation))?, &record)?;
        Ok((!is_noticed).then(|| (mutation, Build::options(&concerned))))
    })?;
    // Try separately compiled mistakes last, because they rebuild the same programs.
    for (mutation, options) in alone.iter().flatten() {
        let verdict = make_alone(&build, &sources, options, mutation, limit_of(mutation));
        if !told(mutation, &verdict.with_context(|| format!("mutation {}", mutation.name))?, &record)? {
            missed.push(&mutation.name);
        }
    }
    missed.iter().for_each(|name| println!("MISSED: {name}"));
    println!("{} mutations, {} missed", wanted.len(), missed.len());
    Ok(missed.is_empty())
}

/// Calls `work` with each item on `jobs` threads. Returns the results in the order of the items.
///
/// # Errors
///
/// Returns an error of `work`, after which no further items are started.
fn in_parallel<T: Send, R: Send>(
    jobs: usize,
    items: impl Iterator<Item = T> + Send,
    work: impl Fn(T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let (items, results) = (Mutex::new(Some(items.enumerate())), Mutex::new(BTreeMap::new()));
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).as_mut().and_then(Iterator::next);
    let worker = || -> Result<()> {
        while let Some((number, item)) = next() {
            let result = work(item).inspect_err(|_| *items.lock().unwrap_or_else(PoisonError::into_inner) = None)?;
            results.lock().unwrap_or_else(PoisonError::into_inner).insert(number, result);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(worker)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })?;
    Ok(results.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect())
}

/// Prints and records whether the tests detected a mistake. Returns true if they did.
fn told(mutation: &Mutation, verdict: &Verdict, record: &Record) -> Result<bool> {
    let noticed = !verdict.good();
    println!(
        "mutation {}: {}: {} ({verdict})",
        mutation.name,
        mutation.what,
        if noticed { "noticed" } else { "not noticed" }
    );
    if noticed {
        record.add(&mutation.name)?;
    }
    Ok(noticed)
}

/// Makes a single mistake in the copy, builds its tests, reverts the mistake, and runs the tests.
fn make_alone(
    build: &Build,
    sources: &Sources,
    options: &[String],
    mutation: &Mutation,
    limit: Duration,
) -> Result<Verdict> {
    let path = sources.copy.join(&mutation.file);
    let with_switches = fs::read(&path).with_context(|| mutation.file.clone())?;
    let mut text = original(&mutation.file)?;
    text.replace_range(switch::place(&text, mutation)?, &mutation.to);
    fs::write(&path, text)?;
    let built = build.some(options);
    fs::write(&path, with_switches)?;
    match built? {
        Built::Programs(programs) => {
            let concerned = build.concerned(&programs, &mutation.package, &mutation.filters())?;
            trial::run(&concerned, &mutation.filters(), None, limit)
        }
        Built::Refused(_, said) => bail!("it does not build:\n{said}"),
    }
}

/// The copy of the sources and its switches.
struct Sources<'m> {
    copy: PathBuf,
    switched: BTreeMap<&'m str, Switched<'m>>,
}

impl<'m> Sources<'m> {
    fn has_switch(&self, mutation: &Mutation) -> bool {
        let switches = self.switched.values().flat_map(|source| &source.switches);
        switches.flat_map(|(_, names)| names).any(|name| *name == mutation.name)
    }

    /// Creates a copy with a switch for each mistake, except for those that must be compiled separately.
    fn make(wanted: &[&'m Mutation], alone: &BTreeSet<&str>) -> Result<Self> {
        let mut by_file: BTreeMap<&str, Vec<&'m Mutation>> = BTreeMap::new();
        for mutation in wanted.iter().filter(|mutation| !alone.contains(mutation.name.as_str())) {
            by_file.entry(&mutation.file).or_default().push(mutation);
        }
        let mut of = BTreeMap::new();
        for (file, mutations) in by_file {
            of.insert(file, switched(&original(file)?, &mutations)?);
        }
        let changed: Vec<_> = of.iter().map(|(file, source)| (file.into(), source.text.clone())).collect();
        Ok(Self { copy: copy::bring_all(&changed)?, switched: of })
    }
}

fn original(file: &str) -> Result<String> {
    fs::read_to_string(root().join(file)).with_context(|| file.to_owned())
}

/// Builds the copy. If a function does not compile with an additional body, it has only its correct body in the next
/// attempt.
fn build<'m>(wanted: &[&'m Mutation], packages: Option<&BTreeSet<&str>>) -> Result<(Build, Sources<'m>, Vec<Program>)> {
    let mut alone = BTreeSet::new();
    loop {
        let sources = Sources::make(wanted, &alone)?;
        let build = Build::new(sources.copy.clone(), packages)?;
        let (errors, said) = match build.all()? {
            Built::Programs(programs) => return Ok((build, sources, programs)),
            Built::Refused(errors, said) => (errors, said),
        };
        let before = alone.len();
        for (file, line) in &errors {
            let switches = sources.switched.get(file.as_str()).map_or(&[][..], |source| &source.switches);
            alone.extend(switches.iter().filter(|(lines, _)| lines.contains(line)).flat_map(|(_, names)| names));
        }
        if alone.len() == before {
            bail!("the copy of the sources does not build:\n{said}");
        }
        println!("compiled separately, because they do not compile next to the correct bodies: {alone:?}");
    }
}

/// File with the names of the detected mistakes, for resuming an interrupted run.
struct Record {
    path: PathBuf,
    noticed: BTreeSet<String>,
}

impl Record {
    fn open(resume: bool) -> Result<Self> {
        Self::at(&target().join("mutations-noticed"), resume)
    }

    /// Loads the record if `resume` is true. Otherwise, deletes its file and returns an empty record.
    fn at(path: &Path, resume: bool) -> Result<Self> {
        if !resume && path.exists() {
            fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
        let text = if path.exists() {
            fs::read_to_string(path).context("the record of detected mutations")?
        } else {
            String::new()
        };
        Ok(Self { path: path.to_owned(), noticed: text.lines().map(str::to_owned).collect() })
    }

    fn add(&self, name: &str) -> Result<()> {
        let file = fs::OpenOptions::new().create(true).append(true).open(&self.path);
        file.and_then(|mut file| writeln!(file, "{name}"))
            .with_context(|| format!("cannot write {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lints;

    #[test]
    fn items_are_processed_concurrently_until_an_error() {
        let meeting = std::sync::Barrier::new(2);
        let squares = in_parallel(2, 0..10, |item| {
            meeting.wait();
            Ok(item * item)
        });
        assert_eq!(squares.unwrap(), (0..10).map(|item| item * item).collect::<Vec<_>>());
        let failed = in_parallel(3, 0..1000, |item| if item == 4 { bail!("item {item}") } else { Ok(()) });
        assert_eq!(failed.unwrap_err().to_string(), "item 4");
        assert_eq!(in_parallel(0, 0..2, Ok).unwrap(), [0, 1]);
    }

    #[test]
    fn run_is_resumed_only_on_request() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("noticed");
        Record::at(&path, false).unwrap().add("a").unwrap();
        Record::at(&path, true).unwrap().add("b").unwrap();
        assert_eq!(Record::at(&path, true).unwrap().noticed, BTreeSet::from(["a".into(), "b".into()]));
        assert!(Record::at(&path, false).unwrap().noticed.is_empty());
        assert!(Record::at(&path, true).unwrap().noticed.is_empty());
    }

    #[test]
    fn mutation_with_several_words_has_a_filter_for_each() {
        let filters = |tests: &str| {
            let mutation = switch::tests::mutation("a", "b", "c");
            Mutation { tests: tests.to_owned(), ..mutation }.filters().iter().map(|word| (*word).to_owned()).collect()
        };
        let (none, two): (Vec<String>, Vec<String>) = (filters(""), filters("a::b  c"));
        assert_eq!(none, [""]);
        assert_eq!(two, ["a::b", "c"]);
    }

    #[test]
    fn each_mutation_has_its_place() {
        let metadata = metadata("Cargo.toml").unwrap();
        let all = mutations(&metadata).unwrap();
        let packages: BTreeSet<_> = metadata.workspace_packages().iter().map(|package| package.name.as_str()).collect();
        for mutation in &all {
            let Mutation { name, file, from, to, package, .. } = mutation;
            switch::place(&original(file).unwrap(), mutation).unwrap();
            let manifest = root().join(file.split("/src/").next().unwrap()).join("Cargo.toml");
            assert!(from != to && manifest.is_file(), "{name}");
            assert!(packages.contains(package.as_str()), "{name}: there is no package {package}");
        }
        let names: BTreeSet<_> = all.iter().map(|mutation| &mutation.name).collect();
        assert_eq!(names.len(), all.len());
    }

    /// Returns the names of functions, modules and files in a folder.
    fn names(files: &[lints::File], folder: &Path) -> Vec<String> {
        let mut names = Vec::new();
        for file in files.iter().filter(|file| file.path.starts_with(folder)) {
            names.push(file.path.display().to_string());
            let named = |word: &str| word.split(|c: char| !c.is_alphanumeric() && c != '_').next().map(str::to_owned);
            for item in ["fn ", "mod "] {
                names.extend(file.text.split(item).skip(1).filter_map(named));
            }
        }
        names
    }

    #[test]
    fn tests_of_each_mutation_exist() {
        let metadata = metadata("Cargo.toml").unwrap();
        let files = lints::files(&root()).unwrap();
        let folders = metadata.workspace_packages().into_iter().map(|package| {
            let folder = package.manifest_path.parent().unwrap().strip_prefix(&metadata.workspace_root).unwrap();
            (package.name.to_string(), names(&files, folder.as_std_path()))
        });
        let names: BTreeMap<_, _> = folders.collect();
        for mutation in &mutations(&metadata).unwrap() {
            let known = &names[&mutation.package];
            for part in mutation.filters().into_iter().flat_map(|filter| filter.split("::")) {
                let Mutation { name, package, .. } = mutation;
                assert!(known.iter().any(|known| known.contains(part)), "{name}: {package} has no test like {part}");
            }
        }
    }

    #[test]
    fn most_mistakes_have_a_switch() {
        let wanted = mutations(&metadata("Cargo.toml").unwrap()).unwrap();
        let files: BTreeSet<_> = wanted.iter().map(|mutation| &mutation.file).collect();
        let mut switches = 0;
        for file in files {
            let of_file: Vec<_> = wanted.iter().filter(|mutation| mutation.file == *file).collect();
            let found = switched(&original(file).unwrap(), &of_file).unwrap();
            switches += found.switches.iter().map(|(_, names)| names.len()).sum::<usize>();
        }
        assert!(switches * 10 > wanted.len() * 9, "{switches} of {}: the others take a build each", wanted.len());
    }
}
