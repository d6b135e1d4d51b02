//! The workspace's test programs. Builds them once, together with the programs that they start, and lists their tests.

use std::collections::BTreeSet;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use cargo_metadata::{Artifact, Message, TargetKind};

use crate::guests::BIN_VARIABLE;
use crate::run::{cargo, root, target};

/// Features to enable, so that the guest and CUDA programs are built together with all others.
///
/// Cargo unifies the features of a dependency over all packages of a command. A command for only some of the packages
/// would compile a third of all dependencies again.
pub const FEATURES: &str = "tests/vm,cuda-table/headers,cuda-rig/libraries,tenant-move/libraries";

/// Groups of crates with separate test suites.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// The crates in `cuda`.
    Cuda,
    /// The crates in `fleet`.
    Fleet,
    /// All other crates.
    Rest,
}

impl Group {
    fn for_folder(folder: &Path) -> Self {
        let within = |name: &str| folder.starts_with(root().join(name));
        match () {
            () if within("cuda") => Self::Cuda,
            () if within("fleet") => Self::Fleet,
            () => Self::Rest,
        }
    }
}

/// A test program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Name of the package's folder.
    pub package: String,
    /// Name of the library, program or integration test under test.
    pub target: String,
    /// True for an integration test.
    pub integration: bool,
    /// Group of the program's crate.
    pub group: Group,
    /// Cargo option that selects the program.
    pub option: String,
    path: PathBuf,
    /// Folder of the package, in which the tests run.
    folder: PathBuf,
}

/// Builds all test programs, and all programs that they start.
///
/// A single command builds all programs with the same features and profile, so that nothing is compiled twice.
pub fn build() -> Result<Vec<Program>> {
    built_by(cargo(&["build", "--workspace", "--lib", "--bins", "--tests", "--examples"]))
}

/// Builds only the libraries' test programs, with the same features as [`build`].
pub fn build_libraries() -> Result<Vec<Program>> {
    built_by(cargo(&["test", "--no-run", "--workspace", "--lib"]))
}

fn built_by(mut command: Command) -> Result<Vec<Program>> {
    command.args(["--features", FEATURES]);
    command.arg("--message-format=json-render-diagnostics").stdout(Stdio::piped());
    let mut child = command.spawn().context("cannot start cargo")?;
    let output = child.stdout.take().context("cargo has no output")?;
    let mut programs = Vec::new();
    for message in Message::parse_stream(BufReader::new(output)) {
        if let Message::CompilerArtifact(artifact) = message.context("reading from cargo")? {
            programs.extend(program(&artifact));
        }
    }
    if !child.wait().context("waiting for cargo")?.success() {
        bail!("the tests do not build");
    }
    Ok(programs)
}

/// Returns the test program for an artifact reported by cargo, if it is a test program.
pub fn program(artifact: &Artifact) -> Option<Program> {
    let executable = artifact.executable.as_ref().filter(|_| artifact.profile.test)?;
    let folder = artifact.manifest_path.parent()?;
    let name = &artifact.target.name;
    let option = match artifact.target.kind.first()? {
        TargetKind::Test => format!("--test {name}"),
        TargetKind::Bin => format!("--bin {name}"),
        TargetKind::Example => format!("--example {name}"),
        _ => "--lib".to_owned(),
    };
    Some(Program {
        package: folder.file_name()?.to_owned(),
        target: artifact.target.name.clone(),
        integration: artifact.target.kind.contains(&TargetKind::Test),
        group: Group::for_folder(folder.as_std_path()),
        option,
        path: executable.into(),
        folder: folder.into(),
    })
}

impl Program {
    /// Returns the names of the program's tests, except for ignored ones.
    pub fn tests(&self) -> Result<Vec<String>> {
        let all = self.list(&[])?;
        let ignored: BTreeSet<_> = self.list(&["--ignored"])?.into_iter().collect();
        Ok(all.into_iter().filter(|name| !ignored.contains(name)).collect())
    }

    /// Returns true if the program belongs to the package in this folder.
    pub fn is_in(&self, folder: &Path) -> bool {
        self.folder == folder
    }

    /// Returns the program's command, without arguments.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder).stdin(Stdio::null());
        command.env(BIN_VARIABLE, target().join("debug"));
        command
    }

    fn list(&self, more: &[&str]) -> Result<Vec<String>> {
        let listed = self.command().args(["--list", "--format", "terse"]).args(more).output();
        let listed = listed.with_context(|| format!("cannot start {}", self.path.display()))?;
        if !listed.status.success() {
            bail!("{} does not list its tests ({})", self.path.display(), listed.status);
        }
        let text = String::from_utf8(listed.stdout).context("a test's name that is not UTF-8")?;
        Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }
}
