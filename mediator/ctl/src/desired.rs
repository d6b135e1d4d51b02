//! `mediatorctl apply`, `export` and `assert`: apply, print and compare desired states in files.

use std::fmt::Write;
use std::io::Read;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::Value;

use super::client::{Client, ClientError};
use super::progress::Progress;
use super::{Code, Form};
use api::{Action, Applied, Comparison, Desired, Exported, KeyChange, Kind, Step};

/// API path of the changeable state.
const PATH: &str = "/v1/desired";
/// Maximum file size in bytes. The daemon's limit is lower.
const MAX_FILE: u64 = 1 << 20;

#[derive(Clone, Debug, Args)]
pub(super) struct Apply {
    /// File with the desired state: tables of a configuration file, as TOML or JSON; `-` for standard input
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Removes virtual machines and tenants that are missing from the file
    #[arg(long)]
    prune: bool,
    /// Prints the changes without making them
    #[arg(long)]
    dry_run: bool,
}

#[derive(Clone, Debug, Args)]
pub(super) struct Assert {
    /// File with the desired state: tables of a configuration file, as TOML or JSON; `-` for standard input
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Also reports virtual machines and tenants that are missing from the file
    #[arg(long)]
    exact: bool,
}

#[derive(Clone, Debug, Args)]
pub(super) struct Export {
    /// Format of the file
    #[arg(long, value_name = "FORMAT", default_value = "toml")]
    format: Format,
    /// Omits the revision, so that the file still applies after other changes
    #[arg(long)]
    no_revision: bool,
}

/// Format of an exported file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// TOML, as in the configuration file
    Toml,
    /// JSON, as in the API
    Json,
}

impl Apply {
    /// Applies the file and returns the completed steps.
    pub fn run(&self, client: &Client, form: Form) -> Result<String, ClientError> {
        let path = format!("{PATH}?prune={}&dry_run={}", self.prune, self.dry_run);
        let wanted = desired(&self.file)?;
        let _progress = Progress::of_command(form, format!("applying {}", self.file.display()));
        let applied: Applied = client.patch(&path, &wanted)?;
        Ok(form.render(&applied, shown))
    }
}

impl Assert {
    /// Returns the differences from the file, and an exit code that indicates whether any exist.
    pub fn run(&self, client: &Client, form: Form) -> Result<(String, Code), ClientError> {
        let path = format!("{PATH}/compare?exact={}", self.exact);
        let desired = Desired { revision: None, ..desired(&self.file)? };
        let found: Comparison = client.post(&path, &desired)?;
        let code = if found.differences.is_empty() { Code::Good } else { Code::Failed };
        Ok((form.render(&found, |found| differences(&found.differences)), code))
    }
}

impl Export {
    /// Returns the current state as a file.
    pub fn run(&self, client: &Client, form: Form) -> Result<String, ClientError> {
        let exported: Exported = client.get(PATH)?;
        let mut value = serde_json::to_value(&exported).map_err(|error| ClientError::protocol(error.to_string()))?;
        if let (true, Value::Object(table)) = (self.no_revision, &mut value) {
            table.remove("revision");
        }
        if self.format == Format::Json || form == Form::Json {
            return Ok(super::json(&value));
        }
        if form == Form::Yaml {
            return Ok(super::forms::yaml(&value));
        }
        toml::to_string(&value).map_err(|error| ClientError::protocol(error.to_string()))
    }
}

/// Reads the desired state from a file, or from standard input if the path is `-`.
fn desired(path: &Path) -> Result<Desired, ClientError> {
    let unreadable = |what: String| ClientError::Desired { path: path.to_owned(), what };
    let mut text = String::new();
    let read = match path.to_str() {
        Some("-") => std::io::stdin().take(MAX_FILE).read_to_string(&mut text),
        _ => std::fs::File::open(path).and_then(|file| file.take(MAX_FILE).read_to_string(&mut text)),
    };
    read.map_err(|error| unreadable(error.to_string()))?;
    if text.trim_start().starts_with('{') {
        return serde_json::from_str(&text).map_err(|error| unreadable(error.to_string()));
    }
    let name = path.display().to_string();
    toml::from_str(&text).map_err(|error| {
        let told = config::position::describe(&text, &name, &error);
        unreadable(told.strip_prefix(&format!("{name}:")).map_or(told.clone(), |rest| format!("at {rest}")))
    })
}

fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::Daemon => "the daemon",
        Kind::Card => "card ",
        Kind::Vm => "VM ",
        Kind::Tenant => "tenant ",
    }
}

fn changes(text: &mut String, changes: &[KeyChange]) {
    let shown = |value: &Value| if value.is_null() { "nothing".to_owned() } else { value.to_string() };
    for KeyChange { key, from, to } in changes {
        let _ = writeln!(text, "  {key}: {} -> {}", shown(from), shown(to));
    }
}

/// Renders the steps of an `apply`, one per line.
fn shown(applied: &Applied) -> String {
    let mut text = String::new();
    for step in &applied.steps {
        let what = match (step.action, applied.dry_run) {
            (Action::Keep, _) => "matches the file",
            (Action::Create, false) => "added",
            (Action::Create, true) => "would be added",
            (Action::Change, false) => "changed",
            (Action::Change, true) => "would be changed",
            (Action::Remove, false) => "removed",
            (Action::Remove, true) => "would be removed",
        };
        let _ = writeln!(text, "{}{} {what}", kind(step.kind), step.name);
        changes(&mut text, &step.changes);
    }
    if applied.steps.is_empty() {
        text.push_str("the file is empty\n");
    }
    text
}

/// Renders the differences from a file.
fn differences(steps: &[Step]) -> String {
    let mut text = String::new();
    for step in steps {
        let what = match step.action {
            Action::Create => "is missing",
            Action::Remove => "exists, but is not in the file",
            Action::Change | Action::Keep => "differs from the file",
        };
        let _ = writeln!(text, "{}{} {what}", kind(step.kind), step.name);
        changes(&mut text, &step.changes);
    }
    if steps.is_empty() {
        text.push_str("everything matches the file\n");
    }
    text
}
