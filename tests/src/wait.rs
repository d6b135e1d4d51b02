//! Functions that wait with a time limit, create scratch folders, or return the last lines of logs.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

/// Poll interval for conditions without an event.
pub const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Number of log lines shown when a wait fails.
const TAIL_LINES: usize = 40;

/// Scales a time limit by `GPU_MEDIATOR_TIME_SCALE`. Limits detect hangs and do not measure speed, because a loaded
/// host may need several times as long.
pub fn scaled(limit: Duration) -> Duration {
    let scale = env::var("GPU_MEDIATOR_TIME_SCALE").ok().and_then(|v| v.parse::<f64>().ok());
    limit.mul_f64(scale.filter(|s| s.is_finite() && *s > 0.0).unwrap_or(1.0))
}

/// Waits until `condition` returns a value, for at most the scaled `limit`. `what` describes the condition in the
/// error.
pub fn until<T>(what: &str, limit: Duration, mut condition: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let limit = scaled(limit);
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = condition()? {
            return Ok(value);
        }
        if Instant::now() >= deadline {
            bail!("timed out after {} s while waiting for {what}", limit.as_secs());
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Returns the indented last lines of a log file, for an error message.
pub fn tail(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<_> = text.lines().collect();
    let start = lines.len().saturating_sub(TAIL_LINES);
    let mut shown = format!("the end of {}:\n", path.file_name().unwrap_or_default().to_string_lossy());
    for line in &lines[start..] {
        shown.push_str(&format!("  {line}\n"));
    }
    shown
}

/// A folder for logs and sockets. It is removed on drop unless `GPU_MEDIATOR_KEEP` is set.
///
/// The folder is in the system's temporary folder, because the path of a UNIX socket must be short.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    folder: Option<TempDir>,
}

impl Scratch {
    /// Creates a folder with a name that contains `name`.
    pub fn new(name: &str) -> Result<Self> {
        let prefix = format!("gm-{name}-");
        let folder = tempfile::Builder::new().prefix(&prefix).tempdir().context("cannot create a scratch folder")?;
        if env::var_os("GPU_MEDIATOR_KEEP").is_some() {
            let path = folder.keep();
            eprintln!("{name}: logs are kept in {}", path.display());
            return Ok(Self { path, folder: None });
        }
        Ok(Self { path: folder.path().to_path_buf(), folder: Some(folder) })
    }

    /// Returns the folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns true if the folder is removed on drop.
    pub fn is_removed(&self) -> bool {
        self.folder.is_some()
    }

    /// Keeps the folder permanently, and returns its path.
    pub fn keep(&mut self) -> &Path {
        if let Some(folder) = self.folder.take() {
            let _ = folder.keep();
        }
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timed_out_wait_names_its_condition() {
        let error = until::<()>("a miracle", Duration::ZERO, || Ok(None)).unwrap_err().to_string();
        assert!(error.contains("a miracle"), "{error}");
    }

    #[test]
    fn tail_shows_the_last_lines_only() {
        let scratch = Scratch::new("tail").unwrap();
        let path = scratch.path().join("log");
        let text: String = (0..100).map(|n| format!("line {n}\n")).collect();
        fs::write(&path, text).unwrap();
        let shown = tail(&path);
        assert!(shown.contains("line 99") && shown.contains("line 60"));
        assert!(!shown.contains("line 59"));
    }
}
