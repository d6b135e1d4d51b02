//! Register blocks of a vGPU, in address order. Each module contains the state of a block, `read`, `write`, `reset`,
//! and tests.
//!
//! Blocks are independent of each other. They affect other parts only through `Cx`. The interrupt line reads the level
//! of each block.

pub mod board;
pub mod falcon;
pub mod graph;
pub(crate) mod hang;
pub mod memory;
pub mod pbdma;
pub mod pbus;
pub mod pfifo;
pub mod pmc;
pub mod ptimer;

use crate::backend::{Backend, Place};
use crate::config::VGpuConfig;
use crate::denied::{Denials, Reason, Site};
use crate::storage::Storage;
use nvspec::RegInfo;
use nvspec::addr::Target;
use nvspec::instance::INSTANCE_BYTES;
use saved_state::Invalid;
use serde::{Deserialize, Serialize};

/// Parts of a vGPU that a block can use during an access.
pub(crate) struct Cx<'a> {
    pub backend: &'a mut dyn Backend,
    pub storage: &'a mut Storage,
    pub denials: &'a mut Denials,
    pub config: &'a VGpuConfig,
}

/// The register being accessed.
#[derive(Clone, Copy)]
pub(crate) struct At {
    /// Byte offset in BAR0.
    pub offset: u32,
    /// Index in the register array.
    pub index: u32,
    pub info: &'static RegInfo,
}

impl At {
    /// Returns the index in the register array.
    pub fn index(self) -> usize {
        self.index as usize
    }
}

impl Cx<'_> {
    pub fn plain_read(&self, at: At) -> u32 {
        self.storage.read(at.info, at.offset)
    }

    pub fn plain_write(&mut self, at: At, value: u32) {
        self.storage.write(at.info, at.offset, value);
    }

    pub fn deny_write(&mut self, at: At, reason: Reason, value: u32) {
        self.denials.write(Site::Register(at.offset), reason, u64::from(value));
    }

    /// Decodes the address of a structure of `bytes` bytes. Structures in VRAM must be within the guest's VRAM. The
    /// backend checks structures in RAM. Counts an invalid encoding or an address outside VRAM as a denied write of
    /// `written` at `at`.
    pub fn place(&mut self, at: At, written: u32, target: u32, address: u64, bytes: u64) -> Option<Place> {
        let Some(place) = Place::new(Target::from_bits(target), address) else {
            self.deny_write(at, Reason::Target, written);
            return None;
        };
        if let Place::Vram(start) = place {
            let inside = start.checked_add(bytes).is_some_and(|end| end.0 <= self.config.vram_bytes);
            if !inside {
                self.deny_write(at, Reason::OutsideVram, written);
                return None;
            }
        }
        Some(place)
    }

    /// Calls [`Cx::place`] for an instance block whose address is in units of 4 KiB.
    pub fn instance(&mut self, at: At, written: u32, target: u32, page: u32) -> Option<Place> {
        self.place(at, written, target, page_address(page), INSTANCE_BYTES)
    }
}

/// Converts a page number to a byte address.
pub(crate) fn page_address(page: u32) -> u64 {
    u64::from(page) << 12
}

/// Queue of unacknowledged events in addition to the visible one. If the queue is full, further events are dropped and
/// counted. Real hardware has a single set of registers, and drops even the second event.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Backlog<T> {
    waiting: std::collections::VecDeque<T>,
    pub dropped: u64,
}

impl<T> Default for Backlog<T> {
    fn default() -> Self {
        Self { waiting: std::collections::VecDeque::new(), dropped: 0 }
    }
}

impl<T> Backlog<T> {
    /// Maximum number of queued events: one for each channel.
    const MAX_WAITING: usize = nvspec::fifo::CHANNELS as usize;

    pub fn push(&mut self, event: T) {
        if self.waiting.len() < Self::MAX_WAITING {
            self.waiting.push_back(event);
        } else {
            self.dropped = self.dropped.saturating_add(1);
        }
    }

    /// Removes and returns the oldest event for which `wanted` returns true.
    pub fn take(&mut self, wanted: impl Fn(&T) -> bool) -> Option<T> {
        let at = self.waiting.iter().position(wanted)?;
        self.waiting.remove(at)
    }

    /// Validates a restored queue. Its length must be within the limit, and `sound` must return true for every event.
    pub fn check(&self, sound: impl Fn(&T) -> bool) -> Result<(), Invalid> {
        let Self { waiting, dropped: _ } = self;
        Invalid::unless(waiting.len() <= Self::MAX_WAITING && waiting.iter().all(sound), || {
            "too many or invalid events are queued".into()
        })
    }

    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn clear(&mut self) {
        self.waiting.clear();
    }
}
