//! The file that stores the state.
//!
//! A new file is written next to the old file, synced, and renamed over it; then the folder is synced. After a kill at
//! any step, either the old or the new file exists and is complete, possibly with an unused new file next to it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// Name of the state file.
pub const FILE: &str = "state.json";
/// Name of the new file while it is being written.
const NEW: &str = "state.json.new";
/// Name to which an ignored state file is renamed.
const ASIDE: &str = "state.json.ignored";
/// Name of the file with which a daemon locks the folder.
const LOCK: &str = "lock";
/// Maximum size of a state file to read, in bytes. The state with the maximum number of virtual machines is smaller.
const MAX_BYTES: u64 = 4 << 20;

/// Reason why a state cannot be stored or read.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages document the variants")]
pub enum StoreError {
    #[error("the state folder {} is in use by another daemon; give each daemon its own `state_dir`", .0.display())]
    InUse(PathBuf),
    #[error("cannot {what} {}", path.display())]
    System {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} has {bytes} bytes, more than any valid state", path.display())]
    TooLong { path: PathBuf, bytes: u64 },
}

/// A step of a write at which tests stop, to simulate a kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The new file does not exist yet.
    Create,
    /// The new file exists, but is empty.
    Write,
    /// Half of the new file has been written.
    WriteRest,
    /// The new file has not been synced.
    Sync,
    /// The new file has not replaced the old file.
    Rename,
    /// The folder has not been synced.
    SyncFolder,
    /// All steps are complete.
    Done,
}

/// Folder with one daemon's state.
#[derive(Debug)]
pub(super) struct Store {
    folder: PathBuf,
    /// Lock on the folder. It is held while this file is open.
    lock: File,
}

impl Store {
    /// Opens a folder, creating it if necessary.
    pub fn open(folder: &Path) -> Result<Self, StoreError> {
        fs::create_dir_all(folder).map_err(system("create the state folder", folder))?;
        let path = folder.join(LOCK);
        let lock = private().open(&path).map_err(system("open", &path))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { folder: folder.to_owned(), lock }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(StoreError::InUse(folder.to_owned())),
            Err(errno) => Err(system("lock", &path)(errno.into())),
        }
    }

    /// Returns another daemon's folder, with that daemon's lock.
    pub(crate) fn with_lock(folder: &Path, lock: File) -> Self {
        Self { folder: folder.to_owned(), lock }
    }

    /// Returns true if a file is the lock of a folder.
    pub(super) fn is_lock_of(lock: &File, folder: &Path) -> bool {
        let same = |one: fs::Metadata, other: fs::Metadata| (one.dev(), one.ino()) == (other.dev(), other.ino());
        let found = lock.metadata().and_then(|one| Ok(same(one, fs::metadata(folder.join(LOCK))?)));
        found.unwrap_or(false)
    }

    /// Returns the lock for another process. The folder stays locked while either process has this file open.
    pub fn lock(&self) -> &File {
        &self.lock
    }

    /// Returns the path of the state file.
    pub fn path(&self) -> PathBuf {
        self.folder.join(FILE)
    }

    /// Returns the last written content; `None` if there is none.
    pub fn read(&self) -> Result<Option<Vec<u8>>, StoreError> {
        let path = self.path();
        let bytes = match fs::metadata(&path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(system("read", &path)(error)),
        };
        if bytes > MAX_BYTES {
            return Err(StoreError::TooLong { path, bytes });
        }
        fs::read(&path).map(Some).map_err(system("read", &path))
    }

    /// Renames the file if it exists, and returns its new path.
    pub fn set_aside(&self) -> Result<Option<PathBuf>, StoreError> {
        let (path, aside) = (self.path(), self.folder.join(ASIDE));
        match fs::rename(&path, &aside) {
            Ok(()) => self.sync().map(|()| Some(aside)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(system("rename", &path)(error)),
        }
    }

    /// Replaces the state file with `text`.
    pub fn write(&self, text: &[u8]) -> Result<(), StoreError> {
        self.write_by_steps(text, &mut |_| Ok(()))
    }

    /// Like [`Self::write`], but stops immediately if `before` fails for a step.
    pub(super) fn write_by_steps(
        &self,
        text: &[u8],
        before: &mut dyn FnMut(Step) -> io::Result<()>,
    ) -> Result<(), StoreError> {
        let (path, new) = (self.path(), self.folder.join(NEW));
        let (first, rest) = text.split_at(text.len() / 2);
        let mut written = || -> io::Result<()> {
            before(Step::Create)?;
            let mut file = private().truncate(true).open(&new)?;
            before(Step::Write)?;
            file.write_all(first)?;
            before(Step::WriteRest)?;
            file.write_all(rest)?;
            before(Step::Sync)?;
            file.sync_all()?;
            before(Step::Rename)?;
            fs::rename(&new, &path)?;
            before(Step::SyncFolder)
        };
        written().map_err(system("write", &path))?;
        self.sync()?;
        before(Step::Done).map_err(system("write", &path))
    }

    fn sync(&self) -> Result<(), StoreError> {
        File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(system("make durable", &self.folder))
    }
}

/// Returns options for creating files that only the daemon can access.
fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    options
}

fn system(what: &'static str, path: &Path) -> impl Fn(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::System { what, path: path.clone(), source }
}
