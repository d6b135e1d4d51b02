//! A host, represented by the files below a root folder and the programs in it.

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Maximum length of a file's text, in bytes. Files in procfs and sysfs are far shorter.
const MAX_FILE: usize = 1 << 20;
/// Time limit for a program.
// TIMEOUT: each program only prints its status. A service manager that hangs is also a finding.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(10);
/// Folders that contain programs.
const PROGRAMS: [&str; 6] = ["usr/local/bin", "usr/local/sbin", "usr/bin", "usr/sbin", "bin", "usr/libexec"];

/// The checked host.
pub(super) struct Host {
    root: PathBuf,
}

/// Owner and permissions of a file.
pub(super) struct Rights {
    pub mode: u32,
    pub user: String,
    pub group: String,
    pub is_socket: bool,
}

impl Host {
    /// Returns the host whose root is this folder.
    pub(super) fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Returns the path of a host file below the root folder. `path` may be absolute.
    pub(super) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    pub(super) fn has(&self, path: impl AsRef<Path>) -> bool {
        self.path(path).exists()
    }

    /// Returns a file's text if it is readable.
    pub(super) fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        let mut bytes = Vec::new();
        fs::File::open(self.path(path)).ok()?.take(MAX_FILE as u64).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Returns the names in a folder, in ascending order.
    pub(super) fn names(&self, folder: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Returns a program's path if it is installed.
    pub(super) fn program(&self, name: &str) -> Option<PathBuf> {
        PROGRAMS.iter().map(|folder| self.path(folder).join(name)).find(|path| path.is_file())
    }

    /// Runs a program. Returns its standard output if it exits successfully within the time limit.
    pub(super) fn program_output(&self, program: &Path, arguments: &[&str]) -> Option<String> {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().ok()?;
        let (stdout, begin) = (child.stdout.take()?, Instant::now());
        // Read concurrently: a program with much output would block on a full pipe.
        let reader = std::thread::spawn(move || std::io::read_to_string(stdout).ok());
        let status = loop {
            match child.try_wait().ok()? {
                Some(status) => break status,
                None if begin.elapsed() > PROGRAM_TIMEOUT => {
                    child.kill().ok()?;
                    break child.wait().ok()?;
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let text = reader.join().ok()??;
        status.success().then_some(text)
    }

    /// Returns a file's owner and permissions.
    pub(super) fn rights(&self, path: impl AsRef<Path>) -> Option<Rights> {
        let metadata = fs::symlink_metadata(self.path(path)).ok()?;
        Some(Rights {
            mode: metadata.permissions().mode() & 0o777,
            user: self.named("etc/passwd", metadata.uid()),
            group: self.named("etc/group", metadata.gid()),
            is_socket: metadata.file_type().is_socket(),
        })
    }

    /// Returns the name of an ID in a file such as `/etc/passwd`, or the ID itself if it has no name.
    fn named(&self, file: &str, number: u32) -> String {
        let text = self.read(file).unwrap_or_default();
        let number = number.to_string();
        let line = text.lines().find(|line| line.split(':').nth(2) == Some(&number));
        line.and_then(|line| line.split(':').next()).map_or(number.clone(), str::to_owned)
    }

    /// Returns true if a user exists.
    pub(super) fn has_user(&self, user: &str) -> bool {
        self.read("etc/passwd").is_some_and(|text| text.lines().any(|line| line.split(':').next() == Some(user)))
    }

    /// Returns a user's groups.
    pub(super) fn groups(&self, user: &str) -> Vec<String> {
        let (passwd, group) = (self.read("etc/passwd").unwrap_or_default(), self.read("etc/group").unwrap_or_default());
        let line = passwd.lines().find(|line| line.split(':').next() == Some(user));
        let own = line.and_then(|line| line.split(':').nth(3)).unwrap_or_default();
        let is_in = |line: &&str| {
            let fields: Vec<_> = line.split(':').collect();
            fields.get(2) == Some(&own) || fields.get(3).is_some_and(|users| users.split(',').any(|one| one == user))
        };
        group.lines().filter(is_in).filter_map(|line| Some(line.split(':').next()?.to_owned())).collect()
    }
}
