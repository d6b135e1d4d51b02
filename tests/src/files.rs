//! Files to add to a machine before it boots.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use images::cpio::Archive;
use images::libraries;

/// Path of the dynamic loader, which lists a library's dependencies.
const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";

/// Files to add to a machine's initramfs.
#[derive(Default)]
pub struct Files {
    archive: Archive,
    /// Names of the files in the archive.
    names: BTreeSet<String>,
}

impl Files {
    /// Copies a file to `to`, a path without a leading slash.
    pub fn copy(&mut self, from: &Path, to: &str, mode: u32) -> Result<()> {
        let bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        self.write(to, mode, &bytes);
        Ok(())
    }

    /// Adds a file at `to`, a path without a leading slash, with permissions `mode`. Also adds its parent folders.
    pub fn write(&mut self, to: &str, mode: u32, bytes: &[u8]) {
        for folder in to.match_indices('/').map(|(at, _)| &to[..at]) {
            if self.names.insert(folder.to_owned()) {
                self.archive.folder(folder);
            }
        }
        self.names.insert(to.to_owned());
        self.archive.file(to, mode, bytes);
    }

    /// Adds a stripped copy of the host program `from` at `to`, and its shared libraries at the paths where the loader
    /// finds them.
    pub fn program(&mut self, from: &Path, to: &str) -> Result<()> {
        self.stripped(from, to, &mut Command::new(from))
    }

    /// Adds a stripped copy of the host library `from` at `to`, and its dependencies.
    pub fn library(&mut self, from: &Path, to: &str) -> Result<()> {
        self.stripped(from, to, Command::new(LOADER).arg(from))
    }

    /// Adds a stripped copy of `from` at `to`, and the libraries that `command` lists.
    fn stripped(&mut self, from: &Path, to: &str, command: &mut Command) -> Result<()> {
        let scratch = tempfile::NamedTempFile::new().context("a file for a program")?;
        let stripped = Command::new("strip").arg("--strip-debug").arg("-o").arg(scratch.path()).arg(from).status();
        let stripped = stripped.context("cannot start strip; install the package binutils")?;
        ensure!(stripped.success(), "strip failed ({stripped}) on {}", from.display());
        self.copy(scratch.path(), to, 0o755)?;
        for library in libraries::list(command)? {
            let path = if library.is_loader { Path::new(&library.name) } else { &library.path };
            let name = path.to_str().context("a library's path is not UTF-8")?.trim_start_matches('/');
            if !self.names.contains(name) {
                self.copy(&library.path, name, 0o755)?;
            }
        }
        Ok(())
    }

    /// Returns the finished archive.
    #[must_use]
    pub fn finish(self) -> Archive {
        self.archive
    }
}
