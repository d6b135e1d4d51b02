//! Revisions, which let operators detect concurrent changes by others.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

/// A number that is unique among all states of all daemon runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Revision {
    /// Startup time of the daemon, in ns since 1970.
    run: u128,
    /// Number of changes since startup.
    changes: u64,
}

impl Revision {
    /// Returns the first revision of this daemon run.
    #[must_use]
    pub fn first() -> Self {
        let run = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        Self { run, changes: 0 }
    }

    /// Advances to the next revision.
    pub fn next(&mut self) {
        self.changes = self.changes.wrapping_add(1);
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}-{}", self.run, self.changes)
    }
}
