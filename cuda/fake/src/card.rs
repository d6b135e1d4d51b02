//! The card: a folder that processes share.
//!
//! UNSAFETY: locks files.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Environment variable with the card's folder; it need not exist.
const FOLDER: &str = "FAKE_CUDA_FOLDER";
/// Environment variable with the card's memory in MiB.
const MEMORY: &str = "FAKE_CUDA_MIB";

/// The memory that an allocation lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// The card's.
    Device,
    /// The host's.
    Host,
}

/// The card's folder.
#[derive(Debug)]
pub struct Card {
    folder: PathBuf,
    total: u64,
}

/// The card of this process.
pub fn get() -> &'static Card {
    static CARD: OnceLock<Card> = OnceLock::new();
    CARD.get_or_init(|| {
        let folder = std::env::var_os(FOLDER).map_or_else(|| std::env::temp_dir().join("fake-cuda"), PathBuf::from);
        let mib = std::env::var(MEMORY).ok().and_then(|text| text.parse().ok()).unwrap_or(256);
        Card::open(&folder, mib)
    })
}

fn lock(file: &File, how: i32) -> bool {
    // SAFETY: the descriptor is open.
    unsafe { libc::flock(file.as_raw_fd(), how) == 0 }
}

/// A lock among all processes, until it is dropped.
pub struct Turn(File);

impl Card {
    /// Opens or makes the folder.
    pub fn open(folder: &Path, mib: u64) -> Self {
        let _ = fs::create_dir_all(folder);
        let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        Self { folder, total: mib << 20 }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Bytes of the card's memory.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Notes that this process has a context, until it ends.
    pub fn enter(&self) {
        static ENTERED: OnceLock<Option<File>> = OnceLock::new();
        ENTERED.get_or_init(|| {
            let _turn = self.turn("entering")?;
            let path = self.folder.join(format!("process-{}", std::process::id()));
            let file = OpenOptions::new().create(true).truncate(false).write(true).open(path).ok()?;
            lock(&file, libc::LOCK_EX | libc::LOCK_NB).then_some(file)
        });
    }

    /// Processes that have a context.
    pub fn processes(&self) -> Vec<u32> {
        let _turn = self.turn("entering");
        let mut pids = Vec::new();
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let pid = name.to_string_lossy().strip_prefix("process-").and_then(|pid| pid.parse().ok());
            let (Some(pid), Ok(file)) = (pid, File::open(entry.path())) else { continue };
            if lock(&file, libc::LOCK_EX | libc::LOCK_NB) {
                // It has ended.
                let _ = fs::remove_file(entry.path());
            } else {
                pids.push(pid);
            }
        }
        pids.sort_unstable();
        pids
    }

    /// Waits for a lock of this name.
    pub fn turn(&self, name: &str) -> Option<Turn> {
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(self.folder.join(name)).ok()?;
        lock(&file, libc::LOCK_EX).then_some(Turn(file))
    }

    /// Bytes in use. Files that nobody has open any more are removed.
    fn used(&self) -> u64 {
        let mut used = 0;
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if !name.starts_with("device-") && !name.starts_with("host-") {
                continue;
            }
            // A second description of the file: its lock is refused as long as the first one lives.
            let Ok(file) = OpenOptions::new().read(true).open(entry.path()) else { continue };
            if lock(&file, libc::LOCK_EX | libc::LOCK_NB) {
                let _ = fs::remove_file(entry.path());
            } else if name.starts_with("device-") {
                used += file.metadata().map_or(0, |m| m.len());
            }
        }
        used
    }

    /// Bytes that are free.
    pub fn free(&self) -> u64 {
        let _turn = self.turn("allocating");
        self.total.saturating_sub(self.used())
    }

    /// Allocates memory; its description lives in the handle, in descriptors and in mappings of it.
    pub fn allocate(&self, tier: Tier, bytes: u64) -> Option<File> {
        let _turn = self.turn("allocating")?;
        if tier == Tier::Device && self.used().checked_add(bytes)? > self.total {
            return None;
        }
        let kind = if tier == Tier::Device { "device" } else { "host" };
        let number = fs::read_to_string(self.folder.join("number")).ok().and_then(|t| t.parse::<u64>().ok());
        let number = number.unwrap_or(0) + 1;
        fs::write(self.folder.join("number"), number.to_string()).ok()?;
        let path = self.folder.join(format!("{kind}-{number}"));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).ok()?;
        file.set_len(bytes).ok()?;
        lock(&file, libc::LOCK_EX | libc::LOCK_NB).then_some(file)
    }

    /// The memory that a descriptor of an allocation is of, with its length.
    pub fn identify(&self, file: &File) -> Option<(Tier, u64)> {
        let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
        // A process in a container sees the folder elsewhere than who made the file: the file itself tells.
        let name = path.file_name()?.to_string_lossy().into_owned();
        let (here, there) = (fs::metadata(self.folder.join(&name)).ok()?, file.metadata().ok()?);
        if (here.dev(), here.ino()) != (there.dev(), there.ino()) {
            return None;
        }
        let tier = if name.starts_with("device-") {
            Tier::Device
        } else if name.starts_with("host-") {
            Tier::Host
        } else {
            return None;
        };
        Some((tier, file.metadata().ok()?.len()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        lock(&self.0, libc::LOCK_UN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_lives_as_long_as_anything_of_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let card = Card::open(folder.path(), 4);
        let first = card.allocate(Tier::Device, 3 << 20).expect("fits");
        assert!(card.allocate(Tier::Device, 2 << 20).is_none(), "the card is full");
        assert!(card.allocate(Tier::Host, 2 << 20).is_some(), "the host is not");
        let second = first.try_clone().expect("a descriptor of the same description");
        assert_eq!(card.identify(&second), Some((Tier::Device, 3 << 20)));
        drop(first);
        assert_eq!(card.free(), 1 << 20, "a descriptor is left");
        drop(second);
        assert_eq!(card.free(), 4 << 20);
        assert_eq!(
            fs::read_dir(folder.path())
                .expect("folder")
                .filter(|e| { e.as_ref().is_ok_and(|e| e.file_name().to_string_lossy().starts_with("device-")) })
                .count(),
            0
        );
    }
}
