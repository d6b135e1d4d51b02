//! Debian's programs that check packages, manifests and scripts, in a separate root folder.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use images::Progress;

use crate::daemon::{Ended, run_to_end};
use crate::debian::{NAMESPACES, USERS, is_root};

/// Time limit of a program.
const LIMIT: Duration = Duration::from_secs(300);
/// Script that enters the root folder, mounts the folder in its second argument on `/mnt`, and runs the command in its
/// third argument.
const ENTER: &str = r#"
set -e
mount --make-rprivate /
cd "$1"
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs tmp tmp
mount --bind "$2" mnt
exec chroot . /bin/sh -c "$3"
"#;

/// Root folder with the programs.
pub struct Toolbox(PathBuf);

impl Toolbox {
    /// Opens the toolbox. Unpacks the programs if necessary.
    ///
    /// # Errors
    /// Returns an error if Debian's packages cannot be fetched.
    pub fn open() -> Result<Self> {
        Ok(Self(images::ensure_checkers(&Progress::stderr())?))
    }

    /// Runs a shell command with `folder` mounted on `/mnt`.
    ///
    /// # Errors
    /// Returns an error if the command does not end in time.
    pub fn run(&self, folder: &Path, command: &str) -> Result<Ended> {
        let mut enter = Command::new("unshare");
        enter.args(NAMESPACES).args(if is_root() { &[][..] } else { &USERS });
        enter.args(["sh", "-c", ENTER, "enter"]).arg(&self.0).arg(folder).arg(command);
        enter.env_clear().envs([("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), ("HOME", "/tmp"), ("LC_ALL", "C")]);
        run_to_end(&mut enter, LIMIT)
    }
}
