//! Saved form of the hints about a VM's chunks.

use super::Hints;
use saved_state::Invalid;
use serde::{Deserialize, Serialize};

/// Saved hints about a VM's chunks. Each kind of hint has one entry per chunk, or no entries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedHints {
    pub(crate) priorities: Vec<u8>,
    pub(crate) accesses: Vec<u32>,
    pub(crate) referenced: Vec<u64>,
    pub(crate) hand: u32,
}

impl Hints {
    pub(crate) fn save(&self) -> SavedHints {
        // The residency history is not saved, because a few moves are sufficient to rebuild it.
        let Self { chunks: _, priorities, accesses, referenced, hand, residency_history: _ } = self;
        let (priorities, accesses, referenced) = (priorities.clone(), accesses.clone(), referenced.clone());
        SavedHints { priorities, accesses, referenced, hand: *hand }
    }

    /// Restores the hints about the chunks of a VM with `chunks` chunks.
    pub(crate) fn restored(saved: SavedHints, chunks: u32) -> Result<Self, Invalid> {
        let SavedHints { priorities, accesses, referenced, hand } = saved;
        let fits = |len: usize, wanted: usize| len == 0 || len == wanted;
        let all = chunks as usize;
        let sound =
            fits(priorities.len(), all) && fits(accesses.len(), all) && fits(referenced.len(), all.div_ceil(64));
        Invalid::unless(sound, || format!("the information about {chunks} chunks has another number of chunks"))?;
        Ok(Self { priorities, accesses, referenced, hand, ..Self::new(chunks) })
    }
}
