//! Records which processes an owner serves, for the next owner.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// A file with one line per process: its process ID, and its start time in clock ticks.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    /// Start times of the served processes, keyed by process ID. Each start time is read only once.
    kept: BTreeMap<u32, Option<String>>,
    alive: Vec<u32>,
}

impl Journal {
    /// Reads the journal of the previous owner, if any.
    #[must_use]
    pub fn open(path: &Path) -> Self {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let alive = text.lines().filter_map(|line| {
            let (pid, started) = line.split_once(' ')?;
            let pid = pid.parse().ok()?;
            // The process ID may have been reused.
            (start_of(pid)? == started).then_some(pid)
        });
        Self { path: path.to_owned(), kept: BTreeMap::new(), alive: alive.collect() }
    }

    /// Returns the processes served by the previous owner that are still running.
    pub fn alive(&self) -> impl Iterator<Item = u32> + '_ {
        self.alive.iter().copied()
    }

    /// Writes the processes that this owner serves to the file if they have changed.
    pub fn keep(&mut self, pids: impl Iterator<Item = u32>) {
        let pids: BTreeSet<u32> = pids.collect();
        if self.kept.keys().eq(&pids) {
            return;
        }
        self.kept.retain(|pid, _| pids.contains(pid));
        for pid in pids {
            self.kept.entry(pid).or_insert_with(|| start_of(pid));
        }
        let line = |(pid, started): (&u32, &Option<String>)| Some(format!("{pid} {}\n", started.as_ref()?));
        let text: String = self.kept.iter().filter_map(line).collect();
        let new = self.path.with_extension("new");
        let written = replace(&new, &self.path, text.as_bytes());
        if let Err(error) = written {
            tracing::warn!(path = %self.path.display(), %error, "cannot record which programs use the card");
        }
    }
}

/// Replaces a file by writing a temporary file and renaming it. The temporary file is always newly created, so a link
/// that another user has put at its path is not followed.
pub(crate) fn replace(new: &Path, path: &Path, text: &[u8]) -> std::io::Result<()> {
    match std::fs::remove_file(new) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(new)?;
    file.write_all(text)?;
    std::fs::rename(new, path)
}

/// Reads the start time of a process from field 22 of its `stat`.
fn start_of(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses and may contain any characters. The fields after it begin with field 3.
    let fields = &stat[stat.rfind(')')? + 1..];
    fields.split_whitespace().nth(19).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_in_the_place_of_the_new_file_is_not_followed() {
        let folder = tempfile::tempdir().expect("a folder");
        let (victim, path) = (folder.path().join("victim"), folder.path().join("gpu.programs"));
        std::fs::write(&victim, "theirs").expect("written");
        std::os::unix::fs::symlink(&victim, path.with_extension("new")).expect("linked");
        Journal::open(&path).keep([std::process::id()].into_iter());
        assert_eq!(std::fs::read_to_string(&victim).expect("readable"), "theirs");
        assert!(std::fs::symlink_metadata(&path).expect("there").is_file());
    }

    #[test]
    fn only_processes_that_live_still_are_waited_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("journal");
        let own = std::process::id();
        Journal::open(&path).keep([own, own].into_iter());
        assert_eq!(Journal::open(&path).alive().collect::<Vec<_>>(), [own]);
        std::fs::write(&path, format!("{own} 1\nnonsense\n4294967295 2\n")).expect("written");
        assert_eq!(Journal::open(&path).alive().count(), 0, "the process ID has been reused");
    }
}
