//! Builds the test programs in the copy of the sources, and runs them for a mistake.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use cargo_metadata::{Message, diagnostic::DiagnosticLevel};

use super::Mutation;
use super::switch::VARIABLE;
use crate::guests::BIN_VARIABLE;
use crate::layers::metadata;
use crate::programs::{FEATURES, Program, program};
use crate::run::{cargo, target};
use crate::runner::written;
use crate::tally::{Reader, Tally};
use crate::watch;

/// Time limit of a program without a mistake. TIMEOUT: equal to the limit of a test in the suite `unit`.
pub const PROGRAM_TIMEOUT: Duration = Duration::from_secs(600);
/// Minimum time limit of a program with a mistake, after which the mistake counts as detected. TIMEOUT: the tests for
/// one mistake take a few seconds.
pub const MIN_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit of a program with a mistake, as a multiple of the time of all tests of its package without one.
pub const TIMEOUT_FACTOR: u32 = 4;

/// Packages of libraries and programs that `cuda-rig`'s programs load or start without a declared dependency.
const BESIDE_RIG: [&str; 7] =
    ["cuda-shim", "cuda-fake", "cuda-owner", "cuda-guest", "cuda-worker", "mediatord", "mediatorctl"];

/// A build of the copy.
pub struct Build {
    copy: PathBuf,
    /// Package selection, as cargo options.
    selection: Vec<String>,
    /// Folder of each package in the copy.
    folders: BTreeMap<String, PathBuf>,
}

/// Outcome of a build.
pub enum Built {
    /// The test programs.
    Programs(Vec<Program>),
    /// The copy does not compile. Contains the files and lines of the errors, and the compiler's messages.
    Refused(BTreeSet<(String, usize)>, String),
}

/// Outcome of a test set.
#[derive(Debug, Default)]
pub struct Verdict {
    pub tally: Tally,
    /// Names of the failed tests.
    failed: Vec<String>,
    /// Time limit that a test program exceeded.
    stood: Option<Duration>,
}

impl Verdict {
    /// Returns true if all tests passed.
    pub fn good(&self) -> bool {
        self.tally.good() && self.stood.is_none()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = self.failed.iter().take(3).map(String::as_str).collect::<Vec<_>>().join(", ");
        match (self.stood, named.is_empty()) {
            (Some(limit), _) => write!(f, "still running after {} s", limit.as_secs()),
            (None, true) => write!(f, "{}", self.tally),
            (None, false) => write!(f, "{}: {named}", self.tally),
        }
    }
}

impl Build {
    /// Prepares a build of `packages` of the copy (all packages if `None`), with the features of `cargo xtask test`, so
    /// that compiled dependencies can be reused.
    pub fn new(copy: PathBuf, packages: Option<&BTreeSet<&str>>) -> Result<Self> {
        let mut selection: Vec<String> = match packages {
            None => ["--workspace", "--features", FEATURES].map(str::to_owned).into(),
            Some(packages) => packages.iter().flat_map(|name| ["--package", name]).map(str::to_owned).collect(),
        };
        if packages.is_some_and(|packages| packages.contains("cuda-rig")) {
            selection.extend(BESIDE_RIG.iter().flat_map(|name| ["--package", name]).map(str::to_owned));
            selection.extend(["--features", "cuda-rig/libraries"].map(str::to_owned));
        }
        let metadata = metadata("Cargo.toml")?;
        let root = metadata.workspace_root.as_std_path();
        let folder = |manifest: &Path| {
            manifest.parent().and_then(|path| path.strip_prefix(root).ok().map(|path| copy.join(path)))
        };
        let packages = metadata.workspace_packages();
        let folders = packages
            .iter()
            .filter_map(|package| Some((package.name.to_string(), folder(package.manifest_path.as_std_path())?)));
        let folders = folders.collect();
        Ok(Self { copy, selection, folders })
    }

    /// Builds all test programs, and the programs that they start.
    pub fn all(&self) -> Result<Built> {
        self.build(&["build", "--keep-going", "--lib", "--bins", "--tests", "--examples"])
    }

    /// Builds only the test programs selected by `options`, and, for integration tests, all programs that they may
    /// start and libraries that these programs may load.
    pub fn some(&self, options: &[String]) -> Result<Built> {
        if options.iter().any(|option| option.starts_with("--test")) {
            let started = self.build(&["build", "--lib", "--bins"])?;
            if matches!(started, Built::Refused(..)) {
                return Ok(started);
            }
        }
        let options: Vec<_> = options.iter().flat_map(|option| option.split(' ')).collect();
        self.build(&[&["test", "--no-run"], &options[..]].concat())
    }

