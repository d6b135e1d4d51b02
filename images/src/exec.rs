//! Runs child processes, reports their progress, and suggests a remedy if a program is missing or fails.

use std::io::{ErrorKind, Read};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};

use crate::progress::Step;

/// Interval at which a running child is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Number of lines shown from the end of a failed child's output.
const TAIL_LINES: usize = 12;

/// Runs `command` until it exits, and returns its output. If the exit code is not zero, returns an error with the last
/// lines of the output.
///
/// `package` is the Debian package that the error names if the program is missing. `detail` returns the progress of the
/// step.
pub fn run(command: &mut Command, package: &str, step: &mut Step<'_>, detail: impl Fn() -> String) -> Result<Output> {
    let name = command.get_program().to_string_lossy().into_owned();
    // The kernel reports the same error for a missing folder and a missing program.
    if let Some(folder) = command.get_current_dir().filter(|folder| !folder.is_dir()) {
        bail!("cannot run {name} in {}: the folder does not exist", folder.display());
    }
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| missing(&name, package, e))?;
    let stdout = child.stdout.take().map(drain);
    let stderr = child.stderr.take().map(drain);
    let status = loop {
        if let Some(status) = child.try_wait().with_context(|| format!("waiting for {name}"))? {
            break status;
        }
        step.tick(&detail);
        thread::sleep(POLL_INTERVAL);
    };
    let collect = |reader: Option<thread::JoinHandle<Vec<u8>>>| reader.and_then(|r| r.join().ok()).unwrap_or_default();
    let output = Output { status, stdout: collect(stdout), stderr: collect(stderr) };
    if !output.status.success() {
        let text = [&output.stdout[..], &output.stderr[..]].concat();
        bail!("{name} failed ({}):\n{}", output.status, tail(&String::from_utf8_lossy(&text)));
    }
    Ok(output)
}

/// Runs `command` and returns its standard output, or `None` if the program is missing or fails.
pub fn probe(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn missing(name: &str, package: &str, error: std::io::Error) -> anyhow::Error {
    if error.kind() == ErrorKind::NotFound {
        anyhow!("the program {name} is not installed; install the package {package} and run this again")
    } else {
        anyhow!(error).context(format!("cannot start {name}"))
    }
}

fn drain(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // Ignore read errors. The exit status shows whether the child failed.
        let _ = pipe.read_to_end(&mut bytes);
        bytes
    })
}

/// Returns the last lines of `text`, indented.
pub fn tail(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    let start = lines.len().saturating_sub(TAIL_LINES);
    lines[start..].iter().map(|l| format!("  {l}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Progress;

    #[test]
    fn missing_program_names_the_package() {
        let progress = Progress::quiet();
        let mut command = Command::new("no-such-program-of-ours");
        let error = run(&mut command, "some-package", &mut progress.step("x"), String::new).unwrap_err().to_string();
        assert!(error.contains("install the package some-package"), "{error}");
    }

    #[test]
    fn missing_folder_is_named_instead_of_the_program() {
        let progress = Progress::quiet();
        let mut command = Command::new("true");
        command.current_dir("/no-such-folder-of-ours");
        let error = run(&mut command, "coreutils", &mut progress.step("x"), String::new).unwrap_err().to_string();
        assert_eq!(error, "cannot run true in /no-such-folder-of-ours: the folder does not exist");
    }

    #[test]
    fn failed_program_error_includes_output() {
        let progress = Progress::quiet();
        let mut command = Command::new("sh");
        command.args(["-c", "echo the reason >&2; exit 3"]);
        let error = run(&mut command, "dash", &mut progress.step("x"), String::new).unwrap_err().to_string();
        assert!(error.contains("the reason"), "{error}");
        assert!(error.contains('3'), "{error}");
    }
}
