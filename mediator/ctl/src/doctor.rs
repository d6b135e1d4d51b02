//! `mediatorctl doctor`: checks a host, and reports missing requirements with their remedies.
//!
//! [`host`] accesses the host: files below a root folder, and its programs. The checks are in [`machine`] (KVM, IOMMU,
//! the kernel), [`cards`] (drivers of the cards, NVIDIA's driver), [`workers`] (CUDA in VMs), [`vmm`] (QEMU, libvirt),
//! and [`service`] (configuration, daemon, sockets and their permissions).
//!
//! Most checks work without a daemon, so the command helps even if the daemon does not start. The checks depend on the
//! configured cards: without a card of kind `"vfio"`, no IOMMU is needed.
//!
//! The command makes no changes.

use clap::Args;
use serde::Serialize;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use config::{CardKind, Config, ConfigError};

use super::client::Client;
use super::output;
use super::{Code, Form};

mod cards;
mod host;
mod machine;
mod service;
mod vmm;
mod workers;

use host::Host;

#[derive(Clone, Debug, Args)]
pub(super) struct Doctor {
    /// Configuration file of the daemon
    #[arg(long, value_name = "PATH", default_value = config::DEFAULT_PATH)]
    config: PathBuf,
    /// Root folder of the host, for tests
    #[arg(long, value_name = "PATH", default_value = "/", hide = true)]
    root: PathBuf,
}

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// The requirement is met.
    Good,
    /// The requirement affects only an unused feature, or limits the number of VMs or cards.
    Note,
    /// A requirement of the configuration is missing.
    Missing,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Good => "ok",
            Self::Note => "note",
            Self::Missing => "MISSING",
        }
    }
}

/// The finding of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Finding {
    /// Name of the check; stable across versions.
    check: &'static str,
    state: State,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    what_to_do: Option<String>,
}

impl Finding {
    fn good(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, state: State::Good, found: found.into(), what_to_do: None }
    }

    fn note(check: &'static str, found: impl Into<String>, what_to_do: impl Into<String>) -> Self {
        Self { check, state: State::Note, found: found.into(), what_to_do: Some(what_to_do.into()) }
    }

    fn missing(check: &'static str, found: impl Into<String>, what_to_do: impl Into<String>) -> Self {
        Self { check, state: State::Missing, found: found.into(), what_to_do: Some(what_to_do.into()) }
    }

    /// Creates a finding: missing if the requirement is needed, and a note otherwise.
    fn needed(needed: bool, check: &'static str, found: impl Into<String>, what_to_do: impl Into<String>) -> Self {
        let of = if needed { Self::missing } else { Self::note };
        of(check, found.into(), what_to_do.into())
    }
}

/// All findings, in the format of `--json`.
#[derive(Clone, Debug, Serialize)]
struct Findings {
    /// True if nothing is missing.
    good: bool,
    findings: Vec<Finding>,
}

/// The checked host and its configuration.
struct Patient<'a> {
    host: Host,
    /// The configuration, or the reason why it is unreadable.
    config: Result<Config, ConfigError>,
    /// Path of the configuration file, as given by the operator.
    path: &'a Path,
    client: &'a Client,
    socket: &'a Path,
}

impl Patient<'_> {
    /// Returns true if a card of this kind is configured.
    fn has(&self, kind: CardKind) -> bool {
        self.config.iter().flat_map(|config| &config.cards).any(|card| card.kind == kind)
    }

    /// Returns true if a card for virtual machines is configured.
    fn has_vms(&self) -> bool {
        self.has(CardKind::Simgpu) || self.has(CardKind::Vfio)
    }
}

impl Doctor {
    /// Runs the checks. Returns the output and the exit code: 0 if nothing is missing, and 1 otherwise.
    pub(super) fn run(self, client: &Client, socket: &Path, form: Form) -> (String, Code) {
        let host = Host::at(&self.root);
        // Relative paths start at the working directory, not at the root folder.
        let config = match self.config.is_absolute() {
            true => Config::load(&host.path(&self.config)),
            false => Config::load(&self.config),
        };
        let patient = Patient { host, config, path: &self.config, client, socket };
        let findings = [
            service::configuration(&patient),
            machine::look(&patient),
            cards::look(&patient),
            workers::look(&patient),
            vmm::look(&patient),
            service::look(&patient),
        ]
        .concat();
        let good = findings.iter().all(|finding| finding.state != State::Missing);
        let findings = Findings { good, findings };
        (form.render(&findings, table), if good { Code::Good } else { Code::Failed })
    }
}

fn table(Findings { findings, .. }: &Findings) -> String {
    let count = |state| findings.iter().filter(|finding| finding.state == state).count();
    let rows = findings
        .iter()
        .map(|finding| vec![finding.state.name().to_owned(), finding.check.to_owned(), finding.found.clone()]);
    let mut text = output::table(rows.collect(), &[]);
    // List the worst findings first.
    for state in [State::Missing, State::Note] {
        for finding in findings.iter().filter(|finding| finding.state == state) {
            let what_to_do = finding.what_to_do.as_deref().unwrap_or_default();
            // Writing to a string cannot fail.
            let _ = write!(text, "\n{} {}: {what_to_do}\n", state.name(), finding.check);
        }
    }
    let _ = match count(State::Missing) {
        0 => writeln!(text, "\nnothing is missing; {} to note", count(State::Note)),
        missing => writeln!(text, "\n{missing} missing, {} to note", count(State::Note)),
    };
    text
}

#[cfg(test)]
mod tests;
