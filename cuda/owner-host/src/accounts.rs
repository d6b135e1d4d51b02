//! The file with the tenants' accounts for the next owner.

use crate::journal::replace;
use std::collections::hash_map::RandomState;
use std::fmt::Display;
use std::hash::BuildHasher as _;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Minimum time between two writes without a new strike, in ns.
const INTERVAL_NS: u64 = 1_000_000_000;
/// Maximum number of bytes to read from the file. The accounts of a thousand tenants take a few MiB.
const MAX_BYTES: u64 = 64 << 20;

/// The file with the accounts. It is written at most once per second, and immediately after a strike, so that a tenant
/// cannot lose its strikes by crashing the owner.
#[derive(Debug)]
pub struct AccountsFile {
    path: PathBuf,
    written_at: Option<u64>,
    /// Number of strikes and the used time in ns, as last written to the file.
    written: (u64, u64),
}

impl AccountsFile {
    /// Returns the accounts file that belongs to the journal at this path.
    #[must_use]
    pub fn beside(journal: &Path) -> Self {
        Self { path: journal.with_extension("accounts"), written_at: None, written: (0, 0) }
    }

    /// Reads the accounts of the previous owner, if the file exists.
    #[must_use]
    pub fn read(&self) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        let file = std::fs::File::open(&self.path).ok()?;
        file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// Writes the accounts if they have changed and a write is due. `state` contains the number of strikes and the used
    /// time in ns.
    pub fn keep<E: Display>(&mut self, now: u64, state: (u64, u64), save: impl FnOnce([u8; 16]) -> Result<Vec<u8>, E>) {
        let is_recent = self.written_at.is_some_and(|at| now.saturating_sub(at) < INTERVAL_NS);
        let is_struck = state.0 != self.written.0;
        if is_struck || (state != self.written && !is_recent) {
            self.write(now, state, save);
        }
    }

    /// Writes the accounts.
    pub fn write<E: Display>(
        &mut self,
        now: u64,
        state: (u64, u64),
        save: impl FnOnce([u8; 16]) -> Result<Vec<u8>, E>,
    ) {
        (self.written_at, self.written) = (Some(now), state);
        // Use a random identity, so that parts of different files cannot be combined.
        let identity = u128::from(RandomState::new().hash_one(0)) << 64 | u128::from(RandomState::new().hash_one(0));
        let written = save(identity.to_le_bytes()).map_err(|error| error.to_string()).and_then(|bytes| {
            let new = self.path.with_extension("accounts-new");
            replace(&new, &self.path, &bytes).map_err(|error| error.to_string())
        });
        if let Err(error) = written {
            tracing::warn!(
                path = %self.path.display(),
                error,
                "cannot write the tenants' accounts: the next owner of the card continues with earlier ones"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::convert::Infallible;

    #[test]
    fn accounts_are_written_at_intervals_and_after_strikes() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut file = AccountsFile::beside(&folder.path().join("gpu.programs"));
        assert_eq!(file.read(), None);
        let writes = Cell::new(0u8);
        let keep = |file: &mut AccountsFile, now, state| {
            file.keep(now, state, |_| {
                writes.set(writes.get() + 1);
                Ok::<_, Infallible>(vec![writes.get()])
            });
            writes.get()
        };
        assert_eq!(keep(&mut file, 5, (0, 0)), 0, "nothing was used");
        assert_eq!(keep(&mut file, 6, (0, 1)), 1);
        assert_eq!(keep(&mut file, 7, (0, 2)), 1, "the last write is recent");
        assert_eq!(keep(&mut file, 8, (1, 2)), 2, "a strike");
        assert_eq!(keep(&mut file, 8 + INTERVAL_NS, (1, 2)), 2, "nothing has changed");
        assert_eq!(keep(&mut file, 9 + INTERVAL_NS, (1, 3)), 3);
        assert_eq!(AccountsFile::beside(&folder.path().join("gpu.programs")).read(), Some(vec![3]));
    }

    #[test]
    fn failed_write_keeps_the_previous_accounts() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut file = AccountsFile::beside(&folder.path().join("gpu.programs"));
        file.write(0, (0, 0), |_| Ok::<_, Infallible>(vec![1]));
        file.write(1, (0, 1), |_| Err("too many"));
        assert_eq!(file.read(), Some(vec![1]));
    }
}