    /// Returns the cargo options that build these test programs.
    pub fn options(programs: &[&Program]) -> Vec<String> {
        let options: BTreeSet<_> = programs.iter().map(|program| program.option.clone()).collect();
        options.into_iter().collect()
    }

    fn build(&self, args: &[&str]) -> Result<Built> {
        let mut command = cargo(args);
        command.args(&self.selection).args(["--quiet", "--message-format=json"]);
        command.current_dir(&self.copy).env("CARGO_TARGET_DIR", folder());
        // Discard standard error: the compiler warns about code that a mistake makes unused, and reports errors as
        // messages.
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().context("cannot start cargo")?;
        let output = child.stdout.take().context("cargo has no output")?;
        let (mut programs, mut errors, mut said) = (Vec::new(), BTreeSet::new(), String::new());
        for message in Message::parse_stream(BufReader::new(output)) {
            match message.context("reading from cargo")? {
                Message::CompilerArtifact(artifact) => programs.extend(program(&artifact)),
                Message::CompilerMessage(message) if message.message.level == DiagnosticLevel::Error => {
                    let spans = message.message.spans.iter();
                    errors.extend(spans.map(|span| (span.file_name.clone(), span.line_start)));
                    said.push_str(message.message.rendered.as_deref().unwrap_or_default());
                }
                _ => {}
            }
        }
        let good = child.wait().context("waiting for cargo")?.success();
        ensure!(
            good || !errors.is_empty(),
            "the copy of the sources does not build; `cargo build` there shows the reason:\n{said}"
        );
        Ok(if good { Built::Programs(programs) } else { Built::Refused(errors, said) })
    }

    /// Returns the programs in `programs` that belong to a package and contain tests with names that match one of
    /// `filters`.
    ///
    /// # Errors
    ///
    /// Returns an error if a filter matches no test.
    pub fn concerned<'a>(&self, programs: &'a [Program], package: &str, filters: &[&str]) -> Result<Vec<&'a Program>> {
        let folder = self.folders.get(package).with_context(|| format!("there is no package {package}"))?;
        let mut concerned = Vec::new();
        let mut unmatched: BTreeSet<_> = filters.iter().copied().collect();
        for program in programs.iter().filter(|program| program.is_in(folder)) {
            let tests = program.tests()?;
            let matches = |filter: &str| tests.iter().any(|name| name.contains(filter));
            unmatched.retain(|filter| !matches(filter));
            if filters.iter().copied().any(matches) {
                concerned.push(program);
            }
        }
        if let Some(filter) = unmatched.first() {
            bail!("{package} has no test like `{filter}`");
        }
        Ok(concerned)
    }
}

/// Runs the tests in `programs` with names that contain one of `filters`, with the mistake enabled if one is given.
/// Ends a program after `limit`.
pub fn run(programs: &[&Program], filters: &[&str], mistake: Option<&Mutation>, limit: Duration) -> Result<Verdict> {
    let mut verdict = Verdict::default();
    for program in programs {
        let mut command = program.command();
        command.env(BIN_VARIABLE, folder().join("debug")).env_remove(VARIABLE);
        command.envs(mistake.map(|mutation| (VARIABLE, &mutation.name)));
        command.arg("--test-threads=2").args(filters);
        one(&mut command, &mut verdict, watch::scaled(limit))?;
    }
    Ok(verdict)
}

fn one(command: &mut Command, verdict: &mut Verdict, limit: Duration) -> Result<()> {
    let output = tempfile::tempfile().context("a file for tests' output")?;
    // Use a file, because a pipe would stay open while a process that a test left behind is running.
    command.stdout(output.try_clone()?).stderr(Stdio::null());
    let mut child = command.spawn().context("cannot start tests")?;
    if !watch::ends_within(&child, limit)? {
        watch::end(child.id());
        verdict.stood = Some(limit);
    }
    let good = child.wait().context("waiting for tests")?.success();
    let mut reader = Reader::default();
    for line in written(&output).context("reading tests' output")?.lines() {
        reader.line(line);
        let failed = line.strip_prefix("test ").and_then(|line| line.strip_suffix(" ... FAILED"));
        verdict.failed.extend(failed.map(str::to_owned));
    }
    verdict.tally += reader.finish(good);
    Ok(())
}

/// Returns the build folder of the copy.
fn folder() -> PathBuf {
    target().join("mutations-build")
}
