//! Recordings of a card scheduler's events and decisions, in memory, at an operator's request.

use super::Work;
use sched::trace::{MemoryMove, Recording};
use sched::{Nanos, TenantId};
use std::collections::BTreeMap;

impl Work {
    /// Starts to record the scheduler's events and decisions, up to `limit` bytes. `names` contains the VMs' names.
    /// Returns `false` if a recording is already running or the scheduler's current state does not fit.
    pub(crate) fn start_record(&mut self, at: Nanos, names: &BTreeMap<TenantId, String>, limit: usize) -> bool {
        if self.schedule.recording.is_some() {
            return false;
        }
        let names = names.iter().map(|(vm, name)| (*vm, name.clone())).collect();
        self.schedule.recording = Recording::new(self.schedule.scheduler(), false, at, &names, limit).ok();
        self.schedule.recording.is_some()
    }

    /// Adds a memory move of a VM to the recording.
    pub(crate) fn note_move(&mut self, moved: MemoryMove) {
        if let Some(recording) = &mut self.schedule.recording {
            recording.note_move(moved);
        }
    }

    /// Ends the recording and returns it, or `None` if none is running.
    pub(crate) fn end_record(&mut self) -> Option<Vec<u8>> {
        self.schedule.recording.take().map(Recording::end)
    }
}
