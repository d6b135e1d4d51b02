//! The cache folder. One lock protects the folder, and items are created atomically.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, process};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::progress::Progress;
use crate::recipe::Record;

/// Minimum age at which an unused item is removed.
const OLD: Duration = Duration::from_secs(24 * 3600);

/// The cache folder, locked during the lifetime of this value.
pub struct Cache {
    root: PathBuf,
    // Never read. Closing the file releases the lock.
    _lock: File,
}

/// Returns the root of the workspace that this crate belongs to.
pub fn workspace() -> PathBuf {
    let manifest = env::var_os("CARGO_WORKSPACE_DIR").map(PathBuf::from);
    manifest.unwrap_or_else(|| {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        here.parent().unwrap_or(here).to_path_buf()
    })
}

/// Returns the cache folder, which is `GPU_MEDIATOR_CACHE` or `.cache` in the workspace.
pub fn folder() -> PathBuf {
    env::var_os("GPU_MEDIATOR_CACHE").map_or_else(|| workspace().join(".cache"), PathBuf::from)
}

impl Cache {
    /// Opens and locks the cache folder. Waits while another process holds the lock.
    pub fn open(progress: &Progress) -> Result<Self> {
        let root = folder();
        fs::create_dir_all(&root).with_context(|| {
            format!("cannot create the cache folder {}; set GPU_MEDIATOR_CACHE to a writable one", root.display())
        })?;
        let root = root.canonicalize().with_context(|| format!("cache folder {}", root.display()))?;
        let path = root.join("lock");
        let lock = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        if lock.try_lock().is_err() {
            progress.line("images: another process is making images; waiting for it ...");
            lock.lock().with_context(|| format!("cannot lock {}", path.display()))?;
        }
        Ok(Self { root, _lock: lock })
    }

    /// Returns the path of `name` in the cache.
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.root.join(name)
    }

    /// Returns the item called `kind`/`key`, if it is complete.
    pub fn find(&self, kind: &str, key: &str) -> Option<PathBuf> {
        let path = self.path(kind).join(key);
        path.is_dir().then_some(path)
    }

    /// Creates the item `kind`/`key`. `fill` receives an empty folder. If `fill` succeeds, the folder is renamed to the
    /// item's name.
    pub fn make(&self, kind: &str, key: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let parent = self.path(kind);
        let target = parent.join(key);
        let scratch = parent.join(format!(".{key}.{}", process::id()));
        fs::create_dir_all(&parent).with_context(|| format!("cannot create {}", parent.display()))?;
        // This process holds the lock, so any incomplete item belongs to a process that exited early.
        for entry in fs::read_dir(&parent)?.flatten() {
            if entry.file_name().to_string_lossy().starts_with('.') {
                remove(&entry.path())?;
            }
        }
        fs::create_dir(&scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
        if let Err(error) = fill(&scratch) {
            // Report the original error rather than an error from the removal.
            let _ = remove(&scratch);
            return Err(error);
        }
        remove(&target)?;
        fs::rename(&scratch, &target).with_context(|| format!("cannot move an image to {}", target.display()))?;
        Ok(target)
    }

    /// Loads the package versions resolved by earlier runs. Returns an empty record if the file is missing or cannot be
    /// read.
    pub fn load_record(&self) -> Record {
        fs::read_to_string(self.path("manifest.toml")).ok().and_then(|t| toml::from_str(&t).ok()).unwrap_or_default()
    }

    /// Writes the resolved package versions for users and for the next run.
    pub fn store_record(&self, record: &Record) -> Result<()> {
        let path = self.path("manifest.toml");
        let text = format!(
            "# Written by `cargo xtask setup`: the resolution of images/manifest.toml.\n\n{}",
            toml::to_string_pretty(record).context("cannot encode the image record")?
        );
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

impl Cache {
    /// Removes the items of `kind` that are not among `keys` and are older than a day. Another checkout or a running
    /// test may still use a newer item.
    pub fn prune(&self, kind: &str, keys: &[&str]) -> Result<()> {
        let Ok(entries) = fs::read_dir(self.path(kind)) else { return Ok(()) };
        for entry in entries.flatten() {
            let kept = keys.iter().any(|k| entry.file_name() == *k);
            let age = entry.metadata().ok().and_then(|m| m.created().or_else(|_| m.modified()).ok()?.elapsed().ok());
            if !kept && age.is_some_and(|a| a > OLD) {
                remove(&entry.path())?;
            }
        }
        Ok(())
    }
}

/// Removes a file or folder, if it exists.
pub fn remove(path: &Path) -> Result<()> {
    let result = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match result {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Returns the SHA-256 of a file, in hexadecimal.
pub fn hash_file(path: &Path) -> Result<String> {
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let count = file.read(&mut buffer).with_context(|| format!("cannot read {}", path.display()))?;
        if count == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&buffer[..count]);
    }
}

/// Returns a short key for an item created from `inputs`.
pub fn key(inputs: &[&str]) -> String {
    let mut hasher = Sha256::new();
    for input in inputs {
        // The length distinguishes ("ab", "c") from ("a", "bc").
        hasher.update((input.len() as u64).to_le_bytes());
        hasher.update(input.as_bytes());
    }
    let mut text = hex(&hasher.finalize());
    text.truncate(16);
    text
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Returns the total size in bytes of the readable files under `folder`, for progress lines.
pub fn size_of(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => size_of(&entry.path()),
            Ok(meta) => meta.len(),
            Err(_) => 0,
        })
        .sum()
}

/// Returns an error unless the SHA-256 of `path` is `hash`.
pub fn verify(path: &Path, hash: &str) -> Result<()> {
    let found = hash_file(path)?;
    if found != hash {
        bail!("{} has SHA-256 {found}, but {hash} was expected", path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_depend_on_where_inputs_end() {
        assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
        assert_eq!(key(&["a"]).len(), 16);
    }

    #[test]
    fn hash_of_known_text() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "abc").unwrap();
        let hash = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hash_file(file.path()).unwrap(), hash);
        assert!(verify(file.path(), "00").unwrap_err().to_string().contains(hash));
    }
}
