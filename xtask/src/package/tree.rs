//! The tree of a package's files.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result};

use super::output;

/// Folder of the package metadata.
const CONTROL: &str = "DEBIAN";

/// Returns true for a regular file.
fn is_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_file())
}

/// A file tree below a folder.
pub(super) struct Tree(PathBuf);

impl Tree {
    pub fn new(folder: PathBuf) -> Self {
        Self(folder)
    }

    /// Returns the full path of a file in the tree.
    pub fn path(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }

    /// Adds a file with permissions `mode`.
    pub fn write(&self, path: &str, bytes: &[u8], mode: u32) -> Result<()> {
        let at = self.path(path);
        let made = || -> std::io::Result<()> {
            self.folders(path)?;
            fs::write(&at, bytes)?;
            fs::set_permissions(&at, fs::Permissions::from_mode(mode))
        };
        made().with_context(|| format!("cannot write {}", at.display()))
    }

    /// Creates a file's parent folders, with permissions that do not depend on the caller's umask.
    fn folders(&self, path: &str) -> std::io::Result<()> {
        for folder in Path::new(path).ancestors().skip(1).collect::<Vec<_>>().into_iter().rev() {
            let folder = self.0.join(folder);
            if !folder.exists() {
                fs::create_dir_all(&folder)?;
                fs::set_permissions(&folder, fs::Permissions::from_mode(0o755))?;
            }
        }
        Ok(())
    }

    /// Removes the tree's folder with all its files.
    pub fn clear(&self) -> Result<()> {
        match fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot empty {}", self.0.display()))
            }
            _ => Ok(()),
        }
    }

    /// Adds copies of all files in a folder and its subfolders, with permissions 0644.
    pub fn copy_folder(&self, from: &Path, path: &str) -> Result<()> {
        for name in super::names(from)? {
            let (source, path) = (from.join(&name), format!("{path}/{name}"));
            match source.is_dir() {
                true => self.copy_folder(&source, &path)?,
                false => self.copy(&source, &path, 0o644)?,
            }
        }
        Ok(())
    }

    /// Sets the permissions of a file.
    pub fn set_mode(&self, path: &str, mode: u32) -> Result<()> {
        let at = self.path(path);
        let set = fs::set_permissions(&at, fs::Permissions::from_mode(mode));
        set.with_context(|| format!("cannot set the access rights of {}", at.display()))
    }

    /// Adds a copy of a file.
    pub fn copy(&self, from: &Path, path: &str, mode: u32) -> Result<()> {
        let bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        self.write(path, &bytes, mode)
    }

    /// Adds a symbolic link to `target`, which is relative to the link's folder.
    pub fn link(&self, path: &str, target: &str) -> Result<()> {
        let at = self.path(path);
        self.folders(path).with_context(|| format!("cannot make the folder of {}", at.display()))?;
        symlink(target, &at).with_context(|| format!("cannot make the link {}", at.display()))
    }

    /// Returns the paths and targets of all symbolic links in the package.
    pub fn links(&self) -> Result<Vec<(String, String)>> {
        let mut links = Vec::new();
        for path in self.all()? {
            if let Ok(target) = fs::read_link(self.0.join(&path)) {
                let text = |path: &Path| path.to_str().context("a link's name is not UTF-8").map(str::to_owned);
                links.push((text(&path)?, text(&target)?));
            }
        }
        Ok(links)
    }

    /// Adds a gzip-compressed file with these contents, without a name or timestamp in its header.
    pub fn compressed(&self, bytes: &[u8], path: &str) -> Result<()> {
        let plain = path.strip_suffix(".gz").context("a compressed file ends in .gz")?;
        self.write(plain, bytes, 0o644)?;
        output(Command::new("gzip").args(["-9", "--no-name", "--force"]).arg(self.path(plain))).map(drop)
    }

    /// Returns the package's regular files, except for its metadata, with their permissions, sorted by path.
    pub fn listed(&self) -> Result<Vec<(String, u32)>> {
        let listed = |path: PathBuf| {
            let mode = fs::metadata(self.0.join(&path))?.permissions().mode();
            let path = path.to_str().context("a file's name is not UTF-8")?.to_owned();
            Ok((path, mode))
        };
        self.files()?.into_iter().map(listed).collect()
    }

    /// Returns all regular files of the package except for its metadata, sorted by path.
    fn files(&self) -> Result<Vec<PathBuf>> {
        let mut files: Vec<_> = self.all()?.into_iter().filter(|path| is_file(&self.0.join(path))).collect();
        files.retain(|path| !path.starts_with(CONTROL));
        Ok(files)
    }

    /// Returns all entries of the tree. Each folder follows its contents.
    fn all(&self) -> Result<Vec<PathBuf>> {
        fn collect(root: &Path, folder: &Path, all: &mut Vec<PathBuf>) -> Result<()> {
            for name in super::names(folder)? {
                let path = folder.join(name);
                if path.is_dir() {
                    collect(root, &path, all)?;
                }
                all.push(path.strip_prefix(root)?.to_owned());
            }
            Ok(())
        }
        let mut all = Vec::new();
        collect(&self.0, &self.0, &mut all)?;
        Ok(all)
    }

    /// Returns the installed size in KiB.
    pub fn kib(&self) -> Result<u64> {
        let mut bytes = 0;
        for path in self.files()? {
            bytes += fs::metadata(self.0.join(path))?.len();
        }
        Ok(bytes.div_ceil(1024))
    }

    /// Returns the checksums that dpkg uses to detect changed files.
    pub fn md5sums(&self) -> Result<Vec<u8>> {
        let mut command = Command::new("md5sum");
        command.current_dir(&self.0).args(self.files()?);
        output(&mut command)
    }

    /// Sets the modification time of all entries except for symbolic links.
    pub fn set_times(&self, epoch: u64) -> Result<()> {
        let time = UNIX_EPOCH + Duration::from_secs(epoch);
        for path in self.all()?.into_iter().chain([PathBuf::new()]) {
            let path = self.0.join(path);
            if path.is_symlink() {
                // Skip symbolic links, because the packaging tools set their timestamps.
                continue;
            }
            let set = fs::File::open(&path).and_then(|file| file.set_modified(time));
            set.with_context(|| format!("cannot set the time of {}", path.display()))?;
        }
        Ok(())
    }
}
