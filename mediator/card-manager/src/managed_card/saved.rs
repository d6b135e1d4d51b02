//! Saved form of a card for its next owner, and handover of the card.
//!
//! VMs save their own state. The card, its memory, and the host memory are handed over unchanged.

use super::ManagedCard;
use super::standstill::Standstill;
use crate::ManagerError;
use crate::work::SavedWork;
use card_memory::SavedMemory;
use card_memory::segments::SavedSegments;
use card_state::{SavedCard, SavedTenancy, SavedVm};
use saved_state::{Known, ReadError, SavedState, WriteError, Writer, first_version};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Owner number of a card's parts in a file.
const CARD: u32 = 0;

/// Saved form of the card manager's own state. Excludes the parts that lower layers save.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedOwner {
    /// Chunk size in bytes, checked against the settings before the rest is parsed.
    pub(super) chunk_bytes: u64,
    /// VRAM address and size in bytes of the chunks that contain the fixed structures.
    pub(super) own: (u64, u64),
    /// Size of a PGRAPH context in bytes, as reported by the firmware at startup.
    pub(super) context_bytes: u32,
    /// Time since the card was taken over, on the host's clock, in ns.
    pub(super) host_ns: u64,
    pub(super) memory: SavedMemory,
    pub(super) work: SavedWork,
}

first_version!(SavedOwner, "owner");

/// Saved form of a card and its VMs, excluding each VM's own state.
#[derive(Debug)]
pub struct SavedHost {
    /// Parts from lower layers, which include the VMs.
    pub card: SavedCard,
    /// The card manager's part.
    pub(super) owner: SavedOwner,
    /// Segments shared between VMs, if any. A daemon that does not support segments can take over a card without any.
    pub(super) segments: Option<SavedSegments>,
}

impl SavedHost {
    /// Returns the parts of the file, each with the versions that this code can read.
    #[must_use]
    pub fn known() -> Vec<Known> {
        let mut known = SavedCard::known();
        known.extend([Known::for_part::<SavedOwner>(), Known::for_part::<SavedSegments>()]);
        known
    }

    /// Appends all parts to a file.
    ///
    /// # Errors
    /// Returns a [`WriteError`] if the parts cannot be written.
    pub fn write(&self, file: &mut Writer) -> Result<(), WriteError> {
        let Self { card, owner, segments } = self;
        card.write(file)?;
        file.put(CARD, owner)?;
        segments.as_ref().map_or(Ok(()), |segments| file.put(CARD, segments))
    }

    /// Reads all parts from a file.
    ///
    /// # Errors
    /// Returns a [`ReadError`] if the parts cannot be read.
    pub fn read(file: &mut SavedState<'_>) -> Result<Self, ReadError> {
        let (mut card, owner) = (SavedCard::read(file)?, file.take(CARD)?);
        let any = !file.owners::<SavedSegments>().is_empty();
        let segments: Option<SavedSegments> = if any { Some(file.take(CARD)?) } else { None };
        card.segments = segments.as_ref().map(SavedSegments::pools).unwrap_or_default();
        Ok(Self { card, owner, segments })
    }
}

impl ManagedCard {
    /// Checks that another process could take over the card and its memory. Must be called before the card is quiesced.
    ///
    /// # Errors
    /// Returns an error with the reason if a part cannot be handed over.
    pub fn check_movable(&self) -> Result<(), ManagerError> {
        let state = self.lock();
        if !state.memory.is_shared() {
            return Err(ManagerError::Stays("host memory for its chunks is not shared"));
        }
        if !state.removed.is_empty() {
            return Err(ManagerError::Stays("a channel of a removed VM has not left it"));
        }
        if state.vram().pinned.borrows() {
            return Err(ManagerError::Unsettled("it still uses memory of the card that a VM has left"));
        }
        Ok(())
    }

    /// Returns the file with the host memory for chunks, to be passed to another process, or `None` if the card has no
    /// such memory.
    #[must_use]
    pub fn host_memory(&self) -> Option<Arc<File>> {
        self.lock().memory.host_file().map(Arc::clone)
    }
}

impl Standstill<'_> {
    /// Saves the mediator's state of the card, including its VMs, which `vms` saves. Must be called without any lock
    /// held.
    ///
    /// # Errors
    /// Returns [`ManagerError::Unsettled`] if events for a VM are still in flight, and the errors of
    /// [`ManagedCard::check_movable`].
    pub fn save(&self, vms: impl FnOnce() -> Result<Vec<SavedVm>, ManagerError>) -> Result<SavedHost, ManagerError> {
        self.host.check_movable()?;
        self.host.tell_ended();
        // Saving VMs handles their pending events, which may change the card's state.
        let vms = vms()?;
        let mut state = self.host.lock();
        // The next owner expects all channels to have the contexts that their guests have set.
        let (vram, channels) = state.parts();
        channels.restore_graphics(&mut vram.memory);
        let residency = state.memory.divider().residency();
        let card = SavedCard {
            chunks: state.vram().chunks.save(),
            balancer: residency.balancer().save(),
            tenancy: SavedTenancy::new(state.work.schedule().scheduler(), residency),
            channels: state.work.channels().save(),
            pool: state.memory.own().save(),
            // Segments are saved separately.
            segments: Vec::new(),
            vms,
        };
        let owner = SavedOwner {
            chunk_bytes: state.vram().chunks.chunk_bytes(),
            own: (self.host.own.0.0, self.host.own.1),
            context_bytes: self.host.info.context_bytes,
            host_ns: state.now_ns(),
            memory: state.memory.save(),
            work: state.work.save()?,
        };
        Ok(SavedHost { card, owner, segments: state.memory.save_segments() })
    }

    /// Hands the card over to the next owner of the saved state. This process no longer accesses the card, not even on
    /// drop. Later calls that need the card's state fail as for a failed card.
    pub fn give_away(self) {
        let host = self.host;
        host.lock().vram_mut().pinned.hand_over();
        host.owned.store(false, Ordering::Release);
        host.stop.store(true, Ordering::Release);
        host.fail("it was handed over");
        // Wait until the card's lock is released. Later holders see the failure.
        drop(host.state.lock());
        // Threads that wait to move memory see the failure once the guard is dropped.
        drop(self);
        host.end_threads();
    }
}
