//! Runs child processes, such as cargo in the workspace, and shows their output as it arrives.

use std::env;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result};

/// Returns the root of the workspace.
pub fn root() -> PathBuf {
    images::cache::workspace()
}

/// Returns cargo's build folder.
pub fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// Returns a command that runs the current cargo in the workspace.
pub fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(args).stdin(Stdio::null());
    // `cargo run` has set this variable, which a child must not inherit.
    command.env_remove("CARGO_MANIFEST_DIR");
    command
}

/// Runs `command` and shows its output. Returns true on success.
pub fn shown(command: &mut Command) -> Result<bool> {
    Ok(status(command)?.success())
}

/// Runs `command` like [`shown`], but returns the exit status.
pub fn status(command: &mut Command) -> Result<ExitStatus> {
    let name = command.get_program().to_string_lossy().into_owned();
    command.status().with_context(|| format!("cannot start {name}"))
}

/// Runs `command`. Shows each line of its standard output, and passes the line to `line`.
pub fn lines(command: &mut Command, mut line: impl FnMut(&str)) -> Result<ExitStatus> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot start {name}"))?;
    if let Some(stdout) = child.stdout.take() {
        let mut reader = BufReader::new(stdout);
        let mut bytes = Vec::new();
        // Tests may print invalid UTF-8.
        while reader.read_until(b'\n', &mut bytes).with_context(|| format!("reading from {name}"))? > 0 {
            let text = String::from_utf8_lossy(&bytes);
            print!("{text}");
            line(text.trim_end());
            bytes.clear();
        }
    }
    child.wait().with_context(|| format!("waiting for {name}"))
}
