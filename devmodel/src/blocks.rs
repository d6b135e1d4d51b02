//! The register blocks of a vGPU, in address order. Each module contains a block's state, `read`, `write`, `reset`, and
//! tests.
//!
//! Blocks never refer to each other. Effects outside a block go through `Cx`, and the interrupt line queries each
//! block's level.

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

/// The parts of a vGPU that a block may use while handling an access.
pub(crate) struct Cx<'a> {
    pub backend: &'a mut dyn Backend,
    pub storage: &'a mut Storage,
    pub denials: &'a mut Denials,
    pub config: &'a VGpuConfig,
}

/// The register being accessed.
#[derive(Clone, Copy)]
pub(crate) struct At {
    /// BAR0 byte offset.
    pub offset: u32,
    /// Array index of the register.
    pub index: u32,
    pub info: &'static RegInfo,
}

impl At {
    /// Returns the register's array index.
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

    /// Decodes the address of a structure of `bytes` bytes. A structure in VRAM must be within the guest's VRAM; the
    /// backend checks structures in RAM. An invalid encoding is recorded as a denial at `at`.
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

    /// Same as [`Cx::place`], for an instance block whose address is in units of 4 KiB.
    pub fn instance(&mut self, at: At, written: u32, target: u32, page: u32) -> Option<Place> {
        self.place(at, written, target, page_address(page), INSTANCE_BYTES)
    }
}

/// Converts a page number to a byte address.
pub(crate) fn page_address(page: u32) -> u64 {
    u64::from(page) << 12
}

/// Events that the guest has not acknowledged, in addition to the one that the registers show. If the backlog is full,
/// further events are dropped and counted, just as hardware with a single set of registers drops a second event.
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
    /// Maximum number of queued events: one per channel.
    const MAX_WAITING: usize = nvspec::fifo::CHANNELS as usize;

    pub fn push(&mut self, event: T) {
        if self.waiting.len() < Self::MAX_WAITING {
            self.waiting.push_back(event);
        } else {
            self.dropped = self.dropped.saturating_add(1);
        }
    }

    /// Removes the oldest event for which `wanted` returns true.
    pub fn take(&mut self, wanted: impl Fn(&T) -> bool) -> Option<T> {
        let at = self.waiting.iter().position(wanted)?;
        self.waiting.remove(at)
    }

    /// Validates saved data: the number of events must be within the limit, and `sound` must accept each event.
    pub fn check(&self, sound: impl Fn(&T) -> bool) -> Result<(), Invalid> {
        let Self { waiting, dropped: _ } = self;
        Invalid::unless(waiting.len() <= Self::MAX_WAITING && waiting.iter().all(sound), || {
            "invalid events are queued".into()
        })
    }

    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn clear(&mut self) {
        self.waiting.clear();
    }
}
