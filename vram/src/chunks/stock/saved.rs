//! Saved form of the units of card or host memory.

use super::Stock;
use crate::TenantId;
use crate::chunks::saved::COUNT_MAX;
use crate::chunks::state::{ChunkState, MoveId};
use saved_state::{Invalid, ascend};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// All units of card or host memory, indexed by number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedStock {
    pub(crate) states: Vec<SavedPiece>,
    /// Units to scrub, in queue order.
    pub(crate) to_scrub: Vec<u32>,
    /// Numbers of the units to quarantine when they lose their owner or their scrub ends, in ascending order.
    pub(crate) condemned: Vec<u32>,
    pub(crate) scrubbed: u64,
    pub(crate) limit: u32,
}

/// State of a unit. Scrubs that were interrupted must be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SavedPiece {
    Free,
    NeedsScrub,
    Quarantined,
    Mediator,
    Arriving(u64),
    Vm { vm: u32, index: u32 },
}

impl Stock {
    pub(in crate::chunks) fn save(&self) -> SavedStock {
        let Self { states, free: _, to_scrub, scrubbing: _, condemned, quarantined: _, scrubbed, limit } = self;
        let being_scrubbed = (0u32..).zip(states).filter(|(_, state)| **state == ChunkState::Scrubbing);
        SavedStock {
            states: states.iter().map(|state| SavedPiece::from(*state)).collect(),
            // Units that were being scrubbed are first in the queue.
            to_scrub: being_scrubbed.map(|(number, _)| number).chain(to_scrub.iter().copied()).collect(),
            condemned: condemned.iter().copied().collect(),
            scrubbed: *scrubbed,
            limit: *limit,
        }
    }

    pub(in crate::chunks) fn restored(saved: SavedStock) -> Result<Self, Invalid> {
        let SavedStock { states, to_scrub, condemned, scrubbed, limit } = saved;
        let states: Vec<ChunkState> = states.into_iter().map(ChunkState::from).collect();
        let end = u32::try_from(states.len()).map_err(|_| Invalid::new("a memory has more units than unit numbers"))?;
        let state = |number: u32| states.get(number as usize).copied();
        let numbered = |wanted: ChunkState| {
            let of = (0u32..).zip(&states).filter(move |(_, state)| **state == wanted);
            of.map(|(number, _)| number).collect::<BTreeSet<_>>()
        };
        let waiting: BTreeSet<u32> = to_scrub.iter().copied().collect();
        let all_wait = waiting.len() == to_scrub.len() && waiting == numbered(ChunkState::NeedsScrub);
        Invalid::unless(all_wait, || "the queued units differ from the dirty units".into())?;
        let is_condemned = |number: &u32| state(*number) != Some(ChunkState::Quarantined);
        Invalid::unless(ascend(&condemned) && condemned.iter().all(is_condemned), || {
            "the condemned units are already quarantined, or not in order".into()
        })?;
        Invalid::unless(scrubbed <= COUNT_MAX, || "the number of scrubbed units is too large".into())?;
        let free = numbered(ChunkState::Free);
        let quarantined = numbered(ChunkState::Quarantined).len() as u32;
        let mut stock = Self {
            states,
            free,
            to_scrub: to_scrub.into(),
            scrubbing: 0,
            condemned: condemned.into_iter().collect(),
            quarantined,
            scrubbed,
            limit,
        };
        Invalid::unless(stock.end() == end, || "a memory has more units than unit numbers".into())?;
        stock.trim();
        Ok(stock)
    }

    /// Returns all tracked units, with their states.
    pub(in crate::chunks) fn states(&self) -> impl Iterator<Item = (u32, ChunkState)> + '_ {
        (0u32..).zip(self.states.iter().copied())
    }
}

impl From<ChunkState> for SavedPiece {
    fn from(state: ChunkState) -> Self {
        match state {
            ChunkState::Free => Self::Free,
            ChunkState::NeedsScrub | ChunkState::Scrubbing => Self::NeedsScrub,
            ChunkState::Quarantined => Self::Quarantined,
            ChunkState::Mediator => Self::Mediator,
            ChunkState::Arriving(MoveId(id)) => Self::Arriving(id),
            ChunkState::Vm { vm, index } => Self::Vm { vm: vm.0, index },
        }
    }
}

impl From<SavedPiece> for ChunkState {
    fn from(saved: SavedPiece) -> Self {
        match saved {
            SavedPiece::Free => Self::Free,
            SavedPiece::NeedsScrub => Self::NeedsScrub,
            SavedPiece::Quarantined => Self::Quarantined,
            SavedPiece::Mediator => Self::Mediator,
            SavedPiece::Arriving(id) => Self::Arriving(MoveId(id)),
            SavedPiece::Vm { vm, index } => Self::Vm { vm: TenantId(vm), index },
        }
    }
}
