//! State of an earlier process, checked before the executor continues with it.

use std::collections::BTreeMap;
use std::sync::Arc;

use saved_state::Invalid;
use worker_link::Link;

use crate::core::{Core, Limits, WorkerId};
use crate::journal::{Contents, Journal};
use crate::saved::{MAX_OUTSTANDING, SavedCommand};
use crate::window::Window;

/// Checked state of an earlier process.
pub(crate) struct Adoption {
    pub(crate) core: Core,
    pub(crate) contents: Contents,
    pub(crate) window: Arc<Window>,
    pub(crate) journal: Arc<Journal>,
    /// Set if the earlier process wrote the journal.
    pub(crate) is_journal_written: bool,
    pub(crate) links: BTreeMap<WorkerId, Link>,
    pub(crate) generation: u64,
}

impl std::fmt::Debug for Adoption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Adoption").field("contents", &self.contents).finish_non_exhaustive()
    }
}

impl Adoption {
    /// Checks the state that a process left in its journal, or handed over with its links.
    ///
    /// # Errors
    /// Returns an error if a value is invalid.
    pub(crate) fn new(
        contents: Contents,
        limits: Limits,
        window: Arc<Window>,
        journal: Arc<Journal>,
        is_journal_written: bool,
        links: BTreeMap<WorkerId, Link>,
        generation: u64,
    ) -> Result<Self, Invalid> {
        let core = Core::restored(limits, contents.structure.core.clone())?;
        Invalid::unless(contents.outstanding.len() <= MAX_OUTSTANDING, || "too many commands have no response".into())?;
        contents.outstanding.iter().try_for_each(SavedCommand::check)?;
        Ok(Self { core, contents, window, journal, is_journal_written, links, generation })
    }
}
