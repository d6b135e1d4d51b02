//! Determines the work that a flush does immediately, and the work that it defers.

use std::str::FromStr;

/// Behavior of guest TLB flushes. Some modes exist only for measurements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Each flush reads all tables, and translates and writes all entries.
    Naive,
    /// A flush only marks the space, unless work of the space is running. Before the next work runs, the space is
    /// updated as in [`Self::Naive`]. Permissions that the guest has removed persist until then, so this mode is only
    /// for comparison.
    Lazy,
    /// Each flush reads only table pages that may have changed, and writes only changed entries.
    Incremental,
    /// Like [`Self::Incremental`], except that table pages that can only gain permissions are read before the next work
    /// runs.
    #[default]
    LazyAdd,
}

/// Selects the pages that a synchronization reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Pages that may have changed and can lose permissions.
    Losing,
    /// All pages that may have changed.
    Pending,
    /// All pages. All entries are translated and written again.
    Everything,
}

/// The name does not denote a mode.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a shadowing mode; the modes are naive, lazy, incremental and lazy-add")]
pub struct UnknownMode(String);

impl Mode {
    /// All modes.
    pub const ALL: [Self; 4] = [Self::Naive, Self::Lazy, Self::Incremental, Self::LazyAdd];

    /// Returns the mode's name in configurations and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Lazy => "lazy",
            Self::Incremental => "incremental",
            Self::LazyAdd => "lazy-add",
        }
    }
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mode {
    type Err = UnknownMode;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|mode| mode.name() == name).ok_or_else(|| UnknownMode(name.to_owned()))
    }
}
