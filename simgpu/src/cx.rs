//! The context of the register blocks and the scheduler: the entire card except for the blocks.

use crate::aperture::Apertures;
use crate::clock::{Clock, TimeModel};
use crate::faults::Faults;
use crate::fifo::userd::Doorbells;
use crate::storage::Storage;
use nvspec::chip::Chip;
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use simgpu_memory::memory::Memory;
use simgpu_memory::mmu::Mmu;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The parts of the card outside the register blocks.
#[derive(Debug)]
pub(crate) struct Cx {
    pub(crate) chip: &'static Chip,
    pub(crate) storage: Storage,
    pub(crate) memory: Arc<Memory>,
    pub(crate) mmu: Arc<Mmu>,
    pub(crate) apertures: Arc<Apertures>,
    pub(crate) doorbells: Arc<Doorbells>,
    pub(crate) clock: Clock,
    pub(crate) time: Option<TimeModel>,
    pub(crate) faults: Faults,
    pub(crate) undeclared: Undeclared,
    pub(crate) copied: Copied,
    /// Registers and values from the images of loaded contexts, which FECS must write.
    pub(crate) context_writes: Vec<(u32, u32)>,
}

/// Copies and uploads by all engines since this process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Number of bytes written.
    pub bytes: u64,
    /// Host time spent on copying, in ns. The engines of a real card do not use host CPU time.
    pub host_ns: u64,
}

/// Accesses to undeclared offsets of BAR0.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Undeclared {
    total: u64,
    /// Number of accesses per offset.
    seen: BTreeMap<u32, u64>,
}

impl Undeclared {
    /// Maximum number of distinct offsets recorded.
    const MAX: usize = 4096;

    /// Validates saved data.
    pub(crate) fn check(&self) -> Result<(), Invalid> {
        let Self { total, seen } = self;
        let counts = seen.values().chain([total]).all(|count| *count <= 1 << 62);
        Invalid::unless(seen.len() <= Self::MAX && counts, || "too many distinct undeclared registers".into())
    }

    pub(crate) fn note(&mut self, offset: u32, write: Option<u32>) {
        self.total += 1;
        if let Some(count) = self.seen.get_mut(&offset) {
            *count += 1;
        } else if self.seen.len() < Self::MAX {
            self.seen.insert(offset, 1);
            match write {
                Some(value) => tracing::debug!("undeclared register {offset:#08x} was set to {value:#010x}"),
                None => tracing::debug!("undeclared register {offset:#08x} was read"),
            }
        }
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn offsets(&self) -> Vec<(u32, u64)> {
        self.seen.iter().map(|(offset, count)| (*offset, *count)).collect()
    }
}
